# SPDX-License-Identifier: Apache-2.0
"""Options of Mamba and Mamba-2 against their formulas, token by token in float64."""

import numpy as np
import pytest

from seqmix.layers import Mamba2Config, MambaConfig
from tests.layers.test_formulas import TIME, WIDTH, build, check, rms, silu, softplus
from tests.layers.test_formulas_elementwise import correlate, selective_scan


def project(u, p, name):
    return u @ p[f"{name}.kernel"] + p[f"{name}.bias"]


def test_mamba_with_heads_and_biases():
    """Zamba's: dt, B and C of each half of the channels are made from that half."""
    heads, inner = 2, 2 * WIDTH
    config = MambaConfig(heads=heads, state_size=5, dt_rank=3, bias=True, convolution_bias=False)
    module, p = build(config)
    assert p["output.bias"].shape == (WIDTH,)
    u = np.random.default_rng(0).normal(size=(TIME, WIDTH))
    x = silu(correlate(project(u, p, "x"), p["x_convolution.kernel"], 0.0))
    out = []
    for head in range(heads):
        part = slice(head * inner // heads, (head + 1) * inner // heads)
        rank, B, C = (x[:, part] @ p[f"{name}.kernel"][head] for name in ("dt_rank", "B", "C"))
        dt = softplus(rank @ p["dt.kernel"][head] + p["dt_bias"][part])
        A = -np.exp(p["A_log"][part])
        out.append(selective_scan(x[:, part], dt, A, B, C, p["D"][part]))
    y = np.concatenate(out, 1) * silu(project(u, p, "gate"))
    check(module, project(y, p, "output"), u)


@pytest.mark.parametrize("norm", ["none", "before the gate"])
@pytest.mark.parametrize("output_bias", [None, False])
def test_mamba2_with_biases_and_multipliers(norm, output_bias):
    factors = dict(zip(("gate", "x", "B", "C", "dt"), (0.5, 1.5, -2.0, 0.25, 0.75), strict=True))
    config = Mamba2Config(
        expand=2,
        head_width=4,
        state_size=5,
        groups=2,
        bias=True,
        output_bias=output_bias,
        convolution_bias=False,
        norm=norm != "none",
        norm_before_gate=norm != "none",
        multipliers=tuple(factors.values()),
    )
    module, p = build(config)
    u = np.random.default_rng(0).normal(size=(TIME, WIDTH))
    scaled = {name: factor * project(u, p, name) for name, factor in factors.items()}
    x, B, C = (silu(correlate(scaled[n], p[f"{n}_convolution.kernel"], 0.0)) for n in "xBC")
    dt = softplus(scaled["dt"] + p["dt_bias"])
    inner = 2 * WIDTH
    heads = inner // 4
    out = np.zeros((TIME, heads, 4))
    for head in range(heads):
        state = np.zeros((4, 5))
        group = slice(5 * (head // (heads // 2)), 5 * (head // (heads // 2)) + 5)
        for t in range(TIME):
            xt = x[t, 4 * head : 4 * head + 4]
            state = np.exp(-np.exp(p["A_log"][head]) * dt[t, head]) * state
            state = state + np.outer(dt[t, head] * xt, B[t, group])
            out[t, head] = state @ C[t, group] + p["D"][head] * xt
    y = out.reshape(TIME, inner)
    if norm != "none":
        y = rms(y.reshape(TIME, 2, -1), 1e-5).reshape(TIME, inner) * p["norm.scale"]
    y = (y * silu(scaled["gate"])) @ p["output.kernel"]
    check(module, y + (p["output.bias"] if output_bias is None else 0.0), u)
