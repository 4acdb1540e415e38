# SPDX-License-Identifier: Apache-2.0
"""What the Pallas kernels of a program do, counted from the program without running it."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

# Primitives that move or name values and cost no arithmetic.
_FREE = {
    *("broadcast_in_dim", "reshape", "squeeze", "slice", "concatenate", "transpose", "split"),
    *("pad", "rev", "roll", "dynamic_slice", "iota", "get", "swap"),
    *("program_id", "num_programs", "convert_element_type", "bitcast_convert_type"),
}
# What the transcendental unit has a slot of its own for.
_TRANSCENDENTAL = {"exp", "exp2", "log", "log1p", "tanh", "logistic", "rsqrt", "sqrt"}
# Passes of the bfloat16 matrix unit for float32 operands, by precision.
_PASSES = {"HIGHEST": 6, "HIGH": 3}


class Work(NamedTuple):
    """Arithmetic of a kernel.

    Attributes:
      flops: of the matrix products, multiply-add = 2.
      passes: the same, each as often as the matrix unit does it: float32 products are several of
        bfloat16 ones.
      vector: elementwise operations on floating-point numbers, reductions among them.
      transcendental: exponentials, logarithms and roots.
    """

    flops: float = 0.0
    passes: float = 0.0
    vector: float = 0.0
    transcendental: float = 0.0

    def times(self, count: int) -> "Work":
        """`count` times this."""
        return Work(*(count * value for value in self))

    def plus(self, other: "Work") -> "Work":
        """This and another."""
        return Work(*map(sum, zip(self, other, strict=True)))


class Kernel(NamedTuple):
    """One call of a kernel.

    Attributes:
      name: of the kernel.
      grid: steps along each axis, the last fastest.
      parallel: leading axes whose steps need no order.
      blocks: shape and dtype of each input's and output's block, as text.
      block_bytes: bytes of all blocks of a step.
      scratch_bytes: bytes of its scratch.
      traffic: bytes between HBM and VMEM: each block once whenever its place changes.
      least: bytes of all inputs and outputs, once.
      work: of the whole grid; of a branch its dearer side.
    """

    name: str
    grid: tuple[int, ...]
    parallel: int
    blocks: tuple[str, ...]
    block_bytes: int
    scratch_bytes: int
    traffic: int
    least: int
    work: Work


def kernels(function, *shapes) -> list[Kernel]:
    """The kernels that ``function(*shapes)`` calls, in order.

    Args:
      function: is traced.
      *shapes: trees of arrays or `jax.ShapeDtypeStruct`s.
    """
    program = jax.make_jaxpr(function)(*shapes)
    return [_kernel(equation) for equation in _calls(program.jaxpr)]


def _calls(jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
        else:
            for inner in _inner(equation):
                yield from _calls(inner)


def _inner(equation) -> Iterator[Any]:
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def _kernel(equation) -> Kernel:
    params, mapping = equation.params, equation.params["grid_mapping"]
    steps = [axis.reshape(-1) for axis in np.indices(mapping.grid, dtype=np.int32)]
    blocks, block_bytes, traffic, least = [], 0, 0, 0
    for block in mapping.block_mappings:
        array = block.array_aval
        shape = tuple(getattr(size, "block_size", None) for size in block.block_shape)
        shape = tuple(size for size in shape if size is not None)
        size = array.dtype.itemsize
        blocks.append(f"{array.dtype.name}[{','.join(map(str, shape))}]")
        block_bytes += math.prod(shape) * size
        traffic += _moves(block, steps) * math.prod(shape) * size
        least += math.prod(array.shape) * size
    order = getattr(params["compiler_params"], "dimension_semantics", None) or ()
    scratch = sum(a.size * a.dtype.itemsize for a in map(_array, mapping.scratch_avals))
    return Kernel(
        params["name"],
        tuple(mapping.grid),
        sum("parallel" in str(kind).lower() for kind in order),
        tuple(blocks),
        block_bytes,
        scratch,
        traffic,
        least,
        _work(params["jaxpr"]).times(math.prod(mapping.grid)),
    )


def _array(reference):
    return getattr(reference, "inner_aval", reference)


def _moves(block, steps: list[np.ndarray]) -> int:
    """How often a block's place changes along the grid."""
    index = block.index_map_jaxpr
    place = jax.vmap(lambda *at: jax.core.eval_jaxpr(index.jaxpr, index.consts, *at))(*steps)
    place = np.stack([np.broadcast_to(axis, steps[0].shape) for axis in map(np.asarray, place)])
    return 1 + int(np.any(np.diff(place, axis=1) != 0, axis=0).sum())


def _work(jaxpr) -> Work:
    total = Work()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        size = math.prod(equation.outvars[0].aval.shape) if equation.outvars else 0
        inner = [_work(j) for j in _inner(equation)]
        if name == "dot_general":
            total = total.plus(_product(equation, size))
        elif name == "cond":
            total = total.plus(max(inner, key=sum))
        elif name == "while":
            if any(map(sum, inner)):
                raise ValueError("a `while` loop in a kernel: its turns are not in the program")
        elif inner:
            turns = equation.params.get("length", 1)
            for work in inner:
                total = total.plus(work.times(turns))
        elif name in _TRANSCENDENTAL:
            total = total.plus(Work(transcendental=size))
        elif name not in _FREE and equation.outvars:
            largest = max([size, *(math.prod(_shape(v)) for v in equation.invars)])
            if np.issubdtype(equation.outvars[0].aval.dtype, np.floating):
                total = total.plus(Work(vector=largest))
    return total


def _shape(variable) -> tuple[int, ...]:
    return getattr(variable.aval, "shape", ())


def _product(equation, size: int) -> Work:
    (contracted, _), _ = equation.params["dimension_numbers"]
    operand = equation.invars[0].aval
    flops = 2 * size * math.prod(operand.shape[axis] for axis in contracted)
    precision = equation.params["precision"]
    names = {p.name for p in precision} if isinstance(precision, tuple) else set()
    passes = max([_PASSES.get(n, 1) for n in names], default=1)
    if operand.dtype != np.float32:
        passes = 1
    return Work(flops=flops, passes=flops * passes)
