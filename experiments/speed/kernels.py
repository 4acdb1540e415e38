# SPDX-License-Identifier: Apache-2.0
"""Checks the GPU kernels against the recurrence, then times them, with a peer if it is there.

    python experiments/speed/kernels.py --out=experiments/speed/results/h200_kernels
    python experiments/speed/kernels.py --out=... --groups lengths --seconds=540
    python experiments/speed/kernels.py --out=... --groups --merge other/kernels.json

Writes `kernels.json`, `kernels.md` and plots into --out, after every result; results that are there
stay until they are measured again, each with the number of its run. `kernel_rows.py` has the rows:
those that others published (`peers`), packed rows (`packed`), 2k to 256k tokens (`lengths`), 8 to
512 states (`heads`). Of each shape, output, final state and every gradient are first compared with
the float32 recurrence on a short part; an error above 5e-3 makes the run fail at its end.

Times are of loops within one program (`timing.py`), in ms. `fwdbwd_ms` is one forward and one
vector-Jacobian product, results and gradients written, as in a training step. `gradients_ms` is of
the gradients alone: XLA then leaves out a forward whose output the backward does not read, so a
peer that computes everything again is not charged for it. `chunked` is the mixer's XLA form, last
of all rows; the peer is jax-linear-attention, if `jla` can be imported.
"""

import argparse
import concurrent.futures
import functools
import pathlib
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import kernel_report
import kernel_rows
import timing
from kernel_rows import GROUPS, Row

BAR = 5e-3
LOOP_MS = 20.0  # what a loop should take


def short(row: Row) -> Row:
    """The part that is checked: single rows keep being cut into pieces."""
    batch = min(row.batch, 2)
    return row._replace(batch=batch, time=min(row.time, 512 if batch > 1 else 2048), known=())


def check(row: Row, impl: str = "pallas") -> Callable[[], dict[str, float]]:
    """Compiles a form and the recurrence; what it returns gives relative errors by name."""
    xs, ids = kernel_rows.shapes(row), kernel_rows.segments(row)
    forms = [kernel_rows.both(kernel_rows.ours(row, name)) for name in (impl, "recurrent")]
    results = jax.eval_shape(kernel_rows.ours(row, "recurrent"), xs, ids)

    def errors(ids):
        xs = kernel_rows.arrays(row)
        weights = kernel_rows.cotangents(results)
        wide_xs, wide = jax.tree.map(lambda x: x.astype(jnp.float32), (xs, weights))
        got, want = forms[0](xs, ids, weights), forms[1](wide_xs, ids, wide)

        def error(a, b):
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
            return jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())

        return jax.tree.map(error, got, want)

    compiled = jax.jit(errors).lower(ids).compile()
    names = ("out", "state", *(f"d_{n}" for n in sorted(xs)))

    def run():
        found = [float(e) for e in jax.tree.leaves(compiled(ids))]
        return dict(zip(names, found, strict=True))

    return run


@functools.lru_cache(maxsize=1)
def _inputs(row: Row) -> tuple[dict[str, jax.Array], jax.Array | None]:
    return jax.jit(lambda: kernel_rows.arrays(row))(), jax.device_put(kernel_rows.segments(row))


def measure(row: Row, name: str, alone: bool, profile: bool) -> Callable[[], dict[str, Any]]:
    """Compiles a form; what it returns times it.

    Args:
      row: the shape.
      name: of the form.
      alone: whether to time the gradients alone, too.
      profile: whether to take times of kernels.
    """
    function = kernel_rows.form(row, name)
    inputs = kernel_rows.shapes(row), kernel_rows.segments(row)
    results = jax.eval_shape(function, *inputs)
    # As a rule kernels take four floors, XLA's form forty.
    expected = [floor * (40 if name == "chunked" else 4) for floor in row.floor]
    turns = [min(40, max(2, round(LOOP_MS / ms))) for ms in expected]
    pass_both = kernel_rows.both(function)
    passes = {
        "fwd_ms": (function, turns[0], inputs),
        "fwdbwd_ms": (pass_both, turns[1], (*inputs, results)),
    }
    if alone:
        passes["gradients_ms"] = (kernel_rows.gradients(function), turns[1], (*inputs, results))
    loops = {
        field: attempt(lambda p=p: timing.compile_loop(p[0], *p[2], turns=p[1]))
        for field, p in passes.items()
    }

    def timed(field, loop, found):
        arguments = _inputs(row)
        if field != "fwd_ms":
            arguments = (*arguments, jax.jit(lambda: kernel_rows.cotangents(results))())
        found[field] = round(timing.milliseconds(loop, *arguments), 4)
        if field == "fwdbwd_ms":
            found["temp_gib"] = round(loop.temporary_gib, 4)
        if profile:
            found.setdefault("kernels_ms", {})[field] = timing.kernel_times(loop, *arguments)
        return {}

    def run():
        found: dict[str, Any] = {"compile_s": 0.0}
        for field, loop in loops.items():
            if isinstance(loop, timing.Loop):
                found["compile_s"] = round(found["compile_s"] + loop.seconds, 1)
                failed = attempt(functools.partial(timed, field, loop, found))
            else:
                failed = loop
            if failed:
                found["error"] = f"{field}: {failed['error']}"
        return found

    return run


