# SPDX-License-Identifier: Apache-2.0
"""Gated linear attention (arXiv 2312.06635), in the form of flash-linear-attention."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers.linear import Linear
from seqmix.layers.norms import GatedRMSNorm
from seqmix.layers.registry import LayerInfo, register
from seqmix.layers.short_convolution import ShortConvolution


@configs.configurable("GLA")
@dataclasses.dataclass(frozen=True)
class GLAConfig:
    """Settings of `GLA`.

    Attributes:
      heads: query and output heads.
      kv_heads: key, value and decay heads, a divisor of ``heads``; default ``heads``. Each serves
        ``heads / kv_heads`` consecutive query heads.
      expand_key: width of all query heads over model width.
      expand_value: width of all output heads over model width.
      gate_rank: width of the bottleneck that makes the decays.
      gate_normaliser: log-decays are divided by it.
      min_log_decay: least log-decay of a token; default: none.
      convolution: taps of causal convolutions with SiLU on queries, keys and values; default: none.
      norm_epsilon: epsilon of the gated norm.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.gla`.
    """

    heads: int = 4
    kv_heads: int | None = None
    expand_key: float = 0.5
    expand_value: float = 1.0
    gate_rank: int = 16
    gate_normaliser: float = 16.0
    min_log_decay: float | None = None
    convolution: int | None = None
    norm_epsilon: float = 1e-5
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "kv_heads", "gate_rank", "convolution", "chunk_size")
        checks.positive(self, "expand_key", "expand_value", "gate_normaliser", "norm_epsilon")
        if self.kv_heads is not None:
            checks.multiple(self, "heads", self.heads, "kv_heads", self.kv_heads)
        if self.min_log_decay is not None and not self.min_log_decay < 0:
            raise ValueError(f"GLA.min_log_decay must be < 0, got {self.min_log_decay}")

    def sizes(self, width: int) -> tuple[int, int, int, int]:
        """Query heads, key and value heads, key width and value width at this model width.

        Raises:
          ValueError: an expanded width is no multiple of the heads.
        """
        widths = []
        for name in ("expand_key", "expand_value"):
            total = getattr(self, name) * width
            if not math.isclose(total, round(total)):
                raise ValueError(f"GLA.{name} times the model width {width} is no whole number")
            checks.multiple(self, f"{name} * width", round(total), "heads", self.heads)
            widths.append(round(total) // self.heads)
        return self.heads, self.kv_heads or self.heads, *widths

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2; the same at every context.

        Counts the projections, the convolutions, and for each head the two products of the
        recurrence (write, read out). The chunked form's products inside a chunk come on top of
        that and are not counted, so that utilisation never gains by them.
        """
        heads, kv_heads, key_width, value_width = self.sizes(width)
        queries, outputs = heads * key_width, heads * value_width
        keys, values = kv_heads * key_width, kv_heads * value_width
        projections = 2 * width * (queries + keys + values + 2 * outputs + self.gate_rank)
        projections += 2 * self.gate_rank * keys
        convolutions = 2 * (self.convolution or 0) * (queries + keys + values)
        recurrence = 2 * (heads + kv_heads) * key_width * value_width
        return projections + convolutions + recurrence

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache; the same at every context."""
        heads, kv_heads, key_width, value_width = self.sizes(width)
        state = checks.array_bytes((kv_heads, key_width, value_width), jnp.float32)
        if self.convolution is None:
            return state
        channels = (heads + kv_heads) * key_width + kv_heads * value_width
        return state + checks.array_bytes((self.convolution - 1, channels), dtype)


class GLACache(NamedTuple):
    """Decode cache of a `GLA`.

    Attributes:
      query, key, value: [B, convolution - 1, channels] last inputs of the convolutions, or None.
      state: [B, Hkv, K, V] float32.
    """

    query: jax.Array | None
    key: jax.Array | None
    value: jax.Array | None
    state: jax.Array


@register("gla", GLAConfig)
class GLA(nnx.Module):
    """Linear attention whose state forgets each key channel at its own, data-dependent rate.

    q, k, v = x W (with ``convolution``: silu(conv(x W))),
    log_decay = log_sigmoid((x W_1) W_2 + b) / gate_normaliser,
    y = W_o (rms_norm(o) * silu(x W_g)), with o from `seqmix.mixers.gla`, the norm over each head.

    The bias starts at zero, so that decays start around sigmoid(0)**(1/16) = 0.958. The paper's
    first code had a LayerNorm without parameters and a bias on the output gate instead; with the
    norm, its other scale of the queries makes no difference.
    """

    def __init__(
        self,
        config: GLAConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        heads, kv_heads, key_width, value_width = config.sizes(width)
        queries, outputs = heads * key_width, heads * value_width
        keys, values = kv_heads * key_width, kv_heads * value_width
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}

        self.query = Linear(width, queries, **common)
        self.key = Linear(width, keys, **common)
        self.value = Linear(width, values, **common)
        self.gate = Linear(width, outputs, **common)
        self.decay_rank = Linear(width, config.gate_rank, **common)
        self.decay = Linear(config.gate_rank, keys, bias=True, **common)
        self.output = Linear(outputs, width, scale=layer.residual_scale, **common)

        def convolution(channels: int) -> ShortConvolution | None:
            if config.convolution is None:
                return None
            return ShortConvolution(channels, config.convolution, bias=False, **common)

        self.query_convolution = convolution(queries)
        self.key_convolution = convolution(keys)
        self.value_convolution = convolution(values)
        self.norm = GatedRMSNorm(
            value_width,
            order="norm_then_gate",
            epsilon=config.norm_epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        self.config = config
        self.sizes = (heads, kv_heads, key_width, value_width)

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: GLACache | None = None,
    ) -> tuple[jax.Array, GLACache | None]:
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
        heads, kv_heads, key_width, value_width = self.sizes
        batch, time, _ = x.shape
        before = (None,) * 4 if cache is None else cache

        def project(linear, convolution, state, heads):
            y = linear(x)
            if convolution is not None:
                y, state = convolution(y, segment_ids=segment_ids, state=state)
                y = jax.nn.silu(y)
            return y.reshape(batch, time, heads, -1), state

        query, query_state = project(self.query, self.query_convolution, before[0], heads)
        key, key_state = project(self.key, self.key_convolution, before[1], kv_heads)
        value, value_state = project(self.value, self.value_convolution, before[2], kv_heads)
        logits = self.decay(self.decay_rank(x), out_dtype=jnp.float32)
        log_decay = jax.nn.log_sigmoid(logits) / config.gate_normaliser
        if config.min_log_decay is not None:
            log_decay = jnp.maximum(log_decay, config.min_log_decay)

        out, state = mixers.gla(
            query,
            key,
            value,
            log_decay.reshape(batch, time, kv_heads, key_width),
            initial_state=before[3],
            segment_ids=segment_ids,
            chunk_size=config.chunk_size,
            impl=config.impl,
        )
        gate = self.gate(x).reshape(batch, time, heads, value_width)
        y = self.output(self.norm(out, gate).reshape(batch, time, -1))
        if cache is None:
            return y, None
        return y, GLACache(query_state, key_state, value_state, state)

    def init_cache(self, batch: int, capacity: int) -> GLACache:
        """An empty cache; its size does not depend on ``capacity``."""
        _, kv_heads, key_width, value_width = self.sizes
        convolutions = (self.query_convolution, self.key_convolution, self.value_convolution)
        return GLACache(
            *(None if c is None else c.init_state(batch) for c in convolutions),
            jnp.zeros((batch, kv_heads, key_width, value_width), jnp.float32),
        )
