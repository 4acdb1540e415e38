# SPDX-License-Identifier: Apache-2.0
"""Softmax attention with a decay mask: 2Mamba-E, the Forgetting Transformer."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers._dispatch import choose
from seqmix.mixers._numerics import (
    clean_log_decay,
    contract,
    operand_dtype,
    range_sums,
    state_dtype,
)
from seqmix.mixers._segments import mask_padding
from seqmix.mixers.kv_cache import (
    KVCache,
    append,
    init_kv_cache,
    outgrown,
    place,
    slot_positions,
)
from seqmix.typing import Keys, Queries, SegmentIds, Values

IMPLEMENTATIONS = ("dense", "chunked")
DEFAULT_CHUNK = 256


class ForgettingCache(NamedTuple):
    """State of `forgetting_attention`.

    Attributes:
      kv: keys and values of the current document.
      log_decay: [B, S, Hq] float32, sum of the log-decays since the token of each slot.
    """

    kv: KVCache
    log_decay: Float[Array, "B S Hq"]


def init_forgetting_cache(
    batch: int,
    capacity: int,
    heads: int,
    kv_heads: int,
    key_width: int,
    value_width: int,
    dtype,
) -> ForgettingCache:
    """An empty cache of `capacity` slots for `heads` query heads.

    Raises:
      ValueError: if a size is < 1.
    """
    kv = init_kv_cache(batch, capacity, kv_heads, key_width, value_width, dtype)
    return ForgettingCache(kv, jnp.zeros((batch, capacity, heads), jnp.float32))


def forgetting_attention(
    q: Queries,
    k: Keys,
    v: Values,
    log_decay: Float[Array, "B T Hq"],
    *,
    scale: float | None = None,
    initial_state: ForgettingCache | None = None,
    segment_ids: SegmentIds | None = None,
    capacity: int | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[Float[Array, "B T Hq V"], ForgettingCache]:
    """o_t = sum_s w_ts v_s / sum_s w_ts;  w_ts = exp(scale q_t . k_s + sum of log-decays after s).

    Sources: 2Mamba-E (arXiv 2602.17363); Forgetting Transformer (Lin et al. 2025,
    arXiv 2503.02130).

    Args:
      q: [B, T, Hq, K] float.
      k: [B, T, Hkv, K] float; Hq a multiple of Hkv, key head j serves consecutive query heads.
      v: [B, T, Hkv, V] float.
      log_decay: [B, T, Hq] float32, natural log, <= 0.
      scale: static factor on q . k, None for K**-0.5.
      initial_state: keys, values and decays of each row's first document so far.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      capacity: slots of the returned cache; None: as many as needed. Where a document outgrows it,
        the row's outputs are NaN.
      chunk_size: queries per step of 'chunked', None for 256. Changes speed and rounding only.
      impl: 'dense' (the definition), 'chunked' or 'auto'.

    Returns:
      out: [B, T, Hq, V] in the dtype of v; 0 at padding.
      cache: of each row's last document.

    Raises:
      ValueError: for shapes, dtypes or options off the above, or an impl that cannot run.
    """
    name = "forgetting_attention"
    heads = check.heads(name, q, k, v)
    if heads.values != 1:
        raise ValueError(
            f"{name}: k and v must have equally many heads, got k {k.shape[2]}, v {v.shape[2]}"
        )
    batch, time, count, _ = q.shape
    check.shape(name, "log_decay", log_decay, (batch, time, count), "B T Hq")
    check.float32(name, "log_decay", log_decay)
    check.segments(name, segment_ids, batch, time)
    check.positive(name, "chunk_size", chunk_size)
    check.positive(name, "capacity", capacity)
    if initial_state is not None:
        _check_cache(name, initial_state, k, v, count)
    impl = choose(name, impl, IMPLEMENTATIONS, time=time)
    held = 0 if initial_state is None else initial_state.kv.key.shape[1]
    slots = time + held if capacity is None else capacity
    scale = k.shape[-1] ** -0.5 if scale is None else scale

    q, k, v, log_decay = mask_padding(segment_ids, q, k, v, clean_log_decay(log_decay))
    log_decay = log_decay.astype(state_dtype(q, k, v, log_decay))
    at = place(None if initial_state is None else initial_state.kv, segment_ids, batch, time)
    cache = _append(initial_state, k, v, log_decay, at, slots)
    chunk = time if impl == "dense" else min(time, chunk_size or DEFAULT_CHUNK)
    out = _attend(q, k, v, log_decay, initial_state, at, float(scale), chunk)
    lost = outgrown(None if initial_state is None else initial_state.kv, cache.kv, at)
    out = jnp.where(lost[..., None, None], jnp.nan, out)
    return mask_padding(segment_ids, out.astype(v.dtype))[0], cache


def _check_cache(name, cache, k, v, heads):
    check.state_type(name, cache, ForgettingCache)
    batch, slots = cache.kv.key.shape[:2]
    for label, x, new in (("key", cache.kv.key, k), ("value", cache.kv.value, v)):
        expected = (new.shape[0], slots, *new.shape[2:])
        check.shape(name, f"initial_state.kv.{label}", x, expected, "B S Hkv K")
    expected = (k.shape[0], slots, heads)
    check.shape(name, "initial_state.log_decay", cache.log_decay, expected, "B S Hq")
    if cache.kv.length.shape != (batch,):
        raise ValueError(
            f"{name}: initial_state.kv.length must have shape [B] = [{batch}], "
            f"got {list(cache.kv.length.shape)}"
        )


def _append(cache, k, v, log_decay, at, slots):
    """The cache after the new tokens."""
    since = _sums_after(log_decay)
    before = None
    if cache is not None:
        whole = jnp.sum(jnp.where((at.run == 0)[..., None], log_decay, 0), axis=1, keepdims=True)
        grown = (cache.log_decay + whole)[..., None]
        before = KVCache(grown, grown, cache.kv.length)
    kv = append(None if cache is None else cache.kv, k, v, at, slots)
    decays = append(before, since[..., None], since[..., None], at, slots)
    return ForgettingCache(kv, decays.key[..., 0].astype(jnp.promote_types("float32", since.dtype)))


def _sums_after(x):
    """[B, T, H]: sum of x over the tokens after each."""
    return lax.cumsum(jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0))), axis=1, reverse=True)


def _attend(q, k, v, log_decay, cache, at, scale, chunk):
    """Attention over cache and new tokens, `chunk` queries at a time."""
    batch, time, heads, _ = q.shape
    count = -(-time // chunk)
    pad = count * chunk - time

    def padded(x):
        return jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))

    # Padded keys are not real, so no query sees them.
    keys = jax.tree.map(padded, (k, v, log_decay, at))
    held = None
    if cache is not None:
        position = slot_positions(cache.kv.length, cache.kv.key.shape[1])
        held = (cache.kv.key, cache.kv.value, cache.log_decay, position)
    # Recomputed in the backward, so that no [T, S] array outlives its chunk.
    step = jax.checkpoint(functools.partial(_attend_chunk, scale=scale))

    def split(x):
        return jnp.moveaxis(padded(x).reshape(batch, count, chunk, *x.shape[2:]), 1, 0)

    queries = (jnp.arange(count) * chunk, *map(split, (q, log_decay, at.run)))
    out = lax.map(lambda queries: step(queries, keys, held), queries)
    out = jnp.moveaxis(out, 0, 1).reshape(batch, count * chunk, heads, v.shape[-1])
    return out[:, :time]


def _attend_chunk(queries, keys, held, *, scale):
    """[B, C, Hq, V] outputs of the queries from `start` on."""
    start, q, own, run = queries
    k, v, log_decay, at = keys
    batch, chunk, heads, _ = q.shape
    index = jnp.arange(k.shape[1])
    now = start + jnp.arange(chunk)
    visible = at.real[:, None] & (run[:, :, None] == at.run[:, None])
    visible = visible & (index <= now[:, None])

    # Every range is summed on its own: up to the chunk, from there on, and inside the chunk.
    past = jnp.where((index < start)[:, None], log_decay, 0)
    inside = jnp.moveaxis(jnp.cumsum(own, axis=1), 1, 2)[..., None]
    bias = jnp.moveaxis(_sums_after(past), 1, 2)[:, :, None] + inside
    within = range_sums(jnp.moveaxis(own, 1, 2))
    bias = lax.dynamic_update_slice_in_dim(bias, within.astype(bias.dtype), start, axis=3)
    if held is not None:
        key, value, decay, position = held
        k = jnp.concatenate([key.astype(k.dtype), k], axis=1)
        v = jnp.concatenate([value.astype(v.dtype), v], axis=1)
        seen = (position >= 0)[:, None] & (run == 0)[:, :, None]
        visible = jnp.concatenate([seen, visible], axis=2)
        decay = jnp.moveaxis(decay + jnp.sum(past, axis=1, keepdims=True), 1, 2)[:, :, None]
        bias = jnp.concatenate([decay + inside, bias], axis=3)

    low = operand_dtype(q, k, v)
    groups = k.shape[2]
    grouped = q.reshape(batch, chunk, groups, heads // groups, -1)
    logits = contract("bqhgk,bshk->bhgqs", grouped, k, dtype=low) * scale
    logits = logits + bias.reshape(batch, groups, heads // groups, chunk, -1)
    visible = visible[:, None, None]
    logits = jnp.where(visible, logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True)
    top = lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, logits - top, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1)
    out = contract("bhgqs,bshv->bqhgv", weights, v, dtype=low)
    return out.reshape(batch, chunk, heads, -1)
