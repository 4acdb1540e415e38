# SPDX-License-Identifier: Apache-2.0
"""Tiles of a few whole heads of one token, in registers: for kernels that only pass over arrays.

A head lies in one warp, so that its sums need no shared memory, and a thread holds
the same channels of every token: sums over tokens and shifts in time stay inside a thread. Shared
memory is plain, [tokens, heads, width].
"""

from typing import Any

import jax
import jax.numpy as jnp

from seqmix_kernels.gpu._common import MULTIPROCESSORS, plgpu

WIDTHS = (64, 128)
"""Head widths that the tiles come in; a backward of 256 spills registers."""
HEADS = 4
"""Heads of a tile."""
STEPS = 8
"""Tokens of a stage."""
CODES = 32
"""Numbers of a stage: TMA writes to multiples of 128 bytes."""


def layout(width: int) -> Any:
    """The layout of a tile [HEADS, width]: a head a warp, neighbouring channels a thread."""
    vector = min(4, width // 32)
    tiling = plgpu.Tiling(((HEADS, 32 * vector), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def zeros(width: int) -> jax.Array:
    """A float32 tile of zeros."""
    return plgpu.layout_cast(jnp.zeros((HEADS, width), jnp.float32), layout(width))


def where(condition: jax.Array, x: jax.Array) -> jax.Array:
    """The tile x where a condition of one number holds, else zeros."""
    return jnp.where(jnp.broadcast_to(condition, x.shape), x, jnp.zeros_like(x))


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x)), without overflow into NaN."""
    return 1.0 / (1.0 + jnp.exp(-x))


def cut(rows: int, stages: int, blocks: int) -> tuple[int, int]:
    """Cuts rows of stages into pieces so that about `blocks` blocks a multiprocessor run at once.

    Returns:
      Pieces of a row, and stages of a piece.
    """
    pieces = max(1, min(MULTIPROCESSORS * blocks // rows, stages // 4))
    length = -(-stages // pieces)
    return -(-stages // length), length
