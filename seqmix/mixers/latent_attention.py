# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: keys and values of all heads are read from one latent per token."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from seqmix.mixers import _checks as check
from seqmix.mixers._dispatch import choose
from seqmix.mixers._numerics import contract, operand_dtype
from seqmix.mixers._segments import mask_padding
from seqmix.mixers.attention import attention
from seqmix.mixers.kv_cache import KVCache, append, place
from seqmix.typing import SegmentIds

IMPLEMENTATIONS = ("dense", "expanded", "absorbed")


class LatentCache(NamedTuple):
    """State of `latent_attention`; the token at position p of its document is in slot p mod S.

    Attributes:
      latent: [B, S, R + P], a token's latent and then the key that all heads share.
      length: [B] int32, tokens of the current document seen so far (not capped at S).
    """

    latent: Float[Array, "B S RP"]
    length: Int[Array, " B"]


def init_latent_cache(batch: int, capacity: int, width: int, dtype) -> LatentCache:
    """An empty cache of `capacity` slots of R + P = `width` numbers.

    Raises:
      ValueError: if a size is < 1.
    """
    for name, size in (("batch", batch), ("capacity", capacity), ("width", width)):
        if size < 1:
            raise ValueError(f"init_latent_cache: {name} must be >= 1, got {size}")
    return LatentCache(jnp.zeros((batch, capacity, width), dtype), jnp.zeros((batch,), jnp.int32))


def latent_attention(
    q: Float[Array, "B T H NP"],
    latent: Float[Array, "B T RP"],
    key_up: Float[Array, "R H N"],
    value_up: Float[Array, "R H V"],
    *,
    scale: float | None = None,
    initial_state: LatentCache | None = None,
    segment_ids: SegmentIds | None = None,
    capacity: int | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[Float[Array, "B T H V"], LatentCache]:
    """Causal attention of head h over the keys [c_s key_up_h | p_s] and the values c_s value_up_h.

    c_s are the first R channels of token s of ``latent`` and p_s the other P. Source: DeepSeek-V2
    (arXiv 2405.04434), section 2.1; deepseek-ai/DeepSeek-V3 inference/model.py has both forms.

    Args:
      q: [B, T, H, N + P] float: N channels that meet key_up's and P that meet the shared key.
      latent: [B, T, R + P] float, normalised latents and shared keys, both as they are cached.
        P = 0 where there is no shared key.
      key_up: [R, H, N] float.
      value_up: [R, H, V] float.
      scale: None for (N + P)**-0.5.
      initial_state: latents of each row's first document so far.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      capacity: slots of the returned cache, as in `seqmix.mixers.attention`.
      chunk_size: queries per step, None for 256. Changes speed and rounding only.
      impl: 'dense' (the definition), 'expanded' (keys and values of every head are computed, for
        cached tokens too), 'absorbed' (queries go through key_up and outputs through value_up, so
        that heads attend over the latents themselves) or 'auto': absorbed where there is an
        initial_state, otherwise expanded.

    Returns:
      out: [B, T, H, V] in the dtype of ``latent``; 0 at padding.
      cache: of each row's last document.

    Raises:
      ValueError: for shapes, dtypes or options off the above, or an impl that cannot run.
    """
    name = "latent_attention"
    rank, shared = _check_arguments(name, q, latent, key_up, value_up, initial_state)
    batch, time, _, width = q.shape
    check.segments(name, segment_ids, batch, time)
    check.positive(name, "capacity", capacity)
    check.positive(name, "chunk_size", chunk_size)
    default = "expanded" if initial_state is None else "absorbed"
    impl = choose(name, impl, IMPLEMENTATIONS, time=time, default=default)
    scale = width**-0.5 if scale is None else scale
    q, latent = mask_padding(segment_ids, q, latent)
    low = operand_dtype(latent)

    def multiply(spec, *operands):
        return contract(spec, *operands, dtype=low).astype(latent.dtype)

    def absorbed(entries):
        """One head of latents."""
        return entries[:, :, None], entries[:, :, None, :rank]

    def expanded(entries):
        """Every head's keys and values."""
        content = multiply("bsr,rhn->bshn", entries[..., :rank], key_up)
        common = jnp.broadcast_to(entries[:, :, None, rank:], (*content.shape[:3], shared))
        value = multiply("bsr,rhv->bshv", entries[..., :rank], value_up)
        return jnp.concatenate([content, common], axis=-1), value

    form = absorbed if impl == "absorbed" else expanded
    if impl == "absorbed":
        content, turned = jnp.split(q, [width - shared], axis=-1)
        content = multiply("bthn,rhn->bthr", content, key_up)
        q = jnp.concatenate([content, turned.astype(latent.dtype)], axis=-1)
    state = initial_state
    if state is not None:
        state = KVCache(*form(state.latent.astype(latent.dtype)), state.length)
    out, _ = attention(
        q,
        *form(latent),
        scale=scale,
        initial_state=state,
        segment_ids=segment_ids,
        capacity=capacity,
        chunk_size=chunk_size,
        impl="dense" if impl == "dense" else "auto",
    )
    if impl == "absorbed":
        out = multiply("bthr,rhv->bthv", out, value_up)
    return out, _append(initial_state, latent, segment_ids, capacity)


def _append(cache, latent, segment_ids, capacity):
    """The cache after the new tokens."""
    batch, time = latent.shape[:2]
    slots = time if cache is None else time + cache.latent.shape[1]
    before = cache
    if cache is not None:
        # Values of width 0: the latent is all that is kept.
        before = KVCache(cache.latent[:, :, None], cache.latent[:, :, None, :0], cache.length)
    at = place(before, segment_ids, batch, time)
    new = latent[:, :, None]
    after = append(before, new, new[..., :0], at, slots if capacity is None else capacity)
    return LatentCache(after.key[:, :, 0], after.length)


def _check_arguments(name, q, latent, key_up, value_up, cache):
    """R and P."""
    check.rank(name, "q", q, "B T H N+P")
    check.rank(name, "latent", latent, "B T R+P")
    check.rank(name, "key_up", key_up, "R H N")
    check.rank(name, "value_up", value_up, "R H V")
    batch, time, heads, width = q.shape
    rank, _, content = key_up.shape
    check.shape(name, "key_up", key_up, (rank, heads, content), "R H N")
    check.shape(name, "value_up", value_up, (rank, heads, value_up.shape[2]), "R H V")
    if width < content:
        raise ValueError(
            f"{name}: q must have at least the N = {content} channels of key_up, got {width}"
        )
    shared = width - content
    check.shape(name, "latent", latent, (batch, time, rank + shared), "B T R+P")
    check.state_type(name, cache, LatentCache)
    if cache is not None:
        expected = (batch, cache.latent.shape[1], rank + shared)
        check.shape(name, "initial_state.latent", cache.latent, expected, "B S R+P")
        if cache.length.shape != (batch,):
            raise ValueError(
                f"{name}: initial_state.length must have shape [B] = [{batch}], "
                f"got {list(cache.length.shape)}"
            )
    return rank, shared
