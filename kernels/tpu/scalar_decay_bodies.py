# SPDX-License-Identifier: Apache-2.0
"""What the scalar-decay kernels compute in a step of the grid.

Per chunk and state, with D_ij = exp(sum of log-decays over (j, i]), e_i = exp(sum up to i), l_j =
exp(sum after j), d = exp(the whole sum), S the entering state and dS the gradient of the leaving
one::

    P  = s (Q K^T) * D                           dP = s (dO V^T) * D
    O  = s e * (Q S) + P V                       dV = P^T dO + l * (K dS)
    S' = d S + K^T (l * V)                       dQ = s (e * dO) S^T + dP K
                                                 dK = (l * V) dS^T + dP^T Q
                                                 dS_in = d dS + s Q^T (e * dO)

The gradient of log-decay t gathers the terms that it multiplies: pairs dP * Q K^T with i >= t > j,
reads of S at i >= t, writes into S' at j < t, and d <S, dS>.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from seqmix_kernels.tpu import _common as common
from seqmix_kernels.tpu.scalar_decay_plan import Plan

dot = common.dot


class Masks(NamedTuple):
    """Constants of a step: see `common.range_sums`."""

    lower: jax.Array
    ones: jax.Array
    count: int

    @classmethod
    def of(cls, plan: Plan) -> "Masks":
        """For the plan's chunks."""
        return cls(common.lower_mask(plan.chunk), common.later_ones(plan.chunk), plan.pieces)


