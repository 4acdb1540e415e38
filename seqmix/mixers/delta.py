# SPDX-License-Identifier: Apache-2.0
"""The delta-rule family with one decay per head.

S~ = a_t S_{t-1};  S_t = S~ + k_t (beta_t (v_t - k_t S~))^T;  o_t = s q_t S_t: the error is measured
against the decayed state. DeltaNet is the case a = 1.

Chunkwise form (Yang et al. 2024, arXiv 2406.06484 and 2412.06464), with G, D as in
`scalar_decay` and strict(.) the part below the diagonal::

    L  = strict(beta (K K^T) * D);  T = (I + L)^{-1}
    W  = T (beta e^G * K);  U = T (beta * V);  V' = U - W S
    O  = s e^G * (Q S) + (s (Q K^T) * D) V'
    S' = e^{G_C} S + (e^{G_C - G} * K)^T V'

Only V' and S' are sequential over chunks. Backward: dV' and dS by the reverse recursion

    dV' = A^T dO + (e^{G_C - G} * K) dS
    dS_in = e^{G_C} dS + s (e^G * Q)^T dO - W^T dV'

then, in parallel over chunks: V' solves (I + L) V' = beta (V - e^G * K S), so with dR = T^T dV' the
gradient of that right side, dL = -strict(dR V'^T), and the products' own gradients follow. The
gradient of log-decays is formed as in `scalar_decay`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from seqmix.mixers import _chunks as chunks
from seqmix.mixers import _pallas
from seqmix.mixers._checks import Heads
from seqmix.mixers._dispatch import choose, kernel_refusal
from seqmix.mixers._numerics import (
    clean_log_decay,
    contract,
    lower_ones,
    operand_dtype,
    state_dtype,
    unit_lower_inverse,
    varying_like,
)
from seqmix.mixers.scalar_decay import log_decay_gradient

FAMILY = "delta"
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
      log_decay: [B, T, Hs] float32, Hs = states.
      beta: [B, T, Hs] write strengths.
      heads: the grouping of Hq, Hk, Hv.
      scale: static factor on the output.
      initial_state: [B, Hs, K, V] or None for zeros.
      run: [B, T] document numbers or None.
      chunk_size: C, None for 64.
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
    log_decay = clean_log_decay(log_decay.astype(dtype))
    beta = beta.astype(dtype)
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
        return _pallas.run(FAMILY, options, arrays, state, run)
    if impl == "recurrent":
        return _recurrent(q, k, v, log_decay, beta, state, run, heads, scale)
    cut = chunks.layout(q.shape[1], chunk_size or DEFAULT_CHUNK)
    return _chunked((heads, float(scale), cut), q, k, v, log_decay, beta, state, run)


def _recurrent(q, k, v, log_decay, beta, state, run, heads, scale):
    """The definition, one token at a time."""
    dtype, out_dtype = state.dtype, v.dtype
    batch, time = q.shape[:2]
    h, r, x = heads.keys, heads.values, heads.queries
    decay = jnp.exp(log_decay)
    if run is not None:
        decay = jnp.where(jnp.diff(run, axis=1, prepend=0)[..., None] > 0, 0, decay)

    def step(s, token):
        q, k, v, a, b = token
        k = k.astype(dtype)
        s = a[..., None, None] * s
        error = v.astype(dtype) - contract("bhk,bhrkv->bhrv", k, s)
        s = s + contract("bhk,bhrv->bhrkv", k, b[..., None] * error)
        return s, contract("bhxk,bhrkv->bhrxv", q.astype(dtype), s) * scale

    tokens = (
        q.reshape(batch, time, h, x, -1),
        k,
        v.reshape(batch, time, h, r, -1),
        decay.reshape(batch, time, h, r),
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

    Axes: b batch, n chunk, i and j tokens of a chunk, h key head, r state of the key head,
    x query of the state, k and v widths.
    """

    def __init__(self, q, k, v, log_decay, beta, run, entry, low):
        self.low = low
        self.decay = chunks.decays(log_decay, run, entry)
        self.entry = self.decay.entry[..., None]
        self.leave = self.decay.exit[..., None]
        self.beta = beta
        self.read_beta = beta * self.decay.entry
        self.strict = self.decay.intra * lower_ones(k.shape[3], self.decay.intra.dtype, strict=True)
        self.kk = contract("bnhik,bnhjk->bnhij", k, k, dtype=low)[:, :, :, None]
        self.inverse = unit_lower_inverse(beta[..., None] * self.kk * self.strict)
        self.w = contract(
            "bnhrij,bnhjk->bnhrik", self.inverse * self.read_beta[..., None, :], k, dtype=low
        )
        self.u = contract("bnhrij,bnhrjv->bnhriv", self.inverse * beta[..., None, :], v, dtype=low)
        self.qk = contract("bnhxik,bnhjk->bnhxij", q, k, dtype=low)[:, :, :, None]
        self.attention = self.qk * self.decay.intra[:, :, :, :, None]

    def states(self, k, state):
        """State after the block; states entering each chunk; V' [B, n, h, r, C, V]."""

        def step(s, x):
            through, k, leave, w, u = x
            new = u - contract("bhrik,bhrkv->bhriv", w, s, dtype=self.low)
            written = contract("bhjk,bhrjv->bhrkv", k, new * leave, dtype=self.low)
            return through[..., None, None] * s + written, (s, new)

        xs = (self.decay.through, k, self.leave, self.w, self.u)
        final, (entering, new) = chunks.scan_chunks(step, state, xs)
        return final, entering, new


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(static, q, k, v, log_decay, beta, state, run):
    return _chunked_forward(static, q, k, v, log_decay, beta, state, run)[0]


