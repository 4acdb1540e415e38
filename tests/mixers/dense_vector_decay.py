# SPDX-License-Identifier: Apache-2.0
"""The vector-decay family in NumPy float64: the token-to-token matrix, pair by pair."""

import numpy as np

from tests.mixers.dense import _head_maps, per_document


def _matrix(queries, keys, gate, *, bonus=None):
    """[T, T] weights of each write in each read, row by row; `bonus` None reads after the write."""
    time = len(keys)
    matrix = np.zeros((time, time))
    for i in range(time):
        last = i if bonus is None else i - 1
        for j in range(last + 1):
            span = np.exp(gate[j + 1 : last + 1].sum(axis=0))
            matrix[i, j] = np.sum(queries[i] * keys[j] * span)
        if bonus is not None:
            matrix[i, i] = np.sum(queries[i] * keys[i] * bonus)
    return matrix


def _run(q, k, v, g, bonus, state, segment_ids, scale):
    states, outputs, heads_of = _head_maps(q, k, v)

    def one(b, s, tokens, entering):
        hk, hv, reads = heads_of(s)
        keys, values, gate = k[b, tokens, hk], v[b, tokens, hv], g[b, tokens, s]
        n, u = len(tokens), None if bonus is None else bonus[s]
        late = 1 if bonus is None else 0
        result = {}
        for head, hq in reads.items():
            queries = q[b, tokens, hq]
            out = _matrix(queries, keys, gate, bonus=u) @ values
            for i in range(n):
                out[i] += (queries[i] * np.exp(gate[: i + late].sum(axis=0))) @ entering
            result[head] = scale * out
        leaving = np.exp(gate.sum(axis=0))[:, None] * entering
        for j in range(n):
            leaving += np.outer(keys[j] * np.exp(gate[j + 1 :].sum(axis=0)), values[j])
        return result, leaving

    return per_document(one, states, (*q.shape[:2], outputs, v.shape[-1]), state, segment_ids)


def gla(arrays, state, segment_ids, scale=None):
    q, k, v, g = (arrays[n] for n in ("q", "k", "v", "log_decay"))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _run(q, k, v, g, None, state, segment_ids, scale)


def hgrn2(arrays, state, segment_ids, scale=1.0):
    q, v, g = (arrays[n] for n in ("q", "v", "log_decay"))
    return _run(q, 1 - np.exp(g), v, g, None, state, segment_ids, scale)


def rwkv6(arrays, state, segment_ids, scale=1.0):
    r, k, v, g, bonus = (arrays[n] for n in ("r", "k", "v", "log_decay", "bonus"))
    return _run(r, k, v, g, bonus, state, segment_ids, scale)


def rwkv5(arrays, state, segment_ids, scale=1.0):
    g = np.broadcast_to(arrays["log_decay"], (*arrays["k"].shape[:2], *arrays["log_decay"].shape))
    return rwkv6(arrays | {"log_decay": g}, state, segment_ids, scale)
