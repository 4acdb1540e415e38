# SPDX-License-Identifier: Apache-2.0
"""Longformer and BigBird in NumPy float64: token by token, the set of what each sees in Python."""

import numpy as np

from tests.mixers.dense import documents


def _row(q, k, v, scale):
    """Softmax of one query over listed keys."""
    logits = k @ q * scale
    weights = np.exp(logits - logits.max())
    return (weights / weights.sum()) @ v


def longformer(local, rows, segment_ids, *, window, tokens, causal=True, mask=None):
    """`local` and `rows` are (q, k, v) of the tokens and of the rows of global tokens."""
    q, k, v = local
    batch, time, heads, width = q.shape
    out = np.zeros((batch, time, heads, v.shape[-1]))
    for b in range(batch):
        for document in documents(segment_ids, b, time):
            count = len(document)
            if mask is None:
                special = set(range(min(tokens, count)))
            else:
                special = {p for p in range(count) if mask[b, document[p]]}
            for p, t in enumerate(document):
                if p in special:
                    seen, source = set(range(count)), rows
                elif causal:
                    seen, source = set(range(p - window + 1, p + 1)) | special, local
                else:
                    seen, source = set(range(p - window // 2, p + window // 2 + 1)) | special, local
                seen = sorted(s for s in seen if 0 <= s < count and (s <= p or not causal))
                places = document[seen]
                for h in range(heads):
                    kv = h // (heads // k.shape[2])
                    out[b, t, h] = _row(
                        source[0][b, t, h],
                        source[1][b, places, kv],
                        source[2][b, places, kv],
                        width**-0.5,
                    )
    return out


def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def random_blocks(allowed, count, *names):
    """`count` of the `allowed` blocks, drawn by Floyd's method from a hash of the `names`."""
    state = 0
    for name in names:
        state = _mix((state + (name + 1) * 0x9E3779B9) & 0xFFFFFFFF)
    chosen = []
    for j in range(max(len(allowed) - count, 0), len(allowed)):
        # Draws are numbered from the last.
        state_j = _mix((state + (len(allowed) - j) * 0x9E3779B9) & 0xFFFFFFFF)
        pick = state_j % (j + 1)
        chosen.append(j if pick in chosen else pick)
    return {allowed[j] for j in chosen}


def bigbird_blocks(i, blocks, *, window, random, causal, seed, head):
    """The blocks that block i of a document of so many blocks sees."""
    if causal:
        near = set(range(max(i - window + 1, 0), i + 1)) | {0}
        allowed = [j for j in range(i) if j not in near]
        return near | random_blocks(allowed, random, seed, head, i, 0)
    if i in (0, blocks - 1):
        return set(range(blocks))
    half = (window - 1) // 2
    near = {j for j in range(i - half, i + half + 1) if 0 <= j < blocks} | {0, blocks - 1}
    allowed = [j for j in range(blocks) if j not in near]
    return near | random_blocks(allowed, random, seed, head, i, blocks)


def bigbird(q, k, v, segment_ids, *, block, window, random, seed=0, causal=True):
    batch, time, heads, width = q.shape
    groups = k.shape[2]
    out = np.zeros((batch, time, heads, v.shape[-1]))
    for b in range(batch):
        for document in documents(segment_ids, b, time):
            blocks = -(-len(document) // block)
            for p, t in enumerate(document):
                for h in range(heads):
                    kv = h // (heads // groups)
                    sees = bigbird_blocks(
                        p // block,
                        blocks,
                        window=window,
                        random=random,
                        causal=causal,
                        seed=seed,
                        head=kv,
                    )
                    places = [
                        s
                        for position, s in enumerate(document)
                        if position // block in sees and (position <= p or not causal)
                    ]
                    out[b, t, h] = _row(q[b, t, h], k[b, places, kv], v[b, places, kv], width**-0.5)
    return out