def leaving(row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """l [C, 1] and d [1, 1] from a chunk's log-decays [1, C]."""
    square = (row.shape[1], row.shape[1])
    later = common.iota(square, 1) > common.iota(square, 0)
    after = jnp.sum(jnp.where(later, row, 0.0), axis=1, keepdims=True)
    return jnp.exp(after), jnp.exp(jnp.sum(row, axis=1, keepdims=True))


def within(row: jax.Array, masks: Masks) -> tuple[jax.Array, jax.Array]:
    """D [C, C] and e [C, 1] from a chunk's log-decays [1, C]."""
    sums = common.range_sums(row, *masks)
    return jnp.where(masks.lower, jnp.exp(sums), 0.0), jnp.exp(sums[:, :1] + row[:, :1])


def spread(columns: list[jax.Array], width: int) -> jax.Array:
    """Columns [n, 1], each over the `width` lanes of its value; alone it broadcasts by itself."""
    wide = columns[0]
    lane = common.iota((wide.shape[0], len(columns) * width), 1)
    for i, column in enumerate(columns[1:], 1):
        wide = jnp.where(lane >= i * width, column, wide)
    return wide


def _rows(plan: Plan, n) -> object:
    """The tokens of chunk n of a block."""
    return common.slice_of(common.multiple_of(n * plan.chunk, 16), plan.chunk)


def _lanes(i: int, width: int) -> slice:
    return slice(i * width, (i + 1) * width)


def _reader(plan: Plan, n, block):
    """Loads one head of chunk n in the operand dtype, 0 beyond the row."""
    rows = _rows(plan, n)

    def load(ref, i, width):
        x = ref[0, rows, _lanes(i, width)]
        if plan.ragged:
            first = block * plan.block + n * plan.chunk
            real = common.iota(x.shape, 0) + first < plan.time
            x = jnp.where(real, x.astype(jnp.float32), 0.0)
        return x.astype(plan.low)

    return load


def _values(plan: Plan, a: int) -> range:
    """The values of key head `a` of a tile."""
    return range(a * plan.tile_values, (a + 1) * plan.tile_values)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def forward_body(plan: Plan, keep: bool, q, k, v, log_decay, first, out, final, *rest):
    """Blocks in order; a key head's values lie side by side in `carried` and in products with K."""
    *states, carried = rest
    block, split = common.program_id(2), common.program_id(3)
    low, joined = plan.low, plan.tile_values * plan.value
    masks = Masks.of(plan)

    @common.when(block == 0)
    def _():
        for i in range(plan.tile_states):
            carried[split, :, _lanes(i, plan.value)] = first[0, i]

    if keep:
        states[0][0, 0, 0] = carried[split]

    def chunk(n, carry):
        load, rows = _reader(plan, n, block), _rows(plan, n)
        for a in range(plan.tile_keys):
            key, values = load(k, a, plan.key), load(v, a, joined)
            state = carried[split, :, _lanes(a, joined)]
            queries = [load(q, a * plan.queries + x, plan.key) for x in range(plan.queries)]
            scores = [dot(query, key, 1, 1) for query in queries]
            reads = [dot(query, state.astype(low)) for query in queries]
            gates = [log_decay[0, 0, n, i : i + 1, :] for i in _values(plan, a)]
            for i, gate in enumerate(gates):
                decay, entry = within(gate, masks)
                own = _lanes(i, plan.value)
                for x in range(plan.queries):
                    pairs = (scores[x] * decay).astype(low)
                    read = entry * reads[x][:, own] + dot(pairs, values[:, own])
                    lanes = _lanes((a * plan.tile_values + i) * plan.queries + x, plan.value)
                    out[0, rows, lanes] = (plan.scale * read).astype(out.dtype)
            leave, through = (
                spread(list(columns), plan.value)
                for columns in zip(*(leaving(gate) for gate in gates), strict=True)
            )
            write = dot(key, (leave * _wide(values)).astype(low), 0, 0)
            carried[split, :, _lanes(a, joined)] = through * state + write
        return carry

    lax.fori_loop(0, plan.block_chunks, chunk, 0)

    @common.when(block == plan.blocks - 1)
    def _():
        for i in range(plan.tile_states):
            final[0, i] = carried[split, :, _lanes(i, plan.value)]


def backward_body(
    plan: Plan, q, k, v, log_decay, states, d_out, d_final, dq, dk, dv, d_log, d_first, *scratch
):
    """Blocks from the last; `carried` holds the gradients of the states in progress."""
    step, split = common.program_id(2), common.program_id(3)
    block = plan.blocks - 1 - step
    low, joined = plan.low, plan.tile_values * plan.value
    masks = Masks.of(plan)
    carried, entering, *sums = scratch

    @common.when(step == 0)
    def _():
        for i in range(plan.tile_states):
            carried[split, :, _lanes(i, plan.value)] = d_final[0, i]

    entering[0] = states[0, 0, 0]

    def leave_and_through(n, a):
        gates = [log_decay[0, 0, n, i : i + 1, :] for i in _values(plan, a)]
        pairs = zip(*(leaving(gate) for gate in gates), strict=True)
        return gates, *(list(columns) for columns in pairs)

    def states_of(n, carry):
        load = _reader(plan, n, block)
        for a in range(plan.tile_keys):
            _, leave, through = leave_and_through(n, a)
            values = spread(leave, plan.value) * _wide(load(v, a, joined))
            write = dot(load(k, a, plan.key), values.astype(low), 0, 0)
            group = _lanes(a, joined)
            entering[n + 1, :, group] = spread(through, plan.value) * entering[n, :, group] + write
        return carry

    lax.fori_loop(0, plan.block_chunks - 1, states_of, 0)

    def store(target, which, rows, lanes, x):
        """Writes a gradient that all tiles of a key head add to."""
        if sums:
            x = x + jnp.where(split == 0, 0.0, sums[which][rows, lanes])
            sums[which][rows, lanes] = x
        target[0, rows, lanes] = x.astype(target.dtype)

    def chunk(m, carry):
        n = plan.block_chunks - 1 - m
        load, rows = _reader(plan, n, block), _rows(plan, n)
        for a in range(plan.tile_keys):
            group = _lanes(a, joined)
            key, values = load(k, a, plan.key), load(v, a, joined)
            queries = [load(q, a * plan.queries + x, plan.key) for x in range(plan.queries)]
            d_outs = [load(d_out, a * plan.queries + x, joined) for x in range(plan.queries)]
            state, d_leaving = entering[n, :, group], carried[split, :, group]
            low_state, low_leaving = state.astype(low), d_leaving.astype(low)
            gates, leave, through = leave_and_through(n, a)
            decays, entry = zip(*(within(gate, masks) for gate in gates), strict=True)

            wide_leave = spread(leave, plan.value)
            d_written = wide_leave * dot(key, low_leaving)
            d_key = dot((wide_leave * _wide(values)).astype(low), low_leaving, 1, 1)
            wide_entry = spread(list(entry), plan.value)
            d_reads = [(wide_entry * _wide(d)).astype(low) for d in d_outs]
            d_entering = spread(through, plan.value) * d_leaving
            for query, d in zip(queries, d_reads, strict=True):
                d_entering += plan.scale * dot(query, d, 0, 0)
            carried[split, :, group] = d_entering

            scores = [plan.scale * dot(query, key, 1, 1) for query in queries]
            d_scores = [0.0] * plan.queries
            d_queries = [0.0] * plan.queries
            for i, decay in enumerate(decays):
                own = _lanes(i, plan.value)
                value, d_value = values[:, own], d_written[:, own]
                writes = jnp.sum(_wide(value) * d_value, axis=1, keepdims=True)
                reads, pairs = 0.0, 0.0
                for x, query in enumerate(queries):
                    d = d_outs[x][:, own]
                    d_query = plan.scale * dot(d_reads[x][:, own], low_state[:, own], 1, 1)
                    reads += jnp.sum(_wide(query) * d_query, axis=1, keepdims=True)
                    d_queries[x] += d_query
                    d_value += dot((scores[x] * decay).astype(low), d, 0, 0)
                    d_decayed = dot(d, value, 1, 1) * decay
                    d_scores[x] += plan.scale * d_decayed
                    pairs += d_decayed * scores[x]
                passing = jnp.sum(state[:, own] * d_leaving[:, own], axis=(0, 1), keepdims=True)
                place = a * plan.tile_values + i
                straddling = _straddling(masks, pairs, reads, writes)
                d_log[0, 0, n, place : place + 1, :] = through[i] * passing + straddling
                dv[0, rows, _lanes(place, plan.value)] = d_value.astype(dv.dtype)
            for x, query in enumerate(queries):
                d = d_scores[x].astype(low)
                lanes = _lanes(a * plan.queries + x, plan.key)
                store(dq, 0, rows, lanes, d_queries[x] + dot(d, key))
                d_key += dot(d, query, 0, 0)
            store(dk, 1, rows, _lanes(a, plan.key), d_key)
        return carry

    lax.fori_loop(0, plan.block_chunks, chunk, 0)

    @common.when(step == plan.blocks - 1)
    def _():
        for i in range(plan.tile_states):
            d_first[0, i] = carried[split, :, _lanes(i, plan.value)]


def _straddling(masks: Masks, pairs, reads, writes):
    """What each log-decay multiplies but the passing state, [1, C].

    Reads of the entering state are pairs with an earlier token than all, writes pairs with a later
    one: they go into the first column and the last row, whose own places no t straddles.

    Args:
      pairs: [C, C], read below the diagonal.
      reads: [C, 1].
      writes: [C, 1].
    """
    shape = pairs.shape
    rows, columns = common.iota(shape, 0), common.iota(shape, 1)
    pairs = jnp.where(rows > columns, pairs, 0.0)
    pairs += jnp.where(columns == 0, reads, 0.0)
    pairs += jnp.where(rows == shape[0] - 1, common.as_row(writes), 0.0)
    total = common.straddling_sums(pairs, *masks)
    at_first = common.iota(total.shape, 1) == 0
    return total + jnp.where(at_first, jnp.sum(reads, axis=0, keepdims=True), 0.0)
