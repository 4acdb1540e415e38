# SPDX-License-Identifier: Apache-2.0
"""The delta rule with one decay per head on Hopper: DeltaNet, Gated DeltaNet, fused grouped values.

S~ = a_t S_{t-1};  S_t = S~ + k_t (beta_t (v_t - k_t S~))^T;  o_t = s q_t S_t (Yang et al. 2024,
arXiv 2406.06484 and 2412.06464), in chunks of 64 tokens: `delta_inverse` inverts every chunk's
triangular system, `delta_forward` sweeps over the chunks of each head with the state in registers
and keeps the states that enter the chunks and the rule's errors v_t - k_t S~ for the backward pass,
where `delta_backward` sweeps in reverse. (Where several query heads read a state, they are computed
again.)

Rows whose heads do not fill the chip are cut into pieces. What a piece does to its entering state
is linear, so a first sweep finds every piece's end state and transition, a few small float32
products chain them, and then all pieces run at once with the states that they really have.

A document's first token has a decay of exactly zero, which is all that packing needs; see `gates`.
Query heads of one state run as heads of their own that read the same k, v and gates: nothing is
repeated in memory, and their gradients are summed.
"""

import jax
import jax.numpy as jnp
from jax import lax

from seqmix_kernels.gpu import delta_backward, delta_forward, gates
from seqmix_kernels.gpu._common import MAX_GRID_YZ, chip_refusal, foldable
from seqmix_kernels.gpu.calls import cut_state, flat, operand_refusal, whole, whole_state
from seqmix_kernels.gpu.delta_inverse import inverse
from seqmix_kernels.gpu.delta_pieces import Plan, chunk_vectors, plan
from seqmix_kernels.options import Options

UNPROVED = "no GPU has run the present kernels yet"
"""Why `impl="auto"` does not take them."""


def refusal(options: Options, arrays: tuple[jax.Array, ...]) -> str | None:
    """Why the kernels cannot take a call, or None.

    Args:
      options: of the call.
      arrays: q [B, T, h x, K], k [B, T, h, K], v [B, T, h r, V], log_decay and beta [B, T, h r].
    """
    reason = operand_refusal(options, arrays)
    if reason:
        return reason
    if max(arrays[0].shape[0], options.heads.states) > MAX_GRID_YZ:
        return f"a CUDA grid has at most {MAX_GRID_YZ} rows or heads"
    return chip_refusal()


class _Call:
    """A call in the kernels' terms: whole chunks, widths of whole tiles, bfloat16 operands."""

    def __init__(self, options, q, k, v, log_decay, beta, run):
        self.options = options
        self.heads = options.heads
        self.time, self.key, self.value = q.shape[1], q.shape[-1], v.shape[-1]
        self.q, self.k, self.v = (whole(x) for x in (q, k, v))
        self.vectors = chunk_vectors(log_decay, beta, run)
        self.chunks = self.vectors.shape[2]
        self.plan: Plan = plan(
            self.heads, q.shape[0], self.chunks, self.k.shape[-1], self.v.shape[-1]
        )

    def inverse(self) -> jax.Array:
        """T~^T of all chunks."""
        return inverse(self.heads, self.k, self.vectors)

    def entering(self, state: jax.Array, inverse: jax.Array):
        """States that enter the pieces [B, pieces, Hs, V, K], and the pieces' transitions."""
        first = whole_state(state)
        if self.plan.pieces == 1:
            return first[:, None], None
        ends = delta_forward.piece_ends(self.plan, self.k, self.v, self.vectors, inverse)
        ends = ends.reshape(first.shape[0], self.plan.pieces, *ends.shape[1:])
        width = self.v.shape[-1]
        written, transition = ends[..., :width, :], ends[..., width:, :]
        states = [first]
        for piece in range(self.plan.pieces - 1):
            states.append(_moved(states[-1], transition[:, piece]) + written[:, piece])
        return jnp.stack(states, 1), transition

    def leaving(self, plan: Plan, d_out, d_final, inverse, transition) -> jax.Array:
        """Gradients of the states that leave the pieces, [B, pieces, Ho, V, K]."""
        queries, scale = self.heads.queries, self.options.scale
        # Of a state's query heads the first one's recursion starts from the final state's gradient.
        last = whole_state(d_final.astype(jnp.float32))[:, :, None]
        last = jnp.pad(last, [(0, 0), (0, 0), (0, queries - 1), (0, 0), (0, 0)])
        chain = [last.reshape(last.shape[0], -1, *last.shape[3:])]
        if plan.pieces > 1:
            own = delta_backward.piece_gradients(
                plan, self.q, self.k, d_out, self.vectors, inverse, scale=scale
            )
            own = own.reshape(last.shape[0], plan.pieces, *own.shape[1:])
            transition = jnp.swapaxes(jnp.repeat(transition, queries, axis=2), -1, -2)
            for piece in reversed(range(1, plan.pieces)):
                chain.append(own[:, piece] + _moved(chain[-1], transition[:, piece]))
        return jnp.stack(chain[::-1], 1)


def _moved(state: jax.Array, transition: jax.Array) -> jax.Array:
    """S^T P^T, float32."""
    return jnp.matmul(state, transition, precision=lax.Precision.HIGHEST)


