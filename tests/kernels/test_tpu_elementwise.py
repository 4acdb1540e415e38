# SPDX-License-Identifier: Apache-2.0
"""The TPU kernels of S6 and RG-LRU where the shared suite does not reach."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqmix import mixers
from seqmix_kernels import compile_for
from seqmix_kernels.tpu import linear_scan, selective_scan
from tests.mixers.cases import (
    MIXERS,
    Shape,
    draw,
    draw_segments,
    draw_state,
    representable,
    slow,
)
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
# Two blocks of tokens and of channels, both hanging over the edge.
SEVERAL_BLOCKS = {
    "selective_scan": Shape(1, 130, (1, 1, 1), 3, 700),
    "rg_lru": Shape(1, 300, (1, 1, 1), 3, 700),
}
NAMES = list(SEVERAL_BLOCKS)


def compare(name, arrays, shape, *, packed=True, bar=FLOAT32_BAR, dtype=jnp.float32):
    mixer = MIXERS[name]
    state = draw_state(mixer, shape)
    segments = draw_segments(shape) if packed else None
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    want = reference(mixer, arrays, state, segments, cotangents)
    got = evaluate(mixer, FORM, arrays, state, segments, cotangents, dtype)
    assert all(np.all(np.isfinite(x)) for x in got.values())
    assert_within(got, want, bar)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("packed", [True, *slow(False)])
def test_several_blocks_of_tokens_and_of_channels(name, packed):
    shape = SEVERAL_BLOCKS[name]
    compare(name, draw(MIXERS[name], shape), shape, packed=packed)


@pytest.mark.parametrize("name", ["rg_lru", *slow("selective_scan")])
def test_blocks_that_fill_the_arrays(name):
    shape = Shape(1, 256, (1, 1, 1), 8, 128)
    compare(name, draw(MIXERS[name], shape), shape, packed=False)


@pytest.mark.slow
@pytest.mark.parametrize("states", [1, 17, 64])
def test_states_on_and_off_the_sublane_grid(states):
    shape = Shape(1, 20, (1, 1, 1), states, 130)
    compare("selective_scan", draw(MIXERS["selective_scan"], shape), shape)


def test_exponents_from_zero_to_minus_ten_thousand():
    """dt A of 0, tiny, -1e4 and far below what exp can tell from 0, in one block."""
    shape = Shape(batch=1, time=70)
    arrays = draw(MIXERS["selective_scan"], shape)
    rng = np.random.default_rng(7)
    arrays["dt"] = rng.choice([0.0, 1e-7, 1e-2, 1.0, 1e3], size=arrays["dt"].shape)
    arrays["A"] = -rng.choice([1e-3, 1.0, 16.0, 1e4], size=arrays["A"].shape)
    # Writes of size dt would drown every other; the input undoes them.
    arrays["x"] = arrays["x"] / np.maximum(1, arrays["dt"])
    compare("selective_scan", representable(arrays), shape, bar=EXTREME_BAR)


def test_three_magnitudes_and_exact_resets():
    shape = Shape(batch=1, time=100)
    arrays = draw(MIXERS["rg_lru"], shape)
    pattern = [-1e-6, -30.0, 0.0, -1000.0, -np.inf, -1e-6, -1e-3]
    arrays["log_a"] = np.resize(pattern, arrays["log_a"].shape)
    compare("rg_lru", arrays, shape, bar=EXTREME_BAR)


def test_the_root_keeps_its_digits_at_every_decay():
    """From decays within 1e-7 of 1, over the end of the series at exp(-1/8), to exp(-50)."""
    log_decay = -np.geomspace(1e-7, 50, 8 * 128).astype(np.float32).reshape(8, 128)
    decay = jnp.exp(jnp.asarray(log_decay))
    root, slope = linear_scan._root(jnp.asarray(log_decay), decay)
    want = np.sqrt(-np.expm1(2 * log_decay.astype(np.float64)))
    np.testing.assert_allclose(root, want, rtol=1e-6)
    np.testing.assert_allclose(slope, np.minimum(0.5 / want, 1000), rtol=1e-6)


def test_root_at_no_decay_has_the_bounded_derivative():
    def second_token(log_a):
        x = jnp.ones((1, 2, 1))
        return mixers.rg_lru(x, log_a.reshape(1, 2, 1), impl="pallas")[0][0, 1, 0]

    with compile_for("tpu", interpret="plain"):
        gradient = quick_jit(jax.grad(second_token))(jnp.zeros(2))
    np.testing.assert_allclose(gradient, [0.0, 1 - 2000.0], rtol=1e-6)


def test_a_document_starts_whole_unless_it_continues():
    x, log_a = jnp.full((1, 2, 2), 3.0), jnp.full((1, 2, 2), jnp.log(0.6))
    state = jnp.asarray([[5.0, 0.0]])
    for options in (
        {},
        {"initial_state": state},
        {"initial_state": 0 * state, "continues": jnp.asarray([True])},
        {"initial_state": state, "segment_ids": jnp.asarray([[0, 1]])},
    ):
        want = mixers.rg_lru(x, log_a, impl="recurrent", **options)
        with compile_for("tpu", interpret="plain"):
            got = quick_jit(functools.partial(mixers.rg_lru, impl="pallas"))(x, log_a, **options)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("name", ["rg_lru", *slow("selective_scan")])
def test_float16_is_widened(name):
    shape = Shape(batch=1, time=40)
    mixer = MIXERS[name]
    arrays = {
        n: np.asarray(jnp.asarray(a, "float32" if n in mixer.float32 else "float16"), np.float64)
        for n, a in draw(mixer, shape).items()
    }
    compare(name, arrays, shape, bar=BFLOAT16_BAR / 4, dtype=jnp.float16)


@pytest.mark.slow
def test_inputs_of_several_dtypes():
    """B and C in float32 beside x in bfloat16; gradients have the dtypes of their arguments."""
    mixer, shape = MIXERS["selective_scan"], Shape(batch=1, time=40)
    arrays = cast(mixer, draw(mixer, shape), jnp.float32)
    arrays["x"] = arrays["x"].astype(jnp.bfloat16)

    def loss(arrays, impl):
        return jnp.sum(jnp.sin(mixer(arrays, impl=impl)[0].astype(jnp.float32)))

    got, want = (quick_jit(jax.grad(loss), static_argnums=1)(arrays, f) for f in (FORM, "chunked"))
    for n, g in got.items():
        assert g.dtype == arrays[n].dtype
        assert relative_error(g, want[n]) < BFLOAT16_BAR, n


@pytest.mark.parametrize(
    ("name", "time", "width"),
    [
        ("rg_lru", 260, 520),
        ("selective_scan", 130, 8),
        pytest.param("selective_scan", 130, 520, marks=pytest.mark.slow),
    ],
)
def test_no_races_in_the_chip_s_memories(name, time, width):
    """Two blocks of tokens, and of channels where they are wide."""
    mixer, shape = MIXERS[name], Shape(1, time, (1, 1, 1), 2, width)
    arrays = cast(mixer, draw(mixer, shape), jnp.float32)
    state = jnp.asarray(draw_state(mixer, shape), jnp.float32)
    segments = jnp.asarray(draw_segments(shape))

    def loss(impl, arrays, state):
        out, final = mixer(arrays, initial_state=state, segment_ids=segments, impl=impl)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(final)), (out, final)

    def grad(impl):
        return quick_jit(jax.grad(functools.partial(loss, impl), (0, 1), has_aux=True))

    want = grad("chunked")(arrays, state)
    with compile_for("tpu", interpret="races"):
        got = grad("pallas")(arrays, state)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(x, y) < FLOAT32_BAR


def test_what_the_kernels_refuse_says_why():
    def arrays(D, N, dtype=jnp.float32):
        x = jax.ShapeDtypeStruct((1, 8, D), dtype)
        columns = jax.ShapeDtypeStruct((1, 8, N), dtype)
        return x, x, columns, columns

    assert selective_scan.refusal(None, arrays(5120, 16)) is None
    assert selective_scan.refusal(None, arrays(128, 128)) is None
    assert "512 states" in selective_scan.refusal(None, arrays(128, 512))
    assert "float64" in selective_scan.refusal(None, arrays(128, 16, jnp.float64))
    assert linear_scan.refusal(None, arrays(2560, 1)[:2]) is None
    assert "float64" in linear_scan.refusal(None, arrays(2560, 1, jnp.float64)[:2])


@pytest.mark.parametrize("name", NAMES)
def test_auto_takes_the_kernel_but_for_one_token(name):
    mixer = MIXERS[name]

    def program(time):
        arrays = cast(mixer, draw(mixer, Shape(batch=1, time=time)), jnp.float32)
        with compile_for("tpu", interpret="plain"):
            return str(jax.make_jaxpr(lambda a: mixer(a))(arrays))

    assert "pallas_call" in program(2) and "pallas_call" not in program(1)
