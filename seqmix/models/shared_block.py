# SPDX-License-Identifier: Apache-2.0
"""A transformer whose weights several layers share (Zamba, arXiv 2405.16712; Zamba2, 2411.15242).

A layer that uses it, with x the residual stream and e what entered the lowest layer:

    h = feed_forward(norm(attention(norm([x; e]))))    shared weights, adapters of this use
    x = x + mixer(norm(x + h W))                       W and the mixer of this layer

The transformer has no residual of its own: it adds to what the mixer reads, not to the stream.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import (
    Attention,
    AttentionConfig,
    LayerInfo,
    Linear,
    Mamba,
    Mamba2,
    Mamba2Config,
    MambaConfig,
)
from seqmix.layers.checks import at_least
from seqmix.models.feed_forward import FeedForward, FeedForwardConfig
from seqmix.models.residual import NormName, make_norm

_MIXERS = {MambaConfig: Mamba, Mamba2Config: Mamba2}


@configs.configurable("SharedBlock")
@dataclasses.dataclass(frozen=True)
class SharedBlockConfig:
    """Settings of a layer ``shared_block``: one use of a shared transformer, and its mixer.

    Layers of the same ``block`` share their weights; two blocks take turns by two scopes::

        HybridLM.pattern = '5 mamba2, a/shared_block, 5 mamba2, b/shared_block'
        HybridLM.feed_forward = None
        a/SharedBlock.block = 'a'
        b/SharedBlock.block = 'b'

    Attributes:
      block: name of the shared weights, an identifier.
      mixer: the layer that reads the stream and what the transformer adds; with weights of its own.
      attention: of the transformer, from twice the model width to the model width; shared. Zamba's
        scale is ``(head_width / 2)**-0.5``.
      feed_forward: of the transformer; shared.
      adapter_rank: rank of the use's own low-rank addition to the projections into the feed-forward
        part's hidden width (Zamba2); default none.
      attention_adapters: the same for queries, keys and values.
    """

    block: str = "shared"
    mixer: MambaConfig | Mamba2Config = dataclasses.field(default_factory=Mamba2Config)
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    feed_forward: FeedForwardConfig = dataclasses.field(default_factory=FeedForwardConfig)
    adapter_rank: int | None = None
    attention_adapters: bool = False

    def __post_init__(self):
        at_least(self, 1, "adapter_rank")
        if not self.block.isidentifier():
            raise ValueError(f"SharedBlock.block must be an identifier, got {self.block!r}")
        if self.attention_adapters and self.adapter_rank is None:
            raise ValueError("SharedBlock.attention_adapters needs SharedBlock.adapter_rank")
        for field in ("share_kv_as", "kv_from"):
            if getattr(self.attention, field) is not None:
                raise ValueError(
                    f"SharedBlock.attention: Attention.{field} must be None, as each use has keys "
                    f"and values of its own, got {getattr(self.attention, field)!r}"
                )

    @property
    def mixer_layer(self) -> type[Mamba] | type[Mamba2]:
        """The class of the mixer."""
        return _MIXERS[type(self.mixer)]

    def projections(self, width: int) -> dict[str, int]:
        """Outputs of the attention's projections at this model width, by name."""
        config = self.attention
        heads, kv_heads = config.head_counts(2 * width)
        return {
            "query": heads * config.head_width,
            "key": kv_heads * config.head_width,
            "value": kv_heads * config.value_head_width,
        }

    def hidden(self, width: int) -> int:
        """Outputs of the projections into the hidden width at this model width: gate and up."""
        parts = 2 if self.feed_forward.gated else 1
        return parts * self.feed_forward.hidden_width(width)

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token of one use, multiply-add = 2: transformer, adapters and mixer."""
        heads, _ = self.attention.head_counts(2 * width)
        total = self.attention.flops_per_token(2 * width, context)
        total -= 2 * width * heads * self.attention.value_head_width  # the output is half as wide
        total += self.feed_forward.flops_per_token(width) + 2 * width * width
        if self.adapter_rank is not None:
            total += 2 * self.adapter_rank * (width + self.hidden(width))
        if self.attention_adapters:
            outputs = self.projections(width).values()
            total += 2 * self.adapter_rank * sum(2 * width + size for size in outputs)
        return total + self.mixer.flops_per_token(width, context)

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache of one use: its keys and values, and the mixer's."""
        own = self.mixer.cache_bytes(width, context, dtype)
        return own + self.attention.cache_bytes(2 * width, context, dtype)


