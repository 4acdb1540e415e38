# SPDX-License-Identifier: Apache-2.0
"""Decays of spans of a chunk, one per key channel, and products of token pairs under them.

What `seqmix.mixers._pairwise` does, laid out for VMEM. A chunk is halved again and again; a pair
(query i, key j < i) is split by one cut m, and its decay is the product of what lies on either
side::

    A_ij = sum_k (q_ik exp(g_mk + .. + g_ik)) (k_jk exp(g_{j+1,k} + .. + g_{m-1,k})),  j < m <= i

Each level is one matrix product, of which a mask keeps the pairs that the level's cuts split. Sums
of log-decays grow by doubling: none is a difference, so none exceeds 0 and a strong decay costs the
spans beside it no digits. The gradient of the log-decays is the transpose of those sums, from the
longest spans to the shortest.

Axes: n states, m query sides of a state (each of C rows, stacked), C tokens (a power of two),
K key channels, V values. Everything is float32 but the operands of products.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from seqmix_kernels.tpu import _common as common

# Rows of a triangular matrix that are substituted one by one.
BLOCK = 16


class Spans(NamedTuple):
    """Decays of one chunk, in [0, 1].

    Attributes:
      levels: by level, halves of s = 1, 2, 4, .. C/2 tokens: [n, C, K]; in right halves from the
        cut to the token's read, in left halves from the token's write to the cut.
      entry: [n, C, K], from the chunk's start to the read of each token.
      exit: [n, C, K], from the write of each token to the chunk's end.
      through: [n, 1, K], across the chunk.
    """

    levels: tuple[jax.Array, ...]
    entry: jax.Array
    exit: jax.Array
    through: jax.Array


def spans(log_decay: jax.Array, read: jax.Array) -> Spans:
    """The decays of all spans.

    Args:
      log_decay: [n, C, K], non-positive and finite; `_common.RESET` where a document starts.
      read: [n, C, K], what lies between the end of the token before and the token's read:
        `log_decay`, or 0 (RESET where a document starts) if the state is read before it decays.
    """
    to_read, to_end, through = read, jnp.zeros_like(log_decay), log_decay
    levels = []
    for size in sizes(log_decay.shape[1]):
        levels.append(jnp.exp(_from_halves(to_end, to_read, size)))
        other = _other_half(through, size)
        to_read = _from_halves(to_read, to_read + other, size)
        to_end = _from_halves(to_end + other, to_end, size)
        through = through + other
    return Spans(tuple(levels), jnp.exp(to_read), jnp.exp(to_end), jnp.exp(through[:, :1]))


def scores(q: jax.Array, k: jax.Array, cut: Spans, own: jax.Array, low: jnp.dtype) -> jax.Array:
    """Decayed products of all pairs whose key stands before the query.

    Args:
      q: [n, m C, K].
      k: [n, C, K].
      cut: the decays.
      own: [n, m C, 1], the products of tokens with themselves, for the diagonal.
      low: dtype of the operands.

    Returns:
      [n, m C, C]; 0 above the diagonal.
    """
    shape = (*q.shape[:2], k.shape[1])
    matrix = jnp.where(_diagonal(shape), own, 0.0)
    for size, decay in zip(sizes(k.shape[1]), cut.levels, strict=True):
        right, left = _sides(q, k, decay, size)
        pairs = common.batched_dot(right.astype(low), left.astype(low), 2, 2)
        rows = jnp.where(_split_pairs(shape, size), pairs, _queries(matrix, size))
        matrix = _with_queries(matrix, rows, size)
    return matrix


def own_products(d_scores: jax.Array) -> jax.Array:
    """[n, m C, C] -> its diagonals, [n, m C, 1]."""
    kept = jnp.where(_diagonal(d_scores.shape), d_scores, 0.0)
    return jnp.sum(kept, axis=2, keepdims=True)


def gradients(
    d_scores: jax.Array, q: jax.Array, k: jax.Array, cut: Spans, low: jnp.dtype
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Gradients of `scores` without those of the diagonal.

    Args:
      d_scores: [n, m C, C], read below the diagonal only.
      q, k, cut, low: as `scores` took them.

    Returns:
      dq [n, m C, K], dk [n, C, K], and by level what each span contributes to the loss
      differential, [n, C, K].
    """
    dq, dk, terms = jnp.zeros_like(q), jnp.zeros_like(k), []
    for size, decay in zip(sizes(k.shape[1]), cut.levels, strict=True):
        right, left = _sides(q, k, decay, size)
        d_pairs = _queries(d_scores, size)
        d_pairs = jnp.where(_split_pairs(d_scores.shape, size), d_pairs, 0.0).astype(low)
        d_right = common.batched_dot(d_pairs, left.astype(low))
        d_left = common.batched_dot(d_pairs, right.astype(low), 1, 1)
        rows = _queries(decay, size)
        d_rows = _queries(dq, size) + stacked(rows, d_right) * d_right
        dq = _with_queries(dq, d_rows, size)
        dk = _at_keys(dk + decay * d_left, dk, size)
        reads, writes = summed(right * d_right, rows), left * d_left
        terms.append(_with_queries(writes, reads if _tiled(size) else reads + writes, size))
    return dq, dk, terms


