# SPDX-License-Identifier: Apache-2.0
"""Each layer against its formulas, written a second time: token by token, head by head, float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix.layers import GatedDeltaNetConfig, Mamba2Config
from tests.layers.modules import graph_and_shapes, quick_jit, random_parameters

WIDTH, TIME = 12, 11


def silu(x):
    return x / (1 + np.exp(-x))


def softplus(x):
    return np.log1p(np.exp(x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms(x, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)


def convolve(x, kernel, bias=None):
    """x [T, D], kernel [W, D]."""
    taps = len(kernel)
    y = np.zeros_like(x)
    for t in range(len(x)):
        for tap in range(taps):
            if (source := t - (taps - 1) + tap) >= 0:
                y[t] += x[source] * kernel[tap]
    return silu(y if bias is None else y + bias)


def build(config):
    """The compiled layer and its parameters by name."""
    graph, shapes = graph_and_shapes(config, WIDTH)
    state = random_parameters(shapes)
    flat = {
        ".".join(map(str, p)): np.asarray(v[...], np.float64) for p, v in nnx.to_flat_state(state)
    }
    return quick_jit(lambda x: nnx.merge(graph, state)(x)), flat


def check(module, expected, x):
    y, cache = module(jnp.asarray(x, jnp.float32)[None])
    assert cache is None
    np.testing.assert_allclose(y[0], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("negative", [False, True])
def test_gated_delta_net(negative):
    config = GatedDeltaNetConfig(
        heads=2,
        value_heads=4,
        head_width=5,
        value_width=3,
        allow_negative_eigenvalues=negative,
        beta_bias=negative,
    )
    module, p = build(config)
    x = np.random.default_rng(0).normal(size=(TIME, WIDTH))
    q, k, v = (
        convolve(x @ p[f"{n}.kernel"], p[f"{n}_convolution.kernel"])
        for n in ("query", "key", "value")
    )
    g = -np.exp(p["A_log"]) * softplus(x @ p["decay.kernel"] + p["dt_bias"])
    assert ("beta.bias" in p) == negative
    beta = sigmoid(x @ p["beta.kernel"] + p.get("beta.bias", 0)) * (2 if negative else 1)
    gate = (x @ p["gate.kernel"]).reshape(TIME, 4, 3)
    out = np.zeros((TIME, 4, 3))
    for head in range(4):
        S = np.zeros((5, 3))
        group = slice(5 * (head // 2), 5 * (head // 2) + 5)
        for t in range(TIME):
            qt, kt = q[t, group], k[t, group]
            qt, kt = qt / np.sqrt(qt @ qt + 1e-6), kt / np.sqrt(kt @ kt + 1e-6)
            S = np.exp(g[t, head]) * S
            S = S + beta[t, head] * np.outer(kt, v[t, 3 * head : 3 * head + 3] - kt @ S)
            out[t, head] = 5**-0.5 * qt @ S
    out = rms(out, 1e-5) * p["norm.scale"] * silu(gate)
    check(module, out.reshape(TIME, 12) @ p["output.kernel"], x)


@pytest.mark.parametrize("limit", [None, (0.05, 0.3)])
def test_mamba2(limit):
    config = Mamba2Config(expand=2, head_width=4, state_size=5, groups=2, dt_limit=limit)
    module, p = build(config)
    u = np.random.default_rng(0).normal(size=(TIME, WIDTH))
    x, B, C = (
        convolve(u @ p[f"{n}.kernel"], p[f"{n}_convolution.kernel"], p[f"{n}_convolution.bias"])
        for n in "xBC"
    )
    dt = softplus(u @ p["dt.kernel"] + p["dt_bias"])
    if limit is not None:
        clipped = np.clip(dt, *limit)
        assert (clipped != dt).any()
        dt = clipped
    out = np.zeros((TIME, 6, 4))
    for head in range(6):
        h = np.zeros((4, 5))
        group = slice(5 * (head // 3), 5 * (head // 3) + 5)
        for t in range(TIME):
            xt = x[t, 4 * head : 4 * head + 4]
            h = np.exp(-np.exp(p["A_log"][head]) * dt[t, head]) * h
            h = h + np.outer(dt[t, head] * xt, B[t, group])
            out[t, head] = h @ C[t, group] + p["D"][head] * xt
    y = out.reshape(TIME, 24) * silu(u @ p["gate.kernel"])
    y = rms(y.reshape(TIME, 2, 12), 1e-5).reshape(TIME, 24) * p["norm.scale"]
    check(module, y @ p["output.kernel"], u)
