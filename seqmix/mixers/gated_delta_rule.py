# SPDX-License-Identifier: Apache-2.0
"""The delta rule and the gated delta rule."""

import jax
import jax.numpy as jnp

from seqmix.mixers import _checks as check
from seqmix.mixers import delta
from seqmix.mixers._segments import mask_padding, runs
from seqmix.typing import HeadGates, Keys, MatrixState, Queries, SegmentIds, Values


def gated_delta_rule(
    q: Queries,
    k: Keys,
    v: Values,
    log_decay: HeadGates,
    beta: HeadGates,
    *,
    scale: float | None = None,
    initial_state: MatrixState | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[jax.Array, MatrixState]:
    """S~ = exp(log_decay_t) S_{t-1};  S_t = S~ + beta_t k_t (v_t - k_t S~)^T;  o_t = scale q_t S_t.

    Keys should have norm 1 (the layer normalises them): with beta |k|^2 > 2 the recurrence itself
    grows without bound, in every implementation alike.

    Source: Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464); `gated_delta_rule` of
    flash-linear-attention and transformers' Qwen3-Next.

    Args:
      q: [B, T, Hq, K] float.
      k: [B, T, Hk, K] float. Hq = Hk.
      v: [B, T, Hv, V] float. Hv a multiple of Hk; or Hk = Hv and Hq a multiple of them.
      log_decay: [B, T, Hs] float32, natural log, <= 0 (-inf forgets everything); one per state,
        Hs = max(Hk, Hv).
      beta: [B, T, Hs] float, write strength: (0, 1), or (0, 2) with negative eigenvalues.
      scale: static factor on the output, None for K**-0.5.
      initial_state: [B, Hs, K, V], state of each row's first document; None for zeros.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      chunk_size: tokens per chunk, None for 64. Changes speed and rounding only.
      impl: 'recurrent', 'chunked', 'pallas' or 'auto'.

    Returns:
      out: [B, T, max(Hq, Hs), V] in the dtype of v; 0 at padding.
      state: [B, Hs, K, V] float32, of each row's last document.

    Raises:
      ValueError: for shapes, dtypes or head counts off the above, or an impl that cannot run.
    """
    name = "gated_delta_rule"
    heads = _check(name, q, k, v, beta, initial_state, segment_ids, chunk_size)
    check.shape(name, "log_decay", log_decay, (*q.shape[:2], heads.states), "B T H")
    check.float32(name, "log_decay", log_decay)
    return _run(
        name, heads, q, k, v, log_decay, beta, scale, initial_state, segment_ids, chunk_size, impl
    )


def delta_rule(
    q: Queries,
    k: Keys,
    v: Values,
    beta: HeadGates,
    *,
    scale: float | None = None,
    initial_state: MatrixState | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[jax.Array, MatrixState]:
    """S_t = S_{t-1} + beta_t k_t (v_t - k_t S_{t-1})^T;  o_t = scale q_t S_t.

    Source: DeltaNet (Yang et al. 2024, arXiv 2406.06484); `delta_rule` of flash-linear-attention.

    Args, returns and errors: as `gated_delta_rule`, without log_decay.
    """
    name = "delta_rule"
    heads = _check(name, q, k, v, beta, initial_state, segment_ids, chunk_size)
    no_decay = jnp.zeros((*q.shape[:2], heads.states), jnp.result_type(jnp.float32, q.dtype))
    return _run(
        name, heads, q, k, v, no_decay, beta, scale, initial_state, segment_ids, chunk_size, impl
    )


def _check(name, q, k, v, beta, initial_state, segment_ids, chunk_size):
    heads = check.heads(name, q, k, v)
    batch, time = q.shape[:2]
    check.shape(name, "beta", beta, (batch, time, heads.states), "B T H")
    check.segments(name, segment_ids, batch, time)
    check.positive(name, "chunk_size", chunk_size)
    check.state(name, initial_state, (batch, heads.states, k.shape[-1], v.shape[-1]), "B H K V")
    return heads


def _run(
    name, heads, q, k, v, log_decay, beta, scale, initial_state, segment_ids, chunk_size, impl
):
    q, k, v, log_decay, beta = mask_padding(segment_ids, q, k, v, log_decay, beta)
    out, state = delta.scan(
        q,
        k,
        v,
        log_decay,
        beta,
        heads=heads,
        scale=k.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=initial_state,
        run=None if segment_ids is None else runs(segment_ids),
        chunk_size=chunk_size,
        mixer=name,
        impl=impl,
    )
    return mask_padding(segment_ids, out)[0], state