def log_decay_gradient(
    terms: list[jax.Array],
    reads: jax.Array,
    writes: jax.Array,
    passing: jax.Array,
    *,
    read_after: bool,
) -> jax.Array:
    """Gradient of the log-decays of a chunk: of the sums in `spans`, in reverse.

    Every step adds what belongs to longer spans to what belongs to shorter ones. The suffix sum of
    q*dq - k*dk of the literature is the same in exact arithmetic; where decays are strong, its
    nearly equal halves leave no digits.

    Args:
      terms: contributions of the spans of pairs, from `gradients`.
      reads: [n, C, K], contribution of the entering state to each token's reads.
      writes: [n, C, K], contribution of each token's write to the leaving state.
      passing: [n, 1, K], contribution of the entering to the leaving state.
      read_after: whether a token's read is behind its own decay (`read` was `log_decay`).

    Returns:
      [n, C, K].
    """
    to_read, to_end = reads, writes
    through = jnp.where(common.iota(reads.shape, 1) == 0, passing, 0.0)
    for size, term in zip(reversed(sizes(reads.shape[1])), reversed(terms), strict=True):
        other = _from_halves(to_end, to_read, size) + through
        through = through + _other_half(other, size)
        to_read = _from_halves(to_read, to_read + term, size)
        to_end = _from_halves(to_end + term, to_end, size)
    return through + to_read if read_after else through


def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """Inverses of I + L by block substitution.

    Blocks on the diagonal are inverted row by row, all at once: they lie side by side in the lanes.
    Then neighbours are merged: with inverses X and Y of two blocks and M below the first and beside
    the second, the corner is -Y M X. No power of L is formed, so repeated keys lose nothing.

    Args:
      lower: [n, C, C], zero on and above the diagonal.

    Returns:
      [n, C, C], unit lower triangular.
    """
    inverse = _diagonal_inverses(lower)
    for size in sizes(lower.shape[1]):
        if size >= BLOCK:
            rows = _queries(lower, size)
            rows = jnp.where(_split_pairs(lower.shape, size), rows, 0.0)
            below = _with_queries(jnp.zeros_like(lower), rows, size)
            second = _queries(inverse, size)
            corner = common.batched_dot(common.batched_dot(second, below), inverse)
            inverse = _with_queries(inverse, second - corner, size)
    return inverse


