# SPDX-License-Identifier: Apache-2.0
"""Rows of attention that see their whole document: few in a document, in any number of documents.

Pairs of a full row and a key are computed by chunks of keys. A chunk meets the full rows of the
document at its left end and of that at its right end, a bounded number of each, and those of
documents that lie inside it, which are among its own tokens. A document over several chunks gets
its parts joined by their log-sums.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from seqmix.mixers._block_sparse import (
    NOWHERE,
    Line,
    Listing,
    chunked,
    fetch,
    listing,
    softmax,
)

_NOBODY = -2  # no key has this run


class Bounds(NamedTuple):
    """The places [B, T] where each token's document starts and ends (one past the last)."""

    start: jax.Array
    end: jax.Array


def document_bounds(line: Line) -> Bounds:
    """Bounds of the documents of lines that no cache precedes."""
    time = line.run.shape[1]
    index = jnp.arange(time, dtype=jnp.int32)[None]
    start = index - line.position
    opens = jnp.where((start == index) & (index < line.count[:, None]), index, time)
    following = lax.cummin(opens, axis=1, reverse=True)
    following = jnp.pad(following[:, 1:], ((0, 0), (0, 1)), constant_values=time)
    return Bounds(start, jnp.minimum(following, line.count[:, None]))


class End(NamedTuple):
    """The document at one end of each chunk, and its marked tokens.

    Attributes:
      run: [n, B] its run, `NOWHERE` if there is none.
      start: [n, B] where it starts.
      members: [n, B, M] places of its marked tokens, T for none.
    """

    run: jax.Array
    start: jax.Array
    members: jax.Array


def chunk_ends(
    line: Line, bounds: Bounds, marked: Listing, most: int, chunk: int
) -> tuple[End, End]:
    """The documents at the left and the right end of each chunk; right: none if it is the same.

    Args:
      line: the rows.
      bounds: of their documents.
      marked: which tokens are members.
      most: M, members that a document may have.
      chunk: places of a chunk.
    """
    time = line.run.shape[1]
    first = jnp.arange(0, time, chunk, dtype=jnp.int32)[None]
    last = jnp.minimum(first + chunk, line.count[:, None]) - 1

    def end(place, exists):
        at = jnp.where(exists, place, time)
        run = fetch(line.run, at, NOWHERE)
        start, stop = fetch(bounds.start, at), fetch(bounds.end, at)
        before, after = (fetch(marked.before, x) for x in (start, stop))
        rank = before[..., None] + jnp.arange(most, dtype=jnp.int32)
        rank = jnp.where((run[..., None] >= 0) & (rank < after[..., None]), rank, time)
        members = fetch(marked.listed, rank.reshape(rank.shape[0], -1), time).reshape(rank.shape)
        return End(*(jnp.moveaxis(x, 1, 0) for x in (run, start, members)))

    left = end(jnp.broadcast_to(first, last.shape), last >= first)
    right = end(last, (last >= first) & (fetch(line.run, last) != left.run.T))
    return left, right