def forward(
    options: Options,
    interpret: bool | str,
    shared: tuple[()],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    run: jax.Array | None,
    *,
    keep: bool,
):
    """Outputs, final state and residuals.

    Args:
      options: of the call.
      interpret: taken from the target.
      shared: none.
      q: [B, T, h x, K] bfloat16 or float16.
      k: [B, T, h, K].
      v: [B, T, h r, V].
      log_decay: [B, T, h r] float32, <= 0, finite.
      beta: [B, T, h r] float32.
      state: [B, h r, K, V] float32.
      run: [B, T] int32 document numbers or None.
      keep: whether there will be a backward pass.

    Returns:
      out [B, T, Ho, V]; final state [B, Hs, K, V] float32; residuals, None unless `keep`.
    """
    del interpret, shared

    def run_forward(q, k, v, log_decay, beta, state, run):
        call = _Call(options, q, k, v, log_decay, beta, run)
        solved = call.inverse()
        entering, transition = call.entering(state, solved)
        out, last, *states = delta_forward.outputs(
            call.plan, call.q, call.k, call.v, call.vectors, solved, flat(entering),
            scale=options.scale, out_dtype=_read_dtype(options.out_dtype),
            store=keep and call.heads.queries == 1,
        )  # fmt: skip
        last = last.reshape(*entering.shape[:2], *last.shape[1:])[:, -1, :: options.heads.queries]
        final = cut_state(last, call.key, call.value)
        out = out[:, : call.time, :, : call.value].astype(options.out_dtype)
        return out, final, (entering, transition, solved, *states) if keep else ()

    out, final, kept = foldable(run_forward)(q, k, v, log_decay, beta, state, run)
    return out, final, kept if keep else None


def backward(
    options: Options,
    interpret: bool | str,
    shared: tuple[()],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    run: jax.Array | None,
    residuals,
    d_out: jax.Array,
    d_final: jax.Array,
):
    """Gradients (of no shared arrays, of q, k, v, log_decay and beta, of the initial state).

    Arguments as for `forward`, its residuals, and the gradients of its results.
    """
    del interpret, shared

    def run_backward(q, k, v, log_decay, beta, run, residuals, d_out, d_final):
        entering, transition, solved, *states = residuals
        call = _Call(options, q, k, v, log_decay, beta, run)
        heads, rows = options.heads, q.shape[0]
        if not states:
            states = delta_forward.entering_states(
                call.plan, call.k, call.v, call.vectors, solved, flat(entering)
            )
        plan = delta_backward.reverse_plan(call.plan)
        d_out = whole(d_out)
        leaving = call.leaving(plan, d_out, d_final, solved, transition)
        dq, dk, dv, sums, first = delta_backward.gradients(
            plan, call.q, call.k, states[1], d_out, call.vectors, solved, states[0],
            flat(leaving), scale=options.scale,
        )  # fmt: skip
        grid = (heads.keys, heads.values, heads.queries)
        dq = _added(dq.reshape(*dq.shape[:2], *grid, -1, dq.shape[-1]), (3, 5))
        dk = _added(dk.reshape(*dk.shape[:2], *grid, -1, dk.shape[-1]), (3, 4, 5))
        dv = _added(dv.reshape(*dv.shape[:2], heads.states, heads.queries, dv.shape[-1]), (3,))
        sums = sums.reshape(rows, heads.states, -1, *sums.shape[2:])  # blocks of one state
        sums = jnp.sum(sums, axis=(2, 4))
        pairs, reads, writes, by_pairs, passing, by_writes = jnp.moveaxis(sums, 3, 0)
        d_log = pairs + gates.suffix_sums(reads) + gates.prefix_sums_exclusive(writes)
        d_log += jnp.sum(passing, axis=-1, keepdims=True)
        first = first.reshape(rows, plan.pieces, heads.states, -1, *first.shape[2:])[:, 0]
        d_state = cut_state(jnp.sum(first, axis=2), call.key, call.value)
        d_arrays = (
            _cut(dq, q),
            _cut(dk, k),
            _cut(dv, v),
            gates.from_chunks(d_log, call.time),
            gates.from_chunks(by_pairs + by_writes, call.time).astype(beta.dtype),
        )
        return d_arrays, d_state

    arguments = (q, k, v, log_decay, beta, run, residuals, d_out, d_final)
    d_arrays, d_state = foldable(run_backward)(*arguments)
    return (), d_arrays, d_state


def _added(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Sums over parts of a head's gradient, and [B, T, H, D]."""
    rows, time, width = x.shape[0], x.shape[1], x.shape[-1]
    many = any(x.shape[axis] > 1 for axis in axes)
    x = jnp.sum(x.astype(jnp.float32), axis=axes) if many else x
    return x.reshape(rows, time, -1, width)


def _cut(x: jax.Array, like: jax.Array) -> jax.Array:
    return x[:, : like.shape[1], :, : like.shape[3]].astype(like.dtype)


def _read_dtype(dtype) -> jnp.dtype:
    return jnp.dtype(jnp.bfloat16 if dtype == jnp.float16 else dtype)
