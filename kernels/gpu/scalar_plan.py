# SPDX-License-Identifier: Apache-2.0
"""How the scalar-decay kernels cut their work up over the chip.

The family is linear in pairs (q, k), so keys wider than `WIDEST` are cut into slices that are heads
of their own with the same values and decays, whose outputs are added.
"""

from typing import Any, NamedTuple

from jax import lax

from seqmix_kernels.gpu._common import MULTIPROCESSORS
from seqmix_kernels.gpu.calls import WIDTH
from seqmix_kernels.options import Heads

WIDEST = 2 * WIDTH
"""Keys of a slice at most: a warpgroup keeps the state of a unit in registers."""


class Place(NamedTuple):
    """Where a unit reads and writes: head numbers, and its first value column.

    Attributes:
      part: output head and slice, in the order (key head, slice, value, query).
      kept: state and slice, in the order (key head, slice, value).
      out: output head.
      state: head of the values, decays and strengths.
      key: key head and slice.
      query: query head and slice.
      column: first of the unit's value columns.
    """

    part: Any
    kept: Any
    out: Any
    state: Any
    key: Any
    query: Any
    column: Any


class Plan(NamedTuple):
    """How the work is cut up.

    Attributes:
      heads: grouping of the heads.
      slices: slices of the keys of a head.
      key: keys of a slice, 64 or 128.
      value: V, a multiple of 64.
      chunks: chunks of a row.
      pieces: pieces of a row.
      units: units of a block, 1 or 2.
      shared: whether the two units of a block have the same q and k.
      whole: whether they are columns of one output head, with the same decays too.
    """

    heads: Heads
    slices: int
    key: int
    value: int
    chunks: int
    pieces: int
    units: int
    shared: bool
    whole: bool

    @property
    def columns(self) -> int:
        """Units of an output head."""
        return self.value // WIDTH

    @property
    def parts(self) -> int:
        """Output heads times slices."""
        return self.heads.outputs * self.slices

    @property
    def kept(self) -> int:
        """States times slices."""
        return self.heads.states * self.slices

    @property
    def blocks(self) -> int:
        """Blocks of a piece."""
        return self.parts * self.columns // self.units

    @property
    def keysets(self) -> int:
        """Tiles of q and of k that a block holds per chunk."""
        return 1 if self.shared else self.units

    @property
    def sets(self) -> int:
        """Output heads, and so sets of decays, of a block."""
        return 1 if self.whole else self.units

    @property
    def piece_chunks(self) -> int:
        """Chunks of a piece; the last may have fewer."""
        return -(-self.chunks // self.pieces)


def place(plan: Plan, block: Any, unit: Any) -> Place:
    """The place of a block's unit; the numbers may be traced."""
    heads, number = plan.heads, block * plan.units + unit
    part, column = lax.div(number, plan.columns), lax.rem(number, plan.columns) * WIDTH
    of_slice = heads.values * heads.queries
    key, within = lax.div(part, of_slice), lax.rem(part, of_slice)
    head, cut = lax.div(key, plan.slices), lax.rem(key, plan.slices)
    value = lax.div(within, heads.queries)
    query = (head * heads.queries + lax.rem(within, heads.queries)) * plan.slices + cut
    return Place(
        part=part,
        kept=key * heads.values + value,
        out=head * of_slice + within,
        state=head * heads.values + value,
        key=key,
        query=query,
        column=column,
    )


def plan(
    heads: Heads, batch: int, chunks: int, key: int, value: int, pieces: int | None = None
) -> Plan:
    """The cut of a call: pairs of units where their number is even, pieces until the chip is full.

    Args:
      heads: grouping of the heads.
      batch: rows.
      chunks: chunks of a row.
      key: K, 64 or a multiple of 128.
      value: V, a multiple of 64.
      pieces: of a row; None to choose.
    """
    slices = -(-key // WIDEST)
    key //= slices
    columns = value // WIDTH
    total = heads.outputs * slices * columns
    # Neighbouring units are of one output head, or of two that read one q head, or have their own.
    whole = columns % 2 == 0
    shared = heads.values * columns % 2 == 0
    units = 2 if total % 2 == 0 and (shared or key == WIDTH) else 1  # as shared memory allows
    if units == 1:
        whole = shared = True
    blocks = batch * total // units
    if pieces is None:
        pieces = max(1, min(MULTIPROCESSORS // blocks, chunks // 4))
        pieces = -(-chunks // -(-chunks // pieces))  # no empty piece
    return Plan(heads, slices, key, value, chunks, pieces, units, shared, whole)
