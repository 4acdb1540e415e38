# SPDX-License-Identifier: Apache-2.0
"""Checks the GPU kernels against the recurrence, then times them, with a peer if it is there.

    python experiments/speed/kernels.py --out=experiments/speed/results/h200_kernels

Writes `kernels.json`, `kernels.md` and `kernels.png` into --out. Every row is checked first:
output, final state and all gradients of the kernel against the float32 recurrence of two rows of
512 tokens; an error above 5e-3 makes the run fail at its end. Times are medians of three loops
after warm-up, in ms; "fwd+bwd" is one forward and one vector-Jacobian product. `chunked` is the
same mixer's XLA form; the peer is jax-linear-attention, if `jla` can be imported. --rows
picks rows by parts of their names.
"""

import argparse
import datetime
import importlib
import importlib.util
import json
import pathlib
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from seqmix import mixers

BAR = 5e-3
CHECKED_TOKENS, CHECKED_ROWS = 512, 2


class Row(NamedTuple):
    """One shape of one mixer.

    Attributes:
      mixer: name in `seqmix.mixers`.
      batch: rows.
      time: tokens of a row.
      keys: key heads (groups of an SSM).
      values: value heads.
      key: K.
      value: V.
      documents: documents packed into each row, 1 for none.
      floor: ms that the arrays take at 4.27 TB/s, forward and forward + backward, or None.
    """

    mixer: str
    batch: int
    time: int
    keys: int
    values: int
    key: int
    value: int
    documents: int = 1
    floor: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        """Name in tables."""
        heads = f"H{self.values}" if self.keys == self.values else f"H{self.keys}/{self.values}"
        width = f"D{self.key}" if self.key == self.value else f"K{self.key} V{self.value}"
        packed = f" {self.documents} documents" if self.documents > 1 else ""
        return f"{self.mixer} B{self.batch} T{self.time} {heads} {width}{packed}"


