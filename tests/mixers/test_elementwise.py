# SPDX-License-Identifier: Apache-2.0
"""The elementwise and time-invariant mixers where the shared suite does not reach."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqmix import mixers
from seqmix.mixers import hippo
from seqmix.mixers.s4d import _phase
from tests.mixers.cases import MIXERS, Shape, draw, draw_segments, draw_state, representable
from tests.mixers.parity import (
    BFLOAT16_BAR,
    EXTREME_BAR,
    FLOAT32_BAR,
    assert_within,
    cast,
    draw_cotangents,
    evaluate,
    reference,
    relative_error,
)

FORMS = ("associative", "chunked")


def compare(name, impl, arrays, shape, *, packed=True, bar=FLOAT32_BAR, dtype="float32", **options):
    mixer = MIXERS[name]
    state = draw_state(mixer, shape)
    segments = draw_segments(shape) if packed else None
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    want = reference(mixer, arrays, state, segments, cotangents)
    got = evaluate(mixer, impl, arrays, state, segments, cotangents, dtype, **options)
    assert all(np.all(np.isfinite(x)) for x in got.values())
    assert_within(got, want, bar)


@pytest.mark.parametrize("impl", FORMS)
def test_step_sizes_from_raw_values_of_twenty(impl):
    """Raw dt at +-20 before softplus: decays from 1 - 2e-9 to exp(-150) side by side."""
    shape = Shape(batch=1, time=70)
    arrays = draw(MIXERS["selective_scan"], shape)
    raw = np.random.default_rng(6).choice([-20.0, 20.0, 0.5], size=arrays["dt"].shape)
    arrays["dt"] = np.logaddexp(0, raw)
    compare("selective_scan", impl, representable(arrays), shape)


@pytest.mark.parametrize("impl", FORMS)
def test_exponents_from_zero_to_minus_ten_thousand(impl):
    """dt A of 0, tiny, -1e4 and far below what exp can tell from 0, in one chunk."""
    shape = Shape(batch=1, time=70)
    arrays = draw(MIXERS["selective_scan"], shape)
    rng = np.random.default_rng(7)
    arrays["dt"] = rng.choice([0.0, 1e-7, 1e-2, 1.0, 1e3], size=arrays["dt"].shape)
    arrays["A"] = -rng.choice([1e-3, 1.0, 16.0, 1e4], size=arrays["A"].shape)
    # Writes of size dt would drown every other; the input undoes them.
    arrays["x"] = arrays["x"] / np.maximum(1, arrays["dt"])
    compare("selective_scan", impl, representable(arrays), shape, bar=EXTREME_BAR)


@pytest.mark.parametrize("name", ["rg_lru", "s4d"])
def test_associative_form(name):
    shape = Shape(time=100, key=3, value=4)
    compare(name, "associative", draw(MIXERS[name], shape), shape)


def test_associative_form_with_extreme_gates():
    shape = Shape(time=100, value=4)
    arrays = draw(MIXERS["rg_lru"], shape, extreme=True)
    compare("rg_lru", "associative", arrays, shape, bar=EXTREME_BAR)


@pytest.mark.parametrize("chunk_size", [None, 8])
def test_three_magnitudes_and_exact_resets(chunk_size):
    shape = Shape(batch=1, time=100)
    arrays = draw(MIXERS["rg_lru"], shape)
    pattern = [-1e-6, -30.0, 0.0, -1000.0, -np.inf, -1e-6, -1e-3]
    arrays["log_a"] = np.resize(pattern, arrays["log_a"].shape)
    compare("rg_lru", "chunked", arrays, shape, chunk_size=chunk_size, bar=EXTREME_BAR)


def test_root_at_no_decay_has_the_bounded_derivative():
    """At log_a = 0 the root's derivative does not exist; that of the reference code is 1000."""

    def second_token(log_a):
        x = jnp.ones((1, 2, 1))
        return mixers.rg_lru(x, log_a.reshape(1, 2, 1))[0][0, 1, 0]

    gradient = jax.grad(second_token)(jnp.zeros(2))
    # h_2 = exp(l) h_1 + root(1 - exp(2 l)): 1 from the decay, -2 * 1000 from the root.
    np.testing.assert_allclose(gradient, [0.0, 1 - 2000.0], rtol=1e-6)


