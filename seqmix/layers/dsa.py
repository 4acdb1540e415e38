# SPDX-License-Identifier: Apache-2.0
"""DeepSeek Sparse Attention: an indexer picks the tokens that attention reads (DeepSeek-V3.2).

Training has three parts (arXiv 2512.02556, section 2.1), each a run that starts from the one
before: dense attention; the indexer alone, with ``DSA.stage = 'warmup'``,
``Trainer.trainable = ('indexer',)`` and, the first time, ``Trainer.init_new = ('indexer',)``; then
the whole model with ``DSA.stage = 'sparse'``.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers.attention import Attention, AttentionConfig
from seqmix.layers.auxiliary import Auxiliary
from seqmix.layers.linear import Linear
from seqmix.layers.mla import MLA, MLAConfig
from seqmix.layers.norms import GroupNorm
from seqmix.layers.registry import LayerInfo, register
from seqmix.layers.rotary import rotary, rotary_width, token_positions
from seqmix.mixers._numerics import contract

_LOSS = "dsa.index_loss"


@configs.configurable("DSA")
@dataclasses.dataclass(frozen=True)
class DSAConfig:
    """Settings of a `dsa` layer.

    Attributes:
      attention: the attention that becomes sparse, @Attention() or @MLA(), with its own settings.
        Its parameters have the names that they have without the indexer.
      top_k: tokens that a token attends to.
      stage: 'warmup' for attention to all tokens, from which the indexer learns; 'sparse' for
        attention to those that it picks.
      index_heads: heads of the indexer (DeepSeek-V3.2: 64).
      index_width: width of its heads (128 there).
      index_rotary_fraction: share of their channels, the first, that RoPE rotates, with base and
        scaling of the attention and half-split pairs whatever the attention's are.
      index_loss: coefficient of the indexer's loss, per token and layer.
      norm_epsilon: epsilon of the layer norm on its keys.
      chunk_size: queries per step, see `seqmix.mixers.dsa_attention`.
      impl: implementation of the mixer.
    """

    attention: AttentionConfig | MLAConfig = dataclasses.field(default_factory=AttentionConfig)
    top_k: int = 2048
    stage: Literal["warmup", "sparse"] = "sparse"
    index_heads: int = 8
    index_width: int = 64
    index_rotary_fraction: float = 0.5
    index_loss: float = 1.0
    norm_epsilon: float = 1e-6
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "top_k", "index_heads", "index_width", "chunk_size")
        checks.positive(self, "index_loss", "norm_epsilon")
        try:
            rotary_width(self.index_width, self.index_rotary_fraction)
        except ValueError as error:
            raise ValueError(f"DSA.index_rotary_fraction: {error}") from None
        if self.latent:
            unsupported = {"impl": "auto"}
        else:
            unsupported = {"window": None, "logit_softcap": None, "sinks": False}
            unsupported |= {"share_kv_as": None, "kv_from": None}
            unsupported |= {"value_width": None, "key_multiplier": 1.0}
        for name, needed in unsupported.items():
            value = getattr(self.attention, name)
            if value != needed:
                kind = type(self.attention).__name__.removesuffix("Config")
                raise ValueError(f"DSA.attention needs {kind}.{name} = {needed!r}, got {value!r}")

    @property
    def latent(self) -> bool:
        """Whether keys and values are latents (MLA)."""
        return isinstance(self.attention, MLAConfig)

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2, without the indexer's loss.

        Counts the projections, the scores of all earlier tokens, and logits and weighted values of
        the selected ones (of all in the warm-up; on latents with MLA).
        """
        attention = self.attention
        index = self.index_heads * self.index_width
        source = (attention.query_rank if self.latent else None) or width
        total = attention.flops_per_token(width, 0.0)
        total += 2.0 * (source * index + width * (self.index_width + self.index_heads))
        total += 2.0 * (index + self.index_heads) * context
        if self.latent:
            per_key = 2 * attention.kv_rank + attention.rotary_width
            heads = checks.derived_heads(attention, width)
        else:
            per_key, heads = 2 * attention.head_width, attention.head_counts(width)[0]
        return total + 2.0 * heads * per_key * self.mean_keys(context)

    def mean_keys(self, context: float) -> float:
        """Mean number of keys a token attends to, where all would be ``context``."""
        time = 2 * context - 1
        if self.stage == "warmup" or time <= self.top_k:
            return context
        return self.top_k - self.top_k * (self.top_k - 1) / (2 * time)

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the attention's cache and the indexer's keys."""
        keys = checks.array_bytes((context, self.index_width), dtype)
        return self.attention.cache_bytes(width, context, dtype) + keys


class Indexer(nnx.Module):
    """What the index scores are made of; its inputs are constants to it.

    For 'weights_tj relu(query_tj . key_s)': queries from x (with MLA from the latent of its
    queries), one key for all heads, layer-normalised, and weights from x with the factor
    (heads width)**-0.5.
    """

    def __init__(self, config: DSAConfig, width: int, source: int, **common: Any):
        dtypes = {name: common[name] for name in ("dtype", "param_dtype")}
        size = config.index_width
        self.query = Linear(source, config.index_heads * size, **common)
        self.key = Linear(width, size, **common)
        self.key_norm = GroupNorm(size, 1, epsilon=config.norm_epsilon, **dtypes)
        self.weights = Linear(width, config.index_heads, **common)
        self.config = config

    def __call__(
        self, x: jax.Array, source: jax.Array | None, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, T, J, C], keys [B, T, C] and weights [B, T, J] of `dsa_attention`.

        Args:
          x: [B, T, D].
          source: [B, T, source], what queries are made of; None for x.
          positions: [B, T] int32.
        """
        config, (batch, time, _) = self.config, x.shape
        x = jax.lax.stop_gradient(x)
        source = x if source is None else jax.lax.stop_gradient(source)
        query = self.query(source).reshape(batch, time, config.index_heads, -1)
        key = self.key_norm(self.key(x))[:, :, None]
        query, key = (
            rotary(
                y,
                positions,
                width=rotary_width(config.index_width, config.index_rotary_fraction),
                base=config.attention.rotary_base,
                scaling=config.attention.rotary_scaling,
            )
            for y in (query, key)
        )
        factor = (config.index_heads * config.index_width) ** -0.5
        return query, key[:, :, 0], self.weights(x, out_dtype=jnp.float32) * factor


