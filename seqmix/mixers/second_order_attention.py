# SPDX-License-Identifier: Apache-2.0
"""Second-order linear attention with a decay mask (2Mamba)."""

import jax
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers._kernels import Kernel
from seqmix.mixers._normalised import normalised_scan
from seqmix.mixers._segments import mask_padding
from seqmix.typing import HeadGates, Keys, Queries, SegmentIds, Values


def second_order_attention(
    q: Queries,
    k: Keys,
    v: Values,
    log_decay: HeadGates,
    *,
    eps: float = 1e-8,
    scale: float | None = None,
    initial_state: Float[Array, "B H F V+1"] | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[jax.Array, Float[Array, "B H F V+1"]]:
    """o_t = sum_s w_ts v_s / (sum_s w_ts + eps);  w_ts = (scale q_t . k_s)^2 exp(sum of decays).

    The square of a product is the product of symmetric squares, packed into F = K (K + 1) / 2
    features, so the state is finite. Inside a chunk the plain products are squared; features are
    formed for a few chunks at a time, where tokens meet the state.

    Source: 2Mamba (arXiv 2602.17363); as in its code the scale stands inside the square, and eps is
    the least total its code divides by.

    Args:
      q: [B, T, Hq, K] float.
      k: [B, T, Hk, K] float. Hq = Hk.
      v: [B, T, Hv, V] float. Hv a multiple of Hk; or Hk = Hv and Hq a multiple of them.
      log_decay: [B, T, Hs] float32, natural log, <= 0; one per state, Hs = max(Hk, Hv).
      eps: added to the total weight.
      scale: static factor on q . k, None for K**-0.5.
      initial_state: [B, Hs, F, V + 1], state of each row's first document: numerator, and the
        normaliser in the last column. None for zeros.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      chunk_size: tokens per chunk, None for 128. Changes speed and rounding only.
      impl: 'recurrent', 'associative', 'chunked', 'quadratic', 'pallas' or 'auto'.

    Returns:
      out: [B, T, max(Hq, Hs), V] in the dtype of v; 0 at padding.
      state: [B, Hs, F, V + 1] float32, of each row's last document.

    Raises:
      ValueError: for shapes, dtypes or head counts off the above, or an impl that cannot run.
    """
    name = "second_order_attention"
    heads = check.heads(name, q, k, v)
    batch, time = q.shape[:2]
    check.shape(name, "log_decay", log_decay, (batch, time, heads.states), "B T H")
    check.float32(name, "log_decay", log_decay)
    if not eps >= 0:
        raise ValueError(f"{name}: eps must be >= 0, got {eps}")
    check.segments(name, segment_ids, batch, time)
    check.positive(name, "chunk_size", chunk_size)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    kernel = Kernel(0.0, 0.0, float(scale) ** 2)
    expected = (batch, heads.states, kernel.width(k.shape[-1]), v.shape[-1] + 1)
    check.state(name, initial_state, expected, "B H F V+1")
    q, k, v = mask_padding(segment_ids, q, k, v)
    return normalised_scan(
        q,
        k,
        v,
        log_decay,
        heads=heads,
        scale=1.0,
        eps=eps,
        initial_state=initial_state,
        segment_ids=segment_ids,
        chunk_size=chunk_size,
        mixer=name,
        impl=impl,
        kernel=kernel,
    )
