# SPDX-License-Identifier: Apache-2.0
"""Lightning attention (TransNormerLLM, MiniMax-01): one given decay rate per head."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers._fixed_decay import fixed_decay
from seqmix.typing import Keys, MatrixState, Queries, SegmentIds, Values


def alibi_slopes(heads: int) -> jax.Array:
    """Slopes 2^(-8 (h + 1) / H) of ALiBi (Press et al. 2021, arXiv 2108.12409): [H] float32.

    Where H is no power of two: the slopes of the power below, then every other one of those of the
    power above.

    Raises:
      ValueError: if `heads` is < 1.
    """
    if heads < 1:
        raise ValueError(f"alibi_slopes: heads must be >= 1, got {heads}")
    power = 1 << (heads.bit_length() - 1)

    def geometric(count: int) -> jax.Array:
        return jnp.exp2(-8.0 * jnp.arange(1, count + 1, dtype=jnp.float32) / count)

    return jnp.concatenate([geometric(power), geometric(2 * power)[0::2][: heads - power]])


def lightning_attention(
    q: Queries,
    k: Keys,
    v: Values,
    slopes: Float[Array, " Hs"],
    *,
    scale: float = 1.0,
    initial_state: MatrixState | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[jax.Array, MatrixState]:
    """S_t = exp(-slope_h) S_{t-1} + k_t v_t^T;  o_t = scale q_t S_t in head h.

    Source: Lightning Attention-2 (Qin et al. 2024, arXiv 2401.04658) and MiniMax-01
    (arXiv 2501.08313), whose slopes are `alibi_slopes` times a factor of the layer.

    Args:
      q: [B, T, Hq, K] float.
      k: [B, T, Hk, K] float. Hq = Hk.
      v: [B, T, Hv, V] float. Hv a multiple of Hk; or Hk = Hv and Hq a multiple of them.
      slopes: [Hs] float32, >= 0, one per state; Hs = max(Hk, Hv).
      scale: static factor on the output.
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
    name = "lightning_attention"

    def rates(heads: int) -> jax.Array:
        check.shape(name, "slopes", slopes, (heads,), "H")
        check.float32(name, "slopes", slopes)
        return -slopes

    return fixed_decay(
        name,
        q,
        k,
        v,
        rates,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        chunk_size=chunk_size,
        impl=impl,
    )
