# SPDX-License-Identifier: Apache-2.0
"""Reads what surrounds the Pallas kernels in a program compiled for TPUs."""

import math
import re
from typing import NamedTuple

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(\S+) = (.*?) ([\w\-]+)\((.*?)\)(?:,|$)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"calls=%([\w.\-]+)")
# These give an array another name; a copy to another memory or in time keeps its layout.
_STARTS = {"copy-start", "slice-start"}
_NAMES = {
    "bitcast",
    "get-tuple-element",
    "copy-done",
    "slice-done",
    "optimization-barrier",
    *_STARTS,
}
_MOVES = {"copy", "transpose", "reshape"}
# A fusion of these alone computes nothing.
_IDLE = _NAMES | _MOVES | {"parameter", "tuple", "constant", "slice", "concatenate"}


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
      name: unique in the program.
      shape: of its result, with the layout.
      opcode: what it does.
      operands: names.
      called: the computation of a fusion, or ''.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    called: str

    @property
    def size(self) -> int:
        """Bytes of the first array of the result."""
        return _size(self.shape)


class Relayouts(NamedTuple):
    """What only moves values next to kernels.

    Attributes:
      kernels: number of kernel calls.
      large: of arrays of at least a hundredth of a kernel's largest.
      small: of the others.
    """

    kernels: int
    large: list[Instruction]
    small: list[Instruction]


def computations(text: str) -> dict[str, dict[str, Instruction]]:
    """{computation: {name: instruction}} of a compiled program's text."""
    found: dict[str, dict[str, Instruction]] = {}
    inside: dict[str, Instruction] = {}
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            name = line.removeprefix("ENTRY ").split(" ", 1)[0].removeprefix("%")
            inside = found.setdefault(name, {})
        elif match := _INSTRUCTION.match(line):
            name, shape, opcode, operands = match.groups()
            called = _CALLED.search(line)
            inside[name] = Instruction(
                name,
                shape,
                opcode,
                tuple(re.findall(r"%([\w.\-]+)", operands)),
                called[1] if called else "",
            )
    return found


def relayouts(text: str) -> Relayouts:
    """Instructions that only move values between a kernel and what computes or reads them."""
    every = computations(text)
    kernels, moves = 0, {}
    for inside in every.values():
        readers: dict[str, list[Instruction]] = {}
        for instruction in inside.values():
            for operand in instruction.operands:
                readers.setdefault(operand, []).append(instruction)
        for call in inside.values():
            if call.opcode != "custom-call" or "tpu_custom_call" not in _line(text, call.name):
                continue
            kernels += 1
            near = [*_behind(call, inside, every), *_ahead(call, readers, every)]
            most = max((inside[o].size for o in call.operands if o in inside), default=0)
            moves |= {move.name: (move, 100 * move.size >= most) for move in near}
    large = [move for move, is_large in moves.values() if is_large]
    return Relayouts(kernels, large, [move for move, is_large in moves.values() if not is_large])


def _line(text: str, name: str) -> str:
    start = text.index(f"%{name} = ")
    return text[start : text.index("\n", start)]


def _idle(instruction: Instruction, every) -> bool:
    """Whether it moves values and computes none."""
    if instruction.opcode in _MOVES:
        return True
    body = every.get(instruction.called, {}).values()
    return (
        instruction.opcode == "fusion"
        and any(_idle(part, every) for part in body)
        and all(part.opcode in _IDLE or _idle(part, every) for part in body)
    )


def _behind(call, inside, every) -> list[Instruction]:
    """Moves that a kernel's operands come from."""
    moves, waiting = [], list(call.operands)
    while waiting:
        instruction = inside.get(waiting.pop())
        if instruction is None:
            continue
        if _idle(instruction, every):
            moves.append(instruction)
        if _idle(instruction, every) or instruction.opcode in _NAMES:
            waiting += instruction.operands
    return moves


def _ahead(call, readers, every) -> list[Instruction]:
    """Moves that a kernel's results go to."""
    moves, waiting = [], [call.name]
    while waiting:
        for instruction in readers.get(waiting.pop(), ()):
            if _idle(instruction, every):
                moves.append(instruction)
            if _idle(instruction, every) or instruction.opcode in _NAMES:
                waiting.append(instruction.name)
    return moves


# These read and write nothing by themselves.
_STILL = _NAMES | {"parameter", "tuple", "constant", "iota", "partition-id", "after-all"}


def hbm_bytes(text: str) -> int:
    """Bytes of HBM that a program without loops reads and writes: each instruction's, once.

    A kernel counts with all of its operands and results, once; what XLA keeps in VMEM does not.

    Raises:
      ValueError: the program has a loop, whose turns its text does not give.
    """
    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.M)[1]
    instructions = computations(text)[entry]
    total = 0
    for instruction in instructions.values():
        if instruction.opcode in ("while", "conditional"):
            raise ValueError(f"the program has a {instruction.opcode}: {instruction.name}")
        if instruction.opcode in _STARTS:  # its result names both ends, of which one may be longer
            ends = [found.group() for found in _ARRAY.finditer(instruction.shape)][:2]
            least = min(_size(end) for end in ends)
            total += sum(least for end in ends if "S(1)" not in end)
        if instruction.opcode in _STILL:
            continue
        operands = [instructions[o].shape for o in instruction.operands if o in instructions]
        total += sum(map(_in_hbm, [instruction.shape, *operands]))
    return total


def _in_hbm(shape: str) -> int:
    """Bytes of the arrays of a shape that are not in VMEM, `S(1)`."""
    arrays = (found.group() for found in _ARRAY.finditer(shape))
    return sum(_size(array) for array in arrays if "S(1)" not in array)


def _size(array: str) -> int:
    """Bytes of the first array of a shape."""
    dtype, dimensions, _ = _ARRAY.search(array).groups()
    return math.prod(int(d) for d in dimensions.split(",") if d) * _BYTES.get(dtype, 0)
