# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention (NSA): compressed, selected and nearby tokens, mixed by learned gates."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers.linear import Linear
from seqmix.layers.norms import RMSNorm
from seqmix.layers.parameters import EmbeddingParam, NoDecayParam
from seqmix.layers.registry import LayerInfo, register
from seqmix.layers.rotary import rotary_width, rotated

BRANCHES = 3


@configs.configurable("NSA")
@dataclasses.dataclass(frozen=True)
class NSAConfig:
    """Settings of `NSA`.

    Attributes:
      heads: query heads; default: as many as fill the model width.
      kv_heads: key and value heads of each branch; default ``heads``. Each serves
        ``heads / kv_heads`` consecutive query heads, which select the same blocks.
      head_width: width of a query and key head.
      value_width: width of a value head; default ``head_width``.
      compression: what presses a window into one token: ``mlp`` or its ``mean``.
      compression_block: tokens of a window.
      compression_hidden: hidden units of the MLP a head; default ``head_width``.
      stride: tokens from one window to the next; divides ``compression_block``, ``block_size``.
      block_size: tokens of a selected block.
      selected_blocks: blocks a token selects in all.
      initial_blocks: first blocks of the document that are always among them.
      local_blocks: last blocks that are always among them, the token's own included.
      window: tokens of the window branch, the token itself included.
      rotary_fraction: share of the head's channels that RoPE rotates; 0 for no positions at all.
      rotary_base: base of RoPE's wavelengths.
      qk_norm: RMS norm per head on queries and keys, before RoPE.
      norm_epsilon: epsilon of the norms on queries and keys.
    """

    heads: int | None = None
    kv_heads: int | None = None
    head_width: int = 64
    value_width: int | None = None
    compression: Literal["mlp", "mean"] = "mlp"
    compression_block: int = 32
    compression_hidden: int | None = None
    stride: int = 16
    block_size: int = 64
    selected_blocks: int = 16
    initial_blocks: int = 1
    local_blocks: int = 2
    window: int = 512
    rotary_fraction: float = 1.0
    rotary_base: float = 10_000.0
    qk_norm: bool = False
    norm_epsilon: float = 1e-6

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "kv_heads", "head_width", "value_width", "stride")
        checks.at_least(self, 2, "compression_block")
        checks.at_least(self, 1, "compression_hidden", "local_blocks", "window")
        checks.at_least(self, 0, "initial_blocks")
        checks.at_least(self, self.initial_blocks + self.local_blocks, "selected_blocks")
        for name in ("compression_block", "block_size"):
            checks.multiple(self, name, getattr(self, name), "stride", self.stride)
        checks.positive(self, "rotary_base", "norm_epsilon")
        try:
            rotary_width(self.head_width, self.rotary_fraction)
        except ValueError as error:
            raise ValueError(f"NSA.rotary_fraction: {error}") from None
        if self.heads is not None and self.kv_heads is not None:
            checks.multiple(self, "heads", self.heads, "kv_heads", self.kv_heads)

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of a key head and of a value head."""
        return self.head_width, self.value_width or self.head_width

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2.

        Projections, gates, compression, logits and weighted values of what a token sees in the
        three branches.

        Args:
          width: model width.
          context: mean number of keys a token sees in full causal attention, (T + 1) / 2 for rows
            of T tokens.
        """
        heads, kv_heads = checks.grouped_heads(self, width)
        key, value = self.widths
        columns = heads * (key + value + BRANCHES) + BRANCHES * kv_heads * (key + value)
        units = self.compression_hidden or self.head_width
        pressed = 0.0
        if self.compression == "mlp":
            pressed = 2 * kv_heads * (key + value) * units * (self.compression_block + 1)
        position = np.arange(max(1, round(2 * context - 1)))
        windows = np.maximum((position + 1 - self.compression_block) // self.stride + 1, 0)
        most = (self.selected_blocks - 1) * self.block_size + position % self.block_size + 1
        selected = np.minimum(position + 1, most)
        near = np.minimum(position + 1, self.window)
        seen = np.mean(windows + selected + near)
        mixing = 2 * heads * (key + value) * float(seen)
        return 2 * width * columns + pressed / self.stride + mixing

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the branches' keys and values for ``context`` tokens."""
        _, kv_heads = checks.grouped_heads(self, width)
        slots = (
            self.compression_block - 1,
            max(1, (context - self.compression_block) // self.stride + 1),
            context,
            min(context, self.window),
        )
        lengths = checks.array_bytes((len(slots),), jnp.int32)
        return checks.array_bytes((sum(slots), kv_heads, sum(self.widths)), dtype) + lengths


class WindowMLP(nnx.Module):
    """An MLP a head that presses a window of tokens into one; `mixers.NSACompression` of arrays.

    Attributes:
      position: [heads, size, width], starts small.
      hidden: [heads, size * width, units] and hidden_bias [heads, units].
      output: [heads, units, width].
    """

    def __init__(
        self,
        heads: int,
        size: int,
        width: int,
        units: int,
        *,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        kernel = jax.nn.initializers.variance_scaling(
            1.0, "fan_in", "truncated_normal", batch_axis=0
        )
        # Gelu of a normal input keeps 0.425 of its mean square.
        last = jax.nn.initializers.variance_scaling(
            1 / 0.425, "fan_in", "truncated_normal", batch_axis=0
        )
        position = jax.random.normal(rngs.params(), (heads, size, width), param_dtype)
        self.position = EmbeddingParam(0.02 * position)
        self.hidden = nnx.Param(kernel(rngs.params(), (heads, size * width, units), param_dtype))
        self.hidden_bias = NoDecayParam(jnp.zeros((heads, units), param_dtype))
        self.output = nnx.Param(last(rngs.params(), (heads, units, width), param_dtype))
        self.dtype = jnp.dtype(dtype)

    def __call__(self) -> mixers.NSACompression:
        """The parameters in the compute dtype."""
        return mixers.NSACompression(
            *(getattr(self, x)[...].astype(self.dtype) for x in mixers.NSACompression._fields)
        )


@register("nsa", NSAConfig)
class NSA(nnx.Module):
    """Native sparse attention (arXiv 2502.11089): each branch has keys and values of its own."""

    def __init__(
        self,
        config: NSAConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        heads, kv_heads = checks.grouped_heads(config, width)
        key_width, value_width = config.widths
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        self.query = Linear(width, heads * key_width, rngs=rngs, **dtypes)
        self.key = Linear(width, BRANCHES * kv_heads * key_width, rngs=rngs, **dtypes)
        self.value = Linear(width, BRANCHES * kv_heads * value_width, rngs=rngs, **dtypes)
        self.gate = Linear(width, BRANCHES * heads, rngs=rngs, **dtypes)
        self.output = Linear(
            heads * value_width, width, scale=layer.residual_scale, rngs=rngs, **dtypes
        )
        norm = {"epsilon": config.norm_epsilon, **dtypes}
        self.query_norm = RMSNorm(key_width, **norm) if config.qk_norm else None
        self.key_norm = RMSNorm(key_width, **norm) if config.qk_norm else None

        def compression(head: int) -> WindowMLP | None:
            if config.compression == "mean":
                return None
            units = config.compression_hidden or config.head_width
            return WindowMLP(kv_heads, config.compression_block, head, units, rngs=rngs, **dtypes)

        self.compress_keys, self.compress_values = map(compression, config.widths)
        self.rotary_width = rotary_width(key_width, config.rotary_fraction)
        self.config = config
        self.heads, self.kv_heads = heads, kv_heads
        self.dtype = jnp.dtype(dtype)

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: mixers.NSAState | None = None,
    ) -> tuple[jax.Array, mixers.NSAState | None]:
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
        config = self.config
        query, key, value = (
            project(x).reshape(batch, time, -1, width)
            for project, width in zip(
                (self.query, self.key, self.value), config.widths[:1] + config.widths, strict=True
            )
        )
        if self.query_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        length = None if cache is None else cache.selected.length
        rotate = {"width": self.rotary_width, "base": config.rotary_base}
        query, key = rotated((query, key), positions, segment_ids, length, **rotate)
        gates = jax.nn.sigmoid(self.gate(x, out_dtype=jnp.float32))
        out, state = mixers.nsa_attention(
            query,
            mixers.NSABranches(*jnp.split(key, BRANCHES, axis=2)),
            mixers.NSABranches(*jnp.split(value, BRANCHES, axis=2)),
            gates.reshape(batch, time, self.heads, BRANCHES),
            compress_keys=None if self.compress_keys is None else self.compress_keys(),
            compress_values=None if self.compress_values is None else self.compress_values(),
            compression_block=config.compression_block,
            stride=config.stride,
            block_size=config.block_size,
            selected_blocks=config.selected_blocks,
            initial_blocks=config.initial_blocks,
            local_blocks=config.local_blocks,
            window=config.window,
            segment_ids=segment_ids,
            initial_state=cache,
            capacity=None if cache is None else cache.selected.key.shape[1],
        )
        y = self.output(out.reshape(batch, time, -1))
        return y, None if cache is None else state

    def init_cache(self, batch: int, capacity: int) -> mixers.NSAState:
        """An empty cache for ``capacity`` tokens."""
        return mixers.init_nsa_state(
            batch,
            capacity,
            self.kv_heads,
            *self.config.widths,
            self.dtype,
            compression_block=self.config.compression_block,
            stride=self.config.stride,
            window=self.config.window,
        )
