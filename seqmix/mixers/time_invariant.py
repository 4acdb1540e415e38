# SPDX-License-Identifier: Apache-2.0
"""Linear time-invariant state spaces of D independent channels: x' = A x + B u, y = C x (S4, S4D).

With discrete A, B, C of one channel and a real state of N numbers, a chunk of C tokens that x
enters gives (arXiv 2111.00396, cut into chunks)::

    y_i = C A^{i+1} x + sum_{j <= i} K_{i-j} u_j,    K_l = C A^l B
    x'  = A^C x + sum_j A^{C-1-j} B u_j

so a chunk is three products with tables that depend on the parameters alone. A row of one document
can also be convolved with the first T values of K at once, by FFT.

Packed rows: real tokens are moved together first, so that a document's tokens are neighbours; what
crosses a document's start is masked in each of the three products. One FFT would mix the documents,
and subtracting what leaked would lose digits, so they are convolved chunk by chunk only. Chunks end
where they end; the state after the row's last token takes up to C - 1 single steps from the last
chunk's entering state.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from seqmix.mixers import elementwise
from seqmix.mixers._dispatch import choose
from seqmix.mixers._numerics import contract, varying_like
from seqmix.mixers._segments import runs

IMPLEMENTATIONS = ("recurrent", "chunked", "fft")
FORMS = {"conv": ("chunked", "fft"), "recurrent": ("recurrent", "associative")}
DEFAULT_CHUNK = 32
BLOCK_CHUNKS = 8


class Tables(NamedTuple):
    """What a chunk of C tokens needs to know of a system.

    Attributes:
      kernel: [D, C], K_0 .. K_{C-1}.
      read: [D, C, N], C A^1 .. C A^C.
      write: [D, C, N], A^0 B .. A^{C-1} B.
      through: A^C, as `System.across` takes it.
    """

    kernel: jax.Array
    read: jax.Array
    write: jax.Array
    through: jax.Array


class System(NamedTuple):
    """The functions of one kind of system; module-level, so that it is a static argument.

    Attributes:
      advance: (parameters, x [B, D, N], u [B, D]) -> x after the token.
      output: (parameters, x [B, D, N]) -> y [B, D].
      tables: (parameters, chunk) -> Tables.
      across: (through, x [B, D, N]) -> A^C x.
      kernel: (parameters, length) -> [D, length], K_0 .. K_{length-1}.
    """

    advance: Callable[..., jax.Array]
    output: Callable[..., jax.Array]
    tables: Callable[..., Tables]
    across: Callable[..., jax.Array]
    kernel: Callable[..., jax.Array]


def choose_impl(
    mixer: str, form: str, impl: str, available: tuple[str, ...], time: int, segment_ids: Any
) -> str:
    """Resolves `form` and `impl` to the name of an implementation that can run.

    Raises:
      ValueError: unknown, contradicting each other, or one FFT over packed rows.
    """
    if form not in ("auto", *FORMS):
        raise ValueError(f"{mixer}: form must be one of {sorted(['auto', *FORMS])}, got {form!r}")
    if form != "auto" and impl in available and impl not in FORMS[form]:
        raise ValueError(f"{mixer}: form={form!r} is impl {' or '.join(FORMS[form])}, got {impl!r}")
    if impl == "fft" and segment_ids is not None:
        raise ValueError(
            f"{mixer}: impl='fft' convolves whole rows and cannot keep the documents of "
            "segment_ids apart; use 'chunked'"
        )
    if form == "conv" and impl == "auto":
        impl = "fft" if segment_ids is None else "chunked"
    elif form == "recurrent" and impl == "auto":
        impl = "recurrent"
    return choose(mixer, impl, available, time=time)


def scan(
    system: System,
    parameters: Any,
    u: jax.Array,
    *,
    initial_state: jax.Array | None,
    size: int,
    segment_ids: jax.Array | None,
    chunk_size: int | None,
    impl: str,
) -> tuple[jax.Array, jax.Array]:
    """Runs a system on checked arguments; padding has been zeroed by the caller.

    Args:
      system: the kind of system.
      parameters: its parameters, for D channels.
      u: [B, T, D] float32 or wider.
      initial_state: [B, D, N] or None for zeros.
      size: N.
      segment_ids: [B, T] or None.
      chunk_size: C, None for 32.
      impl: one of IMPLEMENTATIONS.

    Returns:
      y [B, T, D] (anything at padding), final state [B, D, N].
    """
    batch, time, width = u.shape
    leaves = (u, *jax.tree.leaves(parameters))
    fresh = initial_state is None
    state = jnp.zeros((batch, width, size), u.dtype) if fresh else initial_state.astype(u.dtype)
    state = varying_like(state, *leaves)
    parameters = jax.tree.map(lambda p: varying_like(p, *leaves, state), parameters)
    if impl == "recurrent":
        return _recurrent(system, parameters, u, state, elementwise.document_marks(segment_ids))
    chunk = min(chunk_size or DEFAULT_CHUNK, max(1, 1 << (time - 1).bit_length()))
    tables = system.tables(parameters, chunk)
    if segment_ids is None:
        count = varying_like(jnp.full((batch,), time, jnp.int32), u)
        y, last = _run(system, tables, u, None, count, state, intra=impl == "chunked")
        if impl == "fft":
            y = _convolve(system.kernel(parameters, time), u)
            if not fresh:
                silence = jnp.zeros_like(u)
                y = y + _run(system, tables, silence, None, count, state, intra=False)[0]
        rest = jnp.moveaxis(u[:, time // chunk * chunk :], 1, 0)
        advance = lambda x, u: (system.advance(parameters, x, u), None)  # noqa: E731
        return y, lax.scan(advance, last, rest)[0]
    real = segment_ids != 0
    order = jnp.argsort(~real, axis=1, stable=True)
    u = jnp.take_along_axis(u, order[..., None], axis=1)
    run = runs(jnp.take_along_axis(segment_ids, order, axis=1))
    count = jnp.sum(real, axis=1, dtype=jnp.int32)
    y, last = _run(system, tables, u, run, count, state)
    final = _finish(system, parameters, u, run, count, last, chunk)
    back = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
    return jnp.take_along_axis(y, back[..., None], axis=1), final


def _recurrent(system, parameters, u, state, marks):
    """The definition, one token at a time."""

    def step(x, token):
        u, mark = token
        if mark is None:
            x = system.advance(parameters, x, u)
        else:
            mark = mark[:, None, None]
            entering = jnp.where(mark == elementwise.START, 0, x)
            x = jnp.where(mark == elementwise.SKIP, x, system.advance(parameters, entering, u))
        return x, system.output(parameters, x)

    final, y = lax.scan(step, state, jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (u, marks)))
    return jnp.moveaxis(y, 0, 1), final


def _convolve(kernel, u):
    """Causal convolution of [B, T, D] with [D, T], zero-padded so that nothing wraps around."""
    time = u.shape[1]
    length = 1 << (2 * time - 1).bit_length()
    spectrum = jnp.fft.rfft(u, length, axis=1) * jnp.fft.rfft(kernel.T, length, axis=0)
    return jnp.fft.irfft(spectrum, length, axis=1)[:, :time].astype(u.dtype)


def _finish(system, parameters, u, run, count, state, chunk):
    """The state after `count` [B] tokens from the `state` before the chunk in which they end."""
    index = count[:, None] // chunk * chunk + jnp.arange(chunk - 1)
    place = jnp.minimum(index, u.shape[1] - 1)
    before = jnp.take_along_axis(run, jnp.maximum(place - 1, 0), axis=1)
    starts = jnp.take_along_axis(run, place, axis=1) != before
    marks = jnp.where(
        index >= count[:, None], elementwise.SKIP, jnp.where(starts, elementwise.START, 0)
    )
    u = jnp.take_along_axis(u, place[..., None], axis=1)
    return _recurrent(system, parameters, u, state, marks)[1]


def _run(system, tables, u, run, count, state, *, intra=True):
    """Outputs [B, T, D], and the states [B, D, N] before the chunks in which `count` tokens end.

    Without `intra` the outputs are those of the entering states alone.
    """
    batch, time, width = u.shape
    chunk = tables.kernel.shape[1]
    blocks = -(-time // (chunk * BLOCK_CHUNKS))
    inside = -(-time // (chunk * blocks))
    pad = blocks * inside * chunk - time
    u = jnp.pad(u, ((0, 0), (0, pad), (0, 0)))
    u = jnp.moveaxis(u.reshape(batch, blocks, inside, chunk, width), 0, 2)
    entry = None
    if run is not None:
        run = jnp.pad(run, ((0, 0), (0, pad)), mode="edge")
        run = run.reshape(batch, blocks * inside, chunk)
        entry = jnp.pad(run[:, :-1, -1], ((0, 0), (1, 0))).reshape(batch, blocks, inside)
        run = jnp.moveaxis(run.reshape(batch, blocks, inside, chunk), 0, 2)
        entry = jnp.moveaxis(entry, 0, 2)
    lag = jnp.arange(chunk)[:, None] - jnp.arange(chunk)
    toeplitz = jnp.where(lag >= 0, tables.kernel[:, jnp.maximum(lag, 0)], 0) if intra else None
    tables = (toeplitz, tables.read, tables.write, tables.through)
    y, last = _chunked(system.across, tables, u, (run, entry), count // chunk, state)
    return jnp.moveaxis(y, 2, 0).reshape(batch, time + pad, width)[:, :time], last


def _chunk(across, tables, x, u, documents):
    """Outputs [B, C, D] of one chunk and the state it leaves."""
    toeplitz, read, write, through = tables
    run, entry = documents
    inter = contract("din,bdn->bid", read, x)
    passed = across(through, x)
    written = u
    if run is not None:
        inter = jnp.where((run == entry[:, None])[..., None], inter, 0)
        passed = jnp.where((run[:, -1] == entry)[:, None, None], passed, 0)
        written = jnp.where((run == run[:, -1:])[..., None], u, 0)
    after = passed + contract("djn,bjd->bdn", write[:, ::-1], written)
    if toeplitz is None:
        return inter, after
    if run is None:
        return contract("dij,bjd->bid", toeplitz, u) + inter, after
    same = (run[:, :, None] == run[:, None, :])[:, None]
    return contract("bdij,bjd->bid", jnp.where(same, toeplitz, 0), u) + inter, after


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(across, tables, u, documents, ends, state):
    return _chunked_forward(across, tables, u, documents, ends, state)[0]


def _chunked_forward(across, tables, u, documents, ends, state):
    """Chunk after chunk; `ends` [B] is the chunk whose entering state each row gives back.

    One state per block of chunks is kept for the backward.
    """

    def step(carry, xs):
        x, kept = carry
        index, u, documents = xs
        kept = _choose(index == ends, x, kept)
        y, after = _chunk(across, tables, x, u, documents)
        return (after, kept), y

    def block(carry, xs):
        after, y = lax.scan(step, carry, xs)
        return after, (y, carry[0])

    xs = (_indices(u), u, documents)
    (after, kept), (y, states) = lax.scan(block, (state, state), xs)
    kept = _choose(ends == xs[0].size, after, kept)
    return (y, kept), (tables, u, documents, ends, states)


def _indices(u):
    """[blocks, chunks] numbers of the chunks of u [blocks, chunks, B, C, D]."""
    return jnp.arange(u.shape[0] * u.shape[1]).reshape(u.shape[:2])


def _choose(rows, x, y):
    return jnp.where(rows[:, None, None], x, y)


def _chunked_backward(across, residuals, cotangents):
    tables, u, documents, ends, states = residuals
    d_y, d_kept = cotangents

    def forwards(x, xs):
        return _chunk(across, tables, x, *xs)[1], x

    def step(carry, xs):
        d_after, d_tables = carry
        index, u, documents, x, d_y = xs
        _, pull = jax.vjp(lambda t, x, u: _chunk(across, t, x, u, documents), tables, x, u)
        d_more, d_x, d_u = pull((d_y, d_after))
        d_x = d_x + _choose(index == ends, d_kept, 0)
        return (d_x, jax.tree.map(jnp.add, d_tables, d_more)), d_u

    def block(carry, xs):
        index, u, documents, state, d_y = xs
        _, entering = lax.scan(forwards, state, (u, documents))
        return lax.scan(step, carry, (index, u, documents, entering, d_y), reverse=True)

    index = _indices(u)
    zeros = jax.tree.map(lambda t: varying_like(jnp.zeros_like(t), t), tables)
    start = (_choose(ends == index.size, d_kept, 0), zeros)
    xs = (index, u, documents, states, d_y)
    (d_state, d_tables), d_u = lax.scan(block, start, xs, reverse=True)
    return d_tables, d_u, None, None, d_state


_chunked.defvjp(_chunked_forward, _chunked_backward)
