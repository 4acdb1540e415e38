# SPDX-License-Identifier: Apache-2.0
"""Keeps a long test process within the system's limits; thins out parameter cases on request."""

import gc
import os
import zlib

# The interpreter of GPU kernels blocks a thread of XLA's pool for each warpgroup that waits: with
# no more threads than a small machine has cores, all can wait. Read when the backend starts.
os.environ.setdefault("NPROC", "16")

import jax
import pytest

# Every compiled program maps a few regions of memory, and Linux allows a process 65,530 of them by
# default; a worker that keeps all programs of the suite dies in the compiler.
_MAPS_LIMIT = 30_000


def _maps() -> int:
    try:
        with open("/proc/self/maps") as maps:
            return sum(1 for _ in maps)
    except OSError:  # not Linux
        return 0


@pytest.fixture(autouse=True)
def _forget_programs():
    """Drops compiled programs once they hold many memory maps."""
    yield
    if _maps() > _MAPS_LIMIT:
        jax.clear_caches()
        gc.collect()


def pytest_addoption(parser):
    parser.addoption(
        "--one_in",
        type=int,
        default=1,
        metavar="N",
        help="run about one in N of the parameter cases of each test function, always one of each",
    )


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    count = config.getoption("--one_in")
    if count == 1:
        return
    if count < 1:
        raise pytest.UsageError(f"--one_in must be at least 1, got {count}")
    groups = {}
    for item in items:
        groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = set()
    for group in groups.values():
        # By a hash of the name: every n-th would always meet the same one of n forms.
        ranks = {item.nodeid: zlib.crc32(item.nodeid.encode()) for item in group}
        chosen = {name for name, rank in ranks.items() if rank % count == 0}
        kept |= chosen or {min(ranks, key=ranks.get)}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]
