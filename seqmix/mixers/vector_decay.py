# SPDX-License-Identifier: Apache-2.0
"""The vector-decay family: S_t = diag(a_t) S_{t-1} + k_t v_t^T, one decay per key channel.

Two reads. After the write (GLA, HGRN2): o_t = s q_t S_t. Before it, with a bonus u on the present
token (RWKV-5, RWKV-6): o_t = s (q_t S_{t-1} + (q_t * u * k_t) 1 v_t).

Chunkwise form of a chunk with entering state S (Yang et al. 2023, arXiv 2312.06635). With the
decay products of `_pairwise.Spans`: `entry_i` from the chunk's start to the read of token i,
`exit_j` from the write of token j to the chunk's end, `through` across it::

    A  = s (decayed products of the pairs i > j; q_i k_i or q_i (u * k_i) on the diagonal)
    O  = s (entry * Q) S + A V
    S' = diag(through) S + (exit * K)^T V

Backward, with dS the gradient of the state that leaves the chunk::

    dV    = A^T dO + (exit * K) dS
    dQ    = s entry * (dO S^T) + dQ of the pairs given dA = s dO V^T
    dK    = exit * (V dS^T)    + dK of the pairs
    dS_in = diag(through) dS + s (entry * Q)^T dO

and the log-decays' gradient as in `_pairwise.log_decay_gradient`. A document's first token has
decay 0, which is all that keeps documents apart. The backward keeps one state per block of chunks
and recomputes the others.
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
    varying_like,
)

FAMILY = "vector_decay"
IMPLEMENTATIONS = ("recurrent", "associative", "chunked")
DEFAULT_CHUNK = 64


def scan(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    bonus: jax.Array | None = None,
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
      bonus: [Hs, K] float32 to read before the write; None to read after it.
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
    state = varying_like(state, q, k, v, log_decay)
    log_decay = log_decay.astype(dtype)
    if bonus is not None:
        bonus = varying_like(bonus.astype(dtype), q, k, v, log_decay)
    options = _pallas.options(heads, float(scale), jnp.dtype(v.dtype), chunk_size)
    arrays, shared = (q, k, v, log_decay), () if bonus is None else (bonus,)
    impl = choose(
        mixer,
        impl,
        IMPLEMENTATIONS,
        time=q.shape[1],
        refusal=lambda: kernel_refusal(FAMILY, impl, q.shape[0], options, arrays),
    )
    if impl == "pallas":
        arrays = (q, k, v, clean_log_decay(log_decay))
        return _pallas.run(FAMILY, options, arrays, state, run, shared)
    starts = None if run is None else jnp.diff(run, axis=1, prepend=0) > 0
    if impl == "recurrent":
        return _recurrent(q, k, v, log_decay, bonus, state, starts, heads, scale)
    cut = chunks.layout(q.shape[1], pairwise.chunk_tokens(chunk_size, DEFAULT_CHUNK))
    if impl == "associative":
        return _associative(q, k, v, log_decay, bonus, state, starts, heads, scale, cut)
    static = (heads, float(scale), cut)
    return _chunked(static, q, k, v, log_decay, bonus, state, starts)


def _recurrent(q, k, v, log_decay, bonus, state, starts, heads, scale):
    """The definition, one token at a time."""
    dtype, out_dtype = state.dtype, v.dtype
    batch, time = q.shape[:2]
    h, r, x = heads.keys, heads.values, heads.queries
    decay = jnp.exp(log_decay)
    if starts is not None:
        decay = jnp.where(starts[..., None, None], 0, decay)
    before = jnp.ones((batch, time), dtype) if starts is None else 1 - starts.astype(dtype)
    bonus = None if bonus is None else bonus.reshape(h, r, -1, 1)

    def step(s, token):
        q, k, v, a, before = token
        write = contract("bhk,bhrv->bhrkv", k, v, dtype=dtype)
        seen = None if bonus is None else before[:, None, None, None, None] * s + bonus * write
        s = a[..., None] * s + write
        seen = s if seen is None else seen
        return s, contract("bhxk,bhrkv->bhrxv", q.astype(dtype), seen) * scale

    tokens = (
        q.reshape(batch, time, h, x, -1),
        k,
        v.reshape(batch, time, h, r, -1),
        decay.reshape(batch, time, h, r, -1),
        before,
    )
    final, out = lax.scan(
        step,
        state.reshape(batch, h, r, *state.shape[2:]),
        jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), tokens),
    )
    out = jnp.moveaxis(out, 0, 1).reshape(batch, time, heads.outputs, v.shape[-1])
    return out.astype(out_dtype), final.reshape(state.shape)


def _decays(log_decay, starts, bonus):
    """Decays [B, n, h, r, C, K] of one block, multiplied over the spans of its chunks."""
    decay = jnp.exp(log_decay)
    first = None if starts is None else starts[:, :, None, None, :, None]
    if first is not None:
        decay = jnp.where(first, 0, decay)
    if bonus is None:
        return pairwise.spans(decay, decay)
    read = jnp.ones_like(decay)
    return pairwise.spans(decay, read if first is None else jnp.where(first, 0, read))


def _weights(heads, bonus):
    """The bonus as [h, r, 1, 1, K], against [.., h, r, x, C, K]; 1 for none."""
    return 1 if bonus is None else bonus.reshape(heads.keys, heads.values, 1, 1, -1)


def _scores(heads, q, k, cut, bonus, dtype):
    """A / s, [B, n, h, r, x, C, C]."""
    pair = q[:, :, :, None].astype(dtype) * k[:, :, :, None, None].astype(dtype)
    own = jnp.sum(pair * _weights(heads, bonus), axis=-1)
    low = operand_dtype(q, k)
    return pairwise.scores(q[:, :, :, None], k[:, :, :, None], cut, own=own, dtype=low)


def _writes(k, v, cut, low):
    """What a chunk adds to the state, [B, n, h, r, K, V]."""
    return contract("...jk,...jv->...kv", k[:, :, :, None] * cut.exit, v, dtype=low)


def _entering_states(k, v, cut, state, low):
    """State after the block, and the states [B, n, h, r, K, V] entering each of its chunks."""
    return chunks.carry_states(cut.through, _writes(k, v, cut, low), state)


def _entry_queries(q, cut):
    """q_i decayed from the chunk's start, [B, n, h, r, x, C, K]."""
    return q[:, :, :, None] * cut.entry[..., None, :, :]


