# SPDX-License-Identifier: Apache-2.0
"""What the tests of sparse attention share."""

import functools

import numpy as np
import pytest

from experiments.speed import program
from tests.mixers.cases import Shape, draw_segments
from tests.mixers.parity import quick_jit

cost = functools.partial(program.cost, jit=quick_jit)
PACKINGS = ("whole", "packed", "long")


def sparing(every, fast):
    """All cases, those not in `fast` left to the slow suite."""
    return [each if each in fast else pytest.param(*each, marks=pytest.mark.slow) for each in every]


def packed_segments(packing, time=45):
    """None, short documents with padding anywhere, or long ones whose ends are off every grid."""
    if packing == "whole":
        return None
    if packing == "packed":
        return draw_segments(Shape(time=time))
    ids = np.where(np.arange(time) < 5, 1, np.where(np.arange(time) < time - 4, 2, 3))
    ids = np.stack([ids, np.where(np.arange(time) < time - 11, 4, 5)])
    ids[0, 10::7] = 0
    ids[1, :3] = ids[1, -2:] = 0
    return ids.astype(np.int32)
