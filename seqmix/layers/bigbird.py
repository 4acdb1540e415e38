# SPDX-License-Identifier: Apache-2.0
"""BigBird attention: window, global and random blocks, causal or both ways."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers.bidirectional import refuse_cache
from seqmix.layers.linear import Linear
from seqmix.layers.registry import LayerInfo, register
from seqmix.layers.rotary import rotary_width, rotated


@configs.configurable("BigBird")
@dataclasses.dataclass(frozen=True)
class BigBirdConfig:
    """Settings of `BigBird`.

    Attributes:
      heads: query heads; default: as many as fill the model width.
      kv_heads: key and value heads; default ``heads``. Each serves ``heads / kv_heads``
        consecutive query heads, which share its random blocks.
      head_width: width of a head.
      block_size: tokens of a block, counted from the start of each document.
      window_blocks: blocks of the window: the last ones, the token's own included; or, with
        causal=False, an odd number around it.
      random_blocks: random blocks a block sees besides.
      seed: of the random blocks. Layers of one seed draw alike, heads of a layer do not; a scope
        gives an element of the pattern a seed of its own.
      causal: each token sees itself and earlier ones only; False is the published form, for
        encoders: no cache, and training on next tokens refuses it.
      rotary_fraction: share of the head's channels that RoPE rotates; 0 for no positions at all.
      rotary_base: base of RoPE's wavelengths.
      bias: biases on the query, key and value projections.
      impl: implementation of the mixer, see `seqmix.mixers.bigbird_attention`.
    """

    heads: int | None = None
    kv_heads: int | None = None
    head_width: int = 64
    block_size: int = 64
    window_blocks: int = 3
    random_blocks: int = 3
    seed: int = 0
    causal: bool = True
    rotary_fraction: float = 1.0
    rotary_base: float = 10_000.0
    bias: bool = False
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "kv_heads", "head_width", "block_size", "window_blocks")
        checks.at_least(self, 0, "random_blocks", "seed")
        checks.positive(self, "rotary_base")
        try:
            rotary_width(self.head_width, self.rotary_fraction)
        except ValueError as error:
            raise ValueError(f"BigBird.rotary_fraction: {error}") from None
        if not self.causal and self.window_blocks % 2 == 0:
            raise ValueError(
                f"BigBird.window_blocks must be odd with causal=False, got {self.window_blocks}"
            )
        if self.heads is not None and self.kv_heads is not None:
            checks.multiple(self, "heads", self.heads, "kv_heads", self.kv_heads)

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2: projections, logits and weighted values.

        Args:
          width: model width.
          context: mean number of keys a token sees in full causal attention, (T + 1) / 2 for rows
            of T tokens.
        """
        heads, kv_heads = checks.grouped_heads(self, width)
        projections = 2 * width * self.head_width * (2 * heads + 2 * kv_heads)
        return projections + 4 * heads * self.head_width * self.mean_keys(context)

    def mean_keys(self, context: float) -> float:
        """Mean number of keys a token sees in rows of ``2 * context - 1`` tokens."""
        time, size, window = round(2 * context - 1), self.block_size, self.window_blocks
        blocks = -(-time // size)
        i = np.arange(blocks, dtype=np.int64)
        tokens = np.minimum(size, time - i * size)
        if self.causal:
            far = (i >= window) + np.clip(i - window, 0, self.random_blocks)
            seen = size * (np.minimum(i, window - 1) + far) + (tokens + 1) / 2
            return float((tokens * seen).sum()) / time
        low = np.maximum(i - window // 2, 0)
        high = np.minimum(i + window // 2, blocks - 1)
        seen = np.minimum((high + 1) * size, time) - low * size
        seen = seen + size * (low > 0) + tokens[-1] * (high < blocks - 1)
        others = np.maximum(low - 1, 0) + np.maximum(blocks - 2 - high, 0)
        seen = seen + size * np.minimum(others, self.random_blocks)
        seen = np.where((i == 0) | (i == blocks - 1), time, seen)
        return float((tokens * seen).sum()) / time

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of a KV cache; 0 where there is no cache to decode from."""
        if not self.causal:
            return 0
        _, kv_heads = checks.grouped_heads(self, width)
        shape = (2, context, kv_heads, self.head_width)
        return checks.array_bytes(shape, dtype) + checks.array_bytes((), jnp.int32)


@register("bigbird", BigBirdConfig)
class BigBird(nnx.Module):
    """Window, global and random blocks (arXiv 2007.14062), with RoPE for positions.

    The paper's layer is causal=False. The causal form is ours, and the random blocks are the same
    in training and evaluation, see `seqmix.mixers.bigbird_attention`.
    """

    def __init__(
        self,
        config: BigBirdConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        heads, kv_heads = checks.grouped_heads(config, width)
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.query, self.key, self.value = (
            Linear(width, count * config.head_width, bias=config.bias, **common)
            for count in (heads, kv_heads, kv_heads)
        )
        self.output = Linear(heads * config.head_width, width, scale=layer.residual_scale, **common)
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

        Raises:
          ValueError: there is a cache and the layer is not causal.
        """
        config = self.config
        if not config.causal:
            refuse_cache("BigBird", cache)
        batch, time, _ = x.shape
        query, key, value = (
            project(x).reshape(batch, time, -1, config.head_width)
            for project in (self.query, self.key, self.value)
        )
        length = None if cache is None else cache.length
        rotate = {"width": self.rotary_width, "base": config.rotary_base}
        query, key = rotated((query, key), positions, segment_ids, length, **rotate)
        out, state = mixers.bigbird_attention(
            query,
            key,
            value,
            block_size=config.block_size,
            window_blocks=config.window_blocks,
            random_blocks=config.random_blocks,
            seed=config.seed,
            causal=config.causal,
            segment_ids=segment_ids,
            initial_state=cache,
            capacity=None if cache is None else cache.key.shape[1],
            impl=config.impl,
        )
        y = self.output(out.reshape(batch, time, -1))
        return y, None if cache is None else state

    def init_cache(self, batch: int, capacity: int) -> mixers.KVCache:
        """An empty cache for ``capacity`` tokens: later blocks may draw any earlier one.

        Raises:
          ValueError: the layer is not causal.
        """
        if not self.config.causal:
            raise ValueError("BigBird is not causal and cannot decode: it has no cache")
        width = self.config.head_width
        return mixers.init_kv_cache(batch, capacity, self.kv_heads, width, width, self.dtype)
