# SPDX-License-Identifier: Apache-2.0
"""2Mamba and 2Mamba-E (arXiv 2602.17363): squared or exponential weights with a decay mask."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers.linear import Linear
from seqmix.layers.registry import LayerInfo, register
from seqmix.layers.short_convolution import ShortConvolution


@configs.configurable("Mamba2nd")
@dataclasses.dataclass(frozen=True)
class Mamba2ndConfig:
    """Settings of `Mamba2nd`.

    Attributes:
      heads: default: as many as fill the model width.
      head_width: width K of queries, keys and values of a head; the state has K (K + 1) / 2 rows.
      exponential: 2Mamba-E: weights exp(q . k / sqrt(K)) instead of squares. It has no finite
        state: the cache keeps keys and values and grows with the context.
      convolution: taps of the causal convolutions on queries, keys and values.
      epsilon: added to the sum of squared weights.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.second_order_attention` and
        `seqmix.mixers.forgetting_attention`.
    """

    heads: int | None = None
    head_width: int = 64
    exponential: bool = False
    convolution: int = 2
    epsilon: float = 1e-8
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "head_width", "convolution", "chunk_size")
        checks.positive(self, "epsilon")

    def state_shape(self, width: int) -> tuple[int, int, int]:
        """[H, K (K + 1) / 2, K + 1] of the squared weights."""
        heads, size = checks.derived_heads(self, width), self.head_width
        return heads, size * (size + 1) // 2, size + 1

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2.

        Counts the projections, the convolutions, and the two products of the recurrence (write,
        read out) or of attention (logits, weighted values), not what a chunked form adds.

        Args:
          width: model width.
          context: mean number of keys a token sees; only the exponential form depends on it.
        """
        heads, rows, columns = self.state_shape(width)
        inner = heads * self.head_width
        projections = 2 * width * (4 * inner + heads) + 6 * self.convolution * inner
        if self.exponential:
            return projections + 4 * inner * context
        return projections + 4 * heads * rows * columns

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache, for ``context`` tokens where it is exponential."""
        heads, size = checks.derived_heads(self, width), self.head_width
        convolutions = checks.array_bytes((self.convolution - 1, 3 * heads * size), dtype)
        if not self.exponential:
            return convolutions + checks.array_bytes(self.state_shape(width), jnp.float32)
        kv = checks.array_bytes((2, context, heads, size), dtype)
        decays = checks.array_bytes((context, heads), jnp.float32)
        return convolutions + kv + decays + checks.array_bytes((), jnp.int32)


class Mamba2ndCache(NamedTuple):
    """Decode cache of a `Mamba2nd`.

    Attributes:
      query, key, value: [B, convolution - 1, channels] last inputs of the convolutions.
      state: [B, H, K (K + 1) / 2, K + 1] float32, or the keys, values and decays of 2Mamba-E.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    state: jax.Array | mixers.ForgettingCache


@register("mamba_2nd", Mamba2ndConfig)
class Mamba2nd(nnx.Module):
    """q, k, v = conv(x W), log_decay = -softplus(x W_a), y = W_o o.

    o comes from `seqmix.mixers.second_order_attention`, or `forgetting_attention` in the
    exponential form. The convolution has a bias and no activation. There are no positions, no
    norm and no gate.
    """

    def __init__(
        self,
        config: Mamba2ndConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        heads = checks.derived_heads(config, width)
        inner = heads * config.head_width
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.query = Linear(width, inner, **common)
        self.key = Linear(width, inner, **common)
        self.value = Linear(width, inner, **common)
        self.decay = Linear(width, heads, **common)
        self.output = Linear(inner, width, scale=layer.residual_scale, **common)
        taps = config.convolution
        self.query_convolution = ShortConvolution(inner, taps, bias=True, **common)
        self.key_convolution = ShortConvolution(inner, taps, bias=True, **common)
        self.value_convolution = ShortConvolution(inner, taps, bias=True, **common)
        self.config = config
        self.state_shape = config.state_shape(width)
        self.dtype = jnp.dtype(dtype)

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: Mamba2ndCache | None = None,
    ) -> tuple[jax.Array, Mamba2ndCache | None]:
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
        batch, time, _ = x.shape
        before = (None,) * 4 if cache is None else cache

        def convolve(project, convolution, state):
            y, state = convolution(project(x), segment_ids=segment_ids, state=state)
            return y.reshape(batch, time, self.state_shape[0], -1), state

        query, query_state = convolve(self.query, self.query_convolution, before[0])
        key, key_state = convolve(self.key, self.key_convolution, before[1])
        value, value_state = convolve(self.value, self.value_convolution, before[2])
        log_decay = -jax.nn.softplus(self.decay(x, out_dtype=jnp.float32))
        options = {
            "initial_state": before[3],
            "segment_ids": segment_ids,
            "chunk_size": config.chunk_size,
            "impl": config.impl,
        }
        if config.exponential:
            slots = None if cache is None else cache.state.kv.key.shape[1]
            out, state = mixers.forgetting_attention(
                query, key, value, log_decay, capacity=slots, **options
            )
        else:
            out, state = mixers.second_order_attention(
                query, key, value, log_decay, eps=config.epsilon, **options
            )
        y = self.output(out.reshape(batch, time, -1))
        if cache is None:
            return y, None
        return y, Mamba2ndCache(query_state, key_state, value_state, state)

    def init_cache(self, batch: int, capacity: int) -> Mamba2ndCache:
        """An empty cache; only 2Mamba-E's grows with ``capacity``."""
        heads, size = self.state_shape[0], self.config.head_width
        if self.config.exponential:
            state = mixers.init_forgetting_cache(
                batch, capacity, heads, heads, size, size, self.dtype
            )
        else:
            state = jnp.zeros((batch, *self.state_shape), jnp.float32)
        return Mamba2ndCache(
            self.query_convolution.init_state(batch),
            self.key_convolution.init_state(batch),
            self.value_convolution.init_state(batch),
            state,
        )
