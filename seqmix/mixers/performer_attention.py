# SPDX-License-Identifier: Apache-2.0
"""Performer: softmax attention estimated with positive random features (FAVOR+), causally."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers._normalised import normalised_scan
from seqmix.mixers._numerics import state_dtype, varying_like
from seqmix.mixers._prefix import prefix_scan
from seqmix.mixers._segments import mask_padding, runs
from seqmix.mixers.feature_maps import favor_exponents
from seqmix.typing import Keys, Queries, SegmentIds, Values


class PerformerState(NamedTuple):
    """State of `performer_attention`.

    Attributes:
      matrix: [B, Hs, m, V + 1] float32, numerator, and the normaliser in the last column; both in
        units of exp(stabiliser).
      stabiliser: [B, Hk] float32, greatest exponent of a key's features so far; -inf before any.
    """

    matrix: Float[Array, "B Hs m V+1"]
    stabiliser: Float[Array, "B Hk"]


def init_performer_state(
    batch: int, key_heads: int, states: int, features: int, value_width: int
) -> PerformerState:
    """The state before the first token, for `states` = max(Hk, Hv) heads."""
    return PerformerState(
        jnp.zeros((batch, states, features, value_width + 1), jnp.float32),
        jnp.full((batch, key_heads), -jnp.inf, jnp.float32),
    )


def performer_attention(
    q: Queries,
    k: Keys,
    v: Values,
    projection: Float[Array, "m K"],
    *,
    eps: float = 1e-6,
    scale: float | None = None,
    initial_state: PerformerState | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[jax.Array, PerformerState]:
    """Linear attention with f(x) = (exp(W x' - |x'|^2 / 2 - stabiliser) + eps) / sqrt(m).

    Source: Choromanski et al. 2020 (arXiv 2009.14794), x' = sqrt(scale) x; eps as
    `make_fast_softmax_attention` of its code sets it.

    The stabiliser of a query is the greatest of its own exponents. The reference takes that of a
    key over the whole sequence, the future included: it cancels but for eps, so outputs still
    depend on later tokens. Here it is the greatest exponent *so far*; when it grows, the state
    decays by the same factor, which is the scalar-decay recurrence. It is a constant to
    differentiation: the result does not depend on it but through eps.

    Args:
      q: [B, T, Hq, K] float.
      k: [B, T, Hk, K] float. Hq = Hk.
      v: [B, T, Hv, V] float. Hv a multiple of Hk; or Hk = Hv and Hq a multiple of them.
      projection: W [m, K] float, rows from `feature_maps.random_features`. No gradient is held
        back from it: a caller that keeps it fixed does not train it.
      eps: keeps features from vanishing; relative to the greatest feature.
      scale: factor on q . k, None for K**-0.5.
      initial_state: state of each row's first document; None for an empty one.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      chunk_size: tokens per chunk, None for 64. Changes speed and rounding only.
      impl: 'recurrent', 'associative', 'chunked', 'quadratic', 'pallas' or 'auto'.

    Returns:
      out: [B, T, max(Hq, Hs), V] in the dtype of v; 0 at padding. Hs = max(Hk, Hv).
      state: of each row's last document.

    Raises:
      ValueError: for shapes, dtypes or head counts off the above, or an impl that cannot run.
    """
    name = "performer_attention"
    heads = check.heads(name, q, k, v)
    batch, time = q.shape[:2]
    check.rank(name, "projection", projection, "m K")
    features = projection.shape[0]
    check.shape(name, "projection", projection, (features, k.shape[-1]), "m K")
    if not eps > 0:
        raise ValueError(f"{name}: eps must be > 0, got {eps}")
    if scale is not None and not scale > 0:
        raise ValueError(f"{name}: scale must be > 0, got {scale}")
    check.segments(name, segment_ids, batch, time)
    check.positive(name, "chunk_size", chunk_size)
    matrix = stabiliser = None
    if initial_state is not None:
        matrix, stabiliser = initial_state
        expected = (batch, heads.states, features, v.shape[-1] + 1)
        check.shape(name, "initial_state.matrix", matrix, expected, "B H m V+1")
        check.shape(name, "initial_state.stabiliser", stabiliser, (batch, heads.keys), "B Hk")
    scale = k.shape[-1] ** -0.5 if scale is None else scale

    q, k, v = mask_padding(segment_ids, q, k, v)
    norm = math.sqrt(features)
    exponents = favor_exponents(q, projection, scale)
    greatest = lax.stop_gradient(jnp.max(exponents, axis=-1, keepdims=True))
    query_features = (jnp.exp(exponents - greatest) + eps) / norm

    exponents = favor_exponents(k, projection, scale)
    run = None if segment_ids is None else runs(segment_ids)
    greatest, log_decay = _running_stabiliser(exponents, stabiliser, run, segment_ids)
    exponents = exponents - _finite(greatest)[..., None]
    # Above 0 only at padding, where nothing is written. (`minimum` would halve gradients at 0.)
    exponents = jnp.where(exponents > 0, 0, exponents)
    key_features = (jnp.exp(exponents) + eps) / norm

    out, matrix = normalised_scan(
        query_features,
        key_features,
        v,
        jnp.repeat(log_decay, heads.values, axis=2),
        heads=heads,
        scale=1.0,
        eps=0.0,
        initial_state=matrix,
        segment_ids=segment_ids,
        chunk_size=chunk_size,
        mixer=name,
        impl=impl,
    )
    return out, PerformerState(matrix, greatest[:, -1])


def _running_stabiliser(exponents, before, run, segment_ids):
    """Greatest exponent so far in each document, and the log-decay its growth means.

    Args:
      exponents: [B, T, Hk, m].
      before: [B, Hk] of the row's first document, or None.
      run: [B, T] document numbers or None.
      segment_ids: [B, T] or None.

    Returns:
      [B, T, Hk] twice; constants to differentiation.
    """
    own = lax.stop_gradient(jnp.max(exponents, axis=-1))
    lowest = varying_like(jnp.full_like(own[:, 0], -jnp.inf), own)
    before = lowest if before is None else lax.stop_gradient(before.astype(own.dtype))
    if segment_ids is not None:
        own = jnp.where((segment_ids != 0)[..., None], own, -jnp.inf)
    own = own.at[:, 0].max(before)
    if run is None:
        run = jnp.zeros(own.shape[:2], jnp.int32)
    greatest = _document_maxima(own, run)
    same = jnp.diff(run, axis=1, prepend=0) == 0
    previous = jnp.concatenate([before[:, None], greatest[:, :-1]], axis=1)
    # Where nothing came before, there is no state to decay.
    known = same[..., None] & jnp.isfinite(previous)
    grown = _finite(previous) - _finite(greatest)
    return greatest, jnp.where(known, grown, 0).astype(state_dtype(exponents))


def _document_maxima(x, run):
    """Cumulative maxima [B, T, H] that restart where the run changes."""

    def combine(left, right):
        (a, x), (b, y) = left, right
        return b, jnp.where((a == b)[..., None], jnp.maximum(x, y), y)

    return prefix_scan(combine, (run, x))[1]


def _finite(x):
    return jnp.where(jnp.isfinite(x), x, 0)
