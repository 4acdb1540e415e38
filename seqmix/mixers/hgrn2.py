# SPDX-License-Identifier: Apache-2.0
"""The mixer of HGRN2: what a key channel forgets, its key writes."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers import vector_decay
from seqmix.mixers._numerics import operand_dtype
from seqmix.mixers._segments import mask_padding, runs
from seqmix.typing import MatrixState, Queries, SegmentIds, Values


def hgrn2(
    q: Queries,
    v: Values,
    log_decay: Float[Array, "B T H K"],
    *,
    scale: float = 1.0,
    initial_state: MatrixState | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[jax.Array, MatrixState]:
    """S_t = diag(f_t) S_{t-1} + (1 - f_t) v_t^T;  o_t = scale q_t S_t;  f_t = exp(log_decay_t).

    Source: HGRN2 (Qin et al. 2024, arXiv 2404.07904), where f is the forget gate and q the output
    gate. The key 1 - f keeps its digits where f is near 1; products read it in bfloat16 when q and
    v are bfloat16.

    Args:
      q: [B, T, Hq, K] float. Hq a multiple of H.
      v: [B, T, H, V] float.
      log_decay: [B, T, H, K] float32, natural log, <= 0 (-inf forgets the channel).
      scale: static factor on the output.
      initial_state: [B, H, K, V], state of each row's first document; None for zeros.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      chunk_size: tokens per chunk, rounded up to a power of two, None for 64. Changes speed and
        rounding only.
      impl: 'recurrent', 'associative', 'chunked', 'pallas' or 'auto'.

    Returns:
      out: [B, T, Hq, V] in the dtype of v; 0 at padding.
      state: [B, H, K, V] float32, of each row's last document.

    Raises:
      ValueError: for shapes, dtypes or head counts off the above, or an impl that cannot run.
    """
    name = "hgrn2"
    heads = check.heads(name, q, log_decay, v, key="log_decay")
    batch, time, _, width = q.shape
    check.shape(name, "log_decay", log_decay, (batch, time, heads.states, width), "B T H K")
    check.float32(name, "log_decay", log_decay)
    check.segments(name, segment_ids, batch, time)
    check.positive(name, "chunk_size", chunk_size)
    check.state(name, initial_state, (batch, heads.states, width, v.shape[-1]), "B H K V")
    q, v, log_decay = mask_padding(segment_ids, q, v, log_decay)
    out, state = vector_decay.scan(
        q,
        -jnp.expm1(log_decay).astype(operand_dtype(q, v)),  # 0 at padding, where log_decay is 0
        v,
        log_decay,
        heads=heads,
        scale=scale,
        initial_state=initial_state,
        run=None if segment_ids is None else runs(segment_ids),
        chunk_size=chunk_size,
        mixer=name,
        impl=impl,
    )
    return mask_padding(segment_ids, out)[0], state
