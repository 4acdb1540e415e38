# SPDX-License-Identifier: Apache-2.0
"""Attention over the tokens that a lightning indexer picks (DeepSeek Sparse Attention).

The indexer scores every earlier token of the document, tile by tile, and the softmax reads the
`top_k` best alone. What trains the indexer is the divergence of its softmax from the attention's
own weights; nothing else reaches it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers import _indexer as indexer
from seqmix.mixers._dispatch import choose
from seqmix.mixers._numerics import contract, operand_dtype
from seqmix.mixers._segments import mask_padding
from seqmix.mixers.attention import attention
from seqmix.mixers.kv_cache import (
    KVCache,
    append,
    init_kv_cache,
    outgrown,
    place,
    slot_positions,
)
from seqmix.typing import Keys, Queries, SegmentIds, Values

IMPLEMENTATIONS = ("dense", "sparse")
STAGES = ("warmup", "sparse")
DEFAULT_CHUNK = 64


class DSACache(NamedTuple):
    """State of `dsa_attention`.

    Attributes:
      kv: keys and values of the current document; no values (None) where they are part of the
        keys.
      index_key: [B, S, C] keys of the indexer, by slot as those of `kv`.
    """

    kv: KVCache
    index_key: Float[Array, "B S C"]


def init_dsa_cache(
    batch: int,
    capacity: int,
    heads: int,
    key_width: int,
    value_width: int | None,
    index_width: int,
    dtype,
) -> DSACache:
    """An empty cache of `capacity` slots; `value_width` None where values are part of the keys.

    Raises:
      ValueError: if a size is < 1.
    """
    kv = init_kv_cache(batch, capacity, heads, key_width, value_width or 0, dtype)
    if value_width is None:
        kv = kv._replace(value=None)
    return DSACache(kv, jnp.zeros((batch, capacity, index_width), dtype))


def dsa_attention(
    q: Queries,
    k: Keys,
    v: Values | None,
    index_q: Float[Array, "B T J C"],
    index_k: Float[Array, "B T C"],
    index_weights: Float[Array, "B T J"],
    *,
    top_k: int = 2048,
    stage: str = "sparse",
    value_width: int | None = None,
    index_loss: bool = False,
    scale: float | None = None,
    initial_state: DSACache | None = None,
    segment_ids: SegmentIds | None = None,
    capacity: int | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
):
    """o_t = softmax_s(scale q_t k_s) v_s over the `top_k` tokens s of largest index score I_ts.

    I_ts = sum_j index_weights_tj relu(index_q_tj . index_k_s), over the tokens of t's document up
    to t itself. Of equal scores the earlier token is taken; where t sees fewer than `top_k`
    tokens, it attends to all of them. Sources: DeepSeek-V3.2 (arXiv 2512.02556) and the
    inference code of DeepSeek-V3.2-Exp.

    The loss of token t is KL(p_t || softmax_s(I_ts)): p_t is the attention's weights summed over
    heads and normalised, a constant. In the stage 'warmup' attention and loss are over all that t
    sees, in 'sparse' over its selection. Gradients of `out` reach q, k and v, those of the loss
    index_q, index_k and index_weights; none passes through the selection.

    Args:
      q: [B, T, Hq, K] float.
      k: [B, T, Hkv, K] float; Hq a multiple of Hkv, key head j serves consecutive query heads.
      v: [B, T, Hkv, V] float. None: the first `value_width` channels of k are the values (latent
        attention in its absorbed form).
      index_q: [B, T, J, C] float, queries of the indexer's J heads.
      index_k: [B, T, C] float, keys that its heads share.
      index_weights: [B, T, J] float32, its heads' weights, with whatever factor the scores have.
      top_k: tokens that a token attends to.
      stage: 'warmup' or 'sparse'.
      value_width: V where v is None, else None.
      index_loss: return the loss as a third result.
      scale: None for K**-0.5.
      initial_state: keys, values and index keys of each row's first document so far.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      capacity: slots of the returned cache; None: as many as needed. Where a document outgrows it,
        the row's outputs are NaN.
      chunk_size: queries per step, None for 64. Changes speed and rounding only. Temporary memory
        follows chunk_size * T * J and T * top_k.
      impl: 'dense' (the definition: all pairs, masked), 'sparse' or 'auto'.

    Returns:
      out: [B, T, Hq, V] in the dtype of v (of k without v); 0 at padding.
      cache: of each row's last document.
      loss: with `index_loss`, [B, T] float32, 0 at padding.

    Raises:
      ValueError: for shapes, dtypes or options off the above, or an impl that cannot run.
    """
    name = "dsa_attention"
    check.state_type(name, initial_state, DSACache)
    width = _check_arguments(name, q, k, v, value_width, initial_state)
    indexer.check_arguments(name, q, index_q, index_k, index_weights)
    batch, time = q.shape[:2]
    check.positive(name, "top_k", top_k, optional=False)
    for option, value in (("chunk_size", chunk_size), ("capacity", capacity)):
        check.positive(name, option, value)
    if stage not in STAGES:
        raise ValueError(f"{name}: stage must be one of {list(STAGES)}, got {stage!r}")
    check.segments(name, segment_ids, batch, time)
    _check_state(name, initial_state, k, v, index_k)
    impl = choose(name, impl, IMPLEMENTATIONS, time=time, default="sparse")
    scale = float(k.shape[-1] ** -0.5 if scale is None else scale)
    dtype = k.dtype if v is None else v.dtype

    if v is not None:
        (v,) = mask_padding(segment_ids, v)
    q, k, *index = mask_padding(segment_ids, q, k, index_q, index_k, index_weights)
    cache = None if initial_state is None else initial_state.kv
    at = place(cache, segment_ids, batch, time)
    held = 0 if cache is None else cache.key.shape[1]
    slots = time + held if capacity is None else capacity
    state = _append(initial_state, k, v, index[1], at, slots)

    keys = _join(initial_state, k, v, index[1], at)
    chunk = time if impl == "dense" else min(time, chunk_size or DEFAULT_CHUNK)
    # As many keys as that are all selected.
    everything = stage == "warmup" or time + held <= top_k
    options = _Options(everything, top_k, width, scale, index_loss)
    queries = (q, index[0], index[2], at.run, at.position)
    if impl == "dense":
        out, loss = _dense_chunk(queries, keys, options=options)
    elif everything:
        step = functools.partial(_all_losses, options=options)
        loss = _chunked(step, queries, keys, chunk) if index_loss else None
        out = _attend_all(q, k, v, cache, segment_ids, scale, width)
    else:
        queries = (*queries, *_select(queries, keys, top_k, chunk))
        step = functools.partial(_sparse_chunk, options=options)
        out, loss = _chunked(step, queries, keys, chunk)
    lost = outgrown(cache, state.kv, at)
    out = jnp.where(lost[..., None, None], jnp.nan, out)
    (out,) = mask_padding(segment_ids, out.astype(dtype))
    if not index_loss:
        return out, state
    return out, state, mask_padding(segment_ids, jnp.where(lost, jnp.nan, loss))[0]


def _check_arguments(name, q, k, v, value_width, cache):
    """Raises ValueError for main arguments that do not go together; returns V."""
    heads = check.heads(name, q, k, k if v is None else v)
    if heads.values != 1:
        raise ValueError(
            f"{name}: k and v must have equally many heads, got k {k.shape[2]}, v {v.shape[2]}"
        )
    if v is not None:
        if value_width is not None:
            raise ValueError(f"{name}: value_width needs v=None, got {value_width!r} and v")
        return v.shape[-1]
    if value_width is None:
        raise ValueError(f"{name}: v=None needs value_width")
    check.positive(name, "value_width", value_width)
    if value_width > k.shape[-1]:
        raise ValueError(
            f"{name}: value_width must be at most k's width, {k.shape[-1]}, got {value_width}"
        )
    return value_width


def _check_state(name, state, k, v, index_k):
    if state is None:
        return
    batch, slots = state.kv.key.shape[:2]
    parts = [
        ("kv.key", state.kv.key, k.shape[2:], "B S Hkv K"),
        ("index_key", state.index_key, index_k.shape[2:], "B S C"),
    ]
    if (v is None) != (state.kv.value is None):
        came = "none" if state.kv.value is None else "values"
        raise ValueError(
            f"{name}: initial_state.kv.value must be there exactly if v is, got {came}"
        )
    if v is not None:
        parts.append(("kv.value", state.kv.value, v.shape[2:], "B S Hkv V"))
    for label, x, expected, axes in parts:
        shape = (k.shape[0], slots, *expected)
        check.shape(name, f"initial_state.{label}", x, shape, axes)
    if state.kv.length.shape != (batch,):
        raise ValueError(
            f"{name}: initial_state.kv.length must have shape [B] = [{batch}], "
            f"got {list(state.kv.length.shape)}"
        )


class _Options(NamedTuple):
    everything: bool
    top_k: int
    width: int
    scale: float
    loss: bool


class _Keys(NamedTuple):
    """What the queries may read: the cache's slots, then the new tokens."""

    k: jax.Array
    v: jax.Array | None
    index: jax.Array
    run: jax.Array
    position: jax.Array
    real: jax.Array