class SharedBlockCache(NamedTuple):
    """Decode cache of one use.

    Attributes:
      attention: keys and values of the transformer in this use.
      mixer: of the mixer.
    """

    attention: mixers.KVCache
    mixer: Any


class SharedTransformer(nnx.Module):
    """The shared weights: norm, attention, norm, feed-forward part; no residuals.

    Attributes:
      input_norm: over stream and embeddings side by side, [2 D].
      attention: from 2 D to D.
      feed_forward_norm: [D].
      feed_forward: from D to D.
    """

    def __init__(
        self,
        config: SharedBlockConfig,
        width: int,
        *,
        norm: NormName,
        norm_epsilon: float,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        # Nothing adds up inside, so that nothing starts scaled down.
        common = {"layer": LayerInfo(branches=1), "rngs": rngs, **dtypes}
        self.input_norm = make_norm(norm, 2 * width, epsilon=norm_epsilon, **dtypes)
        self.attention = Attention(config.attention, 2 * width, output_width=width, **common)
        self.feed_forward_norm = make_norm(norm, width, epsilon=norm_epsilon, **dtypes)
        self.feed_forward = FeedForward(config.feed_forward, width, **common)


class SharedInput(NamedTuple):
    """What a use reads beside the stream; the same in every layer.

    Attributes:
      embeddings: [B, T, D], what entered the lowest layer.
      transformer: the shared weights of its name.
    """

    embeddings: jax.Array
    transformer: SharedTransformer


class Adapter(nnx.Module):
    """x A B of low rank; B starts at zero (LoRA, arXiv 2106.09685), so that all uses start alike.

    Attributes:
      down: A, [inputs, rank].
      up: B, [rank, outputs].
    """

    def __init__(
        self, inputs: int, rank: int, outputs: int, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs
    ):
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.down = Linear(inputs, rank, **common)
        self.up = Linear(rank, outputs, **common)
        self.up.kernel = nnx.Param(jnp.zeros((rank, outputs), param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., inputs] to [..., outputs] in the compute dtype."""
        return self.up(self.down(x))


class SharedUse(nnx.Module):
    """What one layer has of its own for its use of a shared transformer.

    Attributes:
      linear: from the transformer to what the mixer reads, [D, D].
      adapter: of the projections into the hidden width, or None.
      query_adapter, key_adapter, value_adapter: of the attention's projections, or None.
    """

    def __init__(
        self,
        config: SharedBlockConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        del layer  # it writes to no residual stream
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        rank = config.adapter_rank
        self.linear = Linear(width, width, **common)
        hidden = config.hidden(width)
        self.adapter = None if rank is None else Adapter(width, rank, hidden, **common)
        for name, outputs in config.projections(width).items():
            adapter = None
            if config.attention_adapters:
                adapter = Adapter(2 * width, rank, outputs, **common)
            setattr(self, f"{name}_adapter", adapter)
        self.name = config.block

    def __call__(
        self,
        x: jax.Array,
        source: SharedInput,
        *,
        segment_ids: jax.Array | None,
        positions: jax.Array | None,
        cache: mixers.KVCache | None,
    ) -> tuple[jax.Array, mixers.KVCache | None]:
        """Runs the shared transformer with this use's adapters.

        Args:
          x: residual stream [B, T, D].
          source: embeddings and weights.
          segment_ids, positions: [B, T] int32, as layers take them.
          cache: keys and values of this use, or None.

        Returns:
          What the mixer reads on top of the stream, [B, T, D] in the compute dtype, and the cache.
        """
        transformer = source.transformer
        y = transformer.input_norm(jnp.concatenate([x, source.embeddings], axis=-1))
        y, cache = transformer.attention(
            y,
            segment_ids=segment_ids,
            positions=positions,
            cache=cache,
            adapters=self._attention_adapters(),
        )
        y = transformer.feed_forward(transformer.feed_forward_norm(y), adapter=self.adapter)
        return self.linear(y), cache

    def _attention_adapters(self) -> Mapping[str, Adapter] | None:
        if self.query_adapter is None:
            return None
        names = ("query", "key", "value")
        return {name: getattr(self, f"{name}_adapter") for name in names}
