# SPDX-License-Identifier: Apache-2.0
"""The mixer of RWKV-7: a state that is decayed, corrected along one direction, and written."""

import jax
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers import dplr
from seqmix.mixers._dispatch import choose
from seqmix.mixers._segments import mask_padding, runs
from seqmix.typing import MatrixState, SegmentIds


def rwkv7(
    r: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H K"],
    a: Float[Array, "B T H K"],
    b: Float[Array, "B T H K"],
    *,
    scale: float = 1.0,
    initial_state: MatrixState | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[jax.Array, MatrixState]:
    """S_t = diag(exp(log_decay_t)) S_{t-1} + b_t (a_t S_{t-1}) + k_t v_t^T;  o_t = scale r_t S_t.

    `a` reads the state before it decays. The layer passes a = -kappa and b = kappa * gate with unit
    kappa; other pairs are allowed, and grow without bound where the recurrence does.

    Source: RWKV-7 "Goose" (Peng et al. 2025, arXiv 2503.14456), `rwkv_v7_numpy.py` of RWKV-LM
    (its state is [B, H, V, K]).

    Args:
      r, k, a, b: [B, T, H, K] float.
      v: [B, T, H, V] float.
      log_decay: [B, T, H, K] float32, natural log, <= 0 (-inf forgets the channel).
      scale: static factor on the output.
      initial_state: [B, H, K, V], state of each row's first document; None for zeros.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      chunk_size: tokens per chunk, rounded up to a power of two, None for 64. Changes speed and
        rounding only.
      impl: 'recurrent', 'chunked', 'pallas' or 'auto'.

    Returns:
      out: [B, T, H, V] in the dtype of v; 0 at padding.
      state: [B, H, K, V] float32, of each row's last document.

    Raises:
      ValueError: for shapes or dtypes off the above, or an impl that cannot run.
    """
    name = "rwkv7"
    check.heads(name, r, k, v, query="r")
    batch, time, count, width = r.shape
    for label, x in (("k", k), ("log_decay", log_decay), ("a", a), ("b", b)):
        check.shape(name, label, x, (batch, time, count, width), "B T H K")
    check.shape(name, "v", v, (batch, time, count, v.shape[-1]), "B T H V")
    check.float32(name, "log_decay", log_decay)
    check.segments(name, segment_ids, batch, time)
    check.positive(name, "chunk_size", chunk_size)
    check.state(name, initial_state, (batch, count, width, v.shape[-1]), "B H K V")
    impl = choose(name, impl, dplr.IMPLEMENTATIONS, time=time)
    r, k, v, log_decay, a, b = mask_padding(segment_ids, r, k, v, log_decay, a, b)
    out, state = dplr.scan(
        r,
        k,
        v,
        log_decay,
        a,
        b,
        scale=scale,
        initial_state=initial_state,
        run=None if segment_ids is None else runs(segment_ids),
        chunk_size=chunk_size,
        impl=impl,
    )
    return mask_padding(segment_ids, out)[0], state
