# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (arXiv 2104.09864): whole or partial, two layouts of pairs, scaled."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from seqmix import mixers
from seqmix.layers.rotary_scaling import RotaryScaling, plain_frequencies


def rotary_width(head_width: int, fraction: float) -> int:
    """Number of leading channels that are rotated: an even count, ``fraction`` of the head.

    Raises:
      ValueError: the fraction is not in [0, 1] or gives an odd or empty count.
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"rotary fraction must be between 0 and 1, got {fraction}")
    width = round(head_width * fraction)
    if width % 2 or (fraction > 0 and width == 0):
        raise ValueError(
            f"rotary fraction {fraction} of head width {head_width} rotates {width} channels; "
            "an even, positive number is needed"
        )
    return width


def rotary(
    x: jax.Array,
    positions: jax.Array,
    *,
    width: int | None = None,
    base: float = 10_000.0,
    interleaved: bool = False,
    scaling: RotaryScaling | None = None,
) -> jax.Array:
    """Rotates pair i of channels by ``positions * base**(-2i/width)``.

    Args:
      x: [B, T, H, K].
      positions: [B, T] int32.
      width: how many leading channels are rotated, even; default all K. The rest pass unchanged.
      base: the longest wavelength is about 2 pi base tokens.
      interleaved: pair i is channels (2i, 2i + 1) as in GPT-J and DeepSeek, otherwise
        (i, i + width/2) as in GPT-NeoX and Llama.
      scaling: changes the frequencies, and may multiply the rotated channels.

    Returns:
      [B, T, H, K] in x's dtype; angles and products are float32.
    """
    width = x.shape[-1] if width is None else width
    if width == 0:
        return x
    plain = plain_frequencies(width, base)
    frequencies = plain if scaling is None else scaling.frequencies(width, base)
    factor = 1.0 if scaling is None else scaling.rotation_factor
    frequencies = jnp.asarray(frequencies, jnp.float32)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    cosine, sine = jnp.cos(angles) * factor, jnp.sin(angles) * factor
    turned, rest = x[..., :width].astype(jnp.float32), x[..., width:]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    rotated = (part.astype(x.dtype) for part in rotated)
    if interleaved:
        turned = jnp.stack(tuple(rotated), axis=-1).reshape(*x.shape[:-1], width)
        return jnp.concatenate([turned, rest], axis=-1)
    return jnp.concatenate([*rotated, rest], axis=-1)


def token_positions(
    x: jax.Array, segment_ids: jax.Array | None, length: jax.Array | None
) -> jax.Array:
    """[B, T] int32 positions of the tokens of x [B, T, ...], counted per document.

    Args:
      x: the tokens.
      segment_ids: [B, T] int32, 0 = padding; None: all one segment.
      length: [B] int32, tokens already seen of each row's first document; None for 0.
    """
    ids = jnp.ones(x.shape[:2], jnp.int32) if segment_ids is None else segment_ids
    return mixers.segment_positions(ids, length)


def rotated(
    heads: Sequence[jax.Array],
    positions: jax.Array | None,
    segment_ids: jax.Array | None,
    length: jax.Array | None,
    *,
    width: int,
    base: float,
) -> Sequence[jax.Array]:
    """Queries and keys, each [B, T, H, K], rotated by `rotary`; as they are where ``width`` is 0.

    Args:
      heads: what is rotated.
      positions: [B, T] int32; None: those of `token_positions`.
      segment_ids, length: of `token_positions`.
      width, base: of `rotary`.
    """
    if not width:
        return heads
    if positions is None:
        positions = token_positions(heads[0], segment_ids, length)
    return tuple(rotary(x, positions, width=width, base=base) for x in heads)
