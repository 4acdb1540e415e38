# SPDX-License-Identifier: Apache-2.0
"""Cutting time into chunks and blocks of chunks, and the decays inside a chunk.

The chunkwise forms walk over *blocks* of up to `BLOCK_TOKENS` tokens with one `lax.scan`: what is
parallel over chunks is one batched contraction per block, temporary memory does not grow with T,
and neither does the program.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from seqmix.mixers._checks import Heads
from seqmix.mixers._numerics import contract, range_sums

BLOCK_TOKENS = 1024


class Layout(NamedTuple):
    """Static cut of T tokens.

    Attributes:
      time: T.
      blocks: number of blocks.
      chunks: chunks per block.
      chunk: tokens per chunk C.
    """

    time: int
    blocks: int
    chunks: int
    chunk: int

    @property
    def padded(self) -> int:
        """Tokens after padding to whole blocks."""
        return self.blocks * self.chunks * self.chunk


def layout(time: int, chunk_size: int, block_tokens: int = BLOCK_TOKENS) -> Layout:
    """The cut with chunks of `chunk_size` tokens, shortened to the next power of two >= T."""
    chunk = min(chunk_size, max(1, 1 << (time - 1).bit_length()))
    total = -(-time // chunk)
    blocks = -(-total // max(1, block_tokens // chunk))
    return Layout(time, blocks, -(-total // blocks), chunk)


def to_blocks(x: jax.Array, cut: Layout, *, fill_last: bool = False) -> jax.Array:
    """[B, T, ...] -> [blocks, B, chunks, C, ...], padded with zeros (or the last token's value)."""
    pad = cut.padded - cut.time
    if pad:
        x = jnp.pad(
            x,
            [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2),
            mode="edge" if fill_last else "constant",
        )
    x = x.reshape(x.shape[0], cut.blocks, cut.chunks, cut.chunk, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)


def from_blocks(x: jax.Array, cut: Layout) -> jax.Array:
    """[blocks, B, chunks, C, ...] -> [B, T, ...]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], cut.padded, *x.shape[4:])[:, : cut.time]


def heads_first(x: jax.Array) -> jax.Array:
    """One block's [B, chunks, C, H, ...] -> [B, chunks, H, C, ...].

    Tokens of a chunk next to the widths: contractions over a chunk are then plain batched matrix
    products. Blocks are transposed one by one, so that no array needs a whole second copy.
    """
    return jnp.moveaxis(x, 3, 2)


def split_heads(x: jax.Array, *counts: int) -> jax.Array:
    """One block's [B, chunks, C, H, ...] -> [B, chunks, *counts, C, ...]."""
    x = heads_first(x)
    return x.reshape(*x.shape[:2], *counts, *x.shape[3:])


def joined_heads(x: jax.Array, like: jax.Array) -> jax.Array:
    """Inverse of `split_heads`, in the shape and dtype of `like` [B, chunks, C, H, ...]."""
    batch, chunks, tokens, heads, *rest = like.shape
    return heads_first(x.reshape(batch, chunks, heads, tokens, *rest)).astype(like.dtype)


def joined_outputs(x: jax.Array, dtype) -> jax.Array:
    """Outputs [B, chunks, heads.., C, V] of one block -> [B, chunks, C, H, V] in `dtype`."""
    return heads_first(x.reshape(*x.shape[:2], -1, *x.shape[-2:])).astype(dtype)


class Decay(NamedTuple):
    """Every decay a chunk needs, each in [0, 1]; 0 where a document boundary stands between.

    Attributes:
      intra: [B, n, h, r, C, C]; (i, j) = decay from the write of token j to the read of token i,
        0 above the diagonal.
      entry: [B, n, h, r, C]; from the chunk's entry to the read of token i.
      exit: [B, n, h, r, C]; from the write of token j to the chunk's end.
      through: [B, n, h, r]; across the whole chunk.
    """

    intra: jax.Array
    entry: jax.Array
    exit: jax.Array
    through: jax.Array


def decays(
    log_decay: jax.Array,
    run: jax.Array | None,
    entry_run: jax.Array | None,
) -> Decay:
    """The decays of the chunks of one block.

    Args:
      log_decay: [B, n, h, r, C], non-positive and finite.
      run: [B, n, C] int32 document number, or None when the row is one document.
      entry_run: [B, n] int32, the document that the entering state belongs to.
    """
    chunk = log_decay.shape[-1]
    ranges = range_sums(log_decay)
    entry = jnp.exp(ranges[..., :, 0] + log_decay[..., :1])
    leave = jnp.exp(ranges[..., -1, :])
    through = entry[..., -1]
    visible = jnp.tril(jnp.ones((chunk, chunk), bool))
    if run is not None:
        visible = visible & (run[:, :, :, None] == run[:, :, None, :])[:, :, None, None]
        entered = (run == entry_run[:, :, None])[:, :, None, None]
        entry = jnp.where(entered, entry, 0)
        leave = jnp.where((run == run[:, :, -1:])[:, :, None, None], leave, 0)
        through = jnp.where(entered[..., -1], through, 0)
    intra = jnp.where(visible, jnp.exp(jnp.where(visible, ranges, 0)), 0)
    return Decay(intra, entry, leave, through)


def entry_runs(run: jax.Array) -> jax.Array:
    """[blocks, B, n, C] -> [blocks, B, n]: the document in progress where each chunk begins."""
    blocks, batch, chunks, _ = run.shape
    ends = jnp.moveaxis(run[..., -1], 1, 0).reshape(batch, blocks * chunks)
    entry = jnp.pad(ends[:, :-1], ((0, 0), (1, 0)))
    return jnp.moveaxis(entry.reshape(batch, blocks, chunks), 0, 1)


def grouped(heads: Heads, q: jax.Array, k: jax.Array, v: jax.Array, *gates: jax.Array):
    """Splits the head axes of one block.

    Returns:
      q [B, n, h, x, C, K], k [B, n, h, C, K], v [B, n, h, r, C, V] and each gate [B, n, h, r, C].
    """
    return (
        split_heads(q, heads.keys, heads.queries),
        heads_first(k),
        split_heads(v, heads.keys, heads.values),
        *(split_heads(g, heads.keys, heads.values) for g in gates),
    )


def _spans(through: jax.Array) -> jax.Array:
    """Decays from what chunks write, and what precedes the block, to where chunks begin.

    Args:
      through: [B, n, h, r] or [B, n, h, r, K], across each chunk.

    Returns:
      [B, h, r, (K,) i, m] for i, m in 0..n: the product over chunks m <= c < i, 0 where m > i.
      Index m = 0 is the block's first state, m + 1 the write of chunk m, i = n the block's end.
    """
    steps = jnp.moveaxis(through, 1, -1)
    steps = jnp.pad(steps, [(0, 0)] * (steps.ndim - 1) + [(1, 0)])
    count = steps.shape[-1]
    later = jnp.triu(jnp.ones((count, count), bool), 1)
    products = jnp.cumprod(jnp.where(later, steps[..., None, :], 1), axis=-1)
    return jnp.tril(jnp.swapaxes(products, -1, -2))


def carry_states(
    through: jax.Array, local: jax.Array, first: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """States of S_{n+1} = through_n S_n + local_n over the chunks of a block, all at once.

    Products of decays and one contraction instead of a loop over chunks, which costs accelerators
    a launch a step.

    Args:
      through: [B, n, h, r], or [B, n, h, r, K] for a decay per key channel.
      local: [B, n, h, r, K, V].
      first: [B, h, r, K, V].

    Returns:
      The state after the block [B, h, r, K, V], and those entering each chunk [B, n, h, r, K, V].
    """
    spec = "bhrim,bmhrkv->bihrkv" if through.ndim == 4 else "bhrkim,bmhrkv->bihrkv"
    states = contract(spec, _spans(through), jnp.concatenate([first[:, None], local], axis=1))
    return states[:, -1], states[:, :-1]


def carry_gradients(
    through: jax.Array, reads: jax.Array, last: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of the states of `carry_states`.

    Args:
      through: as there.
      reads: [B, n, h, r, K, V], gradient that each entering state gets inside its chunk.
      last: [B, h, r, K, V], gradient of the state after the block.

    Returns:
      The gradient of `first`, and that of the state leaving each chunk [B, n, h, r, K, V].
    """
    spec = "bhrim,bihrkv->bmhrkv" if through.ndim == 4 else "bhrkim,bihrkv->bmhrkv"
    sources = contract(spec, _spans(through), jnp.concatenate([reads, last[:, None]], axis=1))
    return sources[:, 0], sources[:, 1:]


def scan_chunks(
    step: Callable[[Any, Any], tuple[Any, Any]], state: Any, xs: Any, *, reverse: bool = False
) -> tuple[Any, Any]:
    """`lax.scan` over the chunk axis (the second) of one block's arrays."""
    final, ys = lax.scan(
        step, state, jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), xs), reverse=reverse
    )
    return final, jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1), ys)
