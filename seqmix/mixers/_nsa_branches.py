# SPDX-License-Identifier: Apache-2.0
"""The three branches of NSA over a cache and new tokens, and their decode step."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from seqmix.mixers import _selection as selection
from seqmix.mixers._banded import EMPTY, banded, merge, softmax_part
from seqmix.mixers._compression import compress, window_slots, windows_within
from seqmix.mixers._document_blocks import (
    LAST_RUN,
    NO_RUN,
    Line,
    complete_blocks,
    gather_blocks,
    lay_out,
    pick,
)
from seqmix.mixers._numerics import contract, operand_dtype
from seqmix.mixers._routed import routed
from seqmix.mixers.kv_cache import KVCache, place, slot_positions

QUERY_CHUNK = 256


class Sizes(NamedTuple):
    """Static options of `nsa_attention`, and the scale of its logits."""

    compression_block: int
    stride: int
    block_size: int
    selected_blocks: int
    initial_blocks: int
    local_blocks: int
    window: int
    scale: float

    @property
    def chosen(self) -> int:
        """Blocks that a token selects besides its local ones."""
        return self.selected_blocks - self.local_blocks

    def overlaps(self) -> list[int]:
        """How often windows o, o + 1, ... count in a block whose first token starts window 0.

        The first entry belongs to o = 1 - compression_block / stride.
        """
        inside, across = self.block_size // self.stride, self.compression_block // self.stride
        count = [0] * (inside + across - 1)
        for m in range(inside):
            for n in range(across):
                count[m - n + across - 1] += 1
        return count


class _Windows(NamedTuple):
    """Compressed windows by place, those of a document next to each other and in order.

    Attributes:
      key: [B, M, Hkv, K].
      value: [B, M, Hkv, V].
      run: [B, M] document, non-decreasing.
      index: [B, M] number in the document.
      exists: [B, M] bool, whether the window is complete.
    """

    key: jax.Array
    value: jax.Array
    run: jax.Array
    index: jax.Array
    exists: jax.Array


def _line(cache: KVCache | None, segment_ids, batch, time) -> Line:
    if cache is None:
        return lay_out(None, 0, segment_ids, batch, time)
    return lay_out(cache.length, cache.key.shape[1], segment_ids, batch, time)


def _join(line: Line, cache: KVCache | None, k, v):
    if cache is None:
        return line.join(None, k), line.join(None, v)
    return line.join(cache.key, k), line.join(cache.value, v)


def _new_windows(raw, k, v, segment_ids, mlps, sizes) -> _Windows:
    """The windows that end in the new tokens; the first is the next of the cached document's.

    The cached tokens lack one for a window, so no window of theirs appears again.
    """
    line = _line(raw, segment_ids, *k.shape[:2])
    strides = complete_blocks(line, sizes.stride)
    count = sizes.compression_block // sizes.stride
    pressed = [
        compress(gather_blocks(x, strides, sizes.stride), count, mlp)
        for x, mlp in zip(_join(line, raw, k, v), mlps, strict=True)
    ]
    run = strides.run
    shift = min(count - 1, run.shape[1])
    last = jnp.pad(run[:, shift:], ((0, 0), (0, shift)), constant_values=NO_RUN)
    exists = (run != LAST_RUN) & (run == last)
    return _Windows(*pressed, run, strides.index, exists)


def _with_cached(new: _Windows, cache: KVCache, complete) -> _Windows:
    """The `complete` [B] windows of a cache, followed by new ones."""
    slots = cache.key.shape[1]
    places = jnp.arange(slots, dtype=jnp.int32)[None]
    index = complete[:, None] - slots + places
    turn, slot = jnp.mod(index, slots), jnp.mod(places - complete[:, None], slots)
    held = index >= 0
    old = _Windows(
        pick(cache.key, turn, slot).astype(new.key.dtype),
        pick(cache.value, turn, slot).astype(new.value.dtype),
        jnp.where(held, 0, NO_RUN),
        index,
        held,
    )
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), old, new)


def _write_windows(cache: KVCache, new: _Windows, run, length, slots, sizes) -> KVCache:
    """The cache of windows of document `run` [B] with `length` [B] tokens."""
    rows = jnp.arange(run.shape[0])[:, None]
    slot = jnp.where(new.exists & (new.run == run[:, None]), new.index, slots)

    def put(old, x):
        old = selection.resize(old, slots)
        return old.at[rows, slot].set(x.astype(old.dtype), mode="drop")

    count = windows_within(length, sizes.compression_block, sizes.stride)
    return KVCache(put(cache.key, new.key), put(cache.value, new.value), count)


def _slots(after, sizes):
    capacity = after.selected.key.shape[1]
    return window_slots(capacity, sizes.compression_block, sizes.stride)


def attend(q, k, v, state, after, segment_ids, mlps, sizes: Sizes, *, dense: bool):
    """Outputs [B, T, Hq, V] of the three branches, and the cache of windows after the tokens."""
    batch, time, heads, width = q.shape
    kv_heads = k.selected.shape[2]
    raw, chosen_cache, window = (None,) * 3
    if state is not None:
        raw, chosen_cache, window = state.raw, state.selected, state.window
    fresh = _new_windows(raw, k.compressed, v.compressed, segment_ids, mlps, sizes)
    at = place(chosen_cache, segment_ids, batch, time)
    run, length = at.run[:, -1], after.selected.length
    compressed = _write_windows(after.compressed, fresh, run, length, _slots(after, sizes), sizes)
    windows = fresh
    if state is not None:
        windows = _with_cached(fresh, state.compressed, state.compressed.length)

    line = _line(chosen_cache, segment_ids, batch, time)
    blocks = complete_blocks(line, sizes.block_size)
    q = line.rows(q).reshape(batch, time, kv_heads, heads // kv_heads, width)
    ratio = sizes.block_size // sizes.stride
    first = jax.vmap(jnp.searchsorted)(windows.run, blocks.run).astype(jnp.int32)
    base = first + blocks.index * ratio
    run, position, real = line.queries()
    current = position // sizes.block_size

    pressed = tuple(jnp.moveaxis(x, 1, 2) for x in (windows.key, windows.value))

    @jax.checkpoint
    def choose(xs):
        q, run, position, current, real = xs
        end = windows.index * sizes.stride + sizes.compression_block - 1
        visible = windows.exists[:, None] & (run[:, :, None] == windows.run[:, None])
        visible = visible & (end[:, None] <= position[:, :, None]) & real[:, :, None]
        out, importance = _compressed(q, *pressed, visible, sizes)
        visible = selection.earlier(blocks, run, current - sizes.local_blocks + 1)
        return out, _select(importance, base, blocks.index, visible, sizes)

    xs = (q, run, position, current, real)
    first_out, chosen = selection.by_chunks(choose, xs, time if dense else QUERY_CHUNK)
    q = jnp.moveaxis(q, 1, 2)
    keys, values = (
        jnp.moveaxis(x, 1, 2) for x in _join(line, chosen_cache, k.selected, v.selected)
    )
    local = jnp.maximum(current - sizes.local_blocks + 1, 0) * sizes.block_size
    reach = jnp.where(real, position - local, -1)
    second_out = _selected(q, keys, values, line, blocks, chosen, reach, sizes, dense)
    near = _line(window, segment_ids, batch, time)
    keys, values = (jnp.moveaxis(x, 1, 2) for x in _join(near, window, k.window, v.window))
    reach = jnp.where(real, jnp.minimum(position, sizes.window - 1), -1)
    if dense:
        nothing = jnp.zeros((*chosen.shape[:3], 1, 0), jnp.int32)
        member = jnp.full(near.run.shape, -1, jnp.int32)
        third_out = selection.dense(q, keys, values, near, member, nothing, reach, 1, sizes.scale)
    else:
        third_out = banded(q, keys, values, reach, min(sizes.window, keys.shape[2]), sizes.scale)[0]

    def tokens(x):
        return line.tokens(jnp.moveaxis(x, 1, 2).reshape(batch, time, heads, -1))

    return tuple(map(tokens, (first_out, second_out, third_out))), compressed


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weigh(low, weights, v):
    """[B, H, R, M] weights of values [B, H, M, V]; their cotangent is never rounded to `low`.

    The softmax's backward takes differences of it.
    """
    return contract("bhrm,bhmv->bhrv", weights, v, dtype=low)


def _weigh_backward(low, operands, d_out):
    weights, v = operands
    d_weights = contract("bhrv,bhmv->bhrm", d_out, v, dtype=low)
    d_v = contract("bhrm,bhrv->bhmv", weights, d_out, dtype=low)
    return d_weights.astype(weights.dtype), d_v.astype(v.dtype)


_weigh.defvjp(lambda low, weights, v: (_weigh(low, weights, v), (weights, v)), _weigh_backward)


def _compressed(q, k, v, visible, sizes):
    """The compressed branch for [B, C, H, G, K] queries that see windows [B, C, M].

    Keys [B, H, M, K] and values likewise. Returns out [B, H, C, G, V] and the windows' weights
    summed over the group, [B, H, C, M].
    """
    low = operand_dtype(q, k, v)
    batch, count, heads, shared, width = q.shape
    # Plain batched products: XLA's CPU backend takes several times longer with the axes apart.
    q = jnp.moveaxis(q, 1, 2).reshape(batch, heads, count * shared, width)
    logits = contract("bhrk,bhmk->bhrm", q, k, dtype=low) * sizes.scale
    hidden = jnp.repeat(jnp.where(visible, 0, EMPTY).astype(logits.dtype), shared, axis=1)
    logits = logits + hidden[:, None]
    # Where nothing is visible, the guard makes every weight 0.
    top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), EMPTY / 2)
    weights = jnp.exp(logits - lax.stop_gradient(top))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    share = 1 / jnp.where(total > 0, total, 1)
    out = _weigh(low, weights, v) * share
    weights = lax.stop_gradient(weights * share).reshape(*q.shape[:2], count, shared, -1)
    return out.reshape(*weights.shape[:4], -1), jnp.sum(weights, axis=3)


def _select(weights, base, index, visible, sizes):
    """Blocks selected besides the local ones.

    Args:
      weights: [B, H, C, M] of the windows.
      base: [B, N] place of the window that starts with each block, `index` [B, N] its number.
      visible: [B, C, N].
      sizes: the options.

    Returns:
      [B, H, C, min(chosen, N)] int32, N for none.
    """
    number = base.shape[1]
    overlaps = sizes.overlaps()
    before = sizes.compression_block // sizes.stride - 1
    after = len(overlaps) - 1 - before
    padded = jnp.pad(weights, ((0, 0), (0, 0), (0, 0), (before, after)))
    count = weights.shape[-1]
    summed = sum(c * padded[..., i : i + count] for i, c in enumerate(overlaps))
    base = jnp.clip(base, 0, count - 1)
    importance = jax.vmap(lambda row, at: row[..., at])(summed, base)
    importance = jnp.where((index < sizes.initial_blocks)[:, None, None], jnp.inf, importance)
    importance = lax.stop_gradient(importance)
    return selection.best(importance, visible[:, None], min(sizes.chosen, number))


def _selected(q, k, v, line, blocks, chosen, reach, sizes, dense):
    """The selected branch, [B, H, T, G, V]: chosen blocks, and the `reach` tokens before each."""
    size = sizes.block_size
    if dense:
        chosen = chosen[:, :, :, None]
        return selection.dense(q, k, v, line, blocks.member, chosen, reach, size, sizes.scale)
    width = min(size * sizes.local_blocks, k.shape[2])
    parts = [banded(q, k, v, reach, width, sizes.scale)]
    if chosen.shape[-1] and k.shape[2] >= size:
        parts.append(routed(q, k, v, blocks.start, chosen, size=size, scale=sizes.scale))
    return merge(*parts)[0]


def decode(q, k, v, state, after, segment_ids, mlps, sizes: Sizes):
    """`attend` for one token a row, at the cost of what the token sees and of its windows."""
    batch, _, heads, width = q.shape
    kv_heads = k.selected.shape[2]
    raw = None if state is None else state.raw
    at = place(None if state is None else state.selected, segment_ids, batch, 1)
    position, real = at.position[:, 0], at.real[:, 0]
    size, stride = sizes.compression_block, sizes.stride
    cache = KVCache(
        *(selection.resize(x, _slots(after, sizes)) for x in after.compressed[:2]), None
    )
    if raw is not None:
        line = _line(raw, segment_ids, batch, 1)
        last = _join(line, raw, k.compressed, v.compressed)
        start = position + 1 - size
        complete = real & (start >= 0) & (jnp.mod(start, stride) == 0)

        def press(cache):
            strides = (x.reshape(batch, size // stride, stride, *x.shape[2:]) for x in last)
            new = (compress(x, size // stride, mlp) for x, mlp in zip(strides, mlps, strict=True))
            return tuple(
                selection.write(old, start // stride, x[:, 0], complete)
                for old, x in zip(cache, new, strict=True)
            )

        pressed = lax.cond(jnp.any(complete), press, lambda cache: cache, tuple(cache[:2]))
        cache = KVCache(*pressed, None)
    length = after.selected.length
    cache = cache._replace(length=windows_within(length, size, stride))
    q = q.reshape(batch, 1, kv_heads, heads // kv_heads, width)
    number = jnp.arange(cache.key.shape[1], dtype=jnp.int32)
    visible = (number < cache.length[:, None])[:, None]
    pressed = (jnp.moveaxis(x, 1, 2) for x in cache[:2])
    first, importance = _compressed(q, *pressed, visible, sizes)

    slots = after.selected.key.shape[1]
    number = jnp.arange(max(1, slots // sizes.block_size), dtype=jnp.int32)[None]
    number = jnp.broadcast_to(number, (batch, number.size))
    local = position // sizes.block_size - sizes.local_blocks + 1
    visible = (number < local[:, None])[:, None]
    base = number * (sizes.block_size // stride)
    chosen = _select(importance, base, number, visible, sizes)
    starts = jnp.where(chosen < number.shape[1], chosen * sizes.block_size, slots)
    own = local[:, None] + jnp.arange(sizes.local_blocks, dtype=jnp.int32)
    own = jnp.where(own >= 0, own * sizes.block_size, slots)[:, None, None]
    starts = jnp.concatenate([jnp.broadcast_to(own, (*starts.shape[:3], own.shape[3])), starts], -1)
    q = q.reshape(batch, kv_heads, 1, heads // kv_heads, width)
    second = selection.gathered(q, after.selected, starts, position, sizes.block_size, sizes.scale)

    held = slot_positions(after.window.length, after.window.key.shape[1])
    visible = (held >= 0) & (held > (position - sizes.window)[:, None])
    keys, values = (jnp.moveaxis(x, 1, 2) for x in after.window[:2])
    low = operand_dtype(q, keys, values)
    logits = contract("bhgk,bhsk->bhgs", q[:, :, 0], keys, dtype=low) * sizes.scale
    third = softmax_part(logits, visible[:, None, None], values, low)[0]
    outs = (x.reshape(batch, 1, heads, -1) for x in (first, second, third))
    return tuple(outs), cache
