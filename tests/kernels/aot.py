# SPDX-License-Identifier: Apache-2.0
"""Compiling for TPUs ahead of time, on a machine without one, by libtpu's compiler."""

import functools
import importlib.util
import math
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

import seqmix_kernels
from seqmix.mixers import _pallas
from seqmix_kernels.tpu import chips, shapes

# Read by libtpu when it is loaded, at the first topology: no TPU VM is asked what it is, several
# test processes may load it, and it writes no log files.
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


def mesh_of(chip: str) -> jax.sharding.Mesh:
    """One chip of a kind, as a mesh.

    Args:
      chip: a name of `chips.CHIPS`.
    """
    return jax.sharding.Mesh(np.array(devices(chips.CHIPS[chip].topology)[:1]), ("one",))


def compile_on(chip: str, function, *arguments) -> jax.stages.Compiled:
    """Compiles ``function(*arguments)``, with the TPU's kernels in it, for one chip.

    Args:
      chip: a name of `chips.CHIPS`.
      function: traced for the TPU. Its arguments and results are row-major, as inside a larger
        program whose kernels ask for that; left to itself XLA also takes other orders.
      *arguments: trees of anything with a shape and a dtype.
    """
    mesh = mesh_of(chip)
    place = NamedSharding(mesh, PartitionSpec())

    def row_major(array):
        return Format(Layout(tuple(range(array.ndim))), place)

    # The mesh tells Pallas which chip it is for: it would ask this machine's device.
    with seqmix_kernels.compile_for("tpu"), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        results = jax.eval_shape(function, *arguments)
        jitted = jax.jit(
            function,
            in_shardings=jax.tree.map(row_major, arguments),
            out_shardings=jax.tree.map(row_major, results),
        )
        lowered = jitted.trace(*arguments).lower(lowering_platforms=("tpu",))
    return lowered.compile()


def vmem_used(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes of VMEM that each kernel of a program takes, by the kernel's name: the most of any."""
    used: dict[str, int] = {}
    for line in compiled.as_text().splitlines():
        if 'custom_call_target="tpu_custom_call"' in line:
            name = re.search(r'op_name="[^"]*?(\w+)\)*/pallas_call"', line)[1]
            scope = re.search(r'"used_scoped_memory_configs":\[([^\]]*)\]', line)[1]
            sizes = re.findall(r'"memory_space":"1","offset":"(\d+)","size":"(\d+)"', scope)
            used[name] = max([used.get(name, 0), *(int(size) for _, size in sizes)])
    return used


def passes(shape: shapes.Shape):
    """Forward and backward pass of a kernel family at a shape, as in a layer.

    Arrays of tokens come and go as a layer has them, [B, T, heads * width], but B and
    C of a selective scan (and their gradients) as [B, N, T]: XLA gives arrays of few channels that
    order by itself, and as arguments of a program they would be copied into it.

    Returns:
      The function, its arguments, and what it keeps from forward to backward.
    """
    call = shape.call()
    with seqmix_kernels.compile_for("tpu"):
        forward = seqmix_kernels.family(shape.family).forward
        out, final, kept = jax.eval_shape(
            lambda *arrays: forward(call.options, False, *arrays, keep=True),
            *(call.shared, *call.arrays, call.state, call.run),
        )

    def function(shared, arrays, state, run, d_out, d_final):
        arrays = tuple(
            jnp.swapaxes(a, 1, 2) if turned(i) else a.reshape(b.shape)
            for i, (a, b) in enumerate(zip(arrays, call.arrays, strict=True))
        )
        run_kernel = functools.partial(_pallas.run, shape.family, call.options)
        (y, final), backward = jax.vjp(
            lambda shared, arrays, state: run_kernel(arrays, state, run, shared),
            *(shared, arrays, state),
        )
        d_shared, d_arrays, d_state = backward((d_out.reshape(out.shape), d_final))
        d_arrays = tuple(outside(i, d) for i, d in enumerate(d_arrays))
        return _flat(y), final, d_shared, d_arrays, d_state

    def turned(i):
        return shape.family == "selective_scan" and i in (2, 3)

    def outside(i, array):
        return jnp.swapaxes(array, 1, 2) if turned(i) else _flat(array)

    flat = [jax.eval_shape(functools.partial(outside, i), a) for i, a in enumerate(call.arrays)]
    flat = (*flat, jax.eval_shape(_flat, out))
    return function, (call.shared, flat[:-1], call.state, call.run, flat[-1], final), kept


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:2], -1)


def tiled_size_of(tree) -> int:
    """Bytes that arrays take in a TPU's memory: their last two axes are whole tiles of 8 x 128."""

    def whole(size: int, tile: int) -> int:
        return -(-size // tile) * tile

    return sum(
        math.prod((*x.shape[:-2], whole(x.shape[-2], 8), whole(x.shape[-1], 128)))
        * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )
