# SPDX-License-Identifier: Apache-2.0
"""The scalar-decay family: S_t = a_t S_{t-1} + k_t v_t^T, o_t = s q_t S_t, one decay per head.

SSD (Mamba-2), simple GLA, retention, lightning attention and plain linear attention are thin
parametrisations of it.

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

import jax
import jax.numpy as jnp
from jax import lax

from seqmix.mixers import _chunks as chunks
from seqmix.mixers._checks import Heads
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

IMPLEMENTATIONS = ("recurrent", "associative", "chunked")
DEFAULT_CHUNK = 64


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
    impl: str,
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
      chunk_size: C, None for 64.
      impl: one of IMPLEMENTATIONS.

    Returns:
      out [B, T, Ho, V] in v's dtype; final state [B, Hs, K, V] in the state dtype.
    """
    dtype = state_dtype(q, k, v, log_decay)
    shape = (q.shape[0], heads.states, k.shape[-1], v.shape[-1])
    state = jnp.zeros(shape, dtype) if initial_state is None else initial_state.astype(dtype)
    state = varying_like(state, q, k, v, log_decay)
    log_decay = clean_log_decay(log_decay.astype(dtype))
    if impl == "recurrent":
        return _recurrent(q, k, v, log_decay, state, run, heads, scale)
    cut = chunks.layout(q.shape[1], chunk_size or DEFAULT_CHUNK)
    if impl == "associative":
        return _associative(q, k, v, log_decay, state, run, heads, scale, cut)
    return _chunked((heads, float(scale), cut), q, k, v, log_decay, state, run)


def _recurrent(q, k, v, log_decay, state, run, heads, scale):
    """The definition, one token at a time."""
    dtype, out_dtype = state.dtype, v.dtype
    batch, time = q.shape[:2]
    h, r, x = heads.keys, heads.values, heads.queries
    decay = jnp.exp(log_decay)
    if run is not None:
        decay = jnp.where(jnp.diff(run, axis=1, prepend=0)[..., None] > 0, 0, decay)

    def step(s, token):
        q, k, v, a = token
        write = contract("bhk,bhrv->bhrkv", k, v, dtype=dtype)
        s = a[..., None, None] * s + write
        return s, contract("bhxk,bhrkv->bhrxv", q.astype(dtype), s) * scale

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


