# SPDX-License-Identifier: Apache-2.0
"""What attention over chosen blocks shares: the choice, its dense form and its decode step."""

import jax
import jax.numpy as jnp
from jax import lax

from seqmix.mixers import _checks as check
from seqmix.mixers._banded import softmax_part
from seqmix.mixers._document_blocks import Blocks, Line
from seqmix.mixers._numerics import contract, operand_dtype
from seqmix.mixers.kv_cache import KVCache


def check_heads(name: str, q, k, v, *, key: str = "k", value: str = "v") -> None:
    """Raises ValueError unless q, k and v are those of grouped queries."""
    heads = check.heads(name, q, k, v, key=key)
    if heads.values != 1:
        raise ValueError(
            f"{name}: {key} and {value} must have equally many heads, "
            f"got {key} {k.shape[2]}, {value} {v.shape[2]}"
        )


def check_cache(name: str, label: str, cache: KVCache, k, v) -> None:
    """Raises ValueError unless `cache` holds keys and values like k and v."""
    batch, slots = cache.key.shape[:2]
    for part, x, new in (("key", cache.key, k), ("value", cache.value, v)):
        expected = (new.shape[0], slots, *new.shape[2:])
        check.shape(name, f"{label}.{part}", x, expected, "B S Hkv K")
    if cache.length.shape != (batch,):
        raise ValueError(
            f"{name}: {label}.length must have shape [B] = [{batch}], "
            f"got {list(cache.length.shape)}"
        )


def earlier(blocks: Blocks, run, current):
    """[B, T, N]: the block belongs to the token's document and stands before block `current`."""
    same = run[:, :, None] == blocks.run[:, None]
    return same & (blocks.index[:, None] < current[:, :, None])


def best(scores, visible, count: int):
    """[..., N] -> [..., count] int32 numbers of the highest visible scores, N where none is left.

    Equal scores go to the lower number.
    """
    blocks = scores.shape[-1]
    number = jnp.arange(blocks, dtype=jnp.int32)

    def take(left, _):
        top = jnp.max(left, axis=-1, keepdims=True)
        first = jnp.min(jnp.where((left == top) & (top > -jnp.inf), number, blocks), axis=-1)
        return jnp.where(number == first[..., None], -jnp.inf, left), first

    # XLA gathers the rows of all devices for a `lax.top_k`; few maxima cost as little.
    left = jnp.where(visible, scores, -jnp.inf)
    return jnp.moveaxis(lax.scan(take, left, length=count)[1], 0, -1)


def by_chunks(function, arrays, size: int):
    """Maps chunks of `size` of [B, T, ...] arrays to [B, H, T, ...], one after the other."""
    batch, time = arrays[0].shape[:2]
    if time <= size:
        return function(arrays)
    count = -(-time // size)

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, count * size - time)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, count, size, *x.shape[2:]), 1, 0)

    def join(x):
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(*x.shape[:2], count * size, *x.shape[4:])[:, :, :time]

    return jax.tree.map(join, lax.map(function, jax.tree.map(split, arrays)))


def dense(q, k, v, line: Line, member, chosen, reach, size: int, scale: float):
    """The definition: one masked softmax over the whole line.

    Args:
      q: [B, H, T, G, K] by place; k [B, H, S + T, K] and v likewise.
      line: their line.
      member: [B, S + T] of its `Blocks`.
      chosen: [B, H, T, G or 1, s] blocks.
      reach: [B, T] earlier tokens that each sees in any case, -1: not even itself.
      size: tokens of a block.
      scale: of the logits.

    Returns:
      [B, H, T, G, V].
    """
    low = operand_dtype(q, k, v)
    time = q.shape[2]
    lag = line.held + jnp.arange(time)[:, None] - jnp.arange(line.held + time)
    visible = ((lag >= 0) & (lag <= reach[..., None]))[:, None, :, None]
    block = jnp.where(member >= 0, member // size, -1)[:, None, None, None]
    for i in range(chosen.shape[-1]):
        visible = visible | (chosen[..., i, None] == block)
    logits = contract("bhtgk,bhsk->bhtgs", q, k, dtype=low) * scale
    return softmax_part(logits, visible, v[:, :, None], low)[0]


def resize(x, count: int):
    """[B, n, ...] -> [B, count, ...]: cut, or followed by zeros."""
    x = x[:, :count]
    return jnp.pad(x, [(0, 0), (0, count - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def write(x, at, new, really):
    """[B, n, ...] with `new` [B, ...] at row `at` [B] where `really` [B]; outside n: nowhere."""
    at = jnp.where(really, at, x.shape[1])
    return x.at[jnp.arange(x.shape[0]), at].set(new.astype(x.dtype), mode="drop")


def window(x, start, last, size: int):
    """Slots start .. start + size - 1 of x [B, S, ...], and which of them are <= last [B]."""
    at = start[:, None] + jnp.arange(size, dtype=jnp.int32)
    seen = (at <= last[:, None]) & (at >= 0) & (at < x.shape[1])
    index = jnp.clip(at, 0, x.shape[1] - 1).reshape(at.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1), seen


def gathered(q, cache: KVCache, starts, position, size: int, scale: float):
    """The decode step's attention: over blocks of slots, each gathered for the queries it serves.

    Args:
      q: [B, H, R, G, K].
      cache: [B, S, H, ...], slot p for position p.
      starts: [B, H, R, s] first slots of the blocks of each row, S for none.
      position: [B], the last slot that is seen.
      size: slots of a block.
      scale: of the logits.

    Returns:
      [B, H, R, G, V].
    """
    low = operand_dtype(q, cache.key, cache.value)
    slots = cache.key.shape[1]
    at = starts[..., None] + jnp.arange(size, dtype=jnp.int32)
    at = at.reshape(*starts.shape[:3], -1)
    visible = (at < slots) & (at <= position[:, None, None, None])

    def take(x):
        row = lambda x, at: x[jnp.minimum(at, slots - 1)]  # noqa: E731
        return jax.vmap(jax.vmap(row, in_axes=(1, 0)))(x, at)

    logits = contract("bhrgk,bhrsk->bhrgs", q, take(cache.key), dtype=low) * scale
    return softmax_part(logits, visible[..., None, :], take(cache.value), low)[0]
