# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels of the delta rule with scalar decay: interpreted, and lowered for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import seqmix_kernels
from seqmix import mixers
from seqmix_kernels.gpu import delta_pieces
from seqmix_kernels.gpu.delta_inverse import inverse
from seqmix_kernels.options import Heads
from tests.mixers.cases import MIXERS, Shape, draw, draw_segments, draw_state
from tests.mixers.parity import (
    BFLOAT16_BAR,
    assert_within,
    draw_cotangents,
    evaluate,
    reference,
)


def slow(*cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def check(name, shape, *, packed=True, extreme=False):
    """Output, state and every gradient against the float64 recurrence of the same inputs."""
    mixer = MIXERS[name]
    arrays = {
        n: np.asarray(jnp.asarray(a, "float32" if n in mixer.float32 else "bfloat16"), np.float64)
        for n, a in draw(mixer, shape, extreme=extreme).items()
    }
    state = draw_state(mixer, shape)
    segments = draw_segments(shape) if packed else None
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    want = reference(mixer, arrays, state, segments, cotangents)
    got = evaluate(mixer, "pallas@gpu", arrays, state, segments, cotangents, jnp.bfloat16)
    assert_within(got, want, BFLOAT16_BAR)


def test_grouped_packed_with_states_and_strong_decays():
    """K and V off the tile, T off the chunk, two states that share a key head, two units a head."""
    check("gated_delta_rule", Shape(1, 70, heads=(1, 1, 2), key=40, value=72), extreme=True)


@pytest.mark.slow
def test_a_row_cut_into_pieces(monkeypatch):
    monkeypatch.setattr(delta_pieces, "PIECE_CHUNKS", 1)
    check("gated_delta_rule", Shape(1, 190, heads=(1, 1, 1), key=64, value=128))


@pytest.mark.parametrize(
    ("name", "shape"),
    slow(
        ("gated_delta_rule", Shape(2, 128, heads=(2, 2, 2), key=128, value=128)),
        ("gated_delta_rule", Shape(1, 130, heads=(2, 2, 2), key=64, value=64)),
        ("gated_delta_rule", Shape(1, 128, heads=(2, 1, 1), key=64, value=64)),
        ("gated_delta_rule", Shape(1, 1, heads=(2, 2, 2), key=64, value=64)),
        ("delta_rule", Shape(1, 100, heads=(1, 1, 1), key=128, value=64)),
        # Three blocks of one head, each with parts of its dq and dk.
        ("gated_delta_rule", Shape(1, 66, heads=(3, 3, 3), key=128, value=192)),
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_against_the_recurrence(name, shape):
    check(name, shape)


@pytest.mark.slow
def test_lanes_of_vmap_run_as_rows():
    mixer, shape = MIXERS["gated_delta_rule"], Shape(2, 70, heads=(1, 1, 1), key=64, value=64)
    inputs = {
        n: jnp.asarray(a, "float32" if n in mixer.float32 else "bfloat16")
        for n, a in draw(mixer, shape).items()
    }
    inputs["initial_state"] = jnp.asarray(draw_state(mixer, shape), jnp.float32)

    def loss(inputs):
        out, final = mixers.gated_delta_rule(**inputs, impl="pallas")
        return jnp.sum(jnp.square(out.astype(jnp.float32))) + jnp.sum(final)

    with seqmix_kernels.compile_for("gpu", interpret="chip"):
        want = jax.jit(jax.grad(loss))(inputs)
        lanes = jax.tree.map(lambda x: x[:, None], inputs)
        got = jax.jit(jax.vmap(jax.grad(loss)))(lanes)
    for name, x in want.items():
        np.testing.assert_array_equal(got[name][:, 0], x, err_msg=name)


@pytest.mark.parametrize("strength", [1.0, 2.0])
def test_inverse_of_repeated_keys(strength):
    """Equal keys: powers of the triangle would grow to 10^18 before they cancel."""
    rng = np.random.default_rng(0)
    key = rng.normal(size=(1, 1, 1, 64))
    keys = jnp.asarray(np.tile(key / np.linalg.norm(key), (1, 64, 1, 1)), jnp.bfloat16)
    decay = jnp.full((1, 64, 1), -0.05, jnp.float32)
    beta = strength * np.linspace(1.0, 0.5, 64)
    with seqmix_kernels.compile_for("gpu", interpret="chip"):
        strengths = jnp.asarray(beta[None, :, None], jnp.float32)
        vectors = delta_pieces.chunk_vectors(decay, strengths, None)
        got = inverse(Heads(1, 1, 1), keys, vectors)
    k = np.asarray(keys, np.float64)[0, :, 0]
    sums = -0.05 * np.arange(64)
    pairs = beta * (k @ k.T) * np.exp(np.minimum(sums[:, None] - sums, 0))
    want = np.linalg.inv(np.eye(64) + np.tril(pairs, -1))
    error = np.linalg.norm(np.asarray(got, np.float64)[0, 0, 0].T - want) / np.linalg.norm(want)
    assert error < BFLOAT16_BAR


def _lower(heads, key, value, *, batch=2, time=256, dtype=jnp.bfloat16, chunk_size=None):
    queries, keys, values = heads
    states = max(keys, values)

    def loss(q, k, v, log_decay, beta, state, ids):
        out, final = mixers.gated_delta_rule(
            q,
            k,
            v,
            log_decay,
            beta,
            initial_state=state,
            segment_ids=ids,
            chunk_size=chunk_size,
            impl="pallas",
        )
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(final)

    rows = (batch, time)
    arguments = [
        jax.ShapeDtypeStruct((*rows, queries, key), dtype),
        jax.ShapeDtypeStruct((*rows, keys, key), dtype),
        jax.ShapeDtypeStruct((*rows, values, value), dtype),
        jax.ShapeDtypeStruct((*rows, states), jnp.float32),
        jax.ShapeDtypeStruct((*rows, states), jnp.float32),
        jax.ShapeDtypeStruct((batch, states, key, value), jnp.float32),
        jax.ShapeDtypeStruct(rows, jnp.int32),
    ]
    with seqmix_kernels.compile_for("gpu"):
        traced = jax.jit(jax.grad(loss, argnums=tuple(range(6)))).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("heads", "key", "value", "time"),
    [
        ((2, 2, 2), 128, 128, 256),
        *slow(((2, 2, 2), 64, 64, 256), ((1, 1, 4), 128, 64, 100), ((1, 1, 3), 64, 64, 64)),
        *slow(((4, 2, 2), 64, 64, 256), ((2, 2, 2), 128, 256, 64), ((1, 1, 1), 100, 60, 1)),
        *slow(((1, 1, 1), 128, 128, 32768)),  # in pieces
    ],
)
def test_lowers_for_cuda(heads, key, value, time):
    text = _lower(heads, key, value, time=time)
    assert text.count("mosaic_gpu") >= 3  # inverses, and one sweep each way at least


@pytest.mark.slow
@pytest.mark.parametrize("value", [64, 128])
def test_no_race(value):
    """One and two units of value columns in a block."""
    mixer, shape = MIXERS["gated_delta_rule"], Shape(1, 128, heads=(2, 2, 2), key=64, value=value)
    inputs = {
        n: jnp.asarray(a, "float32" if n in mixer.float32 else "bfloat16")
        for n, a in draw(mixer, shape).items()
    }

    def loss(inputs, state):
        out, final = mixers.gated_delta_rule(**inputs, initial_state=state, impl="pallas")
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(final)

    with seqmix_kernels.compile_for("gpu", interpret="races"):
        state = jnp.asarray(draw_state(mixer, shape), jnp.float32)
        result, _ = jax.jit(jax.value_and_grad(loss))(inputs, state)
    assert np.isfinite(result)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"dtype": jnp.float32}, "tensor cores read bfloat16"),
        ({"key": 192}, "at most 128 keys, not 192"),
        ({"chunk_size": 32}, "chunks have 64 tokens, not 32"),
    ],
)
def test_refusals_name_the_rule(change, rule):
    with pytest.raises(ValueError, match=rule):
        _lower((1, 1, 1), **({"key": 64, "value": 64} | change))
