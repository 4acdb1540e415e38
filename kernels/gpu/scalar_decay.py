# SPDX-License-Identifier: Apache-2.0
"""The scalar-decay family on Hopper: SSD, simple GLA, retention, lightning and linear attention.

S_t = a_t S_{t-1} + w_t k_t v_t^T;  o_t = s q_t S_t (Dao & Gu 2024, arXiv 2405.21060; Yang et al.
2023, 2312.06635), in chunks of 64 tokens. Forward: one sweep over the chunks (`scalar_forward`).
Backward: the states that enter the chunks, kept by the forward or computed again (`scalar_states`),
then one sweep in reverse, which gives every gradient (`scalar_backward`).

Rows whose heads do not fill the chip are cut into pieces: a sweep finds what each piece adds to the
state, a few sums chain the pieces, and all run at once from the states that they really have.

A document's first token has a decay of exactly zero, which is all that packing needs; see `gates`.
Query heads of one state run as heads of their own on the same k, v and gates, and so do slices of
keys wider than 128: nothing is repeated in memory, and what they give is added.
"""

import jax
import jax.numpy as jnp

from seqmix_kernels.gpu import gates, scalar_backward, scalar_forward, scalar_states
from seqmix_kernels.gpu._common import MAX_GRID_YZ, chip_refusal, foldable
from seqmix_kernels.gpu.calls import (
    WIDTH,
    cut_state,
    flat,
    operand_refusal,
    whole,
    whole_state,
)
from seqmix_kernels.gpu.scalar_plan import WIDEST, plan
from seqmix_kernels.options import Heads, Options

STRENGTH = True
"""Whether the kernels take the write strengths w as a fifth array."""
UNPROVED = "no GPU has run the present kernels yet"
"""Why `impl="auto"` does not take them."""


