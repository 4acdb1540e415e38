# SPDX-License-Identifier: Apache-2.0
"""Diagonal plus low rank: S_t = diag(w_t) S_{t-1} + b_t (a_t S_{t-1}) + k_t v_t^T, o_t = s q_t S_t.

`a` reads the state of the token before, not decayed yet. RWKV-7 is a thin parametrisation of it.

Chunkwise form of a chunk with entering state S. With the decay products of `_pairwise.Spans`, read
before the decay for a and after it for q (`entry_a`, `entry_q`), and U_t = a_t S_{t-1}::

    A_xy = decayed products of the reads x with the writes y before them (for q: at them too)
    U  = A_ab U + A_ak V + (entry_a * a) S = T (A_ak V + (entry_a * a) S),  T = (I - A_ab)^{-1}
    O  = s ((entry_q * Q) S + A_qk V + A_qb U)
    S' = diag(through) S + (exit * K)^T V + (exit * B)^T U

Backward: with dX = T^T dU the gradient of the solve's right side, dA_ab = dX U^T, dA_ak = dX V^T
and d(entry_a * a) = dX S^T. Only U and S are sequential over chunks, in both directions.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from seqmix.mixers import _chunks as chunks
from seqmix.mixers import _pairwise as pairwise
from seqmix.mixers._numerics import (
    contract,
    operand_dtype,
    state_dtype,
    unit_lower_inverse,
    varying_like,
)

IMPLEMENTATIONS = ("recurrent", "chunked")
DEFAULT_CHUNK = 64


def scan(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    a: jax.Array,
    b: jax.Array,
    *,
    scale: float,
    initial_state: jax.Array | None,
    run: jax.Array | None,
    chunk_size: int | None,
    impl: str,
) -> tuple[jax.Array, jax.Array]:
    """Runs the family on checked arguments; padding has been zeroed by the caller.

    Args:
      q, k, a, b: [B, T, H, K].
      v: [B, T, H, V].
      log_decay: [B, T, H, K] float32.
      scale: static factor on the output.
      initial_state: [B, H, K, V] or None for zeros.
      run: [B, T] document numbers or None.
      chunk_size: C, None for 64; rounded up to a power of two.
      impl: one of IMPLEMENTATIONS.

    Returns:
      out [B, T, H, V] in v's dtype; final state [B, H, K, V] in the state dtype.
    """
    dtype = state_dtype(q, k, v, log_decay)
    shape = (*q.shape[:1], *q.shape[2:], v.shape[-1])
    state = jnp.zeros(shape, dtype) if initial_state is None else initial_state.astype(dtype)
    state = varying_like(state, q, k, v, log_decay, a, b)
    log_decay = log_decay.astype(dtype)
    starts = None if run is None else jnp.diff(run, axis=1, prepend=0) > 0
    if impl == "recurrent":
        return _recurrent(q, k, v, log_decay, a, b, state, starts, scale)
    cut = chunks.layout(q.shape[1], pairwise.chunk_tokens(chunk_size, DEFAULT_CHUNK))
    return _chunked((float(scale), cut), q, k, v, log_decay, a, b, state, starts)


def _recurrent(q, k, v, log_decay, a, b, state, starts, scale):
    """The definition, one token at a time."""
    dtype, out_dtype = state.dtype, v.dtype
    before = jnp.ones(q.shape[:2], dtype) if starts is None else 1 - starts.astype(dtype)

    def step(s, token):
        q, k, v, a, b = (x.astype(dtype) for x in token[:5])
        decay, before = token[5:]
        s = before[:, None, None, None] * s
        read = contract("bhk,bhkv->bhv", a, s)
        s = decay[..., None] * s + contract("bhk,bhv->bhkv", b, read)
        s = s + contract("bhk,bhv->bhkv", k, v)
        return s, contract("bhk,bhkv->bhv", q, s) * scale

    tokens = (q, k, v, a, b, jnp.exp(log_decay), before)
    final, out = lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens))
    return jnp.moveaxis(out, 0, 1).astype(out_dtype), final


class _Parts:
    """What the forward and backward passes of one block both need (chunk-parallel parts).

    Axes: [B, n, H, C, width]; z (between H and C) the two writes, (k, v) and (b, U).
    """

    def __init__(self, q, k, v, log_decay, a, b, starts, low):
        dtype = log_decay.dtype
        decay, seen = jnp.exp(log_decay), jnp.ones_like(log_decay)
        if starts is not None:
            first = starts[:, :, None, :, None]
            decay, seen = jnp.where(first, 0, decay), jnp.where(first, 0, seen)
        self.low = low
        self.after = pairwise.spans(decay, decay)
        self.before = pairwise.spans(decay, seen)
        self.q, self.a = q.astype(dtype), a.astype(dtype)
        self.writes = jnp.stack([k, b], axis=3).astype(dtype)
        own = jnp.sum(self.q[:, :, :, None] * self.writes, axis=-1)
        self.q_products = self._products(self.q, self.after, own)
        self.a_products = self._products(self.a, self.before, None)
        self.inverse = unit_lower_inverse(-self.a_products[:, :, :, 1])
        self.entry_q = self.q * self.after.entry
        self.entry_a = self.a * self.before.entry
        self.exit = self.writes * self.after.exit[:, :, :, None]
        self.w = contract("bnhij,bnhjk->bnhik", self.inverse, self.entry_a, dtype=low)
        right = contract("bnhij,bnhjv->bnhiv", self.a_products[:, :, :, 0], v, dtype=low)
        self.u = contract("bnhij,bnhjv->bnhiv", self.inverse, right, dtype=low)
        self.added = contract("bnhjk,bnhjv->bnhkv", self.exit[:, :, :, 0], v, dtype=low)

    def stacked(self, spans):
        """The spans with an axis for the two writes."""
        return jax.tree.map(lambda x: x[:, :, :, None], spans)

    def _products(self, reads, spans, own):
        """[B, n, H, z, C, C]."""
        own = None if own is None else own[..., None, :]
        reads = reads[:, :, :, None, None]
        out = pairwise.scores(reads, self.writes, self.stacked(spans), own=own, dtype=self.low)
        return out[:, :, :, :, 0]

    def states(self, state):
        """State after the block; states entering each chunk; U [B, n, H, C, V]."""

        def step(s, x):
            through, exit_b, added, w, u = x
            u = u + contract("bhik,bhkv->bhiv", w, s, dtype=self.low)
            written = contract("bhjk,bhjv->bhkv", exit_b, u, dtype=self.low)
            return through[..., None] * s + added + written, (s, u)

        xs = (self.after.through, self.exit[:, :, :, 1], self.added, self.w, self.u)
        final, (entering, u) = chunks.scan_chunks(step, state, xs)
        return final, entering, u


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(static, q, k, v, log_decay, a, b, state, starts):
    return _chunked_forward(static, q, k, v, log_decay, a, b, state, starts)[0]


def _blocked(cut, *arrays):
    *arrays, starts = arrays
    blocks = tuple(chunks.to_blocks(x, cut) for x in arrays)
    return *blocks, None if starts is None else chunks.to_blocks(starts, cut)


def _chunked_forward(static, q, k, v, log_decay, a, b, state, starts):
    scale, cut = static
    low, out_dtype = operand_dtype(q, k, v), v.dtype

    def block(state, xs):
        *arrays, starts = xs
        arrays = tuple(map(chunks.heads_first, arrays))
        v = arrays[2]
        parts = _Parts(*arrays, starts, low)
        after, entering, u = parts.states(state)
        values = jnp.stack([v.astype(u.dtype), u], axis=3)
        out = contract("bnhzij,bnhzjv->bnhiv", parts.q_products, values, dtype=low)
        out += contract("bnhik,bnhkv->bnhiv", parts.entry_q, entering, dtype=low)
        return after, (chunks.joined_outputs(scale * out, out_dtype), state)

    xs = _blocked(cut, q, k, v, log_decay, a, b, starts)
    final, (out, block_states) = lax.scan(block, state, xs)
    residuals = (q, k, v, log_decay, a, b, starts, block_states)
    return (chunks.from_blocks(out, cut), final), residuals


def _chunked_backward(static, residuals, cotangents):
    scale, cut = static
    *inputs, starts, block_states = residuals
    d_out, d_final = cotangents
    low, dtype = operand_dtype(*inputs[:3]), block_states.dtype

    def block(d_state, xs):
        d_out, state, *blocks, starts = xs
        arrays = tuple(map(chunks.heads_first, blocks))
        parts = _Parts(*arrays, starts, low)
        d_out = chunks.heads_first(d_out).astype(dtype) * scale
        d_state, grads = _block_gradients(parts, arrays[2], state, d_out, d_state)
        return d_state, tuple(chunks.joined_heads(g, x) for g, x in zip(grads, blocks, strict=True))

    xs = (chunks.to_blocks(d_out, cut), block_states, *_blocked(cut, *inputs, starts))
    d_state, grads = lax.scan(block, d_final.astype(dtype), xs, reverse=True)
    return *(chunks.from_blocks(g, cut) for g in grads), d_state, None


def _reverse_states(parts, d_out, d_state):
    """Gradients of the entering state, of each chunk's leaving state, and of U."""
    low = parts.low
    from_reads = contract("bnhik,bnhiv->bnhkv", parts.entry_q, d_out, dtype=low)
    inside = contract("bnhij,bnhiv->bnhjv", parts.q_products[:, :, :, 1], d_out, dtype=low)

    def step(d_state, x):
        through, exit_b, w, from_reads, inside = x
        d_u = inside + contract("bhjk,bhkv->bhjv", exit_b, d_state, dtype=low)
        from_solve = contract("bhik,bhiv->bhkv", w, d_u, dtype=low)
        return through[..., None] * d_state + from_reads + from_solve, (d_state, d_u)

    xs = (parts.after.through, parts.exit[:, :, :, 1], parts.w, from_reads, inside)
    d_state, (d_leaving, d_u) = chunks.scan_chunks(step, d_state, xs, reverse=True)
    return d_state, d_leaving, d_u


