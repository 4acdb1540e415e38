# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics of a layer's own, which training adds to the model's."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Auxiliary(NamedTuple):
    """What layers report of a batch, as sums over its real tokens.

    Sums of micro-batches, rows and layers add up; the trainer divides by the number of real tokens.
    A loss that is no sum over tokens (the balance of experts) is multiplied by their number.

    Attributes:
      loss: float32 scalar, what the layers add to the objective, their coefficients included.
      metrics: float32 scalars by name, for the log; names have a dot ('dsa.index_loss').
    """

    loss: jax.Array
    metrics: dict[str, jax.Array]

    def add(self, other: "Auxiliary") -> "Auxiliary":
        """The sums with those of a layer that may report fewer metrics."""
        changed = {name: self.metrics[name] + value for name, value in other.metrics.items()}
        return Auxiliary(self.loss + other.loss, self.metrics | changed)


def no_auxiliary(names: Iterable[str]) -> Auxiliary:
    """Zero sums of these metrics."""
    return Auxiliary(jnp.zeros((), jnp.float32), {n: jnp.zeros((), jnp.float32) for n in names})


def means_of(module: Any) -> tuple[str, ...]:
    """Of these metrics, those to be averaged over the layers that report them; others add up."""
    return getattr(module, "auxiliary_means", ())


def names_of(module: Any) -> tuple[str, ...]:
    """Metrics that a layer reports; empty where it has no losses of its own."""
    return getattr(module, "auxiliary_names", ())
