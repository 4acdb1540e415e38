# SPDX-License-Identifier: Apache-2.0
"""Mamba-3 (single input, single output): trapezoidal steps and rotating states on the SSD core."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from seqmix.mixers import _checks as check
from seqmix.mixers import scalar_decay
from seqmix.mixers._numerics import contract, state_dtype
from seqmix.mixers._prefix import prefix_scan
from seqmix.mixers._segments import last_real_index, mask_padding, runs
from seqmix.typing import SegmentIds


class Mamba3State(NamedTuple):
    """State of `mamba3`; the last token's write is only half done, so its key and value stay.

    Attributes:
      matrix: [B, H, N, P] float32.
      key: [B, G, N] float32, rotated B of the last token.
      value: [B, H, P] float32, x of the last token.
      angle: [B, G, R] float32 in [0, 2 pi), how far each pair of channels has turned.
    """

    matrix: Float[Array, "B H N P"]
    key: Float[Array, "B G N"]
    value: Float[Array, "B H P"]
    angle: Float[Array, "B G R"]


def mamba3(
    x: Float[Array, "B T H P"],
    dt: Float[Array, "B T H"],
    A: Float[Array, "B T H"],
    B: Float[Array, "B T G N"],
    C: Float[Array, "B T G N"],
    trapezoid: Float[Array, "B T H"],
    rotation: Float[Array, "B T G R"],
    D: Float[Array, " H"] | None = None,
    *,
    scale: float = 1.0,
    initial_state: Mamba3State | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[jax.Array, Mamba3State]:
    """Selective state space with an exponential-trapezoidal step and rotating channel pairs.

    With k_t and q_t the B and C of token t, pairs (2i, 2i + 1) of their channels turned by the
    angle theta_t = theta_{t-1} + rotation_t, and a_t = exp(dt_t A_t)::

        h_t = a_t h_{t-1} + (1 - l_t) dt_t a_t k_{t-1} x_{t-1}^T + l_t dt_t k_t x_t^T
        y_t = scale q_t h_t + D x_t

    A token is thus written in two parts, the second one step later. On the SSD core both are one
    write at that later step, a_t (l_{t-1} dt_{t-1} + (1 - l_t) dt_t) k_{t-1} x_{t-1}^T, and what a
    token reads of itself is added apart: its output depends on no later step size, to the bit.

    Source: Mamba-3 (arXiv 2603.15569), its single-input, single-output form.

    Args:
      x: [B, T, H, P] float.
      dt: [B, T, H] float32, step sizes after softplus, >= 0.
      A: [B, T, H] float32, < 0; it depends on the token.
      B: [B, T, G, N] float; each of the G groups serves H / G consecutive heads.
      C: [B, T, G, N] float.
      trapezoid: [B, T, H] float32, l in [0, 1]; 1 makes the Euler step of Mamba-2.
      rotation: [B, T, G, R] float32, radians that the first 2 R channels turn at this token.
      D: [H] float, skip connection; None for none.
      scale: static factor on the state's output.
      initial_state: state of each row's first document; None for zeros.
      segment_ids: [B, T] integers; see `seqmix.typing`. None: each row is one document.
      chunk_size: tokens per chunk, None for 64. Changes speed and rounding only.
      impl: 'recurrent', 'associative', 'chunked', 'quadratic', 'pallas' or 'auto'.

    Returns:
      y: [B, T, H, P] in the dtype of x; 0 at padding.
      state: of each row's last document.

    Raises:
      ValueError: for shapes, dtypes or group counts off the above, or an impl that cannot run.
    """
    name = "mamba3"
    heads = _check_arguments(name, x, dt, A, B, C, trapezoid, rotation, D, initial_state)
    batch, time = x.shape[:2]
    check.segments(name, segment_ids, batch, time)
    check.positive(name, "chunk_size", chunk_size)

    x, dt, A, B, C, trapezoid, rotation = mask_padding(
        segment_ids, x, dt, A, B, C, trapezoid, rotation
    )
    wide = state_dtype(x, dt, B, C)
    run = None if segment_ids is None else runs(segment_ids)
    before = (
        None
        if initial_state is None
        else jax.tree.map(lambda leaf: leaf.astype(wide), initial_state)
    )
    entry = None
    if before is not None and time > 1:
        # Angles count from this call's start, and the state is turned to them and back: otherwise
        # the gradient of the entering angle is a sum over all tokens of what should cancel.
        entry = before.angle
        before = _turned(before, -entry)._replace(angle=jnp.zeros_like(entry))
    angle = _angles(rotation, None if before is None else before.angle, run)
    # All in full precision: the gradient of a rotation is a sum over later tokens, in which queries
    # and keys turned by the same angle cancel, and bfloat16 products would not (7e-3 was measured).
    B, C = _rotate(B.astype(wide), angle), _rotate(C.astype(wide), angle)

    early, late = trapezoid * dt, (1 - trapezoid) * dt
    previous = _Previous(segment_ids, run)
    wrote = jnp.exp(dt * A) * (previous(early, None) + late)
    key = previous(B, None if before is None else before.key)
    value = previous(x.astype(wide), None if before is None else before.value)
    (key,) = mask_padding(segment_ids, key)
    out, matrix = scalar_decay.scan(
        C,
        key,
        value * wrote[..., None],
        dt * A,
        heads=heads,
        scale=1.0,
        initial_state=None if before is None else before.matrix,
        run=run,
        chunk_size=chunk_size,
        mixer=name,
        impl=impl,
        out_dtype=wide,
    )
    own = jnp.repeat(contract("btgn,btgn->btg", C, B), heads.values, axis=2) * early
    out = scale * (out + own[..., None] * x)
    if D is not None:
        out = out + D.astype(wide)[:, None] * x
    last = _Last(segment_ids, time)
    key = last(B, None if before is None else before.key)
    value = last(x, None if before is None else before.value)
    own = jnp.repeat(key, heads.values, axis=1)[..., None] * value[:, :, None]
    matrix = matrix + last(early, None)[..., None, None] * own
    state = Mamba3State(matrix, key, value, last(angle, None if before is None else before.angle))
    if entry is not None:
        back = entry if run is None else jnp.where((run[:, -1] == 0)[:, None, None], entry, 0)
        state = _turned(state, back)._replace(angle=_turn(state.angle + back))
        if segment_ids is not None:
            state = _where(jnp.any(segment_ids != 0, axis=1), state, initial_state)
    return mask_padding(segment_ids, out.astype(x.dtype))[0], state


def _check_arguments(name, x, dt, A, B, C, trapezoid, rotation, D, state):
    check.rank(name, "x", x, "B T H P")
    check.rank(name, "B", B, "B T G N")
    check.rank(name, "rotation", rotation, "B T G R")
    batch, time, heads, width = x.shape
    if time == 0:
        raise ValueError(f"{name}: x must have T >= 1 tokens, got shape {list(x.shape)}")
    groups, size = B.shape[2:]
    if groups == 0 or heads % groups:
        raise ValueError(f"{name}: H = {heads} heads must be a multiple of B's G = {groups} groups")
    for label, shared in (("B", B), ("C", C)):
        check.shape(name, label, shared, (batch, time, groups, size), "B T G N")
    for label, gate in (("dt", dt), ("A", A), ("trapezoid", trapezoid)):
        check.shape(name, label, gate, (batch, time, heads), "B T H")
        check.float32(name, label, gate)
    turns = rotation.shape[3]
    check.shape(name, "rotation", rotation, (batch, time, groups, turns), "B T G R")
    check.float32(name, "rotation", rotation)
    if 2 * turns > size:
        raise ValueError(f"{name}: rotation turns R = {turns} pairs of N = {size} channels")
    if D is not None:
        check.shape(name, "D", D, (heads,), "H")
    if state is not None:
        for label, expected, axes in (
            ("matrix", (batch, heads, size, width), "B H N P"),
            ("key", (batch, groups, size), "B G N"),
            ("value", (batch, heads, width), "B H P"),
            ("angle", (batch, groups, turns), "B G R"),
        ):
            leaf = getattr(state, label)
            check.shape(name, f"initial_state.{label}", leaf, expected, axes)
    return check.Heads(groups, heads // groups, 1)


def _angles(rotation, before, run):
    """Sums of the rotations of each document so far, modulo a full turn: [B, T, G, R]."""
    if before is not None:
        rotation = rotation.at[:, 0].add(before)
    if run is None:
        run = jnp.zeros(rotation.shape[:2], jnp.int32)

    def combine(left, right):
        (a, x), (b, y) = left, right
        return b, _turn(jnp.where((a == b)[..., None, None], x + y, y))

    return prefix_scan(combine, (run, _turn(rotation)))[1]


# 2 pi in two parts; a whole number of turns times the first is exact in float32.
_TURN = (6.28125, 2 * math.pi - 6.28125)


def _turn(angle):
    """Reduced to about [0, 2 pi), with the derivative of the identity."""
    turns = lax.stop_gradient(jnp.floor(angle / (2 * math.pi)))
    return (angle - turns * _TURN[0]) - turns * _TURN[1]


def _rotate(x, angle):
    """Turns the channel pairs (2i, 2i + 1) of the first 2 R channels of [..., N]."""
    turned = 2 * angle.shape[-1]
    pairs = x[..., :turned].reshape(*angle.shape, 2)
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    first, second = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([first * cosine - second * sine, first * sine + second * cosine], axis=-1)
    rotated = rotated.reshape(*angle.shape[:-1], turned)
    return jnp.concatenate([rotated, x[..., turned:]], axis=-1)


def _turned(state, angle):
    """The state with matrix and key turned by `angle` [B, G, R]."""
    rows = jnp.swapaxes(state.matrix, 2, 3)
    heads, width = rows.shape[1:3]
    each = jnp.repeat(angle, heads // angle.shape[1], axis=1)[:, :, None]
    rows = _rotate(rows, jnp.broadcast_to(each, (*each.shape[:2], width, each.shape[3])))
    return state._replace(matrix=jnp.swapaxes(rows, 2, 3), key=_rotate(state.key, angle))


def _where(rows, state, other):
    """`state` in the rows [B] that are True, `other` elsewhere."""

    def select(a, b):
        return jnp.where(rows.reshape(-1, *(1,) * (a.ndim - 1)), a, b.astype(a.dtype))

    return jax.tree.map(select, state, other)


class _Previous:
    """Reads [B, T, ...] at the previous real token of the same document."""

    def __init__(self, segment_ids, run):
        self.place = None
        if segment_ids is not None:
            last = last_real_index(segment_ids)
            self.place = jnp.pad(last[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
            source = jnp.maximum(self.place, 0)
            self.same = (self.place >= 0) & (jnp.take_along_axis(run, source, axis=1) == run)

    def __call__(self, x, before):
        """The value there; `before` [B, ...] (None for zeros) where a row has no token yet."""
        first = jnp.zeros_like(x[:, 0]) if before is None else before
        if self.place is None:
            return jnp.concatenate([first[:, None], x[:, :-1]], axis=1)
        shape = (*self.place.shape, *(1,) * (x.ndim - 2))
        source = jnp.maximum(self.place, 0).reshape(shape)
        earlier = jnp.where(self.same.reshape(shape), jnp.take_along_axis(x, source, axis=1), 0)
        return jnp.where((self.place < 0).reshape(shape), first[:, None], earlier)


class _Last:
    """Reads [B, T, ...] at each row's last real token."""

    def __init__(self, segment_ids, time):
        self.place = None if segment_ids is None else last_real_index(segment_ids)[:, -1]
        self.time = time

    def __call__(self, x, before):
        """The value there as a state, or `before` (None for zeros) in rows of padding."""
        x = x.astype(state_dtype(x))
        if self.place is None:
            return x[:, -1]
        shape = (-1,) + (1,) * (x.ndim - 1)
        last = jnp.take_along_axis(x, jnp.maximum(self.place, 0).reshape(shape), axis=1)[:, 0]
        before = jnp.zeros_like(last) if before is None else before
        return jnp.where((self.place >= 0).reshape(shape[:-1]), last, before)