def _diagonal_inverses(lower):
    """Block diagonal [n, C, C], the inverses of the diagonal blocks of I + L."""
    count, size, _ = lower.shape
    own = common.iota(lower.shape, 1) // BLOCK == common.iota(lower.shape, 2) // BLOCK
    lower = jnp.where(own, lower, 0.0)
    # [n, BLOCK, C]: block b holds the lanes b * BLOCK to (b + 1) * BLOCK.
    folded = sum(lower[:, start : start + BLOCK] for start in range(0, size, BLOCK))
    if size < common.LANES:
        rest = jnp.zeros((count, BLOCK, common.LANES - size), jnp.float32)
        folded = jnp.concatenate([folded, rest], axis=2)
    shape = folded.shape
    folded = folded.reshape(-1, shape[2])
    lane = common.iota(folded.shape, 1)
    first = lane - lane % BLOCK
    inverse = jnp.where(common.iota(shape, 1) == common.iota(shape, 2) % BLOCK, 1.0, 0.0)
    for j in range(BLOCK - 1):
        # Row j is final; entry (i, j) of each block goes to all lanes of the block.
        weights = jnp.take_along_axis(folded, first + j, axis=1).reshape(shape)
        inverse = inverse - weights * inverse[:, j : j + 1]
    inverse = jnp.concatenate([inverse[:, :, :size]] * (size // BLOCK), axis=1)
    return jnp.where(own, inverse, 0.0)


def strictly_lower(x: jax.Array) -> jax.Array:
    """[n, C, C] with zeros on and above the diagonal."""
    return jnp.where(common.iota(x.shape, 1) > common.iota(x.shape, 2), x, 0.0)


def sizes(chunk: int) -> list[int]:
    """Tokens in a half, from the shortest level: 1, 2, 4, .. chunk / 2."""
    return [1 << level for level in range(chunk.bit_length() - 1)]


def stacked(rows: jax.Array, like: jax.Array) -> jax.Array:
    """[n, C, W] -> [n, m C, W], once for each query side of `like`."""
    count = like.shape[1] // rows.shape[1]
    return rows if count == 1 else jnp.concatenate([rows] * count, axis=1)


def summed(rows: jax.Array, like: jax.Array) -> jax.Array:
    """[n, m C, W] -> [n, C, W] of `like`, the sum over query sides."""
    size = like.shape[1]
    return sum(rows[:, i : i + size] for i in range(0, rows.shape[1], size))


def _tiled(size):
    """Whether halves of `size` tokens are whole tiles: these are split, others masked."""
    return size >= common.SUBLANES


def _halves(x, size):
    """[n, R, W] -> [n, R / (2 size), 2, size, W]."""
    return x.reshape(x.shape[0], -1, 2, size, x.shape[2])


def _right_half(shape, size):
    """Whether a token stands in the right half of its block of 2 size tokens."""
    return (common.iota(shape, 1) & size) != 0


def _from_halves(left, right, size):
    """[n, C, K], the left halves of `left` and the right halves of `right`."""
    if not _tiled(size):
        return jnp.where(_right_half(left.shape, size), right, left)
    both = [_halves(left, size)[:, :, 0], _halves(right, size)[:, :, 1]]
    return jnp.stack(both, axis=2).reshape(left.shape)


def _other_half(x, size):
    """[n, C, K], at each token the value at its place in the other half of its block."""
    if _tiled(size):
        x = _halves(x, size)
        return jnp.stack([x[:, :, 1], x[:, :, 0]], axis=2).reshape(x.shape[0], -1, x.shape[4])
    right = _right_half(x.shape, size)
    return jnp.where(right, common.roll(x, size, 1), common.roll(x, x.shape[1] - size, 1))


def _queries(x, size):
    """The rows that a level reads, [n, R / 2, W]: those of right halves; all if they are masked."""
    if not _tiled(size):
        return x
    return _halves(x, size)[:, :, 1].reshape(x.shape[0], -1, x.shape[2])


def _with_queries(x, rows, size):
    """[n, R, W], `x` with the rows that `_queries` takes replaced."""
    if not _tiled(size):
        return rows
    rows = rows.reshape(x.shape[0], -1, size, x.shape[2])
    return jnp.stack([_halves(x, size)[:, :, 0], rows], axis=2).reshape(x.shape)


def _at_keys(x, other, size):
    """[n, C, K], `x` at the keys of a level; at its queries `other`, or anything if masked."""
    return _from_halves(x, other, size) if _tiled(size) else x


def _sides(q, k, decay, size):
    """Decayed queries of `_queries`, and keys [n, C, K], decayed at the keys of the level."""
    right = _queries(q, size)
    right = right * stacked(_queries(decay, size), right)
    return right, _at_keys(k * decay, k, size)


def _diagonal(shape):
    chunk = shape[2]
    return (common.iota(shape, 1) & (chunk - 1)) == common.iota(shape, 2)


def _split_pairs(shape, size):
    """For the rows of `_queries` of [n, m C, C], whether the level's cut splits query and key."""
    count, rows, chunk = shape
    if not _tiled(size):
        query, key = common.iota(shape, 1) & (chunk - 1), common.iota(shape, 2)
        apart = query ^ key
        return (query > key) & (apart >= size) & (apart < 2 * size)
    shape, level = (count, rows // 2, chunk), size.bit_length() - 1
    query, key = common.iota(shape, 1) & (chunk // 2 - 1), common.iota(shape, 2)
    return ((key & size) == 0) & ((key >> (level + 1)) == (query >> level))
