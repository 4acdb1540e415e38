# SPDX-License-Identifier: Apache-2.0
"""Chunked cross-entropy with z-loss: the logits of the whole batch never exist at once.

For a token with hidden vector h [D], head kernel W [D, V], label y and weight w:

    logits = scaling(h W)           float32; the head's factor and soft cap, if it has them
    lse    = logsumexp(logits)
    nll    = lse - logits[y]        cross-entropy, nats
    z      = lse^2                  z-loss (PaLM, arXiv:2204.02311, section 5), keeps lse near 0

    d(w nll + c w z) / d logits = w (softmax(logits) (1 + 2 c lse) - onehot(y))

The forward pass scans over chunks of time and keeps only `lse` [B, T]; the backward pass recomputes
the logits of a chunk. The largest array with a vocabulary axis is [B, chunk, V].
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from seqmix.models.logits import UNSCALED, LogitScaling


class LossSums(NamedTuple):
    """Sums over the counted tokens, all float32 scalars (weights of 0 and 1 give counts)."""

    loss: jax.Array  # sum of weight * nll, nats
    z_loss: jax.Array  # sum of weight * lse^2, without the coefficient
    tokens: jax.Array  # sum of weights
    correct: jax.Array  # sum of weight * (label has the largest logit)


def chunked_cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    z_loss: float = 0.0,
    chunk_tokens: int = 4096,
    scaling: LogitScaling = UNSCALED,
) -> tuple[jax.Array, LossSums]:
    """Summed cross-entropy of next-token labels, without the [B, T, V] logits.

    Args:
      hidden: [B, T, D] final-normed hidden states, float32 or bfloat16 (the matmuls run in this
        dtype and accumulate in float32).
      kernel: [D, V] head kernel, any float dtype; its gradient is accumulated in float32.
      labels: [B, T] int, in [0, V) where the weight is not 0; anything where it is.
      weights: [B, T] float or bool, 0 for ignored labels.
      z_loss: coefficient of the z-loss in the returned objective.
      chunk_tokens: tokens whose logits may exist at once; time is cut into pieces of about
        chunk_tokens / B steps (at least one step).
      scaling: makes logits of the products hidden @ kernel.

    Returns:
      (objective, sums): objective = sum(w * nll) + z_loss * sum(w * lse^2), float32, differentiable
      with respect to `hidden` and `kernel`; `sums` carry no gradient. With every weight 0,
      objective and gradients are exactly 0.

    Raises:
      ValueError: shapes that do not fit together, non-integer labels, or chunk_tokens < 1.
    """
    _check(hidden, kernel, labels, weights, chunk_tokens)
    batch, time = labels.shape
    steps = max(1, chunk_tokens // batch)
    chunks = -(-time // steps)
    steps = -(-time // chunks)  # even chunks: the least padding for this number of chunks
    weights = weights.astype(jnp.float32)
    labels = jnp.where(weights != 0, labels, 0).astype(jnp.int32)
    pad = chunks * steps - time
    if pad:
        hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0)))
        labels = jnp.pad(labels, ((0, 0), (0, pad)))
        weights = jnp.pad(weights, ((0, 0), (0, pad)))
    loss, sums = _chunked(hidden, kernel, labels, weights, float(z_loss), steps, scaling)
    return loss, jax.tree.map(jax.lax.stop_gradient, sums)


def _check(hidden, kernel, labels, weights, chunk_tokens):
    if hidden.ndim != 3:
        raise ValueError(f"hidden: expected [B, T, D], got shape {hidden.shape}")
    if kernel.ndim != 2 or kernel.shape[0] != hidden.shape[2]:
        raise ValueError(f"kernel: expected [D={hidden.shape[2]}, V], got shape {kernel.shape}")
    for name, array in (("labels", labels), ("weights", weights)):
        if array.shape != hidden.shape[:2]:
            raise ValueError(f"{name}: expected [B, T] = {hidden.shape[:2]}, got {array.shape}")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels: expected an integer dtype, got {labels.dtype}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: expected >= 1, got {chunk_tokens}")


def _split(array: jax.Array, steps: int) -> jax.Array:
    """[B, chunks * steps, ...] -> [chunks, B, steps, ...]: the batch axis may be sharded."""
    batch, time, *rest = array.shape
    return jnp.moveaxis(array.reshape(batch, time // steps, steps, *rest), 1, 0)


def _join(array: jax.Array) -> jax.Array:
    """Inverse of `_split`."""
    array = jnp.moveaxis(array, 0, 1)
    return array.reshape(array.shape[0], -1, *array.shape[3:])


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Einsum in the operands' dtype, accumulated and returned in float32."""

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)

    if a.dtype == b.dtype == jnp.float32:
        return product(a, b)
    # XLA's CPU backend refuses some products of bfloat16 into float32; widened operands give the
    # same numbers.
    return jax.lax.platform_dependent(
        a,
        b,
        cpu=lambda a, b: product(a.astype(jnp.float32), b.astype(jnp.float32)),
        default=product,
    )


