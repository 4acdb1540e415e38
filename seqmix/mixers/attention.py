# SPDX-License-Identifier: Apache-2.0
"""Softmax attention over packed rows, with a key-value cache as its state.

The dense kernels are the vendors' (cuDNN through `jax.nn.dot_product_attention` on GPU, Splash on
TPU); this file holds the contract around them: documents, windows, grouped heads, caches.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers import _splash
from seqmix.mixers._dispatch import choose
from seqmix.mixers._numerics import contract, operand_dtype
from seqmix.mixers._segments import mask_padding
from seqmix.mixers.kv_cache import KVCache, append, outgrown, place, slot_positions
from seqmix.typing import Keys, Queries, SegmentIds, Values

IMPLEMENTATIONS = ("dense", "chunked", "cudnn", "splash")
DEFAULT_CHUNK = 256
_NO_WINDOW = 2**30


def attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    causal: bool = True,
    window: int | None = None,
    prefix: int = 0,
    logit_softcap: float | None = None,
    sinks: Float[Array, " Hq"] | None = None,
    scale: float | None = None,
    initial_state: KVCache | None = None,
    segment_ids: SegmentIds | None = None,
    capacity: int | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[Float[Array, "B T Hq V"], KVCache]:
    """o_t = softmax_s(scale q_t k_s) v_s over the tokens s of t's document that t may see.

    Args:
      q: [B, T, Hq, K] float.
      k: [B, T, Hkv, K] float; Hq a multiple of Hkv, key head j serves consecutive query heads.
      v: [B, T, Hkv, V] float.
      causal: t sees itself and earlier tokens only.
      window: t sees the last `window` tokens of its document, itself included; None for all.
      prefix: t sees the first `prefix` tokens of its document as well, of those up to itself:
        Hymba's meta tokens (arXiv 2411.13676). Needs a window.
      logit_softcap: logits become cap * tanh(logits / cap).
      sinks: [Hq] logits of a key without value that every token may attend to.
      scale: None for K**-0.5.
      initial_state: keys and values of each row's first document so far.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      capacity: slots of the returned cache. None: as many as needed to be exact. A decode loop
        passes a constant (with a window the cache takes at most window + prefix of them). Where a
        document outgrows a cache that its window does not bound, the row's outputs are NaN.
      chunk_size: queries per step of 'chunked', None for 256. Changes speed and rounding only.
      impl: 'dense' (the definition), 'chunked', 'cudnn' (GPU), 'splash' (TPU) or 'auto'.

    Returns:
      out: [B, T, Hq, V] in the dtype of v; 0 at padding.
      cache: of each row's last document.

    Raises:
      ValueError: for shapes, dtypes or options off the above, or an impl that cannot run.
    """
    name = "attention"
    batch, time = q.shape[:2] if hasattr(q, "shape") and q.ndim == 4 else (0, 0)
    _check_arguments(name, q, k, v, causal, window, logit_softcap, sinks, initial_state)
    _check_prefix(name, prefix, window)
    check.segments(name, segment_ids, batch, time)
    check.positive(name, "chunk_size", chunk_size)
    check.positive(name, "capacity", capacity)
    most = None if window is None else window + prefix
    slots = _slots(time, most, initial_state, capacity)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    refusals = {
        "cudnn": _cudnn_refusal(q, k, v, causal, logit_softcap, sinks, initial_state),
        "splash": _splash.refusal(q, k, v, causal, sinks, initial_state, prefix),
    }
    if refusals.get(impl) is not None:
        raise ValueError(f"{name}: impl={impl!r} cannot run: {refusals[impl]}")
    available = [i for i in IMPLEMENTATIONS if refusals.get(i) is None]
    impl = choose(name, impl, available, time=time, default=_default(available))

    q, k, v = mask_padding(segment_ids, q, k, v)
    at = place(initial_state, segment_ids, batch, time)
    cache = append(initial_state, k, v, at, slots, prefix)
    if impl == "cudnn":
        out = _cudnn(q, k, v, window, prefix, scale, segment_ids, at)
    elif impl == "splash":
        out = _splash.attend(
            q,
            k,
            v,
            at,
            packed=segment_ids is not None,
            window=window,
            logit_softcap=logit_softcap,
            scale=scale,
        )
    else:
        options = _Options(causal, window or _NO_WINDOW, prefix, logit_softcap, float(scale))
        chunk = time if impl == "dense" else min(time, chunk_size or DEFAULT_CHUNK)
        out = _attend(q, k, v, initial_state, at, sinks, options, chunk)
    if causal:
        lost = outgrown(initial_state, cache, at, window, prefix)
        out = jnp.where(lost[..., None, None], jnp.nan, out)
    return mask_padding(segment_ids, out.astype(v.dtype))[0], cache


def _check_arguments(name, q, k, v, causal, window, logit_softcap, sinks, cache):
    check.state_type(name, cache, KVCache)
    heads = check.heads(name, q, k, v)
    if heads.values != 1:
        raise ValueError(
            f"{name}: k and v must have equally many heads, got k {k.shape[2]}, v {v.shape[2]}"
        )
    check.positive(name, "window", window)
    if window is not None and not causal:
        raise ValueError(f"{name}: window needs causal=True, got window={window}, causal=False")
    if logit_softcap is not None and not logit_softcap > 0:
        raise ValueError(f"{name}: logit_softcap must be > 0, got {logit_softcap}")
    if sinks is not None:
        check.shape(name, "sinks", sinks, (q.shape[2],), "Hq")
    if cache is None:
        return
    if not causal:
        raise ValueError(f"{name}: initial_state needs causal=True")
    batch, slots = cache.key.shape[:2]
    for label, x, new in (("key", cache.key, k), ("value", cache.value, v)):
        expected = (new.shape[0], slots, *new.shape[2:])
        check.shape(name, f"initial_state.{label}", x, expected, "B S Hkv K")
    if cache.length.shape != (batch,):
        raise ValueError(
            f"{name}: initial_state.length must have shape [B] = [{batch}], "
            f"got {list(cache.length.shape)}"
        )


def _check_prefix(name, prefix, window):
    if isinstance(prefix, bool) or not isinstance(prefix, int) or prefix < 0:
        raise ValueError(f"{name}: prefix must be an integer >= 0, got {prefix!r}")
    if prefix and window is None:
        raise ValueError(f"{name}: prefix needs a window, got prefix={prefix}, window=None")


def _default(available):
    """What 'auto' takes: a vendor's kernel where one can run, in the program that it is part of."""
    if "cudnn" in available:
        return "cudnn"
    return "splash" if "splash" in available else "chunked"


