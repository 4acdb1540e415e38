# SPDX-License-Identifier: Apache-2.0
"""Short causal convolution, SiLU and L2 norm of heads on Hopper: one pass over the tokens each way.

z_t = b + sum_l w_l x_{t-l} over the tokens of t's own document, u = silu(z), and perhaps
y = u / sqrt(sum(u^2) + eps) over a head's channels; float32 inside.

A block takes a few heads through a piece of a row, eight tokens a stage, and keeps what a token
needs of its neighbours in registers. The backward goes from the last token to the first: it
computes z and dz once, adds dz to the gradients of the tokens before, and to the weights' in
registers, one partial sum a block, which XLA adds.

Bytes, with A = B T D itemsize: forward 2 A; backward 3 A, and 4 (W + 1) D a block.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from seqmix_kernels.gpu import heads
from seqmix_kernels.gpu._common import (
    MAX_GRID_YZ,
    SMEM,
    Barrier,
    barrier_wait,
    chip_refusal,
    commit_smem,
    copy_in,
    copy_out,
    ds,
    foldable,
    kernel,
    load,
    per_row,
    wait_copies_out,
    when,
)
from seqmix_kernels.gpu.heads import CODES, STEPS

_STAGES = 3
_MOST_TAPS = 5
# Blocks that a multiprocessor has registers for: 63 a thread forward, 167 to 255 backward.
_BLOCKS = {"forward": 6, "backward": 2}


class Options(NamedTuple):
    """What a kernel is built for.

    Attributes:
      activation: whether SiLU follows.
      head_width: channels of a head whose L2 norm becomes 1, or None.
      epsilon: added to the sum of squares.
    """

    activation: bool
    head_width: int | None
    epsilon: float = 1e-6


def refusal(options: Options, x: jax.Array, weight: jax.Array) -> str | None:
    """Why the kernels cannot take a call, or None.

    Args:
      options: of the call.
      x: [B, T, D].
      weight: [W, D].
    """
    width = options.head_width
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the kernel computes in float32, and {x.dtype} would lose digits"
    if not 2 <= weight.shape[0] <= _MOST_TAPS:
        return f"it has two to {_MOST_TAPS} taps, not {weight.shape[0]}"
    if width is not None and width not in heads.WIDTHS:
        return f"its heads have {heads.WIDTHS} channels, not {width}"
    unit = heads.HEADS * (width or 128)
    if x.shape[2] % unit:
        return f"a block takes {unit} channels, which do not divide {x.shape[2]}"
    if x.shape[2] // unit > MAX_GRID_YZ:
        return f"a CUDA grid has at most {MAX_GRID_YZ} blocks a row"
    return chip_refusal()


class _Call:
    """A call in the kernel's terms.

    Attributes:
      width: channels of a head. unit: heads of a block. strips: blocks side by side.
      stages: of a row. pieces, length: pieces of a row, and stages of a piece.
    """

    def __init__(self, options, weights, x, marks, direction):
        self.options = options
        self.width = options.head_width or 128
        self.unit, self.layout = heads.HEADS, heads.layout(self.width)
        self.batch, self.time, self.channels = x.shape
        self.dtype, self.taps = x.dtype, weights.shape[0] - 1
        self.strips = self.channels // (self.unit * self.width)
        self.stages = -(-self.time // STEPS)
        self.pieces, self.length = heads.cut(
            self.batch * self.strips, self.stages, _BLOCKS[direction]
        )
        self.weights = weights.astype(jnp.float32).reshape(self.taps + 1, -1, self.width)
        self.codes = None
        if marks is not None:  # one stage more, of no token
            pad = (self.stages + 1) * STEPS - self.time
            marks = jnp.pad(marks, ((0, 0), (0, pad))).reshape(self.batch, -1, STEPS)
            self.codes = jnp.pad(marks, ((0, 0), (0, 0), (0, CODES - STEPS)))

    @property
    def grid(self):
        """Blocks."""
        return {
            "grid": (self.strips, self.batch * self.pieces),
            "grid_names": ("strip", "piece"),
        }

    def shape(self, *leading: int, dtype: Any = None) -> Any:
        """[..., heads, width] of an array in memory."""
        shape = *leading, self.channels // self.width, self.width
        return jax.ShapeDtypeStruct(shape, dtype or self.dtype)

    def buffer(self, *leading: int, dtype: Any = None) -> Any:
        """[..., heads of a block, width] in shared memory."""
        return SMEM((*leading, self.unit, self.width), dtype or self.dtype)

    def whole(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, whole stages, heads, width]."""
        pad = self.stages * STEPS - self.time
        x = jnp.pad(x, ((0, 0), (0, pad), (0, 0))) if pad else x
        return self.split(x)

    def split(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., heads, width]."""
        return x.reshape(*x.shape[:-1], -1, self.width)

    def join(self, x: jax.Array) -> jax.Array:
        """[B, whole stages, heads, width] -> [B, T, D]."""
        return x.reshape(self.batch, -1, self.channels)[:, : self.time]

    def scratch(self) -> dict[str, Any]:
        """Shared memory that both directions have."""
        found = {"w_s": self.buffer(self.taps + 1, dtype=jnp.float32)}
        if self.codes is not None:
            found["code_s"] = SMEM((_STAGES + 1, CODES), jnp.int32)
        return found

    def place(self):
        """This block's row, first stage, number of stages, and heads."""
        row = lax.axis_index("piece")
        start = lax.rem(row, self.pieces) * self.length
        count = jnp.minimum(self.length, self.stages - start)
        return (
            lax.div(row, self.pieces),
            start,
            count,
            ds(lax.axis_index("strip") * self.unit, self.unit),
        )

    def tile(self, ref: Any) -> jax.Array:
        """A tile in shared memory, in float32 registers."""
        return load(ref, layout=self.layout).astype(jnp.float32)

    def sums(self, x: jax.Array) -> jax.Array:
        """The sum of each head, at each of its channels."""
        return per_row(x.sum(axis=1), (self.unit, self.width))

    def masked(self, x: jax.Array, code: Any, lag: int) -> jax.Array:
        """x where the token has one of its own document `lag` tokens before, else 0."""
        if code is None:
            return x
        return heads.where((code >> lag) & 1 != 0, x)

    def convolved(self, w, window, code):
        """z, and the tokens it is made of by lag; `window` has the token last."""
        seen = [self.masked(window[-1 - lag], code, lag) for lag in range(self.taps)]
        z = w[self.taps]
        for lag, x in enumerate(seen):
            z = z + w[self.taps - 1 - lag] * x
        return z, seen

    def output(self, z: jax.Array) -> jax.Array:
        """What is made of z."""
        if self.options.activation:
            z = z * heads.sigmoid(z)
        if self.options.head_width:
            z = z * lax.rsqrt(self.sums(z * z) + self.options.epsilon)
        return z

    def of_output(self, z: jax.Array, d_y: jax.Array) -> jax.Array:
        """The gradient of z, of that of `output`."""
        gate = heads.sigmoid(z) if self.options.activation else 1.0
        if self.options.head_width:
            u = z * gate
            root = lax.rsqrt(self.sums(u * u) + self.options.epsilon)
            u = u * root
            d_y = root * (d_y - u * self.sums(u * d_y))
        if self.options.activation:
            d_y = d_y * (gate * (1.0 + z * (1.0 - gate)))
        return d_y


