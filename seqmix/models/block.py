# SPDX-License-Identifier: Apache-2.0
"""Residual block: a mixer, then a feed-forward part."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix.layers import LayerInfo, registry
from seqmix.layers.auxiliary import names_of
from seqmix.models.config import HybridLMConfig
from seqmix.models.feed_forward import FeedForward, FeedForwardConfig
from seqmix.models.moe import MoE, MoEConfig
from seqmix.models.pattern import Element
from seqmix.models.residual import make_norm
from seqmix.models.shared_block import (
    SharedBlockCache,
    SharedBlockConfig,
    SharedInput,
    SharedTransformer,
    SharedUse,
)

_POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


# Where `shared` holds the sums of the layers' own losses and metrics, if they are asked for.
AUXILIARY = "auxiliary"
# Where a block leaves the load of its experts, for the stack to take.
LOAD = "load"

_FEED_FORWARDS = {FeedForwardConfig: FeedForward, MoEConfig: MoE}


class Block(nnx.Module):
    """x += mixer(norm(x)); x += feed_forward(norm(x)), or as `ResidualConfig` says.

    Either part may be missing. The residual stream keeps its own dtype; norms, mixer and
    feed-forward part give the compute dtype.

    Attributes:
      mixer_norm, feed_forward_norm: before the part, or None.
      mixer_output_norm, feed_forward_output_norm: after it, or None.
      use: what this layer has of its own for its use of a shared transformer, or None.
    """

    def __init__(
        self, config: HybridLMConfig, element: Element, *, layer: LayerInfo, rngs: nnx.Rngs
    ):
        dtypes = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        common = {"layer": layer, "rngs": rngs, **dtypes}
        mixer, part = config.mixer(element), config.feed_forward_of(element)
        self.mixer_residual, self.feed_forward_residual = config.residuals_of(element)

        def norm(wanted: bool) -> nnx.Module | None:
            if not wanted:
                return None
            return make_norm(config.norm, config.width, epsilon=config.norm_epsilon, **dtypes)

        residual = self.mixer_residual
        self.mixer_norm = norm(mixer is not None and residual.norms_input)
        self.mixer_output_norm = norm(mixer is not None and residual.norms_output)
        if isinstance(mixer, SharedBlockConfig):
            self.use = SharedUse(mixer, config.width, **common)
            self.mixer = mixer.mixer_layer(mixer.mixer, config.width, **common)
        else:
            build = None if mixer is None else registry.get(element.name).layer
            self.use = None
            self.mixer = None if mixer is None else build(mixer, config.width, **common)
        residual = self.feed_forward_residual
        self.feed_forward_norm = norm(part is not None and residual.norms_input)
        self.feed_forward_output_norm = norm(part is not None and residual.norms_output)
        self.feed_forward = (
            None if part is None else _FEED_FORWARDS[type(part)](part, config.width, **common)
        )
        self.dtype = jnp.dtype(config.dtype)

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: Any = None,
        shared: dict[str, Any],
        shared_input: SharedInput | None = None,
    ) -> tuple[jax.Array, Any, dict[str, Any]]:
        """Runs the block.

        Args:
          x: residual stream [B, T, D].
          segment_ids, positions: [B, T] int32, as layers take them.
          cache: the mixer's cache, or None.
          shared: what layers hand to later ones, by `shared_name`; under `AUXILIARY`, if it is
            there, the sums of the losses and metrics of the layers below.
          shared_input: what a block with a `use` reads beside x.

        Returns:
          The residual stream in its own dtype, the mixer's cache (None without one) and `shared`,
          with the load of its experts under `LOAD` if it reports one.
        """
        # Named scopes label the profiler's trace.
        if self.mixer is not None:
            with jax.named_scope("mixer"):
                x, cache, shared = self._mix(x, segment_ids, positions, cache, shared, shared_input)
        if self.feed_forward is not None:
            with jax.named_scope("feed_forward"):
                x, shared = self._feed_forward(x, segment_ids, shared)
        return x, cache, shared

    def _mix(self, x, segment_ids, positions, cache, shared, shared_input):
        options = {"segment_ids": segment_ids, "positions": positions, "cache": cache}
        shift, keys = None, None
        if self.use is not None:
            before = (None, None) if cache is None else cache
            shift, keys = self.use(x, shared_input, **(options | {"cache": before[0]}))
            options["cache"] = before[1]
        name = getattr(self.mixer, "shared_name", None)
        if name is not None:
            options["shared"] = shared[name]
        reports = AUXILIARY in shared and bool(names_of(self.mixer))
        if reports:
            options["auxiliary"] = True
        x, y = self.mixer_residual.enter(x, self.mixer_norm, self.dtype, shift)
        y, cache, *given = self.mixer(y, **options)
        if reports:
            shared = shared | {AUXILIARY: shared[AUXILIARY].add(given.pop())}
        if name is not None:
            shared = shared | {name: given.pop()}
        if self.use is not None and cache is not None:
            cache = SharedBlockCache(keys, cache)
        return self.mixer_residual.leave(x, y, self.mixer_output_norm), cache, shared

    def _feed_forward(self, x, segment_ids, shared):
        x, y = self.feed_forward_residual.enter(x, self.feed_forward_norm, self.dtype)
        if AUXILIARY in shared and names_of(self.feed_forward):
            y, report, load = self.feed_forward(y, segment_ids=segment_ids, auxiliary=True)
            shared = shared | {AUXILIARY: shared[AUXILIARY].add(report), LOAD: load}
        else:
            y = self.feed_forward(y)
        return self.feed_forward_residual.leave(x, y, self.feed_forward_output_norm), shared

    def init_cache(
        self, batch: int, capacity: int, transformers: Mapping[str, SharedTransformer]
    ) -> Any:
        """An empty cache of the mixer, None without one.

        Args:
          batch, capacity: as layers take them.
          transformers: the model's shared transformers by name.
        """
        if self.mixer is None:
            return None
        cache = self.mixer.init_cache(batch, capacity)
        if self.use is None:
            return cache
        attention = transformers[self.use.name].attention
        return SharedBlockCache(attention.init_cache(batch, capacity), cache)

    @property
    def auxiliary_names(self) -> tuple[str, ...]:
        """Metrics that the block reports."""
        return (*names_of(self.mixer), *names_of(self.feed_forward))


def run_block(
    block: Block,
    x: jax.Array,
    cache: Any,
    shared: dict[str, Any],
    *,
    shared_input: SharedInput | None,
    segment_ids: jax.Array | None,
    positions: jax.Array | None,
    remat: str,
    prevent_cse: bool,
) -> tuple[jax.Array, Any, dict[str, Any]]:
    """Calls a block under a rematerialisation policy of `HybridLMConfig.remat`.

    Args:
      prevent_cse: see `jax.checkpoint`; False inside a scan, whose two loops keep forward and
        recomputation apart by themselves.
    """
    if remat == "none":
        return block(
            x,
            segment_ids=segment_ids,
            positions=positions,
            cache=cache,
            shared=shared,
            shared_input=shared_input,
        )
    embeddings, transformer = (None, None) if shared_input is None else shared_input
    graph, parameters = nnx.split((block, transformer))

    @functools.partial(jax.checkpoint, policy=_POLICIES[remat], prevent_cse=prevent_cse)
    def run(parameters, x, cache, shared, embeddings, segment_ids, positions):
        block, transformer = nnx.merge(graph, parameters)
        return block(
            x,
            segment_ids=segment_ids,
            positions=positions,
            cache=cache,
            shared=shared,
            shared_input=None if transformer is None else SharedInput(embeddings, transformer),
        )

    return run(parameters, x, cache, shared, embeddings, segment_ids, positions)
