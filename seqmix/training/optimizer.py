# SPDX-License-Identifier: Apache-2.0
"""Optimizers through optax. Each is built at learning rate 1; the step multiplies by the schedule.

Keeping the learning rate out of the optimizer's state ties it to the trainer's step count, so that
a skipped (non-finite) step neither stalls the schedule nor changes the optimizer. Parameters are a
flat dict {name: array}; the masks come from parameter types, so stacking does not matter.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import optax
from optax import contrib

from seqmix import config

type Mask = Mapping[str, bool]


def _check(name: str, betas: Mapping[str, float], positive: Mapping[str, float | None]):
    for field, value in betas.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name}.{field} must be in [0, 1), got {value}")
    for field, value in positive.items():
        if value is not None and value <= 0.0:
            raise ValueError(f"{name}.{field} must be > 0, got {value}")


def _check_decay(name: str, weight_decay: float):
    if weight_decay < 0.0:
        raise ValueError(f"{name}.weight_decay must be >= 0, got {weight_decay}")


def _clip(norm: float | None) -> optax.GradientTransformation:
    return optax.identity() if norm is None else optax.clip_by_global_norm(norm)


@config.configurable("AdamW")
@dataclasses.dataclass(frozen=True)
class AdamWConfig:
    """AdamW (arXiv:1711.05101), `optax.adamw`.

    Attributes:
      learning_rate: peak; the schedule multiplies it.
      beta1: decay of the first moment.
      beta2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: decoupled, times the learning rate, on decaying parameters only.
      clip_norm: largest global gradient norm, None for no clipping.
    """

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0

    def __post_init__(self):
        _check(
            "AdamW",
            {"beta1": self.beta1, "beta2": self.beta2},
            {"learning_rate": self.learning_rate, "eps": self.eps, "clip_norm": self.clip_norm},
        )
        _check_decay("AdamW", self.weight_decay)

    def build(self, decay: Mask, muon: Mask) -> optax.GradientTransformation:
        """Returns the transformation at learning rate 1, for {name: array} parameters.

        Args:
          decay: whether a parameter gets weight decay, by name.
          muon: unused by AdamW; every optimizer takes the same two masks.
        """
        del muon
        return optax.chain(
            _clip(self.clip_norm),
            optax.adamw(
                1.0,
                b1=self.beta1,
                b2=self.beta2,
                eps=self.eps,
                weight_decay=self.weight_decay,
                mask=dict(decay),
            ),
        )


@config.configurable("Muon")
@dataclasses.dataclass(frozen=True)
class MuonConfig:
    """Muon for hidden matrices, Adam for the rest (`optax.contrib`), with decoupled weight decay.

    Stacked parameters [periods, in, out] are orthogonalised slice by slice: the matrix is the last
    two axes. Updates are scaled to root mean square `rms` whatever the shape (arXiv:2502.16982,
    equation 4), so that AdamW's learning rate and weight decay carry over.

    Attributes:
      learning_rate: peak for the matrices; the schedule multiplies it.
      adam_learning_rate: peak for embeddings, head, norms, gates and convolutions; None for the
        same.
      beta: momentum of Muon (Nesterov).
      iterations: Newton-Schulz iterations.
      rms: root mean square of an update at learning rate 1.
      adam_beta1: decay of Adam's first moment.
      adam_beta2: decay of Adam's second moment.
      eps: Adam's and the normalisation's epsilon.
      weight_decay: times the learning rate, on decaying parameters only.
      clip_norm: largest global gradient norm, None for no clipping.
    """

    learning_rate: float = 1e-3
    adam_learning_rate: float | None = None
    beta: float = 0.95
    iterations: int = 5
    rms: float = 0.2
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0

    def __post_init__(self):
        _check(
            "Muon",
            {"beta": self.beta, "adam_beta1": self.adam_beta1, "adam_beta2": self.adam_beta2},
            {
                "learning_rate": self.learning_rate,
                "adam_learning_rate": self.adam_learning_rate,
                "rms": self.rms,
                "eps": self.eps,
                "clip_norm": self.clip_norm,
            },
        )
        _check_decay("Muon", self.weight_decay)
        if self.iterations < 1:
            raise ValueError(f"Muon.iterations must be >= 1, got {self.iterations}")

    def build(self, decay: Mask, muon: Mask) -> optax.GradientTransformation:
        """Returns the transformation at learning rate 1, for {name: array} parameters.

        Args:
          decay: whether a parameter gets weight decay, by name.
          muon: whether a parameter's last two axes are a hidden matrix, by name.
        """
        ratio = 1.0
        if self.adam_learning_rate is not None:
            ratio = self.adam_learning_rate / self.learning_rate
        matrices = optax.chain(
            contrib.scale_by_muon(
                ns_steps=self.iterations,
                beta=self.beta,
                eps=self.eps,
                weight_dimension_numbers=_last_two_axes,
            ),
            optax.stateless(lambda updates, _: _scale_to_rms(updates, self.rms)),
        )
        rest = optax.chain(
            optax.scale_by_adam(b1=self.adam_beta1, b2=self.adam_beta2, eps=self.eps),
            optax.scale(ratio),
        )
        labels = {name: "muon" if chosen else "adam" for name, chosen in muon.items()}
        return optax.chain(
            _clip(self.clip_norm),
            optax.partition({"muon": matrices, "adam": rest}, labels),
            optax.add_decayed_weights(self.weight_decay, mask=dict(decay)),
            optax.scale(-1.0),
        )


def _last_two_axes(tree: Any) -> Any:
    # Leaves only: the entries that Adam owns are masked nodes without leaves.
    return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(-2, -1), tree)


def _scale_to_rms(updates: Any, rms: float) -> Any:
    # An orthogonal [m, n] matrix has root mean square 1 / sqrt(max(m, n)).
    return jax.tree.map(lambda x: x * (rms * max(x.shape[-2:]) ** 0.5), updates)
