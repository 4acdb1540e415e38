# SPDX-License-Identifier: Apache-2.0
"""The mixers of RWKV-5 and RWKV-6: read before write, with a bonus on the present token."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers import vector_decay
from seqmix.mixers._segments import mask_padding, runs
from seqmix.typing import Keys, MatrixState, Queries, SegmentIds, Values


def rwkv6(
    r: Queries,
    k: Keys,
    v: Values,
    log_decay: Float[Array, "B T H K"],
    bonus: Float[Array, "H K"],
    *,
    scale: float = 1.0,
    initial_state: MatrixState | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[jax.Array, MatrixState]:
    """o_t = scale r_t (S_{t-1} + diag(bonus) k_t v_t^T), then the write of `gla`.

    S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T. A document's first token reads only its own
    write, through the bonus.

    Source: RWKV-6 "Finch" (Peng et al. 2024, arXiv 2404.05892), where log_decay = -exp(w).

    Args:
      r: [B, T, Hq, K] float, receptance.
      k: [B, T, Hk, K] float. Hq = Hk.
      v: [B, T, Hv, V] float. Hv a multiple of Hk; or Hk = Hv and Hq a multiple of them.
      log_decay: [B, T, Hs, K] float32, natural log, <= 0 (-inf forgets the channel); one row per
        state, Hs = max(Hk, Hv).
      bonus: [Hs, K] float, u.
      scale: static factor on the output.
      initial_state: [B, Hs, K, V], state of each row's first document; None for zeros.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      chunk_size: tokens per chunk, rounded up to a power of two, None for 64. Changes speed and
        rounding only.
      impl: 'recurrent', 'associative', 'chunked', 'pallas' or 'auto'.

    Returns:
      out: [B, T, max(Hq, Hs), V] in the dtype of v; 0 at padding.
      state: [B, Hs, K, V] float32, of each row's last document.

    Raises:
      ValueError: for shapes, dtypes or head counts off the above, or an impl that cannot run.
    """
    name = "rwkv6"
    heads = check.heads(name, r, k, v, query="r")
    batch, time = r.shape[:2]
    width = k.shape[-1]
    check.shape(name, "log_decay", log_decay, (batch, time, heads.states, width), "B T H K")
    _check_rest(name, heads, k, v, log_decay, bonus, initial_state, segment_ids, chunk_size)
    return _run(
        name, heads, r, k, v, log_decay, bonus, scale, initial_state, segment_ids, chunk_size, impl
    )


def rwkv5(
    r: Queries,
    k: Keys,
    v: Values,
    log_decay: Float[Array, "H K"],
    bonus: Float[Array, "H K"],
    *,
    scale: float = 1.0,
    initial_state: MatrixState | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[jax.Array, MatrixState]:
    """RWKV-6 with one decay per channel for all tokens: log_decay [Hs, K] float32, <= 0.

    Padding leaves the state as it is, decay included.

    Source: RWKV-5 "Eagle" (Peng et al. 2024, arXiv 2404.05892), where log_decay = -exp(w).

    Args, returns and errors: as `rwkv6`.
    """
    name = "rwkv5"
    heads = check.heads(name, r, k, v, query="r")
    check.shape(name, "log_decay", log_decay, (heads.states, k.shape[-1]), "H K")
    _check_rest(name, heads, k, v, log_decay, bonus, initial_state, segment_ids, chunk_size)
    every_token = jnp.broadcast_to(log_decay, (*r.shape[:2], *log_decay.shape))
    return _run(
        name,
        heads,
        r,
        k,
        v,
        every_token,
        bonus,
        scale,
        initial_state,
        segment_ids,
        chunk_size,
        impl,
    )


def _check_rest(name, heads, k, v, log_decay, bonus, initial_state, segment_ids, chunk_size):
    batch, time, _, width = k.shape
    check.float32(name, "log_decay", log_decay)
    check.shape(name, "bonus", bonus, (heads.states, width), "H K")
    check.segments(name, segment_ids, batch, time)
    check.positive(name, "chunk_size", chunk_size)
    check.state(name, initial_state, (batch, heads.states, width, v.shape[-1]), "B H K V")


def _run(
    name, heads, r, k, v, log_decay, bonus, scale, initial_state, segment_ids, chunk_size, impl
):
    r, k, v, log_decay = mask_padding(segment_ids, r, k, v, log_decay)
    out, state = vector_decay.scan(
        r,
        k,
        v,
        log_decay,
        bonus,
        heads=heads,
        scale=scale,
        initial_state=initial_state,
        run=None if segment_ids is None else runs(segment_ids),
        chunk_size=chunk_size,
        mixer=name,
        impl=impl,
    )
    return mask_padding(segment_ids, out)[0], state
