# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet (arXiv 2412.06464), in the form of flash-linear-attention and Qwen3-Next."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers.initialisation import decay_rates, time_step_bias
from seqmix.layers.linear import Linear
from seqmix.layers.norms import GatedRMSNorm, l2_normalise
from seqmix.layers.parameters import Float32Param
from seqmix.layers.registry import LayerInfo, register
from seqmix.layers.short_convolution import ShortConvolution


@configs.configurable("GatedDeltaNet")
@dataclasses.dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Settings of `GatedDeltaNet`.

    Attributes:
      heads: query and key heads; default: as many as fill the model width.
      value_heads: value heads, a multiple of ``heads``; default ``heads``. Each head of queries and
        keys serves ``value_heads / heads`` consecutive value heads.
      head_width: key width of a head.
      value_width: value width of a head; default ``head_width``.
      convolution: taps of the causal convolutions on queries, keys and values.
      allow_negative_eigenvalues: write strengths between 0 and 2 instead of 0 and 1
        (arXiv 2411.12537), so that the state can flip sign along a key.
      beta_bias: bias on the projection that gives the write strengths (the models of the paper).
      norm_epsilon: epsilon of the gated norm.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.gated_delta_rule`.
    """

    heads: int | None = None
    value_heads: int | None = None
    head_width: int = 64
    value_width: int | None = None
    convolution: int = 4
    allow_negative_eigenvalues: bool = False
    beta_bias: bool = False
    norm_epsilon: float = 1e-5
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "value_heads", "head_width", "value_width")
        checks.at_least(self, 1, "convolution", "chunk_size")
        checks.positive(self, "norm_epsilon")
        if self.heads is not None and self.value_heads is not None:
            checks.multiple(self, "value_heads", self.value_heads, "heads", self.heads)

    def sizes(self, width: int) -> tuple[int, int, int, int]:
        """Key heads, value heads, key width and value width at this model width.

        Raises:
          ValueError: the heads do not fill the width or do not group.
        """
        heads = checks.derived_heads(self, width)
        value_heads = heads if self.value_heads is None else self.value_heads
        checks.multiple(self, "value_heads", value_heads, "heads", heads)
        return heads, value_heads, self.head_width, self.value_width or self.head_width

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2; the same at every context.

        Counts the projections, the convolutions, and for each state the three products of the
        recurrence (read for the error, write, read out). The chunked form's products inside a
        chunk come on top of that and are not counted, so that utilisation never gains by them.
        """
        heads, value_heads, key_width, value_width = self.sizes(width)
        keys, values = heads * key_width, value_heads * value_width
        projections = 2 * width * (2 * keys + 3 * values + 2 * value_heads)
        convolutions = 2 * self.convolution * (2 * keys + values)
        return projections + convolutions + 6 * value_heads * key_width * value_width

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache; the same at every context."""
        heads, value_heads, key_width, value_width = self.sizes(width)
        channels = 2 * heads * key_width + value_heads * value_width
        state = checks.array_bytes((value_heads, key_width, value_width), jnp.float32)
        return state + checks.array_bytes((self.convolution - 1, channels), dtype)


class GatedDeltaNetCache(NamedTuple):
    """Decode cache of a `GatedDeltaNet`.

    Attributes:
      query, key, value: [B, convolution - 1, channels] last inputs of the convolutions.
      state: [B, Hv, K, V] float32.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    state: jax.Array


@register("gated_delta_net", GatedDeltaNetConfig)
class GatedDeltaNet(nnx.Module):
    """Delta rule with a decaying state.

    q, k = l2_norm(silu(conv(x W))), v = silu(conv(x W_v)), beta = sigmoid(x W_b),
    log_decay = -exp(A_log) softplus(x W_a + dt_bias), y = W_o (rms_norm(o) * silu(x W_g)), with o
    from `seqmix.mixers.gated_delta_rule` and the norm over each head.

    ``exp(A_log)`` starts uniform in (0.01, 16), as in flash-linear-attention but away from an exact
    0; ``softplus(dt_bias)`` starts log-uniform in [0.001, 0.1], as in Mamba.
    """

    def __init__(
        self,
        config: GatedDeltaNetConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        heads, value_heads, key_width, value_width = config.sizes(width)
        keys, values = heads * key_width, value_heads * value_width
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}

        self.query = Linear(width, keys, **common)
        self.key = Linear(width, keys, **common)
        self.value = Linear(width, values, **common)
        self.gate = Linear(width, values, **common)
        self.decay = Linear(width, value_heads, **common)
        self.beta = Linear(width, value_heads, bias=config.beta_bias, **common)
        self.output = Linear(values, width, scale=layer.residual_scale, **common)

        taps = config.convolution
        self.query_convolution = ShortConvolution(keys, taps, bias=False, **common)
        self.key_convolution = ShortConvolution(keys, taps, bias=False, **common)
        self.value_convolution = ShortConvolution(values, taps, bias=False, **common)

        self.A_log = Float32Param(decay_rates(rngs.params(), value_heads, 0.01, 16.0))
        self.dt_bias = Float32Param(time_step_bias(rngs.params(), value_heads))
        self.norm = GatedRMSNorm(
            value_width,
            order="norm_then_gate",
            epsilon=config.norm_epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        self.config = config
        self.sizes = (heads, value_heads, key_width, value_width)

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: GatedDeltaNetCache | None = None,
    ) -> tuple[jax.Array, GatedDeltaNetCache | None]:
        """Mixes over time.

        Args:
          x: [B, T, D].
          segment_ids: [B, T] int32, 0 = padding; None: all one segment.
          positions: the contract's; the state itself carries the order, so they play no part.
          cache: what `init_cache` or an earlier call gave; None: no cache.

        Returns:
          y [B, T, D] in the compute dtype, and the cache after these tokens (None without one).
        """
        heads, value_heads, key_width, value_width = self.sizes
        batch, time, _ = x.shape
        before = (None,) * 4 if cache is None else cache

        def convolve(project, convolution, state):
            y, state = convolution(project(x), segment_ids=segment_ids, state=state)
            return jax.nn.silu(y), state

        query, query_state = convolve(self.query, self.query_convolution, before[0])
        key, key_state = convolve(self.key, self.key_convolution, before[1])
        value, value_state = convolve(self.value, self.value_convolution, before[2])
        query, key = (l2_normalise(z.reshape(batch, time, heads, key_width)) for z in (query, key))
        value = value.reshape(batch, time, value_heads, value_width)

        step = jax.nn.softplus(self.decay(x, out_dtype=jnp.float32) + self.dt_bias[...])
        log_decay = -jnp.exp(self.A_log[...]) * step
        beta = jax.nn.sigmoid(self.beta(x, out_dtype=jnp.float32))
        if self.config.allow_negative_eigenvalues:
            beta = 2.0 * beta

        out, state = mixers.gated_delta_rule(
            query,
            key,
            value,
            log_decay,
            beta,
            initial_state=before[3],
            segment_ids=segment_ids,
            chunk_size=self.config.chunk_size,
            impl=self.config.impl,
        )
        gate = self.gate(x).reshape(batch, time, value_heads, value_width)
        y = self.output(self.norm(out, gate).reshape(batch, time, -1))
        if cache is None:
            return y, None
        return y, GatedDeltaNetCache(query_state, key_state, value_state, state)

    def init_cache(self, batch: int, capacity: int) -> GatedDeltaNetCache:
        """An empty cache; its size does not depend on ``capacity``."""
        _, value_heads, key_width, value_width = self.sizes
        return GatedDeltaNetCache(
            self.query_convolution.init_state(batch),
            self.key_convolution.init_state(batch),
            self.value_convolution.init_state(batch),
            jnp.zeros((batch, value_heads, key_width, value_width), jnp.float32),
        )