def refusal(options: Options, arrays: tuple[jax.Array, ...]) -> str | None:
    """Why the kernels cannot take a call, or None.

    Args:
      options: of the call.
      arrays: q [B, T, h x, K], k [B, T, h, K], v [B, T, h r, V], log_decay [B, T, h r], and perhaps
        strength [B, T, h r].
    """
    reason = operand_refusal(options, arrays, widest=None)
    if reason:
        return reason
    widths = -(-arrays[1].shape[-1] // WIDEST) * -(-arrays[2].shape[-1] // WIDTH)
    if options.heads.outputs * widths > MAX_GRID_YZ:
        return f"a CUDA grid has at most {MAX_GRID_YZ} blocks a row"
    return chip_refusal()


class _Call:
    """A call in the kernels' terms: whole chunks, widths of whole tiles, bfloat16 operands."""

    def __init__(self, options, q, k, v, log_decay, strength, run):
        heads = options.heads
        self.scale, self.out_dtype = float(options.scale), jnp.dtype(options.out_dtype)
        self.heads = heads
        self.batch, self.time = q.shape[:2]
        self.key, self.value = q.shape[-1], v.shape[-1]
        q, k, self.v = (whole(x) for x in (q, k, v))
        if k.shape[-1] > WIDEST:
            pad = [(0, 0)] * 3 + [(0, -k.shape[-1] % WIDEST)]
            q, k = jnp.pad(q, pad), jnp.pad(k, pad)
        self.gates = gates.chunk_log2(log_decay, run)
        self.strength = None if strength is None else gates.to_chunks(strength)
        widths = k.shape[-1], v.shape[-1] + -v.shape[-1] % WIDTH
        chunks = self.gates.shape[2]
        self.plan = plan(self.heads, self.batch, chunks, *widths)
        by_state = Heads(heads.keys, heads.values, 1)
        self.state_plan = plan(by_state, self.batch, chunks, *widths, self.plan.pieces)
        self.q, self.k = (x.reshape(*x.shape[:2], -1, self.plan.key) for x in (q, k))

    def split(self, x: jax.Array, axis: int) -> jax.Array:
        """Parts or finer along an axis -> key heads, slices, values, queries, what is finer."""
        h, slices = self.heads, self.plan.slices
        shape = h.keys, slices, h.values, h.queries, x.shape[axis] // self.plan.parts
        return x.reshape(*x.shape[:axis], *shape, *x.shape[axis + 1 :])

    def by_state(self, x: jax.Array) -> jax.Array:
        """[B, parts or finer, ...] -> [B, Hs, ...]: sums."""
        return jnp.sum(self.split(x, 1), axis=(2, 4, 5)).reshape(self.batch, -1, *x.shape[2:])

    def to_slices(self, states: jax.Array) -> jax.Array:
        """States [B, Hs, K, V] -> [B, states times slices, V, keys of a slice]."""
        h, p = self.heads, self.plan
        states = whole_state(states)
        pad = p.slices * p.key - states.shape[-1]
        states = jnp.pad(states, [(0, 0)] * 3 + [(0, pad)]) if pad else states
        states = states.reshape(self.batch, h.keys, h.values, p.value, p.slices, p.key)
        return jnp.moveaxis(states, 4, 2).reshape(self.batch, p.kept, p.value, p.key)

    def from_slices(self, states: jax.Array) -> jax.Array:
        """The inverse of `to_slices`."""
        h, p = self.heads, self.plan
        states = states.reshape(self.batch, h.keys, p.slices, h.values, p.value, p.key)
        states = jnp.moveaxis(states, 2, 4).reshape(self.batch, h.states, p.value, -1)
        return cut_state(states, self.key, self.value)

    def through(self, queries: int = 1) -> jax.Array:
        """[B, parts, pieces, 1, 1] decays across the pieces, for so many queries a state."""
        p, h = self.plan, self.heads
        log2 = jnp.sum(self.gates, axis=-1)
        log2 = jnp.pad(log2, ((0, 0), (0, 0), (0, p.pieces * p.piece_chunks - p.chunks)))
        log2 = jnp.sum(log2.reshape(self.batch, h.keys, 1, h.values, 1, p.pieces, -1), axis=-1)
        shape = (self.batch, h.keys, p.slices, h.values, queries, p.pieces)
        return jnp.exp2(jnp.broadcast_to(log2, shape)).reshape(self.batch, -1, p.pieces, 1, 1)

    def by_piece(self, states: jax.Array) -> jax.Array:
        """[B * pieces, ...] -> [B, pieces, ...]."""
        return states.reshape(self.batch, self.plan.pieces, *states.shape[1:])

    def entering(self, state: jax.Array) -> jax.Array:
        """States that enter the pieces, [B, pieces, states times slices, V, K]."""
        states = [self.to_slices(state)]
        if self.plan.pieces > 1:
            written, _ = scalar_states.sweep(
                self.state_plan, self.v, self.k, self.gates, self.strength, None,
                reverse=False, store=False,
            )  # fmt: skip
            written, through = self.by_piece(written), self.through()
            for piece in range(self.plan.pieces - 1):
                states.append(through[:, :, piece] * states[-1] + written[:, piece])
        return jnp.stack(states, 1)

    def leaving(self, d_final: jax.Array, d_out: jax.Array) -> jax.Array:
        """Gradients of the states that leave the pieces, [B, pieces, parts, V, K]."""
        queries = self.heads.queries
        d_state = self.to_slices(d_final)
        if queries > 1:  # the first query head of a state takes the final state's gradient
            d_state = jnp.pad(d_state[:, :, None], [(0, 0)] * 2 + [(0, queries - 1)] + [(0, 0)] * 2)
            d_state = d_state.reshape(self.batch, -1, *d_state.shape[3:])
        states = [d_state]
        if self.plan.pieces > 1:
            read, _ = scalar_states.sweep(
                self.plan, d_out, self.q, self.gates, None, None, reverse=True, store=False
            )
            read = self.by_piece(read) * self.scale
            through = self.through(queries)
            for piece in reversed(range(1, self.plan.pieces)):
                states.append(through[:, :, piece] * states[-1] + read[:, piece])
        return jnp.stack(states[::-1], 1)


def forward(
    options: Options,
    interpret: bool | str,
    shared: tuple[()],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    *rest: jax.Array | None,
    keep: bool,
):
    """Outputs, final state and residuals.

    Args:
      options: of the call.
      interpret: taken from the target.
      shared: none.
      q: [B, T, h x, K] bfloat16 or float16 (read as bfloat16).
      k: [B, T, h, K].
      v: [B, T, h r, V].
      log_decay: [B, T, h r] float32, <= 0, finite.
      *rest: strength [B, T, h r] float32 where given; state [B, h r, K, V] float32; run [B, T]
        int32 document numbers or None.
      keep: whether residuals are wanted.

    Returns:
      out [B, T, Ho, V]; final state [B, Hs, K, V] float32; residuals: the states that enter the
      pieces, sums of log-decays, and (where one query reads each state) the states that enter the
      chunks.
    """
    del interpret, shared

    def run_forward(q, k, v, log_decay, strength, state, run):
        call = _Call(options, q, k, v, log_decay, strength, run)
        entering = call.entering(state)
        whole_sum = call.plan.slices == 1
        out, last, *kept = scalar_forward.forward(
            call.plan, call.q, call.k, call.v, call.gates, call.strength, flat(entering),
            scale=call.scale, out_dtype=call.out_dtype if whole_sum else jnp.float32, keep=keep,
        )  # fmt: skip
        if not whole_sum:
            out = jnp.sum(call.split(out, 2), axis=3).reshape(*out.shape[:2], -1, out.shape[3])
            out = out.astype(call.out_dtype)
        last = call.by_piece(last)[:, -1, :: call.heads.queries]
        kept = (entering, *kept) if keep else ()
        return out[:, : call.time, :, : call.value], call.from_slices(last), kept

    strength, state, run = rest if len(rest) == 3 else (None, *rest)
    return foldable(run_forward)(q, k, v, log_decay, strength, state, run)


def backward(
    options: Options,
    interpret: bool | str,
    shared: tuple[()],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    *rest,
):
    """Gradients of everything that `forward` takes.

    Args:
      options, interpret, shared, q, k, v, log_decay: as for `forward`.
      *rest: its other arguments, residuals, and the gradients of out [B, T, Ho, V] and of the final
        state [B, Hs, K, V].

    Returns:
      (), gradients of q, k, v, log_decay and strength where given, gradient of the state.
    """
    del interpret

    def run_backward(q, k, v, log_decay, strength, state, run, kept, d_out, d_final):
        call = _Call(options, q, k, v, log_decay, strength, run)
        p, h, batch = call.plan, call.heads, call.batch
        entering, sums, *states = kept
        if not states:
            _, *states = scalar_states.sweep(
                call.state_plan, call.v, call.k, call.gates, call.strength, flat(entering),
                reverse=False, store=True,
            )  # fmt: skip
        d_out = whole(d_out)
        dq, dk, dv, both, ends, d_strength, d_entering = scalar_backward.backward(
            p, call.q, call.k, call.v, d_out, sums, call.strength, states[0],
            flat(call.leaving(d_final, d_out)), scale=call.scale,
        )  # fmt: skip
        rows = q.shape[0], call.q.shape[1]
        dq = _summed(dq.reshape(*rows, h.keys, p.slices, h.queries, -1, p.key), (5,))
        dq = jnp.moveaxis(dq, 4, 3).reshape(*rows, q.shape[2], -1)
        dk = _summed(dk.reshape(*rows, h.keys, p.slices, -1, p.key), (4,))
        dk = dk.reshape(*rows, h.keys, -1)
        dv = _summed(call.split(dv, 2), (3, 5, 6)).reshape(*rows, h.states, -1)
        dq, dk, dv = (
            d[:, : call.time, :, : x.shape[3]].astype(x.dtype)
            for d, x in ((dq, q), (dk, k), (dv, v))
        )
        d_log = gates.suffix_sums_of_documents(call.by_state(both), call.by_state(ends), run)
        d_log = gates.from_chunks(d_log, call.time)
        d_arrays = (dq, dk, dv, gates.of_log_decay(d_log, log_decay, run))
        if strength is not None:
            d_strength = gates.from_chunks(call.by_state(d_strength), call.time)
            d_arrays = (*d_arrays, d_strength)
        d_state = _summed(call.split(call.by_piece(d_entering)[:, 0], 1), (4, 5))
        d_state = d_state.reshape(batch, -1, *d_state.shape[4:])
        return d_arrays, call.from_slices(d_state)

    arguments = rest if len(rest) == 6 else (None, *rest)
    d_arrays, d_state = foldable(run_backward)(q, k, v, log_decay, *arguments)
    return shared, d_arrays, d_state


def _summed(parts: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The sum over some axes in float32; nothing is computed where they have one element each."""
    if all(parts.shape[axis] == 1 for axis in axes):
        return jnp.squeeze(parts, axes)
    return jnp.sum(parts, axis=axes, dtype=jnp.float32)
