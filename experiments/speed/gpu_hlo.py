# SPDX-License-Identifier: Apache-2.0
"""Counts what a program compiled for a GPU launches and moves."""

import math
import re
from typing import NamedTuple

import tpu_hlo

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_BRANCHES = re.compile(r"(?:true_computation|false_computation)=%?([\w.\-]+)")
_BRANCH_LIST = re.compile(r"branch_computations=\{([^}]*)\}")
_TARGET = re.compile(r"(?:to_apply|body)=%?([\w.\-]+)")
# These launch nothing: they name what is there.
_STILL = {
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "optimization-barrier",
    "parameter",
    "tuple",
}


class Traffic(NamedTuple):
    """What a program does.

    Attributes:
      kernels: fusions, library calls and copies.
      bytes: their operands and results, each once a kernel.
    """

    kernels: int
    bytes: int


def traffic(text: str) -> Traffic:
    """Of a compiled program's text: of a branch the side that moves less, a loop's body once."""
    every = tpu_hlo.computations(text)
    lines = {
        match[1]: match[0] for match in re.finditer(r"^\s+(?:ROOT )?%?(\S+) = .*$", text, re.M)
    }

    def count(name: str) -> Traffic:
        total, inside = Traffic(0, 0), every.get(name, {})
        for instruction in inside.values():
            total = Traffic(*map(sum, zip(total, one(instruction, inside), strict=True)))
        return total

    def one(instruction, inside) -> Traffic:
        line = lines[instruction.name]
        if instruction.opcode in _STILL:
            return Traffic(0, 0)
        if instruction.opcode == "conditional":
            branches = _BRANCHES.findall(line)
            if found := _BRANCH_LIST.search(line):
                branches += [name.strip().removeprefix("%") for name in found[1].split(",")]
            return min(map(count, branches), key=lambda t: t.bytes)
        if instruction.opcode in ("call", "while"):
            return count(_TARGET.search(line)[1])
        shapes = [inside[o].shape for o in instruction.operands if o in inside]
        return Traffic(1, sum(map(_size, [instruction.shape, *shapes])))

    return count(re.search(r"^ENTRY %?([\w.\-]+)", text, re.M)[1])


def _size(shape: str) -> int:
    return sum(
        math.prod(int(d) for d in dimensions.split(",") if d) * _BYTES.get(dtype, 0)
        for dtype, dimensions in _ARRAY.findall(shape)
    )
