# SPDX-License-Identifier: Apache-2.0
"""Linear attention with one data-dependent decay per head."""

import jax

from seqmix.mixers import _checks as check
from seqmix.mixers import scalar_decay
from seqmix.mixers._segments import mask_padding, runs
from seqmix.typing import HeadGates, Keys, MatrixState, Queries, SegmentIds, Values


def simple_gla(
    q: Queries,
    k: Keys,
    v: Values,
    log_decay: HeadGates,
    *,
    scale: float | None = None,
    initial_state: MatrixState | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[jax.Array, MatrixState]:
    """S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T;  o_t = scale q_t S_t.

    Source: the scalar-gate case of GLA (Yang et al. 2023, arXiv 2312.06635), `simple_gla` of
    flash-linear-attention.

    Args:
      q: [B, T, Hq, K] float.
      k: [B, T, Hk, K] float. Hq = Hk.
      v: [B, T, Hv, V] float. Hv a multiple of Hk; or Hk = Hv and Hq a multiple of them.
      log_decay: [B, T, Hs] float32, natural log, <= 0 (-inf forgets everything); one per state,
        Hs = max(Hk, Hv).
      scale: static factor on the output, None for K**-0.5.
      initial_state: [B, Hs, K, V], state of each row's first document; None for zeros.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      chunk_size: tokens per chunk, None for 64. Changes speed and rounding only.
      impl: 'recurrent', 'associative', 'chunked', 'quadratic', 'pallas' or 'auto'.

    Returns:
      out: [B, T, max(Hq, Hs), V] in the dtype of v; 0 at padding.
      state: [B, Hs, K, V] float32, of each row's last document.

    Raises:
      ValueError: for shapes, dtypes or head counts off the above, or an impl that cannot run.
    """
    name = "simple_gla"
    heads = check.heads(name, q, k, v)
    batch, time = q.shape[:2]
    check.shape(name, "log_decay", log_decay, (batch, time, heads.states), "B T H")
    check.float32(name, "log_decay", log_decay)
    check.segments(name, segment_ids, batch, time)
    check.positive(name, "chunk_size", chunk_size)
    check.state(name, initial_state, (batch, heads.states, k.shape[-1], v.shape[-1]), "B H K V")
    q, k, v, log_decay = mask_padding(segment_ids, q, k, v, log_decay)
    out, state = scalar_decay.scan(
        q,
        k,
        v,
        log_decay,
        heads=heads,
        scale=k.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=initial_state,
        run=None if segment_ids is None else runs(segment_ids),
        chunk_size=chunk_size,
        mixer=name,
        impl=impl,
    )
    return mask_padding(segment_ids, out)[0], state
