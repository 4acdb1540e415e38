# SPDX-License-Identifier: Apache-2.0
"""The scalar-decay family: S_t = a_t S_{t-1} + k_t v_t^T, o_t = s q_t S_t, one decay per head.

SSD (Mamba-2), simple GLA, retention, lightning attention and linear attention are thin
parametrisations of it. Where a `Kernel` weighs the pairs (2Mamba, Based), the state holds its
features, and Q and K below stand for features wherever they meet the state.

Chunkwise form of a chunk with entering state S, where G sums log-decays from the chunk's start and
D_ij = exp(G_i - G_j) for i >= j (Dao & Gu 2024, arXiv 2405.21060; Yang et al. 2023, 2312.06635)::

    A  = s (Q K^T) * D
    O  = s e^G * (Q S) + A V
    S' = e^{G_C} S + (e^{G_C - G} * K)^T V

Backward, with dS the gradient of the state that leaves the chunk::

    dV   = A^T dO + (e^{G_C - G} * K) dS
    dQ   = s e^G * (dO S^T) + s (dO V^T * D) K
    dK   = e^{G_C - G} * (V dS^T) + s (dO V^T * D)^T Q
    dS_in = e^{G_C} dS + s (e^G * Q)^T dO

The gradient of log-decay t sums the (query i, key j) pairs with i >= t > j and what crosses the
chunk's edges. It is formed from those terms, not as a suffix sum of q*dq - k*dk, whose two nearly
equal halves leave no digits where decays are strong.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from seqmix.mixers import _chunks as chunks
from seqmix.mixers import _pallas
from seqmix.mixers._checks import Heads
from seqmix.mixers._dispatch import choose, kernel_refusal
from seqmix.mixers._kernels import PLAIN, Kernel
from seqmix.mixers._numerics import (
    clean_log_decay,
    contract,
    operand_dtype,
    prefix_sums_exclusive,
    state_dtype,
    straddling_sums,
    suffix_sums,
    varying_like,
)

FAMILY = "scalar_decay"
IMPLEMENTATIONS = ("recurrent", "associative", "chunked", "quadratic")
DEFAULT_CHUNK = 64
# The state of a second-order kernel outweighs a short chunk: longer chunks, fewer of them at once.
SECOND_ORDER_CHUNK, SECOND_ORDER_BLOCK = 128, 512


def scan(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    *,
    heads: Heads,
    scale: float,
    initial_state: jax.Array | None,
    run: jax.Array | None,
    chunk_size: int | None,
    mixer: str,
    impl: str,
    kernel: Kernel = PLAIN,
    strength: jax.Array | None = None,
    out_dtype: Any = None,
    operands: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the family on checked arguments; padding has been zeroed by the caller.

    Args:
      q: [B, T, Hq, K].
      k: [B, T, Hk, K].
      v: [B, T, Hv, V].
      log_decay: [B, T, Hs] float32, Hs = states.
      heads: the grouping of Hq, Hk, Hv.
      scale: static factor on the output.
      initial_state: [B, Hs, K, V] or None for zeros.
      run: [B, T] document numbers or None.
      chunk_size: C, None for 64 (128 with a second-order kernel).
      mixer: name of the calling mixer, for messages.
      impl: one of IMPLEMENTATIONS, 'pallas' or 'auto'. 'quadratic' is the masked-attention form,
        one chunk of T tokens.
      kernel: weight of a pair of tokens; K of the state is its number of features.
      strength: [B, T, Hs] float32 factors of what tokens write, or None for 1.
      out_dtype: dtype of the output, None for v's.
      operands: dtype in which large products read their operands, None for that of q, k and v.

    Returns:
      out [B, T, Ho, V]; final state [B, Hs, K, V] in the state dtype.

    Raises:
      ValueError: if `impl` is unknown or cannot run.
    """
    dtype = state_dtype(q, k, v, log_decay)
    out_dtype = jnp.dtype(v.dtype if out_dtype is None else out_dtype)
    low = jnp.dtype(operand_dtype(q, k, v) if operands is None else operands)
    time, features = q.shape[1], kernel.width(k.shape[-1])
    shape = (q.shape[0], heads.states, features, v.shape[-1])
    state = jnp.zeros(shape, dtype) if initial_state is None else initial_state.astype(dtype)
    state = varying_like(state, q, k, v, log_decay)
    log_decay = clean_log_decay(log_decay.astype(dtype))
    options = _pallas.options(heads, float(scale), out_dtype, chunk_size)
    arrays = (q.astype(low), k.astype(low), v.astype(low), log_decay)

    def refusal():
        if not kernel.plain:
            return "its pairs are weighed by a kernel function"
        return kernel_refusal(FAMILY, impl, q.shape[0], options, arrays)

    impl = choose(mixer, impl, IMPLEMENTATIONS, time=time, refusal=refusal)
    if impl == "pallas":
        if strength is not None and _pallas.has(FAMILY, "STRENGTH"):
            return _pallas.run(FAMILY, options, (*arrays, strength.astype(dtype)), state, run)
        written = arrays[2] if strength is None else (v * strength[..., None]).astype(low)
        return _pallas.run(FAMILY, options, (*arrays[:2], written, log_decay), state, run)
    if strength is not None:
        v = (v * strength[..., None]).astype(v.dtype)
    if impl == "recurrent":
        return _recurrent(q, k, v, log_decay, state, run, heads, scale, kernel, out_dtype)
    if impl == "quadratic":
        static = Static(
            heads, float(scale), chunks.Layout(time, 1, 1, time), kernel, out_dtype, low
        )
        return _parallel(static, q, k, v, log_decay, state, run)
    chunk = chunk_size or (SECOND_ORDER_CHUNK if kernel.square else DEFAULT_CHUNK)
    cut = chunks.layout(time, chunk, SECOND_ORDER_BLOCK if kernel.square else chunks.BLOCK_TOKENS)
    if impl == "associative":
        cut = chunks.Layout(time, 1, -(-time // cut.chunk), cut.chunk)
        static = Static(heads, float(scale), cut, kernel, out_dtype, low)
        return _parallel(static, q, k, v, log_decay, state, run)
    static = Static(heads, float(scale), cut, kernel, out_dtype, low)
    return _chunked(static, q, k, v, log_decay, state, run)


class Static(NamedTuple):
    """What a form is compiled for; the fields are arguments of `scan`, and the cut of T."""

    heads: Heads
    scale: float
    cut: chunks.Layout
    kernel: Kernel
    out_dtype: Any
    low: Any


def _recurrent(q, k, v, log_decay, state, run, heads, scale, kernel, out_dtype):
    """The definition, one token at a time."""
    dtype = state.dtype
    batch, time = q.shape[:2]
    h, r, x = heads.keys, heads.values, heads.queries
    decay = jnp.exp(log_decay)
    if run is not None:
        decay = jnp.where(jnp.diff(run, axis=1, prepend=0)[..., None] > 0, 0, decay)

    def step(s, token):
        q, k, v, a = token
        q, k = (kernel.features(z.astype(dtype)) for z in (q, k))
        write = contract("bhk,bhrv->bhrkv", k, v, dtype=dtype)
        s = a[..., None, None] * s + write
        return s, contract("bhxk,bhrkv->bhrxv", q, s) * scale

    tokens = (
        q.reshape(batch, time, h, x, -1),
        k,
        v.reshape(batch, time, h, r, -1),
        decay.reshape(batch, time, h, r),
    )
    final, out = lax.scan(
        step, state.reshape(batch, h, r, *state.shape[2:]), jax.tree.map(_time_first, tokens)
    )
    out = jnp.moveaxis(out, 0, 1).reshape(batch, time, heads.outputs, v.shape[-1])
    return out.astype(out_dtype), final.reshape(state.shape)


def _time_first(x):
    return jnp.moveaxis(x, 1, 0)


def _parallel(static, q, k, v, log_decay, state, run):
    """All chunks at once; their summaries combined by `lax.associative_scan`: depth log T."""
    heads, _, cut, kernel, out_dtype, low = static
    blocked = [chunks.to_blocks(a, cut)[0] for a in (q, k, v, log_decay)]
    run_blocks = None if run is None else chunks.to_blocks(run, cut, fill_last=True)
    entry = None if run is None else chunks.entry_runs(run_blocks)[0]
    q, k, v, log_decay = chunks.grouped(heads, *blocked)
    decay = chunks.decays(log_decay, None if run is None else run_blocks[0], entry)
    features = kernel.features(k.astype(state.dtype))
    local = contract("bnhjk,bnhrjv->bnhrkv", features, v * decay.exit[..., None], dtype=low)
    first = state.reshape(state.shape[0], 1, heads.keys, heads.values, *state.shape[2:])

    def combine(left, right):
        a, s = left
        b, t = right
        return a * b, b * s + t

    through = decay.through[..., None, None]
    gain, total = lax.associative_scan(combine, (through, local), axis=1)
    after = gain * first + total
    entering = jnp.concatenate([first, after[:, :-1]], axis=1)
    out = _read(static, q, k, v, decay, entering)
    out = chunks.joined_outputs(out, out_dtype)
    return chunks.from_blocks(out[None], cut), after[:, -1].reshape(state.shape)


def _scores(kernel, q, k, decay, low):
    """Q K^T [B, n, h, x, C, C], its weights, and weights * D [B, n, h, r, x, C, C]."""
    scores = contract("bnhxik,bnhjk->bnhxij", q, k, dtype=low)
    weights = kernel.weights(scores)
    return scores, weights, weights[:, :, :, None] * decay.intra[:, :, :, :, None]


def _read(static, q, k, v, decay, entering):
    """Outputs [B, n, h, r, x, C, V] from the chunks' entering states."""
    low = static.low
    *_, decayed = _scores(static.kernel, q, k, decay, low)
    out = contract("bnhrxij,bnhrjv->bnhrxiv", decayed, v, dtype=low)
    features = static.kernel.features(q.astype(entering.dtype))
    inter = contract("bnhxik,bnhrkv->bnhrxiv", features, entering, dtype=low)
    return static.scale * (out + inter * decay.entry[:, :, :, :, None, :, None])


def _entering_states(k, v, decay, state, low):
    """State after the block, and the states [B, n, h, r, K, V] entering each of its chunks."""
    local = contract("bnhjk,bnhrjv->bnhrkv", k, v * decay.exit[..., None], dtype=low)
    return chunks.carry_states(decay.through, local, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(static, q, k, v, log_decay, state, run):
    return _chunked_forward(static, q, k, v, log_decay, state, run)[0]


def _blocked_inputs(static, q, k, v, log_decay, run):
    cut = static.cut
    xs = tuple(chunks.to_blocks(a, cut) for a in (q, k, v, log_decay))
    if run is None:
        return (*xs, None, None)
    run = chunks.to_blocks(run, cut, fill_last=True)
    return (*xs, run, chunks.entry_runs(run))


def _chunked_forward(static, q, k, v, log_decay, state, run):
    heads, _, cut, kernel, out_dtype, low = static

    def block(state, xs):
        *arrays, run, entry = xs
        q, k, v, log_decay = chunks.grouped(heads, *arrays)
        decay = chunks.decays(log_decay, run, entry)
        features = kernel.features(k.astype(state.dtype))
        after, entering = _entering_states(features, v, decay, state, low)
        out = _read(static, q, k, v, decay, entering)
        return after, (chunks.joined_outputs(out, out_dtype), state)

    first = state.reshape(state.shape[0], heads.keys, heads.values, *state.shape[2:])
    xs = _blocked_inputs(static, q, k, v, log_decay, run)
    final, (out, block_states) = lax.scan(block, first, xs)
    result = chunks.from_blocks(out, cut), final.reshape(state.shape)
    return result, (q, k, v, log_decay, run, block_states)


def _chunked_backward(static, residuals, cotangents):
    heads, scale, cut, kernel, _, low = static
    q, k, v, log_decay, run, block_states = residuals
    d_out, d_final = cotangents

    def block(d_state, xs):
        d_out, state, *arrays, run, entry = xs
        q, k, v, log_decay = chunks.grouped(heads, *arrays)
        decay = chunks.decays(log_decay, run, entry)
        k_features = jax.vjp(kernel.features, k.astype(state.dtype))
        _, entering = _entering_states(k_features[0], v, decay, state, low)
        d_out = chunks.split_heads(d_out, heads.keys, heads.values, heads.queries)
        d_out = d_out.astype(state.dtype) * scale
        d_state, grads = _block_gradients(
            kernel, q, k, v, k_features, decay, entering, d_out, d_state, low
        )
        return d_state, tuple(chunks.joined_heads(g, x) for g, x in zip(grads, arrays, strict=True))

    d_last = d_final.reshape(d_final.shape[0], heads.keys, heads.values, *d_final.shape[2:])
    xs = (
        chunks.to_blocks(d_out, cut),
        block_states,
        *_blocked_inputs(static, q, k, v, log_decay, run),
    )
    d_state, grads = lax.scan(block, d_last.astype(block_states.dtype), xs, reverse=True)
    return *(chunks.from_blocks(g, cut) for g in grads), d_state.reshape(d_final.shape), None


def _block_gradients(kernel, q, k, v, k_features, decay, entering, d_out, d_state, low):
    """Gradients of one block.

    Args:
      kernel, q, k, v, decay, entering: as in the forward pass.
      k_features: features of k, and their pullback.
      d_out: [B, n, h, r, x, C, V], times the scale.
      d_state: [B, h, r, K, V], gradient of the state that leaves the block.
      low: operand dtype.

    Returns:
      The gradient of the entering state, and (dq, dk, dv, d log_decay) with grouped head axes.
    """
    leave = decay.exit[..., None]
    d_read = d_out * decay.entry[:, :, :, :, None, :, None]
    q_features, pull_q = jax.vjp(kernel.features, q.astype(entering.dtype))
    k_features, pull_k = k_features
    from_reads = contract("bnhxik,bnhrxiv->bnhrkv", q_features, d_read, dtype=low)
    d_state, d_leaving = chunks.carry_gradients(decay.through, from_reads, d_state)
    scores, weights, decayed = _scores(kernel, q, k, decay, low)
    d_decayed = contract("bnhrxiv,bnhrjv->bnhrxij", d_out, v, dtype=low)
    d_decayed = d_decayed * decay.intra[:, :, :, :, None]
    d_scores = jnp.sum(d_decayed, axis=3) * kernel.slope(scores)

    dq = contract("bnhxij,bnhjk->bnhxik", d_scores, k, dtype=low)
    d_reads = contract("bnhrxiv,bnhrkv->bnhrxik", d_read, entering, dtype=low)
    dq += pull_q(jnp.sum(d_reads, axis=3))[0]
    dk = contract("bnhxij,bnhxik->bnhjk", d_scores, q, dtype=low)
    dk += pull_k(contract("bnhrjv,bnhrkv->bnhjk", v * leave, d_leaving, dtype=low))[0]
    d_written = leave * contract("bnhjk,bnhrkv->bnhrjv", k_features, d_leaving, dtype=low)
    dv = contract("bnhrxij,bnhrxiv->bnhrjv", decayed, d_out, dtype=low) + d_written

    reads = jnp.sum(q_features[:, :, :, None] * d_reads, axis=(4, -1))
    writes = jnp.sum(v * d_written, axis=-1)
    pairs = jnp.sum(d_decayed * weights[:, :, :, None], axis=4)
    d_log = log_decay_gradient(pairs, reads, writes, decay.through, entering, d_leaving)
    return d_state, (dq, dk, dv, d_log)


def log_decay_gradient(pairs, reads, writes, through, entering, d_leaving):
    """Gradient of the log-decays of a block from the terms that each of them multiplies.

    Args:
      pairs: [B, n, h, r, C, C], contribution of each (later i, earlier j) pair to the loss
        differential; read below the diagonal.
      reads: [B, n, h, r, C], contribution of the entering state at i.
      writes: [B, n, h, r, C], contribution of write j to the leaving state.
      through: [B, n, h, r], decay across the chunk.
      entering: [B, n, h, r, K, V], states.
      d_leaving: [B, n, h, r, K, V], gradients of the leaving states.

    Returns:
      [B, n, h, r, C].
    """
    passing = through * jnp.sum(entering * d_leaving, axis=(-1, -2))
    crossing = suffix_sums(reads) + prefix_sums_exclusive(writes)
    return straddling_sums(pairs) + crossing + passing[..., None]


_chunked.defvjp(_chunked_forward, _chunked_backward)