ROWS = (
    Row("simple_gla", 8, 4096, 16, 16, 128, 128, floor=(0.126, 0.347)),
    Row("simple_gla", 1, 32768, 16, 16, 128, 128, floor=(0.126, 0.347)),
    Row("simple_gla", 8, 4096, 32, 32, 64, 64, floor=(0.127, 0.349)),
    Row("ssd", 8, 4096, 1, 32, 128, 64, floor=(0.068, 0.172)),
    Row("ssd", 1, 32768, 1, 32, 128, 64, floor=(0.068, 0.172)),
    Row("gated_delta_rule", 8, 4096, 16, 16, 128, 128, floor=(0.127, 0.349)),
    Row("gated_delta_rule", 1, 32768, 16, 16, 128, 128, floor=(0.127, 0.349)),
    Row("gated_delta_rule", 8, 4096, 32, 32, 64, 64, floor=(0.128, 0.352)),
    Row("gated_delta_rule", 1, 8192, 16, 64, 128, 128),
    Row("delta_rule", 8, 4096, 16, 16, 128, 128, floor=(0.126, 0.347)),
    Row("delta_rule", 1, 32768, 16, 16, 128, 128, floor=(0.126, 0.347)),
    *(Row("simple_gla", 32768 // t, t, 16, 16, 128, 128) for t in (2048, 8192, 16384)),
    *(Row("simple_gla", 1, t, 16, 16, 128, 128) for t in (65536, 262144)),
    Row("simple_gla", 8, 4096, 16, 16, 128, 128, documents=16),
    Row("simple_gla", 1, 32768, 8, 8, 128, 128),
    Row("simple_gla", 32, 1024, 16, 16, 128, 128),
    *(Row("gated_delta_rule", 1, t, 16, 16, 128, 128) for t in (65536, 262144)),
    Row("gated_delta_rule", 8, 4096, 16, 16, 128, 128, documents=16),
)


def arrays(row: Row) -> dict[str, jax.Array]:
    """Inputs by argument name."""
    keys = jax.random.split(jax.random.key(0), 6)
    shape = (row.batch, row.time)

    def normal(i, *rest):
        return jax.random.normal(keys[i], (*shape, *rest))

    q, k = normal(0, row.keys, row.key), normal(1, row.keys, row.key)
    k = (k / jnp.linalg.norm(k, axis=-1, keepdims=True)).astype(jnp.bfloat16)
    q, v = q.astype(jnp.bfloat16), normal(2, row.values, row.value).astype(jnp.bfloat16)
    gate = normal(3, row.values)
    if row.mixer == "ssd":
        rates = -jnp.exp(jax.random.uniform(keys[4], (row.values,), minval=-3.0, maxval=2.0))
        return {"x": v, "dt": jax.nn.softplus(gate - 1), "A": rates, "B": k, "C": q}
    found = {"q": q, "k": k, "v": v}
    if row.mixer != "delta_rule":
        found["log_decay"] = -jnp.exp(gate * 1.5 - 2)
    if row.mixer != "simple_gla":
        found["beta"] = jax.nn.sigmoid(normal(5, row.values))
    return found


def segments(row: Row) -> jax.Array | None:
    """Documents of equal length."""
    if row.documents == 1:
        return None
    ids = 1 + jnp.arange(row.time) * row.documents // row.time
    return jnp.broadcast_to(ids.astype(jnp.int32), (row.batch, row.time))


def ours(row: Row, impl: str) -> Callable[[dict[str, jax.Array]], Any]:
    """(arrays) -> (out, state) of one of our forms."""
    mixer, ids = getattr(mixers, row.mixer), segments(row)
    return lambda xs: mixer(**xs, segment_ids=ids, impl=impl)


def peer(row: Row) -> Callable[[dict[str, jax.Array]], Any] | None:
    """The same of jax-linear-attention, None where it is not importable or has no such call."""
    if importlib.util.find_spec("jla") is None or row.documents > 1:
        return None
    scalar = importlib.import_module("jla.ops.mosaic_gpu.scalar_gate")
    delta = importlib.import_module("jla.ops.mosaic_gpu.gated_delta_rule")
    options = {"output_final_state": True}

    def call(xs):
        if row.mixer == "ssd":
            values = (xs["x"] * xs["dt"][..., None]).astype(xs["x"].dtype)
            decay = xs["dt"] * xs["A"]
            return scalar.simple_gla(xs["C"], xs["B"], values, decay, scale=1.0, **options)
        qkv = xs["q"], xs["k"], xs["v"]
        if row.mixer == "simple_gla":
            return scalar.simple_gla(*qkv, xs["log_decay"], **options)
        if row.mixer == "delta_rule":
            return delta.delta_rule(*qkv, xs["beta"], **options)
        return delta.gated_delta_rule(*qkv, xs["log_decay"], xs["beta"], **options)

    return call


def gradient(function) -> Callable[..., Any]:
    """(arrays, cotangents) -> (results, gradients of the arrays)."""

    def both(xs, cotangents):
        results, pull = jax.vjp(function, xs)
        return results, pull(cotangents)[0]

    return both


def cotangents(function, xs) -> Any:
    """Random numbers in the shapes and dtypes of the results."""
    shapes = jax.eval_shape(function, xs)
    keys = iter(jax.random.split(jax.random.key(9), 2))
    return jax.tree.map(
        lambda s: jax.random.normal(next(keys), s.shape, jnp.bfloat16).astype(s.dtype), shapes
    )


def errors(row: Row) -> dict[str, float]:
    """Relative errors of results and gradients on a short part of the row."""
    short = row._replace(
        time=min(row.time, CHECKED_TOKENS), batch=min(row.batch, CHECKED_ROWS), floor=None
    )
    xs = arrays(short)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), xs)
    got = jax.jit(gradient(ours(short, "pallas")))(xs, cotangents(ours(short, "recurrent"), xs))
    want = gradient(ours(short, "recurrent"))
    want = jax.jit(want)(wide, cotangents(ours(short, "recurrent"), wide))

    def error(a, b):
        a = a.astype(jnp.float32)
        return float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel()))

    names = ("out", "state", *(f"d_{n}" for n in sorted(xs)))
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return dict(zip(names, (error(a, b) for a, b in pairs), strict=True))