def forward(options, interpret, shared, x, state, run, *, keep):
    """y [B, T, D]; for the arguments see `seqmix.mixers._pallas`.

    `shared` is [W + 1, D], the taps and then the bias; `state` [B, W - 1, D] the tokens before in
    the dtype of x; `run` [B, T] int32 or None: bit l says that the token is real and the one l
    before it is of its document.
    """
    del interpret, keep

    def rows(x, state, run):
        return _forward(_Call(options, shared[0], x, run, "forward"), x, state)

    return foldable(rows)(x, state, run), None, ()


def _forward(call, x, state):
    before = call.taps - 1
    packed = call.codes is not None
    scratch = call.scratch() | {
        "x_s": call.buffer(_STAGES, STEPS),
        "y_s": call.buffer(2, STEPS),
        "before_s": call.buffer(before),
        "begun": Barrier(num_arrivals=2),
        "full": Barrier(num_arrivals=1 + packed, num_barriers=_STAGES),
    }

    def body(x_ref, w_ref, state_ref, *refs, x_s, y_s, w_s, before_s, begun, full, code_s=None):
        *code_ref, y_ref = refs
        b, start, count, these = call.place()

        def issue(n):
            slot = lax.rem(n, _STAGES)
            tokens = ds((start + n) * STEPS, STEPS)
            copy_in(x_ref.at[b, tokens, these], x_s.at[slot], full.at[slot])
            if packed:
                copy_in(code_ref[0].at[b, start + n], code_s.at[slot], full.at[slot])

        copy_in(w_ref.at[:, these], w_s, begun)

        @when(start == 0)
        def _():
            copy_in(state_ref.at[b, :, these], before_s, begun)

        @when(start > 0)
        def _():
            copy_in(x_ref.at[b, ds(start * STEPS - before, before), these], before_s, begun)

        for n in range(_STAGES):

            @when(n < count)
            def _(n=n):
                issue(n)

        barrier_wait(begun)
        w = [load(w_s.at[tap], layout=call.layout) for tap in range(call.taps + 1)]

        def stage(n, window):
            slot, out, window = lax.rem(n, _STAGES), lax.rem(n, 2), list(window)
            barrier_wait(full.at[slot])
            wait_copies_out(1, wait_read_only=True)
            for step in range(STEPS):
                code = code_s[slot, step] if packed else None
                window.append(call.tile(x_s.at[slot, step]))
                y = call.output(call.convolved(w, window, code)[0])
                y_s.at[out, step][...] = call.masked(y, code, 0).astype(call.dtype)
                window.pop(0)
            commit_smem()
            copy_out(y_s.at[out], y_ref.at[b, ds((start + n) * STEPS, STEPS), these])

            @when(n + _STAGES < count)
            def _():
                issue(n + _STAGES)

            return tuple(window)

        begin = tuple(call.tile(before_s.at[i]) for i in range(before))
        lax.fori_loop(0, count, stage, begin)
        wait_copies_out(0)

    y = kernel(
        body,
        name="convolution_forward",
        out_type=call.shape(call.batch, call.stages * STEPS),
        scratch=scratch,
        **call.grid,
    )(call.whole(x), call.weights, call.split(state), *([call.codes] if packed else []))
    return call.join(y)


