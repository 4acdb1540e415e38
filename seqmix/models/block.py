# SPDX-License-Identifier: Apache-2.0
"""Pre-norm residual block: a mixer, then a feed-forward part."""

import functools
from typing import Any

import jax
from flax import nnx

from seqmix.layers import LayerInfo, RMSNorm, registry
from seqmix.models.config import HybridLMConfig
from seqmix.models.feed_forward import FeedForward
from seqmix.models.pattern import Element

_POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Block(nnx.Module):
    """x += mixer(norm(x)); x += feed_forward(norm(x)).

    The residual stream keeps its own dtype; norms, mixer and feed-forward part give the compute
    dtype.
    """

    def __init__(
        self, config: HybridLMConfig, element: Element, *, layer: LayerInfo, rngs: nnx.Rngs
    ):
        dtypes = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        common = {"layer": layer, "rngs": rngs, **dtypes}
        norm = functools.partial(RMSNorm, config.width, epsilon=config.norm_epsilon, **dtypes)
        self.mixer_norm = norm()
        mixer = registry.get(element.name).layer
        self.mixer = mixer(config.mixer(element), config.width, **common)
        part = config.feed_forward
        self.feed_forward_norm = None if part is None else norm()
        self.feed_forward = None if part is None else FeedForward(part, config.width, **common)

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
          shared: what layers hand to later ones, by `shared_name`.

        Returns:
          The residual stream in its own dtype, the mixer's cache (None without one) and `shared`.
        """
        # Named scopes label the profiler's trace.
        with jax.named_scope("mixer"):
            options = {"segment_ids": segment_ids, "positions": positions, "cache": cache}
            name = getattr(self.mixer, "shared_name", None)
            if name is None:
                y, cache = self.mixer(self.mixer_norm(x), **options)
            else:
                y, cache, given = self.mixer(self.mixer_norm(x), shared=shared[name], **options)
                shared = shared | {name: given}
            x = x + y.astype(x.dtype)
        if self.feed_forward is not None:
            with jax.named_scope("feed_forward"):
                x = x + self.feed_forward(self.feed_forward_norm(x)).astype(x.dtype)
        return x, cache, shared


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
