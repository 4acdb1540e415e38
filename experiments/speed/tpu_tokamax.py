# SPDX-License-Identifier: Apache-2.0
"""KDA by our TPU kernels and by tokamax's: the same numbers, and what each compiled program holds.

    python experiments/speed/tpu_tokamax.py --out=experiments/speed/tpu_tokamax.md

Needs tokamax (0.0.17 was compared; it is no dependency of seqmix) and libtpu. Nothing runs on a
TPU: results come from Pallas's interpreter, memory from programs that libtpu compiles.
"""

import argparse
import contextlib
import os
import pathlib
from collections.abc import Iterator
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import tpu_hlo
from jax._src import tpu_info
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tokamax._src.ops.kda import pallas_mosaic_tpu

import seqmix_kernels
from seqmix import mixers
from seqmix_kernels.tpu import chips, shapes

SMALL = (1, 128, 2, 128)  # rows, tokens, heads, width
LARGE = shapes.SHAPES["kimi_linear"]
CHIPS = ("v6e", "tpu7x")  # tokamax takes no older ones
# Read by libtpu when it is loaded: it is not to ask a TPU VM what it is.
_SETTINGS = {"TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_WORKER_HOSTNAMES": "localhost"}
_SETTINGS |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

HEAD = """# KDA beside tokamax

tokamax {tokamax} has the only other TPU kernel of this mixer that trains. **Nothing here ran on a
TPU**: errors are from Pallas's interpreter, memory from programs compiled by libtpu. Written by
`tpu_tokamax.py`. Rows without documents, since tokamax moves every document to a multiple of 64
tokens in HBM first.

## The same inputs, the same results

Relative error (L2) against the float64 recurrence; {small}.

"""

MEMORY = """
## What the compiled program holds

Forward and backward; {large}, bfloat16, MiB. **own layout**: arrays arrive as the kernels read
them. **projections**: they come and go [B, T, heads x width], as a layer has them. **temporary** is
what the program holds besides arguments and results. **moved** is what its instructions read and
write in HBM, a kernel its operands and results once; what XLA keeps in VMEM does not count. Ours is
`mixers.kda` whole: it bounds log-decays from below before the kernel, which here holds them and
their gradient once more (a layer's own fusion makes them so anyway).

"""


def main() -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    rows, tokens, heads, width = SMALL
    small = f"{rows} row of {tokens} tokens, {heads} heads of width {width}, float32 inputs"
    h = LARGE.heads.keys
    large = f"{LARGE.rows} rows of {LARGE.time} tokens, {h} heads of width {LARGE.key}"
    text = HEAD.format(tokamax=metadata.version("tokamax"), small=small) + errors()
    options.out.write_text(text + MEMORY.format(large=large) + memory())


def tokamax(q, k, v, log_decay, beta):
    """tokamax's kernel on our layout, [B, T, H, K] and [B, H, K, V]."""
    out, state = tokamax_own(*(jnp.moveaxis(x, 2, 0) for x in (q, k, v, log_decay, beta)))
    return jnp.moveaxis(out, 0, 2), state


def tokamax_own(q, k, v, gate, beta):
    """tokamax's kernel on [H, B, T, K]; the state as ours."""
    operation = pallas_mosaic_tpu.PallasMosaicTpuKimiDeltaAttention(bypass_device_check=True)
    scale = q.shape[-1] ** -0.5
    out, state = operation(q, k, v, gate, beta, scale=scale, output_final_state=True)
    return out, state[:, 0]


def ours(q, k, v, log_decay, beta):
    """Our kernel."""
    return mixers.kda(q, k, v, log_decay, beta, impl="pallas")


def with_gradients(function):
    """(arrays, cotangents) -> results and the gradients of all arrays."""

    def both(arrays, cotangents):
        results, backward = jax.vjp(function, *arrays)
        return *results, *backward(cotangents)

    return both


