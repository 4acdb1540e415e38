# SPDX-License-Identifier: Apache-2.0
"""SwiGLU feed-forward part of a block (arXiv 2002.05202)."""

import dataclasses
from typing import Any

import jax
from flax import nnx

from seqmix import config as configs
from seqmix.layers import LayerInfo, Linear
from seqmix.layers.checks import at_least


@configs.configurable("FeedForward")
@dataclasses.dataclass(frozen=True)
class FeedForwardConfig:
    """Settings of `FeedForward`.

    Attributes:
      hidden: hidden width; default 8/3 of the model width, rounded up to a multiple of
        ``multiple_of``: as many parameters as a plain two-matrix network four times as wide.
      multiple_of: see ``hidden``; multiples of 64 suit matrix units.
    """

    hidden: int | None = None
    multiple_of: int = 64

    def __post_init__(self):
        at_least(self, 1, "hidden", "multiple_of")

    def hidden_width(self, width: int) -> int:
        """Hidden width at this model width."""
        if self.hidden is not None:
            return self.hidden
        return -(-8 * width // (3 * self.multiple_of)) * self.multiple_of

    def flops_per_token(self, width: int) -> float:
        """Forward FLOPs per token of the three products, multiply-add = 2."""
        return 6 * width * self.hidden_width(width)


class FeedForward(nnx.Module):
    """y = (silu(x W_gate) * x W_up) W_down, no biases."""

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
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.gate = Linear(width, hidden, **common)
        self.up = Linear(width, hidden, **common)
        self.down = Linear(hidden, width, scale=layer.residual_scale, **common)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] to [..., D] in the compute dtype."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
