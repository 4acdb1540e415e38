# SPDX-License-Identifier: Apache-2.0
"""Softmax attention: grouped queries, rotary positions, window, norms, gate, sinks, shared keys."""

import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks, kv_sharing
from seqmix.layers.kv_sharing import SharedKV
from seqmix.layers.linear import Linear
from seqmix.layers.norms import RMSNorm
from seqmix.layers.parameters import NoDecayParam
from seqmix.layers.registry import LayerInfo, register
from seqmix.layers.rotary import rotary, rotary_width, token_positions
from seqmix.layers.rotary_scaling import RotaryScaling


@configs.configurable("Attention")
@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Settings of `Attention`.

    Two layers share keys and values when one sets ``share_kv_as`` and a later one ``kv_from``::

        HybridLM.pattern = 'attention, reuse/attention'
        Attention.share_kv_as = 'pair'
        reuse/Attention.kv_from = 'pair'

    Attributes:
      heads: query heads; default: as many as fill the model width.
      kv_heads: key and value heads; default ``heads``; 1 gives multi-query attention. Each serves
        ``heads / kv_heads`` consecutive query heads.
      head_width: width of a head's queries and keys, and of its values without ``value_width``.
      value_width: width of a head's values; default ``head_width`` (Hymba: twice as wide).
      rotary_fraction: share of the head's channels that RoPE rotates; 0 for no positions at all.
      rotary_base: base of RoPE's wavelengths.
      rotary_interleaved: neighbouring channels make a pair (GPT-J), otherwise the halves do.
      rotary_scaling: how RoPE is stretched for longer contexts; default not at all.
      window: keys a query sees, itself included; default all.
      prefix: the first tokens of a document that its queries see beside the window (Hymba's meta
        tokens).
      qk_norm: RMS norm on queries and keys before RoPE: True for one per head (Qwen3), 'full' for
        one over the channels of all heads (OLMo 2).
      zero_centred_norm: those norms multiply by 1 + scale, which starts at 0 (Qwen3-Next).
      bias: biases on the query, key, value and gate projections (Qwen2).
      output_bias: bias on the output projection.
      output_gate: multiply the heads' outputs by the sigmoid of a projection of x, channel by
        channel (Qwen3-Next).
      sinks: a learned logit per query head that every token may attend to, without a value
        (gpt-oss).
      scale: factor of the logits; default ``head_width**-0.5``.
      key_multiplier: factor of the keys, after their norm (Falcon-H1).
      logit_softcap: c in c * tanh(logits / c); default none.
      norm_epsilon: epsilon of the norms on queries and keys.
      share_kv_as: name under which later layers may read this layer's keys and values.
      kv_from: read those of the nearest layer below that shares them under this name: no key and
        value projections and no cache. The sharing layer's window and prefix must not be shorter.
    """

    heads: int | None = None
    kv_heads: int | None = None
    head_width: int = 64
    value_width: int | None = None
    rotary_fraction: float = 1.0
    rotary_base: float = 10_000.0
    rotary_interleaved: bool = False
    rotary_scaling: RotaryScaling | None = None
    window: int | None = None
    prefix: int = 0
    qk_norm: bool | Literal["full"] = False
    zero_centred_norm: bool = False
    bias: bool = False
    output_bias: bool = False
    output_gate: bool = False
    sinks: bool = False
    scale: float | None = None
    key_multiplier: float = 1.0
    logit_softcap: float | None = None
    norm_epsilon: float = 1e-6
    share_kv_as: str | None = None
    kv_from: str | None = None

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "kv_heads", "head_width", "value_width", "window")
        checks.at_least(self, 0, "prefix")
        checks.positive(self, "rotary_base", "scale", "key_multiplier", "logit_softcap")
        checks.positive(self, "norm_epsilon")
        if self.prefix and self.window is None:
            raise ValueError(f"Attention.prefix = {self.prefix} needs a window, got window = None")
        try:
            width = rotary_width(self.head_width, self.rotary_fraction)
        except ValueError as error:
            raise ValueError(f"Attention.rotary_fraction: {error}") from None
        if width and self.rotary_scaling is not None:
            try:
                self.rotary_scaling.frequencies(width, self.rotary_base)
            except ValueError as error:
                raise ValueError(f"Attention.rotary_scaling: {error}") from None
        if self.heads is not None and self.kv_heads is not None:
            checks.multiple(self, "heads", self.heads, "kv_heads", self.kv_heads)
        if self.zero_centred_norm and not self.qk_norm:
            raise ValueError("Attention.zero_centred_norm needs qk_norm, got qk_norm = False")
        kv_sharing.check_names(self)

    def head_counts(self, width: int) -> tuple[int, int]:
        """Query heads and key-value heads at this model width.

        Raises:
          ValueError: the heads do not fill the width or do not group.
        """
        heads = checks.derived_heads(self, width)
        kv_heads = heads if self.kv_heads is None else self.kv_heads
        checks.multiple(self, "heads", heads, "kv_heads", kv_heads)
        return heads, kv_heads

    @property
    def value_head_width(self) -> int:
        """Width of a head's values."""
        return self.head_width if self.value_width is None else self.value_width

    def connect(self, below: MutableMapping[str, Any], width: int) -> None:
        """Checks what this layer reads against the layers below it, and adds what it shares.

        Args:
          below: the sharing layers' configs by name; changed.
          width: model width.

        Raises:
          ValueError: no layer below shares what this one reads, or the two do not fit.
        """
        kv_sharing.connect(self, below, width)

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2: projections, logits and weighted values.

        Args:
          width: model width.
          context: mean number of keys a token sees in full causal attention, (T + 1) / 2 for rows
            of T tokens. A window's own mean follows from T.
        """
        heads, kv_heads = self.head_counts(width)
        key, value = self.head_width, self.value_head_width
        projected = heads * (key + (2 if self.output_gate else 1) * value)
        if self.kv_from is None:
            projected += kv_heads * (key + value)
        return 2 * width * projected + 2 * heads * (key + value) * self.mean_keys(context)

    def mean_keys(self, context: float) -> float:
        """Mean number of keys a token sees, where full causal attention would see ``context``."""
        time, most = 2 * context - 1, self.most_keys
        if most is None or time <= most:
            return context
        return most - most * (most - 1) / (2 * time)

    @property
    def most_keys(self) -> int | None:
        """The most keys that a token sees: those of the window and the prefix; None for all."""
        return None if self.window is None else self.window + self.prefix

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of a KV cache for ``context`` tokens; 0 where it is another's."""
        if self.kv_from is not None:
            return 0
        _, kv_heads = self.head_counts(width)
        slots = context if self.window is None else min(context, self.most_keys)
        shape = (slots, kv_heads, self.head_width + self.value_head_width)
        return checks.array_bytes(shape, dtype) + checks.array_bytes((), jnp.int32)