def errors() -> str:
    """The first table."""
    rng = np.random.default_rng(0)
    rows, _, heads, width = SMALL
    q, k, v = (rng.normal(size=SMALL) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    decay, beta = -np.exp(rng.normal(size=SMALL) - 3), 1 / (1 + np.exp(-rng.normal(size=SMALL[:3])))
    arrays = tuple(x.astype(np.float32) for x in (q, k, v, decay, beta))
    cotangents = tuple(
        rng.normal(size=s).astype(np.float32) for s in (SMALL, (rows, heads, width, width))
    )
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (arrays, cotangents))

        def recurrent(*arrays):
            return mixers.kda(*arrays, impl="recurrent")

        exact = jax.tree.map(np.asarray, jax.jit(with_gradients(recurrent))(*wide))
    with seqmix_kernels.compile_for("tpu", interpret="plain"):
        found = {"ours": jax.jit(with_gradients(ours))(arrays, cotangents)}
    with _interpreted():
        found["tokamax"] = jax.jit(with_gradients(tokamax))(arrays, cotangents)
    names = ["out", "state", "dq", "dk", "dv", "d log_decay", "d beta"]
    lines = ["| | " + " | ".join(names) + " |", "| --- |" + " --: |" * len(names)]
    for name, results in found.items():
        cells = [
            f"{np.linalg.norm(x - y) / np.linalg.norm(y):.1e}"
            for x, y in zip(map(np.asarray, results), exact, strict=True)
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def _interpreted() -> Iterator[None]:
    """tokamax's kernels in Pallas's interpreter; they ask which TPU this machine has."""
    version = tpu_info.ChipVersion.TPU_V6E
    tpu_info.registry["cpu"] = lambda: tpu_info.get_tpu_info_for_chip(version, 1)
    os.environ["PALLAS_INTERPRET"] = "1"
    try:
        yield
    finally:
        del tpu_info.registry["cpu"], os.environ["PALLAS_INTERPRET"]


def memory() -> str:
    """The second table."""
    heads = ["chip", "kernels", "arrays", "arguments", "results", "temporary", "moved"]
    lines = ["| " + " | ".join(heads) + " |", "| --- | --- | --- |" + " --: |" * 4]
    for chip in CHIPS:
        for name, arrays, function in (
            ("ours", "projections", _flat(ours)),
            ("tokamax", "projections", _flat(tokamax)),
            ("tokamax", "own layout", tokamax_own),
        ):
            cells = _compiled(chip, with_gradients(function), *_inputs(arrays == "projections"))
            lines.append(f"| {chip} | {name} | {arrays} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _inputs(flat: bool):
    """Arrays and cotangents at the large shape."""
    h, row, width = LARGE.heads.keys, (LARGE.rows, LARGE.time), LARGE.key
    wide = (*row, h * width) if flat else (h, *row, width)
    x, gate = (jax.ShapeDtypeStruct(wide, dtype) for dtype in (jnp.bfloat16, jnp.float32))
    beta = jax.ShapeDtypeStruct((*row, h) if flat else (h, *row), jnp.float32)
    state = jax.ShapeDtypeStruct((LARGE.rows, h, width, width), jnp.float32)
    return (x, x, x, gate, beta), (x, state)


def _flat(function):
    """The function on [B, T, heads x width]."""

    def call(q, k, v, gate, beta):
        arrays = (x.reshape(*x.shape[:2], beta.shape[2], -1) for x in (q, k, v, gate))
        out, state = function(*arrays, beta)
        return out.reshape(*out.shape[:2], -1), state

    return call


def _compiled(chip: str, function, *arguments) -> list[str]:
    """The numbers of one line, in MiB."""
    for setting, value in _SETTINGS.items():
        os.environ.setdefault(setting, value)
    name = chips.CHIPS[chip].topology
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    mesh = Mesh(np.array(devices[:1]), ("one",))
    place = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments
    )
    with seqmix_kernels.compile_for("tpu"), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
    compiled = lowered.compile()
    m = compiled.memory_analysis()
    moved = tpu_hlo.hbm_bytes(compiled.as_text())
    sizes = (m.argument_size_in_bytes, m.output_size_in_bytes, m.temp_size_in_bytes, moved)
    return [f"{size / chips.MIB:,.0f}" for size in sizes]


if __name__ == "__main__":
    main()
