# SPDX-License-Identifier: Apache-2.0
"""Mamba, RG-LRU, S4D, S4 and VMamba against their formulas, token by token in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix.layers import MambaConfig, RGLRUConfig, S4Config, S4DConfig, VMambaConfig, registry
from seqmix.mixers import hippo
from tests.layers.modules import COMMON
from tests.layers.test_formulas import TIME, WIDTH, build, check, rms, sigmoid, silu, softplus


def correlate(x, kernel, bias):
    """Causal depthwise convolution of x [T, D] with kernel [W, D], no activation."""
    padded = np.concatenate([np.zeros((len(kernel) - 1, x.shape[1])), x])
    return np.array([(padded[t : t + len(kernel)] * kernel).sum(0) for t in range(len(x))]) + bias


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def selective_scan(x, dt, A, B, C, D):
    h, y = np.zeros(A.shape), []
    for t in range(len(x)):
        h = np.exp(dt[t][:, None] * A) * h + np.outer(dt[t] * x[t], B[t])
        y.append(h @ C[t] + D * x[t])
    return np.array(y)


def mamba_heads(u, p, norms):
    """What Mamba's output projection reads; inner norms with epsilon 0.01."""
    x = silu(correlate(u @ p["x.kernel"], p["x_convolution.kernel"], p["x_convolution.bias"]))

    def project(name):
        y = x @ p[f"{name}.kernel"]
        if not norms:
            return y
        return rms(y, 1e-2) * p[f"{name.removesuffix('_rank')}_norm.scale"]

    dt = softplus(project("dt_rank") @ p["dt.kernel"] + p["dt_bias"])
    y = selective_scan(x, dt, -np.exp(p["A_log"]), project("B"), project("C"), p["D"])
    return y * silu(u @ p["gate.kernel"])


@pytest.mark.parametrize("norms", [False, True])
def test_mamba(norms):
    module, p = build(MambaConfig(state_size=5, dt_rank=3, inner_norms=norms, norm_epsilon=1e-2))
    u = np.random.default_rng(0).normal(size=(TIME, WIDTH))
    check(module, mamba_heads(u, p, norms) @ p["output.kernel"], u)


def test_rg_lru():
    module, p = build(RGLRUConfig(expand=2, heads=3))
    u = np.random.default_rng(0).normal(size=(TIME, WIDTH))
    x = u @ p["x.kernel"] + p["x.bias"]
    x = correlate(x, p["x_convolution.kernel"], p["x_convolution.bias"])

    def gate(name):
        parts = [x[:, 8 * i : 8 * i + 8] @ kernel for i, kernel in enumerate(p[f"{name}.kernel"])]
        return sigmoid(np.concatenate(parts, 1) + p[f"{name}.bias"])

    a = np.exp(-8 * gate("recurrence_gate") * softplus(p["Lambda"]))
    v = gate("input_gate") * x
    h, out = v[0], [v[0]]
    for t in range(1, TIME):
        h = a[t] * h + np.sqrt(1 - a[t] ** 2) * v[t]
        out.append(h)
    y = np.array(out) * gelu(u @ p["gate.kernel"] + p["gate.bias"])
    check(module, y @ p["output.kernel"] + p["output.bias"], u)


def pair(p, name):
    return p[name][..., 0] + 1j * p[name][..., 1]


def gated(out, p):
    z = gelu(out)
    ahead = z @ p["output.kernel"] + p["output.bias"]
    return ahead * sigmoid(z @ p["output_gate.kernel"] + p["output_gate.bias"])


def test_s4d():
    module, p = build(S4DConfig(state_size=6))
    u = np.random.default_rng(0).normal(size=(TIME, WIDTH))
    A, dt = -np.exp(p["log_A_real"]) + 1j * p["A_imag"], np.exp(p["log_dt"])[:, None]
    h, out = np.zeros(A.shape, complex), np.zeros_like(u)
    for t in range(TIME):
        h = np.exp(dt * A) * h + (np.exp(dt * A) - 1) / A * u[t][:, None]
        out[t] = 2 * (pair(p, "C") * h).real.sum(-1) + p["D"] * u[t]
    check(module, gated(out, p), u)


