# SPDX-License-Identifier: Apache-2.0
"""Attention of queries routed to blocks of keys: a block is read once for many of its queries.

The pairs (query, block) are sorted by block and cut into tiles of queries of one block; a tile is a
small dense attention. Each pair gives a part of its query's softmax, and a query gathers its parts.
Sorted pairs fill at most P // tile + N tiles, so the program's size does not depend on the routing.
The backward makes the tiles' weights again from the logarithms of the sums.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from seqmix.mixers._banded import EMPTY, softmax_part
from seqmix.mixers._numerics import contract, operand_dtype, state_dtype, varying_like

TILE_ROWS = 128
GROUP_ROWS = 2048


def routed(q, k, v, start, chosen, *, size: int, scale: float):
    """The part of each query's softmax over the keys of the blocks chosen for it.

    Args:
      q: [B, H, R, G, K]; the G queries of a row share its blocks.
      k: [B, H, n, K].
      v: [B, H, n, V].
      start: [B, N] first token of each block.
      chosen: [B, H, R, s] int32 blocks of each row, different ones, N for none.
      size: tokens of a block, at most n.
      scale: of the logits.

    Returns:
      out [B, H, R, G, V] and logarithm [B, H, R, G], float32 or wider.
    """
    # One row's blocks start at the same places for every head.
    heads = jax.vmap(functools.partial(_routed, size, scale), in_axes=(0, 0, 0, None, 0))
    return jax.vmap(heads)(q, k, v, start, chosen)


class _Plan(NamedTuple):
    """Where the pairs of a chunk of rows are computed.

    Attributes:
      block: [groups, tiles] block of each tile.
      row: [groups, tiles, tile] row of each query of a tile, -1 for none.
      slot: [rows, s] place among the queries of all tiles of each pair, -1 for none.
    """

    block: jax.Array
    row: jax.Array
    slot: jax.Array


class _Sizes(NamedTuple):
    """Static sizes: rows per chunk, chunks, queries per tile, tiles per group, groups."""

    rows: int
    chunks: int
    tile: int
    tiles: int
    groups: int


def _sizes(rows, shared, pairs, blocks) -> _Sizes:
    """Sizes for [rows, pairs] choices among `blocks`, `shared` queries a row.

    What the pairs of a chunk of rows give is held at once. A block costs a chunk up to one tile
    that is not full, so a chunk has pairs for at least four full tiles a block.
    """
    tile = max(1, min(TILE_ROWS // shared, rows))
    chunk = -(-4 * blocks * tile // pairs)
    chunks = max(1, rows // max(chunk, 1024))
    chunk = -(-rows // chunks)
    count = min(chunk * pairs // tile + blocks, chunk * pairs)
    tiles = max(1, min(GROUP_ROWS // (tile * shared), count))
    return _Sizes(chunk, chunks, tile, tiles, -(-count // tiles))


def _plan(chosen, blocks, sizes) -> _Plan:
    """Sorts the pairs of chosen [rows, s] by block and deals them out to tiles."""
    pairs = chosen.size
    each = chosen.shape[1]
    if (blocks + 1) * pairs < 2**31:
        # Two numbers in one: a sort of plain integers is several times faster.
        both = jnp.sort(chosen.reshape(-1) * pairs + jnp.arange(pairs, dtype=jnp.int32))
        block_of, pair = both // pairs, both % pairs
    else:
        pair = jnp.argsort(chosen.reshape(-1), stable=True)
        block_of = chosen.reshape(-1)[pair]
    first = jnp.searchsorted(block_of, jnp.arange(blocks + 1)).astype(jnp.int32)
    needed = -(-jnp.diff(first) // sizes.tile)
    first_tile = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(needed, dtype=jnp.int32)])
    number = jnp.arange(sizes.tiles * sizes.groups, dtype=jnp.int32)
    block = jnp.searchsorted(first_tile[1:], number, side="right").astype(jnp.int32)
    exists = block < blocks
    block = jnp.minimum(block, blocks - 1)
    lane = jnp.arange(sizes.tile, dtype=jnp.int32)
    at = (first[block] + (number - first_tile[block]) * sizes.tile)[:, None] + lane
    exists = exists[:, None] & (at < first[block + 1][:, None])
    row = jnp.where(exists, pair[jnp.minimum(at, pairs - 1)] // each, -1)
    place = first_tile[block_of] * sizes.tile + jnp.arange(pairs, dtype=jnp.int32) - first[block_of]
    place = jnp.where(block_of < blocks, place, -1)
    slot = jnp.zeros_like(place).at[pair].set(place, unique_indices=True)
    return _Plan(
        block.reshape(sizes.groups, sizes.tiles),
        row.reshape(sizes.groups, sizes.tiles, sizes.tile),
        slot.reshape(chosen.shape),
    )


def _windows(x, start, size):
    """[n, W], [tiles] -> [tiles, size, W]."""
    return jax.vmap(lambda at: lax.dynamic_slice_in_dim(x, at, size))(start)


def _add_windows(total, start, parts):
    """Adds parts [tiles, size, W] at rows `start` of total [n, W]."""
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
    )
    return lax.scatter_add(
        total, start[:, None], parts, numbers, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS
    )


def _rows(x, row):
    """[R, G, W] of the rows [tiles, tile] -> [tiles, tile * G, W]; anything where row is -1."""
    taken = x.at[jnp.maximum(row, 0)].get(mode="promise_in_bounds")
    return taken.reshape(row.shape[0], -1, x.shape[-1])


def _sum_pairs(parts, slot, weights):
    """[rows, G, W]: parts [slots, G, W] at slot [rows, s], weighted by [rows, s, G or 1], summed.

    One choice after the other, so that the parts are never copied side by side.
    """

    def add(total, xs):
        slot, weight = xs
        part = parts.at[slot].get(mode="clip")
        return total + part * weight[..., None], None

    total = jnp.zeros((slot.shape[0], *parts.shape[1:]), parts.dtype)
    return lax.scan(add, varying_like(total, parts), (slot.T, jnp.moveaxis(weights, 1, 0)))[0]


def _chunks(x, sizes):
    """[R, ...] -> [chunks, rows, ...], padded with zeros."""
    pad = [(0, sizes.chunks * sizes.rows - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, pad).reshape(sizes.chunks, sizes.rows, *x.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _routed(size, scale, q, k, v, start, chosen):
    return _forward(size, scale, q, k, v, start, chosen)[0]


def _forward(size, scale, q, k, v, start, chosen):
    low = operand_dtype(q, k, v)
    rows, shared, _ = q.shape
    blocks = start.shape[0]
    sizes = _sizes(rows, shared, chosen.shape[1], blocks)
    pad = sizes.chunks * sizes.rows - rows
    chosen = jnp.pad(chosen, ((0, pad), (0, 0)), constant_values=blocks)
    chosen = chosen.reshape(sizes.chunks, sizes.rows, -1)

    def chunk(xs):
        q, chosen = xs
        plan = _plan(chosen, blocks, sizes)

        def group(xs):
            block, row = xs
            at = start[block]
            logits = contract("trk,tsk->trs", _rows(q, row), _windows(k, at, size), dtype=low)
            out, log = softmax_part(logits * scale, None, _windows(v, at, size), low)
            return out.reshape(*row.shape, shared, -1), log.reshape(*row.shape, shared)

        out, log = lax.map(group, (plan.block, plan.row))
        out, log = out.reshape(-1, *out.shape[3:]), log.reshape(-1, shared)
        some = (plan.slot >= 0)[..., None]
        log = jnp.where(some, log.at[plan.slot].get(mode="clip"), EMPTY)
        top = jnp.max(log, axis=1)
        weights = jnp.where(some, jnp.exp(log - top[:, None]), 0)
        total = jnp.sum(weights, axis=1)
        merged = _sum_pairs(out, plan.slot, weights) / jnp.where(total > 0, total, 1)[..., None]
        return (merged, top + jnp.log(jnp.where(total > 0, total, 1))), plan

    (out, log), plan = lax.map(chunk, (_chunks(q, sizes), chosen))
    out, log = (x.reshape(-1, *x.shape[2:])[:rows] for x in (out, log))
    return (out, log), (q, k, v, start, plan, out, log)


def _backward(size, scale, residuals, cotangents):
    q, k, v, start, plan, out, log = residuals
    d_out, d_log = cotangents
    low = operand_dtype(q, k, v)
    wide = state_dtype(q, k, v)
    rows, shared, width = q.shape
    sizes = _sizes(rows, shared, plan.slot.shape[2], start.shape[0])
    through = d_log - jnp.sum(d_out * out, axis=-1)

    def chunk(carry, xs):
        plan, q, d_out, log, through = xs

        def group(carry, xs):
            d_k, d_v = carry
            block, row = xs
            at = start[block]
            keys, values = _windows(k, at, size), _windows(v, at, size)
            queries, d_outs = _rows(q, row), _rows(d_out, row)
            logs, throughs = _rows(log[..., None], row), _rows(through[..., None], row)
            exists = jnp.repeat(row >= 0, shared, axis=1)[..., None]
            logits = contract("trk,tsk->trs", queries, keys, dtype=low) * scale
            weights = jnp.where(exists, jnp.exp(jnp.where(exists, logits - logs, 0)), 0)
            d_weights = contract("trv,tsv->trs", d_outs, values, dtype=low)
            d_logits = weights * (d_weights + throughs) * scale
            d_q = contract("trs,tsk->trk", d_logits, keys, dtype=low)
            d_k = _add_windows(d_k, at, contract("trs,trk->tsk", d_logits, queries, dtype=low))
            d_v = _add_windows(d_v, at, contract("trs,trv->tsv", weights, d_outs, dtype=low))
            return (d_k, d_v), d_q.reshape(*row.shape, shared, width)

        carry, d_q = lax.scan(group, carry, (plan.block, plan.row))
        d_q = d_q.reshape(-1, shared, width)
        exists = (plan.slot >= 0).astype(d_q.dtype)[..., None]
        d_q = _sum_pairs(d_q, plan.slot, exists)
        return carry, d_q

    carry = tuple(varying_like(jnp.zeros(x.shape, wide), q, k, v, d_out) for x in (k, v))
    xs = (plan, *(_chunks(x, sizes) for x in (q, d_out, log, through)))
    (d_k, d_v), d_q = lax.scan(chunk, carry, xs)
    d_q = d_q.reshape(-1, shared, width)[:rows]
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None, None


_routed.defvjp(_forward, _backward)
