# SPDX-License-Identifier: Apache-2.0
"""Retention (RetNet): one fixed decay per head."""

import jax
import jax.numpy as jnp

from seqmix.mixers._fixed_decay import fixed_decay
from seqmix.mixers._numerics import state_dtype
from seqmix.typing import Keys, MatrixState, Queries, SegmentIds, Values


def retention_log_decay(heads: int, dtype=jnp.float32) -> jax.Array:
    """Log-decays log(1 - 2^(-5 - h)) of heads h = 0, 1, ...: [H], in at least float32.

    1 - 2^-12 is 1 in bfloat16; log1p keeps the decays of all heads apart.
    """
    dtype = jnp.promote_types(dtype, jnp.float32)
    return jnp.log1p(-jnp.exp2(-5.0 - jnp.arange(heads, dtype=dtype)))


def retention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float | None = None,
    initial_state: MatrixState | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[jax.Array, MatrixState]:
    """S_t = (1 - 2^(-5 - h)) S_{t-1} + k_t v_t^T;  o_t = scale q_t S_t in head h.

    Source: RetNet (Sun et al. 2023, arXiv 2307.08621). The rotation of q and k is the layer's. The
    row normalisers of the reference's parallel form are left out: the norm that follows it cancels
    them up to its epsilon.

    Args:
      q: [B, T, Hq, K] float.
      k: [B, T, Hk, K] float. Hq = Hk.
      v: [B, T, Hv, V] float. Hv a multiple of Hk; or Hk = Hv and Hq a multiple of them.
      scale: static factor on the output, None for K**-0.5.
      initial_state: [B, Hs, K, V], state of each row's first document; None for zeros.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      chunk_size: tokens per chunk, None for 64. Changes speed and rounding only.
      impl: 'recurrent', 'associative', 'chunked', 'quadratic', 'pallas' or 'auto'.

    Returns:
      out: [B, T, max(Hq, Hs), V] in the dtype of v; 0 at padding. Hs = max(Hk, Hv).
      state: [B, Hs, K, V] float32, of each row's last document.

    Raises:
      ValueError: for shapes, dtypes or head counts off the above, or an impl that cannot run.
    """
    return fixed_decay(
        "retention",
        q,
        k,
        v,
        lambda heads: retention_log_decay(heads, state_dtype(q, k, v)),
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        chunk_size=chunk_size,
        impl=impl,
    )
