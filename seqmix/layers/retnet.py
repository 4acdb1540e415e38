# SPDX-License-Identifier: Apache-2.0
"""Multi-scale retention (RetNet, arXiv 2307.08621), as torchscale computes it."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers.linear import Linear
from seqmix.layers.norms import rms_normalise
from seqmix.layers.registry import LayerInfo, register


@configs.configurable("RetNet")
@dataclasses.dataclass(frozen=True)
class RetNetConfig:
    """Settings of `RetNet`.

    Attributes:
      heads: default: as many as fill the model width.
      head_width: width of queries and keys of a head, even.
      value_width: width of values of a head; default: twice ``head_width``.
      rotary_base: the slowest pair of channels turns by 1 / rotary_base per token.
      norm_epsilon: epsilon of the norm over each head.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.retention`.
    """

    heads: int | None = None
    head_width: int = 64
    value_width: int | None = None
    rotary_base: float = 10_000.0
    norm_epsilon: float = 1e-6
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "value_width", "chunk_size")
        checks.positive(self, "rotary_base", "norm_epsilon")
        checks.multiple(self, "head_width", self.head_width, "a pair", 2)

    def sizes(self, width: int) -> tuple[int, int, int]:
        """Heads, key width and value width at this model width.

        Raises:
          ValueError: the heads do not fill the width.
        """
        value_width = self.value_width or 2 * self.head_width
        return checks.derived_heads(self, width), self.head_width, value_width

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2; the same at every context.

        Counts the projections and the two products of the recurrence (write, read out), not the
        extra products of its chunked form.
        """
        heads, key_width, value_width = self.sizes(width)
        projections = 2 * width * heads * (2 * key_width + 3 * value_width)
        return projections + 4 * heads * key_width * value_width

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache; the same at every context."""
        state = checks.array_bytes(self.sizes(width), jnp.float32)
        return state + checks.array_bytes((), jnp.int32)


class RetNetCache(NamedTuple):
    """Decode cache of a `RetNet`.

    Attributes:
      state: [B, H, K, V] float32.
      length: [B] int32, tokens of the current document seen so far.
    """

    state: jax.Array
    length: jax.Array


@register("retnet", RetNetConfig)
class RetNet(nnx.Module):
    """y = W_o (silu(x W_g) * rms_norm(o)) with o from `seqmix.mixers.retention`.

    Queries and keys are rotated in pairs of channels (2i, 2i + 1) by ``position *
    base**(-i / (K/2 - 1))``: both ends of the range are used, unlike RoPE's. The norm over each
    head has no parameters. Projections start with the variance of Xavier's rule of gain 2**-2.5.
    """

    def __init__(
        self,
        config: RetNetConfig,
        width: int,
        *,
        layer: LayerInfo,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        heads, key_width, value_width = config.sizes(width)
        keys, values = heads * key_width, heads * value_width
        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}

        def projection(outputs: int) -> Linear:
            # Xavier: variance gain^2 * 2 / (inputs + outputs).
            scale = 2**-2.5 * (2 * width / (width + outputs)) ** 0.5
            return Linear(width, outputs, scale=scale, **common)

        self.query, self.key = projection(keys), projection(keys)
        self.value, self.gate = projection(values), projection(values)
        self.output = Linear(values, width, scale=layer.residual_scale, **common)
        self.config = config
        self.sizes = (heads, key_width, value_width)
        self.dtype = jnp.dtype(dtype)

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: RetNetCache | None = None,
    ) -> tuple[jax.Array, RetNetCache | None]:
        """Mixes over time.

        Args:
          x: [B, T, D].
          segment_ids: [B, T] int32, 0 = padding; None: all one segment.
          positions: [B, T] int32 for the rotation; None: counted per document, from the cache's
            length.
          cache: what `init_cache` or an earlier call gave; None: no cache.

        Returns:
          y [B, T, D] in the compute dtype, and the cache after these tokens (None without one).
        """
        heads, key_width, value_width = self.sizes
        batch, time, _ = x.shape
        ids = jnp.ones((batch, time), jnp.int32) if segment_ids is None else segment_ids
        counted = mixers.segment_positions(ids, None if cache is None else cache.length)
        positions = counted if positions is None else positions
        query, key = (
            rotate_pairs(
                project(x).reshape(batch, time, heads, key_width),
                positions,
                self.config.rotary_base,
            )
            for project in (self.query, self.key)
        )
        out, state = mixers.retention(
            query,
            key,
            self.value(x).reshape(batch, time, heads, value_width),
            initial_state=None if cache is None else cache.state,
            segment_ids=segment_ids,
            chunk_size=self.config.chunk_size,
            impl=self.config.impl,
        )
        normal = rms_normalise(out, self.config.norm_epsilon).reshape(batch, time, -1)
        gate = jax.nn.silu(self.gate(x).astype(jnp.float32))
        y = self.output((gate * normal).astype(self.dtype))
        if cache is None:
            return y, None
        length = counted[:, -1] + (ids[:, -1] != 0)
        return y, RetNetCache(state, length.astype(jnp.int32))

    def init_cache(self, batch: int, capacity: int) -> RetNetCache:
        """An empty cache; its size does not depend on ``capacity``."""
        state = jnp.zeros((batch, *self.sizes), jnp.float32)
        return RetNetCache(state, jnp.zeros((batch,), jnp.int32))


def rotate_pairs(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Turns channel pairs (2i, 2i + 1) of [B, T, H, K] by ``positions * base**(-i / (K/2 - 1))``.

    Args:
      x: [B, T, H, K], K even.
      positions: [B, T] int32.
      base: slowness of the last pair; a single pair turns by 1 per token.

    Returns:
      [B, T, H, K] in x's dtype; angles and products are float32.
    """
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    speed = jnp.power(base, -jnp.linspace(0.0, 1.0, pairs.shape[-2]))
    angle = positions.astype(jnp.float32)[..., None, None] * speed
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    first, second = pairs[..., 0], pairs[..., 1]
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)
