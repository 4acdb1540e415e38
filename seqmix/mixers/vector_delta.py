# SPDX-License-Identifier: Apache-2.0
"""The delta-rule family with one decay per key channel.

S~ = diag(a_t) S_{t-1};  S_t = S~ + k_t (beta_t (v_t - k_t S~))^T;  o_t = s q_t S_t.

Chunkwise form of a chunk with entering state S (Kimi Linear, arXiv 2510.26692), with the decay
products `entry`, `exit`, `through` of `_pairwise.Spans`::

    A = s (decayed products of q with the keys at or before it)
    L = beta (decayed products of k with the keys before it);  T = (I + L)^{-1}
    W = T (beta entry * K);  U = T (beta * V);  V' = U - W S
    O  = s (entry * Q) S + A V'
    S' = diag(through) S + (exit * K)^T V'

Backward: as in `delta`, with the pairs' gradients and the log-decays' from `_pairwise`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from seqmix.mixers import _chunks as chunks
from seqmix.mixers import _pairwise as pairwise
from seqmix.mixers import _pallas
from seqmix.mixers._checks import Heads
from seqmix.mixers._dispatch import choose, kernel_refusal
from seqmix.mixers._numerics import (
    clean_log_decay,
    contract,
    operand_dtype,
    state_dtype,
    unit_lower_inverse,
    varying_like,
)

FAMILY = "vector_delta"
IMPLEMENTATIONS = ("recurrent", "chunked")
DEFAULT_CHUNK = 64


def scan(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    heads: Heads,
    scale: float,
    initial_state: jax.Array | None,
    run: jax.Array | None,
    chunk_size: int | None,
    mixer: str,
    impl: str,
) -> tuple[jax.Array, jax.Array]:
    """Runs the family on checked arguments; padding has been zeroed by the caller.

    Args:
      q: [B, T, Hq, K].
      k: [B, T, Hk, K].
      v: [B, T, Hv, V].
      log_decay: [B, T, Hs, K] float32, Hs = states.
      beta: [B, T, Hs] write strengths.
      heads: the grouping of Hq, Hk, Hv.
      scale: static factor on the output.
      initial_state: [B, Hs, K, V] or None for zeros.
      run: [B, T] document numbers or None.
      chunk_size: C, None for 64; rounded up to a power of two.
      mixer: name of the calling mixer, for messages.
      impl: one of IMPLEMENTATIONS, 'pallas' or 'auto'.

    Returns:
      out [B, T, Ho, V] in v's dtype; final state [B, Hs, K, V] in the state dtype.

    Raises:
      ValueError: if `impl` is unknown or cannot run.
    """
    dtype = state_dtype(q, k, v, log_decay)
    shape = (q.shape[0], heads.states, k.shape[-1], v.shape[-1])
    state = jnp.zeros(shape, dtype) if initial_state is None else initial_state.astype(dtype)
    state = varying_like(state, q, k, v, log_decay, beta)
    log_decay, beta = log_decay.astype(dtype), beta.astype(dtype)
    options = _pallas.options(heads, float(scale), jnp.dtype(v.dtype), chunk_size)
    arrays = (q, k, v, log_decay, beta)
    impl = choose(
        mixer,
        impl,
        IMPLEMENTATIONS,
        time=q.shape[1],
        refusal=lambda: kernel_refusal(FAMILY, impl, q.shape[0], options, arrays),
    )
    if impl == "pallas":
        arrays = (q, k, v, clean_log_decay(log_decay), beta)
        return _pallas.run(FAMILY, options, arrays, state, run)
    starts = None if run is None else jnp.diff(run, axis=1, prepend=0) > 0
    if impl == "recurrent":
        return _recurrent(q, k, v, log_decay, beta, state, starts, heads, scale)
    cut = chunks.layout(q.shape[1], pairwise.chunk_tokens(chunk_size, DEFAULT_CHUNK))
    return _chunked((heads, float(scale), cut), q, k, v, log_decay, beta, state, starts)


def _recurrent(q, k, v, log_decay, beta, state, starts, heads, scale):
    """The definition, one token at a time."""
    dtype, out_dtype = state.dtype, v.dtype
    batch, time = q.shape[:2]
    h, r, x = heads.keys, heads.values, heads.queries
    decay = jnp.exp(log_decay)
    if starts is not None:
        decay = jnp.where(starts[..., None, None], 0, decay)

    def step(s, token):
        q, k, v, a, b = token
        k = k.astype(dtype)
        s = a[..., None] * s
        error = v.astype(dtype) - contract("bhk,bhrkv->bhrv", k, s)
        s = s + contract("bhk,bhrv->bhrkv", k, b[..., None] * error)
        return s, contract("bhxk,bhrkv->bhrxv", q.astype(dtype), s) * scale

    tokens = (
        q.reshape(batch, time, h, x, -1),
        k,
        v.reshape(batch, time, h, r, -1),
        decay.reshape(batch, time, h, r, -1),
        beta.reshape(batch, time, h, r),
    )
    final, out = lax.scan(
        step,
        state.reshape(batch, h, r, *state.shape[2:]),
        jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), tokens),
    )
    out = jnp.moveaxis(out, 0, 1).reshape(batch, time, heads.outputs, v.shape[-1])
    return out.astype(out_dtype), final.reshape(state.shape)


class _Parts:
    """What the forward and backward passes of one block both need (chunk-parallel parts).

    Axes as in `delta`: [B, n, h, r, x, C, width], x query of the state.
    """

    def __init__(self, q, k, v, log_decay, beta, starts, low):
        dtype = log_decay.dtype
        decay = jnp.exp(log_decay)
        if starts is not None:
            decay = jnp.where(starts[:, :, None, None, :, None], 0, decay)
        self.low = low
        self.spans = spans = pairwise.spans(decay, decay)
        self.q, self.k = q[:, :, :, None].astype(dtype), k[:, :, :, None].astype(dtype)
        self.beta = beta
        # The keys stand as one more query of the state: both products share their decays.
        sides = jnp.concatenate([self.q, self.k[..., None, :, :]], axis=-3)
        own = jnp.sum(self.q * self.k[..., None, :, :], axis=-1)
        own = jnp.pad(own, [(0, 0)] * (own.ndim - 2) + [(0, 1), (0, 0)])
        self.sides = sides
        products = pairwise.scores(sides, self.k, spans, own=own, dtype=low)
        self.attention, self.kk = products[..., :-1, :, :], products[..., -1, :, :]
        self.inverse = unit_lower_inverse(beta[..., None] * self.kk)
        self.entry_q = self.q * spans.entry[..., None, :, :]
        self.entry_k = self.k * spans.entry
        self.exit_k = self.k * spans.exit
        weighted = self.inverse * beta[..., None, :]
        self.w = contract("...ij,...jk->...ik", weighted, self.entry_k, dtype=low)
        self.u = contract("...ij,...jv->...iv", weighted, v, dtype=low)

    def states(self, state):
        """State after the block; states entering each chunk; V' [B, n, h, r, C, V]."""

        def step(s, x):
            through, exit_k, w, u = x
            new = u - contract("bhrik,bhrkv->bhriv", w, s, dtype=self.low)
            written = contract("bhrjk,bhrjv->bhrkv", exit_k, new, dtype=self.low)
            return through[..., None] * s + written, (s, new)

        xs = (self.spans.through, self.exit_k, self.w, self.u)
        final, (entering, new) = chunks.scan_chunks(step, state, xs)
        return final, entering, new


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(static, q, k, v, log_decay, beta, state, starts):
    return _chunked_forward(static, q, k, v, log_decay, beta, state, starts)[0]


