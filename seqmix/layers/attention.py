# SPDX-License-Identifier: Apache-2.0
"""Softmax attention: grouped queries, rotary positions, window, norms on queries and keys."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers.linear import Linear
from seqmix.layers.norms import RMSNorm
from seqmix.layers.registry import LayerInfo, register
from seqmix.layers.rotary import rotary, rotary_width


@configs.configurable("Attention")
@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Settings of `Attention`.

    Attributes:
      heads: query heads; default: as many as fill the model width.
      kv_heads: key and value heads; default ``heads``; 1 gives multi-query attention. Each serves
        ``heads / kv_heads`` consecutive query heads.
      head_width: width of a head.
      rotary_fraction: share of the head's channels that RoPE rotates; 0 for no positions at all.
      rotary_base: base of RoPE's wavelengths.
      window: keys a query sees, itself included; default all.
      qk_norm: RMS norm per head on queries and keys, before RoPE (Qwen3).
      bias: biases on the query, key and value projections (Qwen2); never on the output.
      logit_softcap: c in c * tanh(logits / c); default none.
      norm_epsilon: epsilon of the norms on queries and keys.
    """

    heads: int | None = None
    kv_heads: int | None = None
    head_width: int = 64
    rotary_fraction: float = 1.0
    rotary_base: float = 10_000.0
    window: int | None = None
    qk_norm: bool = False
    bias: bool = False
    logit_softcap: float | None = None
    norm_epsilon: float = 1e-6

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "kv_heads", "head_width", "window")
        checks.positive(self, "rotary_base", "logit_softcap", "norm_epsilon")
        try:
            rotary_width(self.head_width, self.rotary_fraction)
        except ValueError as error:
            raise ValueError(f"Attention.rotary_fraction: {error}") from None
        if self.heads is not None and self.kv_heads is not None:
            checks.multiple(self, "heads", self.heads, "kv_heads", self.kv_heads)

    def head_counts(self, width: int) -> tuple[int, int]:
        """Query heads and key-value heads at this model width.

        Raises:
          ValueError: the heads do not fill the width or do not group.
        """
        heads = checks.derived_heads(self, width)
        kv_heads = heads if self.kv_heads is None else self.kv_heads
        checks.multiple(self, "heads", heads, "kv_heads", kv_heads)
        return heads, kv_heads

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2: projections, logits and weighted values.

        Args:
          width: model width.
          context: mean number of keys a token sees in full causal attention, (T + 1) / 2 for rows
            of T tokens. A window's own mean follows from T.
        """
        heads, kv_heads = self.head_counts(width)
        projections = 2 * width * self.head_width * (2 * heads + 2 * kv_heads)
        return projections + 4 * heads * self.head_width * self.mean_keys(context)

    def mean_keys(self, context: float) -> float:
        """Mean number of keys a token sees, where full causal attention would see ``context``."""
        time = 2 * context - 1
        if self.window is None or time <= self.window:
            return context
        return self.window - self.window * (self.window - 1) / (2 * time)

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of a KV cache for ``context`` tokens in the compute dtype."""
        _, kv_heads = self.head_counts(width)
        slots = context if self.window is None else min(context, self.window)
        shape = (2, slots, kv_heads, self.head_width)
        return checks.array_bytes(shape, dtype) + checks.array_bytes((), jnp.int32)


@register("attention", AttentionConfig)
class Attention(nnx.Module):
    """Causal multi-head attention (arXiv 1706.03762) with grouped queries (arXiv 2305.13245)."""

    def __init__(
        self,
        config: AttentionConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        heads, kv_heads = config.head_counts(width)
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}

        def projection(count: int) -> Linear:
            outputs = count * config.head_width
            return Linear(width, outputs, bias=config.bias, rngs=rngs, **dtypes)

        self.query, self.key, self.value = (projection(n) for n in (heads, kv_heads, kv_heads))
        self.output = Linear(
            heads * config.head_width, width, scale=layer.residual_scale, rngs=rngs, **dtypes
        )
        norm = {"epsilon": config.norm_epsilon, **dtypes}
        self.query_norm = RMSNorm(config.head_width, **norm) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_width, **norm) if config.qk_norm else None
        self.rotary_width = rotary_width(config.head_width, config.rotary_fraction)
        self.config = config
        self.heads, self.kv_heads = heads, kv_heads
        self.dtype = jnp.dtype(dtype)

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: mixers.KVCache | None = None,
    ) -> tuple[jax.Array, mixers.KVCache | None]:
        """Mixes over time.

        Args:
          x: [B, T, D].
          segment_ids: [B, T] int32, 0 = padding; None: all one segment.
          positions: [B, T] int32 for RoPE; None: counted per document, from the cache's length.
          cache: what `init_cache` or an earlier call gave; None: no cache.

        Returns:
          y [B, T, D] in the compute dtype, and the cache after these tokens (None without one).
        """
        batch, time, _ = x.shape
        query, key, value = (
            project(x).reshape(batch, time, -1, self.config.head_width)
            for project in (self.query, self.key, self.value)
        )
        if self.query_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary_width:
            if positions is None:
                ids = jnp.ones((batch, time), jnp.int32) if segment_ids is None else segment_ids
                start = None if cache is None else cache.length
                positions = mixers.segment_positions(ids, start)
            rotate = {"width": self.rotary_width, "base": self.config.rotary_base}
            query, key = (rotary(z, positions, **rotate) for z in (query, key))
        out, state = mixers.attention(
            query,
            key,
            value,
            window=self.config.window,
            logit_softcap=self.config.logit_softcap,
            segment_ids=segment_ids,
            initial_state=cache,
            capacity=None if cache is None else cache.key.shape[1],
        )
        y = self.output(out.reshape(batch, time, -1))
        return y, None if cache is None else state

    def init_cache(self, batch: int, capacity: int) -> mixers.KVCache:
        """An empty cache for ``capacity`` tokens, or a ring of the window if that is smaller."""
        return mixers.init_kv_cache(
            batch,
            capacity,
            self.kv_heads,
            self.config.head_width,
            self.config.head_width,
            self.dtype,
            window=self.config.window,
        )
