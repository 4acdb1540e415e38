# SPDX-License-Identifier: Apache-2.0
"""The two forms of Longformer's attention, and its cache."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from seqmix.mixers import _block_sparse as lines
from seqmix.mixers._block_sparse import NOWHERE, Piece, attend, chunked, fetch, from_line, to_line
from seqmix.mixers._full_rows import chunk_ends, document_bounds, full_rows
from seqmix.mixers.kv_cache import KVCache, slot_positions

_LEAST_KEYS = 256  # of a chunk of keys that full rows read


class LongformerCache(NamedTuple):
    """What later tokens of the current document can see.

    Attributes:
      ring: keys and values of the newest tokens, and the document's length.
      global_key: [B, N, Hkv, K] keys of the document's first N = global_tokens tokens.
      global_value: [B, N, Hkv, V].
      row_key: [B, N, Hkv, K] their k_global; None if that is k.
      row_value: [B, N, Hkv, V] their v_global; None if that is v.
    """

    ring: KVCache
    global_key: Float[Array, "B N Hkv K"]
    global_value: Float[Array, "B N Hkv V"]
    row_key: Float[Array, "B N Hkv K"] | None
    row_value: Float[Array, "B N Hkv V"] | None


class Options(NamedTuple):
    """Static options."""

    window: int
    tokens: int
    causal: bool
    scale: float
    chunk: int


def extend(cache, ring, local, rows, at, tokens):
    """The cache after new tokens, whose ring is given."""
    last = at.run[:, -1:]
    kept = at.real & (at.run == last) & (at.position < tokens)
    slot = jnp.where(kept, at.position, tokens)
    batch = jnp.arange(slot.shape[0])[:, None]

    def write(old, new):
        if old is None:
            old = jnp.zeros((new.shape[0], tokens, *new.shape[2:]), new.dtype)
        if tokens == 0:
            return old  # JAX cannot differentiate a scatter into nothing.
        return old.at[batch, slot].set(new.astype(old.dtype), mode="drop")

    old = (None,) * 4 if cache is None else cache[1:]
    new = [write(*pair) for pair in zip(old[:2], local[-2:], strict=True)]
    if rows is None:
        return LongformerCache(ring, *new, None, None)
    return LongformerCache(
        ring, *new, *(write(*pair) for pair in zip(old[2:], rows[1:], strict=True))
    )


def most_marked(at, marked):
    """[B] the greatest number of marked tokens of a document."""

    def one(run, marked):
        counts = jnp.zeros(run.shape, jnp.int32).at[run].add(marked.astype(jnp.int32))
        return jnp.max(counts)

    return jax.vmap(one)(at.run, marked)


def dense(local, rows, cache, at, marked, options, padded):
    """All pairs, masked."""
    del padded
    q, k, v = local
    same = at.real[:, None] & (at.run[:, :, None] == at.run[:, None])
    lag = at.position[:, :, None] - at.position[:, None]
    if options.causal:
        seen = same & (lag >= 0)
        near = lag < options.window
    else:
        seen = same
        near = jnp.abs(lag) <= options.window // 2
    visible = seen & (near | marked[:, None])
    keys, values = [k], [v]
    if cache is not None:
        # What has left the window is seen among the first tokens, or not at all.
        held = slot_positions(cache.ring.length, cache.ring.key.shape[1])
        first = _held_globals(cache, options.tokens)
        continues = (at.run == 0)[:, :, None]
        ring = continues & (held >= 0)[:, None]
        ring = ring & (at.position[:, :, None] - held[:, None] < options.window)
        out = at.position[:, :, None] - first[:, None] >= options.window
        visible = jnp.concatenate([continues & (first >= 0)[:, None] & out, ring, visible], axis=2)
        keys = [cache.global_key.astype(k.dtype), cache.ring.key.astype(k.dtype), k]
        values = [cache.global_value.astype(v.dtype), cache.ring.value.astype(v.dtype), v]
    out = _masked(q, keys, values, visible, options.scale)
    if options.tokens == 0:
        return out
    q, k, v = local if rows is None else rows
    keys, values, visible = [k], [v], seen
    if cache is not None:
        key, value = _row_store(cache)
        keys, values = [key.astype(k.dtype), k], [value.astype(v.dtype), v]
        visible = jnp.concatenate(
            [
                jnp.broadcast_to(
                    continues & (first >= 0)[:, None], (*seen.shape[:2], options.tokens)
                ),
                visible,
            ],
            axis=2,
        )
    full = _masked(q, keys, values, visible & marked[:, :, None], options.scale)
    return jnp.where(marked[..., None, None], full, out)


def _masked(q, keys, values, visible, scale):
    k, v = (jnp.moveaxis(jnp.concatenate(x, axis=1), 1, 2) for x in (keys, values))
    batch, time, heads, _ = q.shape
    grouped = q.reshape(batch, time, k.shape[1], heads // k.shape[1], -1)
    out, _ = lines.softmax(grouped, k, v, visible[:, None], scale)
    return out.reshape(batch, time, heads, -1)


def _held_globals(cache, tokens):
    """[B, N] positions of the global tokens that the cache holds, -1 where it has none yet."""
    index = jnp.arange(tokens, dtype=jnp.int32)[None]
    return jnp.where(index < cache.ring.length[:, None], index, -1)


def _row_store(cache):
    if cache.row_key is None:
        return cache.global_key, cache.global_value
    return cache.row_key, cache.row_value


def sparse(local, rows, cache, at, marked, options, padded):
    """Chunks of queries over their windows and global tokens."""
    line = lines.lay_out(at, padded)
    q, k, v = (to_line(line, x) for x in local)
    marked = fetch(marked[..., None], line.order)[..., 0] if line.order is not None else marked
    row_arrays = (q, k, v) if rows is None else tuple(to_line(line, x) for x in rows)
    form = _causal if options.causal else _bidirectional
    out, full = form((q, k, v), row_arrays, cache, line, marked, options, padded)
    if full is not None:
        out = jnp.where(marked[..., None, None], full, out)
    return from_line(line, out)


class _Pool(NamedTuple):
    """Run and position [B, S] of the keys of a pool, and the cache's length [B] if there is one."""

    run: jax.Array
    position: jax.Array
    length: jax.Array | None


