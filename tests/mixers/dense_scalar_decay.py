# SPDX-License-Identifier: Apache-2.0
"""Linear attention, Performer, 2Mamba, retention, lightning attention and Mamba-3 as matrices."""

import numpy as np

from tests.mixers.dense import _decay_row, _head_maps, documents, per_document, simple_gla


def retention(arrays, state, segment_ids):
    batch, time = arrays["q"].shape[:2]
    heads = max(arrays["k"].shape[2], arrays["v"].shape[2])
    gamma = 1 - 2.0 ** (-5 - np.arange(heads))
    gates = np.broadcast_to(np.log(gamma), (batch, time, heads))
    return simple_gla(arrays | {"log_decay": gates}, state, segment_ids)


def lightning_attention(arrays, state, segment_ids):
    gates = np.broadcast_to(-arrays["slopes"], (*arrays["q"].shape[:2], len(arrays["slopes"])))
    return simple_gla(arrays | {"log_decay": gates}, state, segment_ids, scale=1.0)


def weighted(arrays, state, segment_ids, weigh, features, eps, gates=None):
    """sum_s w_ts v_s / (sum_s w_ts + eps); a state is read through its features.

    Args:
      weigh: (queries [n, K], keys [n, K]) -> weights [n, n] without decay.
      features: [K] -> [F], for what crosses the edges.
      eps: None for no normaliser.
    """
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    states, outputs, heads_of = _head_maps(q, k, v)

    def one(b, s, tokens, entering):
        hk, hv, reads = heads_of(s)
        keys, values = k[b, tokens, hk], v[b, tokens, hv]
        if eps is not None:
            values = np.concatenate([values, np.ones((len(tokens), 1))], axis=1)
        gate = np.zeros(len(tokens)) if gates is None else gates[b, tokens, s]
        result = {}
        for head, hq in reads.items():
            queries = q[b, tokens, hq]
            rows = []
            for i, query in enumerate(queries):
                weights = weigh(queries, keys)[i, : i + 1] * _decay_row(gate, i)
                row = weights @ values[: i + 1]
                row = row + np.exp(gate[: i + 1].sum()) * (features(query) @ entering)
                rows.append(row if eps is None else row[:-1] / (row[-1] + eps))
            result[head] = np.array(rows)
        leaving = np.exp(gate.sum()) * entering
        for decay, key, value in zip(_decay_row(gate, len(tokens) - 1), keys, values, strict=True):
            leaving = leaving + decay * np.outer(features(key), value)
        return result, leaving

    return per_document(one, states, (*q.shape[:2], outputs, v.shape[-1]), state, segment_ids)


def by_map(feature_map, eps):
    """Linear attention with an explicit feature map."""

    def run(arrays, state, segment_ids):
        def weigh(queries, keys):
            return feature_map(queries) @ feature_map(keys).T

        return weighted(arrays, state, segment_ids, weigh, feature_map, eps)

    return run


def elu_plus_one(x):
    return np.where(x > 0, x + 1, np.exp(x))


def pairs(x):
    """Products of channels by cyclic distance, each unordered pair once."""
    width, found, seen = len(x), [], set()
    for distance in range(width):
        for i in range(width):
            pair = frozenset((i, (i + distance) % width))
            if pair not in seen:
                seen.add(pair)
                found.append(x[i] * x[(i + distance) % width] * (np.sqrt(2) if distance else 1))
    return np.array(found)


def second_order_attention(arrays, state, segment_ids):
    scale = arrays["q"].shape[-1] ** -0.5
    return weighted(
        arrays,
        state,
        segment_ids,
        lambda queries, keys: (scale * queries @ keys.T) ** 2,
        lambda x: scale * pairs(x),
        1e-8,
        arrays["log_decay"],
    )


def taylor_attention(arrays, state, segment_ids):
    scale = arrays["q"].shape[-1] ** -0.5

    def weigh(queries, keys):
        s = scale * queries @ keys.T
        return 1 + s + s**2 / 2

    return weighted(arrays, state, segment_ids, weigh, taylor, 1e-6)


def taylor(x):
    """Features of 1 + s + s^2 / 2, s = q . k / sqrt(K)."""
    scale = len(x) ** -0.5
    return np.concatenate([[1.0], np.sqrt(scale) * x, scale / np.sqrt(2) * pairs(x)])


