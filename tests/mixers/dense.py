# SPDX-License-Identifier: Apache-2.0
"""Second derivations in NumPy float64, written as matrices and products rather than recurrences.

They share nothing with `seqmix`: each row of the token-to-token matrix is built on its own, and
packed rows are handled by cutting them into documents.
"""

import numpy as np


def documents(segment_ids: np.ndarray | None, row: int, time: int) -> list[np.ndarray]:
    """Index arrays of the real tokens of each document of a row, in order."""
    if segment_ids is None:
        return [np.arange(time)]
    groups: list[list[int]] = []
    previous = None
    for t, identity in enumerate(segment_ids[row]):
        if identity == 0:
            continue
        if identity != previous:
            groups.append([])
        groups[-1].append(t)
        previous = identity
    return [np.array(g) for g in groups]


def per_document(one, head_count, out_shape, state, segment_ids):
    """Runs `one(row, head, tokens, entering state)` over documents; assembles out and state."""
    batch, time = out_shape[:2]
    out = np.zeros(out_shape)
    final = np.array(state)
    for b in range(batch):
        pieces = documents(segment_ids, b, time)
        for h in range(head_count):
            s = state[b, h]
            for i, tokens in enumerate(pieces):
                entering = s if i == 0 else np.zeros_like(s)
                values, s = one(b, h, tokens, entering)
                for head, value in values.items():
                    out[b, tokens, head] = value
            final[b, h] = s
    return out, final


def _head_maps(q, k, v):
    """For state s: its key head, its value head and {output head: query head}."""
    nq, nk, nv = q.shape[2], k.shape[2], v.shape[2]
    states = max(nk, nv)

    def of(s):
        if nq > states:
            per = nq // states
            reads = {s * per + i: s * per + i for i in range(per)}
        else:
            reads = {s: s // (states // nq)}
        return s // (states // nk), s // (states // nv), reads

    return states, max(nq, states), of


def _decay_row(g, i):
    """Decay from each j <= i to i: exp of the sum of log-decays after j."""
    return np.array([np.exp(np.sum(g[j + 1 : i + 1])) for j in range(i + 1)])


def simple_gla(arrays, state, segment_ids, scale=None):
    q, k, v, g = arrays["q"], arrays["k"], arrays["v"], arrays["log_decay"]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    states, outputs, heads_of = _head_maps(q, k, v)

    def one(b, s, tokens, entering):
        hk, hv, reads = heads_of(s)
        keys, values, gate = k[b, tokens, hk], v[b, tokens, hv], g[b, tokens, s]
        n = len(tokens)
        matrix = np.zeros((n, n))
        for i in range(n):
            matrix[i, : i + 1] = _decay_row(gate, i)
        from_start = np.array([np.exp(gate[: i + 1].sum()) for i in range(n)])
        result = {}
        for head, hq in reads.items():
            queries = q[b, tokens, hq]
            mixed = (matrix * (queries @ keys.T)) @ values
            result[head] = scale * (mixed + from_start[:, None] * (queries @ entering))
        leaving = from_start[-1] * entering + (matrix[-1][:, None] * keys).T @ values
        return result, leaving

    return per_document(one, states, (*q.shape[:2], outputs, v.shape[-1]), state, segment_ids)


def ssd(arrays, state, segment_ids):
    x, dt, a = arrays["x"], arrays["dt"], arrays["A"]
    out, final = simple_gla(
        {
            "q": arrays["C"],
            "k": arrays["B"],
            "v": x * dt[..., None],
            "log_decay": dt * a,
        },
        state,
        segment_ids,
        scale=1.0,
    )
    skip = arrays["D"][:, None] * x
    if segment_ids is not None:
        skip = np.where((segment_ids != 0)[..., None, None], skip, 0)
    return out + skip, final


def gated_delta_rule(arrays, state, segment_ids, scale=None):
    """The state as an explicit sum of products of the K x K transition matrices."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    beta = arrays["beta"]
    g = arrays.get("log_decay", np.zeros_like(beta))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    states, outputs, heads_of = _head_maps(q, k, v)

    def one(b, s, tokens, entering):
        hk, hv, reads = heads_of(s)
        keys, values = k[b, tokens, hk], v[b, tokens, hv]
        identity = np.eye(keys.shape[1])
        steps = [
            np.exp(g[b, t, s]) * (identity - beta[b, t, s] * np.outer(key, key))
            for t, key in zip(tokens, keys, strict=True)
        ]
        result = {head: np.zeros((len(tokens), values.shape[1])) for head in reads}
        for i in range(len(tokens)):
            total = np.zeros_like(entering)
            product = identity
            for j in range(i, -1, -1):
                written = beta[b, tokens[j], s] * np.outer(keys[j], values[j])
                total = total + product @ written
                product = product @ steps[j]
            total = total + product @ entering
            for head, hq in reads.items():
                result[head][i] = scale * (q[b, tokens[i], hq] @ total)
        return result, total

    return per_document(one, states, (*q.shape[:2], outputs, v.shape[-1]), state, segment_ids)


def delta_rule(arrays, state, segment_ids, scale=None):
    return gated_delta_rule(arrays, state, segment_ids, scale)


def attention(
    q, k, v, segment_ids, *, causal=True, window=None, prefix=0, softcap=None, sinks=None
):
    """Row by row softmax over the visible tokens of the same document."""
    batch, time, heads, width = q.shape
    out = np.zeros((batch, time, heads, v.shape[-1]))
    for b in range(batch):
        for tokens in documents(segment_ids, b, time):
            for h in range(heads):
                kv = h // (heads // k.shape[2])
                for place, t in enumerate(tokens):
                    seen = tokens[: place + 1] if causal else tokens
                    if window is not None:
                        first = max(0, len(seen) - window)
                        seen = np.concatenate([seen[: min(prefix, first)], seen[first:]])
                    logits = k[b, seen, kv] @ q[b, t, h] * width**-0.5
                    if softcap is not None:
                        logits = softcap * np.tanh(logits / softcap)
                    weights = np.exp(logits)
                    total = weights.sum() + (0 if sinks is None else np.exp(sinks[h]))
                    out[b, t, h] = (weights / total) @ v[b, seen, kv]
    return out


def short_convolution(x, weight, bias, state, segment_ids):
    """Each document convolved on its own; the first continues from `state`."""
    batch, time, _ = x.shape
    keep = weight.shape[0] - 1
    out = np.zeros_like(x)
    final = np.array(state)
    for b in range(batch):
        before = state[b]
        for i, tokens in enumerate(documents(segment_ids, b, time)):
            before = before if i == 0 else np.zeros_like(before)
            extended = np.concatenate([before, x[b, tokens]])
            for place, t in enumerate(tokens):
                out[b, t] = bias + np.sum(weight * extended[place : place + keep + 1], axis=0)
            before = extended[len(extended) - keep :]
        final[b] = before
    return out, final