def _blocked_inputs(static, q, k, v, log_decay, beta, run):
    _, _, cut = static
    xs = tuple(chunks.to_blocks(a, cut) for a in (q, k, v, log_decay, beta))
    if run is None:
        return (*xs, None, None)
    run = chunks.to_blocks(run, cut, fill_last=True)
    return (*xs, run, chunks.entry_runs(run))


def _chunked_forward(static, q, k, v, log_decay, beta, state, run):
    heads, scale, cut = static
    low = operand_dtype(q, k, v)

    def block(state, xs):
        *arrays, run, entry = xs
        q, k, v, log_decay, beta = chunks.grouped(heads, *arrays)
        parts = _Parts(q, k, v, log_decay, beta, run, entry, low)
        after, entering, new = parts.states(k, state)
        out = contract("bnhrxij,bnhrjv->bnhrxiv", parts.attention, new, dtype=low)
        read = contract("bnhxik,bnhrkv->bnhrxiv", q, entering, dtype=low)
        out = scale * (out + read * parts.entry[:, :, :, :, None])
        return after, (chunks.joined_outputs(out, v.dtype), state)

    first = state.reshape(state.shape[0], heads.keys, heads.values, *state.shape[2:])
    xs = _blocked_inputs(static, q, k, v, log_decay, beta, run)
    final, (out, block_states) = lax.scan(block, first, xs)
    result = chunks.from_blocks(out, cut), final.reshape(state.shape)
    return result, (q, k, v, log_decay, beta, run, block_states)


def _chunked_backward(static, residuals, cotangents):
    heads, scale, cut = static
    q, k, v, log_decay, beta, run, block_states = residuals
    d_out, d_final = cotangents
    low = operand_dtype(q, k, v)

    def block(d_state, xs):
        d_out, state, *arrays, run, entry = xs
        q, k, v, log_decay, beta = chunks.grouped(heads, *arrays)
        parts = _Parts(q, k, v, log_decay, beta, run, entry, low)
        _, entering, new = parts.states(k, state)
        d_out = chunks.split_heads(d_out, heads.keys, heads.values, heads.queries)
        d_out = d_out.astype(state.dtype) * scale
        d_state, grads = _block_gradients(parts, q, k, v, entering, new, d_out, d_state)
        return d_state, tuple(chunks.joined_heads(g, x) for g, x in zip(grads, arrays, strict=True))

    d_last = d_final.reshape(d_final.shape[0], heads.keys, heads.values, *d_final.shape[2:])
    xs = (
        chunks.to_blocks(d_out, cut),
        block_states,
        *_blocked_inputs(static, q, k, v, log_decay, beta, run),
    )
    d_state, grads = lax.scan(block, d_last.astype(block_states.dtype), xs, reverse=True)
    return *(chunks.from_blocks(g, cut) for g in grads), d_state.reshape(d_final.shape), None


