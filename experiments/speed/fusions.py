# SPDX-License-Identifier: Apache-2.0
"""Is what XLA makes of convolution, L2 norm and gated norm at the memory floor of a GPU?

    python experiments/speed/fusions.py --out=experiments/speed/results/h200_fusions

Times the layers' own functions at the shapes of real layers, 8 rows of 4,096 tokens, against the
bytes that they must move over the bandwidth of an H200's large copy: forward, and forward with one
vector-Jacobian product (gradients of activations and weights). Writes `fusions.json` and
`fusions.md` into --out after every case. Needs the project installed.
"""

import argparse
import concurrent.futures
import json
import pathlib
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import gpu_hlo
import jax
import jax.numpy as jnp
import timing
from flax import nnx
from kernel_rows import BANDWIDTH

from seqmix.layers.norms import GatedRMSNorm, l2_normalise
from seqmix.layers.short_convolution import ShortConvolution

TAPS, DOCUMENTS, HEAD = 4, 16, 128
PASSES = ("forward", "forward + backward")


class Case(NamedTuple):
    """One function at one shape.

    Attributes:
      name: in the table.
      width: channels.
      build: (width) -> (module or None, (module, activations, documents) -> y), all of them
        [B, T, width] but for the documents [B, T].
      activations: how many it takes.
      packed: whether rows hold several documents.
    """

    name: str
    width: int
    build: Callable[[int], tuple[nnx.Module | None, Callable[..., jax.Array]]]
    activations: int = 1
    packed: bool = False

    def bytes(self, tokens: int) -> tuple[int, int]:
        """The least to move: forward reads activations and writes y; backward reads them and the
        gradient of y, and writes theirs.
        """
        array, taken = tokens * self.width * 2, self.activations
        return (taken + 1) * array, (3 * taken + 2) * array


def _convolution(width: int, bias: bool = False) -> ShortConvolution:
    options = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32, "rngs": nnx.Rngs(0)}
    return ShortConvolution(width, TAPS, bias=bias, **options)


def silu(width: int):
    """As values of `GatedDeltaNet` and `KDA`."""

    def call(module, x, documents):
        return jax.nn.silu(module(x, segment_ids=documents)[0])

    return _convolution(width), call


def silu_bias(width: int):
    """As x of `Mamba2`."""
    return _convolution(width, bias=True), silu(width)[1]


def silu_l2(width: int):
    """As queries and keys of `GatedDeltaNet` and `KDA`."""

    def call(module, x, documents):
        y = jax.nn.silu(module(x, segment_ids=documents)[0])
        heads = (*x.shape[:2], -1, min(HEAD, width))
        return l2_normalise(y.reshape(heads)).reshape(x.shape)

    return _convolution(width), call


def head_norm(width: int, activation: str = "silu"):
    """As the output of `GatedDeltaNet` (SiLU) and `KDA` (sigmoid)."""
    head = min(HEAD, width)
    options = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32, "activation": activation}

    def call(module, x, gate, documents):
        del documents
        heads = (*x.shape[:2], -1, head)
        return module(x.reshape(heads), gate.reshape(heads)).reshape(x.shape)

    return GatedRMSNorm(head, order="norm_then_gate", **options), call


def head_norm_sigmoid(width: int):
    """`head_norm` of `KDA`."""
    return head_norm(width, "sigmoid")


def wide_norm(width: int):
    """As the output of `Mamba2`."""
    options = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32}

    def call(module, x, gate, documents):
        del documents
        return module(x, gate)

    return GatedRMSNorm(width, order="gate_then_norm", **options), call


CASES = (
    *(Case("convolution, SiLU", width, silu) for width in (2048, 4096, 8192)),
    *(Case("convolution, SiLU, packed", width, silu, packed=True) for width in (2048, 4096, 8192)),
    Case("convolution with bias, SiLU", 4096, silu_bias),
    Case("convolution, SiLU, L2 norm of heads", 2048, silu_l2),
    Case("convolution, SiLU, L2 norm of heads", 4096, silu_l2),
    Case("convolution, SiLU, L2 norm of heads, packed", 2048, silu_l2, packed=True),
    Case("convolution, SiLU, L2 norm of heads, packed", 4096, silu_l2, packed=True),
    *(Case("norm of heads, SiLU gate", width, head_norm, 2) for width in (2048, 4096, 8192)),
    Case("norm of heads, sigmoid gate", 2048, head_norm_sigmoid, 2),
    *(Case("SiLU gate, norm of all channels", width, wide_norm, 2) for width in (4096, 8192)),
)


def documents(rows: int, time_steps: int) -> jax.Array:
    """[rows, time_steps] ids of documents of 1, 2, 3 ... parts of a row."""
    ends = jnp.cumsum(jnp.arange(1, DOCUMENTS + 1)) * time_steps
    ends = ends // (DOCUMENTS * (DOCUMENTS + 1) // 2)
    ids = 1 + jnp.searchsorted(ends, jnp.arange(time_steps), side="right")
    return jnp.broadcast_to(ids.astype(jnp.int32), (rows, time_steps))


