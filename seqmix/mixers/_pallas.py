# SPDX-License-Identifier: Apache-2.0
"""One differentiable function of a kernel family's forward and backward passes.

A kernel module of `seqmix_kernels` has::

    refusal(options, arrays) -> str | None
    forward(options, interpret, shared, *arrays, state, run, keep=keep)
        -> (out, final, residuals)
    backward(options, interpret, shared, *arrays, state, run, residuals, d_out, d_final)
        -> (d_shared, d_arrays, d_state)

with `arrays` the family's [B, T, ...] inputs and `shared` its parameters without batch and time,
both tuples; `state` the initial state [B, ...] in float32, `run` [B, T] int32 document numbers or
None; every result, `residuals` included, a tree of arrays with leading axis B (`d_shared` too: one
contribution a row, summed here). `options` is static, `keep` says whether residuals are wanted.
Gradients have the dtypes of what they belong to.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import seqmix_kernels
from seqmix.mixers._checks import Heads
from seqmix.rows import on_own_rows, rows_on, rows_sharding
from seqmix_kernels.options import Heads as KernelHeads
from seqmix_kernels.options import Options


class _Call(NamedTuple):
    """Where and how a kernel runs. The backward pass is traced after the contexts are closed.

    Attributes:
      family: name of the kernel module.
      options: the module's static options.
      target: what the kernel is compiled for.
      rows: how rows are cut up over devices, or None.
    """

    family: str
    options: Any
    target: seqmix_kernels.Target
    rows: Any


def options(heads: Heads, scale: float, out_dtype: Any, chunk_size: int | None) -> Options:
    """Options of a matrix-state family, with heads as the kernels know them."""
    heads = KernelHeads(heads.keys, heads.values, heads.queries)
    return Options(heads, scale, jnp.dtype(out_dtype), chunk_size)


def has(family: str, feature: str) -> bool:
    """Whether the present target's kernels of a family say that they have a feature."""
    return getattr(seqmix_kernels.family(family), feature, False)


def run(
    family: str,
    options: Any,
    arrays: tuple[jax.Array, ...],
    state: jax.Array,
    documents: jax.Array | None,
    shared: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """Runs a family's kernel, which has not refused.

    Args:
      family: name of the kernel module.
      options: the module's static options.
      arrays: [B, T, ...] each.
      state: [B, ...] float32, the initial state.
      documents: [B, T] int32 document numbers (or marks), or None.
      shared: parameters without batch and time.

    Returns:
      out and the final state.
    """
    call = _Call(family, options, seqmix_kernels.target(), rows_sharding())
    return _differentiable(call, shared, arrays, state, documents)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(call, shared, arrays, state, documents):
    out, final, _ = _on_rows(call, "forward", shared, arrays, state, documents, keep=False)
    return out, final


def _forward(call, shared, arrays, state, documents):
    out, final, kept = _on_rows(call, "forward", shared, arrays, state, documents, keep=True)
    return (out, final), (shared, arrays, state, documents, kept)


def _backward(call, residuals, cotangents):
    shared, arrays, state, documents, kept = residuals
    d_shared, d_arrays, d_state = _on_rows(
        call, "backward", shared, arrays, state, documents, kept, *cotangents
    )
    d_shared = tuple(
        jnp.sum(d, axis=0, dtype=d.dtype).astype(p.dtype)
        for d, p in zip(d_shared, shared, strict=True)
    )
    return d_shared, d_arrays, d_state, None


_differentiable.defvjp(_forward, _backward)


def _on_rows(call, direction, shared, arrays, state, documents, *rest, **flags):
    """Runs one direction of the kernel on each device's own rows."""
    with seqmix_kernels.compile_for(call.target.platform, interpret=call.target.interpret):
        function = getattr(seqmix_kernels.family(call.family), direction)

        def local(shared, arrays, state, documents, *rest):
            return function(
                call.options,
                call.target.interpret,
                shared,
                *arrays,
                state,
                documents,
                *rest,
                **flags,
            )

        with rows_on(call.rows):
            return on_own_rows(local, shared, arrays, state, documents, *rest)
