# SPDX-License-Identifier: Apache-2.0
"""What TPU kernels use of Pallas, whose names change between versions, and arithmetic they share.

Kernel bodies read and write references with ``ref[...]``; the rest goes through this module.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from seqmix_kernels.target import compile_for, target

BlockSpec = pl.BlockSpec
CostEstimate = pl.CostEstimate
InterpretParams = pltpu.InterpretParams
ceil_div = pl.cdiv
program_id = pl.program_id
roll = pltpu.roll
num_programs = pl.num_programs
slice_of = pl.ds
multiple_of = pl.multiple_of
when = pl.when

LANES = 128
SUBLANES = 8
# What a kernel may ask for on every chip: v5p and tpu7x have 64 MiB of it a core.
VMEM_LIMIT = 48 * 2**20
RESET = -1e5  # a log-decay whose exponential is 0, and stays so in any sum


def vmem(shape: Sequence[int], dtype: Any = jnp.float32) -> Any:
    """Scratch in VMEM, kept from one step of the grid to the next."""
    return pltpu.VMEM(tuple(shape), dtype)


def smem_spec(block: Sequence[int] | None = None, index: Callable | None = None) -> Any:
    """A block in SMEM, for scalars that steer the kernel; the whole array without a block."""
    return pl.BlockSpec(block, index, memory_space=pltpu.SMEM)


def kernel_call(
    body: Callable[..., None],
    *arrays: jax.Array,
    name: str,
    interpret: bool | str,
    grid: tuple[int, ...],
    parallel: int,
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[Any] = (),
    vmem_limit: int = VMEM_LIMIT,
    cost: Any = None,
) -> list[jax.Array]:
    """Runs a kernel on the arrays.

    Args:
      body: called with references to the inputs, the outputs and the scratch.
      *arrays: the inputs.
      name: of the kernel in profiles and compiled programs.
      interpret: False for the chip, or an interpreter of `seqmix_kernels.target`.
      grid: its last axis varies fastest.
      parallel: number of leading grid axes whose steps may run in any order, on several cores; the
        others run in order.
      in_specs: the block of each input.
      out_specs: the block of each output.
      out_shape: shape and dtype of each output.
      scratch: from `vmem`.
      vmem_limit: bytes of VMEM the kernel may use.
      cost: a `CostEstimate` for XLA's scheduler, or None.

    Returns:
      The outputs.
    """
    order = ("parallel",) * parallel + ("arbitrary",) * (len(grid) - parallel)
    # The body is traced here: `dot` asks for the target.
    with compile_for("tpu", interpret=interpret):
        outputs = pl.pallas_call(
            lambda *references: body(*references),  # a cached trace would forget the target
            grid=grid,
            in_specs=list(in_specs),
            out_specs=list(out_specs),
            out_shape=[_varying(x, arrays) for x in out_shape],
            scratch_shapes=list(scratch),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=order, vmem_limit_bytes=vmem_limit
            ),
            interpret=_interpreter(interpret),
            cost_estimate=cost,
            name=name,
        )(*arrays)
    if interpret == "races" and not _RAISES_ON_RACES:
        outputs = _checked(outputs)
    return outputs


def _varying(shape: jax.ShapeDtypeStruct, arrays: Sequence[jax.Array]) -> jax.ShapeDtypeStruct:
    """Inside `shard_map`, results vary over the mesh axes that any input varies over."""
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))
    if not axes:
        return shape
    kind = jax.typeof(arrays[0]).manual_axis_type
    return shape.update(manual_axis_type=type(kind)(varying=axes))


_RAISES_ON_RACES = "on_race" in {f.name for f in dataclasses.fields(InterpretParams)}


def _interpreter(interpret: bool | str) -> Any:
    """The `interpret` argument of `pallas_call` for one of ours."""
    if interpret == "plain":
        return True
    if interpret in ("chip", "races"):
        return InterpretParams(detect_races=interpret == "races")
    return False


def _checked(outputs: Sequence[jax.Array]) -> list[jax.Array]:
    """The outputs; an error where the interpreter has seen a race, which it would only print."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    def check(*outputs):
        if interpreter.races is not None and interpreter.races.races_found:
            raise RuntimeError("a race in a TPU kernel")
        return outputs

    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs)
    return list(jax.pure_callback(check, shapes, *outputs))


