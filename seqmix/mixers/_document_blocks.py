# SPDX-License-Identifier: Apache-2.0
"""Blocks of tokens counted from each document's start, of a row and the cache before it.

The tokens of a row are laid out on one line: the cached tokens against its left part's right edge,
then the new ones without the padding between them. The tokens of a document are neighbours there,
and query i stands at place S + i whatever the cache holds. A line of n tokens has at most
n // block complete blocks however its documents are cut, so their list has a static size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from seqmix.mixers._numerics import state_dtype
from seqmix.mixers._segments import runs, segment_positions

NO_RUN = -1
LAST_RUN = 2**30


@jax.custom_vjp
def pick(x: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """x[b, source[b, m]], 0 where source is negative; no two m take the same token.

    The inverse map makes the backward a gather too; scatters are slow on some backends.

    Args:
      x: [B, n, ...].
      source: [B, M] places in x.
      target: [B, n] the m that takes each token, negative for none.
    """
    return _take(x, source)


def _take(x, index):
    index = index.reshape(index.shape + (1,) * (x.ndim - 2))
    taken = jnp.take_along_axis(x, jnp.maximum(index, 0), axis=1, mode="promise_in_bounds")
    return jnp.where(index >= 0, taken, jnp.zeros((), x.dtype))


pick.defvjp(
    lambda x, source, target: (_take(x, source), target),
    lambda target, cotangent: (_take(cotangent, target), None, None),
)


class Line(NamedTuple):
    """Tokens of [cache ; row] by place; the row's tokens start at place S.

    Attributes:
      run: [B, S + T] document of the row, 0 for the cache's; `LAST_RUN` after the last token.
      position: [B, S + T] position in the document.
      real: [B, S + T] bool, False where no token stands.
      order: [B, T] the token at each place after S, None: as they come.
      place: [B, T] its inverse.
      turn: [B, S] the slot at each place before S, None without a cache.
      slot: [B, S] its inverse.
    """

    run: jax.Array
    position: jax.Array
    real: jax.Array
    order: jax.Array | None
    place: jax.Array | None
    turn: jax.Array | None
    slot: jax.Array | None

    @property
    def held(self) -> int:
        """S, the places before the row's tokens."""
        return 0 if self.turn is None else self.turn.shape[1]

    def rows(self, x: jax.Array) -> jax.Array:
        """[B, T, ...] per token of the row -> by place."""
        return x if self.order is None else pick(x, self.order, self.place)

    def tokens(self, x: jax.Array) -> jax.Array:
        """[B, T, ...] by place -> per token of the row."""
        return x if self.order is None else pick(x, self.place, self.order)

    def join(self, cached: jax.Array | None, new: jax.Array) -> jax.Array:
        """Slots [B, S, ...] and tokens [B, T, ...] -> [B, S + T, ...] by place."""
        new = self.rows(new)
        if cached is None:
            return new
        return jnp.concatenate([pick(cached, self.turn, self.slot).astype(new.dtype), new], axis=1)

    def queries(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Run, position and real [B, T] of the row's tokens by place."""
        return self.run[:, self.held :], self.position[:, self.held :], self.real[:, self.held :]


def lay_out(
    length: jax.Array | None, slots: int, segment_ids: jax.Array | None, batch: int, time: int
) -> Line:
    """The `Line` of a row after a cache.

    Args:
      length: [B] tokens of the row's first document so far, None for none; the cache holds the
        last `slots` of them, the one at position p in slot p mod `slots`.
      slots: S.
      segment_ids: [B, T] or None.
      batch: B.
      time: T.
    """
    if segment_ids is None:
        run = jnp.zeros((batch, time), jnp.int32)
        position = jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32), run.shape)
        if length is not None:
            position = position + length[:, None]
        real, order, place = jnp.ones((batch, time), bool), None, None
    else:
        real = segment_ids != 0
        order = jnp.argsort(~real, axis=1, stable=True)
        count = jnp.cumsum(real, axis=1, dtype=jnp.int32)
        after = count[:, -1:] + jnp.arange(time, dtype=jnp.int32) - count
        place = jnp.where(real, count - 1, after)
        run = jnp.where(real, runs(segment_ids), LAST_RUN)
        run, position, real = (
            jnp.take_along_axis(x, order, axis=1)
            for x in (run, segment_positions(segment_ids, length), real)
        )
    if length is None or slots == 0:
        return Line(run, position, real, order, place, None, None)
    places = jnp.arange(slots, dtype=jnp.int32)[None]
    before = length[:, None] - slots + places
    held = before >= 0
    return Line(
        jnp.concatenate([jnp.where(held, 0, NO_RUN), run], axis=1),
        jnp.concatenate([before, position], axis=1),
        jnp.concatenate([held, real], axis=1),
        order,
        place,
        jnp.mod(before, slots),
        jnp.mod(places - length[:, None], slots),
    )


class Blocks(NamedTuple):
    """The complete blocks of a line, in order; N = max(1, n // size) of them.

    Attributes:
      start: [B, N] place of the block's first token, 0 where there is no block.
      run: [B, N] its document, `LAST_RUN` where there is no block.
      index: [B, N] its number in the document.
      member: [B, n] the place of each token among the blocks' tokens [N * size], -1 for none.
    """

    start: jax.Array
    run: jax.Array
    index: jax.Array
    member: jax.Array


def complete_blocks(line: Line, size: int) -> Blocks:
    """The complete blocks of `size` tokens whose tokens all stand on the line."""
    n = line.run.shape[1]
    count = max(1, n // size)
    run = jnp.where(line.real, line.run, NO_RUN)
    shift = min(size - 1, n)
    begin = jnp.pad(run[:, : n - shift], ((0, 0), (shift, 0)), constant_values=NO_RUN)
    ends = line.real & (begin == run) & (jnp.mod(line.position + 1, size) == 0)
    until = jnp.cumsum(ends, axis=1, dtype=jnp.int32)
    number = jnp.arange(count, dtype=jnp.int32)
    end = jax.vmap(lambda row: jnp.searchsorted(row, number + 1).astype(jnp.int32))(until)
    exists = number < until[:, -1:]
    end = jnp.where(exists, end, n - 1)
    start = jnp.where(exists, end - size + 1, 0)
    at = jnp.minimum(until - ends, count - 1)
    offset = jnp.arange(n, dtype=jnp.int32) - jnp.take_along_axis(start, at, axis=1)
    inside = (until - ends < until[:, -1:]) & (offset >= 0)
    return Blocks(
        start,
        jnp.where(exists, jnp.take_along_axis(line.run, end, axis=1), LAST_RUN),
        jnp.take_along_axis(line.position, end, axis=1) // size,
        jnp.where(inside, at * size + offset, -1),
    )


def gather_blocks(x: jax.Array, blocks: Blocks, size: int) -> jax.Array:
    """[B, n, ...] by place -> [B, N, size, ...], 0 where there is no block."""
    batch, count = blocks.start.shape
    source = blocks.start[..., None] + jnp.arange(size, dtype=jnp.int32)
    source = jnp.where((blocks.run != LAST_RUN)[..., None], source, -1)
    taken = pick(x, source.reshape(batch, count * size), blocks.member)
    return taken.reshape(batch, count, size, *x.shape[2:])


def block_means(x: jax.Array) -> jax.Array:
    """[..., size, H, K] -> [..., H, K], summed in float32 or wider."""
    return jnp.mean(x.astype(state_dtype(x)), axis=-3)
