# SPDX-License-Identifier: Apache-2.0
"""Arithmetic that every mixer shares: explicit precision, exact decays, triangular inverses."""

import math

import jax
import jax.numpy as jnp
from jax import lax

_SUBSTITUTION_BLOCK = 16
# exp underflows to exactly 0 below this in float32 and float64, so -inf and anything under it are
# the same decay; the finite stand-in keeps inf - inf out of the sums.
_ZERO_DECAY = -1e5


def state_dtype(*arrays: jax.Array) -> jnp.dtype:
    """The dtype of states and sums: float32, or float64 when an operand is float64."""
    return jnp.result_type(jnp.float32, *(a.dtype for a in arrays))


def operand_dtype(*arrays: jax.Array) -> jnp.dtype:
    """The dtype in which large products read their operands.

    bfloat16 inputs keep bfloat16 operands (accumulated in float32); float16 is widened, because
    states and decayed sums leave its range.
    """
    dtype = jnp.result_type(*(a.dtype for a in arrays))
    return dtype if dtype == jnp.bfloat16 else state_dtype(*arrays)


def contract(spec: str, *operands: jax.Array, dtype=None) -> jax.Array:
    """`jnp.einsum` with float32 (or float64) accumulation whatever the global matmul precision.

    Args:
      spec: the einsum.
      *operands: arrays of any floating dtype.
      dtype: operands are cast to it first; None keeps them.
    """
    if dtype is not None:
        operands = tuple(x.astype(dtype) for x in operands)
    wide = state_dtype(*operands)
    spec, operands, shape = _drop_single_axes(spec, operands)

    def product(*operands):
        return jnp.einsum(
            spec, *operands, precision=lax.Precision.HIGHEST, preferred_element_type=wide
        )

    if all(x.dtype == wide for x in operands):
        out = product(*operands)
    else:
        # XLA's CPU backend refuses some products of bfloat16 into float32 (it depends on the
        # shapes); widened operands give the same numbers.
        out = lax.platform_dependent(
            *operands, cpu=lambda *xs: product(*(x.astype(wide) for x in xs)), default=product
        )
    return out if shape is None else out.reshape(shape)


def _drop_single_axes(spec: str, operands: tuple[jax.Array, ...]):
    """The einsum without axes of size 1, and the shape its result must take (None: as it is).

    Single axes (ungrouped heads) between batch and contracted axes keep XLA from seeing a plain
    batched matrix product, and each operand would be copied into one.
    """
    if "." in spec:
        return spec, operands, None
    inputs, output = spec.split("->")
    terms = inputs.split(",")
    size = {
        axis: n
        for term, x in zip(terms, operands, strict=True)
        for axis, n in zip(term, x.shape, strict=True)
    }
    single = "".join(axis for axis, n in size.items() if n == 1)
    dropped = str.maketrans("", "", single)
    operands = tuple(x.reshape([n for n in x.shape if n != 1]) for x in operands)
    terms = ",".join(term.translate(dropped) for term in terms)
    return f"{terms}->{output.translate(dropped)}", operands, [size[axis] for axis in output]


def varying_like(x: jax.Array, *references: jax.Array) -> jax.Array:
    """Marks a constant as varying over the mesh axes of `references` (inside `shard_map`)."""
    axes = set().union(*(_varying_axes(r) for r in references)) - _varying_axes(x)
    return lax.pcast(x, tuple(axes), to="varying") if axes else x


