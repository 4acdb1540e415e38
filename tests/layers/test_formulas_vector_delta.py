# SPDX-License-Identifier: Apache-2.0
"""KDA and RWKV-7 against their formulas, token by token in float64."""

import numpy as np
import pytest

from seqmix.layers import KDAConfig, RWKV7Config
from tests.layers.test_formulas import (
    TIME,
    WIDTH,
    build,
    check,
    convolve,
    rms,
    sigmoid,
    softplus,
)


def draw():
    return np.random.default_rng(0).normal(size=(TIME, WIDTH))


@pytest.mark.parametrize("bounded", [False, True])
def test_kda(bounded):
    options = {"min_log_decay": -5.0, "gate_rank": 0, "allow_negative_eigenvalues": True}
    module, p = build(KDAConfig(heads=2, head_width=5, **(options if bounded else {})))
    x = draw()
    q, k, v = (
        convolve(x @ p[f"{n}.kernel"], p[f"{n}_convolution.kernel"]).reshape(TIME, 2, 5)
        for n in ("query", "key", "value")
    )
    q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    z = (x @ p["decay_down.kernel"] @ p["decay_up.kernel"] + p["dt_bias"]).reshape(TIME, 2, 5)
    rate = np.exp(p["A_log"])[:, None]
    g = -5.0 * sigmoid(rate * z) if bounded else -rate * softplus(z)
    beta = sigmoid(x @ p["beta.kernel"]) * (2 if bounded else 1)
    gate = (x if bounded else x @ p["gate_down.kernel"]) @ p["gate.kernel"]
    out = np.zeros((TIME, 2, 5))
    for head in range(2):
        S = np.zeros((5, 5))
        for t in range(TIME):
            S = np.exp(g[t, head])[:, None] * S
            S = S + beta[t, head] * np.outer(k[t, head], v[t, head] - k[t, head] @ S)
            out[t, head] = 5**-0.5 * q[t, head] @ S
    out = rms(out, 1e-5) * p["norm.scale"] * sigmoid(gate.reshape(TIME, 2, 5))
    check(module, out.reshape(TIME, 10) @ p["output.kernel"], x)


def test_rwkv7():
    ranks = {"decay_rank": 3, "rate_rank": 4, "value_rank": 2, "gate_rank": 3}
    module, p = build(RWKV7Config(heads=2, head_width=5, **ranks))
    x = draw()
    past = np.concatenate([np.zeros((1, WIDTH)), x[:-1]])
    r, w, k, v, a, g = (x + (past - x) * mix for mix in p["mix"])
    r, k, v = r @ p["receptance.kernel"], k @ p["key.kernel"], v @ p["value.kernel"]
    raw = p["decay_bias"] + np.tanh(w @ p["decay_down"]) @ p["decay_up"]
    decay = np.exp(-np.exp(-0.5) * sigmoid(raw)).reshape(TIME, 2, 5)
    rate = sigmoid(p["rate_bias"] + a @ p["rate_down"] @ p["rate_up"])
    gate = sigmoid(g @ p["gate_down"]) @ p["gate_up"]
    kappa = (k * p["kappa_scale"]).reshape(TIME, 2, 5)
    kappa = kappa / np.linalg.norm(kappa, axis=-1, keepdims=True)
    k = (k * (1 + (rate - 1) * p["key_rate"])).reshape(TIME, 2, 5)
    r, v, rate = (y.reshape(TIME, 2, 5) for y in (r, v, rate))
    out = np.zeros((TIME, 2, 5))
    for head in range(2):
        S = np.zeros((5, 5))  # value x key, as the reference keeps it
        for t in range(TIME):
            erased = np.outer(S @ kappa[t, head], kappa[t, head] * rate[t, head])
            S = S * decay[t, head] - erased + np.outer(v[t, head], k[t, head])
            out[t, head] = S @ r[t, head]
    centred = out - out.mean(-1, keepdims=True)
    normed = rms(centred, 64e-5).reshape(TIME, 10) * p["norm.scale"] + p["norm.bias"]
    present = (r * k * p["bonus"]).sum(-1, keepdims=True) * v
    check(module, ((normed + present.reshape(TIME, 10)) * gate) @ p["output.kernel"], x)
