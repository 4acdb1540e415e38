# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts in NumPy float64: token by token, expert by expert."""

import math

import numpy as np

ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


def dense_part(function, p, prefix, x, expert=()):
    """One gated or plain network of parameters ``{prefix}gate``, ``{prefix}up``, ``{prefix}down``.

    Args:
      function: the activation.
      p: parameters by name.
      prefix: of their names.
      x: [D].
      expert: index of the expert as a tuple, () where there is but one network.
    """
    up = x @ p[f"{prefix}up"][expert]
    gate = p.get(f"{prefix}gate")
    hidden = function(up) if gate is None else function(x @ gate[expert]) * up
    return hidden @ p[f"{prefix}down"][expert]


def choose(scores, config):
    """Indices of the chosen experts, best first, the lower index where scores are equal."""
    allowed = set(range(config.experts))
    if config.top_groups < config.groups:
        size = config.experts // config.groups
        best = [sum(sorted(scores[g * size : (g + 1) * size])[-2:]) for g in range(config.groups)]
        order = sorted(range(config.groups), key=lambda g: (-best[g], g))[: config.top_groups]
        allowed = {g * size + i for g in order for i in range(size)}
    return sorted(allowed, key=lambda e: (-scores[e], e))[: config.top_k]


def moe(config, p, x, segment_ids):
    """(y, balance loss, z-loss, load): both losses as sums over real tokens.

    Args:
      config: a `MoEConfig`.
      p: float64 parameters by name, 'bias' the selection bias.
      x: [B, T, D].
      segment_ids: [B, T].
    """
    batch, time, _ = x.shape
    y = np.zeros(x.shape)
    function = ACTIVATIONS[config.activation]
    load, mass = np.zeros((batch, config.experts)), np.zeros((batch, config.experts))
    z = 0.0
    for b in range(batch):
        for t in range(time):
            token = x[b, t]
            logits = token @ p["router"]
            if config.router == "softmax":
                scores = np.exp(logits - logits.max())
                scores = scores / scores.sum()
            else:
                scores = 1 / (1 + np.exp(-logits))
            chosen = choose(scores + p.get("bias", 0.0), config)
            total = sum(scores[e] for e in chosen) if config.renormalise else 1.0
            for e in chosen:
                weight = config.scale * scores[e] / total
                y[b, t] += weight * dense_part(function, p, "", token, (e,))
            if config.shared_experts:
                shared = dense_part(function, p, "shared_", token)
                if config.shared_gate:
                    shared = shared / (1 + np.exp(-(token @ p["shared_gate_w"])))
                y[b, t] += shared
            if segment_ids[b, t]:
                load[b, chosen] += 1
                mass[b] += scores / scores.sum()
                z += math.log(np.exp(logits).sum()) ** 2
    tokens = (segment_ids != 0).sum(1)
    if config.balance_over == "batch":
        sets = [(load.sum(0), mass.sum(0), tokens.sum())]
    else:
        sets = list(zip(load, mass, tokens, strict=True))
    balance = 0.0
    for assigned, probability, count in sets:
        share, mean = assigned / (config.top_k * count), probability / count
        balance += count * config.experts * (share @ mean)
    return y, balance, z, load.sum(0)
