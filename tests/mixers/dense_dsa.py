# SPDX-License-Identifier: Apache-2.0
"""DSA token by token in NumPy float64: scores, selection, attention, loss and its gradients."""

import numpy as np

from tests.mixers.dense import documents


def selection(index_q, index_k, weights, top_k):
    """Indices of the keys that one token selects, best first, the earlier of equals.

    `index_q` [J, C], `index_k` [n, C] and `weights` [J] of the token and all that it sees.
    """
    scores = np.array([weights @ np.maximum(index_q @ key, 0) for key in index_k])
    order = sorted(range(len(scores)), key=lambda s: (-scores[s], s))
    return scores, np.array(order[:top_k])


def dsa(q, k, v, index_q, index_k, weights, segment_ids, *, top_k, warmup=False, scale=None):
    """(out [B, T, H, V], loss [B, T], gradients of the loss's sum by the indexer's arguments)."""
    batch, time, heads, width = q.shape
    scale = width**-0.5 if scale is None else scale
    out, loss = np.zeros((batch, time, heads, v.shape[-1])), np.zeros((batch, time))
    d_query, d_key, d_weights = (np.zeros_like(x) for x in (index_q, index_k, weights))
    for b in range(batch):
        for tokens in documents(segment_ids, b, time):
            for place, t in enumerate(tokens):
                seen = tokens[: place + 1]
                scores, chosen = selection(index_q[b, t], index_k[b, seen], weights[b, t], top_k)
                if not warmup:
                    seen, scores = seen[chosen], scores[chosen]
                total = np.zeros(len(seen))
                for h in range(heads):
                    kv = h // (heads // k.shape[2])
                    p = np.exp(scale * (k[b, seen, kv] @ q[b, t, h]))
                    p /= p.sum()
                    out[b, t, h] = p @ v[b, seen, kv]
                    total += p
                target = total / total.sum()
                guess = np.exp(scores) / np.exp(scores).sum()
                loss[b, t] = np.sum(target * np.log(target / guess))
                for s, slope in zip(seen, guess - target, strict=True):
                    for j, w in enumerate(weights[b, t]):
                        product = index_q[b, t, j] @ index_k[b, s]
                        if product > 0:
                            d_weights[b, t, j] += slope * product
                            d_query[b, t, j] += slope * w * index_k[b, s]
                            d_key[b, s] += slope * w * index_q[b, t, j]
    return out, loss, (d_query, d_key, d_weights)
