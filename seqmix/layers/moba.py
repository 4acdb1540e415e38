# SPDX-License-Identifier: Apache-2.0
"""Mixture of block attention (MoBA), or full attention with the same parameters."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers.linear import Linear
from seqmix.layers.norms import RMSNorm
from seqmix.layers.registry import LayerInfo, register
from seqmix.layers.rotary import rotary_width, rotated


@configs.configurable("MoBA")
@dataclasses.dataclass(frozen=True)
class MoBAConfig:
    """Settings of `MoBA`.

    Attributes:
      heads: query heads; default: as many as fill the model width.
      kv_heads: key and value heads; default ``heads``. Each serves ``heads / kv_heads`` consecutive
        query heads; every query head chooses its own blocks.
      head_width: width of a head.
      block_size: tokens of a block, counted from each document's start.
      top_k: blocks a token attends to, its own included.
      full: attends to every earlier token instead. The parameters are the same, so a layer may be
        full in one stage of training and sparse in another; a scope sets it for some layers only.
      rotary_fraction: share of the head's channels that RoPE rotates; 0 for no positions at all.
      rotary_base: base of RoPE's wavelengths.
      qk_norm: RMS norm per head on queries and keys, before RoPE.
      norm_epsilon: epsilon of the norms on queries and keys.
    """

    heads: int | None = None
    kv_heads: int | None = None
    head_width: int = 64
    block_size: int = 512
    top_k: int = 3
    full: bool = False
    rotary_fraction: float = 1.0
    rotary_base: float = 10_000.0
    qk_norm: bool = False
    norm_epsilon: float = 1e-6

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "kv_heads", "head_width", "block_size", "top_k")
        checks.positive(self, "rotary_base", "norm_epsilon")
        try:
            rotary_width(self.head_width, self.rotary_fraction)
        except ValueError as error:
            raise ValueError(f"MoBA.rotary_fraction: {error}") from None
        if self.heads is not None and self.kv_heads is not None:
            checks.multiple(self, "heads", self.heads, "kv_heads", self.kv_heads)

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2.

        Projections, the scores of the blocks before a token's own, logits and weighted values of
        the tokens it sees.

        Args:
          width: model width.
          context: mean number of keys a token sees in full causal attention, (T + 1) / 2 for rows
            of T tokens.
        """
        heads, kv_heads = checks.grouped_heads(self, width)
        projections = 2 * width * self.head_width * (2 * heads + 2 * kv_heads)
        scored, seen = 0.0, context
        if not self.full:
            position = np.arange(max(1, round(2 * context - 1)))
            before = position // self.block_size
            chosen = np.minimum(before, self.top_k - 1)
            scored = before.mean() if self.top_k > 1 else 0.0
            seen = np.mean(position % self.block_size + 1 + chosen * self.block_size)
        return projections + heads * self.head_width * float(2 * scored + 4 * seen)

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of keys, values and block means for ``context`` tokens."""
        _, kv_heads = checks.grouped_heads(self, width)
        total = checks.array_bytes((2, context, kv_heads, self.head_width), dtype)
        if not self.full:
            blocks = max(1, context // self.block_size)
            total += checks.array_bytes((blocks, kv_heads, self.head_width), jnp.float32)
        return total + checks.array_bytes((), jnp.int32)


@register("moba", MoBAConfig)
class MoBA(nnx.Module):
    """Attention to a few blocks that each query head chooses (MoBA, arXiv 2502.13189)."""

    def __init__(
        self,
        config: MoBAConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        heads, kv_heads = checks.grouped_heads(config, width)
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        self.query, self.key, self.value = (
            Linear(width, count * config.head_width, rngs=rngs, **dtypes)
            for count in (heads, kv_heads, kv_heads)
        )
        self.output = Linear(
            heads * config.head_width, width, scale=layer.residual_scale, rngs=rngs, **dtypes
        )
        norm = {"epsilon": config.norm_epsilon, **dtypes}
        self.query_norm = RMSNorm(config.head_width, **norm) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_width, **norm) if config.qk_norm else None
        self.rotary_width = rotary_width(config.head_width, config.rotary_fraction)
        self.config = config
        self.kv_heads = kv_heads
        self.dtype = jnp.dtype(dtype)

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: mixers.MoBAState | mixers.KVCache | None = None,
    ) -> tuple[jax.Array, mixers.MoBAState | mixers.KVCache | None]:
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
        held = cache if self.config.full or cache is None else cache.cache
        length = None if held is None else held.length
        rotate = {"width": self.rotary_width, "base": self.config.rotary_base}
        query, key = rotated((query, key), positions, segment_ids, length, **rotate)
        options = {
            "segment_ids": segment_ids,
            "initial_state": cache,
            "capacity": None if held is None else held.key.shape[1],
        }
        if self.config.full:
            out, state = mixers.attention(query, key, value, **options)
        else:
            out, state = mixers.moba_attention(
                query,
                key,
                value,
                block_size=self.config.block_size,
                top_k=self.config.top_k,
                **options,
            )
        y = self.output(out.reshape(batch, time, -1))
        return y, None if cache is None else state

    def init_cache(self, batch: int, capacity: int) -> mixers.MoBAState | mixers.KVCache:
        """An empty cache for ``capacity`` tokens."""
        width = self.config.head_width
        shape = (batch, capacity, self.kv_heads, width, width, self.dtype)
        if self.config.full:
            return mixers.init_kv_cache(*shape)
        return mixers.init_moba_state(*shape, self.config.block_size)