def _append(state, k, v, index_k, at, slots):
    """Keys, values and index keys of one length, each written as the keys of a cache."""

    def grow(new, old):
        before = None if state is None else KVCache(old, old[..., :0], state.kv.length)
        return append(before, new, new[..., :0], at, slots)

    key, value, index = None, None, None
    if state is not None:
        key, value, index = state.kv.key, state.kv.value, state.index_key[:, :, None]
    kv = grow(k, key)._replace(value=None if v is None else grow(v, value).key)
    return DSACache(kv, grow(index_k[:, :, None], index).key[:, :, 0])


def _join(state, k, v, index_k, at):
    """By position, so that of equal scores the same token comes first however a row is cut."""
    new = _Keys(k, v, index_k, at.run, at.position, at.real)
    if state is None:
        return new
    held = slot_positions(state.kv.length, state.kv.key.shape[1])
    old = (state.kv.key, state.kv.value, state.index_key, jnp.zeros_like(held), held, held >= 0)
    return jax.tree.map(
        lambda x, y: jnp.concatenate([x.astype(y.dtype), y], axis=1), _Keys(*old), new
    )


def _visible(run, position, keys):
    """[B, Q, S] which keys a query sees."""
    same = run[:, :, None] == keys.run[:, None]
    return keys.real[:, None] & same & (position[:, :, None] >= keys.position[:, None])


