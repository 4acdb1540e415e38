# SPDX-License-Identifier: Apache-2.0
"""Sharding rules: the batch over both mesh axes, each parameter over `fsdp` along one dimension."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over every device, the other axes whole."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def parameter_spec(shape: tuple[int, ...], fsdp: int, *, stacked: bool = False) -> PartitionSpec:
    """The rule for one parameter: its largest dimension divisible by `fsdp` is sharded, else none.

    Args:
      shape: the parameter's shape.
      fsdp: size of the mesh axis.
      stacked: the first axis is the period axis of scanned layers; it is never sharded, since the
        scan takes one slice of it at a time.
    """
    axes = range(1 if stacked else 0, len(shape))
    candidates = [axis for axis in axes if shape[axis] % fsdp == 0 and shape[axis] >= fsdp]
    if fsdp == 1 or not candidates:
        return PartitionSpec()
    largest = max(candidates, key=lambda axis: shape[axis])
    return PartitionSpec(*([None] * largest), "fsdp")


def parameter_shardings(
    mesh: Mesh, params: Mapping[str, Any], stacked: Mapping[str, bool]
) -> dict[str, NamedSharding]:
    """{name: sharding} for {name: array or ShapeDtypeStruct}."""
    fsdp = mesh.shape["fsdp"]
    return {
        name: NamedSharding(mesh, parameter_spec(value.shape, fsdp, stacked=stacked[name]))
        for name, value in params.items()
    }


def optimizer_shardings(mesh: Mesh, optimizer: Any, params: Mapping[str, NamedSharding]) -> Any:
    """Shardings of an optimizer's state: what belongs to a parameter lies as the parameter does.

    Args:
      optimizer: the state, arrays or ShapeDtypeStructs; moments are dicts {parameter name: array}.
      params: {name: sharding} of the parameters.
    """

    def rule(path, leaf):
        name = path[-1].key if path and isinstance(path[-1], jax.tree_util.DictKey) else None
        return params[name] if name in params and leaf.ndim else replicated(mesh)

    return jax.tree_util.tree_map_with_path(rule, optimizer)


def put_batch(batch: Mapping[str, np.ndarray], sharding: NamedSharding) -> dict[str, jax.Array]:
    """Places this process's rows of a batch on the devices; all processes' rows are the batch."""
    if jax.process_count() == 1:
        return jax.device_put(dict(batch), sharding)
    return {
        name: jax.make_array_from_process_local_data(sharding, array)
        for name, array in batch.items()
    }
