# SPDX-License-Identifier: Apache-2.0
"""What a program costs, without running it: FLOPs of its matrix products, temporary memory."""

import math
from typing import NamedTuple

import jax


class Cost(NamedTuple):
    """Cost of one call.

    Attributes:
      flops: of all matrix products, multiply-add = 2; a loop's body once a turn, of a branch the
        dearer side. (XLA's own count takes a loop's body once.)
      temporary_bytes: that the compiled program holds besides arguments and results.
    """

    flops: int
    temporary_bytes: int


def cost(function, *shapes, jit=jax.jit) -> Cost:
    """Cost of `function` for arguments like `shapes` (arrays or `jax.ShapeDtypeStruct`).

    Args:
      function: what to call.
      *shapes: its arguments.
      jit: compiles it, for instance with options of its own.
    """
    flops = product_flops(jax.make_jaxpr(function)(*shapes).jaxpr)
    memory = jit(function).lower(*shapes).compile().memory_analysis()
    return Cost(flops, memory.temp_size_in_bytes)


def product_flops(jaxpr) -> int:
    """FLOPs of the matrix products of a jaxpr.

    Raises:
      ValueError: a loop with products whose number of turns is not in the program.
    """
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            operand = equation.invars[0].aval.shape
            shared = math.prod(operand[axis] for axis in contracted)
            total += 2 * shared * math.prod(equation.outvars[0].aval.shape)
            continue
        inner = [product_flops(j) for j in _inner(equation)]
        if equation.primitive.name == "cond":
            inner = [max(inner)]
        if equation.primitive.name == "while" and any(inner):
            raise ValueError(
                "a `while` loop holds matrix products; use `scan`, so they are counted"
            )
        total += sum(inner) * equation.params.get("length", 1)
    return total


def _inner(equation):
    """The jaxprs that an equation holds."""
    if equation.primitive.name == "platform_index":
        return
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr
