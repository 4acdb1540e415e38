# SPDX-License-Identifier: Apache-2.0
"""HGRN2 (arXiv 2404.07904), in the form of flash-linear-attention."""

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
from seqmix.layers.norms import RMSNorm
from seqmix.layers.parameters import Float32Param
from seqmix.layers.registry import LayerInfo, register
from seqmix.layers.short_convolution import ShortConvolution

# sigmoid of it is 0 in float32, and so is its gradient: no bound, for good.
_NO_BOUND = -110.0


def _log_forget(forget: jax.Array, bound: jax.Array | None) -> jax.Array:
    """log(b + (1 - b) sigmoid(forget)), b = sigmoid(bound); None for b = 0.

    Near 0 it is taken from 1 - f: the key is 1 - f and would have no digits left otherwise.
    """
    if bound is None:
        return jax.nn.log_sigmoid(forget)
    below = jax.nn.log_sigmoid(-bound)
    log_decay = jnp.logaddexp(jax.nn.log_sigmoid(bound), below + jax.nn.log_sigmoid(forget))
    log_key, half = below + jax.nn.log_sigmoid(-forget), -math.log(2)
    weak = jnp.log1p(-jnp.exp(jnp.minimum(log_key, half)))
    return jnp.where(log_key < half, weak, log_decay)


@configs.configurable("HGRN2")
@dataclasses.dataclass(frozen=True)
class HGRN2Config:
    """Settings of `HGRN2`.

    Attributes:
      heads: heads, a divisor of the model width; default: as many as fill it.
      head_width: key width of a head, by how much the state expands each value channel. The value
        width is the model width over the heads.
      lower_bounds: bound each layer's forget gates from below, deeper layers by more.
      convolution: taps of causal convolutions on queries, gates and values, without activation;
        default: none.
      norm_epsilon: epsilon of the norm.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.hgrn2`.
    """

    heads: int | None = None
    head_width: int = 128
    lower_bounds: bool = True
    convolution: int | None = None
    norm_epsilon: float = 1e-5
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "head_width", "convolution", "chunk_size")
        checks.positive(self, "norm_epsilon")

    def sizes(self, width: int) -> tuple[int, int, int]:
        """Heads, key width and value width at this model width.

        Raises:
          ValueError: the heads do not divide the width, or their keys do not fill it.
        """
        heads = checks.derived_heads(self, width)
        checks.multiple(self, "width", width, "heads", heads)
        return heads, self.head_width, width // heads

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2; the same at every context.

        Counts the projections, the convolutions, and for each head the two products of the
        recurrence (write, read out). The chunked form's products inside a chunk come on top of
        that and are not counted, so that utilisation never gains by them.
        """
        heads, key_width, value_width = self.sizes(width)
        channels = 2 * heads * key_width + width
        projections = 2 * width * (channels + width)
        convolutions = 2 * (self.convolution or 0) * channels
        return projections + convolutions + 4 * heads * key_width * value_width

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache; the same at every context."""
        heads, key_width, value_width = self.sizes(width)
        state = checks.array_bytes((heads, key_width, value_width), jnp.float32)
        if self.convolution is None:
            return state
        channels = 2 * heads * key_width + width
        return state + checks.array_bytes((self.convolution - 1, channels), dtype)


class HGRN2Cache(NamedTuple):
    """Decode cache of an `HGRN2`.

    Attributes:
      query, forget, value: [B, convolution - 1, channels] last inputs of the convolutions, or None.
      state: [B, H, K, V] float32.
    """

    query: jax.Array | None
    forget: jax.Array | None
    value: jax.Array | None
    state: jax.Array


