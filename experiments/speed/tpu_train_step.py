# SPDX-License-Identifier: Apache-2.0
"""Compiles the training step of a recipe for TPU pods on a machine without one.

    python experiments/speed/tpu_train_step.py --out=experiments/speed/tpu_train_step.md

Needs libtpu (the extras tpu and dev have it). It is the trainer's own step, on the recipe's own
settings, one row a device and parameters over all devices.
"""

import argparse
import os
import pathlib
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tpu_hlo
from jax.experimental import topologies

import seqmix_kernels
from seqmix import config
from seqmix.training.experiment import Experiment
from seqmix.training.program import build_program
from seqmix_kernels.tpu import chips

CONFIG = "configs/hybrid_1.7b.gin"
TOPOLOGIES = ("v5e:4x4", "v6e:4x4", "v5p:2x2x4")
# Read by libtpu when it is loaded: it is not to ask a TPU VM what it is.
_SETTINGS = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

HEAD = """# The training step on TPU pods, compiled

Compiled by libtpu without a TPU; **nothing here has run**. The trainer's own step for
`{recipe}` ({parameters:,} parameters, AdamW, rows of {time:,} tokens, one a device), parameters and
optimizer over all devices, kernels inside `shard_map`. Written by `tpu_train_step.py`.

- **HBM** is what one device holds at most, of what a program can have there.
- **copies** are re-layout copies at a kernel: what lies between a kernel's large operands or
  results and what computes or reads them, and only moves values. Those of gates, a hundredth of
  the bytes, are **small**. Splash attention, four of the kernels, takes heads before tokens, so
  its arrays are copied. What else is left is q and k of the delta rule: asking XLA for the kernels'
  layout in their norms takes these away in a layer alone and makes more of them in the whole step
  (v5e: 30, 420 MiB; v6e: 32, 601 MiB).

"""


class Step(NamedTuple):
    """A compiled step.

    Attributes:
      compiled: the program.
      parameters: of the model.
      time: tokens of a row.
      devices: of the topology.
      seconds: to trace and to compile.
    """

    compiled: jax.stages.Compiled
    parameters: int
    time: int
    devices: int
    seconds: float


def compile_step(recipe: str, topology: str, overrides: tuple[str, ...] = ()) -> Step:
    """Compiles the training step of a recipe for a topology.

    Args:
      recipe: path of a .gin file.
      topology: libtpu's name of it, such as 'v5e:4x4'.
      overrides: of the recipe, such as 'HybridLM.layers=4'.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    devices = list(described.devices)
    mesh = (f"Trainer.batch_size={len(devices)}", f"Mesh.fsdp={len(devices)}")
    experiment = config.load([recipe], overrides=[*mesh, *overrides]).build(Experiment)
    start = time.perf_counter()
    program = build_program(experiment, np.ones(experiment.model.vocabulary), devices)
    state = jax.tree.map(
        lambda array, place: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place),
        *(program.abstract, program.shardings),
    )
    tokens = experiment.data.sequence_length
    row = jax.ShapeDtypeStruct((len(devices), tokens + 1), jnp.int32, sharding=program.batch)
    batch = dict.fromkeys(("tokens", "segment_ids", "positions"), row)
    # The mesh tells Pallas which chip it is for: it would ask this machine's device.
    on_chip = jax.sharding.use_abstract_mesh(program.mesh.abstract_mesh)
    with seqmix_kernels.compile_for("tpu"), on_chip:
        traced = program.train_step.trace(state, batch)
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    parameters = sum(p.size for p in jax.tree.leaves(program.abstract.params))
    return Step(compiled, parameters, tokens, len(devices), time.perf_counter() - start)


def hbm(compiled: jax.stages.Compiled) -> int:
    """Bytes of HBM that one device holds at most."""
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + results


def main() -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--topologies", nargs="+", default=TOPOLOGIES)
    options = parser.parse_args()
    heads = ["topology", "HBM", "of", "kernels", "copies", "small", "compiled in"]
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " --: |" * (len(heads) - 1)]
    for topology in options.topologies:
        step = compile_step(options.config, topology)
        chip = chips.CHIPS[topology.partition(":")[0]]
        found = tpu_hlo.relayouts(step.compiled.as_text())
        cells = (
            topology,
            f"{hbm(step.compiled) / chips.GIB:.2f} GiB",
            f"{chip.hbm / chips.GIB:.2f} GiB",
            str(found.kernels),
            f"{len(found.large)} ({sum(c.size for c in found.large) / chips.MIB:.0f} MiB)",
            f"{len(found.small)} ({sum(c.size for c in found.small) / chips.MIB:.1f} MiB)",
            f"{step.seconds:.0f} s",
        )
        lines.append("| " + " | ".join(cells) + " |")
        head = HEAD.format(recipe=options.config, parameters=step.parameters, time=step.time)
        options.out.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