def _chunked(step, queries, keys, chunk):
    """`step(queries, keys)` on `chunk` queries at a time, recomputed in the backward."""
    batch, time = queries[0].shape[:2]
    step = jax.checkpoint(step)
    if chunk == time:
        return step(queries, keys)
    count = -(-time // chunk)

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, count * chunk - time)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, count, chunk, *x.shape[2:]), 1, 0)

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(batch, count * chunk, *x.shape[3:])[:, :time]

    out = lax.map(lambda queries: step(queries, keys), jax.tree.map(split, queries))
    return jax.tree.map(join, out)


def _attend_all(q, k, v, cache, segment_ids, scale, width):
    if v is None:
        v = k[..., :width]
        cache = None if cache is None else KVCache(cache.key, cache.key[..., :width], cache.length)
    out, _ = attention(q, k, v, scale=scale, initial_state=cache, segment_ids=segment_ids)
    return out


def _select(queries, keys, top_k, chunk):
    """[B, T, top_k] index of the selected keys, and which of them the query sees."""

    def step(queries, keys):
        _, index_q, weights, run, position = queries
        visible = _visible(run, position, keys)
        return indexer.select(indexer.scores(index_q, keys.index, weights), visible, top_k)

    # Kept for the backward: T * top_k integers instead of all scores a second time.
    return _chunked(step, lax.stop_gradient(queries), lax.stop_gradient(keys), chunk)


def _attention_weights(q, k, visible, scale):
    """[B, Q, G, R, N] softmax over visible [B, Q, N] keys, shared [B, N, G, K] or a query's own."""
    own = "q" if k.ndim == 5 else ""
    low = operand_dtype(q, k)
    logits = contract(f"bqgrk,b{own}ngk->bqgrn", q, k, dtype=low) * scale
    return indexer.masked_softmax(logits, visible[:, :, None, None])


def _grouped(q, k):
    batch, time, heads, width = q.shape
    return q.reshape(batch, time, k.shape[-2], heads // k.shape[-2], width)


def _dense_chunk(queries, keys, *, options):
    """The definition: every pair, masked."""
    q, index_q, weights, run, position = queries
    visible = _visible(run, position, keys)
    scores = indexer.scores(index_q, keys.index, weights)
    if not options.everything:
        visible = visible & indexer.ranked_first(scores, visible, options.top_k)
    p = _attention_weights(_grouped(q, keys.k), keys.k, visible, options.scale)
    v = keys.k[..., : options.width] if keys.v is None else keys.v
    out = contract("bqgrn,bngv->bqgrv", p, v, dtype=operand_dtype(q, v))
    out = out.reshape(*q.shape[:3], options.width)
    return out, indexer.divergence(p, scores, visible) if options.loss else None


def _all_losses(queries, keys, *, options):
    """[B, Q] losses against attention over all that each query sees."""
    q, index_q, weights, run, position = queries
    visible = _visible(run, position, keys)
    q, k = lax.stop_gradient((_grouped(q, keys.k), keys.k))
    p = _attention_weights(q, k, visible, options.scale)
    return indexer.divergence(p, indexer.scores(index_q, keys.index, weights), visible)


def _sparse_chunk(queries, keys, *, options):
    """Attention over the selection alone, and its losses."""
    q, index_q, weights, _, _, index, valid = queries

    def gather(x):
        return jax.vmap(lambda x, i: x.at[i].get(mode="promise_in_bounds"))(x, index)

    k = gather(keys.k)
    v = k[..., : options.width] if keys.v is None else gather(keys.v)
    p = _attention_weights(_grouped(q, k), k, valid, options.scale)
    out = contract("bqgrn,bqngv->bqgrv", p, v, dtype=operand_dtype(q, v))
    out = out.reshape(*q.shape[:3], options.width)
    if not options.loss:
        return out, None
    scores = indexer.scores(index_q, gather(keys.index), weights)
    return out, indexer.divergence(p, scores, valid)
