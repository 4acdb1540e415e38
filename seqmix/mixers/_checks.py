# SPDX-License-Identifier: Apache-2.0
"""Argument checks of the mixers: errors name the argument, what came and what was expected."""

import dataclasses

import jax
import jax.numpy as jnp


def rank(mixer: str, name: str, x: jax.Array, axes: str) -> None:
    """Raises ValueError unless `x` is a floating array with one axis per letter of `axes`."""
    letters = axes.split()
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise ValueError(f"{mixer}: {name} must be an array [{', '.join(letters)}], got {type(x)}")
    if x.ndim != len(letters):
        raise ValueError(
            f"{mixer}: {name} must have shape [{', '.join(letters)}], got {list(x.shape)}"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{mixer}: {name} must be floating point, got {x.dtype}")


def shape(mixer: str, name: str, x: jax.Array, expected: tuple[int, ...], axes: str) -> None:
    """Raises ValueError unless `x` is a floating array of exactly the `expected` shape."""
    rank(mixer, name, x, axes)
    if x.shape != expected:
        raise ValueError(
            f"{mixer}: {name} must have shape [{', '.join(axes.split())}] = {list(expected)}, "
            f"got {list(x.shape)}"
        )


def float32(mixer: str, name: str, x: jax.Array) -> None:
    """Raises ValueError unless `x` is float32 or float64: decays lose their meaning below it."""
    if x.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(f"{mixer}: {name} must be float32 (or float64), got {x.dtype}")


def segments(mixer: str, segment_ids: jax.Array | None, batch: int, time: int) -> None:
    """Raises ValueError unless `segment_ids` is None or integer [B, T]."""
    if segment_ids is None:
        return
    if not hasattr(segment_ids, "shape"):
        raise ValueError(
            f"{mixer}: segment_ids must be an array [B, T], got {type(segment_ids).__name__}"
        )
    if segment_ids.shape != (batch, time):
        raise ValueError(
            f"{mixer}: segment_ids must have shape [B, T] = [{batch}, {time}], "
            f"got {list(segment_ids.shape)}"
        )
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"{mixer}: segment_ids must be integers, got {segment_ids.dtype}")


def positive(mixer: str, name: str, value: int | None, *, optional: bool = True) -> None:
    """Raises ValueError unless `value` is an int >= 1, or None where it is optional."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{mixer}: {name} must be an integer >= 1, got {value!r}")


@dataclasses.dataclass(frozen=True)
class Heads:
    """How the heads of q, k and v map onto states.

    A state belongs to a pair (key head, value of that key head). Grouped values: `values` states
    share a key head. Grouped queries: `queries` queries read one state.

    Attributes:
      keys: key heads h.
      values: states per key head r.
      queries: query heads per key head x; 1 when values > 1.
    """

    keys: int
    values: int
    queries: int

    @property
    def states(self) -> int:
        """Number of states, and of gates."""
        return self.keys * self.values

    @property
    def outputs(self) -> int:
        """Number of output heads."""
        return self.keys * self.values * self.queries


def heads(
    mixer: str, q: jax.Array, k: jax.Array, v: jax.Array, *, query: str = "q", key: str = "k"
) -> Heads:
    """Checks q [B, T, Hq, K], k [B, T, Hk, K], v [B, T, Hv, V] and returns their grouping.

    Args:
      mixer: the function's name, for messages.
      q, k, v: its queries, keys and values.
      query, key: what the function calls its queries and keys.

    Raises:
      ValueError: for a wrong rank, dtype, unequal B, T or K, or head counts that do not group.
    """
    rank(mixer, query, q, "B T Hq K")
    rank(mixer, key, k, "B T Hk K")
    rank(mixer, "v", v, "B T Hv V")
    if q.shape[1] == 0:
        raise ValueError(f"{mixer}: {query} must have T >= 1 tokens, got shape {list(q.shape)}")
    for name, x in ((key, k), ("v", v)):
        if x.shape[:2] != q.shape[:2]:
            raise ValueError(
                f"{mixer}: {name} must share [B, T] = {list(q.shape[:2])} with {query}, "
                f"got shape {list(x.shape)}"
            )
    if k.shape[3] != q.shape[3]:
        raise ValueError(
            f"{mixer}: {key} must have the key width of {query}, K = {q.shape[3]}, got {k.shape[3]}"
        )
    nq, nk, nv = q.shape[2], k.shape[2], v.shape[2]
    if nq == nk and nv % nk == 0:
        return Heads(nk, nv // nk, 1)
    if nk == nv and nq % nk == 0:
        return Heads(nk, 1, nq // nk)
    raise ValueError(
        f"{mixer}: heads must be equal, or v's a multiple of {query}'s and {key}'s (grouped "
        f"values), or {query}'s a multiple of {key}'s and v's (grouped queries); "
        f"got {query} {nq}, {key} {nk}, v {nv}"
    )


def state_type(mixer: str, x: object, expected: type) -> None:
    """Raises ValueError unless `x` is None or an `expected`: states of mixers are not exchanged."""
    if x is not None and not isinstance(x, expected):
        raise ValueError(
            f"{mixer}: initial_state must be a {expected.__name__}, got {type(x).__name__}"
        )


def state(mixer: str, x: jax.Array | None, expected: tuple[int, ...], axes: str) -> None:
    """Raises ValueError unless `x` is None or a floating state of the `expected` shape."""
    if x is not None:
        shape(mixer, "initial_state", x, expected, axes)