@register("hgrn2", HGRN2Config)
class HGRN2(nnx.Module):
    """Gated linear recurrence with an expanded state: what a channel forgets, its key writes.

    q = silu(x W_q), f = bound + (1 - bound) sigmoid(x W_f), v = x W_v, y = W_o rms_norm(o), with o
    from `seqmix.mixers.hgrn2` with log-decays log f and scale K**-0.5, and the norm over all heads
    together.

    The reference takes the bounds of all L layers from one parameter: the cumulative softmax over
    layers, less the first layer's share, which starts at i / L in layer i. Here each layer holds
    its own, bound = sigmoid(lower_bound), and starts at the same i / L, exactly 0 for good in the
    first: layers of a hybrid need not know of each other, and a layer under the scan has its own
    row. Training may then order the bounds otherwise, which the reference's form cannot.
    """

    def __init__(
        self,
        config: HGRN2Config,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        heads, key_width, _ = config.sizes(width)
        keys = heads * key_width
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}

        self.query = Linear(width, keys, **common)
        self.forget = Linear(width, keys, **common)
        self.value = Linear(width, width, **common)
        self.output = Linear(width, width, scale=layer.residual_scale, **common)

        def convolution(channels: int) -> ShortConvolution | None:
            if config.convolution is None:
                return None
            return ShortConvolution(channels, config.convolution, bias=False, **common)

        self.query_convolution = convolution(keys)
        self.forget_convolution = convolution(keys)
        self.value_convolution = convolution(width)
        share = jnp.asarray(layer.below, jnp.float32) / layer.count
        logit = jnp.maximum(jnp.log(share) - jnp.log1p(-share), _NO_BOUND)
        self.lower_bound = Float32Param(jnp.full((keys,), logit)) if config.lower_bounds else None
        self.norm = RMSNorm(
            width, epsilon=config.norm_epsilon, dtype=dtype, param_dtype=param_dtype
        )
        self.config = config
        self.sizes = config.sizes(width)

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: HGRN2Cache | None = None,
    ) -> tuple[jax.Array, HGRN2Cache | None]:
        """Mixes over time.

        Args:
          x: [B, T, D].
          segment_ids: [B, T] int32, 0 = padding; None: all one segment.
          positions: the contract's; the state itself carries the order, so they play no part.
          cache: what `init_cache` or an earlier call gave; None: no cache.

        Returns:
          y [B, T, D] in the compute dtype, and the cache after these tokens (None without one).
        """
        heads, key_width, value_width = self.sizes
        batch, time, _ = x.shape
        before = (None,) * 4 if cache is None else cache

        def convolve(y, convolution, state):
            if convolution is None:
                return y, state
            return convolution(y, segment_ids=segment_ids, state=state)

        query, query_state = convolve(self.query(x), self.query_convolution, before[0])
        # Gates stay float32 up to the convolution, which rounds its own input.
        forget, forget_state = convolve(
            self.forget(x, out_dtype=jnp.float32), self.forget_convolution, before[1]
        )
        value, value_state = convolve(self.value(x), self.value_convolution, before[2])

        log_decay = _log_forget(
            forget.astype(jnp.float32),
            None if self.lower_bound is None else self.lower_bound[...],
        )
        out, state = mixers.hgrn2(
            jax.nn.silu(query).reshape(batch, time, heads, key_width),
            value.reshape(batch, time, heads, value_width),
            log_decay.reshape(batch, time, heads, key_width),
            scale=key_width**-0.5,
            initial_state=before[3],
            segment_ids=segment_ids,
            chunk_size=self.config.chunk_size,
            impl=self.config.impl,
        )
        y = self.output(self.norm(out.reshape(batch, time, -1)))
        if cache is None:
            return y, None
        return y, HGRN2Cache(query_state, forget_state, value_state, state)

    def init_cache(self, batch: int, capacity: int) -> HGRN2Cache:
        """An empty cache; its size does not depend on ``capacity``."""
        heads, key_width, value_width = self.sizes
        convolutions = (self.query_convolution, self.forget_convolution, self.value_convolution)
        return HGRN2Cache(
            *(None if c is None else c.init_state(batch) for c in convolutions),
            jnp.zeros((batch, heads, key_width, value_width), jnp.float32),
        )
