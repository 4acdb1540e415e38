# SPDX-License-Identifier: Apache-2.0
"""GLA, HGRN2, RWKV-5, RWKV-6 and DeltaNet against their formulas, token by token in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix.layers import (
    DeltaNetConfig,
    GLAConfig,
    HGRN2Config,
    LayerInfo,
    RWKV5Config,
    RWKV6Config,
    hgrn2,
)
from tests.layers.modules import COMMON, layer_of
from tests.layers.test_formulas import TIME, WIDTH, build, check, convolve, rms, sigmoid, silu


def draw():
    return np.random.default_rng(0).normal(size=(TIME, WIDTH))


def linear_conv(x, kernel):
    """`convolve` without its SiLU."""
    padded = np.concatenate([np.zeros((len(kernel) - 1, x.shape[1])), x])
    return np.array([np.sum(kernel * padded[t : t + len(kernel)], axis=0) for t in range(len(x))])


def recurrence(q, k, v, decay, *, bonus=None):
    """[T, H, K], [T, H, K], [T, H, V], [T, H, K] -> [T, H, V], unscaled; RWKV's with a bonus."""
    out = np.zeros(v.shape)
    for head in range(q.shape[1]):
        S = np.zeros((q.shape[2], v.shape[2]))
        for t in range(len(q)):
            write = np.outer(k[t, head], v[t, head])
            if bonus is not None:
                out[t, head] = q[t, head] @ (S + bonus[head][:, None] * write)
            S = decay[t, head][:, None] * S + write
            if bonus is None:
                out[t, head] = q[t, head] @ S
    return out


@pytest.mark.parametrize("grouped", [False, True])
def test_gla(grouped):
    options = {"kv_heads": 1, "convolution": 3, "min_log_decay": -0.05} if grouped else {}
    config = GLAConfig(heads=2, expand_key=0.5, expand_value=1.5, gate_rank=3, **options)
    module, p = build(config)
    x, kv_heads = draw(), 1 if grouped else 2
    q, k, v = (x @ p[f"{n}.kernel"] for n in ("query", "key", "value"))
    if grouped:
        q, k, v = (
            convolve(y, p[f"{n}_convolution.kernel"])
            for y, n in ((q, "query"), (k, "key"), (v, "value"))
        )
    logits = x @ p["decay_rank.kernel"] @ p["decay.kernel"] + p["decay.bias"]
    decay = np.log(sigmoid(logits)) / 16
    if grouped:
        assert (decay < -0.05).any()
        decay = np.maximum(decay, -0.05)
    q = q.reshape(TIME, 2, 3)
    k, v, decay = (
        np.repeat(y.reshape(TIME, kv_heads, -1), 2 // kv_heads, axis=1) for y in (k, v, decay)
    )
    out = 3**-0.5 * recurrence(q, k, v, np.exp(decay))
    gate = silu(x @ p["gate.kernel"]).reshape(TIME, 2, 9)
    y = (rms(out, 1e-5) * p["norm.scale"] * gate).reshape(TIME, 18)
    check(module, y @ p["output.kernel"], x)


@pytest.mark.parametrize("options", [{}, {"convolution": 2}, {"lower_bounds": False}])
def test_hgrn2(options):
    module, p = build(HGRN2Config(heads=3, head_width=5, **options))
    x = draw()
    q, f, v = (x @ p[f"{n}.kernel"] for n in ("query", "forget", "value"))
    if "convolution" in options:
        q, f, v = (
            linear_conv(y, p[f"{n}_convolution.kernel"])
            for y, n in ((q, "query"), (f, "forget"), (v, "value"))
        )
    bound = sigmoid(p["lower_bound"]) if options.get("lower_bounds", True) else 0
    forget = bound + (1 - bound) * sigmoid(f)
    q, k, forget = (y.reshape(TIME, 3, 5) for y in (silu(q), 1 - forget, forget))
    out = 5**-0.5 * recurrence(q, k, v.reshape(TIME, 3, 4), forget)
    y = rms(out.reshape(TIME, WIDTH), 1e-5) * p["norm.scale"]
    check(module, y @ p["output.kernel"], x)


def test_hgrn2_keeps_the_digits_of_weak_forgetting_above_a_bound():
    forget = np.linspace(-90, 90, 181, dtype=np.float32)
    for bound in (-110.0, -1.0, 3.0):
        got = hgrn2._log_forget(jnp.asarray(forget), jnp.float32(bound))
        logit, below = np.float64(forget), -np.logaddexp(0, bound)
        key = np.exp(below - np.logaddexp(0, logit))
        strong = np.logaddexp(below + bound, below - np.logaddexp(0, -logit))
        want = np.where(key < 0.5, np.log1p(-np.minimum(key, 0.5)), strong)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-37)


def rwkv_output(out, gate, p):
    centred = out - out.mean(-1, keepdims=True)
    normed = rms(centred, 64e-5).reshape(TIME, -1)
    normed = normed * p["output.norm.scale"] + p["output.norm.bias"]
    return (normed * silu(gate)) @ p["output.output.kernel"]


