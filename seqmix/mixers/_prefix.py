# SPDX-License-Identifier: Apache-2.0
"""Prefix scans of cheap elements whose program does not grow with T."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 256


def prefix_scan(combine: Callable[[Any, Any], Any], elements: Any) -> Any:
    """`lax.associative_scan` over the time axis, in blocks that a `lax.scan` joins.

    Args:
      combine: an associative function of two pytrees of arrays, which may broadcast over time.
      elements: a pytree of [B, T, ...] arrays.

    Returns:
      The same pytree of inclusive prefixes.
    """
    time = jax.tree.leaves(elements)[0].shape[1]
    if time <= BLOCK:
        return lax.associative_scan(combine, elements, axis=1)
    count = -(-time // BLOCK)

    def split(x):
        pad = [(0, 0), (0, count * BLOCK - time)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, pad, mode="edge").reshape(x.shape[0], count, BLOCK, *x.shape[2:])

    inside = lax.associative_scan(combine, jax.tree.map(split, elements), axis=2)
    first = jax.tree.map(lambda x: x[:, 0, -1:], inside)
    later = jax.tree.map(lambda x: jnp.moveaxis(x[:, 1:], 1, 0), inside)

    def step(carry, block):
        joined = combine(carry, block)
        return jax.tree.map(lambda x: x[:, -1:], joined), joined

    _, joined = lax.scan(step, first, later)

    def join(x, rest):
        whole = jnp.concatenate([x[:, :1], jnp.moveaxis(rest, 0, 1)], axis=1)
        return whole.reshape(x.shape[0], count * BLOCK, *x.shape[3:])[:, :time]

    return jax.tree.map(join, inside, joined)
