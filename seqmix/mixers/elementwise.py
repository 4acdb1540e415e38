# SPDX-License-Identifier: Apache-2.0
"""The elementwise family: h_t = exp(l_t) * h_{t-1} + w_t, y_t = read(h_t), on vectors of channels.

S6 (Mamba), S4D and RG-LRU are thin parametrisations: each gives two maps that look at one token,
``write(tokens, parameters, marks) -> (l, w)`` and ``read(h, tokens, parameters) -> y``, affine in
h. What a token expands to (a step size and an input to [D, N] log-decays and writes) exists for one
step of a loop only, never as an array over time.

The chunkwise form walks over blocks of chunks. The chunks of a block advance side by side: a first
sweep gives each chunk's end state from zero and its total log-decay, a short scan over chunks gives
the entering states, a second sweep gives the outputs. The backward recomputes the states of one
block at a time, and with g_t the gradient of h_t runs the same two sweeps in reverse::

    g_t = dread_t + exp(l_{t+1}) g_{t+1}
    dl_t = g_t exp(l_t) h_{t-1},   dw_t = g_t

A decay across a chunk is the exponential of a sum of log-decays, never a difference of sums.
(Gu & Dao 2023, arXiv 2312.00752, section 3.3, has the scan and its recomputation.)
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from seqmix.mixers import _chunks as chunks
from seqmix.mixers import _pallas
from seqmix.mixers._numerics import varying_like
from seqmix.mixers._segments import runs
from seqmix.typing import SegmentIds

IMPLEMENTATIONS = ("recurrent", "associative", "chunked")
BLOCK_TOKENS = 256
DEFAULT_CHUNK = 16
CPU_CHUNK = 64

START = 1
"""Mark of the first token of a document that is not the row's first: the state restarts here."""
SKIP = 2
"""Mark of padding: the state passes unchanged."""
# exp underflows to exactly 0 far above it, and sums of it stay finite.
_RESET = -1e5


class Family(NamedTuple):
    """The two maps of a parametrisation; module-level functions, so that it is a static argument.

    Attributes:
      write: (tokens, parameters, marks) -> (log-decay, write), both [..., *S], from token arrays
        [..., *] with any leading axes. `marks` [...] int8 or None; only a family that treats a
        document's first token specially looks at them.
      read: (state [..., *S], tokens, parameters) -> out [..., D], affine in the state.
    """

    write: Callable[[Any, Any, Any], tuple[jax.Array, jax.Array]]
    read: Callable[[jax.Array, Any, Any], jax.Array]


def document_marks(segment_ids: SegmentIds | None) -> jax.Array | None:
    """[B, T] int8 marks START and SKIP of packed rows; None for rows of one document."""
    if segment_ids is None:
        return None
    starts = jnp.diff(runs(segment_ids), axis=1, prepend=0) > 0
    return jnp.where(segment_ids == 0, SKIP, jnp.where(starts, START, 0)).astype(jnp.int8)


