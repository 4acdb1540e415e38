# SPDX-License-Identifier: Apache-2.0
"""Bounds of the TPU kernels, counted from their programs; nothing here is measured.

    python experiments/speed/tpu_roofline.py --out=experiments/speed/tpu_roofline.md

No TPU is needed, and no libtpu: the kernels are traced, not run.
"""

import argparse
import functools
import math
import pathlib

import jax
import tpu_count

import seqmix_kernels
from seqmix.mixers import _pallas
from seqmix_kernels.tpu import chips, shapes

HEAD = """# Bounds of the TPU kernels

**A bound, not a measurement: none of these kernels has run on a TPU.** Each row is one kernel at
one shape of `kernels/tpu/shapes.py`, counted from its program by `tpu_roofline.py` (the command is
in its docstring). No kernel can be faster than the largest of three times on a chip, and a real one
is slower: the units wait for each other, small products fill a matrix unit badly, and nothing here
knows how often.

- **HBM**: bytes between HBM and VMEM. A block counts whenever the next step of the grid wants
  another one; `x least` is that over the bytes of all inputs and outputs once.
- **products**: FLOPs of the matrix products. **passes** counts a product of float32 operands as
  often as the matrix unit does it in bfloat16 (six times at full precision).
- **FLOP/B**: passes over HBM bytes. Below the chip's own number a kernel is bound by memory:
  {balance}.
- **vector**: elementwise operations and reductions, transcendental functions among them.
- **grid**: steps along each axis; those in brackets go in order and carry a state, the others are
  free. **VMEM**: blocks, doubled for the copies that run beside the arithmetic, and scratch, in
  MiB; the compiler adds what a step's arithmetic holds.
- The times are microseconds on one device: M bound by memory, P by products, V by the vector unit.
  Peaks are in `kernels/tpu/chips.py` with their sources; a device of tpu7x is half a chip.

B = rows, T = tokens, h = key heads x states each x queries each, K and V = widths; D = channels,
N = states a channel.
"""


def passes(shape: shapes.Shape) -> list[tpu_count.Kernel]:
    """The kernels of a forward and a backward pass."""
    call = shape.call()
    run = functools.partial(_pallas.run, shape.family, call.options)

    def function(shared, arrays, state, documents):
        def forward(shared, arrays, state):
            return run(arrays, state, documents, shared)

        results, backward = jax.vjp(forward, shared, arrays, state)
        return backward(results)  # cotangents of the right shapes

    with seqmix_kernels.compile_for("tpu"):
        return tpu_count.kernels(function, call.shared, call.arrays, call.state, call.run)


def bound(kernel: tpu_count.Kernel, chip: chips.Chip) -> tuple[float, str]:
    """The least seconds on a chip, and the letter of what takes them."""
    work = kernel.work
    return max(
        (kernel.traffic / chip.bandwidth, "M"),
        (work.passes / chip.flops, "P"),
        ((work.vector + work.transcendental) / chip.vector, "V"),
    )


def sizes(shape: shapes.Shape) -> str:
    """The shape in a few words."""
    text = f"B{shape.rows} T{shape.time} "
    if shape.heads is None:
        text += f"D{shape.key}" + (f" N{shape.value}" if shape.value > 1 else "")
    else:
        h = shape.heads
        text += f"h{h.keys}x{h.values}x{h.queries} K{shape.key} V{shape.value}"
    return text + ("" if shape.dtype == jax.numpy.bfloat16 else " float32")


def grid(kernel: tpu_count.Kernel) -> str:
    """The grid, its ordered axes in brackets."""
    free, ordered = kernel.grid[: kernel.parallel], kernel.grid[kernel.parallel :]
    return " x ".join([*map(str, free), *([f"[{' x '.join(map(str, ordered))}]"] * bool(ordered))])


def row(name: str, shape: shapes.Shape, kernel: tpu_count.Kernel) -> str:
    """One line of the table."""
    work = kernel.work
    vmem = (2 * kernel.block_bytes + kernel.scratch_bytes) / chips.MIB
    times = [bound(kernel, chip) for chip in chips.CHIPS.values()]
    cells = [
        kernel.name,
        f"{name}: {sizes(shape)}",
        grid(kernel),
        f"{vmem:.1f}",
        f"{kernel.traffic / 1e6:,.0f} MB",
        f"{kernel.traffic / kernel.least:.2f}",
        _giga(work.flops),
        _giga(work.passes),
        f"{work.passes / kernel.traffic:,.0f}",
        _giga(work.vector + work.transcendental),
        *(f"{1e6 * time:,.0f} {letter}" for time, letter in times),
    ]
    return "| " + " | ".join(cells) + " |"


def _giga(count: float) -> str:
    return f"{count / 1e9:,.1f} G" if count else "-"


def blocks(kernel: tpu_count.Kernel) -> str:
    """The blocks of a step, for the second table."""
    return f"| {kernel.name} | {math.prod(kernel.grid):,} | {', '.join(kernel.blocks)} |"


def page() -> str:
    """The whole page."""
    balance = ", ".join(f"{name} {chip.balance:.0f}" for name, chip in chips.CHIPS.items())
    heads = ["kernel", "shape", "grid", "VMEM", "HBM", "x least", "products", "passes"]
    heads += ["FLOP/B", "vector", *(f"{name} µs" for name in chips.CHIPS)]
    lines = [HEAD.format(balance=balance), "| " + " | ".join(heads) + " |"]
    lines.append("| --- | --- | --- |" + " --: |" * (len(heads) - 3))
    steps = ["", "## Pipelines", "", "What one step of the grid reads and writes.", ""]
    steps += ["| kernel | steps | blocks, inputs then outputs |", "| --- | --: | --- |"]
    for name, shape in shapes.SHAPES.items():
        for kernel in passes(shape):
            lines.append(row(name, shape, kernel))
            if name in shapes.FIRST:
                steps.append(blocks(kernel))
    return "\n".join([*lines, *steps]) + "\n"


def main() -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    options.out.write_text(page())


if __name__ == "__main__":
    main()