def _associative(q, k, v, log_decay, state, run, heads, scale, cut):
    """Chunk summaries combined by `lax.associative_scan`: depth log T, all chunks at once."""
    one_block = chunks.Layout(cut.time, 1, -(-cut.time // cut.chunk), cut.chunk)
    blocked = [chunks.to_blocks(a, one_block) for a in (q, k, v, log_decay)]
    run_blocks = None if run is None else chunks.to_blocks(run, one_block, fill_last=True)
    entry = None if run is None else chunks.entry_runs(run_blocks)[0]
    q, k, v, log_decay = chunks.grouped(heads, *(a[0] for a in blocked))
    decay = chunks.decays(log_decay, None if run is None else run_blocks[0], entry)
    low = operand_dtype(q, k, v)
    local = contract("bnjhk,bnjhrv->bnhrkv", k, _write_at_end(v, decay), dtype=low)
    first = state.reshape(state.shape[0], 1, heads.keys, heads.values, *state.shape[2:])

    def combine(left, right):
        a, s = left
        b, t = right
        return a * b, b * s + t

    through = decay.through[..., None, None]
    gain, total = lax.associative_scan(combine, (through, local), axis=1)
    after = gain * first + total
    entering = jnp.concatenate([first, after[:, :-1]], axis=1)
    out = _read(q, k, v, decay, entering, scale, low)
    out = out.reshape(*out.shape[:3], heads.outputs, out.shape[-1]).astype(blocked[2].dtype)
    return chunks.from_blocks(out[None], one_block), after[:, -1].reshape(state.shape)


def _write_at_end(v, decay):
    """v_j decayed to the chunk's end."""
    return v * jnp.moveaxis(decay.exit, -1, 2)[..., None]


def _scores(q, k, decay, low):
    """(Q K^T) [B, n, h, x, C, C] and (Q K^T) * D [B, n, h, r, x, C, C]."""
    scores = contract("bnihxk,bnjhk->bnhxij", q, k, dtype=low)
    return scores, scores[:, :, :, None] * decay.intra[:, :, :, :, None]


def _read(q, k, v, decay, entering, scale, low):
    """Outputs [B, n, C, h, r, x, V] from the chunks' entering states."""
    _, decayed = _scores(q, k, decay, low)
    out = contract("bnhrxij,bnjhrv->bnihrxv", decayed, v, dtype=low)
    inter = contract("bnihxk,bnhrkv->bnihrxv", q, entering, dtype=low)
    return scale * (out + inter * jnp.moveaxis(decay.entry, -1, 2)[..., None, None])


def _entering_states(k, v, decay, state, low):
    """State after the block, and the states [B, n, h, r, K, V] entering each of its chunks."""
    local = contract("bnjhk,bnjhrv->bnhrkv", k, _write_at_end(v, decay), dtype=low)
    return chunks.scan_chunks(
        lambda s, x: (x[0][..., None, None] * s + x[1], s), state, (decay.through, local)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(static, q, k, v, log_decay, state, run):
    return _chunked_forward(static, q, k, v, log_decay, state, run)[0]


def _blocked_inputs(static, q, k, v, log_decay, run):
    _, _, cut = static
    xs = tuple(chunks.to_blocks(a, cut) for a in (q, k, v, log_decay))
    if run is None:
        return (*xs, None, None)
    run = chunks.to_blocks(run, cut, fill_last=True)
    return (*xs, run, chunks.entry_runs(run))


def _chunked_forward(static, q, k, v, log_decay, state, run):
    heads, scale, cut = static
    low = operand_dtype(q, k, v)

    def block(state, xs):
        *arrays, run, entry = xs
        q, k, v, log_decay = chunks.grouped(heads, *arrays)
        decay = chunks.decays(log_decay, run, entry)
        after, entering = _entering_states(k, v, decay, state, low)
        out = _read(q, k, v, decay, entering, scale, low)
        return after, (out.reshape(*out.shape[:3], heads.outputs, -1).astype(v.dtype), state)

    first = state.reshape(state.shape[0], heads.keys, heads.values, *state.shape[2:])
    xs = _blocked_inputs(static, q, k, v, log_decay, run)
    final, (out, block_states) = lax.scan(block, first, xs)
    result = chunks.from_blocks(out, cut), final.reshape(state.shape)
    return result, (q, k, v, log_decay, run, block_states)


def _chunked_backward(static, residuals, cotangents):
    heads, scale, cut = static
    q, k, v, log_decay, run, block_states = residuals
    d_out, d_final = cotangents
    low = operand_dtype(q, k, v)

    def block(d_state, xs):
        d_out, state, *arrays, run, entry = xs
        q, k, v, log_decay = chunks.grouped(heads, *arrays)
        decay = chunks.decays(log_decay, run, entry)
        _, entering = _entering_states(k, v, decay, state, low)
        d_out = chunks.split_heads(d_out, heads.keys, heads.values, heads.queries)
        d_out = d_out.astype(state.dtype) * scale
        d_state, grads = _block_gradients(q, k, v, decay, entering, d_out, d_state, low)
        return d_state, tuple(
            g.reshape(x.shape).astype(x.dtype) for g, x in zip(grads, arrays, strict=True)
        )

    d_last = d_final.reshape(d_final.shape[0], heads.keys, heads.values, *d_final.shape[2:])
    xs = (
        chunks.to_blocks(d_out, cut),
        block_states,
        *_blocked_inputs(static, q, k, v, log_decay, run),
    )
    d_state, grads = lax.scan(block, d_last.astype(block_states.dtype), xs, reverse=True)
    return *(chunks.from_blocks(g, cut) for g in grads), d_state.reshape(d_final.shape), None


def _block_gradients(q, k, v, decay, entering, d_out, d_state, low):
    """Gradients of one block.

    Args:
      q, k, v, decay, entering: as in the forward pass.
      d_out: [B, n, C, h, r, x, V], times the scale.
      d_state: [B, h, r, K, V], gradient of the state that leaves the block.
      low: operand dtype.

    Returns:
      The gradient of the entering state, and (dq, dk, dv, d log_decay) with grouped head axes.
    """
    entry = jnp.moveaxis(decay.entry, -1, 2)[..., None, None]
    leave = jnp.moveaxis(decay.exit, -1, 2)[..., None]
    d_read = d_out * entry
    from_reads = contract("bnihxk,bnihrxv->bnhrkv", q, d_read, dtype=low)
    d_state, d_leaving = chunks.scan_chunks(
        lambda ds, x: (x[0][..., None, None] * ds + x[1], ds),
        d_state,
        (decay.through, from_reads),
        reverse=True,
    )
    scores, decayed = _scores(q, k, decay, low)
    d_decayed = contract("bnihrxv,bnjhrv->bnhrxij", d_out, v, dtype=low)
    d_decayed = d_decayed * decay.intra[:, :, :, :, None]
    d_scores = jnp.sum(d_decayed, axis=3)

    dq = contract("bnhxij,bnjhk->bnihxk", d_scores, k, dtype=low)
    dq += contract("bnihrxv,bnhrkv->bnihxk", d_read, entering, dtype=low)
    dk = contract("bnhxij,bnihxk->bnjhk", d_scores, q, dtype=low)
    dk += contract("bnjhrv,bnhrkv->bnjhk", v * leave, d_leaving, dtype=low)
    d_written = leave * contract("bnjhk,bnhrkv->bnjhrv", k, d_leaving, dtype=low)
    dv = contract("bnhrxij,bnihrxv->bnjhrv", decayed, d_out, dtype=low) + d_written

    read = contract("bnihxk,bnhrkv->bnihrxv", q, entering, dtype=low)
    reads = jnp.sum(read * d_read, axis=(-1, -2))
    writes = jnp.sum(v * d_written, axis=-1)
    pairs = jnp.sum(d_decayed * scores[:, :, :, None], axis=4)
    d_log = log_decay_gradient(pairs, reads, writes, decay.through, entering, d_leaving)
    return d_state, (dq, dk, dv, d_log)


def log_decay_gradient(pairs, reads, writes, through, entering, d_leaving):
    """Gradient of the log-decays of a block from the terms that each of them multiplies.

    Args:
      pairs: [B, n, h, r, C, C], contribution of each (later i, earlier j) pair to the loss
        differential; read below the diagonal.
      reads: [B, n, C, h, r], contribution of the entering state at i.
      writes: [B, n, C, h, r], contribution of write j to the leaving state.
      through: [B, n, h, r], decay across the chunk.
      entering: [B, n, h, r, K, V], states.
      d_leaving: [B, n, h, r, K, V], gradients of the leaving states.

    Returns:
      [B, n, C, h, r].
    """
    passing = through * jnp.sum(entering * d_leaving, axis=(-1, -2))
    total = (
        straddling_sums(pairs)
        + suffix_sums(jnp.moveaxis(reads, 2, -1))
        + prefix_sums_exclusive(jnp.moveaxis(writes, 2, -1))
        + passing[..., None]
    )
    return jnp.moveaxis(total, -1, 2)


_chunked.defvjp(_chunked_forward, _chunked_backward)