def attempt(work: Callable[[], Any]) -> Any:
    """What `work` gives, or its error as a result."""
    try:
        return work()
    except Exception as error:
        traceback.print_exc(limit=-2)
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def plan(
    rows: list[Row], forms: list[str], checks: bool, profile: bool
) -> list[tuple[Row, str, Callable]]:
    """What is to be done, as (row, key in the results, what compiles it), the slow form last."""
    work, checked = [], set()
    alone = {row.name for row in GROUPS["peers"]}
    for slow in (False, True):
        for row in rows:
            part = short(row)
            if checks and not slow and "pallas" in forms and part not in checked:
                checked.add(part)
                work.append((row, "errors", functools.partial(check, part)))
            for name in forms:
                if (name == "chunked") == slow:
                    extra = row.name in alone and not slow
                    work.append((row, name, functools.partial(measure, row, name, extra, profile)))
    return work


def execute(
    work: list[tuple[Row, str, Callable]],
    keep: Callable[[Row, str, dict[str, Any]], None],
    jobs: int,
    end: float,
) -> int:
    """Compiles `jobs` pieces of work at once and then runs them one by one, until `end`.

    Returns:
      How many pieces were left.
    """
    longest = 0.0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for first in range(0, len(work), jobs):
            start = time.perf_counter()
            if start + 1.2 * longest > end:
                return len(work) - first
            batch = work[first : first + jobs]
            compiled = list(pool.map(lambda item: attempt(item[2]), batch))
            for (row, key, _), run in zip(batch, compiled, strict=True):
                found = run if isinstance(run, dict) else attempt(run)
                print(row.name, key, found, flush=True)
                keep(row, key, found)
            longest = max(longest, time.perf_counter() - start)
            print(f"{end - time.perf_counter():.0f} s left", flush=True)
    return 0


def chosen(groups: list[str], parts: list[str], without: str) -> list[Row]:
    """Rows of groups whose names hold one of `parts`, each once."""
    rows = {row.name: row for group in reversed(groups) for row in reversed(GROUPS[group])}
    return [
        row
        for row in reversed(rows.values())
        if any(part in row.name for part in parts) and without not in row.name
    ]


def run(options: argparse.Namespace, start: float) -> None:
    """Measures, merges, writes; `start` is when the program began.

    Raises:
      SystemExit: an error of this run is above the bar.
    """
    results = kernel_report.Results(options.out)
    for path in options.merge:
        results.merge(path)
    rows = chosen(options.groups, options.rows, options.without)
    forms = [name for name in options.forms if name != "peer" or kernel_rows.has_peer()]
    if rows:
        results.runs.append(timing.facts("jax-linear-attention"))
        if jax.default_backend() == "gpu":
            results.runs[-1]["ceilings"] = attempt(timing.ceilings)
        print(results.runs[-1], flush=True)
    work = plan(rows, forms, not options.unchecked, options.profile)

    def keep(row, key, found):
        same = [r for r in rows if key == "errors" and short(r) == short(row)]
        for each in same or [row]:
            results.put(each, key, found)

    left = execute(work, keep, options.jobs, start + options.seconds - 15)
    results.write()
    attempt(lambda: kernel_report.draw(results))
    print((options.out / "kernels.md").read_text(), flush=True)
    if left:
        print(f"{left} of {len(work)} pieces of work are left", flush=True)
    measured = [results.rows.get(row.name, {}) for row in rows]
    wrong = [
        (row.name, found["errors"])
        for row, found in zip(rows, measured, strict=True)
        if "errors" in found and not kernel_report.worst(found["errors"]) <= BAR
    ]
    if wrong:
        raise SystemExit(f"errors above {BAR}: {wrong}")


def main() -> None:
    """Runs from the command line."""
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--groups", nargs="*", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--forms", nargs="+", default=list(kernel_report.FORMS))
    parser.add_argument(
        "--rows", nargs="+", default=[""], help="rows whose names hold one of these"
    )
    parser.add_argument("--without", default="no such row", help="but not those that hold this")
    parser.add_argument("--merge", nargs="+", type=pathlib.Path, default=[], help="other results")
    parser.add_argument("--seconds", type=float, default=1e6, help="end before so many")
    parser.add_argument("--jobs", type=int, default=6, help="programs compiled at once")
    parser.add_argument("--unchecked", action="store_true", help="time without checking")
    parser.add_argument("--profile", action="store_true", help="times of kernels, too")
    options = parser.parse_args()
    with timing.time_limit(options.seconds):
        run(options, start)


if __name__ == "__main__":
    main()
