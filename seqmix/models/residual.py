# SPDX-License-Identifier: Apache-2.0
"""How a mixer or feed-forward part joins the residual stream, and the norms on the way."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix.layers import GroupNorm, RMSNorm
from seqmix.layers.checks import positive

NormName = Literal["rms", "zero_centred", "layer"]
NormPlace = Literal["pre", "post", "both", "stream"]


@configs.configurable("Residual")
@dataclasses.dataclass(frozen=True)
class ResidualConfig:
    """How a part f joins the residual stream x.

    | norm | new x |
    |---|---|
    | 'pre' | alpha x + beta f(norm(x)) |
    | 'post' | alpha x + beta norm(f(x)), OLMo 2 (arXiv 2501.00656) |
    | 'both' | alpha x + beta norm'(f(norm(x))), with norms of their own, Gemma 2 |
    | 'stream' | alpha z + beta f(z) with z = norm(x), MiniMax-01 (arXiv 2501.08313) |

    `HybridLM.residual` is that of every part without a scope; a scope of the pattern has its own::

        HybridLM.pattern = '3 gated_delta_net, post/attention + post/feed_forward'
        post/Residual.norm = 'post'

    Attributes:
      norm: where the norm stands.
      alpha: factor of the stream.
      beta: factor of the part.
    """

    norm: NormPlace = "pre"
    alpha: float = 1.0
    beta: float = 1.0

    def __post_init__(self):
        positive(self, "alpha", "beta")

    @property
    def norms_input(self) -> bool:
        """Whether a norm stands before the part."""
        return self.norm != "post"

    @property
    def norms_output(self) -> bool:
        """Whether a norm stands after the part."""
        return self.norm in ("post", "both")

    def enter(
        self, x: jax.Array, norm: nnx.Module | None, dtype: Any, shift: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """What stays in the stream and what the part reads.

        Args:
          x: residual stream [..., D].
          norm: the norm before the part, None where `norms_input` is False.
          dtype: compute dtype of the part.
          shift: added to what the part reads, before its norm, and not to the stream; not with
            'stream'.

        Returns:
          [..., D] in the stream's dtype, [..., D] in ``dtype``.
        """
        y = x if shift is None else x + shift.astype(x.dtype)
        y = y.astype(dtype) if norm is None else norm(y)
        return (y.astype(x.dtype) if self.norm == "stream" else x), y

    def leave(self, x: jax.Array, y: jax.Array, norm: nnx.Module | None) -> jax.Array:
        """The stream after the part.

        Args:
          x: what `enter` gave for the stream, [..., D].
          y: output of the part, [..., D].
          norm: the norm after the part, None where `norms_output` is False.
        """
        y = (y if norm is None else norm(y)).astype(x.dtype)
        return _times(self.alpha, x) + _times(self.beta, y)


def _times(factor: float, x: jax.Array) -> jax.Array:
    return x if factor == 1.0 else factor * x


def make_norm(
    name: NormName, width: int, *, epsilon: float, dtype: Any, param_dtype: Any
) -> RMSNorm | GroupNorm:
    """A norm over the last axis, float32 inside.

    Args:
      name: 'rms'; 'zero_centred' (RMS, times 1 + scale with a scale that starts at zero: Gemma,
        Qwen3-Next); 'layer' (layer norm with scale and bias: RWKV).
      width: size of that axis.
      epsilon: added to the mean square.
      dtype: of the result.
      param_dtype: of scale and bias.
    """
    dtypes = {"dtype": jnp.dtype(dtype), "param_dtype": param_dtype}
    if name == "layer":
        return GroupNorm(width, 1, epsilon=epsilon, **dtypes)
    return RMSNorm(width, epsilon=epsilon, zero_centred=name == "zero_centred", **dtypes)
