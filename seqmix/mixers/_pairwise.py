# SPDX-License-Identifier: Apache-2.0
"""Decayed products of the token pairs of a chunk, one decay per key channel.

``A_ij = sum_k q_ik k_jk a_{j+1,k} ... a_{i,k}`` for ``i > j`` is no matrix product times a mask, as
it is with one decay per head, and ``(q e^G)(k e^-G)^T`` overflows. Here a chunk is halved again and
again. A pair is split by exactly one cut, and its decay is the product of what lies on either side
of that cut::

    A_ij = sum_k (q_ik * a_{m,k} ... a_{i,k}) (k_jk * a_{j+1,k} ... a_{m-1,k}),   j < m <= i

so each cut gives one matrix product of decayed queries with decayed keys: C log C decays per
channel for C(C-1)/2 pairs, and each is a *product of decays*, built by doubling. No factor exceeds
1, nothing is subtracted, an exact 0 (log-decay -inf, or the first token of a document) cuts what it
should cut, and a strong decay costs the spans beside it no digits. The secondary chunking of Yang
et al. 2023 (arXiv 2312.06635, section 4.3) is the same thought with one level.

Two ways to read, chosen by the `read` factors that `spans` takes: the token's own decay for a state
that is read after it decayed and was written (GLA, KDA), 1 for one that is read before (RWKV; 0 at
a document's first token, which reads nothing).

Axes: ``...`` any leading axes that broadcast (batch, chunks, heads), x queries that share keys and
decays (grouped queries, or the stacked query sides of several products), C tokens (a power of two),
K key channels; b blocks of a level.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from seqmix.mixers._numerics import contract


def chunk_tokens(chunk_size: int | None, default: int) -> int:
    """`chunk_size` (None: `default`) rounded up to a power of two, as halving needs it."""
    return 1 << ((chunk_size or default) - 1).bit_length()


class Spans(NamedTuple):
    """Products of decays over the spans that the cuts of a chunk make, each in [0, 1].

    Attributes:
      reads: by level, halves of s = 1, 2, 4, .. C/2 tokens: [..., b, s, K], from the cut to the
        read of each token of the right half, of each of the b = C/(2s) blocks.
      writes: the same for left halves: from the write of each token to the cut.
      entry: [..., C, K], from the chunk's start to the read of each token.
      exit: [..., C, K], from the write of each token to the chunk's end.
      through: [..., K], across the chunk.
    """

    reads: tuple[jax.Array, ...]
    writes: tuple[jax.Array, ...]
    entry: jax.Array
    exit: jax.Array
    through: jax.Array


class Terms(NamedTuple):
    """What each span of `Spans` contributes to the loss differential, in the same shapes."""

    reads: tuple[jax.Array, ...]
    writes: tuple[jax.Array, ...]


def spans(decay: jax.Array, read: jax.Array) -> Spans:
    """Multiplies the decays over every span.

    Args:
      decay: [..., C, K] in [0, 1], C a power of two; 0 where a document starts.
      read: [..., C, K], what lies between the end of the token before and the token's read: `decay`
        itself, or 1 (0 where a document starts) when the state is read before it decays.
    """
    to_read, to_end, through = read, jnp.ones_like(decay), decay
    reads, writes = [], []
    size = 1
    while size < decay.shape[-2]:
        by_half, before_end = _split(to_read, size), _split(to_end, size)
        reads.append(by_half[..., 1, :, :])
        writes.append(before_end[..., 0, :, :])
        left, right = through[..., 0::2, :], through[..., 1::2, :]
        one = jnp.ones_like(left)
        to_read = (by_half * jnp.stack([one, left], axis=-2)[..., None, :]).reshape(read.shape)
        to_end = (before_end * jnp.stack([right, one], axis=-2)[..., None, :]).reshape(decay.shape)
        through = left * right
        size *= 2
    return Spans(tuple(reads), tuple(writes), to_read, to_end, through[..., 0, :])


def scores(
    q: jax.Array, k: jax.Array, cut: Spans, *, own: jax.Array | None = None, dtype=None
) -> jax.Array:
    """Decayed products of all pairs whose key stands before the query.

    Args:
      q: [..., x, C, K].
      k: [..., C, K].
      cut: the decays, [..., C, K].
      own: [..., x, C], the products of tokens with themselves, for the diagonal; None: zeros.
      dtype: operands of the products are cast to it; None keeps them.

    Returns:
      [..., x, C, C] float32 (or float64): rows are queries; 0 above the diagonal.
    """
    matrix = None
    if own is not None:
        leading = jnp.broadcast_shapes(own.shape[:-2], cut.entry.shape[:-2])
        matrix = jnp.broadcast_to(own, (*leading, *own.shape[-2:]))[..., None, None]
    for right, left in _operands(q, k, cut):
        below = contract("...xbik,...bjk->...xbij", right, left, dtype=dtype)
        zeros = jnp.zeros_like(below)
        first = zeros if matrix is None else matrix[..., 0::2, :, :]
        second = zeros if matrix is None else matrix[..., 1::2, :, :]
        top = jnp.concatenate([jnp.broadcast_to(first, below.shape), zeros], axis=-1)
        bottom = jnp.concatenate([below, jnp.broadcast_to(second, below.shape)], axis=-1)
        matrix = jnp.concatenate([top, bottom], axis=-2)
    if matrix is None:  # one token, which has no token before it
        matrix = jnp.zeros_like(q[..., :1, None] * k[..., None, :, :1, None])
    return matrix[..., 0, :, :]


def gradients(
    d_scores: jax.Array, q: jax.Array, k: jax.Array, cut: Spans, *, dtype=None
) -> tuple[jax.Array, jax.Array, Terms]:
    """Gradients of `scores` with respect to its operands, without those of `own` (the diagonal).

    Args:
      d_scores: [..., x, C, C], gradient of the scores; read below the diagonal only.
      q, k, cut, dtype: as `scores` took them.

    Returns:
      dq [..., x, C, K] and dk [..., C, K] with all leading axes of the decays (the caller sums over
      those that it broadcast), and the terms for `log_decay_gradient`.
    """
    size = q.shape[-2]
    block = d_scores[..., None, :, :]
    parts_q, parts_k = [], []
    reads, writes = [], []
    levels = list(zip(_operands(q, k, cut), cut.reads, cut.writes, strict=True))
    for (right, left), read, write in reversed(levels):
        size //= 2
        below = block[..., size:, :size]
        dq = contract("...xbij,...bjk->...xbik", below, left, dtype=dtype)
        dk = contract("...xbij,...xbik->...bjk", below, right, dtype=dtype)
        reads.append(jnp.sum(right * dq, axis=-4))
        writes.append(left * dk)
        parts_q.append(_placed(read[..., None, :, :, :] * dq, right=True))
        parts_k.append(_placed(write * dk, right=False))
        inner = jnp.stack([block[..., :size, :size], block[..., size:, size:]], axis=-3)
        block = inner.reshape(*block.shape[:-3], -1, size, size)
    terms = Terms(tuple(reads[::-1]), tuple(writes[::-1]))
    if not levels:
        return jnp.zeros_like(d_scores * q), jnp.zeros_like(d_scores[..., 0, :, :] * k), terms
    return sum(parts_q), sum(parts_k), terms


def log_decay_gradient(
    terms: Terms, reads: jax.Array, writes: jax.Array, passing: jax.Array, *, read_after: bool
) -> jax.Array:
    """Gradient of the log-decays of a chunk, from the contributions of all spans that hold each.

    A span's contribution is the factor that it decays times that factor's gradient. They are handed
    from each block to its halves, down to single tokens: every step adds what belongs to longer
    spans to what belongs to shorter ones. The suffix sum of q*dq - k*dk of the literature is the
    same in exact arithmetic; where decays are strong, its nearly equal halves leave no digits.

    Args:
      terms: contributions of the spans of pairs; sum those of several products (`jax.tree.map`).
      reads: [..., C, K], contribution of the chunk's entering state to each token's reads.
      writes: [..., C, K], contribution of each token's write to the leaving state.
      passing: [..., K], contribution of the entering to the leaving state.
      read_after: whether a token's read is behind its own decay (`read` was `decay`).

    Returns:
      [..., C, K].
    """
    to_read, to_end, through = (
        reads[..., None, :, :],
        writes[..., None, :, :],
        passing[..., None, :],
    )
    for read, write in zip(reversed(terms.reads), reversed(terms.writes), strict=True):
        size = read.shape[-2]
        read_left, read_right = to_read[..., :size, :], to_read[..., size:, :]
        end_left, end_right = to_end[..., :size, :], to_end[..., size:, :]
        left = through + jnp.sum(read_right, axis=-2)
        right = through + jnp.sum(end_left, axis=-2)
        to_read = _interleave(read_left, read_right + read)
        to_end = _interleave(end_left + write, end_right)
        through = _interleave(left[..., None, :], right[..., None, :])[..., 0, :]
    return through + to_read[..., 0, :] if read_after else through


def _operands(q, k, cut):
    """By level: decayed queries [..., x, b, s, K] of right halves, keys [..., b, s, K] of left."""
    for read, write in zip(cut.reads, cut.writes, strict=True):
        size = read.shape[-2]
        right = _split(q, size)[..., 1, :, :] * read[..., None, :, :, :]
        yield right, _split(k, size)[..., 0, :, :] * write


def _split(x, size):
    """[..., C, K] -> [..., C / (2 size), 2, size, K]."""
    return x.reshape(*x.shape[:-2], -1, 2, size, x.shape[-1])


def _interleave(even, odd):
    """[..., b, s, K] each, the left and right halves of blocks -> [..., 2 b, s, K]."""
    return jnp.stack([even, odd], axis=-3).reshape(*even.shape[:-3], -1, *even.shape[-2:])


def _placed(half, *, right):
    """[..., b, s, K] -> [..., C, K], zeros in the other halves of the blocks."""
    zeros = jnp.zeros_like(half)
    both = jnp.stack([zeros, half] if right else [half, zeros], axis=-3)
    return both.reshape(*half.shape[:-3], -1, half.shape[-1])
