# SPDX-License-Identifier: Apache-2.0
"""Pre-norm residual block: a mixer, then a feed-forward part."""

import functools
from typing import Any

import jax
from flax import nnx

from seqmix.layers import LayerInfo, RMSNorm, registry
from seqmix.layers.auxiliary import names_of
from seqmix.models.config import HybridLMConfig
from seqmix.models.feed_forward import FeedForward, FeedForwardConfig
from seqmix.models.moe import MoE, MoEConfig
from seqmix.models.pattern import Element

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
    """x += mixer(norm(x)); x += feed_forward(norm(x)).

    Either part may be missing. The residual stream keeps its own dtype; norms, mixer and
    feed-forward part give the compute dtype.
    """

    def __init__(
        self, config: HybridLMConfig, element: Element, *, layer: LayerInfo, rngs: nnx.Rngs
    ):
        dtypes = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        common = {"layer": layer, "rngs": rngs, **dtypes}
        norm = functools.partial(RMSNorm, config.width, epsilon=config.norm_epsilon, **dtypes)
        mixer, part = config.mixer(element), config.feed_forward_of(element)
        self.mixer_norm = None if mixer is None else norm()
        self.mixer = (
            None
            if mixer is None
            else registry.get(element.name).layer(mixer, config.width, **common)
        )
        self.feed_forward_norm = None if part is None else norm()
        self.feed_forward = (
            None if part is None else _FEED_FORWARDS[type(part)](part, config.width, **common)
        )

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: Any = None,
        shared: dict[str, Any],
    ) -> tuple[jax.Array, Any, dict[str, Any]]:
        """Runs the block.

        Args:
          x: residual stream [B, T, D].
          segment_ids, positions: [B, T] int32, as layers take them.
          cache: the mixer's cache, or None.
          shared: what layers hand to later ones, by `shared_name`; under `AUXILIARY`, if it is
            there, the sums of the losses and metrics of the layers below.

        Returns:
          The residual stream in its own dtype, the mixer's cache (None without one) and `shared`,
          with the load of its experts under `LOAD` if it reports one.
        """
        # Named scopes label the profiler's trace.
        if self.mixer is not None:
            with jax.named_scope("mixer"):
                x, cache, shared = self._mix(x, segment_ids, positions, cache, shared)
        if self.feed_forward is not None:
            with jax.named_scope("feed_forward"):
                x, shared = self._feed_forward(x, segment_ids, shared)
        return x, cache, shared

    def _mix(self, x, segment_ids, positions, cache, shared):
        options = {"segment_ids": segment_ids, "positions": positions, "cache": cache}
        name = getattr(self.mixer, "shared_name", None)
        if name is not None:
            options["shared"] = shared[name]
        reports = AUXILIARY in shared and bool(names_of(self.mixer))
        if reports:
            options["auxiliary"] = True
        y, cache, *given = self.mixer(self.mixer_norm(x), **options)
        if reports:
            shared = shared | {AUXILIARY: shared[AUXILIARY].add(given.pop())}
        if name is not None:
            shared = shared | {name: given.pop()}
        return x + y.astype(x.dtype), cache, shared

    def _feed_forward(self, x, segment_ids, shared):
        y = self.feed_forward_norm(x)
        if AUXILIARY in shared and names_of(self.feed_forward):
            y, report, load = self.feed_forward(y, segment_ids=segment_ids, auxiliary=True)
            shared = shared | {AUXILIARY: shared[AUXILIARY].add(report), LOAD: load}
        else:
            y = self.feed_forward(y)
        return x + y.astype(x.dtype), shared

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
        return block(x, segment_ids=segment_ids, positions=positions, cache=cache, shared=shared)
    graph, parameters = nnx.split(block)

    @functools.partial(jax.checkpoint, policy=_POLICIES[remat], prevent_cse=prevent_cse)
    def run(parameters, x, cache, shared, segment_ids, positions):
        return nnx.merge(graph, parameters)(
            x, segment_ids=segment_ids, positions=positions, cache=cache, shared=shared
        )

    return run(parameters, x, cache, shared, segment_ids, positions)
