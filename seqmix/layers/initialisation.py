# SPDX-License-Identifier: Apache-2.0
"""Initial decay rates and time steps of layers with data-dependent decay (Mamba's)."""

import math

import jax
import jax.numpy as jnp


def decay_rates(key: jax.Array, heads: int, low: float, high: float) -> jax.Array:
    """A_log [heads] float32 with exp(A_log) uniform in (low, high)."""
    return jnp.log(jax.random.uniform(key, (heads,), jnp.float32, low, high))


def time_step_bias(
    key: jax.Array,
    heads: int,
    low: float = 1e-3,
    high: float = 1e-1,
    floor: float = 1e-4,
) -> jax.Array:
    """dt_bias [heads] float32 with softplus(dt_bias) log-uniform in [low, high], at least floor."""
    steps = jnp.exp(jax.random.uniform(key, (heads,), jnp.float32, math.log(low), math.log(high)))
    steps = jnp.maximum(steps, floor)
    # The inverse of softplus, in the form that does not overflow: x + log(1 - exp(-x)).
    return steps + jnp.log(-jnp.expm1(-steps))
