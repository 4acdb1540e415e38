# SPDX-License-Identifier: Apache-2.0
"""Based (arXiv 2402.18668): linear attention with a second-order Taylor feature map."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers.linear import Linear
from seqmix.layers.registry import LayerInfo, register


@configs.configurable("Based")
@dataclasses.dataclass(frozen=True)
class BasedConfig:
    """Settings of `Based`.

    Attributes:
      heads: default: as many as fill the model width.
      feature_width: width K of queries and keys of a head; 1 + K + K (K + 1) / 2 rows of state.
      head_width: width of values of a head.
      epsilon: added to the sum of weights.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.linear_attention`.
    """

    heads: int | None = None
    feature_width: int = 16
    head_width: int = 64
    epsilon: float = 1e-12
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "feature_width", "head_width", "chunk_size")
        checks.positive(self, "epsilon")

    def state_shape(self, width: int) -> tuple[int, int, int]:
        """[H, F, V + 1]."""
        features = 1 + self.feature_width + self.feature_width * (self.feature_width + 1) // 2
        return checks.derived_heads(self, width), features, self.head_width + 1

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2; the same at every context.

        Counts the projections and the two products of the recurrence (write, read out), not the
        extra products of its chunked form.
        """
        heads, features, columns = self.state_shape(width)
        projections = 4 * width * heads * (self.feature_width + self.head_width)
        return projections + 4 * heads * features * columns

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache; the same at every context."""
        return checks.array_bytes(self.state_shape(width), jnp.float32)


@register("based", BasedConfig)
class Based(nnx.Module):
    """y = W_o o, weights 1 + s + s^2 / 2 with s = q . k / sqrt(K), divided by their sum.

    o comes from `seqmix.mixers.linear_attention` with feature_map='taylor'. The paper alternates
    this layer with attention over a short window.
    """

    def __init__(
        self,
        config: BasedConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        heads, _, _ = config.state_shape(width)
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.query = Linear(width, heads * config.feature_width, **common)
        self.key = Linear(width, heads * config.feature_width, **common)
        self.value = Linear(width, heads * config.head_width, **common)
        self.output = Linear(heads * config.head_width, width, scale=layer.residual_scale, **common)
        self.config = config
        self.state_shape = config.state_shape(width)

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Mixes over time.

        Args:
          x: [B, T, D].
          segment_ids: [B, T] int32, 0 = padding; None: all one segment.
          positions: the contract's; the state itself carries the order, so they play no part.
          cache: what `init_cache` or an earlier call gave; None: no cache.

        Returns:
          y [B, T, D] in the compute dtype, and the cache after these tokens (None without one).
        """
        config = self.config
        batch, time, _ = x.shape
        query, key, value = (
            project(x).reshape(batch, time, self.state_shape[0], -1)
            for project in (self.query, self.key, self.value)
        )
        out, state = mixers.linear_attention(
            query,
            key,
            value,
            feature_map="taylor",
            eps=config.epsilon,
            initial_state=cache,
            segment_ids=segment_ids,
            chunk_size=config.chunk_size,
            impl=config.impl,
        )
        y = self.output(out.reshape(batch, time, -1))
        return y, None if cache is None else state

    def init_cache(self, batch: int, capacity: int) -> jax.Array:
        """An empty state [B, H, F, V + 1]; its size does not depend on ``capacity``."""
        return jnp.zeros((batch, *self.state_shape), jnp.float32)
