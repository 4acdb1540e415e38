# SPDX-License-Identifier: Apache-2.0
"""What a kernel of a matrix-state family is built for."""

from typing import Any, NamedTuple


class Heads(NamedTuple):
    """How heads map onto states; see `seqmix.mixers._checks.Heads`.

    Attributes:
      keys: key heads h.
      values: states per key head r.
      queries: query heads per state x; 1 when values > 1.
    """

    keys: int
    values: int
    queries: int

    @property
    def states(self) -> int:
        """Number of states, and of gates."""
        return self.keys * self.values

    @property
    def outputs(self) -> int:
        """Number of output heads."""
        return self.keys * self.values * self.queries


class Options(NamedTuple):
    """Static options of a call.

    Attributes:
      heads: grouping of the heads.
      scale: factor on the output.
      out_dtype: dtype of the output.
      chunk_size: what the caller asked for, None for the kernel's own.
    """

    heads: Heads
    scale: float
    out_dtype: Any
    chunk_size: int | None = None