def _blocked(cut, q, k, v, log_decay, beta, starts):
    arrays = (chunks.to_blocks(a, cut) for a in (q, k, v, log_decay, beta))
    return *arrays, None if starts is None else chunks.to_blocks(starts, cut)


def _chunked_forward(static, q, k, v, log_decay, beta, state, starts):
    heads, scale, cut = static
    low, out_dtype = operand_dtype(q, k, v), v.dtype

    def block(state, xs):
        *arrays, starts = xs
        q, k, v, log_decay, beta = chunks.grouped(heads, *arrays)
        parts = _Parts(q, k, v, log_decay, beta, starts, low)
        after, entering, new = parts.states(state)
        out = contract("bnhrxij,bnhrjv->bnhrxiv", parts.attention, new, dtype=low)
        out += contract("bnhrxik,bnhrkv->bnhrxiv", parts.entry_q, entering, dtype=low)
        return after, (chunks.joined_outputs(scale * out, out_dtype), state)

    first = state.reshape(state.shape[0], heads.keys, heads.values, *state.shape[2:])
    xs = _blocked(cut, q, k, v, log_decay, beta, starts)
    final, (out, block_states) = lax.scan(block, first, xs)
    result = chunks.from_blocks(out, cut), final.reshape(state.shape)
    return result, (q, k, v, log_decay, beta, starts, block_states)


