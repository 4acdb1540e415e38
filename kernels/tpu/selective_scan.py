# SPDX-License-Identifier: Apache-2.0
"""S6, the selective scan of Mamba, on a TPU.

For each channel d and state n, with l_tn = dt_t A_n and u_t = dt_t x_t::

    h_t = exp(l_t) h_{t-1} + u_t B_t,   y_t = sum_n C_tn h_tn + D x_t

The state of a block of channels is [N, channels], states on sublanes and channels on lanes, and
goes token by token through a block of 128 tokens: what a token expands to exists in registers only.
B and C come as [N, T], so that a token's are one lane, broadcast to the others. The state is
carried over the blocks of a row in VMEM.

The forward pass keeps the state that enters each block. The backward pass takes the blocks from the
last to the first, runs each block's tokens again, holding their states and decays in VMEM, and then
backwards, with g_t the gradient of h_t::

    g_t = C_t dy_t + exp(l_{t+1}) g_{t+1},   p_t = g_t exp(l_t) h_{t-1}
    dA = sum_t dt_t p_t,   d dt_t = sum_n A_n p_t + x_t s_t,   dx_t = dt_t s_t + D dy_t
    s_t = sum_n B_tn g_tn,   dB_tn = sum_d u_td g_tnd,   dC_tn = sum_d dy_td h_tnd

A document's first token has exp(l_t) = 0. No decay is a difference or a quotient of others. On a
chip with two cores, rows and blocks of channels are shared out in the forward pass, rows only in
the backward pass, where B's and C's gradients are summed over channels in VMEM.

Costs for each token and channel, with b bytes an element of x: forward reads b + 4 bytes, writes
b + N / 32, and takes 6 N FLOPs and N exponentials; backward reads 2 b + 4 + N / 32, writes b + 4,
and takes 22 N FLOPs and N exponentials. Nothing is left for the matrix unit. At N = 16 in bfloat16
a token of 128 channels moves 1 KiB and takes two registers through about twelve operations each:
the vector unit is the bound, not the memory. In the compiler's schedule for a v5e a block of 128
tokens and 512 channels takes some 4,300 cycles forward, of which the vector unit's operations fill
3,400, and 10,500 backward.

Gu & Dao 2023, arXiv 2312.00752, section 3.3, has the scan and its recomputation.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from seqmix_kernels.tpu import _common as tpu

TOKENS = 128
"""Tokens of a block: one lane of B and C each."""
START = 1
"""Mark of the first token of a document that is not the row's first."""
_LOG2_E = 1.4426950408889634
# State elements of a block of channels: the state, A and A's gradient meet in the registers.
_STATE_ELEMENTS = 8192
_MOST_LANE_TILES = 4


class _Layout(NamedTuple):
    """How a call is cut up.

    Attributes:
      rows: B.
      time: T.
      width: D.
      states: N, a multiple of 8: added states decay at rate 0 and are never written.
      channels: D of a block.
      blocks: of channels, and of tokens.
      dtype: of x and y inside the kernels.
      packed: whether there are marks.
    """

    rows: int
    time: int
    width: int
    states: int
    channels: int
    blocks: tuple[int, int]
    dtype: jnp.dtype
    packed: bool


