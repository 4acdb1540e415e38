# SPDX-License-Identifier: Apache-2.0
"""GLA, HGRN2 and RWKV-6 under gates that broke other implementations, and their argument errors."""

import jax.numpy as jnp
import numpy as np
import pytest

from seqmix import mixers
from tests.mixers.cases import MIXERS, Shape, draw, draw_segments
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

SHAPE = Shape(time=70)


@pytest.mark.parametrize("packed", [False, True])
def test_decays_of_random_raw_values(packed):
    """log_decay = -exp(3 randn): from 1 to 0 within a few tokens, in every channel its own."""
    mixer = MIXERS["rwkv6"]
    arrays = draw(mixer, SHAPE)
    rng = np.random.default_rng(4)
    arrays["log_decay"] = -np.exp(3 * rng.normal(size=arrays["log_decay"].shape))
    arrays["log_decay"] = np.float64(np.float32(arrays["log_decay"]))
    segments = draw_segments(SHAPE) if packed else None
    cotangents = draw_cotangents(mixer, arrays, mixer.state(SHAPE))
    want = reference(mixer, arrays, None, segments, cotangents)
    got = evaluate(mixer, "chunked", arrays, None, segments, cotangents, jnp.float32)
    assert_within(got, want, FLOAT32_BAR)


def test_the_gradient_of_a_weak_decay_next_to_strong_ones():
    """One channel forgets everything at every other token; its weak decays keep their digits.

    Their gradients are small beside q*dq and k*dk, whose difference would be rounding alone.
    """
    mixer, shape = MIXERS["gla"], Shape(batch=1, time=64, heads=(1, 1, 1))
    arrays = draw(mixer, shape)
    gate = np.full_like(arrays["log_decay"], -1e-3)
    gate[:, ::2] = -12.0
    arrays["log_decay"] = np.float64(np.float32(gate))
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    want = reference(mixer, arrays, None, None, cotangents)
    got = evaluate(mixer, "chunked", arrays, None, None, cotangents, jnp.float32)
    for parity in (0, 1):
        pair = (x["d_log_decay"][:, parity::2] for x in (got, want))
        assert relative_error(*pair) < EXTREME_BAR


def test_wrong_heads_of_the_gate_name_the_state_heads():
    gla = MIXERS["gla"]
    arrays = cast(gla, draw(gla, Shape(batch=1, time=6, heads=(2, 2, 4))), jnp.float32)
    with pytest.raises(ValueError, match=r"gla: log_decay .* = \[1, 6, 4, 8\], got \[1, 6, 2, 8\]"):
        mixers.gla(**arrays | {"log_decay": arrays["log_decay"][:, :, :2]})
    rwkv6 = MIXERS["rwkv6"]
    arrays = cast(rwkv6, draw(rwkv6, Shape(batch=1, time=6)), jnp.float32)
    with pytest.raises(ValueError, match=r"rwkv6: bonus must have shape \[H, K\] = \[2, 8\]"):
        mixers.rwkv6(**arrays | {"bonus": arrays["bonus"][:1]})


def test_heads_before_time_raise_where_a_state_tells():
    """Swapped in q, k, v and the gate alike they look like other sizes; a state gives it away."""
    gla, shape = MIXERS["gla"], Shape(batch=1, time=6)
    arrays = cast(gla, draw(gla, shape), jnp.float32)
    swapped = {n: jnp.swapaxes(a, 1, 2) for n, a in arrays.items()}
    with pytest.raises(ValueError, match="gla: initial_state must have shape"):
        mixers.gla(**swapped, initial_state=jnp.zeros(gla.state(shape)))


def test_hgrn2_at_weak_gates_and_padding():
    """The key 1 - exp(log_decay) of a weak gate has all its digits; padding writes nothing."""
    mixer, shape = MIXERS["hgrn2"], Shape(batch=2, time=40)
    arrays = draw(mixer, shape)
    arrays["log_decay"] = np.float64(np.float32(arrays["log_decay"] * 1e-6))
    segments = draw_segments(shape, padding=0.3)
    cotangents = draw_cotangents(mixer, arrays, mixer.state(shape))
    want = reference(mixer, arrays, None, segments, cotangents)
    for a in arrays.values():
        a[segments == 0] = np.nan
    for impl in ("recurrent", "chunked"):
        got = evaluate(mixer, impl, arrays, None, segments, cotangents, jnp.float32)
        assert_within(got, want, FLOAT32_BAR)


@pytest.mark.parametrize("name", ["gla", "kda"])
def test_chunks_of_one_token_with_grouped_values(name):
    mixer, shape = MIXERS[name], Shape(batch=1, time=5, heads=(2, 2, 4))
    arrays = cast(mixer, draw(mixer, shape), jnp.float32)
    got, state = mixer(arrays, impl="chunked", chunk_size=1)
    want, final = mixer(arrays, impl="recurrent")
    assert relative_error(got, want) < FLOAT32_BAR
    assert relative_error(state, final) < FLOAT32_BAR
