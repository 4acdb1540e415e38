# SPDX-License-Identifier: Apache-2.0
"""What the shared suite does not ask of the TPU kernels with one decay per key channel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqmix.mixers import _pairwise as pairwise
from seqmix_kernels import compile_for
from seqmix_kernels.options import Heads, Options
from seqmix_kernels.tpu import _spans, _vector, vector_decay, vector_delta
from tests.mixers.cases import MIXERS, Shape, draw, draw_segments, draw_state, representable, slow
from tests.mixers.parity import (
    BFLOAT16_BAR,
    EXTREME_BAR,
    FLOAT32_BAR,
    assert_within,
    cast,
    draw_cotangents,
    evaluate,
    quick_jit,
    reference,
    relative_error,
)

FORM = "pallas@tpu"


def _chunked_tile(gate, q, k, d_scores, reads, passing):
    q, d_scores = (x.reshape(len(k), -1, k.shape[1], x.shape[2]) for x in (q, d_scores))
    decay = jnp.exp(gate)
    cut = pairwise.spans(decay, decay)
    scores = pairwise.scores(q, k, cut, own=jnp.sum(q * k[:, None], axis=-1))
    dq, dk, terms = pairwise.gradients(d_scores, q, k, cut)
    d_gate = pairwise.log_decay_gradient(terms, reads, 2 * reads, passing[:, 0], read_after=True)
    return scores, dq, dk, d_gate, cut.entry, cut.exit, cut.through[:, None]


@pytest.mark.parametrize("chunk", [64, *slow(16, 128)])
def test_pairs_and_their_gradients_as_in_the_chunked_form(chunk):
    """Two query sides of two states, with gates from 0 to -1e4 and exact resets."""
    rng = np.random.default_rng(0)
    n, m, width = 2, 2, 8
    gate = -(10.0 ** rng.uniform(-6, 4, (n, chunk, width)))
    gate = np.where(rng.random(gate.shape) < 0.1, -1e5, gate)
    gate = np.where(rng.random(gate.shape) < 0.2, 0.0, gate)
    k, reads = rng.normal(size=(2, n, chunk, width))
    q = rng.normal(size=(n, m * chunk, width))
    d_scores = rng.normal(size=(n, m * chunk, chunk))
    passing = rng.normal(size=(n, 1, width))

    def tile(gate, q, k, d_scores, reads, passing):
        cut = _spans.spans(gate, gate)
        own = jnp.sum(q * _spans.stacked(k, q), axis=2, keepdims=True)
        scores = _spans.scores(q, k, cut, own, jnp.float32)
        dq, dk, terms = _spans.gradients(d_scores, q, k, cut, jnp.float32)
        d_gate = _spans.log_decay_gradient(terms, reads, 2 * reads, passing, read_after=True)
        return scores, dq, dk, d_gate, cut.entry, cut.exit, cut.through

    arrays = [jnp.asarray(x, jnp.float32) for x in (gate, q, k, d_scores, reads, passing)]
    with compile_for("tpu", interpret="plain"):
        got = quick_jit(tile)(*arrays)

    with jax.enable_x64(True):
        want = quick_jit(_chunked_tile)(*(jnp.asarray(x, jnp.float64) for x in arrays))
    for x, y in zip(got, want, strict=True):
        assert relative_error(np.reshape(x, y.shape), y) < FLOAT32_BAR


def test_inverses_of_repeated_and_of_random_keys():
    rng = np.random.default_rng(0)
    invert = quick_jit(_spans.unit_lower_inverse)
    for size in (16, 64, 128):
        keys = rng.normal(size=(size, 8))
        keys /= np.linalg.norm(keys, axis=1, keepdims=True)
        ones = np.ones((size, size))
        lower = np.tril(np.stack([ones, 2 * ones, 0.5 * ones, keys @ keys.T]), -1)
        with compile_for("tpu", interpret="plain"):
            got = np.asarray(invert(jnp.asarray(lower, jnp.float32)))
        for mine, x in zip(got, lower, strict=True):
            assert relative_error(mine, np.linalg.inv(np.eye(size) + x)) < 1e-6


@pytest.mark.parametrize("beta", [2.0, *slow(1.0)])
def test_identical_keys(beta):
    """As for the chunked form, whose bar with beta = 2 is that of extreme inputs too."""
    shape, mixer = Shape(batch=1, time=130, heads=(1, 1, 1), key=16, value=16), MIXERS["kda"]
    arrays = draw(mixer, shape)
    arrays["k"] = np.broadcast_to(arrays["k"][:, :1], arrays["k"].shape)
    arrays["beta"] = np.full_like(arrays["beta"], beta)
    arrays["log_decay"] = arrays["log_decay"] * 1e-3
    arrays = representable(arrays)
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    want = reference(mixer, arrays, None, None, cotangents)
    got = evaluate(mixer, FORM, arrays, None, None, cotangents, jnp.float32)
    assert_within(got, want, FLOAT32_BAR if beta == 1.0 else EXTREME_BAR)


def test_the_gradient_of_a_weak_decay_next_to_strong_ones():
    """One channel forgets everything at every other token; its weak decays keep their digits."""
    mixer, shape = MIXERS["gla"], Shape(batch=1, time=64, heads=(1, 1, 1))
    arrays = draw(mixer, shape)
    gate = np.full_like(arrays["log_decay"], -1e-3)
    gate[:, ::2] = -12.0
    arrays["log_decay"] = np.float64(np.float32(gate))
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    want = reference(mixer, arrays, None, None, cotangents)
    got = evaluate(mixer, FORM, arrays, None, None, cotangents, jnp.float32)
    for parity in (0, 1):
        pair = (x["d_log_decay"][:, parity::2] for x in (got, want))
        assert relative_error(*pair) < EXTREME_BAR


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rwkv6", "kda"])
@pytest.mark.parametrize(
    ("heads", "key", "value", "dtype"),
    [
        pytest.param(*case, id=about)
        for about, case in {
            "pairs of heads of 64": ((4, 4, 4), 64, 64, jnp.float32),
            "four heads of 96 and 32": ((8, 8, 8), 96, 32, jnp.bfloat16),
            "nine narrow heads, padded": ((9, 9, 9), 8, 12, jnp.float32),
            "wide states": ((2, 2, 2), 256, 256, jnp.bfloat16),
            "four queries a state": ((8, 2, 2), 64, 64, jnp.bfloat16),
            "four values a key": ((2, 2, 8), 64, 64, jnp.float32),
        }.items()
    ],
)
def test_blocks_of_heads(name, heads, key, value, dtype):
    """Several chunks, the last one short, with several documents and states."""
    mixer, shape = MIXERS[name], Shape(1, 100, heads, key, value)
    arrays = draw(mixer, shape)
    if dtype == jnp.bfloat16:
        arrays = {n: np.asarray(a, np.float64) for n, a in cast(mixer, arrays, dtype).items()}
    state, segments = draw_state(mixer, shape), draw_segments(shape)
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    want = reference(mixer, arrays, state, segments, cotangents)
    got = evaluate(mixer, FORM, arrays, state, segments, cotangents, dtype)
    assert_within(got, want, FLOAT32_BAR if dtype == jnp.float32 else BFLOAT16_BAR)


@pytest.mark.parametrize(
    ("name", "interpret", "heads"),
    [
        ("rwkv6", "races", (2, 2, 4)),
        *(
            pytest.param(name, interpret, heads, marks=pytest.mark.slow)
            for name, interpret, heads in (
                ("kda", "races", (4, 4, 4)),
                ("kda", "races", (4, 2, 2)),
                ("gla", "chip", (4, 2, 2)),
                ("kda", "chip", (2, 2, 4)),
            )
        ),
    ],
)
def test_no_races_in_the_chip_s_memories(name, interpret, heads):
    """Two rows of three chunks, the last one short."""
    mixer, shape = MIXERS[name], Shape(2, 40, heads, 64, 64)
    arrays = cast(mixer, draw(mixer, shape), jnp.float32)
    state = jnp.asarray(draw_state(mixer, shape), jnp.float32)
    segments = jnp.asarray(draw_segments(shape))

    def loss(impl, arrays, state):
        out, final = mixer(
            arrays, initial_state=state, segment_ids=segments, impl=impl, chunk_size=16
        )
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(final)), (out, final)

    def grad(impl):
        return quick_jit(jax.grad(functools.partial(loss, impl), (0, 1), has_aux=True))

    want = grad("chunked")(arrays, state)
    with compile_for("tpu", interpret=interpret):
        got = grad("pallas")(arrays, state)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(x, y) < FLOAT32_BAR


def _call(heads, key, value, dtype, *, delta=False):
    row = (1, 256)
    arrays = (
        jax.ShapeDtypeStruct((*row, heads.keys * heads.queries, key), dtype),
        jax.ShapeDtypeStruct((*row, heads.keys, key), dtype),
        jax.ShapeDtypeStruct((*row, heads.states, value), dtype),
        jax.ShapeDtypeStruct((*row, heads.states, key), jnp.float32),
    )
    if delta:
        arrays += (jax.ShapeDtypeStruct((*row, heads.states), jnp.float32),)
    return Options(heads, 1.0, jnp.dtype(dtype)), arrays


@pytest.mark.parametrize("family", [vector_decay, vector_delta])
def test_refusals(family):
    def refusal(*call):
        return family.refusal(*_call(*call, delta=family is vector_delta))

    assert refusal(Heads(32, 1, 1), 128, 128, jnp.bfloat16) is None
    assert "float16" in refusal(Heads(2, 1, 1), 64, 64, jnp.float16)
    assert "VMEM" in refusal(Heads(1, 64, 1), 512, 512, jnp.float32)


@pytest.mark.parametrize(
    ("heads", "key", "value", "at_once", "widths"),
    [
        (Heads(32, 1, 1), 128, 128, 4, (128, 128)),
        (Heads(32, 1, 1), 64, 64, 4, (64, 64)),
        (Heads(4, 1, 1), 256, 512, 1, (256, 512)),
        (Heads(30, 1, 1), 96, 192, 3, (128, 256)),
        (Heads(8, 4, 1), 128, 128, 1, (128, 128)),
        (Heads(3, 1, 1), 100, 40, 3, (100, 40)),
    ],
)
def test_groups_of_heads_fill_whole_lanes(heads, key, value, at_once, widths):
    options, arrays = _call(heads, key, value, jnp.bfloat16)
    cut = _vector.cut_of(options, *arrays[:3])
    assert (cut.heads.keys, cut.key, cut.value) == (at_once, *widths)
