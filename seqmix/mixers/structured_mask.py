# SPDX-License-Identifier: Apache-2.0
"""The semiseparable mask of the scalar-decay family (Dao & Gu 2024, arXiv 2405.21060)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers._chunks import decays
from seqmix.mixers._numerics import clean_log_decay
from seqmix.mixers._segments import mask_padding, runs
from seqmix.typing import HeadGates, SegmentIds


def structured_mask(
    log_decay: HeadGates, *, segment_ids: SegmentIds | None = None
) -> Float[Array, "B H T T"]:
    """The matrix L with out = scale (L * Q K^T) V, for every mixer of the scalar-decay family.

    L_ij = exp(log_decay_{j+1} + ... + log_decay_i) for j <= i in one document, 0 elsewhere. Each
    block off the diagonal is of rank 1, and of rank <= N once multiplied with the product of N-wide
    queries and keys: that is why a state of N rows carries all that crosses a cut.

    Args:
      log_decay: [B, T, H] float32, natural log, <= 0.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.

    Returns:
      [B, H, T, T] float32; rows and columns of padding are 0.

    Raises:
      ValueError: for shapes or dtypes off the above.
    """
    name = "structured_mask"
    check.rank(name, "log_decay", log_decay, "B T H")
    check.float32(name, "log_decay", log_decay)
    batch, time, _ = log_decay.shape
    check.segments(name, segment_ids, batch, time)
    (log_decay,) = mask_padding(segment_ids, clean_log_decay(log_decay))
    run = entry = None
    if segment_ids is not None:
        run = runs(segment_ids)[:, None]
        entry = jnp.zeros((batch, 1), run.dtype)
    steps = jnp.moveaxis(log_decay, 1, 2)[:, None, :, None]
    mask = decays(steps, run, entry).intra[:, 0, :, 0]
    if segment_ids is None:
        return mask
    real = (segment_ids != 0)[:, None]
    return jnp.where(real[..., :, None] & real[..., None, :], mask, 0)
