# SPDX-License-Identifier: Apache-2.0
"""Longformer attention: a sliding window and a few global tokens, causal or both ways."""

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


@configs.configurable("Longformer")
@dataclasses.dataclass(frozen=True)
class LongformerConfig:
    """Settings of `Longformer`.

    Attributes:
      heads: query heads; default: as many as fill the model width.
      kv_heads: key and value heads; default ``heads``. Each serves ``heads / kv_heads``
        consecutive query heads.
      head_width: width of a head.
      window: keys of the window: the last ones, the token itself included; or, with causal=False,
        an even number, half of them on either side of the token.
      global_tokens: leading tokens of a document that are global.
      global_projections: queries, keys and values of their own for the rows of global tokens.
      causal: each token sees itself and earlier ones only; False is the published form, for
        encoders: no cache, and training on next tokens refuses it.
      rotary_fraction: share of the head's channels that RoPE rotates; 0 for no positions at all.
      rotary_base: base of RoPE's wavelengths.
      bias: biases on all projections but the output.
      chunk_size: queries per step; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.longformer_attention`.
    """

    heads: int | None = None
    kv_heads: int | None = None
    head_width: int = 64
    window: int = 512
    global_tokens: int = 4
    global_projections: bool = True
    causal: bool = True
    rotary_fraction: float = 1.0
    rotary_base: float = 10_000.0
    bias: bool = False
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "kv_heads", "head_width", "window", "chunk_size")
        checks.at_least(self, 0, "global_tokens")
        checks.positive(self, "rotary_base")
        try:
            rotary_width(self.head_width, self.rotary_fraction)
        except ValueError as error:
            raise ValueError(f"Longformer.rotary_fraction: {error}") from None
        if not self.causal and self.window % 2:
            raise ValueError(f"Longformer.window must be even with causal=False, got {self.window}")
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
        separate = heads + 2 * kv_heads if self.global_projections and self.global_tokens else 0
        projections = 2 * width * self.head_width * (2 * heads + 2 * kv_heads + separate)
        return projections + 4 * heads * self.head_width * self.mean_keys(context)

    def mean_keys(self, context: float) -> float:
        """Mean number of keys a token reads in rows of ``2 * context - 1`` tokens.

        The row of a global token counts twice: as any other, and over its document.
        """
        time = round(2 * context - 1)
        t = np.arange(time, dtype=np.int64)
        first = min(self.global_tokens, time)
        if self.causal:
            seen = np.minimum(t + 1, self.window) + np.clip(t + 1 - self.window, 0, first)
            return float(seen.sum() + first * (first + 1) / 2) / time
        low = np.maximum(t - self.window // 2, 0)
        high = np.minimum(t + self.window // 2, time - 1)
        seen = high - low + 1 + np.minimum(low, first) + np.maximum(first - 1 - high, 0)
        return float(seen.sum()) / time + first

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of ring and global tokens; 0 where the layer cannot decode."""
        if not self.causal:
            return 0
        _, kv_heads = checks.grouped_heads(self, width)
        slots = min(context, self.window) + self.global_tokens
        if self.global_projections:
            slots += self.global_tokens
        shape = (2, slots, kv_heads, self.head_width)
        return checks.array_bytes(shape, dtype) + checks.array_bytes((), jnp.int32)


@register("longformer", LongformerConfig)
class Longformer(nnx.Module):
    """Windows and global tokens (arXiv 2004.05150), with RoPE for positions.

    The paper's layer is causal=False. Each document's first tokens are global here; the mixer
    takes any. The causal form is ours, see `seqmix.mixers.longformer_attention`.
    """

    def __init__(
        self,
        config: LongformerConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        heads, kv_heads = checks.grouped_heads(config, width)
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}

        def projections() -> list[Linear]:
            return [
                Linear(width, count * config.head_width, bias=config.bias, **common)
                for count in (heads, kv_heads, kv_heads)
            ]

        self.query, self.key, self.value = projections()
        separate = config.global_projections and config.global_tokens
        self.global_query, self.global_key, self.global_value = (
            projections() if separate else (None, None, None)
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
        cache: mixers.LongformerCache | None = None,
    ) -> tuple[jax.Array, mixers.LongformerCache | None]:
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
            refuse_cache("Longformer", cache)
        batch, time, _ = x.shape
        length = None if cache is None else cache.ring.length
        rotate = {"width": self.rotary_width, "base": config.rotary_base}

        def heads(query: Linear, key: Linear, value: Linear) -> list[jax.Array]:
            made = [p(x).reshape(batch, time, -1, config.head_width) for p in (query, key, value)]
            made[:2] = rotated(made[:2], positions, segment_ids, length, **rotate)
            return made

        arrays = heads(self.query, self.key, self.value)
        if self.global_query is not None:
            arrays += heads(self.global_query, self.global_key, self.global_value)
        out, state = mixers.longformer_attention(
            *arrays,
            window=config.window,
            global_tokens=config.global_tokens,
            causal=config.causal,
            segment_ids=segment_ids,
            initial_state=cache,
            capacity=None if cache is None else cache.ring.key.shape[1],
            chunk_size=config.chunk_size,
            impl=config.impl,
        )
        y = self.output(out.reshape(batch, time, -1))
        return y, None if cache is None else state

    def init_cache(self, batch: int, capacity: int) -> mixers.LongformerCache:
        """An empty cache: a ring of the window, or of ``capacity`` if that is smaller, and globals.

        Raises:
          ValueError: the layer is not causal.
        """
        if not self.config.causal:
            raise ValueError("Longformer is not causal and cannot decode: it has no cache")
        return mixers.init_longformer_cache(
            batch,
            capacity,
            self.kv_heads,
            self.config.head_width,
            self.config.head_width,
            self.dtype,
            window=self.config.window,
            global_tokens=self.config.global_tokens,
            separate=self.global_query is not None,
        )
