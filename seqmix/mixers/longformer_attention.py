# SPDX-License-Identifier: Apache-2.0
"""Longformer: a sliding window, and global tokens that see and are seen by all (arXiv 2004.05150).

Reference code: `transformers`, `models/longformer`.
"""

import operator

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from seqmix.mixers import _checks as check
from seqmix.mixers import _longformer as parts
from seqmix.mixers._dispatch import choose
from seqmix.mixers._longformer import LongformerCache, Options
from seqmix.mixers._segments import mask_padding
from seqmix.mixers.kv_cache import append, init_kv_cache, outgrown, place
from seqmix.typing import Keys, Queries, SegmentIds, Values

IMPLEMENTATIONS = ("dense", "sparse")
DEFAULT_CHUNK = 128


def init_longformer_cache(
    batch: int,
    capacity: int,
    heads: int,
    key_width: int,
    value_width: int,
    dtype,
    *,
    window: int,
    global_tokens: int,
    separate: bool = True,
) -> LongformerCache:
    """An empty cache: a ring of min(capacity, window) slots and `global_tokens` more.

    Args:
      batch, capacity, heads, key_width, value_width, dtype: as in `init_kv_cache`.
      window: keys of the window, the token itself included.
      global_tokens: leading tokens of a document that are global.
      separate: global rows have projections of their own.

    Raises:
      ValueError: if a size is < 1, or global_tokens < 0.
    """
    if global_tokens < 0:
        raise ValueError(f"init_longformer_cache: global_tokens must be >= 0, got {global_tokens}")
    ring = init_kv_cache(batch, capacity, heads, key_width, value_width, dtype, window)
    key = jnp.zeros((batch, global_tokens, heads, key_width), dtype)
    value = jnp.zeros((batch, global_tokens, heads, value_width), dtype)
    return LongformerCache(ring, key, value, *((key, value) if separate else (None, None)))


