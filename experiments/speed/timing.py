# SPDX-License-Identifier: Apache-2.0
"""Device time of a function: loops inside one program, so that no dispatch is counted."""

import contextlib
import datetime
import faulthandler
import importlib.metadata
import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

METHOD = (
    "one program loops over the call, its results are all written; median of three loops of at "
    "least 20 ms after 0.1 s of warm-up"
)
WARM_UP, LEAST, LOOPS = 0.1, 0.02, 3
GIB = 2**30


class Loop(NamedTuple):
    """A compiled loop.

    Attributes:
      compiled: the program.
      turns: calls in it.
      temporary_gib: what one call holds besides arguments and results.
      results_gib: the results of one call.
      seconds: to trace and to compile.
    """

    compiled: jax.stages.Compiled
    turns: int
    temporary_gib: float
    results_gib: float
    seconds: float


def looped(function: Callable[..., Any], turns: int) -> Callable[..., jax.Array]:
    """Calls `function` several times in one program; gives a number that depends on all results.

    Barriers keep calls from being moved out of the loop and results from being left out: every
    array of the results is written to memory in every turn, as it is where another program reads
    it, and arguments are not copied.
    """

    def run(*args):
        def body(_, seen):
            held, seen = lax.optimization_barrier((args, seen))
            leaves = lax.optimization_barrier(jax.tree.leaves(function(*held)))
            return seen + sum(x[(0,) * x.ndim].astype(jnp.float32) for x in leaves)

        return lax.fori_loop(0, turns, body, jnp.zeros((), jnp.float32))

    return run


def compile_loop(function: Callable[..., Any], *shapes: Any, turns: int) -> Loop:
    """Compiles the loop for arguments like `shapes` (arrays or `jax.ShapeDtypeStruct`s)."""
    start = time.perf_counter()
    compiled = jax.jit(looped(function, turns)).lower(*shapes).compile()
    results = jax.tree.leaves(jax.eval_shape(function, *shapes))
    size = sum(x.size * x.dtype.itemsize for x in results) / GIB
    temporary = compiled.memory_analysis().temp_size_in_bytes / GIB
    seconds = time.perf_counter() - start
    return Loop(compiled, turns, max(0.0, temporary - size), size, seconds)


def milliseconds(loop: Loop, *args: Any) -> float:
    """Time of one call. The warm-up outlasts the rise of the clocks of an idle device.

    Raises:
      MemoryError: the device has no room for the program.
    """
    check_room(loop)
    start = time.perf_counter()
    while True:
        before = time.perf_counter()
        jax.block_until_ready(loop.compiled(*args))
        once = time.perf_counter() - before
        if time.perf_counter() - start > WARM_UP:
            break
    calls = max(1, math.ceil(LEAST / once))
    times = []
    for _ in range(LOOPS):
        before = time.perf_counter()
        for _ in range(calls):
            result = loop.compiled(*args)
        jax.block_until_ready(result)
        times.append(time.perf_counter() - before)
    return statistics.median(times) / (calls * loop.turns) * 1e3


def check_room(loop: Loop) -> None:
    """Raises a MemoryError where a device that tells its memory has too little left."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return
    free = (stats["bytes_limit"] - stats["bytes_in_use"]) / GIB
    needed = loop.temporary_gib + loop.results_gib
    if needed > free:
        raise MemoryError(f"needs {needed:.1f} GiB besides its arguments, {free:.1f} are free")


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends the process where the block takes longer, even in a compiler that hangs."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def kernel_times(
    loop: Loop,
    *args: Any,
    planes: str = "/device:GPU:",
    lines: str = "Stream",
    most: int = 12,
) -> dict[str, float]:
    """Milliseconds a call of the dearest kernels by name, from a profiler trace of one loop.

    Args:
      loop: that has run before.
      *args: its arguments.
      planes: beginning of the names of the planes to read.
      lines: beginning of the names of their lines.
      most: kernels to name; the others are summed as 'others'.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(loop.compiled(*args))
        found: dict[str, float] = {}
        for path in pathlib.Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                if not plane.name.startswith(planes):
                    continue
                for line in plane.lines:
                    if not line.name.startswith(lines):
                        continue
                    for event in line.events:
                        spent = event.duration_ns / 1e6 / loop.turns
                        found[event.name] = found.get(event.name, 0.0) + spent
    ranked = sorted(found.items(), key=lambda item: -item[1])
    shown = {name: round(spent, 4) for name, spent in ranked[:most]}
    rest = sum(spent for _, spent in ranked[most:])
    return shown | ({"others": round(rest, 4)} if rest else {})


def ceilings(side: int = 8192, gib: float = 2.0) -> dict[str, float]:
    """TB/s of a copy (bytes read and written) and bfloat16 TFLOP/s of a product, on random data."""
    bits = jax.jit(lambda: jax.random.bits(jax.random.key(0), (int(gib * GIB / 4),)))()
    # One bit changes: a bare copy could be left out, and integers do not overflow.
    loop = compile_loop(lambda x: x ^ jnp.uint32(1), bits, turns=10)
    copied = 2 * bits.nbytes / milliseconds(loop, bits) / 1e9

    def squares():
        keys = jax.random.split(jax.random.key(1))
        return [jax.random.normal(k, (side, side), jnp.bfloat16) for k in keys]

    a, b = jax.jit(squares)()
    loop = compile_loop(jnp.matmul, a, b, turns=10)
    product = 2 * side**3 / milliseconds(loop, a, b) / 1e9
    return {"copy_TBps": round(copied, 3), "matmul_TFLOPs": round(product, 1)}


def facts(*packages: str) -> dict[str, Any]:
    """Date, device and versions; of `packages` those that are installed."""
    found = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "method": METHOD,
    }
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
