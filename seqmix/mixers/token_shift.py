# SPDX-License-Identifier: Apache-2.0
"""The token before each token, over packed rows, with state."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers.short_convolution import short_convolution
from seqmix.typing import Channels, SegmentIds


def token_shift(
    x: Channels,
    *,
    initial_state: Float[Array, "B 1 D"] | None = None,
    segment_ids: SegmentIds | None = None,
) -> tuple[jax.Array, jax.Array]:
    """y_t = x_{t-1}, zeros at a document's first token: RWKV's time shift.

    The two-tap case of `short_convolution`, exact in every dtype.

    Args:
      x: [B, T, D] float.
      initial_state: [B, 1, D], the token before each row's first; None for zeros.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document. Padding
        may stand anywhere and is skipped over.

    Returns:
      y: [B, T, D] in the dtype of x; 0 at padding.
      state: [B, 1, D] in the dtype of x, the last token of each row's last document.

    Raises:
      ValueError: for shapes or dtypes off the above.
    """
    name = "token_shift"
    check.rank(name, "x", x, "B T D")
    batch, time, width = x.shape
    if time == 0:
        raise ValueError(f"{name}: x must have T >= 1 tokens, got shape {list(x.shape)}")
    check.state(name, initial_state, (batch, 1, width), "B 1 D")
    check.segments(name, segment_ids, batch, time)
    taps = jnp.stack([jnp.ones((width,), x.dtype), jnp.zeros((width,), x.dtype)])
    return short_convolution(x, taps, initial_state=initial_state, segment_ids=segment_ids)
