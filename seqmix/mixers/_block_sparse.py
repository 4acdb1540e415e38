# SPDX-License-Identifier: Apache-2.0
"""Softmax attention of chunks of queries over listed keys, its backward pass as sparse as itself.

Rows are first laid out as lines: the real tokens of a row side by side, so that a document is one
range of places and everything about it follows from where it starts. Queries are then taken in
chunks of consecutive places; a plan lists the keys of a chunk by their index in a pool (tokens
and whatever a cache holds). A chunk of queries reaches out of itself in one document on the left
and one on the right only, however many documents there are, so its list has a static size.
"""

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from seqmix.mixers._numerics import contract, operand_dtype, state_dtype, varying_like
from seqmix.mixers.kv_cache import Placement

NOWHERE = -1
"""The run of what is no token."""


class Line(NamedTuple):
    """Rows laid out without padding; behind the last real token all places are empty.

    Attributes:
      run: [B, T] document number by place, `NOWHERE` where empty.
      position: [B, T] position in the document by place.
      count: [B] real tokens.
      order: [B, T] token at each place, T where empty; None: tokens are in place.
      place: [B, T] place of each real token; None with `order`.
    """

    run: jax.Array
    position: jax.Array
    count: jax.Array
    order: jax.Array | None
    place: jax.Array | None


def lay_out(at: Placement, padded: bool) -> Line:
    """The line of each row; `padded` False says that all tokens are real."""
    batch, time = at.run.shape
    if not padded:
        return Line(at.run, at.position, jnp.full((batch,), time, jnp.int32), None, None)
    real = at.real.astype(jnp.int32)
    place = jnp.cumsum(real, axis=1) - real
    count = jnp.sum(real, axis=1)
    order = listing(at.real).listed
    run = fetch(at.run[..., None], order, NOWHERE)[..., 0]
    position = fetch(at.position[..., None], order, 0)[..., 0]
    return Line(run, position, count, order, place)


def to_line(line: Line, x: jax.Array) -> jax.Array:
    """[B, T, ...] by token -> by place."""
    return x if line.order is None else fetch(x, line.order)


def from_line(line: Line, x: jax.Array) -> jax.Array:
    """[B, T, ...] by place -> by token; what padding gets has no meaning."""
    return x if line.place is None else fetch(x, line.place)


def fetch(x: jax.Array, index: jax.Array, fill: int = 0) -> jax.Array:
    """x [B, S, ...] at index [B, M] -> [B, M, ...]; `fill` where the index is not below S."""
    index = index.reshape(index.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=fill)


class Listing(NamedTuple):
    """Marked places.

    Attributes:
      listed: [B, T] marked places in order, then T.
      before: [B, T + 1] number of marked places before each.
    """

    listed: jax.Array
    before: jax.Array


def listing(marked: jax.Array) -> Listing:
    """Lists the places [B, T] that are marked."""
    batch, time = marked.shape
    before = jnp.pad(jnp.cumsum(marked.astype(jnp.int32), axis=1), ((0, 0), (1, 0)))
    index = jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32), marked.shape)
    slot = jnp.where(marked, before[:, :-1], time)
    rows = jnp.arange(batch)[:, None]
    listed = jnp.full_like(index, time).at[rows, slot].set(index, mode="drop")
    return Listing(listed, before)


