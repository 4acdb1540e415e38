# SPDX-License-Identifier: Apache-2.0
"""Causal attention of each token over a few tokens before it, and how partial softmaxes merge.

Each part of a softmax is an output of its own and the logarithm of its sum of exponentials; parts
over disjoint keys merge by them. A token that sees nothing has output 0 and logarithm `EMPTY`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from seqmix.mixers._numerics import contract, operand_dtype, state_dtype, varying_like

EMPTY = -1e30
TILE = 128


def softmax_part(logits: jax.Array, visible: jax.Array | None, v: jax.Array, low):
    """[..., R, S] logits, [..., S, V] values -> output [..., R, V] and logarithm [..., R]."""
    if visible is not None:
        logits = jnp.where(visible, logits, EMPTY)
    top = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - top)
    if visible is not None:
        weights = jnp.where(visible, weights, 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = contract("...rs,...sv->...rv", weights, v, dtype=low)
    if visible is None:
        return out / total, (top + jnp.log(total))[..., 0]
    some = total > 0
    total = jnp.where(some, total, 1)
    return out / total, jnp.where(some, top + jnp.log(total), EMPTY)[..., 0]


def merge(*parts: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The softmax over the keys of all parts; each is ([..., V], [...])."""
    top = functools.reduce(jnp.maximum, (log for _, log in parts))
    top = lax.stop_gradient(top)
    weights = [jnp.exp(log - top) for _, log in parts]
    total = sum(weights)
    out = sum(o * w[..., None] for (o, _), w in zip(parts, weights, strict=True))
    return out / total[..., None], top + jnp.log(total)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def banded(q, k, v, reach, width: int, scale: float):
    """The part of each token's softmax over itself and the `reach` tokens before it.

    Args:
      q: [B, H, T, G, K] queries by place.
      k: [B, H, S + T, K]; query i stands at place S + i.
      v: [B, H, S + T, V].
      reach: [B, T] int32 < width, how many tokens before it a token sees; -1: not even itself.
      width: most keys a token sees.
      scale: of the logits.

    Returns:
      out [B, H, T, G, V] and logarithm [B, H, T, G], float32 or wider.
    """
    return _banded_forward(q, k, v, reach, width, scale)[0]


def _tiles(q, k, reach, width):
    """Queries per tile, their number, and zeros in front of and behind the keys."""
    time = q.shape[2]
    tile = min(TILE, time)
    count = -(-time // tile)
    front = max(0, width - 1 - (k.shape[2] - time))
    return tile, count, front, count * tile - time


def _split(x, tile, count, axis):
    """[..., T, ...] -> [count, ..., tile, ...], padded."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, count * tile - x.shape[axis])
    fill = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
    x = jnp.pad(x, pad, constant_values=fill)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, tile, *x.shape[axis + 1 :]), axis, 0)


def _unsplit(x, time, axis):
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return lax.slice_in_dim(x, 0, time, axis=axis)


def _visible(reach, tile, span):
    """[B, 1, tile, 1, span] of a tile's queries and the keys around them."""
    lag = jnp.arange(tile)[:, None] + (span - tile) - jnp.arange(span)
    return ((lag >= 0) & (lag <= reach[..., None]))[:, None, :, None]


def _logits(q, k, scale, low):
    flat = q.reshape(*q.shape[:2], -1, q.shape[-1])
    logits = contract("bhrk,bhsk->bhrs", flat, k, dtype=low) * scale
    return logits.reshape(*q.shape[:-1], k.shape[2])


def _banded_forward(q, k, v, reach, width, scale):
    low = operand_dtype(q, k, v)
    time, groups = q.shape[2:4]
    tile, count, front, back = _tiles(q, k, reach, width)
    span = tile + width - 1
    first = k.shape[2] - time - (width - 1) + front
    pad = [(0, 0), (0, 0), (front, back), (0, 0)]
    keys, values = jnp.pad(k, pad), jnp.pad(v, pad)

    def step(xs):
        i, q, reach = xs
        at = first + i * tile
        k = lax.dynamic_slice_in_dim(keys, at, span, axis=2)
        v = lax.dynamic_slice_in_dim(values, at, span, axis=2)
        logits = _logits(q, k, scale, low)
        visible = jnp.broadcast_to(_visible(reach, tile, span), logits.shape)
        rows = (*q.shape[:2], tile * groups, span)
        out, log = softmax_part(logits.reshape(rows), visible.reshape(rows), v, low)
        return out.reshape(*q.shape[:-1], -1), log.reshape(q.shape[:-1])

    xs = (jnp.arange(count), _split(q, tile, count, 2), _split(reach, tile, count, 1))
    out, log = lax.map(step, xs)
    out, log = _unsplit(out, time, 2), _unsplit(log, time, 2)
    return (out, log), (q, k, v, reach, out, log)


def _banded_backward(width, scale, residuals, cotangents):
    q, k, v, reach, out, log = residuals
    d_out, d_log = cotangents
    low = operand_dtype(q, k, v)
    time, groups = q.shape[2:4]
    tile, count, front, back = _tiles(q, k, reach, width)
    span = tile + width - 1
    first = k.shape[2] - time - (width - 1) + front
    pad = [(0, 0), (0, 0), (front, back), (0, 0)]
    keys, values = jnp.pad(k, pad), jnp.pad(v, pad)
    wide = state_dtype(q, k, v)
    through = d_log - jnp.sum(d_out * out, axis=-1)

    def step(carry, xs):
        d_keys, d_values = carry
        i, q, reach, d_out, log, through = xs
        at = first + i * tile
        k = lax.dynamic_slice_in_dim(keys, at, span, axis=2)
        v = lax.dynamic_slice_in_dim(values, at, span, axis=2)
        visible = _visible(reach, tile, span)
        logits = _logits(q, k, scale, low)
        weights = jnp.where(visible, jnp.exp(jnp.where(visible, logits - log[..., None], 0)), 0)
        rows = (*q.shape[:2], tile * groups)
        d_out = d_out.reshape(*rows, -1)
        d_weights = contract("bhrv,bhsv->bhrs", d_out, v, dtype=low)
        weights = weights.reshape(*rows, span)
        d_logits = weights * (d_weights + through.reshape(*rows, 1)) * scale
        d_q = contract("bhrs,bhsk->bhrk", d_logits, k, dtype=low).reshape(q.shape)
        d_k = contract("bhrs,bhrk->bhsk", d_logits, q.reshape(*rows, -1), dtype=low)
        d_v = contract("bhrs,bhrv->bhsv", weights, d_out, dtype=low)
        return (_add(d_keys, d_k, at), _add(d_values, d_v, at)), d_q

    parts = (q, reach, d_out, log, through)
    axes = (2, 1, 2, 2, 2)
    xs = tuple(_split(x, tile, count, axis) for x, axis in zip(parts, axes, strict=True))
    carry = tuple(varying_like(jnp.zeros(x.shape, wide), q, k, v, d_out) for x in (keys, values))
    (d_keys, d_values), d_q = lax.scan(step, carry, (jnp.arange(count), *xs))
    d_k, d_v = (
        lax.slice_in_dim(d, front, front + k.shape[2], axis=2).astype(x.dtype)
        for d, x in ((d_keys, k), (d_values, v))
    )
    return _unsplit(d_q, time, 2).astype(q.dtype), d_k, d_v, None


def _add(total, part, at):
    old = lax.dynamic_slice_in_dim(total, at, part.shape[2], axis=2)
    return lax.dynamic_update_slice_in_dim(total, old + part, at, axis=2)


banded.defvjp(_banded_forward, _banded_backward)
