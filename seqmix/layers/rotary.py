# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (arXiv 2104.09864), half-split pairs, whole or partial."""

import jax
import jax.numpy as jnp


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
    x: jax.Array, positions: jax.Array, *, width: int | None = None, base: float = 10_000.0
) -> jax.Array:
    """Rotates channel pairs (i, i + width/2) by ``positions * base**(-2i/width)``.

    Args:
      x: [B, T, H, K].
      positions: [B, T] int32.
      width: how many leading channels are rotated, even; default all K. The rest pass unchanged.
      base: the longest wavelength is about 2 pi base tokens.

    Returns:
      [B, T, H, K] in x's dtype; angles and products are float32.
    """
    width = x.shape[-1] if width is None else width
    if width == 0:
        return x
    exponent = jnp.arange(0, width, 2, dtype=jnp.float32) / width
    angles = positions.astype(jnp.float32)[..., None, None] * jnp.power(base, -exponent)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    first, second, rest = jnp.split(x, [width // 2, width], axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), rest], axis=-1)