def _chunked_backward(static, residuals, cotangents):
    heads, scale, cut = static
    *inputs, starts, block_states = residuals
    d_out, d_final = cotangents
    low, dtype = operand_dtype(*inputs[:3]), block_states.dtype

    def block(d_state, xs):
        d_out, state, *arrays, starts = xs
        q, k, v, log_decay, beta = chunks.grouped(heads, *arrays)
        parts = _Parts(q, k, v, log_decay, beta, starts, low)
        d_out = chunks.split_heads(d_out, heads.keys, heads.values, heads.queries)
        d_state, grads = _block_gradients(parts, v, state, d_out.astype(dtype) * scale, d_state)
        return d_state, tuple(chunks.joined_heads(g, x) for g, x in zip(grads, arrays, strict=True))

    d_last = d_final.reshape(d_final.shape[0], heads.keys, heads.values, *d_final.shape[2:])
    xs = (chunks.to_blocks(d_out, cut), block_states, *_blocked(cut, *inputs, starts))
    d_state, grads = lax.scan(block, d_last.astype(dtype), xs, reverse=True)
    return *(chunks.from_blocks(g, cut) for g in grads), d_state.reshape(d_final.shape), None


def _reverse_states(parts, d_out, d_state):
    """Gradients of the entering state, of each chunk's leaving state, and of V'."""
    low = parts.low
    from_reads = contract("bnhrxik,bnhrxiv->bnhrkv", parts.entry_q, d_out, dtype=low)
    inside = contract("bnhrxij,bnhrxiv->bnhrjv", parts.attention, d_out, dtype=low)

    def step(d_state, x):
        through, exit_k, w, from_reads, inside = x
        d_new = inside + contract("bhrjk,bhrkv->bhrjv", exit_k, d_state, dtype=low)
        erased = contract("bhrik,bhriv->bhrkv", w, d_new, dtype=low)
        return through[..., None] * d_state + from_reads - erased, (d_state, d_new)

    xs = (parts.spans.through, parts.exit_k, parts.w, from_reads, inside)
    d_state, (d_leaving, d_new) = chunks.scan_chunks(step, d_state, xs, reverse=True)
    return d_state, d_leaving, d_new


def _block_gradients(parts, v, state, d_out, d_state):
    """Gradient of the entering state and (dq, dk, dv, d log_decay, d beta) of one block."""
    low, spans, beta = parts.low, parts.spans, parts.beta
    _, entering, new = parts.states(state)
    d_state, d_leaving, d_new = _reverse_states(parts, d_out, d_state)

    # V' solves (I + L) V' = beta (V - (entry * K) S): d_right is the gradient of the right side.
    d_right = contract("...ij,...iv->...jv", parts.inverse, d_new, dtype=low)
    d_lower = -jnp.tril(contract("...iv,...jv->...ij", d_right, new, dtype=low), -1)
    dv = beta[..., None] * d_right
    d_entry_k = -contract("bnhriv,bnhrkv->bnhrik", dv, entering, dtype=low)
    error = v - contract("bnhrik,bnhrkv->bnhriv", parts.entry_k, entering, dtype=low)
    d_beta = jnp.sum(d_lower * parts.kk, axis=-1) + jnp.sum(d_right * error, axis=-1)

    # Through the pairs: queries and keys against earlier keys.
    d_attention = contract("bnhrxiv,bnhrjv->bnhrxij", d_out, new, dtype=low)
    d_own = jnp.diagonal(d_attention, axis1=-2, axis2=-1)[..., None]
    d_products = jnp.concatenate(
        [d_attention, (beta[..., None] * d_lower)[..., None, :, :]], axis=-3
    )
    d_sides, dk, terms = pairwise.gradients(d_products, parts.sides, parts.k, spans, dtype=low)

    d_entry_q = contract("bnhrxiv,bnhrkv->bnhrxik", d_out, entering, dtype=low)
    d_exit_k = contract("bnhrjv,bnhrkv->bnhrjk", new, d_leaving, dtype=low)
    dq = d_sides[..., :-1, :, :] + d_entry_q * spans.entry[..., None, :, :]
    dq += d_own * parts.k[..., None, :, :]
    dk += d_sides[..., -1, :, :] + d_entry_k * spans.entry + d_exit_k * spans.exit
    dk += jnp.sum(d_own * parts.q, axis=-3)

    reads = jnp.sum(parts.entry_q * d_entry_q, axis=-3) + parts.entry_k * d_entry_k
    passing = spans.through * jnp.sum(entering * d_leaving, axis=-1)
    d_log = pairwise.log_decay_gradient(
        terms, reads, parts.exit_k * d_exit_k, passing, read_after=True
    )
    return d_state, (jnp.sum(dq, axis=3), jnp.sum(dk, axis=3), dv, d_log, d_beta)


_chunked.defvjp(_chunked_forward, _chunked_backward)
