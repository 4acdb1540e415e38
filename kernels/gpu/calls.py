# SPDX-License-Identifier: Apache-2.0
"""A call in the terms of the matrix-state kernels: units of work, whole chunks and whole tiles."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from seqmix_kernels.gpu import gates
from seqmix_kernels.gpu._common import CHUNK
from seqmix_kernels.options import Options

WIDTH = 64
"""Value columns of a unit: what one warpgroup keeps the state of."""


class Place(NamedTuple):
    """Where a unit reads and writes: head numbers, and its first value column."""

    out: Any
    state: Any
    key: Any
    query: Any
    column: Any


def place(plan: Any, block, unit) -> Place:
    """The place of a block's unit by a plan's `heads`, `units` and `columns`; may be traced."""
    heads = plan.heads
    number = block * plan.units + unit
    out = lax.div(number, plan.columns)
    column = lax.rem(number, plan.columns) * WIDTH
    state = lax.div(out, heads.queries)
    key = lax.div(state, heads.values)
    query = key * heads.queries + lax.rem(out, heads.queries)
    return Place(out, state, key, query, column)


def operand_refusal(
    options: Options, arrays: tuple[jax.Array, ...], widest: int | None = 2 * WIDTH
) -> str | None:
    """Why the kernels cannot take q, k, v and log_decay, or the chunk size, or None.

    Args:
      options: of the call.
      arrays: q, k, v, log_decay and more.
      widest: most keys of a head, None for any number.
    """
    q, k, v, log_decay = arrays[:4]
    for x in (q, k, v):
        if x.dtype not in (jnp.bfloat16, jnp.float16):
            return f"the tensor cores read bfloat16, and {x.dtype} would lose digits"
    if log_decay.dtype != jnp.float32:
        return f"GPU kernels keep states in float32, not {log_decay.dtype}"
    if widest is not None and k.shape[-1] > widest:
        return f"a warpgroup's registers hold states of at most {widest} keys, not {k.shape[-1]}"
    if options.chunk_size not in (None, CHUNK):
        return f"its chunks have {CHUNK} tokens, not {options.chunk_size}"
    return None


def whole(x: jax.Array) -> jax.Array:
    """[B, T, H, D] in bfloat16, T whole chunks and D whole tiles (of zeros)."""
    x = gates.pad_time(x.astype(jnp.bfloat16))
    pad = -x.shape[-1] % WIDTH
    return jnp.pad(x, [(0, 0)] * 3 + [(0, pad)]) if pad else x


def whole_state(state: jax.Array) -> jax.Array:
    """[B, H, K, V] -> [B, H, V, K] of whole tiles."""
    widths = [(0, 0), (0, 0), *((0, -size % WIDTH) for size in state.shape[2:])]
    return jnp.swapaxes(jnp.pad(state, widths), 2, 3)


def cut_state(state: jax.Array, key: int, value: int) -> jax.Array:
    """The inverse of `whole_state`: [B, H, V, K] -> [B, H, key, value]."""
    return jnp.swapaxes(state, 2, 3)[:, :, :key, :value]


def flat(x: jax.Array) -> jax.Array:
    """[B, pieces, ...] -> [B * pieces, ...]."""
    return x.reshape(-1, *x.shape[2:])
