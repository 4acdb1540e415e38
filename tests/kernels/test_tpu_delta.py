# SPDX-License-Identifier: Apache-2.0
"""What the shared suite does not ask of the delta rule's TPU kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqmix_kernels import compile_for
from seqmix_kernels.options import Heads, Options
from seqmix_kernels.tpu import delta, delta_inverse
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


@pytest.mark.parametrize(("digits", "bar"), [(3, 1e-6), (2, 1e-4)])
def test_inverses_of_repeated_and_of_random_keys(digits, bar):
    size, rng = 128, np.random.default_rng(0)
    keys = rng.normal(size=(size, 8))
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    ones = np.ones((size, size))
    lower = np.tril(np.stack([ones, 2 * ones, 0.5 * ones, keys @ keys.T]), -1)
    with compile_for("tpu", interpret="plain"):
        got = quick_jit(functools.partial(delta_inverse.unit_lower_inverse, digits=digits))(
            jnp.asarray(lower, jnp.float32)
        )
    for mine, x in zip(np.asarray(got), lower, strict=True):
        assert relative_error(mine, np.linalg.inv(np.eye(size) + x)) < bar


@pytest.mark.parametrize("beta", [2.0, *slow(1.0)])
@pytest.mark.parametrize("name", ["gated_delta_rule", *slow("delta_rule")])
def test_identical_keys(name, beta):
    """As for the chunked form, whose bar with beta = 2 is that of extreme inputs too."""
    shape, mixer = Shape(batch=1, time=130, heads=(1, 1, 1), key=16, value=16), MIXERS[name]
    arrays = draw(mixer, shape)
    arrays["k"] = np.broadcast_to(arrays["k"][:, :1], arrays["k"].shape)
    arrays["beta"] = np.full_like(arrays["beta"], beta)
    if "log_decay" in arrays:
        arrays["log_decay"] = arrays["log_decay"] * 1e-3
    arrays = representable(arrays)
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    want = reference(mixer, arrays, None, None, cotangents)
    got = evaluate(mixer, FORM, arrays, None, None, cotangents, jnp.float32)
    if beta == 1.0 and "log_decay" in arrays:
        # Each write replaces all that the key held, so decays have no effect: rounding is all.
        assert np.linalg.norm(got["d_log_decay"]) < FLOAT32_BAR * np.linalg.norm(want["d_v"])
        del want["d_log_decay"]
    assert_within(got, want, FLOAT32_BAR if beta == 1.0 else EXTREME_BAR)


@pytest.mark.parametrize(
    ("heads", "key", "value", "dtype"),
    [
        pytest.param((3, 3, 3), 64, 64, jnp.float32, id="half a last block"),
        *(
            pytest.param(*case, marks=pytest.mark.slow, id=name)
            for name, case in {
                "heads of 96 and 192": ((6, 6, 6), 96, 192, jnp.float32),
                "narrow heads, padded": ((18, 18, 18), 8, 8, jnp.float32),
                "wide states": ((2, 2, 2), 256, 256, jnp.bfloat16),
                "two value heads of 64": ((3, 3, 6), 64, 64, jnp.float32),
                "four queries a state": ((4, 1, 1), 64, 64, jnp.bfloat16),
            }.items()
        ),
    ],
)
def test_blocks_of_heads(heads, key, value, dtype):
    """Several chunks, the last one short, with several documents and states."""
    mixer, shape = MIXERS["gated_delta_rule"], Shape(1, 150, heads, key, value)
    arrays = draw(mixer, shape)
    if dtype == jnp.bfloat16:
        arrays = {n: np.asarray(a, np.float64) for n, a in cast(mixer, arrays, dtype).items()}
    state, segments = draw_state(mixer, shape), draw_segments(shape)
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    want = reference(mixer, arrays, state, segments, cotangents)
    got = evaluate(mixer, FORM, arrays, state, segments, cotangents, dtype)
    assert_within(got, want, FLOAT32_BAR if dtype == jnp.float32 else BFLOAT16_BAR)


@pytest.mark.parametrize("interpret", ["races", *slow("chip")])
@pytest.mark.parametrize("heads", [(1, 1, 1), *slow((3, 3, 6), (4, 2, 2))])
def test_no_races_in_the_chip_s_memories(heads, interpret):
    """Two rows, two chunks, and two blocks of heads where values are grouped."""
    mixer, shape = MIXERS["gated_delta_rule"], Shape(2, 140, heads, 64, 64)
    arrays = cast(mixer, draw(mixer, shape), jnp.float32)
    state = jnp.asarray(draw_state(mixer, shape), jnp.float32)
    segments = jnp.asarray(draw_segments(shape))

    def loss(impl, arrays, state):
        out, final = mixer(arrays, initial_state=state, segment_ids=segments, impl=impl)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(final)), (out, final)

    def grad(impl):
        return quick_jit(jax.grad(functools.partial(loss, impl), (0, 1), has_aux=True))

    want = grad("chunked")(arrays, state)
    with compile_for("tpu", interpret=interpret):
        got = grad("pallas")(arrays, state)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(x, y) < FLOAT32_BAR


def _call(heads, key, value, dtype):
    row = (1, 256)
    return Options(heads, 1.0, jnp.dtype(dtype)), (
        jax.ShapeDtypeStruct((*row, heads.keys * heads.queries, key), dtype),
        jax.ShapeDtypeStruct((*row, heads.keys, key), dtype),
        jax.ShapeDtypeStruct((*row, heads.states, value), dtype),
        jax.ShapeDtypeStruct((*row, heads.states), jnp.float32),
        jax.ShapeDtypeStruct((*row, heads.states), jnp.float32),
    )


def test_refusals():
    assert delta.refusal(*_call(Heads(16, 2, 1), 128, 128, jnp.bfloat16)) is None
    assert "float16" in delta.refusal(*_call(Heads(2, 1, 1), 64, 64, jnp.float16))
    assert "VMEM" in delta.refusal(*_call(Heads(1, 64, 1), 512, 512, jnp.float32))