def test_a_document_starts_whole_unless_it_continues():
    x, log_a = jnp.full((1, 1, 2), 3.0), jnp.full((1, 1, 2), jnp.log(0.6))
    state = jnp.asarray([[5.0, 0.0]])

    def run(**options):
        return np.asarray(mixers.rg_lru(x, log_a, **options)[0][0, 0])

    np.testing.assert_allclose(run(), [3, 3], rtol=1e-6)
    np.testing.assert_allclose(run(initial_state=0 * state), [3, 3], rtol=1e-6)
    np.testing.assert_allclose(run(initial_state=state), [5 * 0.6 + 3 * 0.8, 2.4], rtol=1e-6)
    told = {"initial_state": 0 * state, "continues": jnp.asarray([True])}
    np.testing.assert_allclose(run(**told), [2.4, 2.4], rtol=1e-6)
    told = {"initial_state": state, "continues": jnp.asarray([False])}
    np.testing.assert_allclose(run(**told), [3, 3], rtol=1e-6)
    with pytest.raises(ValueError, match=r"rg_lru: continues must be bool \[B\] = \[1\]"):
        run(continues=jnp.ones((1, 1), bool))


@pytest.mark.parametrize("name", ["selective_scan", "rg_lru", "s4d"])
def test_tens_of_thousands_of_documents_in_one_row(name):
    shape = Shape(batch=1, time=20_000, heads=(1, 1, 1), key=2, value=2)
    arrays = cast(MIXERS[name], draw(MIXERS[name], shape), jnp.float32)
    segments = jnp.arange(20_000)[None] // 2 + 1
    out, state = MIXERS[name](arrays, segment_ids=segments, impl="chunked")
    want, final = MIXERS[name](arrays, segment_ids=segments, impl="recurrent")
    assert relative_error(out, want) < FLOAT32_BAR
    assert relative_error(state, final) < FLOAT32_BAR


