# SPDX-License-Identifier: Apache-2.0
"""The two forms of BigBird's attention, and its random blocks."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from seqmix.mixers import _block_sparse as lines
from seqmix.mixers._block_sparse import NOWHERE, Piece, attend, chunked, fetch, from_line, to_line
from seqmix.mixers._full_rows import document_bounds, full_rows
from seqmix.mixers.kv_cache import slot_positions

_LEAST_KEYS = 256  # of a chunk of keys that full rows read


class Options(NamedTuple):
    """Static options; the window of block i is i - before ... i + after."""

    block: int
    before: int
    after: int
    random: int
    seed: int
    causal: bool
    scale: float


def random_plan(options: Options, head: jax.Array, block: jax.Array, blocks: jax.Array | None):
    """Random blocks that a block sees: distinct, and none that it sees anyway.

    Floyd's method: of M candidates, draw j = M - r ... M - 1 takes one of 0 ... j, or j itself if
    that is taken.

    Args:
      options: static options.
      head: key head, any shape.
      block: index in the document, broadcastable with it.
      blocks: number of blocks of the document; None where causal.

    Returns:
      [..., r] int32 blocks, -1 for none.
    """
    # Candidates are 1 ... block - before - 1 and block + after + 1 ... blocks - 2.
    below = jnp.maximum(block - options.before - 1, 0)
    above = jnp.zeros_like(below)
    if blocks is not None:
        above = jnp.maximum(blocks - 2 - block - options.after, 0)
    count = below + above
    state = _mix(jnp.uint32((options.seed + 1) * _STEP % 2**32))
    for name in (head, block, jnp.zeros_like(block) if blocks is None else blocks):
        state = _mix(state + (name.astype(jnp.uint32) + 1) * jnp.uint32(_STEP))
    chosen = []
    for left in range(options.random, 0, -1):
        j = count - left
        draw = _mix(state + jnp.uint32(left * _STEP % 2**32))
        pick = (draw % (jnp.maximum(j, 0) + 1).astype(jnp.uint32)).astype(jnp.int32)
        taken = jnp.zeros(pick.shape, bool)
        for other in chosen:
            taken = taken | (pick == other)
        pick = jnp.where(taken, j, pick)
        chosen.append(jnp.where(j >= 0, pick, -1))
    if not chosen:
        return jnp.zeros((*jnp.broadcast_shapes(head.shape, block.shape), 0), jnp.int32)
    rank = jnp.stack(chosen, axis=-1)
    below, block = below[..., None], block[..., None]
    found = jnp.where(rank < below, 1 + rank, block + options.after + 1 + rank - below)
    return jnp.where(rank >= 0, found, -1)


_STEP = 0x9E3779B9  # 2**32 over the golden ratio


def _mix(x):
    """A bijection of 32-bit words in which every bit of the input moves every bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def dense(q, k, v, cache, at, options):
    """All pairs, masked."""
    batch, time, heads, _ = q.shape
    groups = k.shape[2]
    run, position, real = at
    if cache is not None:
        held = slot_positions(cache.length, cache.key.shape[1])
        k = jnp.concatenate([cache.key.astype(k.dtype), k], axis=1)
        v = jnp.concatenate([cache.value.astype(v.dtype), v], axis=1)
        run = jnp.concatenate([jnp.zeros_like(held), run], axis=1)
        position = jnp.concatenate([held, position], axis=1)
        real = jnp.concatenate([held >= 0, real], axis=1)
    same = real[:, None] & (at.run[:, :, None] == run[:, None])
    mine, theirs = at.position // options.block, position // options.block
    lag = mine[:, :, None] - theirs[:, None]
    sees = (lag <= options.before) & (lag >= -options.after) | (theirs == 0)[:, None]
    blocks = None
    if options.causal:
        same = same & (at.position[:, :, None] >= position[:, None])
    else:
        counts = jnp.max(jnp.where(same, position[:, None] + 1, 0), axis=2)
        blocks = -(-counts // options.block)
        last = blocks - 1
        sees = sees | (theirs[:, None] == last[:, :, None])
        sees = sees | ((mine == 0) | (mine == last))[:, :, None]
        blocks = blocks[:, None]
    drawn = random_plan(options, jnp.arange(groups)[:, None], mine[:, None], blocks)
    sees = sees[:, None] | jnp.any(drawn[..., None, :] == theirs[:, None, None, :, None], axis=-1)
    grouped = q.reshape(batch, time, groups, heads // groups, -1)
    k, v = (jnp.moveaxis(x, 1, 2) for x in (k, v))
    out, _ = lines.softmax(grouped, k, v, same[:, None] & sees, options.scale)
    return out.reshape(batch, time, heads, -1)


class _Pool(NamedTuple):
    """Run and position [B, S] of a pool's keys; the index [B] of the line's first place in it."""

    run: jax.Array
    position: jax.Array
    base: jax.Array


class _Plan(NamedTuple):
    """Keys of a chunk: the window's places, and far blocks of the document at its left end.

    A chunk is no longer than a block, so a document that starts in it has block 0 only there:
    causal, its window is all it sees; else its rows are full ones, which are not made here. Of the
    document at the left end the chunk holds tokens of two blocks, or of one if it is a single
    token or `aligned`: from the start of a block.
    """

    scale: float
    skip: bool
    options: Options
    aligned: bool
    groups: int

    def pieces(self, queries: Any, pool: _Pool) -> list[Piece]:
        first, run, position, blocks = queries
        options, (batch, size) = self.options, pool.run.shape
        chunk, width = run.shape[1], options.block
        start = pool.base + first  # [B]
        mine = position // width
        # From inside a block the window reaches up to a block less one token further.
        slack = 0 if self.aligned else width - 1
        left = options.before * width + slack
        right = 0 if options.causal else options.after * width + slack
        index = start[:, None] + jnp.arange(-left, chunk + right, dtype=jnp.int32)
        index = jnp.where(index >= 0, index, size)
        lag = mine[:, :, None] - fetch(pool.position, index)[:, None] // width
        near = (lag <= options.before) & (lag >= -options.after)
        visible = self._same(run, pool, index) & near
        if options.causal:
            visible = visible & (
                index[:, None] <= start[:, None, None] + jnp.arange(chunk)[:, None]
            )
        else:
            full = (mine == 0) | (mine == blocks - 1)
            sparse = ~full[:, :, None]
            visible = visible & sparse
        pieces = [Piece(index[:, None], visible[:, None])]

        own = (run == run[:, :1])[:, :, None]
        origin = start - position[:, 0]  # where the document at the left end starts
        own = own if options.causal else own & sparse

        def far(block, visible):
            """Blocks [B, h] of that document."""
            index = (origin[:, None] + block * width)[..., None]
            index = index + jnp.arange(width, dtype=jnp.int32)
            index = jnp.where((block >= 0)[..., None], index, size)
            same = self._same(run, pool, index.reshape(batch, -1))
            same = same.reshape(batch, chunk, *index.shape[1:])
            visible = jnp.moveaxis(same, 2, 1) & (visible & own)[:, None]
            pieces.append(Piece(index, visible))

        far(jnp.zeros((batch, 1), jnp.int32), (mine > options.before)[:, :, None])
        total = None
        if not options.causal:
            total = blocks[:, :1]
            outside = (total - 1 - mine > options.after)[:, :, None]
            far(total - 1, outside)
        heads = jnp.arange(self.groups, dtype=jnp.int32)[None]
        for part in range(1 if self.aligned or chunk == 1 else 2):
            block = mine[:, :1] + part
            drawn = random_plan(options, heads, block, total)
            for i in range(options.random):
                far(drawn[..., i], (mine == block)[:, :, None])
        return pieces

    @staticmethod
    def _same(run, pool, index):
        same = run[:, :, None] == fetch(pool.run, index, NOWHERE)[:, None]
        return same & (run >= 0)[:, :, None]


def sparse(q, k, v, cache, after, at, options, padded):
    """Chunks of queries over the blocks they see; `after` is the cache with the new tokens."""
    batch, time = q.shape[:2]
    line = lines.lay_out(at, padded)
    q, k, v = (to_line(line, x) for x in (q, k, v))
    chunk = min(time, options.block)
    first = jnp.arange(0, time, chunk, dtype=jnp.int32)
    blocks = jnp.zeros_like(line.run)
    if not options.causal:
        bounds = document_bounds(line)
        blocks = -(-(bounds.end - bounds.start) // options.block)
    queries = tuple(
        chunked(x, chunk, fill)
        for x, fill in ((line.run, NOWHERE), (line.position, 0), (blocks, 0))
    )
    aligned = cache is None and not padded
    plan = _Plan(options.scale, False, options, aligned, k.shape[2])
    keys, values, pool = k, v, _Pool(line.run, line.position, jnp.zeros((batch,), jnp.int32))
    if cache is not None:
        keys, values, pool = _with_cache(k, v, cache, after, line)
    out = attend(plan, q, keys, values, (first, *queries), pool, chunk)
    if not options.causal:
        mine = line.position // options.block
        marked = (line.run >= 0) & ((mine == 0) | (mine == blocks - 1))
        full = full_rows(
            q,
            k,
            v,
            marked,
            line,
            most=2 * options.block,
            scale=options.scale,
            chunk=max(_LEAST_KEYS, 2 * options.block),
            packed=padded,
        )
        out = jnp.where(marked[..., None, None], full, out)
    return from_line(line, out)


def _with_cache(k, v, cache, after, line):
    """Keys, values and pool in which the first document stands by position."""
    batch, time = k.shape[:2]
    slots = cache.key.shape[1]
    if time == 1:
        # The token is in the cache after it, where nothing need be moved.
        index = jnp.arange(after.key.shape[1], dtype=jnp.int32)[None]
        run = jnp.where(index < after.length[:, None], 0, NOWHERE)
        position = jnp.broadcast_to(index, run.shape)
        return after.key, after.value, _Pool(run, position, cache.length)

    def write(old, new):
        room = [(0, 0), (0, time)] + [(0, 0)] * (old.ndim - 2)
        old = jnp.pad(old.astype(new.dtype), room)
        return jax.vmap(lambda o, n, at: lax.dynamic_update_slice_in_dim(o, n, at, 0))(
            old, new, cache.length
        )

    held = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (batch, slots))
    run = write(jnp.where(held < cache.length[:, None], 0, NOWHERE), line.run)
    position = write(held, line.position)
    # Behind the new tokens stands what was padded on.
    index = jnp.arange(slots + time, dtype=jnp.int32)[None]
    run = jnp.where(index < (cache.length + time)[:, None], run, NOWHERE)
    return write(cache.key, k), write(cache.value, v), _Pool(run, position, cache.length)
