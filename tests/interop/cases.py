# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that `transformers` wrote, and what it computed (`tools/hf_fixtures.py`)."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from seqmix.interop.hf.checkpoint import Checkpoint

FIXTURES = Path(__file__).parent / "fixtures"


def _cases() -> list[tuple[Path, bool]]:
    """All checkpoints, with whether each is the first of its family."""
    families = sorted(path for path in FIXTURES.iterdir() if path.is_dir())
    found = [sorted(path for path in family.iterdir() if path.is_dir()) for family in families]
    return [(case, case == cases[0]) for cases in found for case in cases]


def name(case: Path) -> str:
    return f"{case.parent.name}-{case.name}"


ALL = [pytest.param(case, id=name(case)) for case, _ in _cases()]
# One of each family in the fast subset.
FIRST_FAST = [
    pytest.param(case, id=name(case), marks=() if first else pytest.mark.slow)
    for case, first in _cases()
]


class Expected(NamedTuple):
    tokens: np.ndarray
    logits: np.ndarray
    prompt: np.ndarray
    continuation: np.ndarray


def expected(case: Path) -> Expected:
    with np.load(case / "expected.npz") as arrays:
        return Expected(*(arrays[field] for field in Expected._fields))


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of each tensor by name."""
    checkpoint = Checkpoint(folder)
    return {
        tensor: (entry.dtype, entry.shape, checkpoint.read(tensor).tobytes())
        for tensor, (_, entry) in checkpoint.entries.items()
    }