def _reverse_states(parts, q, k, d_out, d_read, d_state):
    """Gradients of the entering state, of each chunk's leaving state, and of V'."""
    low = parts.low
    from_reads = contract("bnhxik,bnhrxiv->bnhrkv", q, d_read, dtype=low)
    d_new_inside = contract("bnhrxij,bnhrxiv->bnhrjv", parts.attention, d_out, dtype=low)

    def step(d_state, x):
        through, k, leave, w, from_reads, inside = x
        d_new = inside + leave * contract("bhjk,bhrkv->bhrjv", k, d_state, dtype=low)
        erased = contract("bhrik,bhriv->bhrkv", w, d_new, dtype=low)
        return through[..., None, None] * d_state + from_reads - erased, (d_state, d_new)

    xs = (parts.decay.through, k, parts.leave, parts.w, from_reads, d_new_inside)
    d_state, (d_leaving, d_new) = chunks.scan_chunks(step, d_state, xs, reverse=True)
    return d_state, d_leaving, d_new


def _block_gradients(parts, q, k, v, entering, new, d_out, d_state):
    """Gradient of the entering state and (dq, dk, dv, d log_decay, d beta) of one block."""
    low, decay = parts.low, parts.decay
    d_read = d_out * parts.entry[:, :, :, :, None]
    d_state, d_leaving, d_new = _reverse_states(parts, q, k, d_out, d_read, d_state)

    # V' solves (I + L) V' = beta (V - e^G K S): d_right is the gradient of the right side.
    d_right = contract("bnhrij,bnhriv->bnhrjv", parts.inverse, d_new, dtype=low)
    d_lower = -contract("bnhriv,bnhrjv->bnhrij", d_right, new, dtype=low) * parts.strict
    dv = parts.beta[..., None] * d_right
    d_kappa = -contract("bnhriv,bnhrkv->bnhrik", d_right, entering, dtype=low)
    d_kk = jnp.sum(d_lower * parts.beta[..., None], axis=3)

    # Through the reads inside the chunk.
    d_attention = contract("bnhrxiv,bnhrjv->bnhrxij", d_out, new, dtype=low)
    d_attention = d_attention * decay.intra[:, :, :, :, None]
    d_qk = jnp.sum(d_attention, axis=3)

    dq = contract("bnhxij,bnhjk->bnhxik", d_qk, k, dtype=low)
    d_q_read = contract("bnhrxiv,bnhrkv->bnhrxik", d_read, entering, dtype=low)
    dq += jnp.sum(d_q_read, axis=3)
    d_written = contract("bnhrjv,bnhrkv->bnhrjk", new * parts.leave, d_leaving, dtype=low)
    dk = contract("bnhxij,bnhxik->bnhjk", d_qk, q, dtype=low)
    dk += contract("bnhij,bnhjk->bnhik", d_kk + jnp.swapaxes(d_kk, -1, -2), k, dtype=low)
    dk += jnp.sum(d_kappa * parts.read_beta[..., None] + d_written, axis=3)

    k_state = k[:, :, :, None].astype(d_kappa.dtype)
    d_read_beta = jnp.sum(d_kappa * k_state, axis=-1)
    lower_pairs = d_lower * parts.kk
    d_beta = jnp.sum(lower_pairs, axis=-1) + jnp.sum(d_right * v, axis=-1)
    d_beta += d_read_beta * decay.entry

    reads = jnp.sum(q[:, :, :, None] * d_q_read, axis=(4, -1)) + d_read_beta * parts.read_beta
    writes = jnp.sum(d_written * k_state, axis=-1)
    pairs = jnp.sum(d_attention * parts.qk, axis=4) + parts.beta[..., None] * lower_pairs
    d_log = log_decay_gradient(pairs, reads, writes, decay.through, entering, d_leaving)
    return d_state, (dq, dk, dv, d_log, d_beta)


_chunked.defvjp(_chunked_forward, _chunked_backward)
