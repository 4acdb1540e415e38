# SPDX-License-Identifier: Apache-2.0
"""Linear attention divided by its normaliser: the scalar-decay core with a column of ones on V."""

import jax
import jax.numpy as jnp

from seqmix.mixers import scalar_decay
from seqmix.mixers._checks import Heads
from seqmix.mixers._kernels import PLAIN, Kernel
from seqmix.mixers._numerics import state_dtype
from seqmix.mixers._segments import mask_padding, runs


def normalised_scan(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    *,
    heads: Heads,
    scale: float,
    eps: float,
    initial_state: jax.Array | None,
    segment_ids: jax.Array | None,
    chunk_size: int | None,
    mixer: str,
    impl: str,
    kernel: Kernel = PLAIN,
) -> tuple[jax.Array, jax.Array]:
    """sum_s w_ts v_s / (sum_s w_ts + eps) with w_ts = decay * scale * kernel(q_t . k_s).

    Args:
      q, k, v, log_decay, heads, scale, kernel: as in `scalar_decay.scan`; padding may hold any
        finite features of q and k.
      eps: added to the normaliser.
      initial_state: [B, Hs, F, V + 1] or None; the last column is the normaliser's.
      segment_ids, chunk_size, impl: as in every mixer, checked.
      mixer: name of the calling mixer, for messages.

    Returns:
      out [B, T, Ho, V] in the dtype of v, 0 at padding; state [B, Hs, F, V + 1].
    """
    # The gradient of a weight is (v_s - o_t) . do_t / total. Its two halves nearly cancel in sums
    # over s, which bfloat16 operands would not survive.
    wide = state_dtype(q, k, v)
    values = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
    values, log_decay = mask_padding(segment_ids, values, log_decay)
    out, state = scalar_decay.scan(
        q,
        k,
        values,
        log_decay,
        heads=heads,
        scale=scale,
        initial_state=initial_state,
        run=None if segment_ids is None else runs(segment_ids),
        chunk_size=chunk_size,
        mixer=mixer,
        impl=impl,
        kernel=kernel,
        out_dtype=wide,
        operands=wide,
    )
    total = out[..., -1:] + eps
    # Where no weight at all has come, nothing is divided: an exact 0 would put NaN in gradients.
    out = out[..., :-1] / jnp.where(total == 0, 1, total)
    return mask_padding(segment_ids, out.astype(v.dtype))[0], state
