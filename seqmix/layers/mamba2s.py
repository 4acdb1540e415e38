# SPDX-License-Identifier: Apache-2.0
"""Mamba-2S (arXiv 2602.17363): Mamba-2 cut down to what helps."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers.linear import Linear
from seqmix.layers.norms import RMSNorm
from seqmix.layers.registry import LayerInfo, register
from seqmix.layers.short_convolution import ShortConvolution


@configs.configurable("Mamba2S")
@dataclasses.dataclass(frozen=True)
class Mamba2SConfig:
    """Settings of `Mamba2S`.

    Attributes:
      heads: default: as many as fill the model width.
      head_width: width of queries, keys and values of a head.
      convolution: taps of the causal convolutions on queries, keys and values.
      norm_epsilon: epsilon of the norm over all heads.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.simple_gla`.
    """

    heads: int | None = None
    head_width: int = 64
    convolution: int = 2
    norm_epsilon: float = 1e-6
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "head_width", "convolution", "chunk_size")
        checks.positive(self, "norm_epsilon")

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2; the same at every context.

        Counts the projections, the convolutions and the two products of the recurrence (write, read
        out), not the extra products of its chunked form.
        """
        heads = checks.derived_heads(self, width)
        inner = heads * self.head_width
        projections = 2 * width * (4 * inner + 2 * heads)
        return projections + 6 * self.convolution * inner + 4 * inner * self.head_width

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache; the same at every context."""
        heads = checks.derived_heads(self, width)
        state = checks.array_bytes((heads, self.head_width, self.head_width), jnp.float32)
        channels = 3 * heads * self.head_width
        return state + checks.array_bytes((self.convolution - 1, channels), dtype)


class Mamba2SCache(NamedTuple):
    """Decode cache of a `Mamba2S`.

    Attributes:
      query, key, value: [B, convolution - 1, channels] last inputs of the convolutions.
      state: [B, H, K, V] float32.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    state: jax.Array


@register("mamba2s", Mamba2SConfig)
class Mamba2S(nnx.Module):
    """q, k, v = conv(x W), dt = softplus(x W_dt), log_decay = -softplus(x W_a).

    y = W_o rms_norm(o) with o from `seqmix.mixers.simple_gla` of q, k and dt * v; the norm is over
    all heads. The convolution has a bias and no activation; the decay is its own projection: no
    A_log, and dt scales the values alone.
    """

    def __init__(
        self,
        config: Mamba2SConfig,
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
        self.dt = Linear(width, heads, **common)
        self.decay = Linear(width, heads, **common)
        self.output = Linear(inner, width, scale=layer.residual_scale, **common)
        taps = config.convolution
        self.query_convolution = ShortConvolution(inner, taps, bias=True, **common)
        self.key_convolution = ShortConvolution(inner, taps, bias=True, **common)
        self.value_convolution = ShortConvolution(inner, taps, bias=True, **common)
        self.norm = RMSNorm(
            inner, epsilon=config.norm_epsilon, dtype=dtype, param_dtype=param_dtype
        )
        self.config = config
        self.heads = heads

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: Mamba2SCache | None = None,
    ) -> tuple[jax.Array, Mamba2SCache | None]:
        """Mixes over time.

        Args:
          x: [B, T, D].
          segment_ids: [B, T] int32, 0 = padding; None: all one segment.
          positions: the contract's; the state itself carries the order, so they play no part.
          cache: what `init_cache` or an earlier call gave; None: no cache.

        Returns:
          y [B, T, D] in the compute dtype, and the cache after these tokens (None without one).
        """
        batch, time, _ = x.shape
        before = (None,) * 4 if cache is None else cache

        def convolve(project, convolution, state):
            y, state = convolution(project(x), segment_ids=segment_ids, state=state)
            return y.reshape(batch, time, self.heads, -1), state

        query, query_state = convolve(self.query, self.query_convolution, before[0])
        key, key_state = convolve(self.key, self.key_convolution, before[1])
        value, value_state = convolve(self.value, self.value_convolution, before[2])
        dt = jax.nn.softplus(self.dt(x, out_dtype=jnp.float32))
        out, state = mixers.simple_gla(
            query,
            key,
            (value * dt[..., None]).astype(value.dtype),
            -jax.nn.softplus(self.decay(x, out_dtype=jnp.float32)),
            initial_state=before[3],
            segment_ids=segment_ids,
            chunk_size=self.config.chunk_size,
            impl=self.config.impl,
        )
        y = self.output(self.norm(out.reshape(batch, time, -1)))
        if cache is None:
            return y, None
        return y, Mamba2SCache(query_state, key_state, value_state, state)

    def init_cache(self, batch: int, capacity: int) -> Mamba2SCache:
        """An empty cache; its size does not depend on ``capacity``."""
        width = self.config.head_width
        return Mamba2SCache(
            self.query_convolution.init_state(batch),
            self.key_convolution.init_state(batch),
            self.value_convolution.init_state(batch),
            jnp.zeros((batch, self.heads, width, width), jnp.float32),
        )
