# SPDX-License-Identifier: Apache-2.0
"""MoBA and NSA token by token in NumPy float64, each document on its own."""

import math

import numpy as np

from tests.mixers.dense import documents


def _softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def moba_attention(q, k, v, segment_ids, *, block_size, top_k):
    batch, time, heads, width = q.shape
    out = np.zeros((batch, time, heads, v.shape[-1]))
    for b in range(batch):
        for tokens in documents(segment_ids, b, time):
            for h in range(heads):
                kv = h // (heads // k.shape[2])
                keys, values = k[b, tokens, kv], v[b, tokens, kv]
                for p, t in enumerate(tokens):
                    own = p // block_size
                    scores = {
                        i: q[b, t, h] @ keys[i * block_size : (i + 1) * block_size].mean(axis=0)
                        for i in range(own)
                    }
                    best = sorted(scores, key=lambda i: (-scores[i], i))[: top_k - 1]
                    seen = [s for s in range(p + 1) if s // block_size in (*best, own)]
                    weights = _softmax(keys[seen] @ q[b, t, h] * width**-0.5)
                    out[b, t, h] = weights @ values[seen]
    return out


_erf = np.vectorize(math.erf)


def press(window, mlp, head):
    """One token from the tokens [l, X] of a window; the tanh form of gelu, as in jax.nn."""
    if mlp is None:
        return window.mean(axis=0)
    position, hidden, hidden_bias, output = (x[head] for x in mlp)
    units = (window + position).reshape(-1) @ hidden + hidden_bias
    inner = math.sqrt(2 / math.pi) * (units + 0.044715 * units**3)
    return (0.5 * units * (1 + np.tanh(inner))) @ output


def nsa_attention(
    q,
    k,
    v,
    gates,
    mlps,
    segment_ids,
    *,
    compression_block,
    stride,
    block_size,
    selected_blocks,
    initial_blocks,
    local_blocks,
    window,
):
    batch, time, heads, width = q.shape
    groups = k[0].shape[2]
    shared = heads // groups
    scale = width**-0.5
    out = np.zeros((batch, time, heads, v[0].shape[-1]))
    for b in range(batch):
        for tokens in documents(segment_ids, b, time):
            for g in range(groups):
                keys, values = ([x[b, tokens, g] for x in branch] for branch in (k, v))
                starts = range(0, len(tokens) - compression_block + 1, stride)
                pressed = [
                    np.array([press(x[i : i + compression_block], mlp, g) for i in starts])
                    for x, mlp in ((keys[0], mlps[0]), (values[0], mlps[1]))
                ]
                for p, t in enumerate(tokens):
                    queries = q[b, t, g * shared : (g + 1) * shared]
                    count = sum(i + compression_block <= p + 1 for i in starts)
                    importance = np.zeros(p // block_size + 1)
                    parts = np.zeros((3, shared, out.shape[-1]))
                    if count:
                        for h, query in enumerate(queries):
                            weights = _softmax(pressed[0][:count] @ query * scale)
                            parts[0, h] = weights @ pressed[1][:count]
                            for j in range(len(importance)):
                                for m in range(block_size // stride):
                                    for n in range(compression_block // stride):
                                        i = block_size // stride * j + m - n
                                        importance[j] += weights[i] if 0 <= i < count else 0
                    blocks = range(len(importance))
                    forced = {j for j in blocks if j < initial_blocks}
                    forced |= {j for j in blocks if j > p // block_size - local_blocks}
                    order = sorted(blocks, key=lambda j: (j not in forced, -importance[j], j))
                    best = order[:selected_blocks]
                    seen = [s for s in range(p + 1) if s // block_size in best]
                    near = range(max(0, p + 1 - window), p + 1)
                    for c, places in ((1, seen), (2, near)):
                        for h, query in enumerate(queries):
                            weights = _softmax(keys[c][places] @ query * scale)
                            parts[c, h] = weights @ values[c][places]
                    for h in range(shared):
                        head = g * shared + h
                        out[b, t, head] = gates[b, t, head] @ parts[:, h]
    return out
