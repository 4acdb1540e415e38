# SPDX-License-Identifier: Apache-2.0
"""Log-decays as the GPU kernels read them.

Decays are powers of two here. What is at most 2**-256 is 0 in float32, as is any product with it,
so log-decays stop at -256, and the first token of a document gets -256: pairs, reads and writes
across the boundary are then multiplied by exactly 0, and the kernels need no other mask. Sums over
a chunk are plain float32 sums of at most 2**14, within 2**-10, less than a rounding of bfloat16.
"""

import math

import jax
import jax.numpy as jnp

from seqmix_kernels.gpu._common import CHUNK

LOG2E = math.log2(math.e)
_ZERO = -256.0


def pad_time(x: jax.Array, axis: int = 1) -> jax.Array:
    """Zeros after the last token, up to a whole number of chunks."""
    pad = -x.shape[axis] % CHUNK
    if not pad:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, pad)
    return jnp.pad(x, widths)


def to_chunks(x: jax.Array) -> jax.Array:
    """[B, T, H] -> [B, H, chunks, 64], padded with zeros."""
    x = jnp.swapaxes(pad_time(x), 1, 2)
    return x.reshape(*x.shape[:2], -1, CHUNK)


def from_chunks(x: jax.Array, time: int) -> jax.Array:
    """[B, H, chunks, 64] -> [B, T, H]."""
    x = x.reshape(*x.shape[:2], -1)[:, :, :time]
    return jnp.swapaxes(x, 1, 2)


def _log2(log_decay: jax.Array, run: jax.Array | None) -> jax.Array:
    log2 = jnp.maximum(log_decay * LOG2E, _ZERO)
    if run is None:
        return log2
    starts = jnp.diff(run, axis=1, prepend=0) > 0
    return jnp.where(starts[..., None], _ZERO, log2)


def of_log_decay(gradient: jax.Array, log_decay: jax.Array, run: jax.Array | None) -> jax.Array:
    """The gradient [B, T, H] where the decay depends on its logarithm, 0 where it is exactly 0."""
    return jnp.where(_log2(log_decay, run) > _ZERO, gradient, 0.0)


def chunk_log2(log_decay: jax.Array, run: jax.Array | None) -> jax.Array:
    """Log2-decays, 0 to -256, of every chunk: [B, T, H] -> [B, H, chunks, 64] float32."""
    return to_chunks(_log2(log_decay, run))


def suffix_sums(x: jax.Array) -> jax.Array:
    """[..., 64] -> [..., 64]: the sum over i >= t."""
    later = jnp.triu(jnp.ones((CHUNK, CHUNK), bool))
    return jnp.sum(jnp.where(later, x[..., None, :], 0), axis=-1)


def suffix_sums_of_documents(x: jax.Array, ends: jax.Array, run: jax.Array | None) -> jax.Array:
    """Sums over what is later in a chunk and of the same document.

    Args:
      x: [B, H, chunks, 64].
      ends: [B, H, chunks], added for the tokens of the document that the chunk ends in.
      run: [B, T] document numbers, or None for whole rows.
    """
    if run is None:
        return suffix_sums(x) + ends[..., None]
    run = jnp.pad(run, ((0, 0), (0, -run.shape[1] % CHUNK)), mode="edge")
    run = run.reshape(run.shape[0], 1, -1, CHUNK)
    later = jnp.triu(jnp.ones((CHUNK, CHUNK), bool)) & (run[..., None] == run[..., None, :])
    sums = jnp.sum(jnp.where(later, x[..., None, :], 0), axis=-1)
    return sums + jnp.where(run == run[..., -1:], ends[..., None], 0)


def prefix_sums_exclusive(x: jax.Array) -> jax.Array:
    """[..., 64] -> [..., 64]: the sum over j < t."""
    earlier = jnp.tril(jnp.ones((CHUNK, CHUNK), bool), -1)
    return jnp.sum(jnp.where(earlier, x[..., None, :], 0), axis=-1)