def _varying_axes(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def clean_log_decay(log_decay: jax.Array) -> jax.Array:
    """Replaces log-decays whose exponential is exactly 0 (-inf included) by a finite one."""
    return jnp.maximum(log_decay, jnp.asarray(_ZERO_DECAY, log_decay.dtype))


def lower_ones(size: int, dtype, *, strict: bool = False) -> jax.Array:
    """[size, size] ones on and below the diagonal (below it only when `strict`)."""
    return jnp.tril(jnp.ones((size, size), dtype), -1 if strict else 0)


@jax.custom_vjp
def range_sums(log_decay: jax.Array) -> jax.Array:
    """Sums of log-decays over every range of a chunk.

    Differences of one running sum would lose the digits of every range that follows a strong decay.
    Each log-decay is cut into multiples of ever finer powers of two, so coarse that all sums of one
    part are exact; what the last part rounds is below 2^-32. The gradient sums the ranges over a
    token (`straddling_sums`), for the same reason.

    Args:
      log_decay: [..., C], from `clean_log_decay`.

    Returns:
      [..., C, C] with entry (i, j) = sum of log_decay over j < r <= i; meaningless where i < j.
    """
    count, dtype = log_decay.shape[-1], log_decay.dtype
    digits = jnp.finfo(dtype).nmant
    parts, bound = [], -_ZERO_DECAY
    while count * bound * 2.0**-digits > 2.0**-32:
        grid = 2.0 ** math.ceil(math.log2(count * bound) - digits)
        part = jnp.round(log_decay / grid) * grid
        log_decay, bound = log_decay - part, grid / 2
        parts.append(part)
    ones = lower_ones(count, dtype)
    prefixes = [contract("...j,ij->...i", part, ones) for part in (*parts, log_decay)]
    return sum(x[..., :, None] - x[..., None, :] for x in prefixes)


range_sums.defvjp(
    lambda log_decay: (range_sums(log_decay), None),
    lambda _, cotangents: (straddling_sums(cotangents),),
)


def straddling_sums(pairs: jax.Array) -> jax.Array:
    """For each t, the sum of pairs[i, j] over i >= t > j: what the decay at t multiplies.

    Tiles that lie wholly on t's left or below it are summed first, so that only a tile's own
    rows and columns meet t one by one. Nothing is subtracted.

    Args:
      pairs: [..., C, C], read strictly below the diagonal only.

    Returns:
      [..., C].
    """
    chunk, batch = pairs.shape[-1], pairs.shape[:-2]
    width = math.isqrt(chunk - 1) + 1
    count = -(-chunk // width)
    pad = count * width - chunk
    pairs = jnp.where(lower_ones(chunk, bool, strict=True), pairs, 0)
    pairs = jnp.pad(pairs, [(0, 0)] * len(batch) + [(0, pad), (0, pad)])
    columns = jnp.sum(pairs.reshape(*batch, count, width, count, width), axis=-3)
    rows = jnp.sum(pairs.reshape(*batch, count * width, count, width), axis=-1)
    rows = rows.reshape(*batch, count, width, count)
    tiles = jnp.sum(rows, axis=-2)
    block = pairs.reshape(*batch, count, width, count, width)
    own = jnp.stack([block[..., i, :, i, :] for i in range(count)], axis=-3)
    below, within = lower_ones(count, pairs.dtype, strict=True), lower_ones(width, pairs.dtype)
    before = within - jnp.eye(width, dtype=pairs.dtype)
    # Tile rows I, tile columns J, and t at place s of tile b.
    whole = contract("...IJ,Ib,bJ->...b", tiles, below, below)
    left = contract("...IrJ,IJ,rs->...Is", rows, below, within)
    under = contract("...IJc,IJ,sc->...Js", columns, below, before)
    inside = contract("...brc,rs,sc->...bs", own, within, before)
    total = whole[..., None] + left + under + inside
    return total.reshape(*batch, count * width)[..., :chunk]


def suffix_sums(x: jax.Array) -> jax.Array:
    """[..., C] -> sum of x over i >= t."""
    return contract("...i,it->...t", x, lower_ones(x.shape[-1], x.dtype))


def prefix_sums_exclusive(x: jax.Array) -> jax.Array:
    """[..., C] -> sum of x over j < t."""
    return contract("...j,tj->...t", x, lower_ones(x.shape[-1], x.dtype, strict=True))


def unit_lower_inverse(strictly_lower: jax.Array) -> jax.Array:
    """Inverse of I + L by forward substitution on 16-wide blocks, merged pairwise.

    Products of powers of L would be cheaper and are useless: with repeated keys they lose every
    digit of float32.

    Args:
      strictly_lower: [..., C, C] float32 or float64, zero on and above the diagonal.

    Returns:
      [..., C, C], unit lower triangular.
    """
    chunk = strictly_lower.shape[-1]
    size = _SUBSTITUTION_BLOCK
    while size < chunk:
        size *= 2
    pad = size - chunk
    lower = jnp.pad(strictly_lower, [(0, 0)] * (strictly_lower.ndim - 2) + [(0, pad), (0, pad)])
    blocks = _diagonal_blocks(lower, _SUBSTITUTION_BLOCK)
    inverse = _substitute(blocks)
    width = _SUBSTITUTION_BLOCK
    while width < size:
        below = _diagonal_blocks(lower, 2 * width)[..., width:, :width]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -contract(
            "...ij,...jk->...ik", contract("...ij,...jk->...ik", second, below), first
        )
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        width *= 2
    return inverse[..., 0, :chunk, :chunk]


def _diagonal_blocks(matrix: jax.Array, width: int) -> jax.Array:
    """[..., size, size] -> [..., size // width, width, width]."""
    count = matrix.shape[-1] // width
    tiles = matrix.reshape(*matrix.shape[:-2], count, width, count, width)
    return jnp.stack([tiles[..., i, :, i, :] for i in range(count)], axis=-3)


def _substitute(blocks: jax.Array) -> jax.Array:
    """Row-by-row inverse of I + L for [..., w, w] blocks."""
    width = blocks.shape[-1]
    identity = jnp.broadcast_to(jnp.eye(width, dtype=blocks.dtype), blocks.shape)

    def row(i, inverse):
        # Rows from i on still hold the identity, and L is zero there.
        coefficients = lax.dynamic_index_in_dim(blocks, i, axis=-2)
        done = jnp.sum(jnp.swapaxes(coefficients, -1, -2) * inverse, axis=-2, keepdims=True)
        current = lax.dynamic_index_in_dim(inverse, i, axis=-2)
        return lax.dynamic_update_index_in_dim(inverse, current - done, i, axis=-2)

    return lax.fori_loop(1, width, row, varying_like(identity, blocks))