def _block_gradients(parts, v, state, d_out, d_state):
    """Gradient of the entering state and (dq, dk, dv, d log_decay, da, db) of one block."""
    low = parts.low
    _, entering, u = parts.states(state)
    values = jnp.stack([v.astype(u.dtype), u], axis=3)
    d_state, d_leaving, d_u = _reverse_states(parts, d_out, d_state)
    d_right = contract("bnhij,bnhiv->bnhjv", parts.inverse, d_u, dtype=low)

    d_q_products = contract("bnhiv,bnhzjv->bnhzij", d_out, values, dtype=low)
    d_a_products = contract("bnhiv,bnhzjv->bnhzij", d_right, values, dtype=low)
    d_own = jnp.diagonal(d_q_products, axis1=-2, axis2=-1)[..., None]

    def pairs(d_products, reads, spans):
        reads, spans = reads[:, :, :, None, None], parts.stacked(spans)
        d_reads, d_writes, terms = pairwise.gradients(
            d_products[..., None, :, :], reads, parts.writes, spans, dtype=low
        )
        return jnp.sum(d_reads[..., 0, :, :], axis=3), d_writes, terms

    dq, d_writes, q_terms = pairs(d_q_products, parts.q, parts.after)
    da, d_writes_a, a_terms = pairs(d_a_products, parts.a, parts.before)
    d_entry_q = contract("bnhiv,bnhkv->bnhik", d_out, entering, dtype=low)
    d_entry_a = contract("bnhiv,bnhkv->bnhik", d_right, entering, dtype=low)
    d_exit = contract("bnhzjv,bnhkv->bnhzjk", values, d_leaving, dtype=low)

    dq += d_entry_q * parts.after.entry + jnp.sum(d_own * parts.writes, axis=3)
    da += d_entry_a * parts.before.entry
    d_writes += d_writes_a + d_exit * parts.after.exit[:, :, :, None]
    d_writes += d_own * parts.q[:, :, :, None]
    dv = contract("bnhij,bnhiv->bnhjv", parts.q_products[:, :, :, 0], d_out, dtype=low)
    dv += contract("bnhij,bnhiv->bnhjv", parts.a_products[:, :, :, 0], d_right, dtype=low)
    dv += contract("bnhjk,bnhkv->bnhjv", parts.exit[:, :, :, 0], d_leaving, dtype=low)

    def both(terms):
        return jax.tree.map(lambda x: jnp.sum(x, axis=3), terms)

    written = jnp.sum(parts.exit * d_exit, axis=3)
    passing = parts.after.through * jnp.sum(entering * d_leaving, axis=-1)
    d_log = pairwise.log_decay_gradient(
        both(q_terms), parts.entry_q * d_entry_q, written, passing, read_after=True
    )
    nothing = (jnp.zeros_like(written), jnp.zeros_like(passing))
    d_log += pairwise.log_decay_gradient(
        both(a_terms), parts.entry_a * d_entry_a, *nothing, read_after=False
    )
    return d_state, (dq, d_writes[:, :, :, 0], dv, d_log, da, d_writes[:, :, :, 1])


_chunked.defvjp(_chunked_forward, _chunked_backward)