def _layout(x, B, marks) -> _Layout:
    rows, time, width = x.shape
    states = tpu.round_up(B.shape[-1], tpu.SUBLANES)
    tiles = tpu.ceil_div(width, tpu.LANES)
    most = max(1, min(_MOST_LANE_TILES, tiles, _STATE_ELEMENTS // (states * tpu.LANES)))
    # What a block does once (broadcasting B and C) counts as half a tile.
    side = min(range(1, most + 1), key=lambda n: (tpu.ceil_div(tiles, n) * (n + 0.5), -n))
    blocks = tpu.ceil_div(tiles, side), tpu.ceil_div(time, TOKENS)
    dtype = jnp.dtype(jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32)
    return _Layout(rows, time, width, states, side * tpu.LANES, blocks, dtype, marks is not None)


def refusal(options: None, arrays: tuple[jax.Array, ...]) -> str | None:
    """Why these kernels cannot take a call, or None.

    Args:
      options: the family has none.
      arrays: x and dt [B, T, D], B and C [B, T, N].
    """
    if any(a.dtype == jnp.float64 for a in arrays):
        return "the TPU kernel has no float64"
    if vmem_bytes(options, arrays) > tpu.VMEM_LIMIT:
        D, N = arrays[0].shape[-1], arrays[2].shape[-1]
        return f"{D} channels with {N} states each are more than the TPU kernel's memory holds"
    return None


def vmem_bytes(options: None, arrays: tuple[jax.Array, ...]) -> int:
    """Bytes of VMEM that the backward kernel, the larger one, holds; arguments as of `refusal`."""
    x, _, B, _ = arrays
    layout = _layout(x, B, None)
    tokens, state = TOKENS * layout.channels * 4, layout.states * layout.channels * 4
    columns, row = TOKENS * layout.states * 4, tpu.SUBLANES * layout.channels * 4
    # x, dt, dy, dx, d dt; B, C, dB, dC; A, dA, three states; D, dD: two blocks of each, one moving.
    moved = 5 * tokens + 4 * columns + 5 * state + 2 * row
    carried = layout.blocks[0] * (2 * state + row)
    # What the compiler adds for values that do not fit in registers has been less than half a MiB.
    return 2 * moved + carried + 4 * columns + 5 * tokens + 2 * TOKENS * state + 2**19


def forward(options, interpret, shared, x, dt, B, C, state, marks, *, keep):
    """The outputs.

    Args:
      options: the family has none.
      interpret: False, or an interpreter of `seqmix_kernels.target`.
      shared: A [D, N] float32, and D [D] float32 if there is a skip connection.
      x: [B, T, D] floating; 0 at padding, as are dt, B and C.
      dt: [B, T, D] float32.
      B: [B, T, N] floating.
      C: [B, T, N] floating.
      state: [B, D, N] float32.
      marks: [B, T] integers, `START` where a document starts; None for rows of one document.
      keep: whether `backward` will be called.

    Returns:
      y [B, T, D] in x's dtype, the final state [B, D, N], and the states that enter the blocks of
      tokens [B, blocks, N, D], both float32; the last None unless `keep`.
    """
    layout = _layout(x, B, marks)
    rows, _, width, states, channels, blocks = layout[:6]

    def spec(block, index, kind=tpu.BlockSpec):
        return kind(block, index)

    inputs, specs = _inputs(layout, shared, x, dt, B, C, marks, lambda t: t, spec)
    by_state = tpu.BlockSpec((1, states, channels), lambda b, d, t: (b, 0, d))
    y, final, *entering = tpu.kernel_call(
        functools.partial(_forward_block, layout, keep),
        *inputs,
        _laid(state, layout),
        name="selective_scan",
        interpret=interpret,
        grid=(rows, *blocks),
        parallel=2,
        in_specs=[*specs, by_state],
        out_specs=[
            tpu.BlockSpec((1, TOKENS, channels), lambda b, d, t: (b, t, d)),
            by_state,
            tpu.BlockSpec((1, 1, states, channels), lambda b, d, t: (b, t, 0, d)),
        ][: 2 + keep],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, layout.dtype),
            jax.ShapeDtypeStruct((rows, states, width), jnp.float32),
            jax.ShapeDtypeStruct((rows, blocks[1], states, width), jnp.float32),
        ][: 2 + keep],
        scratch=[
            tpu.vmem((states, channels)),
            *[tpu.vmem((states, TOKENS))] * 2,
            *[tpu.vmem((TOKENS, channels))] * 3,
        ],
        cost=_cost(layout, 6, 1, 2 * layout.dtype.itemsize + 4),
    )
    return y.astype(x.dtype), _restored(final, state.shape), entering[0] if keep else None


