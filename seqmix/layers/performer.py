# SPDX-License-Identifier: Apache-2.0
"""Performer (arXiv 2009.14794): linear attention with positive orthogonal random features."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix import config as configs
from seqmix import mixers
from seqmix.layers import checks
from seqmix.layers.linear import Linear
from seqmix.layers.parameters import Buffer
from seqmix.layers.registry import LayerInfo, register
from seqmix.mixers import feature_maps


@configs.configurable("Performer")
@dataclasses.dataclass(frozen=True)
class PerformerConfig:
    """Settings of `Performer`.

    Attributes:
      heads: default: as many as fill the model width.
      head_width: width of queries, keys and values of a head.
      features: random features of a head.
      constant_norm: random directions all of length sqrt(head_width), not of Gaussian lengths.
      epsilon: keeps features from vanishing.
      redraw_every: training steps after which the random projection is drawn anew, as the paper
        does; default never.
      chunk_size: tokens of a chunk; default: the mixer's choice.
      impl: implementation of the mixer, see `seqmix.mixers.performer_attention`.
    """

    heads: int | None = None
    head_width: int = 64
    features: int = 256
    constant_norm: bool = False
    epsilon: float = 1e-6
    redraw_every: int | None = None
    chunk_size: int | None = None
    impl: str = "auto"

    def __post_init__(self):
        checks.at_least(self, 1, "heads", "head_width", "features", "chunk_size", "redraw_every")
        checks.positive(self, "epsilon")

    def flops_per_token(self, width: int, context: float) -> float:
        """Forward FLOPs per token, multiply-add = 2; the same at every context.

        Counts the projections, the random ones included, and the two products of the recurrence
        (write, read out), not the extra products of its chunked form.
        """
        heads = checks.derived_heads(self, width)
        projections = 8 * width * heads * self.head_width
        random = 4 * heads * self.head_width * self.features
        return projections + random + 4 * heads * self.features * (self.head_width + 1)

    def cache_bytes(self, width: int, context: int, dtype: Any) -> int:
        """Bytes per sequence of the cache; the same at every context."""
        heads = checks.derived_heads(self, width)
        matrix = checks.array_bytes((heads, self.features, self.head_width + 1), jnp.float32)
        return matrix + checks.array_bytes((heads,), jnp.float32)


@register("performer", PerformerConfig)
class Performer(nnx.Module):
    """y = W_o o with o from `seqmix.mixers.performer_attention`; q, k, v = x W.

    The heads share the random projection. It is no parameter; `redraw_features` draws another one,
    training does every `PerformerConfig.redraw_every` steps. A checkpoint keeps it.
    """

    def __init__(
        self,
        config: PerformerConfig,
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
        self.output = Linear(inner, width, scale=layer.residual_scale, **common)
        self.projection = Buffer(_draw(config, rngs.params()))
        redrawn = config.redraw_every is not None
        self.steps = Buffer(jnp.zeros((), jnp.int32)) if redrawn else None
        self.draw_key = Buffer(jax.random.key_data(rngs.params())) if redrawn else None
        self.config = config
        self.heads = heads

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: mixers.PerformerState | None = None,
    ) -> tuple[jax.Array, mixers.PerformerState | None]:
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
        query, key, value = (
            project(x).reshape(batch, time, self.heads, config.head_width)
            for project in (self.query, self.key, self.value)
        )
        out, state = mixers.performer_attention(
            query,
            key,
            value,
            self.projection[...],
            eps=config.epsilon,
            initial_state=cache,
            segment_ids=segment_ids,
            chunk_size=config.chunk_size,
            impl=config.impl,
        )
        y = self.output(out.reshape(batch, time, -1))
        return y, None if cache is None else state

    def finish_step(self) -> None:
        """Counts a training step, and draws a new projection after the last of `redraw_every`.

        Under a scanned stack, the arrays have an axis of periods in front.
        """
        config = self.config
        if config.redraw_every is None:
            return

        def follow(layer):
            steps, key, projection = layer
            key = jax.random.fold_in(jax.random.wrap_key_data(key), steps)
            due = steps % config.redraw_every == 0
            return jax.lax.cond(due, lambda: _draw(config, key), lambda: projection)

        steps = self.steps[...] + 1
        layers = (steps, self.draw_key[...], self.projection[...])
        # A map runs one branch of each layer, where vmap would run both.
        self.projection[...] = jax.lax.map(follow, layers) if steps.ndim else follow(layers)
        self.steps[...] = steps

    def init_cache(self, batch: int, capacity: int) -> mixers.PerformerState:
        """An empty state; its size does not depend on ``capacity``."""
        config = self.config
        return mixers.init_performer_state(
            batch, self.heads, self.heads, config.features, config.head_width
        )


def redraw_features(model: nnx.Module, key: jax.Array) -> None:
    """Draws new random projections for every `Performer` in a module, in place.

    Args:
      model: any module; layers stacked for a scan get one draw each.
      key: random key.
    """
    for number, (_, module) in enumerate(nnx.iter_graph(model)):
        if isinstance(module, Performer):
            stacked = module.projection.shape[:-2]
            keys = jax.random.split(jax.random.fold_in(key, number), stacked)
            draw = lambda key, config=module.config: _draw(config, key)  # noqa: E731
            for _ in stacked:
                draw = jax.vmap(draw)
            module.projection[...] = draw(keys)


def _draw(config: PerformerConfig, key: jax.Array) -> jax.Array:
    return feature_maps.random_features(
        key, config.features, config.head_width, constant_norm=config.constant_norm
    )
