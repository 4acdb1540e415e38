# SPDX-License-Identifier: Apache-2.0
"""What sparse attention costs against length, with dense attention for contrast.

    python experiments/speed/sparse.py --out=experiments/speed/results/cpu

Writes `sparse.json`, `sparse.md` (FLOPs and temporary bytes of one forward and backward pass, from
the compiled programs, and wall time at --timed lengths) and `sparse.png` (log-log) into --out.
"""

import argparse
import datetime
import functools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from program import cost

from seqmix import mixers

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HEADS, GROUPS, WIDTH = 8, 2, 64
INDEX_HEADS, INDEX_WIDTH = 4, 32


def shapes(length: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the arguments of every method, one row."""
    return {
        "q": (1, length, HEADS, WIDTH),
        "k": (1, length, GROUPS, WIDTH),
        "v": (1, length, GROUPS, WIDTH),
        "gates": (1, length, HEADS, 3),
        "index_q": (1, length, INDEX_HEADS, INDEX_WIDTH),
        "index_k": (1, length, INDEX_WIDTH),
        "index_weights": (1, length, INDEX_HEADS),
    }


def nsa(q, k, v, gates):
    """NSA with the paper's sizes, means for its compression, one k and v for all branches."""
    return mixers.nsa_attention(q, (k, k, k), (v, v, v), gates, impl="sparse")


METHODS = {
    "dense": (functools.partial(mixers.attention, impl="chunked"), ("q", "k", "v")),
    "NSA": (nsa, ("q", "k", "v", "gates")),
    "MoBA": (functools.partial(mixers.moba_attention, impl="sparse"), ("q", "k", "v")),
    "DSA": (
        functools.partial(mixers.dsa_attention, impl="sparse", top_k=512),
        ("q", "k", "v", "index_q", "index_k", "index_weights"),
    ),
    "Longformer": (
        functools.partial(mixers.longformer_attention, window=512, global_tokens=64, impl="sparse"),
        ("q", "k", "v"),
    ),
    "BigBird": (functools.partial(mixers.bigbird_attention, impl="sparse"), ("q", "k", "v")),
}


def gradient(mixer):
    """Gradients of a scalar of the output with respect to every argument."""

    def loss(arrays):
        return jnp.sum(jnp.sin(mixer(*arrays)[0]))

    return jax.grad(loss)


def seconds(mixer, arrays, repeats: int) -> float:
    """Least time of a forward and backward pass."""
    function = jax.jit(gradient(mixer))
    jax.block_until_ready(function(arrays))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(arrays))
        times.append(time.perf_counter() - start)
    return min(times)


def measure(options) -> list[dict]:
    """One record a method and length."""
    rows = []
    for length in options.lengths:
        rng = np.random.default_rng(0)
        arrays = {
            n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in shapes(length).items()
        }
        for name in options.methods:
            mixer, arguments = METHODS[name]
            picked = tuple(arrays[n] for n in arguments)
            spent = cost(gradient(mixer), picked)
            row = {"method": name, "length": length, **spent._asdict()}
            if length in options.timed:
                row["seconds"] = seconds(mixer, picked, options.repeats)
            rows.append(row)
            print(row, flush=True)
    return rows


def table(rows: list[dict], options) -> str:
    """Markdown tables, one line a method and one column a length."""
    parts = []
    for field, title, unit in (
        ("flops", "GFLOP of the matrix products", 1e9),
        ("temporary_bytes", "temporary memory, MB", 1e6),
        ("seconds", "wall time, s", 1),
    ):
        lengths = [n for n in options.lengths if field != "seconds" or n in options.timed]
        if not lengths:
            continue
        found = {(r["method"], r["length"]): r.get(field) for r in rows}
        parts.append(f"| {title} | " + " | ".join(f"{n:,}" for n in lengths) + " |")
        parts.append("|---|" + "---:|" * len(lengths))
        for name in options.methods:
            cells = " | ".join(f"{found[name, n] / unit:,.2f}" for n in lengths)
            parts.append(f"| {name} | {cells} |")
        parts.append("")
    return "\n".join(parts)


def plot(rows: list[dict], path: pathlib.Path) -> None:
    """FLOPs and temporary bytes against length, log-log."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5))
    for axes, field in zip(panels, ("flops", "temporary_bytes"), strict=True):
        for name in dict.fromkeys(r["method"] for r in rows):
            points = [(r["length"], r[field]) for r in rows if r["method"] == name]
            style = "--" if name == "dense" else "-"
            axes.loglog(*zip(*points, strict=True), style, marker="o", label=name)
        axes.set_xlabel("tokens")
        axes.set_ylabel(field.replace("_", " ") + ", forward and backward")
        axes.grid(True, which="both", alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**i for i in range(12, 17)])
    parser.add_argument("--timed", type=int, nargs="*", default=[16_384])
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = measure(options)
    facts = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "shape": f"B1, {HEADS} query and {GROUPS} key heads of width {WIDTH}, float32",
        "rows": rows,
    }
    (options.out / "sparse.json").write_text(json.dumps(facts, indent=1) + "\n")
    text = table(rows, options)
    head = f"{facts['device']}, {facts['shape']}, jax {facts['jax']}, {facts['date']}\n\n"
    (options.out / "sparse.md").write_text(head + text)
    plot(rows, options.out / "sparse.png")
    print(text)


if __name__ == "__main__":
    main()