def milliseconds(function, *args, calls: int = 20) -> float:
    """Median of three loops of `calls` calls."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*args)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(times)


def measure(row: Row, forms: list[str]) -> dict[str, Any]:
    """Errors and times of one row."""
    found: dict[str, Any] = {"row": row.name, "floor": row.floor, "errors": errors(row)}
    print(row.name, {name: f"{e:.1e}" for name, e in found["errors"].items()}, flush=True)
    xs = arrays(row)
    for form in forms:
        function = peer(row) if form == "peer" else ours(row, form)
        if function is None:
            continue
        try:
            start = time.perf_counter()
            both = jax.jit(gradient(function))
            weights = cotangents(function, xs)
            compiled = both.lower(xs, weights).compile()
            found[form] = {
                "fwd_ms": milliseconds(jax.jit(function), xs),
                "fwdbwd_ms": milliseconds(compiled, xs, weights),
                "temp_gib": compiled.memory_analysis().temp_size_in_bytes / 2**30,
                "seconds": time.perf_counter() - start,
            }
        except Exception as error:  # a form that cannot run is a result too
            traceback.print_exc(limit=-2)
            found[form] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        print(row.name, form, found[form], flush=True)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table, forward / forward + backward in ms."""
    lines = ["| row | floor | pallas | peer | chunked | worst error |", "|---|---|---|---|---|---|"]

    def cell(row, form):
        if form not in row:
            return ""
        times = row[form]
        return "fails" if "error" in times else f"{times['fwd_ms']:.3f} / {times['fwdbwd_ms']:.3f}"

    for row in rows:
        floor = "" if row["floor"] is None else "{:.3f} / {:.3f}".format(*row["floor"])
        cells = " | ".join(cell(row, form) for form in ("pallas", "peer", "chunked"))
        lines.append(f"| {row['row']} | {floor} | {cells} | {max(row['errors'].values()):.1e} |")
    return "\n".join(lines) + "\n"


def plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Bars of forward + backward times."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.35 * len(rows) + 1.5))
    for i, form in enumerate(("pallas", "peer", "chunked")):
        times = [row.get(form, {}).get("fwdbwd_ms", float("nan")) for row in rows]
        places = [n + (i - 1) * 0.25 for n in range(len(rows))]
        axes.barh(places, times, height=0.25, label=form)
    axes.set_yticks(range(len(rows)), [row["row"] for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("forward and backward, ms")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--forms", nargs="+", default=["pallas", "peer", "chunked"])
    parser.add_argument(
        "--rows", nargs="+", default=[""], help="rows whose names hold one of these"
    )
    parser.add_argument("--without", default="no such row", help="but not those that hold this")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no row after so long")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    start, rows = time.perf_counter(), []
    for row in ROWS:
        chosen = any(part in row.name for part in options.rows) and options.without not in row.name
        if not chosen or time.perf_counter() - start > options.seconds:
            continue
        rows.append(measure(row, options.forms))
        facts = {
            "date": datetime.date.today().isoformat(),
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
            "method": "bfloat16 q, k, v; median of three loops; ms",
            "rows": rows,
        }
        (options.out / "kernels.json").write_text(json.dumps(facts, indent=1) + "\n")
        head = f"{facts['device']}, jax {facts['jax']}, {facts['date']}; fwd / fwd + bwd, ms"
        (options.out / "kernels.md").write_text(f"{head}\n\n{table(rows)}")
    plot(rows, options.out / "kernels.png")
    print(table(rows))
    wrong = [row["row"] for row in rows if not max(row["errors"].values()) <= BAR]
    if wrong:
        raise SystemExit(f"errors above {BAR}: {wrong}")


if __name__ == "__main__":
    main()