def longformer_attention(
    q: Queries,
    k: Keys,
    v: Values,
    q_global: Queries | None = None,
    k_global: Keys | None = None,
    v_global: Values | None = None,
    *,
    window: int,
    global_tokens: int = 1,
    global_mask: Bool[Array, "B T"] | None = None,
    causal: bool = True,
    scale: float | None = None,
    initial_state: LongformerCache | None = None,
    segment_ids: SegmentIds | None = None,
    capacity: int | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[Float[Array, "B T Hq V"], LongformerCache | None]:
    """o_t = softmax_s(scale q_t k_s) v_s over the window of t and the global tokens, each once.

    A global token's own row is instead softmax_s(scale q'_t k'_s) v'_s over its whole document,
    with q', k', v' the *_global arrays. Windows and global tokens are those of t's document.

    causal=False is the published form: the window is t - window/2 ... t + window/2, global tokens
    are the first `global_tokens` of each document or those that `global_mask` marks. The paper
    defines no causal form; ours, causal=True, has the last `window` tokens, t included, for a
    window, and the first `global_tokens` of the document for global tokens, which all later ones
    see and whose own rows see what is before them.

    Args:
      q: [B, T, Hq, K] float.
      k: [B, T, Hkv, K] float; Hq a multiple of Hkv, key head j serves consecutive query heads.
      v: [B, T, Hkv, V] float.
      q_global, k_global, v_global: of the shapes of q, k and v, for the rows of global tokens;
        None for q, k and v themselves.
      window: keys of the window; causal: itself included; else even, window/2 on either side.
      global_tokens: global tokens of a document, >= 0. With `global_mask` the most that a document
        has; where one has more, the row's outputs are NaN.
      global_mask: [B, T] bool; needs causal=False.
      causal: t sees itself and earlier tokens only.
      scale: None for K**-0.5.
      initial_state: of each row's first document so far; needs causal=True.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      capacity: slots of the returned ring, at most `window` are taken. None: as many as needed.
        Where a document outgrows a ring smaller than the window, the row's outputs are NaN.
      chunk_size: queries per step of 'sparse', None for 128. Changes speed and rounding only.
      impl: 'dense' (the definition), 'sparse' (time and memory by T * (window + global_tokens)) or
        'auto'.

    Returns:
      out: [B, T, Hq, V] in the dtype of v; 0 at padding.
      cache: of each row's last document, its size independent of T; None unless causal.

    Raises:
      ValueError: for shapes, dtypes or options off the above, or an impl that cannot run.
    """
    name = "longformer_attention"
    heads = check.heads(name, q, k, v)
    if heads.values != 1:
        raise ValueError(
            f"{name}: k and v must have equally many heads, got k {k.shape[2]}, v {v.shape[2]}"
        )
    batch, time = q.shape[:2]
    rows = _global_rows(name, (q, k, v), (q_global, k_global, v_global))
    check.segments(name, segment_ids, batch, time)
    check.positive(name, "chunk_size", chunk_size)
    check.positive(name, "capacity", capacity)
    _check_options(name, window, global_tokens, causal)
    _check_mask(name, global_mask, causal, global_tokens, (batch, time))
    if initial_state is not None:
        _check_cache(name, initial_state, k, v, rows, causal, global_tokens)
    impl = choose(name, impl, IMPLEMENTATIONS, time=time, default="sparse")
    scale = float(k.shape[-1] ** -0.5 if scale is None else scale)
    options = Options(window, global_tokens, causal, scale, min(time, chunk_size or DEFAULT_CHUNK))

    q, k, v = mask_padding(segment_ids, q, k, v)
    rows = None if rows is None else mask_padding(segment_ids, *rows)
    ring = None if initial_state is None else initial_state.ring
    at = place(ring, segment_ids, batch, time)
    marked = at.position < global_tokens if global_mask is None else global_mask
    marked = marked & at.real
    run = parts.dense if impl == "dense" else parts.sparse
    padded = segment_ids is not None
    out = run((q, k, v), rows, initial_state, at, marked, options, padded)
    cache, lost = None, None
    if causal:
        slots = _slots(time, window, ring, capacity)
        after = append(ring, k, v, at, slots)
        cache = parts.extend(initial_state, after, (k, v), rows, at, global_tokens)
        lost = outgrown(ring, after, at, window)
    elif global_mask is not None:
        lost = (parts.most_marked(at, marked) > global_tokens)[:, None]
    if lost is not None:
        out = jnp.where(lost[..., None, None], jnp.nan, out)
    return mask_padding(segment_ids, out.astype(v.dtype))[0], cache


def _global_rows(name, local, rows):
    """The *_global arrays, or None where there are none."""
    given = [x is not None for x in rows]
    if not any(given):
        return None
    if not all(given):
        raise ValueError(
            f"{name}: q_global, k_global and v_global must be given together, got "
            + ", ".join(
                f"{n} {'given' if g else 'None'}"
                for n, g in zip(("q_global", "k_global", "v_global"), given, strict=True)
            )
        )
    for label, x, like in zip("qkv", rows, local, strict=True):
        check.shape(
            name, f"{label}_global", x, like.shape, "B T H V" if label == "v" else "B T H K"
        )
    return rows


def _check_options(name, window, global_tokens, causal):
    check.positive(name, "window", window, optional=False)
    if not causal and window % 2:
        raise ValueError(
            f"{name}: window must be even with causal=False, half on either side, got {window}"
        )
    if isinstance(global_tokens, bool) or not isinstance(global_tokens, int) or global_tokens < 0:
        raise ValueError(f"{name}: global_tokens must be an integer >= 0, got {global_tokens!r}")


def _check_mask(name, mask, causal, global_tokens, shape):
    if mask is None:
        return
    if causal:
        raise ValueError(
            f"{name}: global_mask needs causal=False; causal=True takes the first global_tokens of "
            "each document"
        )
    if global_tokens == 0:
        raise ValueError(f"{name}: global_tokens must be >= 1 with global_mask, got 0")
    if getattr(mask, "shape", None) != shape or mask.dtype != jnp.bool_:
        came = f"{mask.dtype} {list(mask.shape)}" if hasattr(mask, "dtype") else type(mask).__name__
        raise ValueError(
            f"{name}: global_mask must be bool of shape [B, T] = {list(shape)}, got {came}"
        )


def _check_cache(name, cache, k, v, rows, causal, global_tokens):
    check.state_type(name, cache, LongformerCache)
    if not causal:
        raise ValueError(f"{name}: initial_state needs causal=True")
    batch, slots = k.shape[0], cache.ring.key.shape[1]
    sizes = [("ring.key", slots, k), ("ring.value", slots, v)]
    sizes += [("global_key", global_tokens, k), ("global_value", global_tokens, v)]
    if (rows is None) != (cache.row_key is None):
        raise ValueError(
            f"{name}: initial_state.row_key must be {'None' if rows is None else 'an array'} "
            f"{'without' if rows is None else 'with'} k_global, got {type(cache.row_key).__name__}"
        )
    if rows is not None:
        sizes += [("row_key", global_tokens, k), ("row_value", global_tokens, v)]
    for label, count, new in sizes:
        x = operator.attrgetter(label)(cache)
        expected = (batch, count, *new.shape[2:])
        check.shape(name, f"initial_state.{label}", x, expected, "B S Hkv K")
    if cache.ring.length.shape != (batch,):
        raise ValueError(
            f"{name}: initial_state.ring.length must have shape [B] = [{batch}], "
            f"got {list(cache.ring.length.shape)}"
        )


def _slots(time, window, ring, capacity):
    """Slots of the returned ring."""
    if capacity is not None:
        return min(capacity, window)
    return min(time + (0 if ring is None else ring.key.shape[1]), window)
