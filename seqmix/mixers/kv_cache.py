# SPDX-License-Identifier: Apache-2.0
"""The state of softmax attention: the keys and values of the current document."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from seqmix.mixers._segments import runs, segment_positions
from seqmix.typing import SegmentIds


class KVCache(NamedTuple):
    """Keys and values by slot; the token at position p of its document is in slot p mod S.

    With a window S need not exceed it: the ring then forgets what no later token can see. Where
    every token sees a prefix of its document too, the first slots hold that and the ring is the
    rest of them.

    Attributes:
      key: [B, S, Hkv, K].
      value: [B, S, Hkv, V].
      length: [B] int32, tokens of the current document seen so far (not capped at S).
    """

    key: Float[Array, "B S Hkv K"]
    value: Float[Array, "B S Hkv V"]
    length: Int[Array, " B"]


def init_kv_cache(
    batch: int,
    capacity: int,
    heads: int,
    key_width: int,
    value_width: int,
    dtype,
    window: int | None = None,
    prefix: int = 0,
) -> KVCache:
    """An empty cache of `capacity` slots; where a window is given, at most window + prefix.

    Raises:
      ValueError: if a size is < 1.
    """
    for name, size in (
        ("batch", batch),
        ("capacity", capacity),
        ("heads", heads),
        ("window", window),
    ):
        if size is not None and size < 1:
            raise ValueError(f"init_kv_cache: {name} must be >= 1, got {size}")
    slots = capacity if window is None else min(capacity, window + prefix)
    return KVCache(
        jnp.zeros((batch, slots, heads, key_width), dtype),
        jnp.zeros((batch, slots, heads, value_width), dtype),
        jnp.zeros((batch,), jnp.int32),
    )


def slot_positions(length: jax.Array, slots: int, prefix: int = 0) -> jax.Array:
    """[B] tokens seen -> [B, slots] position held by each slot, negative where it is empty."""
    if prefix == 0:
        newest = length[:, None] - 1
        return newest - jnp.mod(newest - jnp.arange(slots, dtype=jnp.int32)[None], slots)
    prefix = min(prefix, slots)
    first = jnp.arange(prefix, dtype=jnp.int32)[None]
    first = jnp.where(first < length[:, None], first, -1)
    if prefix == slots:
        return first
    ring = slot_positions(length - prefix, slots - prefix)
    return jnp.concatenate([first, jnp.where(ring >= 0, ring + prefix, -1)], axis=1)


def _slots_of(position: jax.Array, slots: int, prefix: int) -> jax.Array:
    """The slot of each position; `slots` where no slot can hold it."""
    prefix = min(prefix, slots)
    ring = slots - prefix
    later = prefix + jnp.mod(position - prefix, ring) if ring else slots
    return jnp.where(position < prefix, position, later)


class Placement(NamedTuple):
    """Where new tokens stand relative to a cache.

    Attributes:
      run: [B, T] document number in the row; 0 continues the cache.
      position: [B, T] position in the token's document.
      real: [B, T] bool, False at padding.
    """

    run: jax.Array
    position: jax.Array
    real: jax.Array


def place(cache: KVCache | None, segment_ids: SegmentIds | None, batch: int, time: int):
    """The `Placement` of [B, T] new tokens after `cache`."""
    if segment_ids is None:
        segment_ids = jnp.ones((batch, time), jnp.int32)
    length = None if cache is None else cache.length
    return Placement(runs(segment_ids), segment_positions(segment_ids, length), segment_ids != 0)


def outgrown(
    before: KVCache | None,
    after: KVCache,
    at: Placement,
    window: int | None = None,
    prefix: int = 0,
) -> jax.Array:
    """[B, T] tokens whose outputs a cache that is too small makes wrong, in this call or later.

    A row whose last document has outgrown the cache after it, all of it; and what continues a
    document that had outgrown the cache before it, though another may follow in the row.

    Args:
      before: the cache before the tokens.
      after: the cache after them.
      at: their placement.
      window: keys that a token sees; a cache of as many slots cannot be outgrown. None: all.
      prefix: first tokens of a document that it sees besides; they need slots of their own.
    """

    def full(cache):
        slots = cache.key.shape[1]
        return (cache.length > slots)[:, None] & (window is None or slots < window + prefix)

    lost = jnp.broadcast_to(full(after), at.run.shape)
    return lost if before is None else lost | (full(before) & (at.run == 0))


def append(
    cache: KVCache | None,
    key: jax.Array,
    value: jax.Array,
    at: Placement,
    slots: int,
    prefix: int = 0,
) -> KVCache:
    """The cache of `slots` slots after the new tokens; it holds the last document of each row.

    Args:
      cache: the cache before, None for an empty one.
      key: [B, T, Hkv, K].
      value: [B, T, Hkv, V].
      at: the tokens' placement.
      slots: S of the result; the newest S tokens are kept.
      prefix: tokens at the start of a document that are kept, of those S.
    """
    batch = at.run.shape[0]
    last = at.run[:, -1:]
    current = at.real & (at.run == last)
    kept = jnp.zeros((batch,), jnp.int32)
    if cache is not None:
        kept = jnp.where(last[:, 0] == 0, cache.length, 0)
    length = kept + jnp.sum(current, axis=1, dtype=jnp.int32)
    newest = at.position >= length[:, None] - max(slots - prefix, 0)
    survives = current & (newest | (at.position < prefix))
    slot = jnp.where(survives, _slots_of(at.position, slots, prefix), slots)
    rows = jnp.arange(batch)[:, None]

    def write(old, new):
        if old is None:
            old = jnp.zeros((batch, slots, *new.shape[2:]), new.dtype)
        elif old.shape[1] != slots:
            held = jnp.maximum(slot_positions(kept, slots, prefix), 0)
            source = jnp.minimum(_slots_of(held, old.shape[1], prefix), old.shape[1] - 1)
            old = jnp.take_along_axis(old, source[:, :, None, None], axis=1)
        return old.at[rows, slot].set(new.astype(old.dtype), mode="drop")

    return KVCache(
        write(None if cache is None else cache.key, key),
        write(None if cache is None else cache.value, value),
        length,
    )