class _CausalPlan(NamedTuple):
    """Keys of a chunk: what lies up to `left` before it, itself, and the first document's globals.

    Documents that start in the chunk have their global tokens in it.
    """

    scale: float
    skip: bool
    left: int  # places before the chunk that are read
    window: int
    tokens: int
    base: int  # index of the line's first place in the pool
    ring: int  # places before it that hold the cache's ring
    rows: bool  # only rows of global tokens count

    def pieces(self, queries: Any, pool: _Pool) -> list[Piece]:
        first, run, position = queries
        batch, size = pool.run.shape
        low = self.base + first - self.left
        index = low + jnp.arange(self.left + run.shape[1], dtype=jnp.int32)
        index = jnp.where(index >= self.base - self.ring, index, size)
        near = self._piece(jnp.broadcast_to(index, (batch, index.shape[0])), queries, pool)
        if self.tokens == 0:
            return [near]
        # Where the tokens would stand if the whole document stood in line.
        place = self.base + first - position[:, :1] + jnp.arange(self.tokens, dtype=jnp.int32)
        index = place
        if pool.length is not None:
            slot = jnp.arange(self.tokens, dtype=jnp.int32)
            held = (run[:, :1] == 0) & (slot < pool.length[:, None])
            index = jnp.where(held, slot, place)
        index = jnp.where((place < low) & (run[:, :1] >= 0), index, size)
        return [near, self._piece(index, queries, pool)]

    def _piece(self, index, queries, pool):
        _, run, position = queries
        key_run = fetch(pool.run, index, NOWHERE)
        key_position = fetch(pool.position, index)
        lag = position[:, :, None] - key_position[:, None]
        visible = (run[:, :, None] == key_run[:, None]) & (run >= 0)[:, :, None] & (lag >= 0)
        if self.rows:
            visible = visible & (position < self.tokens)[:, :, None]
        else:
            visible = visible & ((lag < self.window) | (key_position < self.tokens)[:, None])
        return Piece(index[:, None], visible[:, None])


