# SPDX-License-Identifier: Apache-2.0
"""The scalar-decay family with decays that do not depend on the data: one rate per head."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from seqmix.mixers import _checks as check
from seqmix.mixers import scalar_decay
from seqmix.mixers._numerics import varying_like
from seqmix.mixers._segments import mask_padding, runs


def fixed_decay(
    name: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rates: Callable[[int], jax.Array],
    *,
    scale: float | None,
    initial_state: jax.Array | None,
    segment_ids: jax.Array | None,
    chunk_size: int | None,
    impl: str,
) -> tuple[jax.Array, jax.Array]:
    """Checks the arguments of mixer `name` and runs it.

    Args:
      name: the mixer, for messages.
      q, k, v, initial_state, segment_ids, chunk_size, impl: as in `simple_gla`.
      rates: from the number of states Hs to log-decays [Hs] <= 0.
      scale: static factor on the output, None for K**-0.5.

    Returns:
      out [B, T, Ho, V] and state [B, Hs, K, V].
    """
    heads = check.heads(name, q, k, v)
    batch, time = q.shape[:2]
    check.segments(name, segment_ids, batch, time)
    check.positive(name, "chunk_size", chunk_size)
    check.state(name, initial_state, (batch, heads.states, k.shape[-1], v.shape[-1]), "B H K V")
    log_decay = rates(heads.states)
    log_decay = varying_like(jnp.broadcast_to(log_decay, (batch, time, heads.states)), q)
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