def test_no_array_over_time_and_states():
    """The program of forward and backward holds [T, D] arrays only, whatever N."""

    def temporary(size):
        arrays = draw(MIXERS["selective_scan"], Shape(1, 1, (1, 1, 1), size, 64))
        specs = {
            n: jax.ShapeDtypeStruct((1, 4096, *a.shape[2:]) if a.ndim > 2 else a.shape, jnp.float32)
            for n, a in arrays.items()
        }
        loss = lambda a: jnp.sum(jnp.sin(mixers.selective_scan(**a, impl="chunked")[0]))  # noqa: E731
        compiled = jax.jit(jax.grad(loss)).lower(specs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(64) - temporary(16) < 4096 * 64 * 48 * 4 / 8
    assert temporary(16) < 2 * 4096 * (4 * 64 + 4 * 16) * 4


@pytest.mark.parametrize("name", ["s4d", "s4"])
@pytest.mark.parametrize("time", [1, 2, 7, 64, 100])
def test_fft_of_whole_rows_with_states(name, time):
    shape = Shape(time=time, key=3, value=4)
    compare(name, "fft", draw(MIXERS[name], shape), shape, packed=False)


@pytest.mark.parametrize("name", ["s4d", "s4"])
def test_fft_of_bfloat16(name):
    shape = Shape(time=100, key=3, value=4)
    mixer = MIXERS[name]
    arrays = draw(mixer, shape)
    arrays["u"] = np.asarray(jnp.asarray(arrays["u"], jnp.bfloat16), np.float64)
    compare(name, "fft", arrays, shape, packed=False, bar=BFLOAT16_BAR, dtype=jnp.bfloat16)


@pytest.mark.parametrize("name", ["s4d", "s4"])
def test_forms_give_the_same_numbers_and_never_mix_documents(name):
    shape = Shape(batch=2, time=40, key=3, value=4)
    mixer = MIXERS[name]
    arrays = cast(mixer, draw(mixer, shape), jnp.float32)
    segments = jnp.asarray(draw_segments(shape))
    for ids in (None, segments):
        want = mixer(arrays, impl="recurrent", segment_ids=ids)
        for form in ("conv", "recurrent", "auto"):
            got = mixer(arrays, form=form, segment_ids=ids)
            for x, y in zip(got, want, strict=True):
                assert relative_error(x, y) < FLOAT32_BAR
    fft = str(jax.make_jaxpr(lambda a: mixer(a, form="conv"))(arrays))
    assert "fft" in fft and "fft" not in str(jax.make_jaxpr(mixer)(arrays))
    for options, message in (
        ({"impl": "fft", "segment_ids": segments}, "cannot keep the documents of segment_ids"),
        ({"form": "conv", "impl": "recurrent"}, "form='conv' is impl chunked or fft, got 'recurr"),
        ({"form": "recurrent", "impl": "fft"}, "form='recurrent' is impl recurrent"),
        ({"form": "fast"}, "form must be one of .* got 'fast'"),
    ):
        with pytest.raises(ValueError, match=message):
            mixer(arrays, **options)


def _pairs(z, width):
    return np.tile(np.stack([z.real, z.imag], -1), (width, 1, 1))


@pytest.mark.parametrize("impl", ["chunked", "fft"])
@pytest.mark.parametrize("kind", ["legs", "lin", "inv", "real", "s4"])
def test_initial_systems_over_a_thousand_tokens(kind, impl):
    """64 states as the layers start them, steps from 1e-3 to 1e-1: outputs and gradients."""
    width, size = 4, 64
    rng = np.random.default_rng(8)
    arrays = {
        "u": rng.normal(size=(1, 1000, width)),
        "dt": np.geomspace(1e-3, 1e-1, width),
        "C": rng.normal(size=(width, size // 2, 2)),
        "D": rng.normal(size=width),
    }
    if kind == "s4":
        poles, P, B = hippo.legs_dplr(size)
        arrays |= {"A": _pairs(poles, width), "P": _pairs(P, width), "B": _pairs(B, width)}
    else:
        arrays["A"] = _pairs(hippo.diagonal(kind, size), width)
    mixer = MIXERS["s4" if kind == "s4" else "s4d"]
    arrays = representable(arrays)
    cotangents = rng.normal(size=arrays["u"].shape), rng.normal(size=(1, width, size // 2, 2))
    want = reference(mixer, arrays, None, None, cotangents)
    got = evaluate(mixer, impl, arrays, None, None, cotangents, jnp.float32)
    if kind == "s4":
        # dt's gradient adds those of poles up to 1300, which all but cancel: 2e-5 to 5e-5.
        assert relative_error(got.pop("d_dt"), want.pop("d_dt")) < EXTREME_BAR
    assert_within(got, want, FLOAT32_BAR)


def test_phases_keep_the_digits_of_whole_turns():
    rng = np.random.default_rng(10)
    dt = np.exp(rng.uniform(-7, -2, 1000)).astype(np.float32)
    frequency = (10 ** rng.uniform(-1, 4, 1000) * rng.choice([-1, 1], 1000)).astype(np.float32)
    near, rest = (np.asarray(x, np.float64) for x in jax.jit(_phase)(dt, frequency))
    got = near + rest
    error = got - dt.astype(np.float64) * frequency.astype(np.float64)
    error -= 2 * np.pi * np.round(error / (2 * np.pi))
    assert np.abs(error).max() < 1e-11 and np.abs(got).max() < 3.2


def test_equal_steps_and_rates_make_the_selective_scan_ssd():
    """One decay for all channels and states is Mamba-2's head of D values."""
    rng = np.random.default_rng(9)
    x, B, C = (rng.normal(size=(2, 50, n)) for n in (6, 3, 3))
    dt, state = np.logaddexp(0, rng.normal(size=(2, 50))), rng.normal(size=(2, 6, 3))
    x, B, C, dt, state = (jnp.asarray(a, jnp.float32) for a in (x, B, C, dt, state))
    steps = jnp.broadcast_to(dt[..., None], x.shape)
    rates = jnp.full((6, 3), -0.7)
    y, final = mixers.selective_scan(x, steps, rates, B, C, initial_state=state)
    want, end = mixers.ssd(
        x[:, :, None],
        dt[..., None],
        jnp.full((1,), -0.7),
        B[:, :, None],
        C[:, :, None],
        initial_state=state.swapaxes(1, 2)[:, None],
    )
    assert relative_error(y, want[:, :, 0]) < FLOAT32_BAR
    assert relative_error(final, end[:, 0].swapaxes(1, 2)) < FLOAT32_BAR


def test_s4_without_its_rank_one_part_approaches_s4d():
    """Bilinear and held inputs differ by O(dt^2) relative to each other."""
    shape = Shape(batch=1, time=50, key=3, value=4)
    errors = []
    for factor in (1.0, 0.5):
        arrays = draw(MIXERS["s4"], shape)
        arrays["dt"] = arrays["dt"] * 0 + 0.1 * factor
        arrays["P"], arrays["B"] = arrays["P"] * 0, arrays["B"] * 0 + [1.0, 0.0]
        arrays["u"] = np.ones_like(arrays["u"])
        with jax.enable_x64(True):
            both = {n: jnp.asarray(a) for n, a in arrays.items()}
            y, _ = mixers.s4(**both)
            want, _ = mixers.s4d(**{n: a for n, a in both.items() if n not in "PB"})
        errors.append(relative_error(y, want))
    assert errors[0] < 0.05 and errors[1] < 0.6 * errors[0]


def test_hippo_legs_is_normal_plus_rank_one():
    for size in (2, 16, 64):
        A, B = hippo.legs(size)
        n = np.arange(size)
        assert A[1, 0] == -np.sqrt(3) and A[1, 1] == -2 and A[0, 1] == 0
        np.testing.assert_allclose(B**2, 2 * n + 1)
        poles, P, b = hippo.legs_dplr(size)
        np.testing.assert_allclose(poles.real, -0.5)
        assert (np.diff(poles.imag) > 0).all() and poles.imag[0] > 0
        # The transfer function B^T (s - A)^{-1} B from both.
        full = [np.concatenate([z, z.conj()]) for z in (poles, P, b)]
        dense = np.diag(full[0]) - np.outer(full[1], full[1].conj())
        for s in (0.3 + 1j, 2.0 - 5j):
            want = B @ np.linalg.solve(s * np.eye(size) - A, B)
            got = full[2].conj() @ np.linalg.solve(s * np.eye(size) - dense, full[2])
            np.testing.assert_allclose(got, want, rtol=1e-9)


def test_diagonal_initialisations():
    n = np.arange(4)
    np.testing.assert_allclose(hippo.diagonal("lin", 8), -0.5 + 1j * np.pi * n)
    inverse = 8 / np.pi * (8 / (2 * n + 1) - 1)
    np.testing.assert_allclose(hippo.diagonal("inv", 8), -0.5 + 1j * inverse)
    np.testing.assert_allclose(hippo.diagonal("real", 8), -(n + 1))
    np.testing.assert_allclose(hippo.diagonal("legs", 8), hippo.legs_dplr(8)[0])
    with pytest.raises(ValueError, match="kind must be .* got 'legt'"):
        hippo.diagonal("legt", 8)
    with pytest.raises(ValueError, match="size N must be even and >= 2, got 7"):
        hippo.diagonal("lin", 7)
    with pytest.raises(ValueError, match="size must be >= 1, got 0"):
        hippo.legs(0)
