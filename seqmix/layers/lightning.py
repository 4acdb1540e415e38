# SPDX-License-Identifier: Apache-2.0
"""Lightning attention as MiniMax-01 (arXiv 2501.08313) uses it."""

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
from seqmix.layers.parameters import Buffer
from seqmix.layers.registry import LayerInfo, register


@configs.configurable("Lightning")
@dataclasses.dataclass(frozen=True)
class LightningConfig:
    """Settings of `Lightning`.

    Attributes:
      heads: default: as many as fill the model width.
      head_width: width of queries, keys and values of a head.
      slopes: decays of the heads before the factor of the layer: 'alibi' as
        `seqmix.mixers.alibi_slopes`, 'geometric' for 2^(-8 (h + 1) / H) whatever the number of
        heads (`transformers`). They differ where it is no power of two.
      norm_epsilon: epsilon of the norm over all heads.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.lightning_attention`.
    """

    heads: int | None = None
    head_width: int = 64
    slopes: Literal["alibi", "geometric"] = "alibi"
    norm_epsilon: float = 1e-5
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "head_width", "chunk_size")
        checks.positive(self, "norm_epsilon")

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2; the same at every context.

        Counts the projections and the two products of the recurrence (write, read out), not the
        extra products of its chunked form.
        """
        inner = checks.derived_heads(self, width) * self.head_width
        return 10 * width * inner + 4 * inner * self.head_width

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache; the same at every context."""
        heads = checks.derived_heads(self, width)
        return checks.array_bytes((heads, self.head_width, self.head_width), jnp.float32)


@register("lightning", LightningConfig)
class Lightning(nnx.Module):
    """y = W_o (sigmoid(x W_g) * rms_norm(o)), q, k, v = silu(x W), the norm over all heads.

    o comes from `seqmix.mixers.lightning_attention`. Head h of layer l of L decays at
    ``slope_h * (1 - l / (L - 1 + 1e-5) + 1e-5)``: fast at the bottom, hardly at the top.
    """

    def __init__(
        self,
        config: LightningConfig,
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
        self.gate = Linear(width, inner, **common)
        self.output = Linear(inner, width, scale=layer.residual_scale, **common)
        self.norm = RMSNorm(
            inner, epsilon=config.norm_epsilon, dtype=dtype, param_dtype=param_dtype
        )
        factor = 1 - layer.below / (layer.count - 1 + 1e-5) + 1e-5
        if config.slopes == "alibi":
            slopes = mixers.alibi_slopes(heads)
        else:
            slopes = jnp.exp2(-8.0 * jnp.arange(1, heads + 1, dtype=jnp.float32) / heads)
        self.slopes = Buffer(jnp.asarray(slopes * factor, jnp.float32))
        self.config = config
        self.heads = heads

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
            jax.nn.silu(project(x)).reshape(batch, time, self.heads, config.head_width)
            for project in (self.query, self.key, self.value)
        )
        out, state = mixers.lightning_attention(
            query,
            key,
            value,
            self.slopes[...],
            initial_state=cache,
            segment_ids=segment_ids,
            chunk_size=config.chunk_size,
            impl=config.impl,
        )
        gate = jax.nn.sigmoid(self.gate(x))
        y = self.output(gate * self.norm(out.reshape(batch, time, -1)))
        return y, None if cache is None else state

    def init_cache(self, batch: int, capacity: int) -> jax.Array:
        """An empty state [B, H, K, V]; its size does not depend on ``capacity``."""
        width = self.config.head_width
        return jnp.zeros((batch, self.heads, width, width), jnp.float32)
