# SPDX-License-Identifier: Apache-2.0
"""Causal depthwise convolution of a few taps over packed rows, with state."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers._numerics import state_dtype, varying_like
from seqmix.mixers._segments import mask_padding, runs
from seqmix.typing import Channels, SegmentIds


def short_convolution(
    x: Channels,
    weight: Float[Array, "W D"],
    bias: Float[Array, " D"] | None = None,
    *,
    initial_state: Float[Array, "B W-1 D"] | None = None,
    segment_ids: SegmentIds | None = None,
) -> tuple[Channels, Float[Array, "B W-1 D"]]:
    """y_t = bias + sum_l weight[W-1-l] x_{t-l}, over the W last tokens of t's own document.

    A correlation: `weight[W-1]` multiplies the current token, as `torch.nn.Conv1d` with left
    padding W-1 does in the reference layers.

    Args:
      x: [B, T, D] float.
      weight: [W, D] float.
      bias: [D] float, None for none.
      initial_state: [B, W-1, D], the tokens before each row's first document's next one, oldest
        first; None for zeros.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document. Padding
        may stand anywhere and is skipped over.

    Returns:
      y: [B, T, D] in the dtype of x; 0 at padding.
      state: [B, W-1, D] in the dtype of x, the last tokens of each row's last document.

    Raises:
      ValueError: for shapes or dtypes off the above.
    """
    name = "short_convolution"
    check.rank(name, "x", x, "B T D")
    check.rank(name, "weight", weight, "W D")
    batch, time, width = x.shape
    taps = weight.shape[0]
    if time == 0 or taps == 0:
        raise ValueError(
            f"{name}: T and W must be >= 1, got x {list(x.shape)}, weight {list(weight.shape)}"
        )
    check.shape(name, "weight", weight, (taps, width), "W D")
    if bias is not None:
        check.shape(name, "bias", bias, (width,), "D")
    check.state(name, initial_state, (batch, taps - 1, width), "B W-1 D")
    check.segments(name, segment_ids, batch, time)
    fresh = initial_state is None
    if fresh:
        initial_state = varying_like(jnp.zeros((batch, taps - 1, width), x.dtype), x)
    state = initial_state.astype(x.dtype)
    if segment_ids is None:
        y = _shifted_sum(x, weight, state, None)
        new_state = jnp.concatenate([state, x], axis=1)[:, time:]
    else:
        x = mask_padding(segment_ids, x)[0]
        y = _packed(x, weight, state, segment_ids, fresh)
        new_state = _last_tokens(x, state, segment_ids)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return mask_padding(segment_ids, y.astype(x.dtype))[0], new_state


def _shifted_sum(x, weight, state, run):
    """Sum over taps of shifted inputs, in float32; `run` [B, T] keeps documents apart."""
    taps, time = weight.shape[0], x.shape[1]
    dtype = state_dtype(x, weight)
    extended = jnp.concatenate([state, x], axis=1)
    total = 0
    for tap in range(taps):
        lag = taps - 1 - tap
        term = extended[:, tap : tap + time].astype(dtype)
        if run is not None and lag:
            before = jnp.pad(run, ((0, 0), (lag, 0)))[:, :time]
            term = jnp.where((before == run)[..., None], term, 0)
        total = total + term * weight[tap].astype(dtype)
    return total


@jax.custom_vjp
def _permuted(x, order, inverse):
    """x [B, T, D] with its tokens in another order [B, T]; the gradient is the inverse gather."""
    del inverse
    return jnp.take_along_axis(x, order[..., None], axis=1)


def _permuted_forward(x, order, inverse):
    return _permuted(x, order, inverse), (order, inverse)


def _permuted_backward(residuals, g):
    order, inverse = residuals
    return _permuted(g, inverse, order), None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)


# Recomputed in the backward: the branches of the cond below would otherwise both store residuals.
@functools.partial(jax.checkpoint, static_argnums=(4,))
def _packed(x, weight, state, segment_ids, fresh):
    """Convolution of packed rows; rows with padding between real tokens are compacted first."""
    real = segment_ids != 0

    def contiguous(x, weight, state):
        return _shifted_sum(x, weight, state, runs(segment_ids))

    def scattered(x, weight, state):
        # Real tokens first, in order, then padding. By sums: a sort is slow to compile for a TPU.
        count = jnp.sum(real, axis=1, keepdims=True)
        place = jnp.where(real, jnp.cumsum(real, axis=1), count + jnp.cumsum(~real, axis=1)) - 1
        rows = jnp.arange(real.shape[0])[:, None]
        order = jnp.zeros_like(place).at[rows, place].set(jnp.arange(real.shape[1])[None])
        ids = jnp.take_along_axis(segment_ids, order, axis=1)
        y = _shifted_sum(_permuted(x, order, place), weight, state, runs(ids))
        return _permuted(y, place, order)

    resumes = real[:, 1:] & ~real[:, :-1]
    if fresh:
        # Padding before the first token reads as the zeros that a fresh state holds.
        seen = jnp.cumsum(real[:, :-1], axis=1) > 0
        resumes = resumes & seen
    return lax.cond(jnp.any(resumes), scattered, contiguous, x, weight, state)


def _last_tokens(x, state, segment_ids):
    """The last W-1 tokens of each row's last document, from the state where it is still run 0."""
    keep = state.shape[1]
    if keep == 0:
        return state
    time = x.shape[1]
    run = runs(segment_ids)
    count = min(keep, time)
    real_index = jnp.where(segment_ids != 0, jnp.arange(time, dtype=jnp.int32), -1)
    newest = lax.top_k(real_index, count)[0][:, ::-1]
    newest = jnp.pad(newest, ((0, 0), (keep - count, 0)), constant_values=-1)
    safe = jnp.maximum(newest, 0)
    same = (newest >= 0) & (jnp.take_along_axis(run, safe, axis=1) == run[:, -1:])
    tokens = jnp.take_along_axis(x, safe[..., None], axis=1)
    # Slots not filled by this row hold the end of the old state, shifted by the tokens that came.
    came = jnp.sum(same, axis=1, keepdims=True, dtype=jnp.int32)
    slot = jnp.arange(keep, dtype=jnp.int32)[None] + came
    old = jnp.take_along_axis(state, jnp.minimum(slot, keep - 1)[..., None], axis=1)
    old = jnp.where((run[:, -1:] == 0)[..., None], old, 0)
    return jnp.where(same[..., None], tokens, old)
