# SPDX-License-Identifier: Apache-2.0
"""TPU kernels of the vector-decay family: GLA, HGRN2, and RWKV-5 and RWKV-6 with their bonus.

The maths is that of `seqmix.mixers.vector_decay` (Yang et al. 2023, arXiv 2312.06635), whose ``A``,
``entry``, ``exit`` and ``through`` these are; `_spans` has the decays and the pairs, `_vector` the
grid. A document's first token has log-decay -inf, which is all that keeps documents apart. The
forward pass keeps the float32 state that enters each chunk; the backward pass walks the chunks in
reverse and recomputes the rest.

Counted for one chunk of one state without grouped heads, L = log2 C, e bytes an element of q, k, v
and the output: forward moves e C (2 K + 2 V) + 4 C K + 4 K V bytes and does
2 C (L C K + C V + 2 K V) FLOPs of products; backward moves e C (4 K + 3 V) + 8 C K + 4 K V bytes
and does 2 C (3 L C K + 2 C V + 4 K V). float32 operands take six passes of the matrix unit.
"""

from typing import Any

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
    return vector.vmem_bytes(options, arrays, (24, 48))


def forward(
    options: Options,
    interpret: bool | str,
    shared: tuple[jax.Array, ...],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    state: jax.Array,
    run: jax.Array | None,
    *,
    keep: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The output, the final state, and the states entering the chunks (None unless `keep`).

    Args:
      options: static options.
      interpret: as in `seqmix_kernels.target.Target`.
      shared: (bonus [Hs, K] float32,) to read before the write; () to read after it.
      q: [B, T, Hq, K] float32 or bfloat16, and so k and v.
      k: [B, T, Hk, K].
      v: [B, T, Hv, V].
      log_decay: [B, T, Hs, K] float32, finite and <= 0.
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
    arrays.states(first=vector.padded(cut, state))
    arrays.starts(run)
    if shared:
        arrays.channels(bonus=common.pad_axis(shared[0], 1, cut.key)[:, None])
    out_shape = (batch, cut.time, heads.outputs * cut.value)
    arrays.tokens(out=jax.ShapeDtypeStruct(out_shape, options.out_dtype))
    state_shape = (batch, heads.states, cut.key, cut.value)
    arrays.states(final=jax.ShapeDtypeStruct(state_shape, jnp.float32))
    if keep:
        states_shape = (batch, cut.chunks, cut.value, heads.states * cut.key)
        arrays.chunk_states(entering=jax.ShapeDtypeStruct(states_shape, jnp.float32))
    out, final, *entering = arrays.run("vector_decay_forward", _forward_body, interpret)
    out = out.reshape(batch, cut.time, heads.outputs, cut.value)[..., : v.shape[3]]
    return out, vector.unpadded(final, state), entering[0] if keep else None


def backward(
    options: Options,
    interpret: bool | str,
    shared: tuple[jax.Array, ...],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    state: jax.Array,
    run: jax.Array | None,
    entering: jax.Array,
    d_out: jax.Array,
    d_final: jax.Array,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...], jax.Array]:
    """Gradients of `forward`.

    Args:
      options, interpret, shared, q, k, v, log_decay, state, run: as there.
      entering: the states entering the chunks, which `forward` returned.
      d_out: [B, T, Ho, V].
      d_final: [B, Hs, K, V] float32.

    Returns:
      (each row's part of the bonus' gradient [B, Hs, K],) or (); those of q, k, v and log_decay;
      that of the state.
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
    arrays.tokens(**inputs, d_out=flat(d_out, cut.value))
    arrays.chunk_states(entering=entering)
    arrays.states(d_final=vector.padded(cut, d_final))
    arrays.starts(run)
    if shared:
        arrays.channels(bonus=common.pad_axis(shared[0], 1, cut.key)[:, None])
    arrays.tokens(**{f"d_{n}": jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in inputs.items()})
    state_shape = (batch, heads.states, cut.key, cut.value)
    arrays.states(d_first=jax.ShapeDtypeStruct(state_shape, jnp.float32))
    if shared:
        bonus_shape = (batch, heads.states, 1, cut.key)
        arrays.channels(d_bonus=jax.ShapeDtypeStruct(bonus_shape, jnp.float32))
    results = arrays.run("vector_decay_backward", _backward_body, interpret)
    grads = tuple(vector.unflat(x, like) for x, like in zip(results, given, strict=False))
    d_bonus = tuple(x[:, :, 0, : k.shape[3]] for x in results[5:])
    return d_bonus, grads, vector.unpadded(results[4], state)


def _queries(cut: vector.Cut, ref: Any) -> jax.Array:
    """[n, x C, K], the query heads of each state one below the other."""
    return vector.per_state(cut, vector.load(cut, ref, cut.key), cut.heads.queries)


def _spans(cut: vector.Cut, refs: Any) -> spans.Spans:
    log_decay, before = vector.decays(cut, refs)
    return spans.spans(log_decay, before if hasattr(refs, "bonus") else log_decay)


def _scores(cut: vector.Cut, refs: Any, q: jax.Array, k: jax.Array, within: spans.Spans):
    """A / s, [n, x C, C]."""
    pair = q * spans.stacked(k, q)
    if hasattr(refs, "bonus"):
        pair = pair * refs.bonus[...]
    own = jnp.sum(pair, axis=2, keepdims=True)
    return spans.scores(q, k, within, own, cut.low)


def _forward_body(cut: vector.Cut, refs: Any) -> None:
    first, last = vector.ends(cut)

    @common.when(first)
    def _():
        refs.carry[...] = vector.transposed(refs.first[0])

    q = _queries(cut, refs.q)
    k = vector.per_state(cut, vector.load(cut, refs.k, cut.key))
    v = vector.load(cut, refs.v, cut.value, cut.low)
    within = _spans(cut, refs)
    state = refs.carry[...]
    if hasattr(refs, "entering"):
        refs.entering[0, 0] = vector.joined(state)

    matrix = _scores(cut, refs, q, k, within)
    entry_q = q * spans.stacked(within.entry, q)
    out = batched_dot(matrix.astype(cut.low), v)
    out += batched_dot(entry_q.astype(cut.low), state.astype(cut.low), 2, 2)
    vector.store(refs.out, (cut.scale * out).reshape(-1, cut.chunk, cut.value))

    written = batched_dot(v, (k * within.exit).astype(cut.low), 1, 1)
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
        if hasattr(refs, "bonus"):
            refs.d_bonus[0] = jnp.zeros_like(refs.d_bonus[0])

    low, sides = cut.low, cut.heads.queries
    q = _queries(cut, refs.q)
    k = vector.per_state(cut, vector.load(cut, refs.k, cut.key))
    v = vector.load(cut, refs.v, cut.value, low)
    within = _spans(cut, refs)
    state, d_state = vector.split(refs.entering[0, 0], cut.key), refs.carry[...]
    d_out = vector.load(cut, refs.d_out, cut.value) * cut.scale
    d_out = d_out.reshape(cut.states, sides * cut.chunk, cut.value).astype(low)

    matrix = _scores(cut, refs, q, k, within)
    d_matrix = batched_dot(d_out, v, 2, 2)
    d_own = spans.own_products(d_matrix)
    dq, dk, terms = spans.gradients(d_matrix, q, k, within, low)

    entry = spans.stacked(within.entry, q)
    entry_q, exit_k = q * entry, k * within.exit
    d_entry_q = batched_dot(d_out, state.astype(low))
    d_exit_k = batched_dot(v, d_state.astype(low))
    dv = batched_dot(matrix.astype(low), d_out, 1, 1)
    dv += batched_dot(exit_k.astype(low), d_state.astype(low), 2, 2)

    d_log_decay = spans.log_decay_gradient(
        terms,
        spans.summed(entry_q * d_entry_q, k),
        exit_k * d_exit_k,
        within.through * jnp.sum(state * d_state, axis=1, keepdims=True),
        read_after=not hasattr(refs, "bonus"),
    )
    weighted = d_own
    if hasattr(refs, "bonus"):
        own = spans.summed(d_own * q, k) * k
        refs.d_bonus[0] += jnp.sum(own, axis=1, keepdims=True)
        weighted = d_own * refs.bonus[...]
    dq += d_entry_q * entry + weighted * spans.stacked(k, q)
    dk += d_exit_k * within.exit + spans.summed(weighted * q, k)

    vector.store(refs.d_q, vector.per_key(cut, dq, sides))
    vector.store(refs.d_k, vector.per_key(cut, dk))
    vector.store(refs.d_v, dv)
    vector.store(refs.d_log_decay, d_log_decay)
    d_state = within.through * d_state + batched_dot(d_out, entry_q.astype(low), 1, 1)
    refs.carry[...] = d_state

    @common.when(last)
    def _():
        refs.d_first[0] = vector.transposed(d_state)