def test_rwkv5():
    module, p = build(RWKV5Config(heads=2, head_width=5))
    x = draw()
    past = np.concatenate([np.zeros((1, WIDTH)), x[:-1]])
    r, k, v, gate = (
        (mix * x + (1 - mix) * past) @ p[f"{n}.kernel"]
        for mix, n in zip(p["mix"], ("receptance", "key", "value", "gate"), strict=True)
    )
    r, k, v = (y.reshape(TIME, 2, 5) for y in (r, k, v))
    decay = np.broadcast_to(np.exp(-np.exp(p["decay"])), r.shape)
    out = recurrence(r, k, v, decay, bonus=p["bonus"])
    check(module, rwkv_output(out, gate, p), x)


def test_rwkv6():
    module, p = build(RWKV6Config(heads=2, head_width=5, mix_rank=3, decay_rank=4))
    x = draw()
    past = np.concatenate([np.zeros((1, WIDTH)), x[:-1]])
    base = np.tanh((x + (past - x) * p["mix_x"]) @ p["mix_down"])
    inputs = []
    for part in range(5):
        adjusted = base[:, 3 * part : 3 * part + 3] @ p["mix_up"][part]
        inputs.append(x + (past - x) * (p["mix"][part] + adjusted))
    w, k, v, r, gate = inputs
    raw = p["decay"].reshape(-1) + np.tanh(w @ p["decay_down"]) @ p["decay_up"]
    r, k, v = (
        (y @ p[f"{n}.kernel"]).reshape(TIME, 2, 5)
        for y, n in ((r, "receptance"), (k, "key"), (v, "value"))
    )
    decay = np.exp(-np.exp(raw)).reshape(TIME, 2, 5)
    out = recurrence(r, k, v, decay, bonus=p["bonus"])
    check(module, rwkv_output(out, gate @ p["gate.kernel"], p), x)


@pytest.mark.parametrize("gated", [False, True])
def test_delta_net(gated):
    config = DeltaNetConfig(
        heads=2, head_width=5, value_width=3, output_gate=gated, allow_negative_eigenvalues=gated
    )
    module, p = build(config)
    x = draw()
    q, k, v = (
        convolve(x @ p[f"{n}.kernel"], p[f"{n}_convolution.kernel"]).reshape(TIME, 2, -1)
        for n in ("query", "key", "value")
    )
    q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    beta = sigmoid(x @ p["beta.kernel"]) * (2 if gated else 1)
    out = np.zeros((TIME, 2, 3))
    for head in range(2):
        S = np.zeros((5, 3))
        for t in range(TIME):
            error = v[t, head] - k[t, head] @ S
            S = S + beta[t, head] * np.outer(k[t, head], error)
            out[t, head] = 5**-0.5 * q[t, head] @ S
    out = rms(out, 1e-5) * p["norm.scale"]
    if gated:
        out = out * silu(x @ p["gate.kernel"]).reshape(out.shape)
    check(module, out.reshape(TIME, 6) @ p["output.kernel"], x)


@pytest.mark.parametrize("layer", [LayerInfo(0, 4), LayerInfo(2, 4), LayerInfo(0, 1)])
def test_rwkv_initial_values(layer):
    width, size = 12, 4
    rising = layer.index / max(layer.count - 1, 1)
    falling = 1 - layer.index / layer.count
    common = COMMON | {"layer": layer}
    sixth = layer_of(RWKV6Config())(RWKV6Config(head_width=size), width, rngs=nnx.Rngs(0), **common)
    fifth = layer_of(RWKV5Config())(RWKV5Config(head_width=size), width, rngs=nnx.Rngs(0), **common)
    for i in range(width):
        slow = (i / width) ** falling
        fast = (i / width) ** (falling / 2)
        shares = [slow, slow, slow + 0.3 * rising, fast, fast]
        np.testing.assert_allclose(1 - sixth.mix[...][:, i], shares, atol=1e-6)
        np.testing.assert_allclose(sixth.mix_x[...][i], 1 - slow, atol=1e-6)
        np.testing.assert_allclose(
            fifth.mix[...][:, i], [fast, slow, slow + 0.3 * rising, fast], atol=1e-6
        )
        decay = -6 + 5 * (i / (width - 1)) ** (0.7 + 1.3 * rising)
        bonus = rising * (1 - i / (width - 1)) + ((i + 1) % 3 - 1) * 0.1
        for module in (fifth, sixth):
            np.testing.assert_allclose(module.decay[...].reshape(-1)[i], decay, rtol=1e-5)
            np.testing.assert_allclose(module.bonus[...].reshape(-1)[i], bonus, atol=1e-6)
    assert not sixth.mix_down[...].any() and not sixth.decay_down[...].any()
    for small in (sixth.mix_up, sixth.decay_up):
        assert 0.005 < jnp.abs(small[...]).max() <= 0.01


def test_hgrn2_bounds_rise_with_depth_from_exactly_zero():
    for index in range(4):
        module = layer_of(HGRN2Config())(
            HGRN2Config(head_width=4),
            WIDTH,
            rngs=nnx.Rngs(0),
            **COMMON | {"layer": LayerInfo(index, 4)},
        )
        bound = 1 / (1 + jnp.exp(-module.lower_bound[...]))
        np.testing.assert_allclose(bound, index / 4, rtol=1e-6)
