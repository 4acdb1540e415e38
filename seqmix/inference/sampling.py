# SPDX-License-Identifier: Apache-2.0
"""Choosing the next token from logits: pure functions on [B, vocabulary].

The filters compose, each sees the distribution that the ones before it left::

    logits = apply_temperature(logits, 0.8)
    logits = min_p(top_p(top_k(logits, 50), 0.95), 0.05)

which is also the order of `sample` (and of `transformers`). A filtered token has logit -inf; the
likeliest token is never filtered. Ties go to the lower id, so that every support is exact.
"""

import dataclasses
import math
import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Logits = Float[Array, "B vocabulary"]
Scalar = float | Float[Array, ""]
Count = int | Int[Array, ""]

SEED_LIMIT = 2**32
# Other generators draw differently under vmap, so that a row would depend on its neighbours.
_GENERATOR = "threefry2x32"


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How to choose tokens.

    Attributes:
      temperature: divides the logits; 0 takes the likeliest token, whatever the filters.
      top_k: keep the k likeliest tokens; None for all.
      top_p: keep the likeliest tokens until their probabilities sum to top_p (arXiv 1904.09751);
        None for all.
      min_p: keep tokens of at least min_p times the likeliest one's probability
        (arXiv 2407.01082); None for all.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self):
        _check("temperature", self.temperature, "a finite number >= 0", lambda x: x >= 0)
        if self.top_k is not None:
            integer = isinstance(self.top_k, numbers.Integral)
            _check("top_k", self.top_k, "an integer >= 1", lambda x: integer and x >= 1)
        if self.top_p is not None:
            _check("top_p", self.top_p, "a number in (0, 1]", lambda x: 0 < x <= 1)
        if self.min_p is not None:
            _check("min_p", self.min_p, "a number in [0, 1]", lambda x: 0 <= x <= 1)

    def arrays(self) -> "SamplingArrays":
        """The settings as arguments of a jitted function: new values do not recompile it."""

        def scalar(value, dtype=np.float32):
            return None if value is None else np.asarray(value, dtype)

        if self.temperature == 0:
            return SamplingArrays(None, None, None, None)
        # An id is an int32, so a larger k keeps everything as this one does.
        k = None if self.top_k is None else min(self.top_k, np.iinfo(np.int32).max)
        return SamplingArrays(
            scalar(self.temperature), scalar(k, np.int32), scalar(self.top_p), scalar(self.min_p)
        )


class SamplingArrays(NamedTuple):
    """`SamplingConfig` as scalars; temperature None is greedy, another None leaves a filter out."""

    temperature: Float[Array, ""] | None
    top_k: Int[Array, ""] | None
    top_p: Float[Array, ""] | None
    min_p: Float[Array, ""] | None


def greedy(logits: Logits) -> Int[Array, " B"]:
    """The likeliest token of each row, the lower id of a tie, int32."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def apply_temperature(logits: Logits, temperature: Scalar) -> Logits:
    """Divides by a temperature > 0, after moving the largest logit to 0 so nothing overflows."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    return (logits - top) / temperature


def top_k(logits: Logits, k: Count) -> Logits:
    """Keeps exactly the k likeliest tokens (all, if there are fewer)."""
    return jnp.where(_ranks(logits) < k, logits, -jnp.inf)


def top_p(logits: Logits, p: Scalar) -> Logits:
    """Keeps the fewest likeliest tokens whose probabilities sum to p or more."""
    order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
    weights = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
    before = jnp.cumsum(weights, axis=-1) - weights
    # The first is kept whatever rounding does to p; p = 1 keeps all though a sum may round to 1.
    keep = (before < p) | (jnp.asarray(p) >= 1) | (jnp.arange(logits.shape[-1]) == 0)
    keep = jnp.put_along_axis(jnp.zeros_like(keep), order, keep, axis=-1, inplace=False)
    return jnp.where(keep, logits, -jnp.inf)


def min_p(logits: Logits, p: Scalar) -> Logits:
    """Keeps tokens of at least p times the probability of the likeliest."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(logits - top >= jnp.log(p), logits, -jnp.inf)


def filter_logits(logits: Logits, settings: SamplingArrays) -> Logits:
    """Applies temperature, top-k, top-p and min-p, in this order; not for greedy settings."""
    logits = apply_temperature(logits, settings.temperature)
    if settings.top_k is not None:
        logits = top_k(logits, settings.top_k)
    if settings.top_p is not None:
        logits = top_p(logits, settings.top_p)
    if settings.min_p is not None:
        logits = min_p(logits, settings.min_p)
    return logits


def sample(
    keys: Array, logits: Logits, settings: SamplingArrays | SamplingConfig
) -> Int[Array, " B"]:
    """Draws one token per row.

    Args:
      keys: [B] random keys from `row_keys`, one a row, so that a row's token does not depend on
        the other rows.
      logits: [B, vocabulary] float.
      settings: how to choose.

    Returns:
      [B] int32 token ids.
    """
    if isinstance(settings, SamplingConfig):
        settings = settings.arrays()
    if settings.temperature is None:
        return greedy(logits)
    draw = jax.vmap(jax.random.categorical)
    return draw(keys, filter_logits(logits, settings)).astype(jnp.int32)


def row_keys(seed: int | list[int] | tuple[int, ...], batch: int) -> Array:
    """Random keys [B], one a row.

    Args:
      seed: one seed for the batch, which gives every row a key of its own; or one a row: rows of
        equal seeds then draw alike, alone or in any batch.
      batch: B.

    Raises:
      ValueError: a seed is not an integer in [0, 2**32), or there is not one a row.
    """
    seeds = seed if isinstance(seed, list | tuple) else [seed]
    for value in seeds:
        integer = isinstance(value, numbers.Integral)
        rule = f"an integer in [0, {SEED_LIMIT})"
        _check("seed", value, rule, lambda x, integer=integer: integer and 0 <= x < SEED_LIMIT)
    if isinstance(seed, list | tuple):
        if len(seed) != batch:
            raise ValueError(f"seed must be one integer or one a row: {batch}, got {len(seed)}")
        rows = np.zeros(batch, np.uint32)
    else:
        seeds, rows = seeds * batch, np.arange(batch, dtype=np.uint32)
    return _keys(np.asarray(seeds, np.uint32), rows)


@jax.jit
def _keys(seeds, rows):
    def one(seed, row):
        return jax.random.fold_in(jax.random.key(seed, impl=_GENERATOR), row)

    return jax.vmap(one)(seeds, rows)


def _ranks(logits: Logits) -> Int[Array, "B vocabulary"]:
    """Place of each token when sorted from the likeliest down, ties by id."""
    order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
    places = jnp.broadcast_to(jnp.arange(logits.shape[-1]), logits.shape)
    return jnp.put_along_axis(jnp.zeros_like(order), order, places, axis=-1, inplace=False)


def _check(name, value, rule, valid):
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not valid(value):
        raise ValueError(f"{name} must be {rule}, got {value!r}")
