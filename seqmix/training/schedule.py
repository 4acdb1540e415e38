# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules as a factor of the optimizer's peak learning rate.

A schedule rises linearly from 0 to 1 over the warm-up and then falls to `final`. The first step
already has a positive factor (1 / warmup of the peak), so no step is lost.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from seqmix import config

type Schedule = Callable[[jax.Array], jax.Array]


def _check_warmup(name: str, warmup: int, final: float):
    if warmup < 0:
        raise ValueError(f"{name}.warmup must be >= 0 steps, got {warmup}")
    if not 0.0 <= final <= 1.0:
        raise ValueError(f"{name}.final must be a fraction of the peak in [0, 1], got {final}")


def _after_warmup(name: str, warmup: int, steps: int, decay: Schedule) -> Schedule:
    if warmup >= steps > 0 and warmup > 0:
        raise ValueError(
            f"{name}.warmup must be shorter than the run of {steps} steps, got {warmup}"
        )
    # Shifted by one, so that step 0 trains and step `warmup - 1` reaches the peak.
    rise = optax.linear_schedule(0.0, 1.0, max(warmup, 1))
    joined = optax.join_schedules([lambda count: rise(count + 1), decay], [warmup])
    return lambda count: jnp.asarray(joined(count), jnp.float32)


@config.configurable("WarmupCosine")
@dataclasses.dataclass(frozen=True)
class WarmupCosineConfig:
    """Warm-up, then half a cosine from 1 to `final` at the last step.

    Attributes:
      warmup: steps of linear warm-up.
      final: factor at the end of the run.
    """

    warmup: int = 100
    final: float = 0.1

    def __post_init__(self):
        _check_warmup("WarmupCosine", self.warmup, self.final)

    def build(self, steps: int) -> Schedule:
        """Returns factor(step) for a run of `steps` steps; ValueError if the warm-up fills it."""
        decay = optax.cosine_decay_schedule(1.0, max(steps - self.warmup, 1), alpha=self.final)
        return _after_warmup("WarmupCosine", self.warmup, steps, decay)


@config.configurable("WarmupLinear")
@dataclasses.dataclass(frozen=True)
class WarmupLinearConfig:
    """Warm-up, then a straight line from 1 to `final` at the last step.

    Attributes:
      warmup: steps of linear warm-up.
      final: factor at the end of the run.
    """

    warmup: int = 100
    final: float = 0.0

    def __post_init__(self):
        _check_warmup("WarmupLinear", self.warmup, self.final)

    def build(self, steps: int) -> Schedule:
        """Returns factor(step) for a run of `steps` steps; ValueError if the warm-up fills it."""
        decay = optax.linear_schedule(1.0, self.final, max(steps - self.warmup, 1))
        return _after_warmup("WarmupLinear", self.warmup, steps, decay)


@config.configurable("WSD")
@dataclasses.dataclass(frozen=True)
class WSDConfig:
    """Warm-up, stable, decay (arXiv:2404.06395): the peak is held for most of the run.

    Attributes:
      warmup: steps of linear warm-up.
      decay: fraction of the run spent decaying, in (0, 1].
      final: factor at the end of the run.
      shape: "linear", or "sqrt" for 1 - sqrt(progress) (arXiv:2405.18392).
    """

    warmup: int = 100
    decay: float = 0.2
    final: float = 0.0
    shape: str = "linear"

    def __post_init__(self):
        _check_warmup("WSD", self.warmup, self.final)
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(f"WSD.decay must be a fraction of the run in (0, 1], got {self.decay}")
        if self.shape not in ("linear", "sqrt"):
            raise ValueError(f"WSD.shape must be 'linear' or 'sqrt', got {self.shape!r}")

    def build(self, steps: int) -> Schedule:
        """Returns factor(step) for a run of `steps` steps; ValueError if the warm-up fills it."""
        length = max(1, min(round(self.decay * steps), steps - self.warmup))
        stable = steps - self.warmup - length

        def after(count):
            progress = jnp.clip((count - stable) / length, 0.0, 1.0)
            progress = jnp.sqrt(progress) if self.shape == "sqrt" else progress
            return 1.0 - (1.0 - self.final) * progress

        return _after_warmup("WSD", self.warmup, steps, after)
