# SPDX-License-Identifier: Apache-2.0
"""What each mixer becomes when what it adds to another is switched off."""

import functools

import jax.numpy as jnp
import numpy as np

from seqmix import mixers
from tests.mixers.cases import MIXERS, Shape, draw, draw_segments, draw_state
from tests.mixers.parity import FLOAT32_BAR, cast, quick_jit, relative_error

SHAPE = Shape(batch=2, time=70)
GATE = (SHAPE.batch, SHAPE.time, SHAPE.states)


@functools.partial(quick_jit, static_argnames=("name", "scale"))
def run(name, arrays, state, segment_ids=None, *, scale=None):
    """The chunked form of a mixer."""
    options = {} if scale is None else {"scale": scale}
    return getattr(mixers, name)(
        **arrays, initial_state=state, segment_ids=segment_ids, impl="chunked", **options
    )


def close(got, want):
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) < FLOAT32_BAR


def float32_case(name):
    """Arrays, state and packed segments."""
    mixer = MIXERS[name]
    state = jnp.asarray(draw_state(mixer, SHAPE), jnp.float32)
    return cast(mixer, draw(mixer, SHAPE), jnp.float32), state, jnp.asarray(draw_segments(SHAPE))


def test_gla_with_equal_channels_is_simple_gla():
    arrays, state, segments = float32_case("simple_gla")
    simple = run("simple_gla", arrays, state, segments)
    arrays["log_decay"] = jnp.broadcast_to(arrays["log_decay"][..., None], (*GATE, SHAPE.key))
    close(run("gla", arrays, state, segments), simple)


def test_rwkv6_reads_what_gla_reads_one_token_later():
    """r_t S_{t-1} is the read of GLA's state at t - 1 by the next token's receptance."""
    arrays, state, _ = float32_case("rwkv6")
    arrays["bonus"] = jnp.zeros_like(arrays["bonus"])
    out, final = run("rwkv6", arrays, state)
    del arrays["bonus"]
    r = arrays.pop("r")
    read, end = run("gla", arrays | {"q": jnp.roll(r, -1, axis=1)}, state, scale=1.0)
    first = jnp.einsum("bhk,bhkv->bhv", r[:, 0], state)
    close((out, final), (jnp.concatenate([first[:, None], read[:, :-1]], axis=1), end))


def test_rwkv6_with_full_bonus_and_no_decay_is_linear_attention():
    arrays, state, segments = float32_case("rwkv6")
    arrays["bonus"] = jnp.ones_like(arrays["bonus"])
    arrays["log_decay"] = jnp.zeros_like(arrays["log_decay"])
    rwkv = run("rwkv6", arrays, state, segments)
    plain = {"q": arrays["r"], "k": arrays["k"], "v": arrays["v"], "log_decay": jnp.zeros(GATE)}
    close(rwkv, run("simple_gla", plain, state, segments, scale=1.0))


def test_rwkv5_is_rwkv6_with_one_decay_for_all_tokens():
    arrays, state, segments = float32_case("rwkv5")
    fifth = run("rwkv5", arrays, state, segments)
    arrays["log_decay"] = jnp.broadcast_to(arrays["log_decay"], (*GATE, SHAPE.key))
    close(fifth, run("rwkv6", arrays, state, segments))


def test_no_decay_is_linear_attention():
    """SSD with decay 1 is linear attention without a normaliser."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 70, 2, 4)), jnp.float32) for _ in range(3))
    got, state = mixers.linear_attention(q, k, v, feature_map="identity", normalize=False)
    want, final = mixers.ssd(v, jnp.ones((2, 70, 2)), jnp.zeros(2), k, q)
    assert relative_error(got, want) < FLOAT32_BAR
    assert relative_error(state, final) < FLOAT32_BAR


def test_second_order_attention_is_its_quadratic_form():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 150, 2, 5)), jnp.float32) for _ in range(3))
    gate = jnp.asarray(-np.exp(rng.normal(size=(2, 150, 2)) - 2), jnp.float32)
    got, _ = mixers.second_order_attention(q, k, v, gate, impl="chunked")
    products = np.einsum("bihk,bjhk->bhij", *(np.asarray(x, np.float64) for x in (q, k)))
    weights = (products * 5**-0.5) ** 2 * np.asarray(mixers.structured_mask(gate), np.float64)
    want = np.einsum("bhij,bjhv->bihv", weights / (weights.sum(-1, keepdims=True) + 1e-8), v)
    assert relative_error(got, want) < FLOAT32_BAR


def test_delta_rule_on_orthonormal_keys_is_additive_linear_attention():
    """Orthonormal keys read nothing of one another: the erase term vanishes, and beta = 1 adds."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(2, 2, 16, 16)))[0].transpose(0, 2, 1, 3)
    q, v = (jnp.asarray(rng.normal(size=(2, 16, 2, 16)), jnp.float32) for _ in range(2))
    arrays = {"q": q, "k": jnp.asarray(basis, jnp.float32), "v": v}
    delta = run("delta_rule", arrays | {"beta": jnp.ones((2, 16, 2))}, None)
    close(delta, run("simple_gla", arrays | {"log_decay": jnp.zeros((2, 16, 2))}, None))


def test_kda_with_equal_channel_decays_is_the_gated_delta_rule():
    arrays, state, segments = float32_case("gated_delta_rule")
    gated = run("gated_delta_rule", arrays, state, segments)
    arrays["log_decay"] = jnp.broadcast_to(arrays["log_decay"][..., None], (*GATE, SHAPE.key))
    close(run("kda", arrays, state, segments), gated)


def test_rwkv7_with_kdas_substitution_is_kda():
    """a = exp(log_decay) k reads the undecayed state as k reads the decayed one; b = -beta k."""
    arrays, state, segments = float32_case("kda")
    kda = run("kda", arrays, state, segments)
    q, k, v, log_decay, beta = arrays.values()
    written = beta[..., None] * k
    substituted = {
        "r": q,
        "k": written,
        "v": v,
        "log_decay": log_decay,
        "a": jnp.exp(log_decay) * k,
        "b": -written,
    }
    close(run("rwkv7", substituted, state, segments, scale=SHAPE.key**-0.5), kda)
