# SPDX-License-Identifier: Apache-2.0
"""Scalar decay on TPU: S_t = a_t S_{t-1} + k_t v_t^T, o_t = s q_t S_t, one decay per state.

The chunkwise form (Dao & Gu 2024, arXiv 2405.21060; Yang et al. 2023, 2312.06635) and its
gradients as `seqmix.mixers.scalar_decay` writes them, in one kernel each way. Arrays stay
[B, T, heads, width] in HBM, read as [B, T, heads * width]: a step of the grid takes a block of
tokens and a tile of heads, cut into heads inside. A tile is some key heads with all their values,
or some values of one key head; then the tiles of a key head follow each other on the same q and k,
which are read once, as dq and dk are written once.

Bytes, per token: forward reads q, k, v and writes out; backward reads q, k, v and the gradient of
out and writes dq, dk, dv; 4 per state and log-decay each way; the float32 states of a block's start
are written forward and read backward. Products, per token and state, in multiply-adds, with chunks
of C tokens: forward C (K + V) + 2 K V, and p C^2 for sums of log-decays; backward C (3 K + 2 V)
+ 5 K V, 2 p C^2, and K V to make the states inside a block anew; p is 2 with bfloat16 operands and
3 with float32, whose other products take six passes. Products of Q and K alone are shared by the
values of a key head.
"""

import functools

import jax
import jax.numpy as jnp

from seqmix_kernels.options import Options
from seqmix_kernels.tpu import _common as common
from seqmix_kernels.tpu.scalar_decay_bodies import backward_body, forward_body
from seqmix_kernels.tpu.scalar_decay_plan import Plan, make_plan


def refusal(options: Options, arrays: tuple[jax.Array, ...]) -> str | None:
    """Why the kernels cannot take a call, or None.

    Args:
      options: of the call.
      arrays: q [B, T, h x, K], k [B, T, h, K], v [B, T, h r, V], log_decay [B, T, h r].
    """
    for x in arrays[:3]:
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"TPU kernels read float32 and bfloat16, not {x.dtype}"
    if arrays[3].dtype != jnp.float32:
        return f"TPU kernels keep states in float32, not {arrays[3].dtype}"
    if make_plan(options, arrays) is None:
        return "a chunk of one head and the states of its values do not fit into VMEM"
    return None


def vmem_bytes(options: Options, arrays: tuple[jax.Array, ...]) -> int:
    """VMEM that the backward kernel, the larger one, takes; arguments as for `refusal`."""
    return make_plan(options, arrays).vmem_bytes()


def forward(
    options: Options,
    interpret: bool | str,
    shared: tuple[()],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    state: jax.Array,
    run: jax.Array | None,
    *,
    keep: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Runs the forward kernel.

    Args:
      options: of the call.
      interpret: False or the interpreter.
      shared: nothing.
      q: [B, T, h x, K], bfloat16 or float32.
      k: [B, T, h, K].
      v: [B, T, h r, V].
      log_decay: [B, T, h r] float32, in [-1e5, 0].
      state: [B, h r, K, V] float32.
      run: [B, T] int32 document numbers from 0, or None.
      keep: whether `backward` will follow.

    Returns:
      out [B, T, h r x, V] in `options.out_dtype`; final state [B, h r, K, V] float32; the states
      that enter each block of tokens [B, blocks, tiles, K, a tile's V side by side], or None.
    """
    plan = make_plan(options, (q, k, v, log_decay))
    decays = common.restarts(log_decay, run)
    out, final, *states = _forward(plan, interpret, keep, q, k, v, decays, state)
    batch, time = q.shape[:2]
    out = out.reshape(batch, time, options.heads.outputs, plan.value)[..., : v.shape[-1]]
    return out, final[:, :, : k.shape[-1], : v.shape[-1]], states[0] if keep else None


def backward(
    options: Options,
    interpret: bool | str,
    shared: tuple[()],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    state: jax.Array,
    run: jax.Array | None,
    states: jax.Array,
    d_out: jax.Array,
    d_final: jax.Array,
) -> tuple[tuple[()], tuple[jax.Array, ...], jax.Array]:
    """Runs the backward kernel.

    Args:
      options, interpret, shared, q, k, v, log_decay, state, run: as for `forward`.
      states: what `forward` kept.
      d_out: [B, T, h r x, V] in `options.out_dtype`.
      d_final: [B, h r, K, V] float32.

    Returns:
      Nothing for `shared`; gradients of q, k, v, log_decay, each like its array; that of state.
    """
    plan = make_plan(options, (q, k, v, log_decay))
    decays = common.restarts(log_decay, run)
    dq, dk, dv, d_log, d_state = _backward(plan, interpret, q, k, v, decays, states, d_out, d_final)
    dq, dk, dv = (
        d.reshape(*x.shape[:3], -1)[..., : x.shape[-1]] for d, x in ((dq, q), (dk, k), (dv, v))
    )
    d_state = d_state[:, :, : k.shape[-1], : v.shape[-1]]
    return (), (dq, dk, dv, d_log), d_state


def _forward(plan: Plan, interpret, keep, q, k, v, log_decay, state):
    specs, shapes = plan.specs(reverse=False), plan.shapes(q, k, v)
    outputs = ("out", "final", "states") if keep else ("out", "final")
    return common.kernel_call(
        functools.partial(forward_body, plan, keep),
        plan.flat(q, plan.key),
        plan.flat(k, plan.key),
        plan.flat(v, plan.value),
        plan.rows(log_decay),
        plan.wide(state),
        name="scalar_decay_forward",
        interpret=interpret,
        grid=plan.grid,
        parallel=2,
        in_specs=[specs[n] for n in ("q", "k", "v", "rows", "first")],
        out_specs=[specs[n] for n in outputs],
        out_shape=[shapes[n] for n in outputs],
        scratch=plan.scratch(backward=False),
        cost=plan.cost(shapes, backward=False),
    )


def _backward(plan: Plan, interpret, q, k, v, log_decay, states, d_out, d_final):
    specs, shapes = plan.specs(reverse=True), plan.shapes(q, k, v)
    outputs = ("q", "k", "v", "rows", "final")
    dq, dk, dv, d_rows, d_state = common.kernel_call(
        functools.partial(backward_body, plan),
        plan.flat(q, plan.key),
        plan.flat(k, plan.key),
        plan.flat(v, plan.value),
        plan.rows(log_decay),
        states,
        plan.flat(d_out, plan.value),
        plan.wide(d_final),
        name="scalar_decay_backward",
        interpret=interpret,
        grid=plan.grid,
        parallel=2,
        in_specs=[specs[n] for n in ("q", "k", "v", "rows", "states", "out", "first")],
        out_specs=[specs[n] for n in outputs],
        out_shape=[shapes[n] for n in outputs],
        scratch=plan.scratch(backward=True),
        cost=plan.cost(shapes, backward=True),
    )
    return dq, dk, dv, plan.tokens(d_rows), d_state
