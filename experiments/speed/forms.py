# SPDX-License-Identifier: Apache-2.0
"""Times the forms of the recurrent mixers against sequence length, with attention for contrast.

    python experiments/speed/forms.py --out=results/cpu            # lengths 1k to 64k, small heads
    python experiments/speed/forms.py --out=results/gpu --heads=16 --width=128 --dtype=bfloat16

Writes `forms.json`, `forms.md` (tables) and `forms.png` (log-log) into --out. Each time is the
least wall time of several calls of one forward and one backward pass, after compilation, whose time
is a second table.
"""

import argparse
import datetime
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

from seqmix import mixers

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RECURRENT_LIMIT = 4096  # longer rows would keep one state a token for the backward pass


def inputs(time_steps: int, heads: int, width: int, dtype) -> dict[str, jax.Array]:
    """Arrays of every mixer by argument name, one row."""
    rng = np.random.default_rng(0)
    shape = (1, time_steps, heads, width)
    q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(3))
    k = k / jnp.linalg.norm(k.astype(jnp.float32), axis=-1, keepdims=True).astype(dtype)
    gates = -np.exp(rng.normal(size=shape) - 3).astype(np.float32)
    return {
        "q": q,
        "k": k,
        "v": v,
        "head_decay": jnp.asarray(gates[..., 0]),
        "channel_decay": jnp.asarray(gates),
        "beta": jnp.asarray(rng.uniform(size=shape[:3]), jnp.float32),
    }


MIXERS = {
    "simple_gla": (mixers.simple_gla, ("q", "k", "v", "head_decay")),
    "gated_delta_rule": (mixers.gated_delta_rule, ("q", "k", "v", "head_decay", "beta")),
    "gla": (mixers.gla, ("q", "k", "v", "channel_decay")),
    "kda": (mixers.kda, ("q", "k", "v", "channel_decay", "beta")),
    "attention": (mixers.attention, ("q", "k", "v")),
}


def seconds(mixer, arrays, impl: str, repeats: int) -> tuple[float, float]:
    """Least time of a forward and backward pass, and the time to compile it."""

    def loss(arrays):
        return jnp.sum(jnp.sin(mixer(*arrays, impl=impl)[0].astype(jnp.float32)))

    start = time.perf_counter()
    gradient = jax.jit(jax.grad(loss)).lower(arrays).compile()
    compilation = time.perf_counter() - start
    jax.block_until_ready(gradient(arrays))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(gradient(arrays))
        times.append(time.perf_counter() - start)
    return min(times), compilation


def measure(options) -> list[dict]:
    """Times every mixer, form and length that fits the options."""
    rows = []
    for time_steps in options.lengths:
        arrays = inputs(time_steps, options.heads, options.width, jnp.dtype(options.dtype))
        for name, (mixer, arguments) in MIXERS.items():
            forms = ["auto"] if name == "attention" else ["chunked"]
            if name != "attention" and time_steps <= RECURRENT_LIMIT:
                forms.append("recurrent")
            if name == "attention" and time_steps > options.attention_limit:
                continue
            for impl in forms:
                picked = tuple(arrays[n] for n in arguments)
                spent, compilation = seconds(mixer, picked, impl, options.repeats)
                row = {"mixer": name, "impl": impl, "time": time_steps, "ms": spent * 1e3}
                rows.append(row | {"compile_s": compilation})
                print(
                    f"{name:18s} {impl:10s} T={time_steps:6d}  {spent * 1e3:10.2f} ms, "
                    f"compiled in {compilation:5.2f} s",
                    flush=True,
                )
    return rows


def table(rows: list[dict], lengths: list[int], field: str) -> str:
    """A Markdown table of a field, one row a form and one column a length."""
    found = {(r["mixer"], r["impl"], r["time"]): r[field] for r in rows}
    lines = ["| mixer | form | " + " | ".join(f"{t:,}" for t in lengths) + " |"]
    lines.append("|---|---|" + "---:|" * len(lengths))
    for mixer, impl in dict.fromkeys((r["mixer"], r["impl"]) for r in rows):
        cells = [found.get((mixer, impl, t)) for t in lengths]
        shown = " | ".join("" if c is None else f"{c:,.1f}" for c in cells)
        lines.append(f"| {mixer} | {impl} | {shown} |")
    return "\n".join(lines) + "\n"


def plot(rows: list[dict], path: pathlib.Path) -> None:
    """A log-log plot of time against length."""
    figure, axes = plt.subplots(figsize=(7, 5))
    for mixer, impl in dict.fromkeys((r["mixer"], r["impl"]) for r in rows):
        points = [(r["time"], r["ms"]) for r in rows if (r["mixer"], r["impl"]) == (mixer, impl)]
        style = {"recurrent": ":", "auto": "--"}.get(impl, "-")
        axes.loglog(*zip(*points, strict=True), style, marker="o", label=f"{mixer} ({impl})")
    axes.set_xlabel("tokens")
    axes.set_ylabel("forward and backward, ms")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--attention_limit", type=int, default=16_384)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**i for i in range(10, 17)])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = measure(options)
    facts = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "shape": f"B1 H{options.heads} K=V={options.width} {options.dtype}",
        "rows": rows,
    }
    (options.out / "forms.json").write_text(json.dumps(facts, indent=1) + "\n")
    text = table(rows, options.lengths, "ms")
    text += "\nCompilation, s\n\n" + table(rows, options.lengths, "compile_s")
    head = f"{facts['device']}, {facts['shape']}, jax {facts['jax']}, {facts['date']}; ms\n\n"
    (options.out / "forms.md").write_text(head + text)
    plot(rows, options.out / "forms.png")
    print(text)


if __name__ == "__main__":
    main()