def chunked(x: jax.Array, chunk: int, fill: int = 0) -> jax.Array:
    """[B, T, ...] -> [chunks, B, chunk, ...], filled up at the end."""
    batch, time = x.shape[:2]
    count = -(-time // chunk)
    pad = [(0, 0), (0, count * chunk - time)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, pad, constant_values=fill)
    return jnp.moveaxis(x.reshape(batch, count, chunk, *x.shape[2:]), 1, 0)


def unchunked(x: jax.Array, time: int) -> jax.Array:
    """The inverse of `chunked`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :time]


class Piece(NamedTuple):
    """Part of the keys of a chunk of queries; no key stands twice in a piece.

    Attributes:
      index: [B, h, M] into the pool, its size where there is no key; h is 1 or the key heads.
      visible: [B, h, C, M] bool; a key is visible to a query through one piece at most.
    """

    index: jax.Array
    visible: jax.Array


class Plan(Protocol):
    """What a chunk of queries sees: static options, hashable.

    Attributes:
      scale: factor on the logits.
      skip: chunks that see nothing are not computed.
    """

    scale: float
    skip: bool

    def pieces(self, queries: Any, pool: Any) -> list[Piece]:
        """The keys of one chunk.

        Args:
          queries: integers about the chunk.
          pool: integers about the pool.
        """
        ...


def attend(
    plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, queries: Any, pool: Any, chunk: int
) -> jax.Array:
    """Attention over the keys that the plan lists.

    Args:
      plan: what each chunk of queries sees.
      q: [B, T, Hq, K] by place.
      k: [B, S, Hkv, K] the pool's keys.
      v: [B, S, Hkv, V].
      queries: pytree of [chunks, ...] integers for the plan.
      pool: pytree of integers for the plan.
      chunk: queries of a chunk.

    Returns:
      [B, T, Hq, V] float32; 0 where nothing is visible.
    """
    batch, time, heads, _ = q.shape
    groups = k.shape[2]
    low = operand_dtype(q, k, v)
    q = q.reshape(batch, time, groups, heads // groups, -1).astype(low)
    out = _attend(plan, chunked(q, chunk), k.astype(low), v.astype(low), queries, pool)
    return unchunked(out, time).reshape(batch, time, heads, v.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan, q, k, v, queries, pool):
    """[n, B, C, G, R, V] of q [n, B, C, G, R, K], k [B, S, G, K] and v [B, S, G, V]."""

    def step(chunk):
        q, queries = chunk
        index, visible = _joined(plan.pieces(queries, pool), k.shape[2])

        def compute():
            return softmax(q, _take(k, index), _take(v, index), visible, plan.scale)[0]

        return _unless_empty(plan, visible, compute)

    return _each(step, (q, queries))


def _forward(plan, q, k, v, queries, pool):
    return _attend(plan, q, k, v, queries, pool), (q, k, v, queries, pool)


def _backward(plan, saved, cotangent):
    """Each chunk's share is added in place: no array of the pool's size is made per chunk."""
    q, k, v, queries, pool = saved

    def step(sums, chunk):
        q, queries, cotangent = chunk
        pieces = plan.pieces(queries, pool)
        index, visible = _joined(pieces, k.shape[2])

        def compute():
            def run(q, keys, values):
                return softmax(q, keys, values, visible, plan.scale)[0]

            _, pull = jax.vjp(run, q, _take(k, index), _take(v, index))
            return pull(cotangent)

        dq, *shares = _unless_empty(plan, visible, compute)
        for i, share in enumerate(shares):
            sums[i] = _add(sums[i], pieces, share)
        return sums, dq

    wide = state_dtype(k, v)
    shapes = [(x.shape[0], x.shape[2], x.shape[1], x.shape[3]) for x in (k, v)]
    zeros = [varying_like(jnp.zeros(shape, wide), q, k, v, cotangent) for shape in shapes]
    if q.shape[0] == 1:
        (dk, dv), dq = step(zeros, jax.tree.map(lambda x: x[0], (q, queries, cotangent)))
        dq = dq[None]
    else:
        (dk, dv), dq = lax.scan(step, zeros, (q, queries, cotangent))
    dk, dv = (jnp.swapaxes(d, 1, 2).astype(x.dtype) for d, x in ((dk, k), (dv, v)))
    return dq, dk, dv, None, None


_attend.defvjp(_forward, _backward)


def _each(step, chunks):
    """`lax.map`, without a loop for one chunk."""
    if jax.tree.leaves(chunks)[0].shape[0] > 1:
        return lax.map(step, chunks)
    return jax.tree.map(lambda x: x[None], step(jax.tree.map(lambda x: x[0], chunks)))


def _unless_empty(plan, visible, compute):
    if not plan.skip:
        return compute()
    shapes = jax.eval_shape(compute)

    def nothing():
        return jax.tree.map(lambda s: varying_like(jnp.zeros(s.shape, s.dtype), visible), shapes)

    return lax.cond(jnp.any(visible), compute, nothing)


def _joined(pieces, groups):
    """All pieces side by side, with one axis of heads only where some piece needs it."""
    heads = max(p.index.shape[1] for p in pieces)
    assert heads in (1, groups)

    def join(arrays):
        return jnp.concatenate(
            [jnp.broadcast_to(x, (x.shape[0], heads, *x.shape[2:])) for x in arrays], axis=-1
        )

    return join([p.index for p in pieces]), join([p.visible for p in pieces])


def _take(x, index):
    """x [B, S, G, K] at index [B, h, M] -> [B, G, M, K]."""
    index = jnp.swapaxes(index, 1, 2)[..., None]
    return jnp.swapaxes(jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=0), 1, 2)


def _add(total, pieces, share):
    """`total` [B, G, S, K] with the share [B, G, M, K] of the pieces' keys added in place."""
    start = 0
    for piece in pieces:
        width = piece.index.shape[-1]
        part = share[:, :, start : start + width].astype(total.dtype)
        start += width

        def add(total, index, part):
            place = total.at[..., index, :]
            return place.add(part, mode="drop", unique_indices=True)

        if piece.index.shape[1] == 1:
            total = jax.vmap(add)(total, piece.index[:, 0], part)
        else:
            total = jax.vmap(jax.vmap(add))(total, piece.index, part)
    return total


def softmax(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [B, C, G, R, K] over k [B, G, M, K], v [B, G, M, V] where visible.

    Args:
      q, k, v: queries, keys and values.
      visible: [B, h, C, M] bool, h 1 or G.
      scale: factor on the logits.

    Returns:
      out: [B, C, G, R, V] float32, 0 where nothing is visible.
      log_total: [B, C, G, R] log of the sum of exponentials, -inf where nothing is visible.
    """
    low = operand_dtype(q, k, v)
    logits = contract("bcgrk,bgmk->bgrcm", q, k, dtype=low) * scale
    visible = visible[:, :, None]
    logits = jnp.where(visible, logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True)
    top = lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, logits - top, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    some = total > 0
    total = jnp.where(some, total, 1)
    out = contract("bgrcm,bgmv->bcgrv", weights / total, v, dtype=low)
    log_total = jnp.where(some, jnp.log(total) + top, -jnp.inf)[..., 0]
    return out, jnp.moveaxis(log_total, 3, 1)
