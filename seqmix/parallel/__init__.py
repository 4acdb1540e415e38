# SPDX-License-Identifier: Apache-2.0
"""Device meshes and sharding rules."""

from seqmix.parallel.mesh import MeshConfig, initialize_distributed, make_mesh
from seqmix.parallel.sharding import (
    batch_sharding,
    optimizer_shardings,
    parameter_shardings,
    parameter_spec,
    put_batch,
    replicated,
)

__all__ = [
    "MeshConfig",
    "batch_sharding",
    "initialize_distributed",
    "make_mesh",
    "optimizer_shardings",
    "parameter_shardings",
    "parameter_spec",
    "put_batch",
    "replicated",
]