def dot(a: jax.Array, b: jax.Array, lhs: int = 1, rhs: int = 0) -> jax.Array:
    """Product of two matrices, accumulated in float32 whatever the global matmul precision.

    Args:
      a: [m, n], bfloat16 or float32.
      b: [m, n], of the same dtype.
      lhs: the axis of `a` that is summed over.
      rhs: the axis of `b` that is summed over.

    Returns:
      float32. float32 operands keep all their digits, at six passes of the matrix unit.
    """
    if target().interpret:  # XLA's CPU backend refuses some products of bfloat16 into float32
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    exact = a.dtype == jnp.float32
    return lax.dot_general(
        a,
        b,
        (((lhs,), (rhs,)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def batched_dot(a: jax.Array, b: jax.Array, lhs: int = 2, rhs: int = 1) -> jax.Array:
    """`dot` for each of the leading axis: [n, ...] x [n, ...]."""
    if target().interpret:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    exact = a.dtype == jnp.float32
    return lax.dot_general(
        a,
        b,
        (((lhs,), (rhs,)), ((0,), (0,))),
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def operand_dtype(*arrays: jax.Array) -> jnp.dtype:
    """The dtype in which matrix products read: bfloat16 if all do, else float32."""
    dtype = jnp.result_type(*(a.dtype for a in arrays))
    return jnp.dtype(jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32)


def round_up(size: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def pad_axis(x: jax.Array, axis: int, size: int, value: Any = 0) -> jax.Array:
    """Pads one axis at its end to `size`."""
    short = size - x.shape[axis]
    if not short:
        return x
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, short)
    return jnp.pad(x, pads, constant_values=value)


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    """int32 places along an axis. The chip has none of fewer than two axes."""
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def lower_mask(size: int, *, strict: bool = False) -> jax.Array:
    """[size, size] bool, true on and below the diagonal (below it only when `strict`)."""
    rows, columns = iota((size, size), 0), iota((size, size), 1)
    return rows > columns if strict else rows >= columns


def restarts(log_decay: jax.Array, run: jax.Array | None) -> jax.Array:
    """Log-decays with an exact 0 decay where a document starts, so that kernels see no documents.

    Every sum of log-decays from one document into another then holds -1e5, whose exponential is 0
    whatever else is added; sums within a document do not meet it.

    Args:
      log_decay: [B, T, ...] float32, finite.
      run: [B, T] int32 document numbers, or None.
    """
    if run is None:
        return log_decay
    starts = jnp.diff(run, axis=1, prepend=jnp.zeros_like(run[:, :1])) != 0
    starts = starts.reshape(*starts.shape, *[1] * (log_decay.ndim - 2))
    return jnp.where(starts, jnp.float32(RESET), log_decay)


def pieces(x: jax.Array, count: int) -> list[jax.Array]:
    """Cuts float32 numbers into numbers that bfloat16 holds; three make up all 24 bits."""
    parts = []
    for _ in range(count):
        part = x.astype(jnp.bfloat16).astype(jnp.float32)
        parts.append(part)
        x = x - part
    return parts


def range_sums(row: jax.Array, lower: jax.Array, ones: jax.Array, count: int = 3) -> jax.Array:
    """Sums over every range of a chunk, each from its own terms: nothing is subtracted.

    Args:
      row: [1, C] float32.
      lower: `lower_mask(C)`.
      ones: `later_ones(C)`.
      count: how many `pieces` of the row are summed, one pass of the matrix unit each; with 3, only
        the sums are rounded.

    Returns:
      [C, C] with entry (i, j) = sum of row over j < t <= i; 0 where i <= j.
    """
    parts = [jnp.where(lower, part, 0.0).astype(jnp.bfloat16) for part in pieces(row, count)]
    return sum(dot(part, ones) for part in parts)


def straddling_sums(
    pairs: jax.Array, lower: jax.Array, ones: jax.Array, count: int = 3
) -> jax.Array:
    """For each t, the sum of pairs[i, j] over i >= t > j: the transpose of `range_sums`.

    Args:
      pairs: [C, C] float32, 0 where i <= j or anything that may be summed as a pair.
      lower: `lower_mask(C)`.
      ones: `later_ones(C)`.
      count: how many `pieces` of the pairs are summed.

    Returns:
      [1, C].
    """
    left = sum(dot(part.astype(jnp.bfloat16), ones, 1, 1) for part in pieces(pairs, count))
    return jnp.sum(jnp.where(lower, left, 0.0), axis=0, keepdims=True)


def later_ones(size: int) -> jax.Array:
    """[size, size] bfloat16 ones where the row is later than the column."""
    return jnp.where(lower_mask(size, strict=True), 1.0, 0.0).astype(jnp.bfloat16)


def as_row(column: jax.Array) -> jax.Array:
    """[C, 1] -> [1, C]."""
    square = (column.shape[0], column.shape[0])
    return jnp.sum(
        jnp.where(iota(square, 0) == iota(square, 1), column, 0.0), axis=0, keepdims=True
    )
