# SPDX-License-Identifier: Apache-2.0
"""Dense feed-forward part of a block: SwiGLU and its relatives (arXiv 2002.05202)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix.layers import LayerInfo, Linear
from seqmix.layers.checks import at_least, positive
from seqmix.layers.linear import multiplied

ActivationName = Literal["silu", "gelu", "gelu_tanh", "relu2"]

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def activation(name: ActivationName) -> Callable[[jax.Array], jax.Array]:
    """The function of that name: SiLU, GELU by the error function or by tanh, squared ReLU."""
    return _ACTIVATIONS[name]


def default_hidden(width: int, multiple_of: int, *, gated: bool) -> int:
    """Hidden width with the parameters of two matrices four times as wide, rounded up."""
    factor, matrices = (8, 3) if gated else (8, 2)
    return -(-factor * width // (matrices * multiple_of)) * multiple_of


@configs.configurable("FeedForward")
@dataclasses.dataclass(frozen=True)
class FeedForwardConfig:
    """Settings of `FeedForward`.

    Attributes:
      hidden: hidden width; default 8/3 of the model width (4 times it without a gate), rounded up
        to a multiple of ``multiple_of``: as many parameters as a plain two-matrix network four
        times as wide.
      multiple_of: see ``hidden``; multiples of 64 suit matrix units.
      activation: 'silu', 'gelu' (by the error function), 'gelu_tanh' or 'relu2' (squared ReLU).
      gated: the activation gates a second projection (SwiGLU, GeGLU); otherwise it is applied to
        the only one, as in Nemotron-H with 'relu2'.
      bias: biases on all projections.
      gate_multiplier: factor of the gate before its activation (Falcon-H1).
      down_multiplier: factor of the result (Falcon-H1).
    """

    hidden: int | None = None
    multiple_of: int = 64
    activation: ActivationName = "silu"
    gated: bool = True
    bias: bool = False
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0

    def __post_init__(self):
        at_least(self, 1, "hidden", "multiple_of")
        positive(self, "gate_multiplier", "down_multiplier")
        if self.gate_multiplier != 1.0 and not self.gated:
            raise ValueError(
                f"FeedForward.gate_multiplier = {self.gate_multiplier} needs a gate, "
                "got gated = False"
            )

    def hidden_width(self, width: int) -> int:
        """Hidden width at this model width."""
        if self.hidden is not None:
            return self.hidden
        return default_hidden(width, self.multiple_of, gated=self.gated)

    def flops_per_token(self, width: int) -> float:
        """Forward FLOPs per token of the products, multiply-add = 2."""
        return (6 if self.gated else 4) * width * self.hidden_width(width)

    def inactive_parameters(self, width: int) -> int:
        """Parameters that a token does not use: none."""
        del width
        return 0


class FeedForward(nnx.Module):
    """y = (activation(x W_gate) * x W_up) W_down; without a gate y = activation(x W_up) W_down.

    Falcon-H1 multiplies x W_gate and y, biases included, by constants.
    """

    def __init__(
        self,
        config: FeedForwardConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        hidden = config.hidden_width(width)
        common = {"bias": config.bias, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.gate = Linear(width, hidden, **common) if config.gated else None
        self.up = Linear(width, hidden, **common)
        self.down = Linear(hidden, width, scale=layer.residual_scale, **common)
        self.config = config

    def __call__(
        self, x: jax.Array, *, adapter: Callable[[jax.Array], jax.Array] | None = None
    ) -> jax.Array:
        """[..., D] to [..., D] in the compute dtype.

        Args:
          x: [..., D].
          adapter: function of x that is added to the projections, gate and up side by side
            [..., 2 F], up alone [..., F] without a gate: what tells the uses of shared weights
            apart.
        """
        config = self.config
        function = activation(config.activation)
        hidden = [self.up(x)] if self.gate is None else [self.gate(x), self.up(x)]
        if adapter is not None:
            added = jnp.split(adapter(x), len(hidden), axis=-1)
            hidden = [y + z for y, z in zip(hidden, added, strict=True)]
        if self.gate is None:
            y = self.down(function(hidden[0]))
        else:
            gate = multiplied(hidden[0], config.gate_multiplier)
            y = self.down(function(gate) * hidden[1])
        return multiplied(y, config.down_multiplier)
