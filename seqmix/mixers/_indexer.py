# SPDX-License-Identifier: Apache-2.0
"""The lightning indexer of sparse attention: scores, selection and what it learns from."""

import jax
import jax.numpy as jnp
from jax import lax

from seqmix.mixers import _checks as check
from seqmix.mixers._numerics import contract, operand_dtype, state_dtype


def check_arguments(
    mixer: str, q: jax.Array, index_q: jax.Array, index_k: jax.Array, weights: jax.Array
) -> None:
    """Raises ValueError unless the indexer's arrays fit q [B, T, Hq, K] and one another."""
    check.rank(mixer, "index_q", index_q, "B T J C")
    heads, width = index_q.shape[2:]
    rows = q.shape[:2]
    check.shape(mixer, "index_q", index_q, (*rows, heads, width), "B T J C")
    check.shape(mixer, "index_k", index_k, (*rows, width), "B T C")
    check.shape(mixer, "index_weights", weights, (*rows, heads), "B T J")
    check.float32(mixer, "index_weights", weights)


def scores(index_q: jax.Array, index_k: jax.Array, weights: jax.Array) -> jax.Array:
    """[B, Q, N] float32 sums over heads of weights * relu(index_q . index_k).

    Args:
      index_q: [B, Q, J, C].
      index_k: [B, N, C], or each query's own [B, Q, N, C].
      weights: [B, Q, J].
    """
    own = "q" if index_k.ndim == 4 else ""
    low = operand_dtype(index_q, index_k)
    products = contract(f"bqjc,b{own}nc->bqjn", index_q, index_k, dtype=low)
    return contract("bqjn,bqj->bqn", jax.nn.relu(products), weights.astype(products.dtype))


def _orderable(scores: jax.Array, visible: jax.Array) -> jax.Array:
    # The rectifier makes many scores 0: those are equal, whatever their sign.
    return lax.stop_gradient(jnp.where(visible, jnp.where(scores == 0, 0, scores), -jnp.inf))


def select(scores: jax.Array, visible: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """[B, Q, count] indices of the best visible keys, the earlier of equals; which are visible."""
    _, index = lax.top_k(_orderable(scores, visible), count)
    return index, jnp.take_along_axis(visible, index, axis=-1)


def ranked_first(scores: jax.Array, visible: jax.Array, count: int) -> jax.Array:
    """[B, Q, N] whether a key is one of the `count` best: `select` by sorting, as a mask."""
    order = jnp.argsort(-_orderable(scores, visible), axis=-1, stable=True)
    return jnp.argsort(order, axis=-1, stable=True) < count


def masked_softmax(logits: jax.Array, visible: jax.Array) -> jax.Array:
    """Softmax over the visible entries of the last axis; 0 where there is none."""
    top = jnp.max(jnp.where(visible, logits, -jnp.inf), axis=-1, keepdims=True)
    top = lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, logits - top, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1)


def divergence(weights: jax.Array, scores: jax.Array, visible: jax.Array) -> jax.Array:
    """[B, Q] KL(p || softmax(scores)), p the mean of the heads' weights: a constant.

    Args:
      weights: [B, Q, G, R, N] attention weights of the heads, 0 where not visible.
      scores: [B, Q, N].
      visible: [B, Q, N] bool.
    """
    p = lax.stop_gradient(jnp.mean(weights, axis=(2, 3))).astype(state_dtype(scores))
    top = jnp.max(jnp.where(visible, scores, -jnp.inf), axis=-1, keepdims=True)
    top = lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    shifted = jnp.where(visible, scores - top, 0)
    total = jnp.sum(jnp.where(visible, jnp.exp(shifted), 0), axis=-1, keepdims=True)
    log_q = shifted - jnp.log(jnp.where(total > 0, total, 1))
    held = visible & (p > 0)
    return jnp.sum(jnp.where(held, p * (jnp.log(jnp.where(held, p, 1)) - log_q), 0), axis=-1)