def full_rows(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    marked: jax.Array,
    line: Line,
    *,
    most: int,
    scale: float,
    chunk: int,
    packed: bool,
) -> jax.Array:
    """Attention of the marked tokens over all tokens of their documents.

    Args:
      q: [B, T, Hq, K] by place.
      k: [B, T, Hkv, K].
      v: [B, T, Hkv, V].
      marked: [B, T] bool by place.
      line: the rows; no cache precedes them.
      most: marked tokens that a document may have; more are left out.
      scale: factor on the logits.
      chunk: keys per step.
      packed: False says that each row is one document without padding.

    Returns:
      [B, T, Hq, V] float32; of no meaning where not marked.
    """
    batch, time, heads, width = q.shape
    groups = k.shape[2]
    chunk = min(chunk, time)
    grouped = q.reshape(batch, time, groups, heads // groups, width)
    bounds, listed = document_bounds(line), listing(marked)
    left, right = chunk_ends(line, bounds, listed, most, chunk)
    count = left.run.shape[0]
    ends = [left, right] if packed else [left]

    members = jnp.concatenate([e.members for e in ends], axis=2)  # [n, B, ends * M]
    flat = jnp.moveaxis(members, 1, 0).reshape(batch, -1)
    far = fetch(grouped, flat).reshape(batch, count, -1, *grouped.shape[2:])
    queries = jnp.moveaxis(far, 1, 0)
    runs = [jnp.where(e.members < time, e.run[..., None], _NOBODY) for e in ends]
    if packed:
        own_run = chunked(jnp.where(marked, line.run, _NOBODY), chunk, _NOBODY)
        inside = (own_run != left.run[..., None]) & (own_run != right.run[..., None])
        queries = jnp.concatenate([queries, chunked(grouped, chunk)], axis=2)
        runs = [*runs, jnp.where(inside, own_run, _NOBODY)]
    runs = jnp.concatenate(runs, axis=2)
    key_runs = chunked(line.run, chunk, NOWHERE)

    # Recomputed in the backward: the pairs of one chunk at a time.
    @jax.checkpoint
    def step(chunk):
        q, run, k, v, key_run = chunk
        visible = (run[:, :, None] == key_run[:, None]) & (key_run >= 0)[:, None]
        k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))
        return softmax(q, k, v, visible[:, None], scale)

    out, log_total = lax.map(step, (queries, runs, chunked(k, chunk), chunked(v, chunk), key_runs))
    parts = len(ends) * most
    joined = _join(out[:, :, :parts], log_total[:, :, :parts], ends, chunk)
    owner = _owner(bounds.start, chunk)
    rank = listed.before[:, :-1] - fetch(listed.before, bounds.start)
    result = fetch(joined, owner * most + jnp.clip(rank, 0, most - 1))
    if packed:
        own = jnp.moveaxis(out[:, :, parts:], 0, 1).reshape(batch, -1, *out.shape[3:])[:, :time]
        inside = jnp.moveaxis(inside, 0, 1).reshape(batch, -1)[:, :time]
        result = jnp.where(inside[..., None, None, None], own, result)
    return result.reshape(batch, time, heads, v.shape[-1])


def _owner(start, chunk):
    """Documents that reach an end of a chunk, by where they start: no two have the same number."""
    return 2 * (start // chunk) + (start % chunk != 0)


def _join(out, log_total, ends, chunk):
    """The parts [n, B, ends * M, G, R, V] of each document together: [B, owners * M, G, R, V]."""
    count, batch, _, *rest = out.shape
    most = ends[0].members.shape[2]
    owner = jnp.stack([jnp.where(e.run >= 0, _owner(e.start, chunk), 2 * count) for e in ends], 1)
    owner = jnp.moveaxis(owner.reshape(-1, batch), 1, 0)  # [B, n * ends]

    def by_part(x):
        x = x.reshape(count, batch, len(ends), most, *x.shape[3:])
        x = jnp.moveaxis(x, 1, 0)
        return x.reshape(batch, count * len(ends), most, *x.shape[4:])

    def gathered(out, log_total, owner):
        top = jnp.full((2 * count, *log_total.shape[1:]), -jnp.inf, log_total.dtype)
        top = top.at[owner].max(lax.stop_gradient(log_total), mode="drop")
        top = jnp.where(jnp.isfinite(top), top, 0)
        safe = jnp.isfinite(log_total)
        share = jnp.where(safe, log_total - jnp.take(top, owner, axis=0, mode="clip"), 0)
        share = jnp.where(safe, jnp.exp(share), 0)
        total = jnp.zeros_like(top).at[owner].add(share, mode="drop")
        weighted = share[..., None] * out
        numerator = jnp.zeros((2 * count, *out.shape[1:]), out.dtype)
        numerator = numerator.at[owner].add(weighted, mode="drop")
        return numerator / jnp.where(total > 0, total, 1)[..., None]

    joined = jax.vmap(gathered)(by_part(out), by_part(log_total), owner)
    return joined.reshape(batch, 2 * count * most, *rest)
