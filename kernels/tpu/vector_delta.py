# SPDX-License-Identifier: Apache-2.0
"""TPU kernels of the delta rule with one decay per key channel: Kimi delta attention.

The maths is that of `seqmix.mixers.vector_delta` (Kimi Linear, arXiv 2510.26692), whose names these
are; `_spans` has the decays and the pairs, `_vector` the grid. V' is computed as
T (beta * (V - (entry * K) S)), from the inverse T by block substitution. A document's first token
has log-decay -inf, which is all that keeps documents apart. The forward pass keeps the float32
state that enters each chunk; the backward pass walks the chunks in reverse and recomputes the rest.

Counted for one chunk of one state without grouped heads, L = log2 C, e bytes an element of q, k, v
and the output: forward moves e C (2 K + 2 V) + 4 C K + 4 K V bytes and does
2 C (2 L C K + 2 L C C + 2 C V + 3 K V) FLOPs of products; backward moves
e C (4 K + 3 V) + 8 C K + 4 K V bytes and does
2 C (6 L C K + 2 L C C + 5 C V + 7 K V). float32 operands, and those of the inverse, take six passes
of the matrix unit.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from seqmix_kernels.options import Options
from seqmix_kernels.tpu import _common as common
from seqmix_kernels.tpu import _spans as spans
from seqmix_kernels.tpu import _vector as vector
from seqmix_kernels.tpu._common import batched_dot
from seqmix_kernels.tpu._vector import flat


def refusal(options: Options, arrays: tuple[jax.Array, ...]) -> str | None:
    """Why the kernel cannot take a call, or None."""
    return vector.refusal(options, arrays, vmem_bytes(options, arrays))


def vmem_bytes(options: Options, arrays: tuple[jax.Array, ...]) -> int:
    """VMEM of the backward kernel, which needs more than the forward one."""
    return vector.vmem_bytes(options, arrays, (28, 70))


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
    keep: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The output, the final state, and the states entering the chunks (None unless `keep`).

    Args:
      options: static options.
      interpret: as in `seqmix_kernels.target.Target`.
      shared: nothing.
      q: [B, T, Hq, K] float32 or bfloat16, and so k and v.
      k: [B, T, Hk, K].
      v: [B, T, Hv, V].
      log_decay: [B, T, Hs, K] float32, finite and <= 0.
      beta: [B, T, Hs] float32.
      state: [B, Hs, K, V] float32.
      run: [B, T] int32 document numbers, or None.
      keep: whether `backward` will be called.

    Returns:
      [B, T, Ho, V] in the options' dtype; [B, Hs, K, V] float32; [B, chunks, V, Hs K] float32.
    """
    cut, batch = vector.cut_of(options, q, k, v), q.shape[0]
    heads = options.heads
    arrays = vector.Arrays(cut, batch)
    arrays.tokens(
        q=flat(q, cut.key),
        k=flat(k, cut.key),
        v=flat(v, cut.value),
        log_decay=flat(log_decay, cut.key),
    )
    arrays.strengths(beta=vector.by_chunk(cut, beta))
    arrays.states(first=vector.padded(cut, state))
    arrays.starts(run)
    out_shape = (batch, cut.time, heads.outputs * cut.value)
    arrays.tokens(out=jax.ShapeDtypeStruct(out_shape, options.out_dtype))
    state_shape = (batch, heads.states, cut.key, cut.value)
    arrays.states(final=jax.ShapeDtypeStruct(state_shape, jnp.float32))
    if keep:
        states_shape = (batch, cut.chunks, cut.value, heads.states * cut.key)
        arrays.chunk_states(entering=jax.ShapeDtypeStruct(states_shape, jnp.float32))
    out, final, *entering = arrays.run("vector_delta_forward", _forward_body, interpret)
    out = out.reshape(batch, cut.time, heads.outputs, cut.value)[..., : v.shape[3]]
    return out, vector.unpadded(final, state), entering[0] if keep else None


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
    entering: jax.Array,
    d_out: jax.Array,
    d_final: jax.Array,
) -> tuple[tuple[()], tuple[jax.Array, ...], jax.Array]:
    """Gradients of `forward`.

    Args:
      options, interpret, shared, q, k, v, log_decay, beta, state, run: as there.
      entering: the states entering the chunks, which `forward` returned.
      d_out: [B, T, Ho, V].
      d_final: [B, Hs, K, V] float32.

    Returns:
      (); the gradients of q, k, v, log_decay and beta; that of the state.
    """
    cut, batch = vector.cut_of(options, q, k, v, reverse=True), q.shape[0]
    heads = options.heads
    arrays = vector.Arrays(cut, batch)
    given = (q, k, v, log_decay)
    widths = (cut.key, cut.key, cut.value, cut.key)
    inputs = {
        name: flat(x, width)
        for name, x, width in zip(("q", "k", "v", "log_decay"), given, widths, strict=True)
    }
    strengths = vector.by_chunk(cut, beta)
    arrays.tokens(**inputs, d_out=flat(d_out, cut.value))
    arrays.strengths(beta=strengths)
    arrays.chunk_states(entering=entering)
    arrays.states(d_final=vector.padded(cut, d_final))
    arrays.starts(run)
    arrays.tokens(**{f"d_{n}": jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in inputs.items()})
    arrays.strengths(d_beta=jax.ShapeDtypeStruct(strengths.shape, strengths.dtype))
    state_shape = (batch, heads.states, cut.key, cut.value)
    arrays.states(d_first=jax.ShapeDtypeStruct(state_shape, jnp.float32))
    *grads, d_beta, d_first = arrays.run("vector_delta_backward", _backward_body, interpret)
    d_beta = vector.by_token(cut, d_beta).astype(beta.dtype)
    grads = (vector.unflat(x, like) for x, like in zip(grads, given, strict=True))
    return (), (*grads, d_beta), vector.unpadded(d_first, state)


