# SPDX-License-Identifier: Apache-2.0
"""Griffin's recurrent block (arXiv 2402.19427), as recurrentgemma computes it."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers.linear import BlockLinear, Linear
from seqmix.layers.parameters import Float32Param
from seqmix.layers.registry import LayerInfo, register
from seqmix.layers.short_convolution import ShortConvolution

_RATE = 8.0


@configs.configurable("RGLRU")
@dataclasses.dataclass(frozen=True)
class RGLRUConfig:
    """Settings of `RGLRU`.

    Attributes:
      expand: width of the recurrence over model width.
      heads: blocks of the block-diagonal gates; they divide that width.
      convolution: taps of the causal convolution.
      radius: decays start with squares uniform between the squares of these two.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.rg_lru`.
    """

    expand: float = 1.0
    heads: int = 8
    convolution: int = 4
    radius: tuple[float, float] = (0.9, 0.999)
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "convolution", "chunk_size")
        checks.positive(self, "expand")
        if not 0 < self.radius[0] < self.radius[1] < 1:
            raise ValueError(f"RGLRU.radius must be 0 < low < high < 1, got {self.radius}")

    def sizes(self, width: int) -> int:
        """Width of the recurrence at this model width.

        Raises:
          ValueError: it is no whole number, or no multiple of the heads.
        """
        inner = checks.expanded(self, width)
        checks.multiple(self, "expand * width", inner, "heads", self.heads)
        return inner

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2; the same at every context.

        Counts the projections, the gates, the convolution, and for each channel of the recurrence
        three: decaying, scaling the input, adding.
        """
        inner = self.sizes(width)
        gates = 4 * inner * (inner // self.heads)
        return 6 * width * inner + gates + 2 * self.convolution * inner + 3 * inner

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache; the same at every context."""
        inner = self.sizes(width)
        state = checks.array_bytes((inner,), jnp.float32) + checks.array_bytes((), jnp.bool)
        return state + checks.array_bytes((self.convolution - 1, inner), dtype)


class RGLRUCache(NamedTuple):
    """Decode cache of an `RGLRU`.

    Attributes:
      x: [B, convolution - 1, inner] last inputs of the convolution.
      state: [B, inner] float32.
      started: [B] bool, whether a token has been seen: a document's first is written whole.
    """

    x: jax.Array
    state: jax.Array
    started: jax.Array


@register("rg_lru", RGLRUConfig)
class RGLRU(nnx.Module):
    """Gated linear recurrent unit between two branches.

    v = conv(x W_x), i = sigmoid(gate_i v), r = sigmoid(gate_r v), log_a = -8 r softplus(Lambda),
    y = W_o (rg_lru(i * v, log_a) * gelu(x W_y)). Every projection has a bias; the gates are block
    diagonal. ``softplus(Lambda) = -log a`` starts with a^2 uniform between the squared radii.
    """

    def __init__(
        self,
        config: RGLRUConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        inner = config.sizes(width)
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.gate = Linear(width, inner, bias=True, **common)
        self.x = Linear(width, inner, bias=True, **common)
        self.x_convolution = ShortConvolution(inner, config.convolution, bias=True, **common)
        self.input_gate = BlockLinear(inner, config.heads, **common)
        self.recurrence_gate = BlockLinear(inner, config.heads, **common)
        self.output = Linear(inner, width, bias=True, scale=layer.residual_scale, **common)
        low, high = (r**2 for r in config.radius)
        squares = jax.random.uniform(rngs.params(), (inner,), jnp.float32, low, high)
        # The inverse of softplus of -log a, a = sqrt(squares).
        self.Lambda = Float32Param(jnp.log(jnp.expm1(-0.5 * jnp.log(squares))))
        self.config = config

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: RGLRUCache | None = None,
    ) -> tuple[jax.Array, RGLRUCache | None]:
        """Mixes over time.

        Args:
          x: [B, T, D].
          segment_ids: [B, T] int32, 0 = padding; None: all one segment.
          positions: the contract's; the state itself carries the order, so they play no part.
          cache: what `init_cache` or an earlier call gave; None: no cache.

        Returns:
          y [B, T, D] in the compute dtype, and the cache after these tokens (None without one).
        """
        before = (None,) * 3 if cache is None else cache
        v, x_state = self.x_convolution(self.x(x), segment_ids=segment_ids, state=before[0])
        read, keep = (
            jax.nn.sigmoid(gate(v, out_dtype=jnp.float32))
            for gate in (self.input_gate, self.recurrence_gate)
        )
        out, state = mixers.rg_lru(
            (read * v).astype(v.dtype),
            -_RATE * keep * jax.nn.softplus(self.Lambda[...]),
            initial_state=before[1],
            continues=before[2],
            segment_ids=segment_ids,
            chunk_size=self.config.chunk_size,
            impl=self.config.impl,
        )
        y = self.output(out * jax.nn.gelu(self.gate(x)))
        if segment_ids is not None:
            y = jnp.where((segment_ids != 0)[..., None], y, 0)
        if cache is None:
            return y, None
        some = True if segment_ids is None else jnp.any(segment_ids != 0, axis=1)
        return y, RGLRUCache(x_state, state, cache.started | some)

    def init_cache(self, batch: int, capacity: int) -> RGLRUCache:
        """An empty cache; its size does not depend on ``capacity``."""
        return RGLRUCache(
            self.x_convolution.init_state(batch),
            jnp.zeros((batch, self.x_convolution.channels), jnp.float32),
            jnp.zeros((batch,), jnp.bool),
        )
