# SPDX-License-Identifier: Apache-2.0
"""Decayed pair products of a chunk against the sums written out, pair by pair, in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from seqmix.mixers import _pairwise as pairwise
from tests.mixers.parity import EXTREME_BAR, FLOAT32_BAR, quick_jit, relative_error

BATCH, HEADS, QUERIES, WIDTH = 2, 2, 3, 5


def draw(chunk, *, extreme=False):
    """q [B, 1, x, C, K], k [B, 1, C, K] shared by heads; log-decays [B, H, C, K]."""
    rng = np.random.default_rng(chunk)
    q = rng.normal(size=(BATCH, 1, QUERIES, chunk, WIDTH))
    k = rng.normal(size=(BATCH, 1, chunk, WIDTH))
    gate = -np.exp(rng.normal(size=(BATCH, HEADS, chunk, WIDTH)) - 1)
    if extreme:
        kind = rng.random(gate.shape)
        gate = np.where(kind < 0.25, -(10.0 ** rng.uniform(0, 4, gate.shape)), gate)
        gate = np.where((kind > 0.25) & (kind < 0.4), 0, gate)
        gate = np.where((kind > 0.5) & (kind < 0.55), -np.inf, gate)
    return q, k, np.float64(np.float32(gate))


def span(decay, start, stop):
    """Product of the decays of tokens start .. stop - 1, [B, H, K]."""
    return np.prod(decay[:, :, start:stop], axis=2)


def written_out(q, k, decay, weights, *, read_after):
    """Scores, and the gradients of sum(weights * scores) with respect to q, k and log-decays."""
    chunk = q.shape[-2]
    scores = np.zeros((BATCH, HEADS, QUERIES, chunk, chunk))
    dq, dk = np.zeros_like(q), np.zeros_like(k)
    d_log = np.zeros_like(decay)
    for i in range(chunk):
        last = i + read_after
        for j in range(i):
            product = span(decay, j + 1, last)
            pair = q[..., i, :] * (k[..., j, :] * product)[:, :, None]
            scores[..., i, j] = pair.sum(-1)
            weight = weights[..., i, j][..., None]
            d_log[:, :, j + 1 : last] += (weight * pair).sum(2)[:, :, None]
            dq[..., i, :] += (weight * (k[..., j, :] * product)[:, :, None]).sum(1, keepdims=True)
            dk[..., j, :] += (weight * q[..., i, :] * product[:, :, None]).sum((1, 2))[:, None]
    return scores, dq, dk, d_log


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("read_after", [True, False])
@pytest.mark.parametrize("chunk", [1, 2, 16])
def test_scores_and_gradients(chunk, read_after, extreme):
    q, k, gate = draw(chunk, extreme=extreme)
    weights = np.random.default_rng(1).normal(size=(BATCH, HEADS, QUERIES, chunk, chunk))
    want = written_out(q, k, np.exp(gate), weights, read_after=read_after)

    @quick_jit
    def run(q, k, gate, weights):
        decay = jnp.exp(gate)
        cut = pairwise.spans(decay, decay if read_after else jnp.ones_like(decay))
        dq, dk, terms = pairwise.gradients(weights, q, k, cut)
        zero = jnp.zeros_like(decay)
        d_log = pairwise.log_decay_gradient(
            terms, zero, zero, zero[..., 0, :], read_after=read_after
        )
        scores = jnp.broadcast_to(pairwise.scores(q, k, cut), weights.shape)
        return scores, dq.sum(1, keepdims=True), dk.sum(1, keepdims=True), d_log

    got = run(*(jnp.asarray(x, jnp.float32) for x in (q, k, gate, weights)))
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) < (EXTREME_BAR if extreme else FLOAT32_BAR)


@pytest.mark.parametrize("read_after", [True, False])
def test_spans_to_the_edges_and_their_gradient(read_after):
    _, _, gate = draw(8)
    decay = np.exp(gate)
    cut = pairwise.spans(*(jnp.asarray(x) for x in (decay, decay if read_after else decay**0)))
    for t in range(8):
        np.testing.assert_allclose(cut.entry[..., t, :], span(decay, 0, t + read_after), 1e-6)
        np.testing.assert_allclose(cut.exit[..., t, :], span(decay, t + 1, 8), 1e-6)
    np.testing.assert_allclose(cut.through, span(decay, 0, 8), 1e-6)
    rng = np.random.default_rng(0)
    reads, writes = rng.normal(size=(2, *gate.shape))
    passing = rng.normal(size=(BATCH, HEADS, WIDTH))
    none = tuple(jnp.zeros_like(x) for x in cut.reads)
    terms = pairwise.Terms(none, none)
    got = pairwise.log_decay_gradient(terms, reads, writes, passing, read_after=read_after)
    for t in range(8):
        want = reads[..., t + (not read_after) :, :].sum(2) + writes[..., :t, :].sum(2) + passing
        assert relative_error(got[..., t, :], want) < FLOAT32_BAR


def test_own_products_stand_on_the_diagonal():
    q, k, gate = (jnp.asarray(x, jnp.float32) for x in draw(4))
    cut = pairwise.spans(jnp.exp(gate), jnp.exp(gate))
    own = jnp.sum(q * k[..., None, :, :], axis=-1)
    strict, full = pairwise.scores(q, k, cut), pairwise.scores(q, k, cut, own=own)
    np.testing.assert_array_equal(full, strict + own[..., None] * jnp.eye(4))
    assert not np.any(np.triu(strict))


def test_a_hard_reset_hides_everything_before_it():
    """The decay 0 of a document's first token: what stands before it is multiplied by nothing."""
    q, k, gate = (jnp.asarray(x, jnp.float32) for x in draw(16))
    decay = jnp.exp(gate).at[:, :, 5].set(0)
    for read in (decay, jnp.ones_like(decay).at[:, :, 5].set(0)):
        cut = pairwise.spans(decay, read)
        scores = np.asarray(pairwise.scores(q, k, cut))
        assert not np.any(scores[..., 5:, :5]) and np.all(scores[..., 6:, 5] != 0)
        assert not np.any(cut.entry[:, :, 5:]) and not np.any(cut.exit[:, :, :5])


def test_chunk_sizes_round_up_to_powers_of_two():
    sizes = [pairwise.chunk_tokens(n, 64) for n in (None, 1, 2, 3, 24, 64, 65)]
    assert sizes == [64, 1, 2, 4, 32, 64, 128]