@register("attention", AttentionConfig)
class Attention(nnx.Module):
    """Causal multi-head attention (arXiv 1706.03762) with grouped queries (arXiv 2305.13245).

    Output gate: arXiv 2505.06708, one gate per channel of every head. A published checkpoint of
    Qwen3-Next holds query and gate of a head side by side in one projection; here they are two.
    """

    def __init__(
        self,
        config: AttentionConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
        output_width: int | None = None,
    ):
        """Builds the layer; its outputs are ``output_width`` wide, by default as its inputs."""
        heads, kv_heads = config.head_counts(width)
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        size, value_size = config.head_width, config.value_head_width

        def projection(channels: int) -> Linear:
            return Linear(width, channels, bias=config.bias, rngs=rngs, **dtypes)

        def norm(count: int) -> RMSNorm | None:
            if not config.qk_norm:
                return None
            return RMSNorm(
                count * size if config.qk_norm == "full" else size,
                epsilon=config.norm_epsilon,
                zero_centred=config.zero_centred_norm,
                **dtypes,
            )

        own = config.kv_from is None
        self.query = projection(heads * size)
        self.key = projection(kv_heads * size) if own else None
        self.value = projection(kv_heads * value_size) if own else None
        self.output = Linear(
            heads * value_size,
            width if output_width is None else output_width,
            bias=config.output_bias,
            scale=layer.residual_scale,
            rngs=rngs,
            **dtypes,
        )
        self.gate = projection(heads * value_size) if config.output_gate else None
        self.query_norm = norm(heads)
        self.key_norm = norm(kv_heads) if own else None
        self.sinks = NoDecayParam(jnp.zeros((heads,), param_dtype)) if config.sinks else None
        self.config = config
        self.heads, self.kv_heads = heads, kv_heads
        self.dtype = jnp.dtype(dtype)
        self.shared_name = kv_sharing.name_of(config)

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: mixers.KVCache | tuple[()] | None = None,
        shared: SharedKV | None = None,
        adapters: Mapping[str, Callable[[jax.Array], jax.Array]] | None = None,
    ):
        """Mixes over time.

        Args:
          x: [B, T, D].
          segment_ids: [B, T] int32, 0 = padding; None: all one segment.
          positions: [B, T] int32 for RoPE; None: counted per document, from the cache's length.
          cache: what `init_cache` or an earlier call gave; None: no cache.
          shared: keys and values of the layer below that shares them.
          adapters: functions of x that are added to the projections 'query', 'key' and 'value':
            what tells the uses of shared weights apart.

        Returns:
          y [B, T, D] in the compute dtype, the cache after these tokens (None without one), and,
          where ``shared`` was given, what the layers above get.

        Raises:
          ValueError: the layer reads another's keys and values, and ``shared`` is None.
        """
        reads = self.config.kv_from is not None
        if reads and shared is None:
            raise ValueError(
                f"Attention.kv_from = {self.config.kv_from!r} needs `shared`, the keys and values "
                "of another layer"
            )
        held = shared.cache if reads else cache
        if positions is None:
            positions = token_positions(x, segment_ids, None if held is None else held.length)

        def project(name: str) -> Callable[[jax.Array], jax.Array]:
            linear = getattr(self, name)
            return linear if adapters is None else lambda x: linear(x) + adapters[name](x)

        query = self._heads(x, project("query"), self.query_norm, positions)
        if reads:
            key, value = shared.key, shared.value
        else:
            key = self._heads(
                x, project("key"), self.key_norm, positions, self.config.key_multiplier
            )
            value = self._split(project("value")(x), self.config.value_head_width)
        out, state = mixers.attention(
            query,
            key,
            value,
            window=self.config.window,
            prefix=self.config.prefix,
            logit_softcap=self.config.logit_softcap,
            sinks=None if self.sinks is None else self.sinks[...],
            scale=self.config.scale,
            segment_ids=segment_ids,
            initial_state=held,
            capacity=None if held is None else held.key.shape[1],
        )
        y = self._finish(x, out, segment_ids)
        after = cache if reads or cache is None else state
        if shared is None:
            return y, after
        return y, after, shared if reads else SharedKV(key, value, cache)

    def _heads(
        self,
        x: jax.Array,
        project: Callable[[jax.Array], jax.Array],
        norm: RMSNorm | None,
        positions: jax.Array,
        multiplier: float = 1.0,
    ) -> jax.Array:
        """Queries or keys [B, T, H, K]: projected, normalised, multiplied and rotated."""
        config, y = self.config, project(x)
        if config.qk_norm == "full":
            y = norm(y)
        y = self._split(y, config.head_width)
        if config.qk_norm is True:
            y = norm(y)
        if multiplier != 1.0:
            y = y * multiplier
        return rotary(
            y,
            positions,
            width=rotary_width(config.head_width, config.rotary_fraction),
            base=config.rotary_base,
            interleaved=config.rotary_interleaved,
            scaling=config.rotary_scaling,
        )

    def _finish(self, x: jax.Array, out: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """[B, T, D] from the heads' outputs [B, T, H, V]: gate and output projection."""
        out = out.reshape(*x.shape[:2], -1)
        if self.gate is not None:
            gate = jax.nn.sigmoid(self.gate(x, out_dtype=jnp.float32))
            out = (out.astype(jnp.float32) * gate).astype(self.dtype)
        y = self.output(out)
        if segment_ids is not None and self.output.bias is not None:
            y = jnp.where((segment_ids != 0)[..., None], y, 0)
        return y

    @staticmethod
    def _split(x: jax.Array, width: int) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, width)

    def init_shared(self, batch: int, time: int, cache: mixers.KVCache | None) -> SharedKV | None:
        """What `shared` looks like for this layer and those that read it; None if it only reads."""
        if self.config.kv_from is not None:
            return None
        key, value = (
            jnp.zeros((batch, time, self.kv_heads, size), self.dtype)
            for size in (self.config.head_width, self.config.value_head_width)
        )
        return SharedKV(key, value, jax.tree.map(jnp.zeros_like, cache))

    def init_cache(self, batch: int, capacity: int) -> mixers.KVCache | tuple[()]:
        """An empty cache for ``capacity`` tokens, or prefix and ring of the window if smaller.

        A layer that reads another's keys and values has none: an empty tuple.
        """
        if self.config.kv_from is not None:
            return ()
        return mixers.init_kv_cache(
            batch,
            capacity,
            self.kv_heads,
            self.config.head_width,
            self.config.value_head_width,
            self.dtype,
            window=self.config.window,
            prefix=self.config.prefix,
        )