class _Chunk(NamedTuple):
    """What both passes compute of a chunk.

    Attributes:
      q: [n, x C, K], the query heads of each state one below the other.
      k: [n, C, K].
      sides: [n, (x + 1) C, K], the queries, and the keys as one more of them.
      beta: [n, C, 1].
      within: the decays.
      attention: A / s, [n, x C, C].
      kk: [n, C, C], L without beta.
      inverse: T, [n, C, C].
      entry_k: entry * K, [n, C, K].
      error: V - (entry * K) S, [n, C, V].
      new: V', [n, C, V].
    """

    q: jax.Array
    k: jax.Array
    sides: jax.Array
    beta: jax.Array
    within: spans.Spans
    attention: jax.Array
    kk: jax.Array
    inverse: jax.Array
    entry_k: jax.Array
    error: jax.Array
    new: jax.Array


def _chunk(cut: vector.Cut, refs: Any, state: jax.Array) -> _Chunk:
    low, queries = cut.low, cut.heads.queries
    q = vector.per_state(cut, vector.load(cut, refs.q, cut.key), queries)
    k = vector.per_state(cut, vector.load(cut, refs.k, cut.key))
    v = vector.load(cut, refs.v, cut.value)
    log_decay, _ = vector.decays(cut, refs)
    within = spans.spans(log_decay, log_decay)
    beta = vector.column(refs.beta[vector.own_strengths(cut)])

    # The keys stand as one more query of the state: both products share their decays.
    sides = jnp.concatenate([q, k], axis=1)
    own = jnp.sum(q * spans.stacked(k, q), axis=2, keepdims=True)
    own = jnp.concatenate([own, jnp.zeros_like(own[:, : cut.chunk])], axis=1)
    products = spans.scores(sides, k, within, own, low)
    attention, kk = products[:, : q.shape[1]], products[:, q.shape[1] :]
    inverse = spans.unit_lower_inverse(beta * kk)

    entry_k = k * within.entry
    error = v - batched_dot(entry_k.astype(low), state.astype(low), 2, 2)
    new = batched_dot(inverse.astype(low), (beta * error).astype(low))
    return _Chunk(q, k, sides, beta, within, attention, kk, inverse, entry_k, error, new)


