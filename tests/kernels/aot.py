# SPDX-License-Identifier: Apache-2.0
"""Compiling for TPUs ahead of time, on a machine without one, by libtpu's compiler."""

import functools
import importlib.util
import os

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import seqmix_kernels
from seqmix_kernels.tpu import chips

# Read by libtpu when it is loaded, at the first topology: no TPU VM is asked what it is, several test
# processes may load it, and it writes no log files.
_SETTINGS = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_LOG_DIR": "disabled",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, which has the compiler for TPUs, is not installed",
)


@functools.cache
def devices(topology: str) -> tuple:
    """The devices of a topology, such as 'v5e:4x4'; for compiling only."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    return tuple(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)


def on_chip(chip: str, tree):
    """The arrays of a tree as shapes on one chip.

    Args:
      chip: a name of `chips.CHIPS`.
      tree: of anything with a shape and a dtype.
    """
    mesh = jax.sharding.Mesh(np.array(devices(chips.CHIPS[chip].single)[:1]), ("one",))
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding), tree
    )


def compile_on(chip: str, function, *arguments) -> jax.stages.Compiled:
    """Compiles ``function(*arguments)``, with the TPU's kernels in it, for one chip.

    Args:
      chip: a name of `chips.CHIPS`.
      function: traced for the TPU.
      *arguments: trees of anything with a shape and a dtype.
    """
    with seqmix_kernels.compile_for("tpu"):
        traced = jax.jit(function).trace(*on_chip(chip, arguments))
    return traced.lower(lowering_platforms=("tpu",)).compile()
