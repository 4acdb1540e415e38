# SPDX-License-Identifier: Apache-2.0
"""What the kernels' bounds and tests take as known of each TPU.

A device is what JAX calls one: a whole chip, but on tpu7x one of a chip's two cores. The sources:

- FLOP/s and bandwidth: the pages v5e, v5p, v6e and tpu7x of Google's TPU documentation
  (docs.cloud.google.com/tpu/docs), halved for tpu7x. JAX's own table (jax._src.tpu_info) agrees but
  for the bandwidth of v5p, where it has 2.46e12.
- clock: what makes the FLOP/s with four matrix units a core (older pages of v6e say four, the
  newest two); the vector unit has four arithmetic slots for 8 x 128 lanes
  (jax-ml.github.io/scaling-book/tpus).
- cores, VMEM: JAX's table; libtpu refuses a kernel that takes more.
- HBM and the scope of VMEM: what libtpu 0.0.51 lets a program and a kernel take; it names the
  number where it refuses one.
"""

from typing import NamedTuple

MIB, GIB = 2**20, 2**30


class Chip(NamedTuple):
    """One device of a kind of TPU.

    Attributes:
      topology: libtpu's name of a small topology of it.
      cores: TensorCores that share a kernel's parallel grid.
      flops: bfloat16 FLOP/s of the matrix units; float32 products take several passes.
      vector: elementwise operations/s of the vector units.
      bandwidth: bytes/s of HBM.
      hbm: bytes of HBM that a program can have.
      vmem: bytes of VMEM of a core.
      scope: bytes of VMEM that a kernel gets where it does not ask for more.
      matrix_unit: rows and columns of a matrix unit, which smaller operands leave partly idle.
    """

    topology: str
    cores: int
    flops: float
    vector: float
    bandwidth: float
    hbm: int
    vmem: int
    scope: int
    matrix_unit: int

    @property
    def balance(self) -> float:
        """FLOPs a byte of HBM traffic below which a kernel is bound by memory."""
        return self.flops / self.bandwidth


_SLOTS = 4 * 8 * 128
CHIPS = {
    "v5e": Chip(
        "v5e:2x2", 1, 197e12, 1.5e9 * _SLOTS, 819e9, int(15.75 * GIB), 128 * MIB, 16 * MIB, 128
    ),
    "v5p": Chip(
        "v5p:2x2x1",
        2,
        459e12,
        2 * 1.75e9 * _SLOTS,
        2765e9,
        int(95.73 * GIB),
        64 * MIB,
        16 * MIB,
        128,
    ),
    "v6e": Chip(
        "v6e:2x2", 1, 918e12, 1.75e9 * _SLOTS, 1640e9, int(31.24 * GIB), 128 * MIB, 32 * MIB, 256
    ),
    "tpu7x": Chip(
        "tpu7x:2x2x1",
        1,
        2307e12 / 2,
        2.2e9 * _SLOTS,
        7380e9 / 2,
        int(94.74 * GIB),
        64 * MIB,
        32 * MIB,
        256,
    ),
}
