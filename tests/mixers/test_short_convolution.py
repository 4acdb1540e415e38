# SPDX-License-Identifier: Apache-2.0
"""Short causal convolution: documents, padding, states, and the gradients of states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqmix import mixers
from tests.mixers import dense
from tests.mixers.cases import Shape, draw_segments
from tests.mixers.parity import FLOAT32_BAR, relative_error

conv = jax.jit(mixers.short_convolution)


def draw(time, taps=4, batch=2, width=5):
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=(batch, time, width)).astype(np.float32),
        rng.normal(size=(taps, width)).astype(np.float32),
        rng.normal(size=width).astype(np.float32),
        rng.normal(size=(batch, taps - 1, width)).astype(np.float32),
    )


@pytest.mark.parametrize("time", [1, 2, 3, 4, 30])
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("padding", [None, 0.0, 0.3])
def test_against_documents(time, taps, padding):
    x, weight, bias, state = draw(time, taps)
    segments = None
    if padding is not None:
        segments = draw_segments(Shape(time=time), padding=padding)
    out, final = conv(x, weight, bias, initial_state=state, segment_ids=segments)
    want, end = dense.short_convolution(x, weight, bias, state, segments)
    assert relative_error(out, want) < FLOAT32_BAR
    assert relative_error(final, end) < FLOAT32_BAR


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_at_an_end_without_a_state(side):
    x, weight, bias, _ = draw(20)
    segments = np.ones((2, 20), np.int32)
    segments[:, slice(0, 6) if side == "left" else slice(14, 20)] = 0
    out, final = conv(x, weight, bias, segment_ids=segments)
    want, end = dense.short_convolution(x, weight, bias, np.zeros((2, 3, 5)), segments)
    assert relative_error(out, want * (segments != 0)[..., None]) < FLOAT32_BAR
    assert relative_error(final, end) < FLOAT32_BAR


@pytest.mark.parametrize("time", [2, 9])
def test_gradients_of_both_states(time):
    """T < W included: part of the final state is the initial one, shifted."""
    x, weight, bias, state = draw(time)
    segments = np.ones((2, time), np.int32)
    segments[1, time // 2] = 0
    rng = np.random.default_rng(1)
    c_out, c_state = rng.normal(size=x.shape), rng.normal(size=state.shape)

    def loss(x, weight, state):
        out, final = mixers.short_convolution(
            x, weight, bias, initial_state=state, segment_ids=segments
        )
        return jnp.sum(out * c_out) + jnp.sum(final * c_state)

    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, weight, state)
    # The map is linear in (x, state) for fixed weights: differences of the oracle are exact.
    for argument in (0, 2):
        values = [x.astype(np.float64), weight.astype(np.float64), state.astype(np.float64)]

        def oracle(values):
            out, final = dense.short_convolution(values[0], values[1], bias, values[2], segments)
            real = (segments != 0)[..., None]
            return np.sum(out * real * c_out) + np.sum(final * c_state)

        base = oracle(values)
        want = np.zeros_like(values[argument])
        for index in np.ndindex(want.shape):
            moved = [a.copy() for a in values]
            moved[argument][index] += 1.0
            want[index] = oracle(moved) - base
        assert relative_error(grads[argument], want) < FLOAT32_BAR


def test_pieces_equal_one_pass_and_documents_do_not_leak():
    x, weight, bias, _ = draw(30)
    whole, final = conv(x, weight, bias)
    first, state = conv(x[:, :2], weight, bias)
    second, end = conv(x[:, 2:], weight, bias, initial_state=state)
    np.testing.assert_array_equal(jnp.concatenate([first, second], axis=1), whole)
    np.testing.assert_array_equal(end, final)
    segments = np.where(np.arange(30) < 11, 1, 2) * np.ones((2, 1), np.int32)
    packed, _ = conv(x, weight, bias, segment_ids=segments)
    changed = x.copy()
    changed[:, :11] += 1
    packed2, _ = conv(changed, weight, bias, segment_ids=segments)
    np.testing.assert_array_equal(packed[:, 11:], packed2[:, 11:])
    alone, _ = conv(x[:, 11:], weight, bias)
    np.testing.assert_array_equal(packed[:, 11:], alone)


def test_bfloat16_keeps_its_dtype():
    x, weight, bias, state = (jnp.asarray(a, jnp.bfloat16) for a in draw(9))
    out, final = conv(x, weight, bias, initial_state=state)
    assert out.dtype == final.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"x": np.ones((2, 9), np.float32)}, r"x must have shape \[B, T, D\]"),
        ({"weight": np.ones((4, 3), np.float32)}, "weight must have shape"),
        ({"bias": np.ones(3, np.float32)}, "bias must have shape"),
        ({"initial_state": np.ones((2, 4, 5), np.float32)}, "initial_state must have shape"),
        ({"segment_ids": np.ones((2, 8), np.int32)}, "segment_ids must have shape"),
    ],
)
def test_bad_arguments(change, match):
    x, weight, bias, state = draw(9)
    arguments = {"x": x, "weight": weight, "bias": bias, "initial_state": state}
    with pytest.raises(ValueError, match=f"short_convolution: {match}"):
        functools.partial(mixers.short_convolution, **(arguments | change))()