def _logits(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
    return _product("btd,dv->btv", hidden, kernel)


def _forward(hidden, kernel, labels, weights, z_loss, steps, scaling):
    head = kernel.astype(hidden.dtype)

    def body(sums, chunk):
        h, y, w = chunk
        logits = scaling(_logits(h, head))
        top = jnp.max(logits, axis=-1)
        lse = top + jnp.log(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1))
        label_logit = jnp.take_along_axis(logits, y[..., None], axis=-1)[..., 0]
        # Selecting before the products keeps an overflow at an ignored label out of the sums.
        counted = w != 0
        nll = jnp.where(counted, lse - label_logit, 0.0)
        square = jnp.where(counted, lse * lse, 0.0)
        chunk_sums = LossSums(
            loss=jnp.sum(w * nll),
            z_loss=jnp.sum(w * square),
            tokens=jnp.sum(w),
            correct=jnp.sum(w * (label_logit >= top)),
        )
        return jax.tree.map(jnp.add, sums, chunk_sums), lse

    zero = jnp.zeros((), jnp.float32)
    chunks = (_split(hidden, steps), _split(labels, steps), _split(weights, steps))
    sums, lse = jax.lax.scan(body, LossSums(zero, zero, zero, zero), chunks)
    objective = sums.loss + z_loss * sums.z_loss if z_loss else sums.loss
    return objective, sums, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _chunked(hidden, kernel, labels, weights, z_loss, steps, scaling):
    objective, sums, _ = _forward(hidden, kernel, labels, weights, z_loss, steps, scaling)
    return objective, sums


def _chunked_fwd(hidden, kernel, labels, weights, z_loss, steps, scaling):
    objective, sums, lse = _forward(hidden, kernel, labels, weights, z_loss, steps, scaling)
    return (objective, sums), (hidden, kernel, labels, weights, lse)


def _chunked_bwd(z_loss, steps, scaling, residuals, cotangents):
    hidden, kernel, labels, weights, lse = residuals
    scale = cotangents[0]
    head = kernel.astype(hidden.dtype)

    def body(d_kernel, chunk):
        h, y, w, s = chunk
        logits = scaling(_logits(h, head))
        p = jnp.exp(logits - s[..., None])
        onehot = jax.nn.one_hot(y, p.shape[-1], dtype=jnp.float32)
        g = p * (1.0 + 2.0 * z_loss * s[..., None]) if z_loss else p
        counted = (w != 0)[..., None]
        g = scaling.backward(logits, (g - onehot) * (w * scale)[..., None])
        g = jnp.where(counted, g, 0.0).astype(h.dtype)
        d_h = _product("btv,dv->btd", g, head)
        d_kernel += _product("btd,btv->dv", h, g)
        return d_kernel, d_h.astype(h.dtype)

    chunks = (_split(hidden, steps), _split(labels, steps), _split(weights, steps), lse)
    d_kernel, d_hidden = jax.lax.scan(body, jnp.zeros(kernel.shape, jnp.float32), chunks)
    return _join(d_hidden), d_kernel.astype(kernel.dtype), None, None


_chunked.defvjp(_chunked_fwd, _chunked_bwd)