def test_s4():
    module, p = build(S4Config(state_size=6))
    u = np.random.default_rng(0).normal(size=(TIME, WIDTH))
    A = -np.exp(p["log_A_real"]) + 1j * p["A_imag"]
    out = p["D"] * u
    for d in range(WIDTH):
        P, B, C = (np.concatenate([z := pair(p, n)[d], z.conj()]) for n in "PBC")
        matrix = np.diag(np.concatenate([A[d], A[d].conj()])) - np.outer(P, P.conj())
        half = np.exp(p["log_dt"][d]) / 2 * matrix
        identity, h = np.eye(6), np.zeros(6, complex)
        for t in range(TIME):
            right = (identity + half) @ h + np.exp(p["log_dt"][d]) * B * u[t, d]
            h = np.linalg.solve(identity - half, right)
            out[t, d] += (C @ h).real
    check(module, gated(out, p), u)


def test_vmamba():
    height, width = 3, 4
    module, p = build(
        VMambaConfig(grid=(height, width), expand=1, state_size=3, dt_rank=2, norm_epsilon=1e-2)
    )
    u = np.random.default_rng(0).normal(size=(2 * height * width, WIDTH))
    whole = []
    for grid in np.split(u, 2):
        x = (grid @ p["x.kernel"]).reshape(height, width, WIDTH)
        conv = np.zeros_like(x) + p["convolution_bias"]
        for i, j, di, dj in np.ndindex(height, width, 3, 3):
            if 0 <= i + di - 1 < height and 0 <= j + dj - 1 < width:
                conv[i, j] += x[i + di - 1, j + dj - 1] * p["convolution"][di, dj]
        conv, total = silu(conv), np.zeros_like(x)
        rows = [(i, j) for i in range(height) for j in range(width)]
        columns = [(i, j) for j in range(width) for i in range(height)]
        for r, route in enumerate((rows, columns, rows[::-1], columns[::-1])):
            tokens = np.array([conv[c] for c in route])
            dt = softplus(tokens @ p["dt_rank"][r] @ p["dt"][r] + p["dt_bias"][r])
            B, C = tokens @ p["B"][r], tokens @ p["C"][r]
            y = selective_scan(tokens, dt, -np.exp(p["A_log"][r]), B, C, p["D"][r])
            for place, c in enumerate(route):
                total[c] += y[place]
        total = total.reshape(-1, WIDTH)
        total = total - total.mean(-1, keepdims=True)
        total = rms(total, 1e-2) * p["norm.scale"] + p["norm.bias"]
        whole.append((total * silu(grid @ p["gate.kernel"])) @ p["output.kernel"])
    check(module, np.concatenate(whole), u)


def initial(name, width=64):
    entry = registry.get(name)
    return entry.layer(entry.config(), width, rngs=nnx.Rngs(0), **COMMON)


def test_initial_values():
    mamba = initial("mamba")
    np.testing.assert_allclose(np.exp(mamba.A_log[...]), np.tile(np.arange(1, 17), (128, 1)), 1e-6)
    steps = np.log1p(np.exp(mamba.dt_bias[...]))
    assert 1e-3 * 0.99 < steps.min() < 3e-3 and 0.03 < steps.max() < 0.101
    assert mamba.dt.kernel.shape == (4, 128)
    assert 0.45 < np.abs(mamba.dt.kernel[...]).max() <= 0.5
    squares = np.exp(-2 * softplus(np.asarray(initial("rg_lru").Lambda[...], np.float64)))
    assert 0.81 < squares.min() < 0.83 and 0.98 < squares.max() < 0.9981
    s4d = initial("s4d")
    np.testing.assert_allclose(-np.exp(s4d.log_A_real[...]), -0.5, rtol=1e-6)
    np.testing.assert_allclose(s4d.A_imag[3], np.pi * np.arange(32), rtol=1e-6)
    s4, (poles, P, B) = initial("s4"), hippo.legs_dplr(64)
    np.testing.assert_allclose(s4.A_imag[5], poles.imag, rtol=1e-5)
    np.testing.assert_allclose(s4.P[5, :, 1], P.imag, atol=1e-5)
    assert np.abs(B.imag).max() > 2 and jnp.abs(s4.B[..., 1]).max() == 2
