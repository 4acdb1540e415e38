# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels of the scalar-decay family: in the interpreter, and lowered for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import seqmix_kernels
from seqmix import mixers
from seqmix_kernels.gpu import gates, scalar_decay
from tests.mixers.cases import MIXERS, Shape, draw, draw_segments, draw_state
from tests.mixers.parity import (
    BFLOAT16_BAR,
    assert_within,
    draw_cotangents,
    evaluate,
    reference,
    relative_error,
)


def check(name, shape, *, packed=True, extreme=False, impl="pallas@gpu"):
    """Output, state, every gradient against the float64 recurrence of the same bfloat16 inputs."""
    mixer = MIXERS[name]
    arrays = {
        n: np.asarray(jnp.asarray(a, "float32" if n in mixer.float32 else "bfloat16"), np.float64)
        for n, a in draw(mixer, shape, extreme=extreme).items()
    }
    state = draw_state(mixer, shape)
    segments = draw_segments(shape) if packed else None
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    want = reference(mixer, arrays, state, segments, cotangents)
    got = evaluate(mixer, impl, arrays, state, segments, cotangents, jnp.bfloat16)
    if not extreme:
        assert_within(got, want, BFLOAT16_BAR)
        return
    # Where decays are strong little is left of some gradients, and more of bfloat16's rounding.
    known = evaluate(mixer, "chunked", arrays, state, segments, cotangents, jnp.bfloat16)
    for n, exact in want.items():
        bar = max(BFLOAT16_BAR, relative_error(known[n], exact))
        assert relative_error(got[n], exact) <= bar, n


def test_grouped_packed_with_states_and_strong_decays():
    """K and V off the tile, T off the chunk, an odd number of heads that share one key head."""
    shape = Shape(batch=1, time=70, heads=(1, 1, 3), key=40, value=72)
    check("simple_gla", shape, extreme=True)


def test_a_row_cut_into_pieces():
    check("simple_gla", Shape(batch=1, time=600, heads=(1, 1, 1), key=64, value=64))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        # Write strengths, and two units of one group that add their dq and dk.
        ("ssd", Shape(batch=1, time=128, heads=(1, 1, 2), key=64, value=64)),
        # Keys in two slices.
        ("simple_gla", Shape(batch=1, time=70, heads=(1, 1, 2), key=200, value=64)),
        pytest.param(
            "simple_gla",
            Shape(batch=1, time=600, heads=(2, 1, 1), key=256, value=128),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "simple_gla",
            Shape(batch=2, time=64, heads=(4, 2, 2), key=64, value=64),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "simple_gla",
            Shape(batch=1, time=130, heads=(1, 1, 1), key=128, value=128),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "retention",
            Shape(batch=1, time=1, heads=(2, 2, 2), key=64, value=64),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "lightning_attention",
            Shape(batch=1, time=65, heads=(1, 1, 2), key=64, value=64),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_against_the_recurrence(name, shape):
    check(name, shape)


def test_a_loud_document_leaves_the_others_alone():
    """Gradients of log-decays are differences of sums over a chunk: not over its documents."""
    shape = Shape(batch=1, time=128, heads=(1, 1, 1), key=64, value=64)
    arrays = draw(MIXERS["simple_gla"], shape)
    ids = np.repeat([1, 2, 3, 4], [20, 30, 50, 28])
    loud = jnp.where(ids == 3, 1e3, 1.0)[:, None, None]

    def gradient(volume):
        q, k, v = (jnp.asarray(arrays[n] * volume, jnp.bfloat16) for n in "qkv")

        def loss(log_decay):
            out, _ = mixers.simple_gla(q, k, v, log_decay, segment_ids=ids[None], impl="pallas")
            return jnp.sum(out.astype(jnp.float32) * volume)

        with seqmix_kernels.compile_for("gpu", interpret="chip"):
            return jax.jit(jax.grad(loss))(jnp.asarray(arrays["log_decay"], jnp.float32))

    found, quiet = gradient(loud), gradient(jnp.ones_like(loud))
    np.testing.assert_array_equal(found[:, ids != 3], quiet[:, ids != 3])
    assert np.any(found[:, ids == 3] != quiet[:, ids == 3])
    assert not np.any(found[:, [20, 50, 100]])  # a document starts from nothing


def _lower(
    heads, key, value, *, batch=2, time=256, dtype=jnp.bfloat16, packed=False, impl="pallas"
):
    queries, keys, values = heads
    states = max(keys, values)

    def loss(q, k, v, log_decay, state, ids):
        out, final = mixers.simple_gla(
            q, k, v, log_decay, initial_state=state, segment_ids=ids, impl=impl
        )
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(final)

    rows = (batch, time)
    arguments = [
        jax.ShapeDtypeStruct((*rows, queries, key), dtype),
        jax.ShapeDtypeStruct((*rows, keys, key), dtype),
        jax.ShapeDtypeStruct((*rows, values, value), dtype),
        jax.ShapeDtypeStruct((*rows, states), jnp.float32),
        jax.ShapeDtypeStruct((batch, states, key, value), jnp.float32),
        jax.ShapeDtypeStruct(rows, jnp.int32) if packed else None,
    ]
    with seqmix_kernels.compile_for("gpu"):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4))).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("heads", "key", "value"),
    [
        ((2, 2, 2), 128, 128),
        pytest.param((2, 2, 2), 64, 64, marks=pytest.mark.slow),
        pytest.param((1, 1, 4), 128, 64, marks=pytest.mark.slow),
        pytest.param((1, 1, 3), 64, 64, marks=pytest.mark.slow),
        pytest.param((4, 2, 2), 64, 64, marks=pytest.mark.slow),
        pytest.param((2, 2, 2), 128, 256, marks=pytest.mark.slow),
        pytest.param((2, 2, 2), 128, 64, marks=pytest.mark.slow),
        pytest.param((2, 2, 4), 256, 64, marks=pytest.mark.slow),
        pytest.param((1, 1, 1), 100, 60, marks=pytest.mark.slow),
    ],
)
def test_lowers_for_cuda(heads, key, value):
    text = _lower(heads, key, value, packed=True)
    assert text.count("mosaic_gpu") >= 2  # one kernel each way at least


