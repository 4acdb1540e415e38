# SPDX-License-Identifier: Apache-2.0
"""The device mesh: axes `data` (replicas) and `fsdp` (sharded parameters).

One device is a 1 x 1 mesh, so that everything runs through the same code.
"""

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from seqmix import config

AXES = ("data", "fsdp")


@config.configurable("Mesh")
@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; -1 (at most one) takes the devices the other leaves.

    Attributes:
      data: replicas of the model; each takes its part of the batch.
      fsdp: devices that share one copy of parameters and optimizer state, and its part of the
        batch.
    """

    data: int = -1
    fsdp: int = 1

    def __post_init__(self):
        for name in AXES:
            value = getattr(self, name)
            if value < 1 and value != -1:
                raise ValueError(f"Mesh.{name} must be >= 1, or -1 for the rest, got {value}")
        if self.data == self.fsdp == -1:
            raise ValueError(
                "Mesh.data and Mesh.fsdp are both -1: at most one axis can take the rest"
            )


def make_mesh(mesh: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds the mesh over `devices` (default: all devices of all processes).

    Raises:
      ValueError: the axis sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = [mesh.data, mesh.fsdp]
    known = max(1, -sizes[0] * sizes[1] if -1 in sizes else sizes[0] * sizes[1])
    if -1 in sizes and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if sizes[0] * sizes[1] != len(devices):
        raise ValueError(
            f"Mesh.data={mesh.data}, Mesh.fsdp={mesh.fsdp}: the product must be the number of "
            f"devices, {len(devices)}"
        )
    return jax.make_mesh(
        tuple(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
    )


def initialize_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Joins the processes of a multi-host run; call it before anything touches a device.

    On TPU pods and under SLURM, Open MPI or Kubernetes the arguments are found by JAX itself
    (`jax.distributed.initialize`). A second call does nothing.
    """
    if not jax.distributed.is_initialized():
        jax.distributed.initialize(coordinator_address, num_processes, process_id)
