# SPDX-License-Identifier: Apache-2.0
"""KDA and RWKV-7 in NumPy float64: the state as a sum of products of K x K transitions."""

import numpy as np

from tests.mixers.dense import _head_maps, per_document


def _products(transitions, written, entering):
    """States after each token: sum over j <= i of transitions i .. j+1 applied to what j wrote."""
    states = []
    for i in range(len(transitions)):
        total, product = np.zeros_like(entering), np.eye(len(entering))
        for j in range(i, -1, -1):
            total = total + product @ written[j]
            product = product @ transitions[j]
        states.append(total + product @ entering)
    return states


def kda(arrays, state, segment_ids, scale=None):
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    g, beta = arrays["log_decay"], arrays["beta"]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    states, outputs, heads_of = _head_maps(q, k, v)

    def one(b, s, tokens, entering):
        hk, hv, reads = heads_of(s)
        keys, values = k[b, tokens, hk], v[b, tokens, hv]
        identity = np.eye(keys.shape[1])
        transitions = [
            (identity - beta[b, t, s] * np.outer(key, key)) @ np.diag(np.exp(g[b, t, s]))
            for t, key in zip(tokens, keys, strict=True)
        ]
        written = [
            beta[b, t, s] * np.outer(key, value)
            for t, key, value in zip(tokens, keys, values, strict=True)
        ]
        held = _products(transitions, written, entering)
        result = {
            head: scale * np.stack([q[b, t, hq] @ h for t, h in zip(tokens, held, strict=True)])
            for head, hq in reads.items()
        }
        return result, held[-1]

    return per_document(one, states, (*q.shape[:2], outputs, v.shape[-1]), state, segment_ids)


def rwkv7(arrays, state, segment_ids, scale=1.0):
    r, k, v, a, b = (arrays[n] for n in ("r", "k", "v", "a", "b"))

    def one(row, h, tokens, entering):
        decay = np.exp(arrays["log_decay"][row, tokens, h])
        transitions = [
            np.diag(w) + np.outer(b[row, t, h], a[row, t, h])
            for w, t in zip(decay, tokens, strict=True)
        ]
        written = [np.outer(k[row, t, h], v[row, t, h]) for t in tokens]
        held = _products(transitions, written, entering)
        out = scale * np.stack([r[row, t, h] @ s for t, s in zip(tokens, held, strict=True)])
        return {h: out}, held[-1]

    return per_document(one, r.shape[2], v.shape, state, segment_ids)
