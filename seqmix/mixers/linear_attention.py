# SPDX-License-Identifier: Apache-2.0
"""Linear attention: feature maps instead of the exponential, with or without its normaliser."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers import feature_maps, scalar_decay
from seqmix.mixers._kernels import PLAIN, Kernel
from seqmix.mixers._normalised import normalised_scan
from seqmix.mixers._numerics import operand_dtype, state_dtype, varying_like
from seqmix.mixers._segments import mask_padding, runs
from seqmix.typing import Keys, Queries, SegmentIds, Values

_MAPS = {
    "elu": feature_maps.elu_plus_one,
    "relu": feature_maps.relu,
    "identity": feature_maps.identity,
}
FEATURE_MAPS = (*_MAPS, "taylor")


def linear_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    feature_map: str = "elu",
    normalize: bool = True,
    eps: float = 1e-6,
    scale: float | None = None,
    initial_state: Float[Array, "B H F Z"] | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """o_t = f(q_t) S_t / (f(q_t) . z_t + eps), S and z the sums of f(k_s) v_s^T and of f(k_s).

    Sources: Katharopoulos et al. 2020 (arXiv 2006.16236) for 'elu'; Based (Arora et al. 2024,
    arXiv 2402.18668) for 'taylor'. Other maps of `feature_maps` are applied before the call, with
    feature_map='identity'.

    Args:
      q: [B, T, Hq, K] float.
      k: [B, T, Hk, K] float. Hq = Hk.
      v: [B, T, Hv, V] float. Hv a multiple of Hk; or Hk = Hv and Hq a multiple of them.
      feature_map: f. 'elu' (elu(x) + 1), 'relu', 'identity', or 'taylor': weights 1 + s + s^2 / 2
        of s = scale q . k, F = 1 + K + K (K + 1) / 2 features (F = K for the others).
      normalize: divide by the sum of weights. It must stay positive: with 'identity' that is the
        caller's to see to. Without it the output wants a norm.
      eps: added to the normaliser.
      scale: None for 1, or K**-0.5 for 'taylor'. A factor on the weights, which only eps can tell
        when they are normalised; for 'taylor' on q . k.
      initial_state: [B, Hs, F, V + 1], state of each row's first document: the last column is that
        of the normaliser z; [B, Hs, F, V] if not normalised. None for zeros.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      chunk_size: tokens per chunk, None for 64 (128 for 'taylor'). Speed and rounding only.
      impl: 'recurrent', 'associative', 'chunked', 'quadratic', 'pallas' or 'auto'.

    Returns:
      out: [B, T, max(Hq, Hs), V] in the dtype of v; 0 at padding. Hs = max(Hk, Hv).
      state: float32, shaped as `initial_state`, of each row's last document.

    Raises:
      ValueError: for shapes, dtypes or head counts off the above, an unknown feature map, or an
        impl that cannot run.
    """
    name = "linear_attention"
    heads = check.heads(name, q, k, v)
    batch, time = q.shape[:2]
    if feature_map not in FEATURE_MAPS:
        raise ValueError(f"{name}: feature_map must be one of {FEATURE_MAPS}, got {feature_map!r}")
    if not eps >= 0:
        raise ValueError(f"{name}: eps must be >= 0, got {eps}")
    check.segments(name, segment_ids, batch, time)
    check.positive(name, "chunk_size", chunk_size)
    kernel, factor = PLAIN, 1.0 if scale is None else scale
    if feature_map == "taylor":
        inner, factor = k.shape[-1] ** -0.5 if scale is None else scale, 1.0
        kernel = Kernel(1.0, float(inner), float(inner) ** 2 / 2)
    width = v.shape[-1] + 1 if normalize else v.shape[-1]
    expected = (batch, heads.states, kernel.width(k.shape[-1]), width)
    check.state(name, initial_state, expected, "B H F V+1" if normalize else "B H F V")

    q, k, v = mask_padding(segment_ids, q, k, v)
    if feature_map in _MAPS:
        # Normalised weights need their features in full; see `_normalised`.
        dtype = state_dtype(q, k) if normalize else operand_dtype(q, k)
        q, k = (_MAPS[feature_map](x).astype(dtype) for x in (q, k))
    log_decay = jnp.zeros((batch, time, heads.states), state_dtype(q, k, v))
    log_decay = varying_like(log_decay, q)
    if normalize:
        return normalised_scan(
            q,
            k,
            v,
            log_decay,
            heads=heads,
            scale=factor,
            eps=eps,
            initial_state=initial_state,
            segment_ids=segment_ids,
            chunk_size=chunk_size,
            mixer=name,
            impl=impl,
            kernel=kernel,
        )
    (k,) = mask_padding(segment_ids, k)
    out, state = scalar_decay.scan(
        q,
        k,
        v,
        log_decay,
        heads=heads,
        scale=factor,
        initial_state=initial_state,
        run=None if segment_ids is None else runs(segment_ids),
        chunk_size=chunk_size,
        mixer=name,
        impl=impl,
        kernel=kernel,
    )
    return mask_padding(segment_ids, out)[0], state