def _slots(time, most, cache, capacity):
    """Slots of the returned cache, where no token sees more than `most` keys (None: all)."""
    slots = capacity
    if slots is None:
        slots = time if cache is None else time + cache.key.shape[1]
    return slots if most is None else min(slots, most)


class _Options(NamedTuple):
    causal: bool
    window: int
    prefix: int
    logit_softcap: float | None
    scale: float


def _attend(q, k, v, cache, at, sinks, options, chunk):
    """Attention over cache and new tokens, `chunk` queries at a time."""
    batch, time, heads, _ = q.shape
    groups = k.shape[2]
    key_run, key_position, key_real = at
    if cache is not None:
        held = slot_positions(cache.length, cache.key.shape[1], options.prefix)
        k = jnp.concatenate([cache.key.astype(k.dtype), k], axis=1)
        v = jnp.concatenate([cache.value.astype(v.dtype), v], axis=1)
        key_run = jnp.concatenate([jnp.zeros_like(held), key_run], axis=1)
        key_position = jnp.concatenate([held, key_position], axis=1)
        key_real = jnp.concatenate([held >= 0, key_real], axis=1)
    if sinks is not None:
        sinks = sinks.reshape(groups, heads // groups)
    q = q.reshape(batch, time, groups, heads // groups, q.shape[-1])
    # Recomputed in the backward, so that no [T, S] array outlives its chunk.
    step = jax.checkpoint(functools.partial(_attend_chunk, options=options))

    def run_step(queries):
        return step(queries, (k, v, key_run, key_position, key_real), sinks)

    if chunk == time:
        out = run_step((q, at.run, at.position))
        return out.reshape(batch, time, heads, v.shape[-1])
    count = -(-time // chunk)

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, count * chunk - time)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, count, chunk, *x.shape[2:]), 1, 0)

    out = lax.map(run_step, jax.tree.map(split, (q, at.run, at.position)))
    out = jnp.moveaxis(out, 0, 1).reshape(batch, count * chunk, heads, v.shape[-1])
    return out[:, :time]


def _attend_chunk(queries, keys, sinks, *, options):
    """[B, Q, G, Hq/G, V] float32 outputs of one chunk of queries against all keys."""
    q, run, position = queries
    k, v, key_run, key_position, key_real = keys
    low = operand_dtype(q, k, v)
    logits = contract("bqhgk,bshk->bhgqs", q, k, dtype=low) * options.scale
    if options.logit_softcap is not None:
        logits = options.logit_softcap * jnp.tanh(logits / options.logit_softcap)
    lag = position[:, :, None] - key_position[:, None]
    visible = key_real[:, None] & (run[:, :, None] == key_run[:, None])
    if options.causal:
        near = _near(lag, key_position, options.window, options.prefix)
        visible = visible & (lag >= 0) & near
    visible = visible[:, None, None]
    logits = jnp.where(visible, logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(logits.dtype)[None, :, :, None, None]
        top = jnp.maximum(top, sink)
    top = lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, logits - top, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - top)
    weights = weights / jnp.where(total > 0, total, 1)
    return contract("bhgqs,bshv->bqhgv", weights, v, dtype=low)


def _near(lag, key_position, window, prefix):
    """[B, Q, S] keys inside the window, or in the prefix of their document."""
    near = lag < window
    return near | (key_position < prefix)[:, None] if prefix else near


def _cudnn_refusal(q, k, v, causal, logit_softcap, sinks, cache):
    """Why cuDNN cannot take this call, or None."""
    if jax.default_backend() != "gpu":
        return f"the backend is '{jax.default_backend()}', not 'gpu'"
    if {q.dtype, k.dtype, v.dtype} - {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}:
        return "q, k and v must be bfloat16 or float16"
    if not causal:
        return "causal=False"
    for option, value in (("logit_softcap", logit_softcap), ("sinks", sinks)):
        if value is not None:
            return f"{option} is set"
    if cache is not None:
        return "initial_state is set"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] % 8 or q.shape[-1] > 128:
        return f"head width must be equal for k and v, a multiple of 8 and <= 128, got {k.shape}"
    return None


def _cudnn(q, k, v, window, prefix, scale, segment_ids, at):
    if segment_ids is None and not prefix:
        local = None if window is None else (window - 1, 0)
        return jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=True, local_window_size=local, implementation="cudnn"
        )
    lag = at.position[:, :, None] - at.position[:, None]
    visible = at.real[:, None] & (at.run[:, :, None] == at.run[:, None])
    visible = visible & (lag >= 0) & _near(lag, at.position, window or _NO_WINDOW, prefix)
    # Padding sees itself, so that no softmax is over nothing; its output is zeroed after.
    visible = visible | jnp.eye(q.shape[1], dtype=bool)
    return jax.nn.dot_product_attention(
        q, k, v, mask=visible[:, None], scale=scale, implementation="cudnn"
    )