def prepare(case: Case, rows: int, time_steps: int, which: str) -> Callable[[], dict[str, Any]]:
    """Compiles a case; what it returns times it."""
    module, call = case.build(case.width)
    graph, weights = nnx.split(module)
    x = jax.ShapeDtypeStruct((rows, time_steps, case.width), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((rows, time_steps), jnp.int32) if case.packed else None

    def forward(taken, ids):
        return call(nnx.merge(graph, taken[0]), *taken[1:], ids)

    def backward(taken, ids, d_y):
        y, pull = jax.vjp(lambda taken: forward(taken, ids), taken)
        return y, pull(d_y)[0]

    taken = (weights, *[x] * case.activations)
    function, shapes = (
        (forward, (taken, ids)) if which == PASSES[0] else (backward, (taken, ids, x))
    )
    least = case.bytes(rows * time_steps)[PASSES.index(which)]
    floor = least / BANDWIDTH * 1e3
    loop = timing.compile_loop(function, *shapes, turns=min(40, max(2, round(10 / floor))))
    program = jax.jit(function).lower(*shapes).compile()
    found = {"case": case.name, "width": case.width, "pass": which, "floor_ms": floor}
    counted = gpu_hlo.traffic(program.as_text())
    found |= {"bytes": least, "bytes_moved": counted.bytes, "kernels": counted.kernels}
    found["temp_mib"] = program.memory_analysis().temp_size_in_bytes / 2**20

    def run():
        def draw():
            keys = jax.random.split(jax.random.key(0), case.activations + 1)
            return [jax.random.normal(key, x.shape, x.dtype) for key in keys]

        *arrays, d_y = jax.jit(draw)()
        ids = documents(rows, time_steps) if case.packed else None
        arguments = ((weights, *arrays), ids, *([d_y] if which != PASSES[0] else []))
        spent = timing.milliseconds(loop, *arguments)
        return found | {"ms": spent, "of_floor": spent / floor}

    return run


def table(facts: dict[str, Any]) -> str:
    """A Markdown page."""
    head = f"{facts['device']}, jax {facts['jax']}, {facts['date']}; {facts['tokens']} tokens"
    names = ["case", "width", "pass", "MiB", "floor, ms", "ms", "of floor", "kernels", "moved"]
    lines = [f"{head}, bfloat16; {facts['method']}.", ""]
    lines += ["`moved`: operands and results of the program's kernels over the least bytes.", ""]
    lines += ["| " + " | ".join(names) + " |", "|---|--:|---" + "|--:" * (len(names) - 3) + "|"]
    for row in facts["rows"]:
        cells = [row["case"], row["width"], row["pass"]]
        if "error" in row:
            cells += [row["error"][:60].replace("|", "/")] + [""] * (len(names) - 4)
        else:
            cells += [f"{row['bytes'] / 2**20:.0f}", f"{row['floor_ms']:.3f}", f"{row['ms']:.3f}"]
            moved = row["bytes_moved"] / row["bytes"]
            cells += [f"{row['of_floor']:.2f}", row["kernels"], f"{moved:.2f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def run(options: argparse.Namespace, start: float) -> None:
    """Measures and writes; `start` is when the program began."""
    options.out.mkdir(parents=True, exist_ok=True)
    facts = timing.facts() | {"tokens": options.rows * options.time, "rows": []}
    cases = CASES
    if options.width:
        cases = tuple({c.name: c._replace(width=options.width) for c in CASES}.values())
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        work = [
            (case, which, pool.submit(prepare, case, options.rows, options.time, which))
            for case in cases
            for which in PASSES
        ]
        # Compiled all before any is timed: compiling tries variants on the device.
        concurrent.futures.wait([future for _, _, future in work], timeout=options.seconds / 2)
        for case, which, future in work:
            if time.perf_counter() - start > options.seconds - 15:
                break
            row = {"case": case.name, "width": case.width, "pass": which}
            try:
                row = future.result(timeout=60)()
            except Exception as error:
                traceback.print_exc(limit=-2)
                row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            facts["rows"].append(row)
            print(row, flush=True)
            (options.out / "fusions.json").write_text(json.dumps(facts, indent=1) + "\n")
            (options.out / "fusions.md").write_text(table(facts))
    print(table(facts), flush=True)


def main() -> None:
    """Runs from the command line."""
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--time", type=int, default=4096)
    parser.add_argument("--width", type=int, help="in place of the cases' own")
    parser.add_argument("--seconds", type=float, default=1e6, help="end before so many")
    parser.add_argument("--jobs", type=int, default=8, help="programs compiled at once")
    options = parser.parse_args()
    with timing.time_limit(options.seconds):
        run(options, start)


if __name__ == "__main__":
    main()
