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


def s4d(arrays, state, segment_ids):
    """Each pole's kernel of the held input, as a Toeplitz matrix of complex numbers."""
    u, dt = arrays["u"], arrays["dt"]
    A, C = (arrays[n][..., 0] + 1j * arrays[n][..., 1] for n in "AC")

    def one(b, tokens, entering, continues):
        n = len(tokens)
        out, leaving = arrays["D"] * u[b, tokens], np.zeros_like(entering)
        lag = np.arange(n)[:, None] - np.arange(n)
        for d, m in np.ndindex(*A.shape):
            held = (np.exp(A[d, m] * dt[d]) - 1) / A[d, m]
            kernel = np.where(lag >= 0, np.exp(A[d, m] * dt[d] * np.maximum(lag, 0)), 0) * held
            h = entering[d, m, 0] + 1j * entering[d, m, 1]
            states = kernel @ u[b, tokens, d] + np.exp(A[d, m] * dt[d] * np.arange(1, n + 1)) * h
            out[:, d] += 2 * (C[d, m] * states).real
            leaving[d, m] = states[-1].real, states[-1].imag
        return out, leaving

    return by_document(one, u.shape, state, segment_ids)


def s4(arrays, state, segment_ids):
    """The full N x N matrix over both halves of the pairs, inverted and powered as it stands."""
    u, dt = arrays["u"], arrays["dt"]
    A, P, B, C = (arrays[n][..., 0] + 1j * arrays[n][..., 1] for n in "APBC")

    def both(x):
        return np.concatenate([x, x.conj()])

    def one(b, tokens, entering, continues):
        n, half = len(tokens), A.shape[1]
        out, leaving = arrays["D"] * u[b, tokens], np.zeros_like(entering)
        for d in range(len(dt)):
            matrix = np.diag(both(A[d])) - np.outer(both(P[d]), both(P[d]).conj())
            left = np.eye(2 * half) - dt[d] / 2 * matrix
            step = np.linalg.solve(left, np.eye(2 * half) + dt[d] / 2 * matrix)
            enters = np.linalg.solve(left, dt[d] * both(B[d]))
            h = both(entering[d, :, 0] + 1j * entering[d, :, 1])
            powers = [np.linalg.matrix_power(step, i) for i in range(n + 1)]
            for i in range(n):
                total = powers[i + 1] @ h
                for j in range(i + 1):
                    total = total + powers[i - j] @ enters * u[b, tokens[j], d]
                out[i, d] += (both(C[d]) @ total).real
            leaving[d] = np.stack([total[:half].real, total[:half].imag], -1)
        return out, leaving

    return by_document(one, u.shape, state, segment_ids)
