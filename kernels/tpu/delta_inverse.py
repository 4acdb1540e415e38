# SPDX-License-Identifier: Apache-2.0
"""Inverses of unit lower triangular matrices inside a TPU kernel, by block substitution."""

import jax
import jax.numpy as jnp

from seqmix_kernels.tpu import _common as tpu

# Rows that the vector unit substitutes one by one; larger blocks are merged by the matrix unit.
# Fewer rows keep the matrix unit longer, more rows the unit that moves lanes: 16 give the shortest
# programs on every chip.
BLOCK = 16


def unit_lower_inverse(lower: jax.Array, digits: int) -> jax.Array:
    """Inverses of I + L.

    The diagonal blocks are inverted row by row, all of them at once: their rows lie side by side in
    the lanes. Then neighbours are merged: with inverses X and Y of two blocks and M below the first
    and beside the second, the corner is -Y M X. No product of powers of L is formed, so repeated
    keys lose nothing.

    Args:
      lower: [n, C, C] float32, zero on and above the diagonal; C a multiple of 128, and a power of
        two times BLOCK.
      digits: of a product's operands in bfloat16 numbers: 3 for all of float32, 2 for 16 bits, at
        half the passes.

    Returns:
      [n, C, C] float32, unit lower triangular.
    """
    size = lower.shape[-1]
    inverse = _diagonal_inverses(lower)
    rows, columns = tpu.iota((size, size), 0), tpu.iota((size, size), 1)
    width = BLOCK
    while width < size:
        below = ((rows // width) % 2 == 1) & (columns // width == rows // width - 1)
        inverse = _merged(inverse, jnp.where(below, lower, 0), width, digits)
        width *= 2
    return inverse


def _diagonal_inverses(lower: jax.Array) -> jax.Array:
    """Block diagonal [n, C, C]: the inverses of the diagonal blocks of I + L."""
    count, size, _ = lower.shape
    own = tpu.iota((size, size), 0) // BLOCK == tpu.iota((size, size), 1) // BLOCK
    lower = jnp.where(own, lower, 0)
    # [n, BLOCK, C]: block b holds the lanes b * BLOCK to (b + 1) * BLOCK.
    folded = sum(lower[:, start : start + BLOCK] for start in range(0, size, BLOCK))
    folded = folded.reshape(count * BLOCK, size)
    lane = tpu.iota(folded.shape, 1)
    first = lane - lane % BLOCK
    inverse = tpu.iota((BLOCK, size), 0) == tpu.iota((BLOCK, size), 1) % BLOCK
    inverse = jnp.broadcast_to(jnp.where(inverse, 1.0, 0.0), (count, BLOCK, size))
    for j in range(BLOCK - 1):
        # Row j is final; entry (i, j) of each block goes to all lanes of the block.
        weights = jnp.take_along_axis(folded, first + j, axis=1).reshape(inverse.shape)
        inverse = inverse - weights * inverse[:, j : j + 1]
    return jnp.where(own, jnp.concatenate([inverse] * (size // BLOCK), axis=1), 0)


def _merged(inverse: jax.Array, below: jax.Array, width: int, digits: int) -> jax.Array:
    """Merges the diagonal blocks of `width` pairwise; `below` holds what lies below the firsts."""
    starts = range(0, inverse.shape[-1], 2 * width)
    second = jnp.concatenate([inverse[:, s + width : s + 2 * width] for s in starts], axis=1)
    corner = _product(_product(second, below, digits), inverse, digits)
    parts = []
    for place, start in enumerate(starts):
        own = slice(place * width, (place + 1) * width)
        parts += [inverse[:, start : start + width], second[:, own] - corner[:, own]]
    return jnp.concatenate(parts, axis=1)


def _product(a: jax.Array, b: jax.Array, digits: int) -> jax.Array:
    """[n, R, C] x [n, C, C]."""
    if digits == 3:
        return tpu.batched_dot(a, b)
    (a, a_rest), (b, b_rest) = (
        [part.astype(jnp.bfloat16) for part in tpu.pieces(x, 2)] for x in (a, b)
    )
    return tpu.batched_dot(a, b) + (tpu.batched_dot(a_rest, b) + tpu.batched_dot(a, b_rest))
