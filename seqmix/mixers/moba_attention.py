# SPDX-License-Identifier: Apache-2.0
"""Mixture of block attention (MoBA): each query attends to a few blocks that it chooses."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers import _selection as selection
from seqmix.mixers._banded import banded, merge
from seqmix.mixers._dispatch import choose
from seqmix.mixers._document_blocks import (
    Blocks,
    block_means,
    complete_blocks,
    gather_blocks,
    lay_out,
)
from seqmix.mixers._numerics import contract, state_dtype
from seqmix.mixers._routed import routed
from seqmix.mixers._segments import mask_padding
from seqmix.mixers.kv_cache import KVCache, append, init_kv_cache, outgrown, place
from seqmix.typing import Keys, Queries, SegmentIds, Values

IMPLEMENTATIONS = ("dense", "sparse")
ROUTING_CHUNK = 1024


class MoBAState(NamedTuple):
    """The keys and values of the current document, and the means of its blocks.

    Attributes:
      cache: keys and values, slot p for position p.
      means: [B, max(1, S // block), Hkv, K] float32 means of the keys of each block so far.
    """

    cache: KVCache
    means: Float[Array, "B N Hkv K"]


def init_moba_state(
    batch: int, capacity: int, heads: int, key_width: int, value_width: int, dtype, block_size: int
) -> MoBAState:
    """An empty state for `capacity` tokens.

    Raises:
      ValueError: if a size is < 1.
    """
    check.positive("init_moba_state", "block_size", block_size, optional=False)
    cache = init_kv_cache(batch, capacity, heads, key_width, value_width, dtype)
    blocks = max(1, capacity // block_size)
    means = jnp.zeros((batch, blocks, heads, key_width), state_dtype(cache.key))
    return MoBAState(cache, means)


def moba_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    block_size: int = 512,
    top_k: int = 3,
    scale: float | None = None,
    initial_state: MoBAState | None = None,
    segment_ids: SegmentIds | None = None,
    capacity: int | None = None,
    impl: str = "auto",
) -> tuple[Float[Array, "B T Hq V"], MoBAState]:
    """Softmax attention over the token's own block and the top_k - 1 best blocks before it.

    Blocks of `block_size` tokens are counted from the start of each document. Every query head
    scores the complete blocks before its token's block by q . mean(k), unscaled, in float32; equal
    scores go to the earlier block. Its own block is always in and counts as one of the `top_k`;
    inside it the token sees itself and earlier tokens. One softmax covers the union. No gradient
    passes through the choice.

    MoBA: arXiv 2502.13189, moba/moba_naive.py of MoonshotAI/MoBA. The same arguments give full
    attention when passed to `attention`, and when top_k covers every block.

    Args:
      q: [B, T, Hq, K] float.
      k: [B, T, Hkv, K] float; Hq a multiple of Hkv, key head j serves consecutive query heads.
      v: [B, T, Hkv, V] float.
      block_size: tokens of a block.
      top_k: blocks a query attends to, its own included.
      scale: of the softmax's logits; None for K**-0.5.
      initial_state: of each row's first document so far.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      capacity: slots of the returned cache. None: as many as needed. A decode loop passes a
        constant; where a document outgrows it, the row's outputs are NaN.
      impl: 'dense' (the definition: a masked softmax over all tokens), 'sparse' or 'auto'.

    Returns:
      out: [B, T, Hq, V] in the dtype of v; 0 at padding.
      state: of each row's last document.

    Raises:
      ValueError: for shapes, dtypes or options off the above, or an impl that cannot run.
    """
    name = "moba_attention"
    selection.check_heads(name, q, k, v)
    batch, time = q.shape[:2]
    for option, value in (("block_size", block_size), ("top_k", top_k)):
        check.positive(name, option, value, optional=False)
    check.positive(name, "capacity", capacity)
    check.state_type(name, initial_state, MoBAState)
    check.segments(name, segment_ids, batch, time)
    impl = choose(name, impl, IMPLEMENTATIONS, time=time, default="sparse")
    scale = k.shape[-1] ** -0.5 if scale is None else float(scale)
    cache = None
    if initial_state is not None:
        cache = initial_state.cache
        _check_state(name, initial_state, k, v, block_size)

    q, k, v = mask_padding(segment_ids, q, k, v)
    at = place(cache, segment_ids, batch, time)
    slots = capacity or time + (0 if cache is None else cache.key.shape[1])
    after = append(cache, k, v, at, slots)
    if impl == "sparse" and time == 1:
        out, means = _decode(q, after, initial_state, at, block_size, top_k, scale)
    else:
        out = _attend(q, k, v, cache, segment_ids, block_size, top_k, scale, impl)
        means = _means(after, block_size)
    out = jnp.where(outgrown(cache, after, at)[..., None, None], jnp.nan, out)
    out = mask_padding(segment_ids, out.astype(v.dtype))[0]
    return out, MoBAState(after, lax.stop_gradient(means))


def _check_state(name, state, k, v, block_size):
    selection.check_cache(name, "initial_state.cache", state.cache, k, v)
    blocks = max(1, state.cache.key.shape[1] // block_size)
    expected = (k.shape[0], blocks, *k.shape[2:])
    check.shape(name, "initial_state.means", state.means, expected, "B S//block_size Hkv K")


def _means(cache, size):
    """[B, N, Hkv, K] means of the blocks of a cache; of one that is filling, over `size` too."""
    batch, slots, *rest = cache.key.shape
    count = max(1, slots // size)
    key = cache.key[:, : count * size]
    key = jnp.pad(key, ((0, 0), (0, count * size - key.shape[1]), (0, 0), (0, 0)))
    filled = jnp.arange(count * size) < cache.length[:, None]
    key = jnp.where(filled[..., None, None], key, 0)
    return block_means(key.reshape(batch, count, size, *rest))


def _attend(q, k, v, cache, segment_ids, size, top_k, scale, impl):
    """Outputs [B, T, Hq, V] over the cache and the row's tokens."""
    batch, time, heads, width = q.shape
    kv_heads = k.shape[2]
    shared = heads // kv_heads
    length, slots = (None, 0) if cache is None else (cache.length, cache.key.shape[1])
    line = lay_out(length, slots, segment_ids, batch, time)
    keys = line.join(None if cache is None else cache.key, k)
    values = line.join(None if cache is None else cache.value, v)
    q = line.rows(q).reshape(batch, time, kv_heads, shared, width)
    run, position, real = line.queries()
    blocks = complete_blocks(line, size)
    means = block_means(gather_blocks(lax.stop_gradient(keys), blocks, size))
    current = position // size
    chosen = _route(lax.stop_gradient(q), means, blocks, run, current, top_k - 1)
    reach = jnp.where(real, jnp.mod(position, size), -1)
    q, keys, values = (jnp.moveaxis(x, 1, 2) for x in (q, keys, values))
    if impl == "dense":
        out = selection.dense(q, keys, values, line, blocks.member, chosen, reach, size, scale)
    else:
        width = min(size, slots + time)
        parts = [banded(q, keys, values, reach, width, scale)]
        if chosen.shape[-1] and slots + time >= size:
            # Every query head is a row of its own: its blocks are its own.
            alone = q.reshape(batch, kv_heads, time * shared, 1, -1)
            picked = chosen.reshape(*alone.shape[:3], -1)
            part = routed(alone, keys, values, blocks.start, picked, size=size, scale=scale)
            parts.append(tuple(x.reshape(y.shape) for x, y in zip(part, parts[0], strict=True)))
        out = merge(*parts)[0]
    out = jnp.moveaxis(out, 1, 2).reshape(batch, time, heads, -1)
    return line.tokens(out)


def _route(q, means, blocks: Blocks, run, current, count):
    """Blocks chosen by each query, [B, Hkv, T, G, min(count, N)], N for none."""
    count = min(count, means.shape[1])

    def chunk(xs):
        q, run, current = xs
        visible = selection.earlier(blocks, run, current)
        scores = contract("bthgk,bnhk->bhtgn", q, means, dtype=means.dtype)
        return selection.best(scores, visible[:, None, :, None], count)

    return selection.by_chunks(chunk, (q, run, current), ROUTING_CHUNK)


def _decode(q, after, state, at, size, top_k, scale):
    """Output of one token a row, and the means after it."""
    batch, _, heads, width = q.shape
    slots, kv_heads = after.key.shape[1:3]
    q = q.reshape(batch, kv_heads, heads // kv_heads, width)
    position, real = at.position[:, 0], at.real[:, 0]
    current = position // size
    count = max(1, slots // size)
    empty = jnp.zeros((batch, 0, kv_heads, width), state_dtype(after.key))
    means = selection.resize(empty if state is None else state.means, count)
    here, seen = selection.window(after.key, current * size, position, size)
    mean = block_means(jnp.where(seen[..., None, None], here, 0))
    means = selection.write(means, current, mean, real)
    number = jnp.arange(count)
    visible = jnp.broadcast_to(number < current[:, None], (batch, count))
    scores = contract("bhgk,bnhk->bhgn", q, means, dtype=means.dtype)
    chosen = selection.best(scores, visible[:, None, None], min(top_k - 1, count))
    starts = jnp.where(chosen < count, chosen * size, slots)
    own = jnp.broadcast_to((current * size)[:, None, None, None], (*starts.shape[:3], 1))
    starts = jnp.concatenate([own.astype(jnp.int32), starts], axis=-1)
    q = q.reshape(batch, kv_heads, -1, 1, width)
    out = selection.gathered(q, after, starts, position, size, scale)
    return out.reshape(batch, 1, heads, -1), means