def test_auto_takes_no_kernels_that_say_unproved(monkeypatch):
    for reason, taken in (("no GPU has run them", False), (None, True)):
        monkeypatch.setattr(scalar_decay, "UNPROVED", reason)
        text = _lower((1, 1, 1), 64, 64, time=64, impl="auto")
        assert ("mosaic_gpu" in text) == taken


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(64, 64), (64, 128), (128, 64)])
def test_lowers_ssd_for_cuda(widths):
    """Write strengths, and units of two heads that share q and k."""
    value, key = widths

    def loss(x, dt, rates, b, c):
        out, final = mixers.ssd(x, dt, rates, b, c, impl="pallas")
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(final)

    low, rows = jnp.bfloat16, (2, 256)
    arguments = [
        jax.ShapeDtypeStruct((*rows, 4, value), low),
        jax.ShapeDtypeStruct((*rows, 4), jnp.float32),
        jax.ShapeDtypeStruct((4,), jnp.float32),
        *[jax.ShapeDtypeStruct((*rows, 1, key), low)] * 2,
    ]
    with seqmix_kernels.compile_for("gpu"):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4))).trace(*arguments)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
def test_no_race():
    """Two units with tiles of their own, and two that exchange their parts of dq and dk."""
    shape = Shape(batch=1, time=128, heads=(2, 2, 2), key=64, value=64)
    arrays, state = draw(MIXERS["simple_gla"], shape), draw_state(MIXERS["simple_gla"], shape)
    low = {
        n: jnp.asarray(a, "float32" if n == "log_decay" else "bfloat16") for n, a in arrays.items()
    }
    for keys in (2, 1):
        inputs = low | {n: low[n][:, :, :keys] for n in ("q", "k")}

        def loss(inputs, state):
            out, final = mixers.simple_gla(**inputs, initial_state=state, impl="pallas")
            return jnp.sum(out.astype(jnp.float32)) + jnp.sum(final)

        with seqmix_kernels.compile_for("gpu", interpret="races"):
            value, _ = jax.jit(jax.value_and_grad(loss))(inputs, jnp.asarray(state, jnp.float32))
        assert np.isfinite(value)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"dtype": jnp.float32}, "tensor cores read bfloat16"),
    ],
)
def test_refusals_name_the_rule(change, rule):
    with pytest.raises(ValueError, match=rule):
        _lower((1, 1, 1), **({"key": 64, "value": 64} | change))


def test_a_document_starts_from_nothing():
    ids = jnp.asarray([[0, 0, 1, 1, 1]])
    log2 = gates.chunk_log2(jnp.full((1, 5, 1), -0.5), ids)
    assert log2.shape == (1, 1, 1, 64)
    assert float(log2[0, 0, 0, 2]) == -256
    np.testing.assert_allclose(log2[0, 0, 0, [0, 1, 3, 4]], -0.5 * np.log2(np.e), rtol=1e-6)
