# SPDX-License-Identifier: Apache-2.0
"""The layers on the scalar-decay core against their formulas, token by token in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix.layers import (
    BasedConfig,
    LayerInfo,
    Lightning,
    LightningConfig,
    LinearAttentionConfig,
    Mamba2ndConfig,
    Mamba2SConfig,
    Mamba3Config,
    Performer,
    PerformerConfig,
    RetNetConfig,
    parameters,
    redraw_features,
)
from seqmix.models import HybridLM, HybridLMConfig, unstack
from tests.layers.modules import COMMON
from tests.layers.test_formulas import TIME, WIDTH, build, check, rms, sigmoid, silu, softplus


def draw():
    return np.random.default_rng(0).normal(size=(TIME, WIDTH))


def heads_of(x, p, *names, heads=2):
    return tuple((x @ p[f"{n}.kernel"]).reshape(TIME, heads, -1) for n in names)


def linear_convolution(x, p, name):
    """The projection `name` through its convolution, bias and all, without an activation."""
    y, kernel = x @ p[f"{name}.kernel"], p[f"{name}_convolution.kernel"]
    padded = np.concatenate([np.zeros((len(kernel) - 1, y.shape[1])), y])
    rows = [np.sum(kernel * padded[t : t + len(kernel)], axis=0) for t in range(TIME)]
    return (np.array(rows) + p[f"{name}_convolution.bias"]).reshape(TIME, 2, -1)


def mix(weigh, v, gate=None, eps=None):
    """[T, H, V] of weights weigh(head) [T, T], decayed from gates [T, H]; normalised with eps."""
    out = np.zeros(v.shape)
    for head in range(v.shape[1]):
        weights = np.tril(weigh(head))
        if gate is not None:
            for i in range(TIME):
                for j in range(i + 1):
                    weights[i, j] *= np.exp(gate[j + 1 : i + 1, head].sum())
        if eps is not None:
            weights = weights / (weights.sum(-1, keepdims=True) + eps)
        out[:, head] = weights @ v[:, head]
    return out


def elu_plus_one(x):
    return np.where(x > 0, x + 1, np.exp(x))


def test_linear_attention():
    module, p = build(LinearAttentionConfig(heads=2, head_width=5))
    x = draw()
    q, k, v = heads_of(x, p, "query", "key", "value")
    out = mix(lambda h: elu_plus_one(q[:, h]) @ elu_plus_one(k[:, h]).T, v, eps=1e-6)
    check(module, out.reshape(TIME, -1) @ p["output.kernel"], x)


@pytest.mark.parametrize("name", ["hedgehog", "dpfp"])
def test_linear_attention_with_other_maps_and_an_output_norm(name):
    config = LinearAttentionConfig(heads=2, head_width=5, feature_map=name, normalize=False)
    module, p = build(config)
    x = draw()
    q, k, v = heads_of(x, p, "query", "key", "value")

    def features(z, which, head):
        if name == "hedgehog":
            y = z[:, head] @ p[f"{which}_map"][head]
            y = np.exp(np.concatenate([y, -y], -1))
            return y / y.sum(-1, keepdims=True)
        r = np.maximum(np.concatenate([z[:, head], -z[:, head]], -1), 0)
        return np.concatenate([r * np.roll(r, j, axis=-1) for j in range(1, 5)], -1)

    out = mix(lambda h: features(q, "query", h) @ features(k, "key", h).T, v)
    out = rms(out, 1e-6) * p["norm.scale"]
    check(module, out.reshape(TIME, -1) @ p["output.kernel"], x)


def test_performer():
    module, p = build(PerformerConfig(heads=2, head_width=4, features=6, epsilon=1e-9))
    x = draw()
    q, k, v = heads_of(x, p, "query", "key", "value")

    def features(z):
        z = z / 4**0.25
        return np.exp(z @ p["projection"].T - (z**2).sum(-1, keepdims=True) / 2)

    out = mix(lambda h: features(q[:, h]) @ features(k[:, h]).T, v, eps=0)
    check(module, out.reshape(TIME, -1) @ p["output.kernel"], x)


def test_retnet():
    module, p = build(RetNetConfig(heads=2, head_width=6, value_width=5, rotary_base=50.0))
    x = draw()
    q, k, v = heads_of(x, p, "query", "key", "value")
    turn = np.exp(1j * np.outer(np.arange(TIME), 50.0 ** -np.array([0, 0.5, 1])))
    q, k = ((z[..., 0::2] + 1j * z[..., 1::2]) * turn[:, None] for z in (q, k))
    gate = np.log(1 - 2.0 ** (-5 - np.arange(2))) * np.ones((TIME, 1))
    out = mix(lambda h: (q[:, h] @ k[:, h].conj().T).real * 6**-0.5, v, gate)
    out = rms(out, 1e-6).reshape(TIME, -1) * silu(x @ p["gate.kernel"])
    check(module, out @ p["output.kernel"], x)


def test_lightning():
    module, p = build(LightningConfig(heads=2, head_width=5))
    x = draw()
    q, k, v = (silu(z) for z in heads_of(x, p, "query", "key", "value"))
    gate = -p["slopes"] * np.ones((TIME, 1))
    out = mix(lambda h: q[:, h] @ k[:, h].T, v, gate).reshape(TIME, -1)
    out = rms(out, 1e-5) * p["norm.scale"] * sigmoid(x @ p["gate.kernel"])
    check(module, out @ p["output.kernel"], x)


def test_based():
    module, p = build(BasedConfig(heads=2, feature_width=3, head_width=5))
    x = draw()
    q, k, v = heads_of(x, p, "query", "key", "value")

    def weigh(h):
        s = q[:, h] @ k[:, h].T / np.sqrt(3)
        return 1 + s + s**2 / 2

    out = mix(weigh, v, eps=1e-12)
    check(module, out.reshape(TIME, -1) @ p["output.kernel"], x)


def test_mamba2s():
    module, p = build(Mamba2SConfig(heads=2, head_width=5))
    x = draw()
    q, k, v = (linear_convolution(x, p, n) for n in ("query", "key", "value"))
    v = v * softplus(x @ p["dt.kernel"])[..., None]
    gate = -softplus(x @ p["decay.kernel"])
    out = mix(lambda h: q[:, h] @ k[:, h].T / np.sqrt(5), v, gate).reshape(TIME, -1)
    check(module, rms(out, 1e-6) * p["norm.scale"] @ p["output.kernel"], x)


@pytest.mark.parametrize("exponential", [False, True])
def test_mamba_2nd(exponential):
    module, p = build(Mamba2ndConfig(heads=2, head_width=5, exponential=exponential))
    x = draw()
    q, k, v = (linear_convolution(x, p, n) for n in ("query", "key", "value"))
    gate = -softplus(x @ p["decay.kernel"])

    def weigh(h):
        s = q[:, h] @ k[:, h].T / np.sqrt(5)
        return np.exp(s) if exponential else s**2

    out = mix(weigh, v, gate, eps=0 if exponential else 1e-8)
    check(module, out.reshape(TIME, -1) @ p["output.kernel"], x)


@pytest.mark.parametrize("output_norm", [False, True])
def test_mamba3(output_norm):
    config = Mamba3Config(
        expand=2, head_width=4, state_size=8, groups=2, least_rate=0.8, output_norm=output_norm
    )
    module, p = build(config)
    u = draw()
    x, z = heads_of(u, p, "x", "gate", heads=6)
    B, C = (
        rms((u @ p[f"{n}.kernel"]).reshape(TIME, 2, 8), 1e-5) * p[f"{n}_norm.scale"] for n in "BC"
    )
    dt = softplus(u @ p["dt.kernel"] + p["dt_bias"])
    rate = u @ p["A.kernel"]
    rate = np.maximum(np.where(rate >= 0, 1 + rate, 1 / (1 - np.minimum(rate, 0))), 0.8)
    assert (rate == 0.8).any() and (rate > 1).any()
    now = sigmoid(u @ p["trapezoid.kernel"])
    turn = np.pi * np.tanh(u @ p["rotation.kernel"])
    out = np.zeros((TIME, 6, 4))
    for head in range(6):
        h, k, angle = np.zeros((8, 4)), np.zeros(8), np.zeros(2)
        for t in range(TIME):
            step, decay = dt[t, head], np.exp(-rate[t, head] * dt[t, head])
            previous = np.outer(k, x[t - 1, head]) if t else 0 * h
            angle = angle + turn[t] * step
            k, q = (
                rotated(y[t, head // 3] + p[f"{n}_bias"][head], angle)
                for y, n in ((B, "B"), (C, "C"))
            )
            h = decay * h + (1 - now[t, head]) * step * decay * previous
            h = h + now[t, head] * step * np.outer(k, x[t, head])
            out[t, head] = q @ h + p["D"][head] * x[t, head]
    if output_norm:
        out = rms(out, 1e-5) * p["norm.scale"].reshape(6, 4)
    out = (out * silu(z)).reshape(TIME, -1)
    check(module, out @ p["output.kernel"], u)


def rotated(x, angle):
    pairs = (x[0:4:2] + 1j * x[1:4:2]) * np.exp(1j * angle)
    return np.concatenate([np.stack([pairs.real, pairs.imag], -1).ravel(), x[4:]])


def test_lightning_slopes_fall_from_layer_to_layer_scanned_or_not():
    config = HybridLMConfig(
        vocabulary=7,
        width=8,
        layers=5,
        pattern="2 lightning",
        mixers={"lightning": LightningConfig(head_width=4)},
    )
    scanned = HybridLM(config, rngs=nnx.Rngs(0))
    unrolled = unstack(scanned)
    slopes = np.array([block.mixer.slopes[...] for block in unrolled.stack.leading])
    factors = 1 - np.arange(5) / (4 + 1e-5) + 1e-5
    want = np.array([2.0**-4, 2.0**-8]) * factors[:, None]
    np.testing.assert_allclose(slopes, want, rtol=1e-5, atol=1e-9)
    tokens = jnp.arange(6)[None] % 7
    np.testing.assert_allclose(scanned(tokens), unrolled(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "exponents"), [("alibi", [4, 8, 2]), ("geometric", [8 / 3, 16 / 3, 8])]
)
def test_lightning_slopes_of_heads_that_are_no_power_of_two(kind, exponents):
    config = LightningConfig(heads=3, head_width=1, slopes=kind)
    layer = Lightning(config, 2, rngs=nnx.Rngs(0), **COMMON)
    np.testing.assert_allclose(layer.slopes[...], 2.0 ** -np.array(exponents), rtol=1e-4)


def test_buffers_are_not_trained_and_stay_float32():
    layer = Lightning(LightningConfig(heads=2), 8, rngs=nnx.Rngs(0), **COMMON)
    assert "slopes" not in nnx.state(layer, nnx.Param)
    cast = parameters.cast(nnx.state(layer), jnp.bfloat16)
    assert cast["slopes"].dtype == jnp.float32
    assert cast["query"]["kernel"].dtype == jnp.bfloat16
    alone = LayerInfo(0, 1)
    layer = Lightning(
        LightningConfig(heads=1),
        8,
        layer=alone,
        dtype="float32",
        param_dtype="float32",
        rngs=nnx.Rngs(0),
    )
    np.testing.assert_allclose(layer.slopes[...], 2.0**-8, rtol=1e-4)


def test_redrawing_changes_every_projection_and_nothing_else():
    config = HybridLMConfig(
        vocabulary=7,
        width=8,
        layers=3,
        pattern="performer",
        trailing="performer",
        mixers={"performer": PerformerConfig(head_width=4, features=6)},
    )
    model = HybridLM(config, rngs=nnx.Rngs(0))
    before = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(model)))
    redraw_features(model, jax.random.key(1))
    after = nnx.to_pure_dict(nnx.state(model))
    changed = []
    jax.tree_util.tree_map_with_path(
        lambda path, a, b: changed.append((path[-1].key, a, b)) if (a != b).any() else None,
        before,
        after,
    )
    assert sorted(a.shape for _, a, _ in changed) == [(2, 6, 4), (6, 4)]
    assert all(name == "projection" for name, *_ in changed)
    stacked = next(b for _, _, b in changed if b.ndim == 3)
    assert not np.allclose(stacked[0], stacked[1])
    single = Performer(PerformerConfig(head_width=4, features=6), 8, rngs=nnx.Rngs(0), **COMMON)
    old = single.projection[...]
    redraw_features(single, jax.random.key(2))
    assert not np.allclose(old, single.projection[...])


@pytest.mark.parametrize("scan", [False, True])
def test_training_redraws_projections_every_so_many_steps(scan):
    mixer = PerformerConfig(head_width=4, features=6, redraw_every=2)
    config = HybridLMConfig(
        vocabulary=7, width=8, layers=2, pattern="performer", mixers={"performer": mixer}, scan=scan
    )
    model = HybridLM(config, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)

    @jax.jit
    def finish(state):
        model = nnx.merge(graph, state)
        model.finish_step()
        return nnx.split(model)[1]

    def projections(state):
        model = nnx.merge(graph, state)
        blocks = (*model.stack.leading, *model.stack.periods)
        return np.concatenate([np.reshape(b.mixer.projection[...], (-1, 6, 4)) for b in blocks])

    drawn = [projections(state)]
    for _ in range(4):
        state = finish(state)
        drawn.append(projections(state))
    np.testing.assert_array_equal(drawn[1], drawn[0])
    np.testing.assert_array_equal(drawn[3], drawn[2])
    fresh = [p for step in (0, 2, 4) for p in drawn[step]]
    assert len({p.tobytes() for p in fresh}) == 6
    first = drawn[4][0][:4]  # directions of a block are orthogonal
    np.testing.assert_allclose(first @ first.T, np.diag(np.diag(first @ first.T)), atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearAttentionConfig(feature_map="identity"), "normalize must be False with"),
        (lambda: LinearAttentionConfig(feature_map="dpfp", head_width=2), "head_width must be > 2"),
        (lambda: RetNetConfig(head_width=5), "head_width must be a multiple of a pair = 2, got 5"),
        (lambda: PerformerConfig(features=0), "Performer.features must be >= 1, got 0"),
        (lambda: Mamba3Config(rotary_fraction=0.1), "Mamba3.rotary_fraction: .* 13 channels"),
        (lambda: Mamba3Config(dt_min=1.0), "Mamba3.dt_min must be <= dt_max, got 1.0 > 0.1"),
        (lambda: Mamba2ndConfig().state_shape(100), "head_width = 64 does not divide .* 100"),
    ],
)
def test_bad_settings_name_themselves(make, message):
    with pytest.raises(ValueError, match=message):
        make()