def _causal(local, rows, cache, line, marked, options, padded):
    del marked, padded
    time, chunk, tokens = line.run.shape[1], options.chunk, options.tokens
    first = jnp.arange(0, time, chunk, dtype=jnp.int32)
    queries = (first, chunked(line.run, chunk, NOWHERE), chunked(line.position, chunk))
    reach = options.window - 1

    def over(plan, q, k, v, pool):
        return attend(plan, q, k, v, queries, pool, chunk)

    q, k, v = local
    pool = _Pool(line.run, line.position, None)
    plan = _CausalPlan(options.scale, False, reach, options.window, tokens, 0, 0, rows=False)
    if cache is not None:
        length = cache.ring.length
        slots = cache.ring.key.shape[1]
        held = length[:, None] - reach + jnp.arange(reach, dtype=jnp.int32)
        there = (held >= 0) & (held >= length[:, None] - slots)
        slot = jnp.where(there, jnp.mod(held, slots), slots)
        first_tokens = _held_globals(cache, tokens)
        position = jnp.concatenate([first_tokens, jnp.where(there, held, -1)], axis=1)
        pool = _with_cache(pool, position, length)
        k = _joined(k, cache.global_key, fetch(cache.ring.key, slot))
        v = _joined(v, cache.global_value, fetch(cache.ring.value, slot))
        plan = plan._replace(base=tokens + reach, ring=reach)
    out = over(plan, q, k, v, pool)
    if tokens == 0:
        return out, None

    q, k, v = rows
    pool = _Pool(line.run, line.position, None)
    plan = plan._replace(skip=True, left=0, base=0, ring=0, rows=True)
    if cache is not None:
        key, value = _row_store(cache)
        pool = _with_cache(pool, first_tokens, length)
        k, v = _joined(k, key), _joined(v, value)
        plan = plan._replace(base=tokens)
    return out, over(plan, q, k, v, pool)


def _joined(new, *held):
    return jnp.concatenate([*(x.astype(new.dtype) for x in held), new], axis=1)


def _with_cache(pool, position, length):
    """The pool with the cache's tokens before it; position -1 for none."""
    run = jnp.where(position >= 0, 0, NOWHERE).astype(pool.run.dtype)
    return _Pool(
        jnp.concatenate([run, pool.run], axis=1),
        jnp.concatenate([position, pool.position], axis=1),
        length,
    )


class _BidirectionalPlan(NamedTuple):
    """Keys of a chunk: `reach` places around it, and the globals of the documents at its ends."""

    scale: float
    skip: bool
    reach: int
    tokens: int

    def pieces(self, queries: Any, pool: Any) -> list[Piece]:
        first, run, ends = queries
        key_runs, marked = pool
        batch, size = key_runs.shape
        chunk = run.shape[1]
        low, high = first - self.reach, first + chunk + self.reach
        index = low + jnp.arange(chunk + 2 * self.reach, dtype=jnp.int32)
        index = jnp.broadcast_to(jnp.where(index >= 0, index, size), (batch, index.shape[0]))
        lag = jnp.arange(chunk)[:, None] - jnp.arange(-self.reach, chunk + self.reach)[None]
        same = run[:, :, None] == fetch(key_runs, index, NOWHERE)[:, None]
        same = same & (run >= 0)[:, :, None]
        near = (jnp.abs(lag) <= self.reach) | fetch(marked, index)[:, None]
        pieces = [Piece(index[:, None], (same & near)[:, None])]
        for end in ends:
            index = jnp.where((end.members < low) | (end.members >= high), end.members, size)
            visible = (run[:, :, None] == end.run[:, None, None]) & (index < size)[:, None]
            visible = visible & (run >= 0)[:, :, None]
            pieces.append(Piece(index[:, None], visible[:, None]))
        return pieces


def _bidirectional(local, rows, cache, line, marked, options, padded):
    del cache
    time, chunk, tokens = line.run.shape[1], options.chunk, options.tokens
    ends = ()
    if tokens:
        bounds = document_bounds(line)
        ends = chunk_ends(line, bounds, lines.listing(marked), tokens, chunk)
        ends = ends if padded else ends[:1]
    first = jnp.arange(0, time, chunk, dtype=jnp.int32)
    queries = (first, chunked(line.run, chunk, NOWHERE), ends)
    plan = _BidirectionalPlan(options.scale, False, options.window // 2, tokens)
    out = attend(plan, *local, queries, (line.run, marked), chunk)
    if tokens == 0:
        return out, None
    full = full_rows(
        *rows,
        marked,
        line,
        most=tokens,
        scale=options.scale,
        chunk=max(chunk, _LEAST_KEYS),
        packed=padded,
    )
    return out, full
