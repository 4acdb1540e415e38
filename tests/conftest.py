# SPDX-License-Identifier: Apache-2.0
"""Keeps a long test process within the system's limits."""

import gc

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