def _forward_body(cut: vector.Cut, refs: Any) -> None:
    first, last = vector.ends(cut)

    @common.when(first)
    def _():
        refs.carry[...] = vector.transposed(refs.first[0])

    low, state = cut.low, refs.carry[...]
    if hasattr(refs, "entering"):
        refs.entering[0, 0] = vector.joined(state)
    q, k, *_, within, attention, _, _, _, _, new = _chunk(cut, refs, state)

    entry_q = q * spans.stacked(within.entry, q)
    out = batched_dot(attention.astype(low), new.astype(low))
    out += batched_dot(entry_q.astype(low), state.astype(low), 2, 2)
    vector.store(refs.out, (cut.scale * out).reshape(-1, cut.chunk, cut.value))

    written = batched_dot(new.astype(low), (k * within.exit).astype(low), 1, 1)
    state = within.through * state + written
    refs.carry[...] = state

    @common.when(last)
    def _():
        refs.final[0] = vector.transposed(state)


def _backward_body(cut: vector.Cut, refs: Any) -> None:
    first, last = vector.ends(cut)

    @common.when(first)
    def _():
        refs.carry[...] = vector.transposed(refs.d_final[0])

    low, sides = cut.low, cut.heads.queries
    state, d_state = vector.split(refs.entering[0, 0], cut.key), refs.carry[...]
    of = _chunk(cut, refs, state)
    q, k, beta, within = of.q, of.k, of.beta, of.within
    low_state, low_d_state, new = state.astype(low), d_state.astype(low), of.new.astype(low)
    d_out = vector.load(cut, refs.d_out, cut.value) * cut.scale
    d_out = d_out.reshape(cut.states, sides * cut.chunk, cut.value).astype(low)
    entry = spans.stacked(within.entry, q)
    entry_q, exit_k = q * entry, k * within.exit

    # V' solves (I + L) V' = beta error: d_right is the gradient of the right side.
    d_new = batched_dot(of.attention.astype(low), d_out, 1, 1)
    d_new += batched_dot(exit_k.astype(low), low_d_state, 2, 2)
    d_right = batched_dot(of.inverse.astype(low), d_new.astype(low), 1, 1)
    d_lower = -spans.strictly_lower(batched_dot(d_right.astype(low), new, 2, 2))
    dv = beta * d_right
    d_entry_k = -batched_dot(dv.astype(low), low_state)
    d_beta = jnp.sum(d_lower * of.kk, axis=2, keepdims=True)
    d_beta += jnp.sum(d_right * of.error, axis=2, keepdims=True)

    # Through the pairs: queries and keys against earlier keys.
    d_attention = batched_dot(d_out, new, 2, 2)
    d_own = spans.own_products(d_attention)
    d_products = jnp.concatenate([d_attention, beta * d_lower], axis=1)
    d_sides, dk, terms = spans.gradients(d_products, of.sides, k, within, low)

    d_entry_q = batched_dot(d_out, low_state)
    d_exit_k = batched_dot(new, low_d_state)
    dq = d_sides[:, : q.shape[1]] + d_entry_q * entry + d_own * spans.stacked(k, q)
    dk += d_sides[:, q.shape[1] :] + d_entry_k * within.entry + d_exit_k * within.exit
    dk += spans.summed(d_own * q, k)

    d_log_decay = spans.log_decay_gradient(
        terms,
        spans.summed(entry_q * d_entry_q, k) + of.entry_k * d_entry_k,
        exit_k * d_exit_k,
        within.through * jnp.sum(state * d_state, axis=1, keepdims=True),
        read_after=True,
    )
    vector.store(refs.d_q, vector.per_key(cut, dq, sides))
    vector.store(refs.d_k, vector.per_key(cut, dk))
    vector.store(refs.d_v, dv)
    vector.store(refs.d_log_decay, d_log_decay)
    refs.d_beta[vector.own_strengths(cut)] = vector.row(d_beta).astype(refs.d_beta.dtype)
    d_state = within.through * d_state + batched_dot(d_out, entry_q.astype(low), 1, 1)
    d_state -= batched_dot(dv.astype(low), of.entry_k.astype(low), 1, 1)
    refs.carry[...] = d_state

    @common.when(last)
    def _():
        refs.d_first[0] = vector.transposed(d_state)
