# SPDX-License-Identifier: Apache-2.0
"""NumPy float64 derivations of the elementwise family: each channel's token-to-token matrix."""

import numpy as np

from tests.mixers.dense import documents


def by_document(one, out_shape, state, segment_ids):
    """Runs `one(row, tokens, entering state, continues)` over documents; out and final state."""
    out, final = np.zeros(out_shape), np.array(state)
    for b in range(out_shape[0]):
        s = state[b]
        for i, tokens in enumerate(documents(segment_ids, b, out_shape[1])):
            out[b, tokens], s = one(b, tokens, np.zeros_like(s) if i else s, i == 0)
        final[b] = s
    return out, final


def decay_matrix(log_decay):
    """[n] -> [n, n + 1]: decay to token i from the entering state (column 0) or token j's write."""
    n = len(log_decay)
    matrix = np.zeros((n, n + 1))
    for i in range(n):
        for j in range(i + 2):
            matrix[i, j] = np.exp(np.sum(log_decay[j : i + 1]))
    return matrix


def selective_scan(arrays, state, segment_ids):
    x, dt, A = arrays["x"], arrays["dt"], arrays["A"]

    def one(b, tokens, entering, continues):
        out = arrays["D"] * x[b, tokens]
        leaving = np.zeros_like(entering)
        for d, n in np.ndindex(*A.shape):
            writes = dt[b, tokens, d] * x[b, tokens, d] * arrays["B"][b, tokens, n]
            matrix = decay_matrix(dt[b, tokens, d] * A[d, n])
            states = matrix @ np.concatenate([entering[d, n : n + 1], writes])
            out[:, d] += arrays["C"][b, tokens, n] * states
            leaving[d, n] = states[-1]
        return out, leaving

    return by_document(one, x.shape, state, segment_ids)


def rg_lru(arrays, state, segment_ids):
    x, log_a = arrays["x"], arrays["log_a"]

    def one(b, tokens, entering, continues):
        out = np.zeros((len(tokens), x.shape[-1]))
        for d in range(x.shape[-1]):
            gate = log_a[b, tokens, d]
            gain = np.sqrt(1 - np.exp(2 * gate))
            if not (continues and np.any(entering)):
                gain[0] = 1
            out[:, d] = decay_matrix(gate) @ np.append(entering[d], gain * x[b, tokens, d])
        return out, out[-1]

    return by_document(one, x.shape, state, segment_ids)