def _outputs(heads, q, k, v, cut, entering, bonus, scale, low):
    """[B, n, h, r, x, C, V] from the chunks' entering states."""
    matrix = _scores(heads, q, k, cut, bonus, entering.dtype)
    out = contract("bnhrxij,bnhrjv->bnhrxiv", matrix, v, dtype=low)
    out += contract("bnhrxik,bnhrkv->bnhrxiv", _entry_queries(q, cut), entering, dtype=low)
    return scale * out


def _associative(q, k, v, log_decay, bonus, state, starts, heads, scale, cut):
    """Chunk summaries combined by `lax.associative_scan`: depth log T, all chunks at once."""
    low, out_dtype = operand_dtype(q, k, v), v.dtype
    one_block = chunks.Layout(cut.time, 1, -(-cut.time // cut.chunk), cut.chunk)
    *arrays, starts = (
        a if a is None else a[0] for a in _blocked(one_block, q, k, v, log_decay, starts)
    )
    q, k, v, log_decay = chunks.grouped(heads, *arrays)
    spans = _decays(log_decay, starts, bonus)
    first = state.reshape(state.shape[0], 1, heads.keys, heads.values, *state.shape[2:])

    def combine(left, right):
        a, s = left
        b, t = right
        return a * b, b * s + t

    summaries = (spans.through[..., None], _writes(k, v, spans, low))
    gain, total = lax.associative_scan(combine, summaries, axis=1)
    after = gain * first + total
    entering = jnp.concatenate([first, after[:, :-1]], axis=1)
    out = _outputs(heads, q, k, v, spans, entering, bonus, scale, low)
    out = chunks.joined_outputs(out, out_dtype)[None]
    return chunks.from_blocks(out, one_block), after[:, -1].reshape(state.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(static, q, k, v, log_decay, bonus, state, starts):
    return _chunked_forward(static, q, k, v, log_decay, bonus, state, starts)[0]


def _blocked(cut, q, k, v, log_decay, starts):
    arrays = (chunks.to_blocks(a, cut) for a in (q, k, v, log_decay))
    return *arrays, None if starts is None else chunks.to_blocks(starts, cut)


def _chunked_forward(static, q, k, v, log_decay, bonus, state, starts):
    heads, scale, cut = static
    low, out_dtype = operand_dtype(q, k, v), v.dtype

    def block(state, xs):
        *arrays, starts = xs
        q, k, v, log_decay = chunks.grouped(heads, *arrays)
        spans = _decays(log_decay, starts, bonus)
        after, entering = _entering_states(k, v, spans, state, low)
        out = _outputs(heads, q, k, v, spans, entering, bonus, scale, low)
        return after, (chunks.joined_outputs(out, out_dtype), state)

    first = state.reshape(state.shape[0], heads.keys, heads.values, *state.shape[2:])
    final, (out, block_states) = lax.scan(block, first, _blocked(cut, q, k, v, log_decay, starts))
    result = chunks.from_blocks(out, cut), final.reshape(state.shape)
    return result, (q, k, v, log_decay, bonus, starts, block_states)


def _chunked_backward(static, residuals, cotangents):
    heads, scale, cut = static
    q, k, v, log_decay, bonus, starts, block_states = residuals
    d_out, d_final = cotangents
    low, dtype = operand_dtype(q, k, v), block_states.dtype

    def block(carry, xs):
        d_state, d_bonus = carry
        d_out, state, *arrays, starts = xs
        q, k, v, log_decay = chunks.grouped(heads, *arrays)
        spans = _decays(log_decay, starts, bonus)
        _, entering = _entering_states(k, v, spans, state, low)
        d_out = chunks.split_heads(d_out, heads.keys, heads.values, heads.queries)
        d_out = d_out.astype(dtype) * scale
        d_state, d_own, grads = _block_gradients(
            heads, q, k, v, spans, entering, bonus, d_out, d_state, low
        )
        if bonus is not None:
            pair = q[:, :, :, None] * k[:, :, :, None, None].astype(dtype)
            d_bonus += jnp.sum(d_own * pair, axis=(0, 1, 4, 5)).reshape(bonus.shape)
        return (d_state, d_bonus), tuple(
            chunks.joined_heads(g, x) for g, x in zip(grads, arrays, strict=True)
        )

    d_last = d_final.reshape(d_final.shape[0], heads.keys, heads.values, *d_final.shape[2:])
    first = (d_last.astype(dtype), None if bonus is None else jnp.zeros_like(bonus))
    xs = (chunks.to_blocks(d_out, cut), block_states, *_blocked(cut, q, k, v, log_decay, starts))
    (d_state, d_bonus), grads = lax.scan(block, first, xs, reverse=True)
    grads = tuple(chunks.from_blocks(g, cut) for g in grads)
    return *grads, d_bonus, d_state.reshape(d_final.shape), None


def _block_gradients(heads, q, k, v, cut, entering, bonus, d_out, d_state, low):
    """Gradients of one block.

    Args:
      heads, q, k, v, cut, entering, bonus: as in the forward pass.
      d_out: [B, n, h, r, x, C, V], times the scale.
      d_state: [B, h, r, K, V], gradient of the state that leaves the block.
      low: operand dtype.

    Returns:
      The gradient of the entering state; that of the products of tokens with themselves,
      [B, n, h, r, x, C, 1]; and (dq, dk, dv, d log_decay), heads before tokens.
    """
    entry_q = _entry_queries(q, cut)
    from_reads = contract("bnhrxik,bnhrxiv->bnhrkv", entry_q, d_out, dtype=low)
    d_state, d_leaving = chunks.carry_gradients(cut.through, from_reads, d_state)
    matrix = _scores(heads, q, k, cut, bonus, entering.dtype)
    d_matrix = contract("bnhrxiv,bnhrjv->bnhrxij", d_out, v, dtype=low)
    d_own = jnp.diagonal(d_matrix, axis1=-2, axis2=-1)[..., None]

    wide_q, wide_k = q[:, :, :, None], k[:, :, :, None]
    dq, dk, terms = pairwise.gradients(d_matrix, wide_q, wide_k, cut, dtype=low)
    d_entry_q = contract("bnhrxiv,bnhrkv->bnhrxik", d_out, entering, dtype=low)
    d_exit_k = contract("bnhrjv,bnhrkv->bnhrjk", v, d_leaving, dtype=low)
    reads = jnp.sum(entry_q * d_entry_q, axis=4)
    writes = wide_k * cut.exit * d_exit_k
    passing = cut.through * jnp.sum(entering * d_leaving, axis=-1)
    d_log = pairwise.log_decay_gradient(terms, reads, writes, passing, read_after=bonus is None)

    weighted = d_own * _weights(heads, bonus)
    dq += d_entry_q * cut.entry[..., None, :, :] + weighted * wide_k[..., None, :, :]
    dk += d_exit_k * cut.exit + jnp.sum(weighted * wide_q, axis=4)
    dv = contract("bnhrxij,bnhrxiv->bnhrjv", matrix, d_out, dtype=low)
    dv += contract("bnhrjk,bnhrkv->bnhrjv", wide_k * cut.exit, d_leaving, dtype=low)
    return d_state, d_own, (jnp.sum(dq, axis=3), jnp.sum(dk, axis=3), dv, d_log)


_chunked.defvjp(_chunked_forward, _chunked_backward)
