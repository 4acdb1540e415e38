# SPDX-License-Identifier: Apache-2.0
"""Linear attention (arXiv 2006.16236) with the feature maps of the field."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers.linear import Linear
from seqmix.layers.norms import RMSNorm
from seqmix.layers.registry import LayerInfo, register
from seqmix.mixers import feature_maps

FeatureMap = Literal["elu", "relu", "identity", "hedgehog", "dpfp"]
_DPFP_ORDER = 4


@configs.configurable("LinearAttention")
@dataclasses.dataclass(frozen=True)
class LinearAttentionConfig:
    """Settings of `LinearAttention`.

    Attributes:
      heads: default: as many as fill the model width.
      head_width: width of queries, keys and values of a head.
      feature_map: 'elu' (elu(x) + 1), 'relu', 'identity', 'hedgehog' (a softmax over learned
        projections, arXiv 2402.04347) or 'dpfp' (arXiv 2102.11174, order 4).
      normalize: divide by the sum of weights, which 'identity' does not keep positive. Otherwise
        each head's output goes through an RMS norm instead.
      epsilon: added to the sum of weights, or of the RMS norm.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.linear_attention`.
    """

    heads: int | None = None
    head_width: int = 64
    feature_map: FeatureMap = "elu"
    normalize: bool = True
    epsilon: float = 1e-6
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "head_width", "chunk_size")
        checks.positive(self, "epsilon")
        if self.feature_map == "identity" and self.normalize:
            raise ValueError(
                "LinearAttention.normalize must be False with feature_map = 'identity', whose "
                "weights can sum to zero"
            )
        if self.feature_map == "dpfp" and 2 * self.head_width <= _DPFP_ORDER:
            raise ValueError(
                f"LinearAttention.head_width must be > {_DPFP_ORDER // 2} with feature_map = "
                f"'dpfp', got {self.head_width}"
            )

    def features(self) -> int:
        """Features of a token in one head."""
        factor = {"hedgehog": 2, "dpfp": 2 * _DPFP_ORDER}.get(self.feature_map, 1)
        return factor * self.head_width

    def state_shape(self, width: int) -> tuple[int, int, int]:
        """[H, F, V], one column more for the normaliser."""
        columns = self.head_width + 1 if self.normalize else self.head_width
        return checks.derived_heads(self, width), self.features(), columns

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2; the same at every context.

        Counts the projections, Hedgehog's included, and the two products of the recurrence (write,
        read out), not the extra products of its chunked form.
        """
        heads, features, columns = self.state_shape(width)
        inner = heads * self.head_width
        projections = 8 * width * inner
        if self.feature_map == "hedgehog":
            projections += 4 * inner * self.head_width
        return projections + 4 * heads * features * columns

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache; the same at every context."""
        return checks.array_bytes(self.state_shape(width), jnp.float32)


@register("linear_attention", LinearAttentionConfig)
class LinearAttention(nnx.Module):
    """y = W_o o with o from `seqmix.mixers.linear_attention`; q, k, v = x W.

    Hedgehog's projections, one per head for queries and keys each, start as the identity.
    """

    def __init__(
        self,
        config: LinearAttentionConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        heads = checks.derived_heads(config, width)
        inner = heads * config.head_width
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.query = Linear(width, inner, **common)
        self.key = Linear(width, inner, **common)
        self.value = Linear(width, inner, **common)
        self.output = Linear(inner, width, scale=layer.residual_scale, **common)

        def identity() -> nnx.Param | None:
            if config.feature_map != "hedgehog":
                return None
            eye = jnp.eye(config.head_width, dtype=param_dtype)
            return nnx.Param(jnp.broadcast_to(eye, (heads, *eye.shape)))

        self.query_map, self.key_map = identity(), identity()
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        self.norm = (
            None
            if config.normalize
            else RMSNorm(config.head_width, epsilon=config.epsilon, **dtypes)
        )
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
            project(x).reshape(batch, time, -1, config.head_width)
            for project in (self.query, self.key, self.value)
        )
        name = config.feature_map
        if name == "hedgehog":
            query = feature_maps.hedgehog(query, self.query_map[...])
            key = feature_maps.hedgehog(key, self.key_map[...])
        elif name == "dpfp":
            query, key = (feature_maps.dpfp(z, _DPFP_ORDER) for z in (query, key))
        out, state = mixers.linear_attention(
            query,
            key,
            value,
            feature_map="identity" if name in ("hedgehog", "dpfp") else name,
            normalize=config.normalize,
            eps=config.epsilon,
            initial_state=cache,
            segment_ids=segment_ids,
            chunk_size=config.chunk_size,
            impl=config.impl,
        )
        if self.norm is not None:
            out = self.norm(out)
        y = self.output(out.reshape(batch, time, -1))
        return y, None if cache is None else state

    def init_cache(self, batch: int, capacity: int) -> jax.Array:
        """An empty state [B, H, F, V (+ 1)]; its size does not depend on ``capacity``."""
        return jnp.zeros((batch, *self.state_shape), jnp.float32)
