# SPDX-License-Identifier: Apache-2.0
"""Packed rows: which tokens share a document, and where each stands in it."""

import jax
import jax.numpy as jnp
from jax import lax

from seqmix.typing import SegmentIds


def last_real_index(segment_ids: SegmentIds) -> jax.Array:
    """[B, T] index of the last token at or before t that is not padding, -1 if there is none."""
    index = jnp.where(segment_ids != 0, jnp.arange(segment_ids.shape[1], dtype=jnp.int32), -1)
    return lax.cummax(index, axis=1)


def runs(segment_ids: SegmentIds) -> jax.Array:
    """Numbers the documents of each row in order of appearance.

    A run ends where the id of a real token differs from that of the real token before it; padding
    (id 0) belongs to the run around it and never ends one. Run 0 is the document that an initial
    state belongs to.

    Args:
      segment_ids: [B, T] integers.

    Returns:
      [B, T] int32, non-decreasing along T, starting at 0.
    """
    last = last_real_index(segment_ids)
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    previous = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
    starts = (segment_ids != 0) & (before >= 0) & (segment_ids != previous)
    return jnp.cumsum(starts.astype(jnp.int32), axis=1)


def segment_positions(segment_ids: SegmentIds, initial: jax.Array | None = None) -> jax.Array:
    """Position of each token in its document; padding does not count.

    Args:
      segment_ids: [B, T] integers, 0 for padding.
      initial: [B] int32 tokens already seen of each row's first document; None for 0.

    Returns:
      [B, T] int32. Padding carries the position that the next token of its document will have.
    """
    real = (segment_ids != 0).astype(jnp.int32)
    run = runs(segment_ids)
    rank = jnp.cumsum(real, axis=1) - real
    starts = (jnp.diff(run, axis=1, prepend=0) > 0).astype(jnp.int32)
    first_rank = lax.cummax(rank * starts, axis=1)
    position = rank - first_rank
    if initial is not None:
        position = position + jnp.where(run == 0, initial[:, None], 0)
    return position


def mask_padding(segment_ids: SegmentIds | None, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Zeroes [B, T, ...] arrays at padding, whatever stands there (NaN included)."""
    if segment_ids is None:
        return arrays
    real = (segment_ids != 0)[..., None]

    def masked(a):
        # Heads side by side: in the view [B, T, H, K] a TPU would put heads before tokens.
        flat = a.reshape(*a.shape[:2], -1)
        return jnp.where(real, flat, jnp.zeros((), a.dtype)).reshape(a.shape)

    return tuple(masked(a) for a in arrays)