def backward(options, interpret, shared, x, dt, B, C, state, marks, entering, d_y, d_final):
    """The gradients.

    Args:
      options, interpret, shared, x, dt, B, C, state, marks: as of `forward`.
      entering: [B, blocks, N, D] float32, from `forward`.
      d_y: [B, T, D] in x's dtype.
      d_final: [B, D, N] float32.

    Returns:
      Gradients of `shared`, each with a leading axis B to be summed over; of x, dt, B and C; of the
      initial state.
    """
    layout = _layout(x, B, marks)
    rows, time, width, states, channels, blocks = layout[:6]
    last = blocks[1] - 1

    def at(when, d, t):
        """The block of channels of what is only read or written at one step over tokens."""
        return jnp.where(t == when, d, 0)

    def spec(block, index, kind=tpu.BlockSpec):
        # Blocks of channels come one after another: B's and C's gradients are sums over them.
        return kind(block, lambda b, t, d: index(b, d, t))

    inputs, specs = _inputs(layout, shared, x, dt, B, C, marks, lambda t: last - t, spec)
    tokens = spec((1, TOKENS, channels), lambda b, d, t: (b, last - t, d))
    columns = spec((1, states, TOKENS), lambda b, d, t: (b, 0, last - t))
    by_state = spec((1, states, channels), lambda b, d, t: (b, 0, at(last, d, t)))
    d_columns = jax.ShapeDtypeStruct((rows, states, time), inputs[-3].dtype)
    d_by_state = jax.ShapeDtypeStruct((rows, states, width), jnp.float32)
    d_x, d_dt, d_B, d_C, d_state, d_A, d_skip = tpu.kernel_call(
        functools.partial(_backward_block, layout),
        *inputs,
        d_y.astype(layout.dtype),
        entering,
        _laid(d_final, layout),
        name="selective_scan_backward",
        interpret=interpret,
        grid=(rows, blocks[1], blocks[0]),
        parallel=1,
        in_specs=[
            *specs,
            tokens,
            spec((1, 1, states, channels), lambda b, d, t: (b, last - t, 0, d)),
            spec((1, states, channels), lambda b, d, t: (b, 0, at(0, d, t))),
        ],
        out_specs=[
            *[tokens, tokens, columns, columns, by_state, by_state],
            spec((1, 1, channels), lambda b, d, t: (b, 0, at(last, d, t))),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, layout.dtype),
            jax.ShapeDtypeStruct(x.shape, jnp.float32),
            *[d_columns, d_columns, d_by_state, d_by_state],
            jax.ShapeDtypeStruct((rows, 1, width), jnp.float32),
        ],
        scratch=[
            *[tpu.vmem((blocks[0], states, channels))] * 2,
            tpu.vmem((blocks[0], 1, channels)),
            *[tpu.vmem((states, TOKENS))] * 4,
            *[tpu.vmem((TOKENS, channels))] * 5,
            *[tpu.vmem((TOKENS, states, channels))] * 2,
        ],
        cost=_cost(layout, 22, 1, 3 * layout.dtype.itemsize + 8),
    )
    d_B, d_C = (
        jnp.swapaxes(d[:, : z.shape[-1]], 1, 2).astype(z.dtype) for d, z in ((d_B, B), (d_C, C))
    )
    d_shared = _restored(d_A, state.shape), d_skip[:, 0]
    d_arrays = d_x.astype(x.dtype), d_dt, d_B, d_C
    return d_shared[: len(shared)], d_arrays, _restored(d_state, state.shape)


def _laid(x: jax.Array, layout: _Layout) -> jax.Array:
    """[..., D, N] -> [..., states, D]."""
    return tpu.pad_axis(jnp.swapaxes(x, -1, -2), x.ndim - 2, layout.states)