def performer_attention(arrays, state, segment_ids):
    """Every key's features in units of the greatest exponent up to the token that reads them."""
    q, k, v, w = (arrays[n] for n in ("q", "k", "v", "projection"))
    states, outputs, heads_of = _head_maps(q, k, v)
    matrix, stabiliser = state
    count, eps = len(w), 1e-6
    batch, time = q.shape[:2]
    out = np.zeros((batch, time, outputs, v.shape[-1]))
    final, greatest = np.array(matrix), np.array(stabiliser)

    def exponents(x):
        x = x * x.shape[-1] ** -0.25
        return x @ w.T - (x**2).sum(-1, keepdims=True) / 2

    for b in range(batch):
        for s in range(states):
            hk, hv, reads = heads_of(s)
            for number, tokens in enumerate(documents(segment_ids, b, time)):
                top = stabiliser[b, hk] if number == 0 else -np.inf
                entering = matrix[b, s] if number == 0 else np.zeros_like(matrix[b, s])
                before = top
                own = exponents(k[b, tokens, hk])
                tops = np.maximum.accumulate(np.maximum(own.max(-1), top))
                values = np.concatenate([v[b, tokens, hv], np.ones((len(tokens), 1))], axis=1)
                for i, t in enumerate(tokens):
                    unit = tops[i]
                    features = np.exp(own[: i + 1] - unit)
                    features += eps * np.exp(tops[: i + 1] - unit)[:, None]
                    total = features.T @ values[: i + 1] / np.sqrt(count)
                    if number == 0:
                        total = total + np.exp(before - unit) * entering
                    for head, hq in reads.items():
                        e = exponents(q[b, t, hq][None])[0]
                        row = (np.exp(e - e.max()) + eps) / np.sqrt(count) @ total
                        out[b, t, head] = row[:-1] / row[-1]
                final[b, s], greatest[b, hk] = total, tops[-1]
    return out, type(state)(final, greatest)


def mamba3(arrays, state, segment_ids):
    """The two-term recurrence as an explicit sum over pairs of tokens."""
    x, dt, a, lam, d = (arrays[n] for n in ("x", "dt", "A", "trapezoid", "D"))
    per = x.shape[2] // arrays["B"].shape[2]
    out = np.zeros_like(x)
    final = [np.array(leaf) for leaf in state]

    def turn(z, angle):
        count = len(angle)
        pairs = (z[0 : 2 * count : 2] + 1j * z[1 : 2 * count : 2]) * np.exp(1j * angle)
        return np.concatenate([np.stack([pairs.real, pairs.imag], -1).ravel(), z[2 * count :]])

    for b in range(x.shape[0]):
        for number, tokens in enumerate(documents(segment_ids, b, x.shape[1])):
            old = [leaf[b] if number == 0 else np.zeros_like(leaf[b]) for leaf in state]
            for h in range(x.shape[2]):
                g = h // per
                angles = old[3][g] + np.cumsum(arrays["rotation"][b, tokens, g], axis=0)
                keys = [turn(z, t) for z, t in zip(arrays["B"][b, tokens, g], angles, strict=True)]
                reads = [turn(z, t) for z, t in zip(arrays["C"][b, tokens, g], angles, strict=True)]
                previous = [(old[1][g], old[2][h])]
                previous += list(zip(keys, x[b, tokens, h], strict=True))
                step, rate, now = dt[b, tokens, h], a[b, tokens, h], lam[b, tokens, h]
                for i, t in enumerate(tokens):
                    total = np.exp((step * rate)[: i + 1].sum()) * old[0][h]
                    for j in range(i + 1):
                        decay = np.exp((step * rate)[j + 1 : i + 1].sum())
                        late = (1 - now[j]) * step[j] * np.exp(step[j] * rate[j])
                        total = total + decay * late * np.outer(*previous[j])
                        total = total + decay * now[j] * step[j] * np.outer(*previous[j + 1])
                    out[b, t, h] = reads[i] @ total + d[h] * x[b, t, h]
                final[0][b, h], final[2][b, h] = total, x[b, tokens[-1], h]
                final[1][b, g], final[3][b, g] = keys[-1], np.mod(angles[-1], 2 * np.pi)
    return out, type(state)(*final)