def scan(
    family: Family,
    tokens: Any,
    parameters: Any,
    *,
    initial_state: jax.Array,
    marks: jax.Array | None,
    chunk_size: int | None,
    impl: str,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Runs the family on checked arguments; padding has been zeroed by the caller.

    Args:
      family: the parametrisation.
      tokens: pytree of floating [B, T, ...].
      parameters: pytree of floating arrays without batch and time.
      initial_state: [B, *S], real or complex, of float32 parts or wider.
      marks: [B, T] int8, see `document_marks`.
      chunk_size: tokens per chunk; None: 64 on a CPU, 16 elsewhere.
      impl: one of IMPLEMENTATIONS.
      out_dtype: dtype of the output.

    Returns:
      out [B, T, D]; final state [B, *S].
    """
    leaves = (*jax.tree.leaves(tokens), *jax.tree.leaves(parameters))
    # Gradients of parameters are then summed over the mesh by the transpose of this cast.
    parameters = jax.tree.map(lambda p: varying_like(p, *leaves, initial_state), parameters)
    state = varying_like(initial_state, *leaves)
    if impl == "recurrent":
        out, final = _recurrent(family, tokens, parameters, marks, state)
        return out.astype(out_dtype), final
    if impl == "associative":
        out, final = _associative(family, tokens, parameters, marks, state)
        return out.astype(out_dtype), final
    cut = _cut(jax.tree.leaves(tokens)[0].shape[1], chunk_size)
    static = (family, cut, jnp.dtype(out_dtype))
    return _chunked(static, tokens, parameters, _padded_marks(marks, cut), state)


def run_kernel(
    family: str,
    tokens: tuple[jax.Array, ...],
    state: jax.Array,
    marks: jax.Array | None = None,
    parameters: tuple[jax.Array | None, ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """Runs the Pallas kernel of a parametrisation, which has not refused.

    Args:
      family: name of the kernel module.
      tokens: [B, T, ...] each, floating; padding has been zeroed by the caller.
      state: [B, *S] float32.
      marks: [B, T] int8, see `document_marks`.
      parameters: without batch and time; None where there is none.

    Returns:
      out [B, T, D]; final state [B, *S].
    """
    given = tuple(varying_like(p, *tokens, state) for p in parameters if p is not None)
    state = varying_like(state, *tokens, *given)
    return _pallas.run(family, None, tokens, state, marks, given)


def with_resets(log_decay: jax.Array, marks: jax.Array) -> jax.Array:
    """Log-decays [B, T, D] whose exponential is 0 at the marks START [B, T]."""
    return jnp.where(marks[..., None] == START, jnp.asarray(_RESET, log_decay.dtype), log_decay)


def _cut(time: int, chunk_size: int | None) -> chunks.Layout:
    """A CPU core is busy with one token's states and advances one chunk at a time, unless asked
    otherwise; elsewhere, sixteen chunks of sixteen tokens advance together.
    """
    if chunk_size is None and jax.default_backend() == "cpu":
        return chunks.layout(time, CPU_CHUNK, CPU_CHUNK)
    return chunks.layout(time, chunk_size or DEFAULT_CHUNK, BLOCK_TOKENS)


def _marked_terms(family, tokens, parameters, marks):
    """Log-decays and writes with document starts and padding put in."""
    log_decay, write = family.write(tokens, parameters, marks)
    if marks is None:
        return log_decay, write
    marks = marks.reshape(marks.shape + (1,) * (log_decay.ndim - marks.ndim))
    log_decay = jnp.where(marks == START, jnp.asarray(_RESET, log_decay.dtype), log_decay)
    skip = marks == SKIP
    return jnp.where(skip, 0, log_decay), jnp.where(skip, 0, write)


def _recurrent(family, tokens, parameters, marks, state):
    """The definition, one token at a time."""

    def step(h, xs):
        token, mark = xs
        log_decay, write = _marked_terms(family, token, parameters, mark)
        h = jnp.exp(log_decay) * h + write
        return h, family.read(h, token, parameters)

    xs = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (tokens, marks))
    final, out = lax.scan(step, state, xs)
    return jnp.moveaxis(out, 0, 1), final


def _associative(family, tokens, parameters, marks, state):
    """`lax.associative_scan` over all tokens at once: depth log T, and [B, T, *S] in memory."""
    log_decay, write = _marked_terms(family, tokens, parameters, marks)

    def combine(left, right):
        earlier, v = left
        later, w = right
        return earlier + later, jnp.exp(later) * v + w

    total, states = lax.associative_scan(combine, (log_decay, write), axis=1)
    states = states + jnp.exp(total) * state[:, None]
    return family.read(states, tokens, parameters), states[:, -1]


def _padded_marks(marks, cut):
    """Marks of the padded row, with the added tokens skipped; None where nothing is to mark."""
    pad = cut.padded - cut.time
    if marks is None:
        if not pad:
            return None
        marks = jnp.zeros((1, cut.time), jnp.int8)
    return jnp.pad(marks, ((0, 0), (0, pad)), constant_values=SKIP)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(static, tokens, parameters, marks, state):
    return _chunked_forward(static, tokens, parameters, marks, state)[0]


def _blocked(tree, cut):
    """[B, T, ...] -> [blocks, C, B, n, ...]: one block, one step over its chunks at a time."""

    def one(x):
        return jnp.moveaxis(chunks.to_blocks(x, cut), 3, 1)

    return jax.tree.map(one, tree)


def _unblocked(tree, cut):
    return jax.tree.map(lambda x: chunks.from_blocks(jnp.moveaxis(x, 1, 3), cut), tree)


def _blocked_inputs(tokens, marks, cut):
    whole = cut._replace(time=cut.padded)
    return _blocked(tokens, cut), None if marks is None else _blocked(marks, whole)


def _chunked_forward(static, tokens, parameters, marks, state):
    family, cut, out_dtype = static

    def block(state, xs):
        entering, after = _entering(family, xs, parameters, state, cut)

        def step(h, x):
            token, mark = x
            log_decay, write = _marked_terms(family, token, parameters, mark)
            h = jnp.exp(log_decay) * h + write
            return h, family.read(h, token, parameters).astype(out_dtype)

        last, out = lax.scan(step, entering, xs)
        return last[:, 0] if after is None else after, (out, state)

    final, (out, block_states) = lax.scan(block, state, _blocked_inputs(tokens, marks, cut))
    return (_unblocked(out, cut), final), (tokens, parameters, marks, block_states)


def _entering(family, xs, parameters, state, cut):
    """States [B, n, *S] entering the chunks of a block, and the state after it.

    A block of one chunk needs no sweep to know the first, and leaves the second (None) to the next.
    """
    if cut.chunks == 1:
        return state[:, None], None

    def step(carry, x):
        token, mark = x
        total, h = carry
        log_decay, write = _marked_terms(family, token, parameters, mark)
        return (total + log_decay, jnp.exp(log_decay) * h + write), None

    start = jnp.zeros_like(state, shape=(state.shape[0], cut.chunks, *state.shape[1:]))
    start = varying_like(start, state)
    (total, local), _ = lax.scan(step, (start, start), xs)
    after, entering = chunks.scan_chunks(
        lambda s, x: (x[0] * s + x[1], s), state, (jnp.exp(total), local)
    )
    return entering, after


def _leaving_gradients(family, xs, d_out, parameters, d_state, cut):
    """Gradients [B, n, *S] of the states that leave the chunks of a block."""
    if cut.chunks == 1:
        return d_state[:, None]

    def step(carry, x):
        (token, mark), d_out = x
        total, g = carry
        log_decay, _ = _marked_terms(family, token, parameters, mark)
        g = jnp.exp(log_decay) * (g + _pull_read(family, token, parameters, d_out, g))
        return (total + log_decay, g), None

    start = jnp.zeros_like(d_state, shape=(d_state.shape[0], cut.chunks, *d_state.shape[1:]))
    start = varying_like(start, d_state)
    (total, local), _ = lax.scan(step, (start, start), (xs, d_out), reverse=True)
    _, leaving = chunks.scan_chunks(
        lambda s, x: (x[0] * s + x[1], s), d_state, (jnp.exp(total), local), reverse=True
    )
    return leaving


def _pull_read(family, token, parameters, d_out, like):
    """The gradient of the state that is read."""
    out, pull = jax.vjp(lambda h: family.read(h, token, parameters), like)
    return pull(d_out.astype(out.dtype))[0]


def _chunked_backward(static, residuals, cotangents):
    family, cut, _ = static
    tokens, parameters, marks, block_states = residuals
    d_out, d_final = cotangents

    def block(carry, xs):
        d_state, d_parameters = carry
        inputs, d_out, state = xs
        entering, _ = _entering(family, inputs, parameters, state, cut)

        def advance(h, x):
            log_decay, write = _marked_terms(family, x[0], parameters, x[1])
            return jnp.exp(log_decay) * h + write, h

        _, before = lax.scan(advance, entering, inputs)
        leaving = _leaving_gradients(family, inputs, d_out, parameters, d_state, cut)

        def step(carry, x):
            g, d_parameters = carry
            (token, mark), d_out, h = x
            (log_decay, write), pull_write = jax.vjp(
                lambda t, p: _marked_terms(family, t, p, mark), token, parameters
            )
            decay = jnp.exp(log_decay)
            out, pull_read = jax.vjp(family.read, decay * h + write, token, parameters)
            d_h, d_read, d_more = pull_read(d_out.astype(out.dtype))
            g = g + d_h
            d_write, d_terms = pull_write((g * decay * h, g))
            d_token = jax.tree.map(jnp.add, d_read, d_write)
            d_parameters = jax.tree.map(lambda *d: sum(d), d_parameters, d_more, d_terms)
            return (decay * g, d_parameters), d_token

        (g, d_parameters), d_tokens = lax.scan(
            step, (leaving, d_parameters), (inputs, d_out, before), reverse=True
        )
        return (g[:, 0], d_parameters), d_tokens

    zeros = jax.tree.map(lambda p: varying_like(jnp.zeros_like(p), p), parameters)
    xs = (_blocked_inputs(tokens, marks, cut), _blocked(d_out, cut), block_states)
    (d_state, d_parameters), d_tokens = lax.scan(block, (d_final, zeros), xs, reverse=True)
    return _unblocked(d_tokens, cut), d_parameters, None, d_state


_chunked.defvjp(_chunked_forward, _chunked_backward)