def _mix(config: DSAConfig, arguments: Any, cache: Any, auxiliary: bool, **options: Any) -> Any:
    """(out, cache or None, Auxiliary or None) of the mixer under the settings of a layer."""
    out, state, *loss = mixers.dsa_attention(
        *arguments,
        top_k=config.top_k,
        stage=config.stage,
        index_loss=auxiliary,
        initial_state=cache,
        capacity=None if cache is None else cache.index_key.shape[1],
        chunk_size=config.chunk_size,
        impl=config.impl,
        **options,
    )
    state = None if cache is None else state
    if not auxiliary:
        return out, state, None
    total = jnp.sum(loss[0], dtype=jnp.float32)
    metrics = {_LOSS: jax.lax.stop_gradient(total)}
    return out, state, Auxiliary(config.index_loss * total, metrics)


class GroupedDSA(Attention):
    """`Attention` over the tokens that an indexer picks."""

    auxiliary_names = (_LOSS,)

    def __init__(self, config: DSAConfig, width: int, **common: Any):
        super().__init__(config.attention, width, **common)
        common.pop("layer")
        self.indexer = Indexer(config, width, width, **common)
        self.sparse = config

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: mixers.DSACache | None = None,
        auxiliary: bool = False,
    ):
        """Mixes over time.

        Args:
          x: [B, T, D].
          segment_ids: [B, T] int32, 0 = padding; None: all one segment.
          positions: [B, T] int32 for RoPE; None: counted per document, from the cache's length.
          cache: what `init_cache` or an earlier call gave; None: no cache.
          auxiliary: compute the indexer's loss.

        Returns:
          y [B, T, D] in the compute dtype, the cache after these tokens (None without one), and
          with ``auxiliary`` the loss.
        """
        if positions is None:
            length = None if cache is None else cache.kv.length
            positions = token_positions(x, segment_ids, length)
        arguments = (
            self._heads(x, self.query, self.query_norm, positions),
            self._heads(x, self.key, self.key_norm, positions),
            self._split(self.value(x), self.config.value_head_width),
            *self.indexer(x, None, positions),
        )
        options = {"scale": self.config.scale, "segment_ids": segment_ids}
        out, cache, loss = _mix(self.sparse, arguments, cache, auxiliary, **options)
        y = self._finish(x, out, segment_ids)
        return (y, cache, loss) if auxiliary else (y, cache)

    def init_cache(self, batch: int, capacity: int) -> mixers.DSACache:
        """An empty cache of keys, values and index keys for ``capacity`` tokens."""
        size = self.config.head_width
        return mixers.init_dsa_cache(
            batch, capacity, self.kv_heads, size, size, self.sparse.index_width, self.dtype
        )


class LatentDSA(MLA):
    """`MLA` over the tokens that an indexer picks, in the absorbed form: one latent for all heads.

    The indexer's queries come from the queries' latent, or from x where there is none.
    """

    auxiliary_names = (_LOSS,)

    def __init__(self, config: DSAConfig, width: int, **common: Any):
        super().__init__(config.attention, width, **common)
        common.pop("layer")
        self.indexer = Indexer(config, width, config.attention.query_rank or width, **common)
        self.sparse = config

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: mixers.DSACache | None = None,
        auxiliary: bool = False,
    ):
        """Mixes over time; arguments and results as `GroupedDSA`."""
        if positions is None:
            length = None if cache is None else cache.kv.length
            positions = token_positions(x, segment_ids, length)
        parts, rank = self.project(x, positions), self.config.kv_rank
        content, shared = jnp.split(parts.query, [self.config.head_width], axis=-1)
        content = contract("bthn,rhn->bthr", content, self.key_up).astype(self.dtype)
        arguments = (
            jnp.concatenate([content, shared], axis=-1),
            parts.latent[:, :, None],
            None,
            *self.indexer(x, parts.query_latent, positions),
        )
        options = {"scale": self.config.logit_scale, "segment_ids": segment_ids}
        options["value_width"] = rank
        out, cache, loss = _mix(self.sparse, arguments, cache, auxiliary, **options)
        out = contract("bthr,rhv->bthv", out, self.value_up).astype(self.dtype)
        y = self.finish(out, segment_ids)
        return (y, cache, loss) if auxiliary else (y, cache)

    def init_cache(self, batch: int, capacity: int) -> mixers.DSACache:
        """An empty cache of latents and index keys for ``capacity`` tokens."""
        width = self.config.kv_rank + self.config.rotary_width
        return mixers.init_dsa_cache(
            batch, capacity, 1, width, None, self.sparse.index_width, self.dtype
        )


@register("dsa", DSAConfig)
def DSA(
    config: DSAConfig,
    width: int,
    *,
    layer: LayerInfo,
    dtype: Any,
    param_dtype: Any,
    rngs: nnx.Rngs,
) -> GroupedDSA | LatentDSA:
    """The `dsa` layer of a config: over the attention that it names."""
    kind = LatentDSA if config.latent else GroupedDSA
    return kind(config, width, layer=layer, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