def backward(options, interpret, shared, x, state, run, residuals, d_out, d_final):
    """Gradients of `forward`; see `seqmix.mixers._pallas`."""
    del interpret, residuals, d_final

    def rows(x, state, run, d_out):
        call = _Call(options, shared[0], x, run, "backward")
        return _backward(call, x, state, d_out.astype(x.dtype))

    d_x, d_weights, d_state = foldable(rows)(x, state, run, d_out)
    return (d_weights,), (d_x,), d_state.astype(state.dtype)


def _backward(call, x, state, d_out):
    before, taps = call.taps - 1, call.taps
    packed = call.codes is not None
    scratch = call.scratch() | {
        "x_s": call.buffer(_STAGES, STEPS),
        "dy_s": call.buffer(_STAGES, STEPS),
        "dx_s": call.buffer(2, STEPS),
        "edge_s": call.buffer(3, before),
        "sums_s": call.buffer(taps + 1, dtype=jnp.float32),
        "state_s": call.buffer(before, dtype=jnp.float32),
        "begun": Barrier(num_arrivals=4 + packed),
        "full": Barrier(num_arrivals=3 + packed, num_barriers=_STAGES),
    }
    rows = call.batch * call.pieces
    out_type = (
        call.shape(call.batch, call.stages * STEPS),
        call.shape(rows, taps + 1, dtype=jnp.float32),
        call.shape(call.batch, before, dtype=jnp.float32),
    )

    def body(
        x_ref, w_ref, state_ref, dy_ref, *refs,
        x_s, dy_s, dx_s, w_s, edge_s, sums_s, state_s, begun, full, code_s=None,
    ):  # fmt: skip
        *code_ref, dx_ref, sums_ref, d_state_ref = refs
        b, start, count, these = call.place()

        def at(n):
            return start + count - 1 - n

        def issue(n):
            """Gradients of a stage's tokens, and inputs from W - 1 tokens earlier on."""
            slot, first = lax.rem(n, _STAGES), at(n) * STEPS
            early, late = x_s.at[slot, ds(0, before)], x_s.at[slot, ds(before, STEPS - before)]

            @when(first == 0)
            def _():
                copy_in(state_ref.at[b, :, these], early, full.at[slot])

            @when(first > 0)
            def _():
                copy_in(x_ref.at[b, ds(first - before, before), these], early, full.at[slot])

            copy_in(x_ref.at[b, ds(first, STEPS - before), these], late, full.at[slot])
            copy_in(dy_ref.at[b, ds(first, STEPS), these], dy_s.at[slot], full.at[slot])
            if packed:
                copy_in(code_ref[0].at[b, at(n)], code_s.at[slot], full.at[slot])

        copy_in(w_ref.at[:, these], w_s, begun)
        end = (start + count) * STEPS
        inside = start + count < call.stages
        beyond = jnp.where(inside, end, end - before)  # any tokens where there are none
        copy_in(x_ref.at[b, ds(end - before, before), these], edge_s.at[0], begun)
        copy_in(x_ref.at[b, ds(beyond, before), these], edge_s.at[1], begun)
        copy_in(dy_ref.at[b, ds(beyond, before), these], edge_s.at[2], begun)
        if packed:
            copy_in(code_ref[0].at[b, start + count], code_s.at[_STAGES], begun)
        for n in range(_STAGES):

            @when(n < count)
            def _(n=n):
                issue(n)

        barrier_wait(begun)
        w = [load(w_s.at[tap], layout=call.layout) for tap in range(taps + 1)]

        def token(window, d_y, code, pending, live=None):
            """A token's gradient, those of the tokens before it so far, and its weights' terms."""
            z, seen = call.convolved(w, window, code)
            d_z = call.masked(call.of_output(z, call.masked(d_y, code, 0)), code, 0)
            if live is not None:
                d_z = heads.where(live, d_z)
            parts = [w[taps - 1 - lag] * call.masked(d_z, code, lag) for lag in range(taps)]
            grown = [p + part for p, part in zip(pending, parts, strict=False)]
            return grown[0], [*grown[1:], parts[-1]], [*(d_z * x for x in reversed(seen)), d_z]

        zero = heads.zeros(call.width)
        pending = [zero] * before
        edge = [call.tile(edge_s.at[i, j]) for i in range(2) for j in range(before)]
        for step in reversed(range(before)):
            code = code_s[_STAGES, step] if packed else None
            window = edge[step : step + taps]
            d_y = call.tile(edge_s.at[2, step])
            _, pending, _ = token(window, d_y, code, pending, inside)

        def stage(n, carry):
            later, pending, sums = (list(x) for x in carry)
            slot, out = lax.rem(n, _STAGES), lax.rem(n, 2)
            barrier_wait(full.at[slot])
            wait_copies_out(1, wait_read_only=True)
            for step in reversed(range(STEPS)):
                code = code_s[slot, step] if packed else None
                later.insert(0, call.tile(x_s.at[slot, step]))
                d_x, pending, terms = token(later, call.tile(dy_s.at[slot, step]), code, pending)
                sums = [total + term for total, term in zip(sums, terms, strict=True)]
                dx_s.at[out, step][...] = d_x.astype(call.dtype)
                later.pop()
            commit_smem()
            copy_out(dx_s.at[out], dx_ref.at[b, ds(at(n) * STEPS, STEPS), these])

            @when(n + _STAGES < count)
            def _():
                issue(n + _STAGES)

            return tuple(later), tuple(pending), tuple(sums)

        begin = tuple(edge[:before]), tuple(pending), (zero,) * (taps + 1)
        _, pending, sums = lax.fori_loop(0, count, stage, begin)
        for tap, total in enumerate(sums):
            sums_s.at[tap][...] = total
        for i, d_x in enumerate(pending):
            state_s.at[before - 1 - i][...] = d_x
        commit_smem()
        copy_out(sums_s, sums_ref.at[lax.axis_index("piece"), :, these])

        @when(start == 0)
        def _():
            copy_out(state_s, d_state_ref.at[b, :, these])

        wait_copies_out(0)

    d_x, d_weights, d_state = kernel(
        body,
        name="convolution_backward",
        out_type=out_type,
        scratch=scratch,
        **call.grid,
    )(
        call.whole(x), call.weights, call.split(state), call.whole(d_out),
        *([call.codes] if packed else []),
    )  # fmt: skip
    d_weights = d_weights.reshape(call.batch, call.pieces, taps + 1, -1).sum(axis=1)
    return call.join(d_x), d_weights, d_state.reshape(call.batch, before, -1)
