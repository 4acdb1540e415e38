# SPDX-License-Identifier: Apache-2.0
"""RG-LRU, a linear recurrence with one real decay per channel and token, on a TPU.

For each channel, with a_t = exp(l_t) and the bounded root of the mixer::

    h_t = a_t h_{t-1} + sqrt(1 - a_t^2) x_t,   out = h

Tokens are on sublanes and channels on lanes. Eight tokens at a time are combined in registers in
three doubling steps, then joined with the state that enters them, which goes on to the next eight
and, in VMEM, to the next block of tokens. Decays are multiplied, never divided.

A document starts where l_t is so low that exp gives 0: the root is 1 there, and the input is
written whole. The caller puts such decays in, so that the kernel knows no documents.

The forward pass keeps the state that enters each block of tokens. The backward pass takes the
blocks from the last to the first and computes each block's states again. With g_t the gradient of
h_t and r_t the root, u_t = a_t g_t goes backwards as the state goes forwards::

    u_t = a_t (dout_t + u_{t+1}),   g_t = dout_t + u_{t+1}
    dx_t = r_t g_t,   dl_t = u_t h_{t-1} - a_t^2 g_t x_t / r_t

where 1 / (2 r_t) is at most 1000.

Costs for each token and channel, with b bytes an element of x: forward reads b + 4 bytes, writes
b, takes about 45 FLOPs (most of them the root and the three doubling steps) and 2 transcendentals;
backward reads 2 b + 4, writes b + 4, and takes about 100 FLOPs and 4 transcendentals. Nothing is
left for the matrix unit. In bfloat16 that is 6 FLOPs a byte.

De et al. 2024, arXiv 2402.19427, section 2.4 (the layer) and appendix A (a linear scan on a TPU).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from seqmix_kernels.tpu import _common as tpu

TOKENS = 256
"""Tokens of a block."""
_MOST_LANE_TILES = 4
# Two tiles of float32, one of bfloat16.
_GROUP = 16
_MOST_SLOPE = 1000.0


class _Layout(NamedTuple):
    """How a call is cut up.

    Attributes:
      rows: B.
      time: T.
      width: D.
      channels: D of a block.
      blocks: of channels, and of tokens.
      dtype: of x and out inside the kernels.
    """

    rows: int
    time: int
    width: int
    channels: int
    blocks: tuple[int, int]
    dtype: jnp.dtype


def _layout(x) -> _Layout:
    rows, time, width = x.shape
    tiles = tpu.ceil_div(width, tpu.LANES)
    most = min(_MOST_LANE_TILES, tiles)
    side = min(range(1, most + 1), key=lambda n: (tpu.ceil_div(tiles, n) * (n + 0.5), -n))
    blocks = tpu.ceil_div(tiles, side), tpu.ceil_div(time, TOKENS)
    dtype = jnp.dtype(jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32)
    return _Layout(rows, time, width, side * tpu.LANES, blocks, dtype)


def refusal(options: None, arrays: tuple[jax.Array, ...]) -> str | None:
    """Why these kernels cannot take a call, or None.

    Args:
      options: the family has none.
      arrays: x and the log-decays, [B, T, D].
    """
    if any(a.dtype == jnp.float64 for a in arrays):
        return "the TPU kernel has no float64"
    return None


def vmem_bytes(options: None, arrays: tuple[jax.Array, ...]) -> int:
    """Bytes of VMEM that the backward kernel, the larger one, holds; arguments as of `refusal`."""
    layout = _layout(arrays[0])
    # x, l, dout, dx, dl and three states of eight sublanes: each twice, for the next block's copy.
    moved = TOKENS * (3 * layout.dtype.itemsize + 8) + 3 * tpu.SUBLANES * 4
    return layout.channels * (2 * moved + 4 * (TOKENS + tpu.SUBLANES))


def forward(options, interpret, shared, x, log_decay, state, marks, *, keep):
    """The outputs.

    Args:
      options: the family has none.
      interpret: False, or an interpreter of `seqmix_kernels.target`.
      shared: ().
      x: [B, T, D] floating; 0 at padding, as is log_decay.
      log_decay: [B, T, D] float32, <= 0; -1e5 or less at a document's first token.
      state: [B, D] float32.
      marks: None.
      keep: whether `backward` will be called.

    Returns:
      out [B, T, D] in x's dtype, the final state [B, D], and the states that enter the blocks of
      tokens [B, blocks, 1, D], both float32; the last None unless `keep`.
    """
    layout = _layout(x)
    rows, _, width, channels, blocks, dtype = layout
    tokens, by_channel, by_block = _specs(layout, lambda t: t)
    out, final, *entering = tpu.kernel_call(
        functools.partial(_forward_block, layout),
        x.astype(dtype),
        log_decay,
        state[:, None],
        name="linear_scan",
        interpret=interpret,
        grid=(rows, *blocks),
        parallel=2,
        in_specs=[tokens, tokens, by_channel],
        out_specs=[tokens, by_channel, by_block][: 2 + keep],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, dtype),
            jax.ShapeDtypeStruct((rows, 1, width), jnp.float32),
            jax.ShapeDtypeStruct((rows, blocks[1], 1, width), jnp.float32),
        ][: 2 + keep],
        scratch=[tpu.vmem((1, channels))],
        cost=_cost(x, 45, 2, 2 * dtype.itemsize + 4),
    )
    return out.astype(x.dtype), final[:, 0], entering[0] if keep else None


def backward(options, interpret, shared, x, log_decay, state, marks, entering, d_out, d_final):
    """The gradients.

    Args:
      options, interpret, shared, x, log_decay, state, marks: as of `forward`.
      entering: [B, blocks, 1, D] float32, from `forward`.
      d_out: [B, T, D] in x's dtype.
      d_final: [B, D] float32.

    Returns:
      (); gradients of x and the log-decays; of the initial state.
    """
    layout = _layout(x)
    rows, _, width, channels, blocks, dtype = layout
    tokens, by_channel, by_block = _specs(layout, lambda t: blocks[1] - 1 - t)
    d_x, d_log_decay, d_state = tpu.kernel_call(
        functools.partial(_backward_block, layout),
        x.astype(dtype),
        log_decay,
        d_out.astype(dtype),
        entering,
        d_final[:, None],
        name="linear_scan_backward",
        interpret=interpret,
        grid=(rows, *blocks),
        parallel=2,
        in_specs=[tokens, tokens, tokens, by_block, by_channel],
        out_specs=[tokens, tokens, by_channel],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, dtype),
            jax.ShapeDtypeStruct(x.shape, jnp.float32),
            jax.ShapeDtypeStruct((rows, 1, width), jnp.float32),
        ],
        scratch=[tpu.vmem((1, channels)), tpu.vmem((TOKENS, channels))],
        cost=_cost(x, 100, 4, 3 * dtype.itemsize + 8),
    )
    return (), (d_x.astype(x.dtype), d_log_decay), d_state[:, 0]


def _specs(layout, order):
    """Blocks of tokens, of a row's state, and of the states that enter the blocks of tokens.

    `order` is the block of tokens of a step.
    """
    channels = layout.channels
    return (
        tpu.BlockSpec((1, TOKENS, channels), lambda b, d, t: (b, order(t), d)),
        tpu.BlockSpec((1, 1, channels), lambda b, d, t: (b, 0, d)),
        tpu.BlockSpec((1, 1, 1, channels), lambda b, d, t: (b, order(t), 0, d)),
    )


def _cost(x, flops, transcendentals, moved):
    """What XLA is told of the cost, from that of a token and channel."""
    return tpu.CostEstimate(
        flops=x.size * flops,
        transcendentals=x.size * transcendentals,
        bytes_accessed=x.size * moved,
    )


def _rows(layout, time, i, references):
    """Rows of group i of the block of tokens `time` in float32, 0 beyond the last token."""
    rows = tpu.slice_of(i * _GROUP, _GROUP)
    values = [z[0, rows].astype(jnp.float32) for z in references]
    if layout.time % TOKENS == 0:
        return rows, values
    token = time * TOKENS + i * _GROUP + tpu.iota(values[0].shape, 0)
    return rows, [jnp.where(token < layout.time, z, 0) for z in values]


def _root(log_decay, decay):
    """sqrt(1 - a^2), and 1 / (2 sqrt(1 - a^2)) but at most 1000."""
    twice = 2 * log_decay
    # Where a is near 1, the series of 1 - exp(z) about 0 keeps the digits; its rest is below 1e-7.
    series = jnp.full_like(twice, 1 / 720)
    for term in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0):
        series = series * twice + term
    square = jnp.where(twice > -0.25, -twice * series, 1 - decay * decay)
    inverse = lax.rsqrt(jnp.maximum(square, 1e-30))
    return square * inverse, jnp.minimum(inverse / 2, _MOST_SLOPE)


def _combined(decay, write, *, reverse=False):
    """Eight tokens [8, channels] as seen from before the first, or after the last.

    Row t of the results is the total decay of the tokens up to t and what they leave of their
    writes; of the tokens from t on when `reverse`.
    """
    row = tpu.iota(decay.shape, 0)
    for distance in (1, 2, 4):
        inside = row < tpu.SUBLANES - distance if reverse else row >= distance
        shift = tpu.SUBLANES - distance if reverse else distance
        write = write + decay * jnp.where(inside, tpu.roll(write, shift, 0), 0)
        decay = decay * jnp.where(inside, tpu.roll(decay, shift, 0), 1)
    return decay, write


def _states(decay, write, state):
    """The states [16, channels] after each token of a group, and before each; the last [1, ...]."""
    after, before = [], []
    for i in range(0, _GROUP, tpu.SUBLANES):
        a, w = _combined(decay[i : i + tpu.SUBLANES], write[i : i + tpu.SUBLANES])
        after.append(a * state + w)
        first = tpu.iota(a.shape, 0) == 0
        before.append(jnp.where(first, state, tpu.roll(after[-1], 1, 0)))
        state = after[-1][tpu.SUBLANES - 1 :]
    return jnp.concatenate(after), jnp.concatenate(before), state


def _forward_block(layout, x, log_decay, first, out, final, *references):
    """One block of tokens and channels, in order of tokens."""
    *entering, state = references
    time = tpu.program_id(2)

    @tpu.when(time == 0)
    def _():
        state[...] = first[0]

    for kept in entering:
        kept[0, 0] = state[...]

    def group(i, h):
        rows, (value, log) = _rows(layout, time, i, (x, log_decay))
        decay = jnp.exp(log)
        after, _, h = _states(decay, _root(log, decay)[0] * value, h)
        out[0, rows] = after.astype(out.dtype)
        return h

    h = lax.fori_loop(0, TOKENS // _GROUP, group, state[...])
    state[...] = h

    @tpu.when(time == layout.blocks[1] - 1)
    def _():
        final[0] = h


def _backward_block(
    layout,
    x,
    log_decay,
    d_out,
    entering,
    d_final,
    d_x,
    d_log_decay,
    d_state,
    carried,
    before,
):
    """One block of tokens and channels, from the last block of tokens to the first."""
    step = tpu.program_id(2)
    time = layout.blocks[1] - 1 - step
    groups = TOKENS // _GROUP

    @tpu.when(step == 0)
    def _():
        carried[...] = d_final[0]

    def again(i, h):
        rows, (value, log) = _rows(layout, time, i, (x, log_decay))
        decay = jnp.exp(log)
        _, before[rows], h = _states(decay, _root(log, decay)[0] * value, h)
        return h

    lax.fori_loop(0, groups, again, entering[0, 0])

    def back(i, u):
        rows, (value, log, d_read) = _rows(layout, time, groups - 1 - i, (x, log_decay, d_out))
        decay = jnp.exp(log)
        root, slope = _root(log, decay)
        passed, gradients = [], []
        for j in reversed(range(0, _GROUP, tpu.SUBLANES)):
            tokens = slice(j, j + tpu.SUBLANES)
            a, w = _combined(decay[tokens], decay[tokens] * d_read[tokens], reverse=True)
            passed.insert(0, a * u + w)
            last = tpu.iota(a.shape, 0) == tpu.SUBLANES - 1
            later = jnp.where(last, u, tpu.roll(passed[0], tpu.SUBLANES - 1, 0))
            gradients.insert(0, d_read[tokens] + later)
            u = passed[0][:1]
        gradient = jnp.concatenate(gradients)
        d_x[0, rows] = (root * gradient).astype(d_x.dtype)
        from_root = 2 * slope * decay * decay * value * gradient
        d_log_decay[0, rows] = jnp.concatenate(passed) * before[rows] - from_root
        return u

    u = lax.fori_loop(0, groups, back, carried[...])
    carried[...] = u

    @tpu.when(step == layout.blocks[1] - 1)
    def _():
        d_state[0] = u