def _restored(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[B, states, D] -> [B, D, N] of the given shape."""
    return jnp.swapaxes(x[:, : shape[-1]], 1, 2)


def _inputs(layout, shared, x, dt, B, C, marks, order, spec):
    """The inputs of both passes as the kernels read them, and their blocks.

    `order` is the block of tokens of a step; `spec` takes a block's shape and its place as a
    function of (b, d, t).
    """
    A, *skip = shared
    padded = layout.blocks[1] * TOKENS
    low = jnp.bfloat16 if jnp.result_type(B, C) == jnp.bfloat16 else jnp.float32
    tokens = spec((1, TOKENS, layout.channels), lambda b, d, t: (b, order(t), d))
    columns = spec((1, layout.states, TOKENS), lambda b, d, t: (b, 0, order(t)))
    inputs = [
        x.astype(layout.dtype),
        dt,
        *(tpu.pad_axis(_laid(z.astype(low), layout), 2, padded) for z in (B, C)),
        _laid(A, layout),
        skip[0][None] if skip else jnp.zeros((1, layout.width), jnp.float32),
    ]
    specs = [
        *[tokens, tokens, columns, columns],
        spec((layout.states, layout.channels), lambda b, d, t: (0, d)),
        spec((1, layout.channels), lambda b, d, t: (0, d)),
    ]
    if marks is None:
        return inputs, specs
    marks = tpu.pad_axis(marks.astype(jnp.int32), 1, padded)[:, None]
    scalars = spec((1, 1, TOKENS), lambda b, d, t: (b, 0, order(t)), tpu.smem_spec)
    return [marks, *inputs], [scalars, *specs]


def _cost(layout, flops, exponentials, moved):
    """What XLA is told of the cost: operations on a state element, bytes of a token and channel."""
    size = layout.rows * layout.time * layout.width
    return tpu.CostEstimate(
        flops=size * layout.states * flops,
        transcendentals=size * layout.states * exponentials,
        bytes_accessed=size * (moved + 4 * layout.states // TOKENS),
    )


def _inside(layout, block, time, x):
    """x [TOKENS, channels] of a block of channels and of tokens, 0 over the arrays' edges."""
    if layout.time % TOKENS:
        x = jnp.where(time * TOKENS + tpu.iota(x.shape, 0) < layout.time, x, 0)
    return _within(layout, block, x)


def _within(layout, block, x):
    """x [..., channels] of a block of channels, 0 over the arrays' edge."""
    if layout.width % layout.channels == 0:
        return x
    return jnp.where(block * layout.channels + tpu.iota(x.shape, 1) < layout.width, x, 0)


class _RowSums:
    """Sums over sublanes of eight arrays [8 n, channels]: one row each of `total` [8, channels].

    Two arrays are added up at once, each in half of the sublanes.
    """

    def __init__(self):
        self.waiting = {}

    def add(self, j: int, x: jax.Array) -> None:
        """Takes array j, from 0 to 7 or from 7 to 0."""
        x = sum(x[i : i + tpu.SUBLANES] for i in range(0, x.shape[0], tpu.SUBLANES))
        row, distance = tpu.iota(x.shape, 0), 1
        while distance in self.waiting:
            other = self.waiting.pop(distance)
            low, high = (other, x) if j & distance else (x, other)
            low = low + tpu.roll(low, tpu.SUBLANES - distance, 0)
            x = jnp.where(row & distance == 0, low, high + tpu.roll(high, distance, 0))
            distance *= 2
        self.waiting[distance] = x

    @property
    def total(self) -> jax.Array:
        return self.waiting[tpu.SUBLANES]


def _columns(x, group):
    """[states, TOKENS] with the tokens of a group of eight first."""
    return tpu.roll(x, TOKENS - tpu.SUBLANES * group, 1)


def _decay(marks, t, steps, rates):
    """exp(dt A) [states, channels] of token t of the block; 0 where a document starts."""
    decay = jnp.exp2(steps * rates)
    return decay if marks is None else jnp.where(marks[0, 0, t] == START, 0.0, decay)


def _forward_block(layout, keep, *references):
    """One block of tokens and channels, in order of tokens."""
    marks, *references = references if layout.packed else (None, *references)
    x, dt, B, C, A, skip, first, y, final, *references = references
    entering, *references = references if keep else (None, *references)
    state, written_by, read_by, steps, inputs, outputs = references
    block, time = tpu.program_id(1), tpu.program_id(2)

    @tpu.when(time == 0)
    def _():
        state[...] = first[0]

    if keep:
        entering[0, 0] = state[...]
    written_by[...], read_by[...] = B[0].astype(jnp.float32), C[0].astype(jnp.float32)
    steps[...] = _inside(layout, block, time, dt[0])
    inputs[...] = steps[...] * _inside(layout, block, time, x[0].astype(jnp.float32))
    rates = A[...] * _LOG2_E

    def group(i, h):
        rows = tpu.slice_of(i * tpu.SUBLANES, tpu.SUBLANES)
        step, written, read = steps[rows], inputs[rows], _RowSums()
        b, c = _columns(written_by[...], i), _columns(read_by[...], i)
        for j in range(tpu.SUBLANES):
            decay = _decay(marks, i * tpu.SUBLANES + j, step[j : j + 1], rates)
            h = decay * h + written[j : j + 1] * b[:, j : j + 1]
            read.add(j, h * c[:, j : j + 1])
        outputs[rows] = read.total
        return h

    h = lax.fori_loop(0, TOKENS // tpu.SUBLANES, group, state[...])
    state[...] = h
    y[0] = (outputs[...] + skip[...] * x[0].astype(jnp.float32)).astype(y.dtype)

    @tpu.when(time == layout.blocks[1] - 1)
    def _():
        final[0] = h


def _backward_block(layout, *references):
    """One block of tokens and channels: blocks of tokens from the last to the first."""
    marks, *references = references if layout.packed else (None, *references)
    x, dt, B, C, A, skip, d_y, entering, d_final, *references = references
    d_x, d_dt, d_B, d_C, d_state, d_A, d_skip, *references = references
    carried, d_rates, d_skips, written_by, read_by, d_written_by, d_read_by, *references = (
        references
    )
    steps, inputs, d_outputs, along_A, along_B, before, decays = references
    step, block = tpu.program_id(1), tpu.program_id(2)
    time = layout.blocks[1] - 1 - step
    leaving = _within(layout, block, d_final[0])

    @tpu.when(step == 0)
    def _():
        carried[block] = leaving
        d_rates[block] = jnp.zeros(d_rates.shape[1:], jnp.float32)
        d_skips[block] = jnp.zeros(d_skips.shape[1:], jnp.float32)

    @tpu.when(block == 0)
    def _():
        written_by[...], read_by[...] = B[0].astype(jnp.float32), C[0].astype(jnp.float32)
        d_written_by[...] = jnp.zeros_like(d_written_by)
        d_read_by[...] = jnp.zeros_like(d_read_by)

    values = _inside(layout, block, time, x[0].astype(jnp.float32))
    steps[...] = _inside(layout, block, time, dt[0])
    inputs[...] = steps[...] * values
    d_outputs[...] = _inside(layout, block, time, d_y[0].astype(jnp.float32))
    A = _within(layout, block, A[...])
    rates = A * _LOG2_E
    lane = tpu.iota((layout.states, TOKENS), 1)
    groups = TOKENS // tpu.SUBLANES

    def again(i, carry):
        h, d_c = carry
        rows = tpu.slice_of(i * tpu.SUBLANES, tpu.SUBLANES)
        step, written, d_read = steps[rows], inputs[rows], d_outputs[rows]
        b = _columns(written_by[...], i)
        for j in range(tpu.SUBLANES):
            t = i * tpu.SUBLANES + j
            before[t] = h
            decays[t] = decay = _decay(marks, t, step[j : j + 1], rates)
            h = decay * h + written[j : j + 1] * b[:, j : j + 1]
            over_channels = jnp.sum(h * d_read[j : j + 1], axis=1, keepdims=True)
            d_c = jnp.where(lane == t, over_channels, d_c)
        return h, d_c

    nothing = jnp.zeros((layout.states, TOKENS), jnp.float32)
    first = _within(layout, block, entering[0, 0])
    d_read_by[...] += lax.fori_loop(0, groups, again, (first, nothing))[1]

    def back(i, carry):
        g, d_rate, d_b = carry
        i = groups - 1 - i
        rows = tpu.slice_of(i * tpu.SUBLANES, tpu.SUBLANES)
        step, written, d_read = steps[rows], inputs[rows], d_outputs[rows]
        b, c = _columns(written_by[...], i), _columns(read_by[...], i)
        sums_A, sums_B = _RowSums(), _RowSums()
        for j in reversed(range(tpu.SUBLANES)):
            t = i * tpu.SUBLANES + j
            g = g + c[:, j : j + 1] * d_read[j : j + 1]
            over_channels = jnp.sum(g * written[j : j + 1], axis=1, keepdims=True)
            d_b = jnp.where(lane == t, over_channels, d_b)
            sums_B.add(j, g * b[:, j : j + 1])
            g = decays[t] * g
            exponents = g * before[t]
            sums_A.add(j, exponents * A)
            d_rate = d_rate + exponents * step[j : j + 1]
        along_A[rows], along_B[rows] = sums_A.total, sums_B.total
        return g, d_rate, d_b

    g, d_rate, d_b = lax.fori_loop(0, groups, back, (carried[block], d_rates[block], nothing))
    carried[block], d_rates[block] = g, d_rate
    d_written_by[...] += d_b
    d_x[0] = (steps[...] * along_B[...] + skip[...] * d_outputs[...]).astype(d_x.dtype)
    d_dt[0] = along_A[...] + values * along_B[...]
    d_skips[block] += jnp.sum(values * d_outputs[...], axis=0, keepdims=True)

    @tpu.when(step == layout.blocks[1] - 1)
    def _():
        d_state[0], d_A[0], d_skip[0] = carried[block], d_rates[block], d_skips[block]

    @tpu.when(block == layout.blocks[0] - 1)
    def _():
        d_B[0] = d_written_by[...].astype(d_B.dtype)
        d_C[0] = d_read_by[...].astype(d_C.dtype)
