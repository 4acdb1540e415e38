# SPDX-License-Identifier: Apache-2.0
"""What the forward and backward kernels of the delta rule both compute of one chunk."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from seqmix_kernels.options import Heads
from seqmix_kernels.tpu import _common as tpu
from seqmix_kernels.tpu.delta_inverse import unit_lower_inverse

# Tokens of a chunk: the side of the matrix unit, and the lanes of a vector.
CHUNK = 128
# All sums of up to CHUNK multiples of the first, of log-decays down to -1e5, are exact in float32;
# so are those of multiples of the second, of what the first leaves. What the second leaves is so
# small that its sums round below 2^-32.
_GRIDS = (2.0, 2.0**-16)
_PARTS = len(_GRIDS) + 1


class Plan(NamedTuple):
    """How a call is cut up.

    Attributes:
      heads: grouping of the heads.
      key: K, as the kernel sees it.
      value: V, likewise.
      block: key heads of one step of the grid.
      time: T, as the kernel sees it.
      scale: factor on the output.
      low: dtype in which matrix products read.
    """

    heads: Heads
    key: int
    value: int
    block: int
    time: int
    scale: float
    low: Any

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return tpu.ceil_div(self.time, CHUNK)

    @property
    def digits(self) -> int:
        """How many bfloat16 numbers stand for a float32 one where products need more than one."""
        return 3 if self.low == jnp.float32 else 2

    @property
    def states(self) -> int:
        """States of one step of the grid."""
        return self.block * self.heads.values


class Decays:
    """The decays of one chunk, each in [0, 1].

    Columns are [C, 1], of the chunk's tokens; `state` counts the states of a step of the grid.
    """

    def __init__(self, gates: jax.Array):
        """Reads gates [2 states, C] float32: log-decays, then write strengths."""
        self.count = gates.shape[0] // 2
        self.lower = tpu.lower_mask(CHUNK)
        ones = jnp.where(self.lower, 1.0, 0.0)
        self.rows = tpu.dot(_digits(gates[: self.count]), ones, rhs=1)
        self.columns = jnp.concatenate([self.rows, gates[self.count :]], axis=0).T

    def beta(self, state: int) -> jax.Array:
        """[C, 1], write strengths."""
        at = _PARTS * self.count + state
        return self.columns[:, at : at + 1]

    def _sums(self, state: int):
        """Columns and rows of the parts of the sums of log-decays from the chunk's entry on."""
        for part in range(_PARTS):
            at = part * self.count + state
            yield self.columns[:, at : at + 1], self.rows[at : at + 1]

    def intra(self, state: int) -> jax.Array:
        """[C, C]: from the write of token j to the read of token i; 0 above the diagonal."""
        sums = sum(column - row for column, row in self._sums(state))
        return jnp.exp(jnp.where(self.lower, sums, -jnp.inf))

    def entry(self, state: int) -> jax.Array:
        """[C, 1]: from the chunk's entry to the read of token i."""
        return jnp.exp(sum(column for column, _ in self._sums(state)))

    def leave(self, state: int) -> jax.Array:
        """[C, 1]: from the write of token j to the chunk's end."""
        return jnp.exp(sum(row[:, -1:] - column for column, row in self._sums(state)))

    def through(self, state: int) -> jax.Array:
        """[1, 1]: across the chunk."""
        return jnp.exp(sum(row[:, -1:] for _, row in self._sums(state)))


def _digits(log_decay):
    """[states, C] -> [parts * states, C]: log-decays as sums of multiples of ever finer grids."""
    parts = []
    for grid in _GRIDS:
        parts.append(jnp.round(log_decay / grid) * grid)
        log_decay = log_decay - parts[-1]
    return jnp.concatenate([*parts, log_decay], axis=0)


class KeyHead:
    """One key head's arrays of a chunk, with the products that all its states share.

    Attributes:
      k: [C, K].
      q: [C, K] for each query of a state.
      kq: [(1 + queries) C, K], k above the queries.
      kk: [C, C], K K^T.
      qk: [C, C] for each query, Q K^T.
    """

    def __init__(self, plan: Plan, head: int, q: jax.Array, k: jax.Array):
        """Takes key head `head` out of a step's q [C, heads * queries * K] and k [C, heads * K]."""
        queries = plan.heads.queries
        self.k = lanes(k, head, plan.key).astype(plan.low)
        self.q = [lanes(q, head * queries + x, plan.key).astype(plan.low) for x in range(queries)]
        self.kq = jnp.concatenate([self.k, *self.q], axis=0)
        pairs = tpu.dot(self.kq, self.k, rhs=1)
        self.kk, *self.qk = (pairs[i : i + CHUNK] for i in range(0, pairs.shape[0], CHUNK))


def lanes(x: jax.Array, index: int, width: int) -> jax.Array:
    """Piece `index` of the last axis of [C, pieces * width]."""
    return x[:, index * width : (index + 1) * width]


def inverses(
    plan: Plan, decays: Decays, head: int, kk: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    """Of a key head's states.

    Args:
      plan: of the call.
      decays: of the step.
      head: which key head of the step it is.
      kk: [C, C], its K K^T.

    Returns:
      D [C, C] of `Decays.intra` of each state, and [states, C, C] float32 (I + L)^-1, where L is
      beta (K K^T) * D strictly below the diagonal.
    """
    states = range(head * plan.heads.values, (head + 1) * plan.heads.values)
    intra = [decays.intra(s) for s in states]
    lower = [decays.beta(s) * strictly_lower(kk * d) for s, d in zip(states, intra, strict=True)]
    return intra, unit_lower_inverse(jnp.stack(lower), plan.digits)


def strictly_lower(x: jax.Array) -> jax.Array:
    """[C, C] with zeros on and above the diagonal."""
    return jnp.where(tpu.lower_mask(CHUNK, strict=True), x, 0)


def valid_rows(plan: Plan, chunk: jax.Array):
    """What zeroes the rows of a chunk's block that lie beyond the end of time."""
    if plan.time % CHUNK == 0:
        return lambda x: x
    inside = tpu.iota((CHUNK, 1), 0) < plan.time - chunk * CHUNK
    return lambda x: jnp.where(inside, x, jnp.zeros_like(x))
