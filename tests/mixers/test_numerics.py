# SPDX-License-Identifier: Apache-2.0
"""Inputs that broke other implementations: strong gates, repeated keys, long and shredded rows."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqmix import mixers
from seqmix.mixers import _numerics
from tests.mixers.cases import CORES, MIXERS, Shape, draw, representable, slow
from tests.mixers.parity import (
    EXTREME_BAR,
    FLOAT32_BAR,
    assert_within,
    cast,
    draw_cotangents,
    evaluate,
    reference,
    relative_error,
)


@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("name", ["delta_rule", "gated_delta_rule"])
def test_identical_keys(name, beta):
    """One repeated key: products of powers of the chunk matrix lose every digit here.

    With beta = 2 each token reflects the state and nothing is ever damped: the rounding of a
    chunk's sums of alternating terms stays (2e-5 here), so the bar is that of extreme inputs.
    """
    shape = Shape(batch=1, time=130, heads=(1, 1, 1), key=16, value=16)
    mixer = MIXERS[name]
    arrays = draw(mixer, shape)
    arrays["k"] = np.broadcast_to(arrays["k"][:, :1], arrays["k"].shape)
    arrays["beta"] = np.full_like(arrays["beta"], beta)
    if "log_decay" in arrays:
        arrays["log_decay"] = arrays["log_decay"] * 1e-3
    arrays = representable(arrays)
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    want = reference(mixer, arrays, None, None, cotangents)
    got = evaluate(mixer, "chunked", arrays, None, None, cotangents, jnp.float32)
    if beta == 1.0 and "log_decay" in arrays:
        # Each write replaces all that the key held, so decays have no effect: rounding is all.
        assert np.linalg.norm(got["d_log_decay"]) < FLOAT32_BAR * np.linalg.norm(want["d_v"])
        del want["d_log_decay"]
    assert_within(got, want, FLOAT32_BAR if beta == 1.0 else EXTREME_BAR)


def test_unit_lower_inverse_off_the_block_grid():
    rng = np.random.default_rng(0)
    for size in (1, 5, 16, 17, 64, 70):
        lower = np.tril(rng.normal(size=(3, size, size)) * 0.3, -1)
        got = _numerics.unit_lower_inverse(jnp.asarray(lower, jnp.float32))
        assert relative_error(got, np.linalg.inv(np.eye(size) + lower)) < FLOAT32_BAR


def test_range_sums_keep_the_digits_after_a_strong_decay():
    gate = np.full(64, -1e-3)
    gate[3] = -1e4
    got = np.asarray(_numerics.range_sums(jnp.asarray(gate, jnp.float32)))
    for i in range(64):
        want = [gate[j + 1 : i + 1].sum() for j in range(i + 1)]
        np.testing.assert_allclose(got[i, : i + 1], want, rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_straddling_sums_are_the_gradient_of_range_sums(chunk):
    rng = np.random.default_rng(0)
    pairs = rng.normal(size=(3, chunk, chunk)).astype(np.float32)
    got = _numerics.straddling_sums(jnp.asarray(pairs))
    lower = np.tril(pairs.astype(np.float64), -1)
    want = np.stack([lower[:, t:, :t].sum(axis=(1, 2)) for t in range(chunk)], axis=-1)
    np.testing.assert_allclose(got, want, atol=2e-5)
    gates = -jnp.exp(jnp.asarray(rng.normal(size=(3, chunk)), jnp.float32))
    weights = jnp.tril(jnp.asarray(pairs))
    gradient = jax.grad(lambda g: jnp.sum(weights * _numerics.range_sums(g)))(gates)
    np.testing.assert_allclose(gradient, want, atol=2e-5)


def test_no_decay_is_the_delta_rule():
    shape = Shape(time=100)
    arrays = cast(MIXERS["delta_rule"], draw(MIXERS["delta_rule"], shape), jnp.float32)
    zero = jnp.zeros(arrays["beta"].shape)
    gated = mixers.gated_delta_rule(log_decay=zero, impl="chunked", **arrays)
    plain = mixers.delta_rule(impl="chunked", **arrays)
    jax.tree.map(np.testing.assert_array_equal, gated, plain)


@pytest.mark.parametrize("name", ["simple_gla", "gated_delta_rule", "gla", "rwkv6"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_very_strong_decay_stays_finite(name, dtype):
    mixer, shape = MIXERS[name], Shape(batch=1, time=130)
    arrays = draw(mixer, shape)
    arrays["log_decay"] = np.full_like(arrays["log_decay"], -50.0)
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    got = evaluate(mixer, "chunked", arrays, None, None, cotangents, dtype)
    assert all(np.all(np.isfinite(x)) for x in got.values())


@pytest.mark.parametrize("name", ["simple_gla", "gated_delta_rule", "gla", "rwkv6"])
def test_three_magnitudes_of_decay_in_one_chunk(name):
    mixer, shape = MIXERS[name], Shape(batch=1, time=64)
    arrays = draw(mixer, shape)
    pattern = np.resize([-1e-6, -30.0, -1000.0, -1e-6, -1e-6], arrays["log_decay"].shape)
    arrays["log_decay"] = pattern
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    want = reference(mixer, arrays, None, None, cotangents)
    got = evaluate(mixer, "chunked", arrays, None, None, cotangents, jnp.float32)
    assert_within(got, want, EXTREME_BAR)


@pytest.mark.parametrize("name", ["simple_gla", "gated_delta_rule", "gla", "rwkv6"])
def test_exact_zero_and_exact_one_decays(name):
    mixer, shape = MIXERS[name], Shape(batch=1, time=100)
    arrays = draw(mixer, shape)
    coin = np.random.default_rng(5).random(arrays["log_decay"].shape)
    arrays["log_decay"] = np.where(coin < 0.1, -np.inf, 0.0)
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    want = reference(mixer, arrays, None, None, cotangents)
    got = evaluate(mixer, "chunked", arrays, None, None, cotangents, jnp.float32)
    assert_within(got, want, FLOAT32_BAR)


def test_step_sizes_from_raw_values_of_twenty():
    """Raw dt at +-20 before softplus: gradients of A and dt against the recurrence."""
    mixer, shape = MIXERS["ssd"], Shape(batch=1, time=70)
    arrays = draw(mixer, shape)
    raw = np.random.default_rng(6).choice([-20.0, 20.0, 0.5], size=arrays["dt"].shape)
    arrays["dt"] = np.logaddexp(0, raw)
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    want = reference(mixer, arrays, None, None, cotangents)
    got = evaluate(mixer, "chunked", arrays, None, None, cotangents, jnp.float32)
    assert_within(got, want, FLOAT32_BAR)


def test_long_keys_grow_as_the_recurrence_does():
    """Keys of norm 10 and beta = 1 are outside the delta rule's stable range: short rows agree."""
    mixer, shape = MIXERS["delta_rule"], Shape(batch=1, time=6, heads=(1, 1, 1))
    arrays = draw(mixer, shape)
    arrays["k"] = arrays["k"] * 10
    arrays["beta"] = np.ones_like(arrays["beta"])
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    want = reference(mixer, arrays, None, None, cotangents)
    got = evaluate(mixer, "chunked", arrays, None, None, cotangents, jnp.float32)
    assert all(np.all(np.isfinite(x)) for x in got.values())
    assert_within(got, want, EXTREME_BAR)


