# SPDX-License-Identifier: Apache-2.0
"""What the delta rule's GPU kernels share: products that add to a tile, decays, cuts of work."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from seqmix_kernels.gpu import _common, gates
from seqmix_kernels.gpu._common import (
    CHUNK,
    COLS,
    MULTIPROCESSORS,
    ROWS,
    accumulated,
    copy_in,
    load,
    per_column,
    per_row,
    plgpu,
    token_numbers,
)
from seqmix_kernels.gpu.calls import WIDTH
from seqmix_kernels.options import Heads

C = CHUNK
PIECE_CHUNKS = 16
"""A piece has at least as many chunks: finding its transition costs as much as going through it."""
SQUARE = (C, C)
VECTORS = 4
"""Of a chunk, in `chunk_vectors`, in this order:"""
_SUMS, _ENTRY, _LEAVE, _STRENGTH = range(VECTORS)


def products(*pairs: tuple[Any, Any]) -> list[jax.Array]:
    """Products ``a @ b``, issued together and awaited once."""
    return accumulated(*(((a.shape[0], b.shape[1]), [(a, b)]) for a, b in pairs))


def matmul(a: Any, b: Any) -> jax.Array:
    """``a @ b``."""
    return products((a, b))[0]


def chunk_vectors(log_decay: jax.Array, beta: jax.Array, run: jax.Array | None) -> jax.Array:
    """What the kernels read of the gates, a token a number.

    Args:
      log_decay: [B, T, H] float32, natural log, <= 0 and finite.
      beta: [B, T, H] float32.
      run: [B, T] int32 document numbers, or None.

    Returns:
      [B, H, chunks, 4, 64] float32: sums of log2-decays from the chunk's start, the decays from
      there and to the chunk's end, and beta. A decay from one token to another comes from the
      difference of two sums, which is within 2^-10 of its exponent even if all decays are 2^-256.
    """
    log2 = gates.chunk_log2(log_decay, run)
    sums = jnp.sum(jnp.where(jnp.tril(jnp.ones((C, C), bool)), log2[..., None, :], 0.0), axis=-1)
    decays = jnp.exp2(sums), jnp.exp2(sums[..., -1:] - sums)
    return jnp.stack([sums, *decays, gates.to_chunks(beta)], axis=3)


def copy_vectors(source, into, barrier) -> None:
    """Starts two copies of a chunk's vectors: what is read by row and by column lies in two places.

    Args:
      source: [VECTORS, 64] float32 in device memory.
      into: [2, VECTORS, 64] float32 shared memory.
      barrier: gets the arrivals.
    """
    for i in range(2):
        copy_in(source, into.at[i], barrier)


def _read(vectors, which, layout):
    return load(vectors.at[0 if layout is ROWS else 1, which], layout=layout)


def entry(vectors, layout) -> jax.Array:
    """Decays from the chunk's start to each token; `layout` is ROWS or COLS."""
    return _read(vectors, _ENTRY, layout)


def leave(vectors, layout) -> jax.Array:
    """Decays from each token to the chunk's end."""
    return _read(vectors, _LEAVE, layout)


def through(vectors) -> jax.Array:
    """The decay across the chunk."""
    return vectors[0, _ENTRY, C - 1]


def strength(vectors, layout) -> jax.Array:
    """The write strengths, beta."""
    return _read(vectors, _STRENGTH, layout)


def lower_decay(vectors, numbers=None, *, strict: bool) -> jax.Array:
    """[i, j] decay from token j to token i, zero where j is later, or i itself if `strict`.

    Args:
      vectors: of a chunk, in shared memory; see `copy_vectors`.
      numbers: see `rows_and_columns`.
      strict: whether the diagonal is zero too.
    """
    power = per_row(_read(vectors, _SUMS, ROWS), SQUARE)
    power = power - per_column(_read(vectors, _SUMS, COLS), SQUARE)
    return jnp.where(lower_mask(numbers, strict=strict), jnp.exp2(power), 0.0)


def upper_decay(vectors, *, strict: bool) -> jax.Array:
    """The transpose of `lower_decay`: [j, i]."""
    power = per_column(_read(vectors, _SUMS, COLS), SQUARE)
    power = power - per_row(_read(vectors, _SUMS, ROWS), SQUARE)
    return jnp.exp2(jnp.where(upper_mask(strict=strict), power, -jnp.inf))


def zero_rows() -> jax.Array:
    """Zeros, one a row."""
    return plgpu.layout_cast(jnp.zeros((C,), jnp.float32), ROWS)


def unknown_zero(vectors) -> jax.Array:
    """`_common.unknown_zero`, of vectors as in `lower_decay`."""
    return _common.unknown_zero(vectors[0, _SUMS, 0])


def number_tokens(numbers) -> None:
    """Writes 0, 1, ..., 63 to both rows of float32 shared memory [2, 64]."""
    for i in range(2):
        numbers.at[i][...] = plgpu.broadcasted_iota(jnp.float32, (C,), 0, layout=ROWS)


def rows_and_columns(numbers=None) -> tuple[jax.Array, jax.Array]:
    """Row and column numbers of a [64, 64] tile, as float32; to be called where they are used.

    Behind a barrier: the compiler would otherwise make every mask before the loop over the chunks,
    and keep a register an element for each.

    Args:
      numbers: shared memory that `number_tokens` has filled, where even that is not enough:
        masks of these are made after the last barrier, and not before what is waited for.
    """
    if numbers is not None:
        rows, columns = load(numbers.at[0], layout=ROWS), load(numbers.at[1], layout=COLS)
        return per_row(rows, SQUARE), per_column(columns, SQUARE)
    return token_numbers()


def lower_mask(numbers=None, *, strict: bool) -> jax.Array:
    """[i, j] whether i >= j, or i > j."""
    row, column = rows_and_columns(numbers)
    return row > column if strict else row >= column


def upper_mask(numbers=None, *, strict: bool) -> jax.Array:
    """[j, i] whether i >= j, or i > j."""
    row, column = rows_and_columns(numbers)
    return column > row if strict else column >= row


class Plan(NamedTuple):
    """How the work is cut up.

    Attributes:
      heads: grouping of the heads.
      key: K, 64 or 128.
      value: V, a multiple of 64.
      chunks: chunks of a row.
      pieces: pieces of a row.
      units: units of a block, 1 or 2: columns of one head.
    """

    heads: Heads
    key: int
    value: int
    chunks: int
    pieces: int
    units: int

    @property
    def columns(self) -> int:
        """Units of an output head."""
        return self.value // WIDTH

    @property
    def blocks(self) -> int:
        """Blocks of a piece."""
        return self.heads.outputs * self.columns // self.units

    @property
    def piece_chunks(self) -> int:
        """Chunks of a piece; the last may have fewer."""
        return -(-self.chunks // self.pieces)


def plan(heads: Heads, batch: int, chunks: int, key: int, value: int) -> Plan:
    """The cut for a call: pairs of units where they fill the chip, pieces where they do not."""
    columns = value // WIDTH
    total = heads.outputs * columns
    units = 2 if columns % 2 == 0 else 1
    if units == 2 and batch * total <= MULTIPROCESSORS and chunks < 256:
        units = 1  # pieces cost a pass over the row: better blocks of one unit
    blocks = batch * total // units
    pieces = max(1, min(MULTIPROCESSORS // blocks, chunks // PIECE_CHUNKS))
    pieces = -(-chunks // -(-chunks // pieces))  # no empty piece
    return Plan(heads, key, value, chunks, pieces, units)
