# SPDX-License-Identifier: Apache-2.0
"""How the scalar-decay kernels cut their work up over the chip."""

from typing import NamedTuple

from seqmix_kernels.gpu._common import MULTIPROCESSORS
from seqmix_kernels.gpu.calls import WIDTH
from seqmix_kernels.options import Heads


class Plan(NamedTuple):
    """How the work is cut up.

    Attributes:
      heads: grouping of the heads.
      key: K, a multiple of 64.
      value: V, a multiple of 64.
      chunks: chunks of a row.
      pieces: pieces of a row.
      units: units of a block, 1 or 2.
      shared: whether the two units of a block have the same q and k.
      whole: whether they are columns of one output head, with the same decays too.
    """

    heads: Heads
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
    def blocks(self) -> int:
        """Blocks of a piece."""
        return self.heads.outputs * self.columns // self.units

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


def plan(
    heads: Heads, batch: int, chunks: int, key: int, value: int, pieces: int | None = None
) -> Plan:
    """The cut of a call: pairs of units where their number is even, pieces until the chip is full.

    Args:
      heads: grouping of the heads.
      batch: rows.
      chunks: chunks of a row.
      key: K, a multiple of 64.
      value: V, a multiple of 64.
      pieces: of a row; None to choose.
    """
    columns = value // WIDTH
    total = heads.outputs * columns
    # Neighbouring units are of one output head, or of two that read one q head, or have their own.
    whole = columns % 2 == 0
    shared = whole or (heads.queries == 1 and heads.values * columns % 2 == 0)
    units = 2 if total % 2 == 0 and (shared or key == WIDTH) else 1  # as shared memory allows
    if units == 1:
        whole = shared = True
    blocks = batch * total // units
    if pieces is None:
        pieces = max(1, min(MULTIPROCESSORS // blocks, chunks // 4))
        pieces = -(-chunks // -(-chunks // pieces))  # no empty piece
    return Plan(heads, key, value, chunks, pieces, units, shared, whole)
