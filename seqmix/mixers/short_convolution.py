# SPDX-License-Identifier: Apache-2.0
"""Causal depthwise convolution of a few taps over packed rows, with state."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers import _pallas
from seqmix.mixers._dispatch import kernel_refusal
from seqmix.mixers._numerics import state_dtype, varying_like
from seqmix.mixers._segments import mask_padding, runs
from seqmix.typing import Channels, SegmentIds
from seqmix_kernels import family, target


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


def fused_short_convolution(
    x: Channels,
    weight: Float[Array, "W D"],
    bias: Float[Array, " D"] | None = None,
    *,
    activation: bool = True,
    head_width: int | None = None,
    epsilon: float = 1e-6,
    initial_state: Float[Array, "B W-1 D"] | None = None,
    segment_ids: SegmentIds | None = None,
) -> tuple[Channels, Float[Array, "B W-1 D"]]:
    """`short_convolution`, SiLU and L2 norm of heads as one GPU kernel, float32 inside.

    Args:
      x, weight, bias, initial_state, segment_ids: as in `short_convolution`.
      activation: whether SiLU follows.
      head_width: channels of a head, divided by sqrt(sum of squares + epsilon); None: no norm.
      epsilon: see there.

    Returns:
      y [B, T, D] in the dtype of x, 0 at padding, and the state of `short_convolution`.

    Raises:
      ValueError: where there is no such kernel, or it cannot take the call.
    """
    name = "fused_short_convolution"
    module = family("convolution")
    if module is None:
        raise ValueError(f"{name}: there is no kernel for backend '{target().platform}'")
    options = module.Options(activation, head_width, epsilon)
    reason = kernel_refusal("convolution", "pallas", x.shape[0], options, x, weight)
    if reason:
        raise ValueError(f"{name}: the kernel cannot run: {reason}")

    def plain(x, weight, bias, state):
        return short_convolution(x, weight, bias, initial_state=state, segment_ids=segment_ids)

    @jax.checkpoint  # else both branches of the cond below would store what XLA's needs
    def composed(x, weight, bias, state):
        y = plain(*(a.astype(state_dtype(x)) for a in (x, weight, bias, state)))[0]
        y = jax.nn.silu(y) if activation else y
        if head_width:
            heads = y.reshape(*y.shape[:2], -1, head_width)
            squares = jnp.sum(jnp.square(heads), axis=-1, keepdims=True)
            y = (heads * lax.rsqrt(squares + epsilon)).reshape(y.shape)
        return mask_padding(segment_ids, y.astype(x.dtype))[0]

    def fused(x, weight, bias, state):
        shared = (jnp.concatenate([weight, bias[None]]).astype(jnp.float32),)
        marks = None if segment_ids is None else _marks(segment_ids, weight.shape[0])
        return _pallas.run("convolution", options, (x,), state, marks, shared)[0]

    batch, _, width = x.shape
    fresh = initial_state is None
    if fresh:
        zeros = jnp.zeros((batch, weight.shape[0] - 1, width), x.dtype)
        initial_state = varying_like(zeros, x)
    state = initial_state.astype(x.dtype)
    bias = jnp.zeros((width,), weight.dtype) if bias is None else bias
    final = plain(x, weight, bias, state)[1]
    if segment_ids is None:
        return fused(x, weight, bias, state), final
    scattered = jnp.any(_resumes(segment_ids, fresh))
    return lax.cond(scattered, composed, fused, x, weight, bias, state), final


def _marks(segment_ids, taps):
    """[B, T] int32: bit l says that the token is real and the one l before it is of its run."""
    run, time = runs(segment_ids), segment_ids.shape[1]
    marks = jnp.zeros_like(run)
    for lag in range(taps):
        before = jnp.pad(run, ((0, 0), (lag, 0)))[:, :time]
        marks += ((before == run) & (segment_ids != 0)).astype(jnp.int32) << lag
    return marks


def _resumes(segment_ids, fresh):
    """[B, T - 1]: whether a real token follows padding that follows a real token or a state."""
    real = segment_ids != 0
    resumes = real[:, 1:] & ~real[:, :-1]
    if fresh:
        # Padding before the first token reads as the zeros that a fresh state holds.
        seen = jnp.cumsum(real[:, :-1], axis=1) > 0
        resumes = resumes & seen
    return resumes


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

    return lax.cond(jnp.any(_resumes(segment_ids, fresh)), scattered, contiguous, x, weight, state)


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
