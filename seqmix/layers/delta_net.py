# SPDX-License-Identifier: Apache-2.0
"""DeltaNet (arXiv 2406.06484), in the form of flash-linear-attention."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers.linear import Linear
from seqmix.layers.norms import GatedRMSNorm, RMSNorm, l2_normalise
from seqmix.layers.registry import LayerInfo, register
from seqmix.layers.short_convolution import ShortConvolution


@configs.configurable("DeltaNet")
@dataclasses.dataclass(frozen=True)
class DeltaNetConfig:
    """Settings of `DeltaNet`.

    Attributes:
      heads: heads; default: as many as fill the model width.
      head_width: key width of a head.
      value_width: value width of a head; default ``head_width``.
      convolution: taps of the causal convolutions on queries, keys and values.
      allow_negative_eigenvalues: write strengths between 0 and 2 instead of 0 and 1
        (arXiv 2411.12537), so that the state can flip sign along a key.
      output_gate: multiply the normed output by silu(x W_g).
      norm_epsilon: epsilon of the output norm.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.delta_rule`.
    """

    heads: int | None = None
    head_width: int = 128
    value_width: int | None = None
    convolution: int = 4
    allow_negative_eigenvalues: bool = False
    output_gate: bool = False
    norm_epsilon: float = 1e-5
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "head_width", "value_width", "convolution", "chunk_size")
        checks.positive(self, "norm_epsilon")

    def sizes(self, width: int) -> tuple[int, int, int]:
        """Heads, key width and value width at this model width.

        Raises:
          ValueError: the heads do not fill the width.
        """
        heads = checks.derived_heads(self, width)
        return heads, self.head_width, self.value_width or self.head_width

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2; the same at every context.

        Counts the projections, the convolutions, and for each head the three products of the
        recurrence (read for the error, write, read out). The chunked form's products inside a
        chunk come on top of that and are not counted, so that utilisation never gains by them.
        """
        heads, key_width, value_width = self.sizes(width)
        keys, values = heads * key_width, heads * value_width
        projections = 2 * width * (2 * keys + (2 + self.output_gate) * values + heads)
        convolutions = 2 * self.convolution * (2 * keys + values)
        return projections + convolutions + 6 * heads * key_width * value_width

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache; the same at every context."""
        heads, key_width, value_width = self.sizes(width)
        state = checks.array_bytes((heads, key_width, value_width), jnp.float32)
        channels = heads * (2 * key_width + value_width)
        return state + checks.array_bytes((self.convolution - 1, channels), dtype)


class DeltaNetCache(NamedTuple):
    """Decode cache of a `DeltaNet`.

    Attributes:
      query, key, value: [B, convolution - 1, channels] last inputs of the convolutions.
      state: [B, H, K, V] float32.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    state: jax.Array


@register("delta_net", DeltaNetConfig)
class DeltaNet(nnx.Module):
    """Delta rule without decay.

    q, k = l2_norm(silu(conv(x W))), v = silu(conv(x W_v)), beta = sigmoid(x W_b),
    y = W_o rms_norm(o) (with ``output_gate``: rms_norm(o) * silu(x W_g)), with o from
    `seqmix.mixers.delta_rule` and the norm over each head.
    """

    def __init__(
        self,
        config: DeltaNetConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        heads, key_width, value_width = config.sizes(width)
        keys, values = heads * key_width, heads * value_width
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        common = {**dtypes, "rngs": rngs}

        self.query = Linear(width, keys, **common)
        self.key = Linear(width, keys, **common)
        self.value = Linear(width, values, **common)
        self.beta = Linear(width, heads, **common)
        self.output = Linear(values, width, scale=layer.residual_scale, **common)
        taps = config.convolution
        self.query_convolution = ShortConvolution(keys, taps, bias=False, **common)
        self.key_convolution = ShortConvolution(keys, taps, bias=False, **common)
        self.value_convolution = ShortConvolution(values, taps, bias=False, **common)
        self.gate = Linear(width, values, **common) if config.output_gate else None
        if config.output_gate:
            self.norm = GatedRMSNorm(
                value_width, order="norm_then_gate", epsilon=config.norm_epsilon, **dtypes
            )
        else:
            self.norm = RMSNorm(value_width, epsilon=config.norm_epsilon, **dtypes)
        self.config = config
        self.sizes = (heads, key_width, value_width)

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: DeltaNetCache | None = None,
    ) -> tuple[jax.Array, DeltaNetCache | None]:
        """Mixes over time.

        Args:
          x: [B, T, D].
          segment_ids: [B, T] int32, 0 = padding; None: all one segment.
          positions: the contract's; the state itself carries the order, so they play no part.
          cache: what `init_cache` or an earlier call gave; None: no cache.

        Returns:
          y [B, T, D] in the compute dtype, and the cache after these tokens (None without one).
        """
        heads, _, value_width = self.sizes
        batch, time, _ = x.shape
        before = (None,) * 4 if cache is None else cache

        def convolve(project, convolution, state):
            y, state = convolution(project(x), segment_ids=segment_ids, state=state)
            return jax.nn.silu(y).reshape(batch, time, heads, -1), state

        query, query_state = convolve(self.query, self.query_convolution, before[0])
        key, key_state = convolve(self.key, self.key_convolution, before[1])
        value, value_state = convolve(self.value, self.value_convolution, before[2])
        beta = jax.nn.sigmoid(self.beta(x, out_dtype=jnp.float32))
        if self.config.allow_negative_eigenvalues:
            beta = 2.0 * beta

        out, state = mixers.delta_rule(
            l2_normalise(query),
            l2_normalise(key),
            value,
            beta,
            initial_state=before[3],
            segment_ids=segment_ids,
            chunk_size=self.config.chunk_size,
            impl=self.config.impl,
        )
        if self.gate is None:
            out = self.norm(out)
        else:
            out = self.norm(out, self.gate(x).reshape(batch, time, heads, value_width))
        y = self.output(out.reshape(batch, time, -1))
        if cache is None:
            return y, None
        return y, DeltaNetCache(query_state, key_state, value_state, state)

    def init_cache(self, batch: int, capacity: int) -> DeltaNetCache:
        """An empty cache; its size does not depend on ``capacity``."""
        heads, key_width, value_width = self.sizes
        return DeltaNetCache(
            self.query_convolution.init_state(batch),
            self.key_convolution.init_state(batch),
            self.value_convolution.init_state(batch),
            jnp.zeros((batch, heads, key_width, value_width), jnp.float32),
        )