@pytest.mark.parametrize("name", ["simple_gla", "gated_delta_rule", "gla"])
def test_tens_of_thousands_of_documents_in_one_row(name):
    shape = Shape(batch=1, time=40_000, heads=(1, 1, 1), key=4, value=4)
    arrays = cast(MIXERS[name], draw(MIXERS[name], shape), jnp.float32)
    segments = jnp.arange(40_000)[None] // 2 + 1
    run = jax.jit(functools.partial(MIXERS[name]), static_argnames="impl")
    out, state = run(arrays, segment_ids=segments, impl="chunked")
    want, final = run(arrays, segment_ids=segments, impl="recurrent")
    assert relative_error(out, want) < FLOAT32_BAR
    assert relative_error(state, final) < FLOAT32_BAR


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simple_gla", "gated_delta_rule", "gla"])
def test_sixty_five_thousand_tokens(name):
    shape = Shape(batch=1, time=65_536, heads=(1, 1, 1), key=64, value=64)
    mixer = MIXERS[name]
    arrays = draw(mixer, shape)
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    got = evaluate(mixer, "chunked", arrays, None, None, cotangents, jnp.float32)
    assert all(np.all(np.isfinite(x)) for x in got.values())
    out, final = jax.jit(functools.partial(mixer, impl="recurrent"))(
        cast(mixer, arrays, jnp.float32)
    )
    assert relative_error(got["out"], out) < FLOAT32_BAR
    assert relative_error(got["state"], final) < FLOAT32_BAR


def _compiled_gradient(name, time):
    mixer = MIXERS[name]
    one = draw(mixer, Shape(batch=1, time=1, heads=(2, 2, 2), key=32, value=32))
    specs = {
        n: jax.ShapeDtypeStruct(
            (1, time, *a.shape[2:]) if mixer.per_token(n, a) else a.shape, a.dtype
        )
        for n, a in cast(mixer, one, jnp.float32).items()
    }
    lowered = jax.jit(jax.grad(lambda a: jnp.sum(jnp.sin(mixer(a, impl="chunked")[0])))).lower(
        specs
    )
    memory = lowered.compile().memory_analysis()
    traffic = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return lowered.as_text(), memory.temp_size_in_bytes, traffic


def _is_shape(tree):
    return isinstance(tree, tuple) and all(isinstance(n, int) for n in tree)


# The smallest programs of three kinds of state; the others are slow to compile.
_SMALLEST = ("ssd", "selective_scan", "s4d")


@pytest.mark.parametrize("name", [*_SMALLEST, *slow(*(n for n in CORES if n not in _SMALLEST))])
def test_memory_is_linear_and_the_program_does_not_grow(name):
    """Forward and backward hold at most twice their inputs and outputs and a state a chunk."""
    short, temp_short, _ = _compiled_gradient(name, 4096)
    long, temp_long, traffic = _compiled_gradient(name, 65_536)
    assert temp_long <= 16 * temp_short * 1.05
    state = MIXERS[name].state(Shape(batch=1, time=1, heads=(2, 2, 2), key=32, value=32))
    states = sum(4 * math.prod(s) for s in jax.tree.leaves(state, is_leaf=_is_shape))
    assert temp_long <= 2 * traffic + states * (65_536 // 64)
    assert len(long.splitlines()) <= len(short.splitlines()) * 1.05
