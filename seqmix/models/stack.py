# SPDX-License-Identifier: Apache-2.0
"""The layers of a model: periods under one scan, the rest unrolled."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix.layers import LayerInfo
from seqmix.models.block import Block, run_block
from seqmix.models.config import HybridLMConfig
from seqmix.models.pattern import Element


class StackCache(NamedTuple):
    """Caches of a `Stack`, in the order of its three lists.

    Attributes:
      leading: a cache per unrolled block.
      periods: a cache per position in the period; arrays [periods, B, ...].
      trailing: a cache per unrolled block.
    """

    leading: tuple[Any, ...]
    periods: tuple[Any, ...]
    trailing: tuple[Any, ...]


class Stack(nnx.Module):
    """Blocks from the bottom up.

    Attributes:
      leading: unrolled blocks before the periods; with ``config.scan = False`` all of them.
      periods: one block per position in the period, parameters [periods, ...]; run by `lax.scan`.
      trailing: unrolled blocks after the periods: the remainder and the trailing pattern.
    """

    def __init__(self, config: HybridLMConfig, *, rngs: nnx.Rngs):
        plan = config.plan()
        branches = 1 if config.feed_forward is None else 2

        def build(
            elements: Iterable[Element], start: int, rngs: nnx.Rngs, below: Any = 0
        ) -> nnx.List:
            return nnx.List(
                Block(
                    config,
                    element,
                    layer=LayerInfo(start + index, config.layers, branches, below + start + index),
                    rngs=rngs,
                )
                for index, element in enumerate(elements)
            )

        # Keys are drawn in one order, so that both forms start with the same parameters.
        leading = build(plan.leading, 0, rngs)
        period = nnx.List([])
        start = len(plan.leading)
        if plan.periods:
            keys = jax.random.split(rngs.params(), plan.periods)
            below = start + len(plan.period) * jnp.arange(plan.periods)

            def build_period(key: jax.Array, below: Any) -> nnx.List:
                return build(plan.period, 0, nnx.Rngs(params=key), below)

            if config.scan:
                period = nnx.vmap(build_period)(keys, below)
            else:
                for inputs in zip(keys, below, strict=True):
                    leading.extend(build_period(*inputs))
        start += plan.periods * len(plan.period)
        rest = build(plan.remainder + plan.trailing, start, rngs)
        if not config.scan:
            leading.extend(rest)
            rest = nnx.List([])
        self.leading, self.periods, self.trailing = leading, period, rest
        self.remat = config.remat
        self.count = plan.periods

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: StackCache | None = None,
    ) -> tuple[jax.Array, StackCache | None]:
        """Runs all blocks.

        Args:
          x: residual stream [B, T, D].
          segment_ids, positions: [B, T] int32, as layers take them.
          cache: from `init_cache` or an earlier call; None: no cache.

        Returns:
          The residual stream and the cache (None without one).
        """

        def run(blocks: nnx.List, stream: Any, caches: Any, prevent_cse: bool):
            caches = (None,) * len(blocks) if caches is None else caches
            (x, shared), after = stream, []
            for block, before in zip(blocks, caches, strict=True):
                x, new, shared = run_block(
                    block,
                    x,
                    before,
                    shared,
                    segment_ids=segment_ids,
                    positions=positions,
                    remat=self.remat,
                    prevent_cse=prevent_cse,
                )
                after.append(new)
            return (x, shared), tuple(after)

        parts = cache if cache is not None else (None, None, None)
        stream = (x, self._init_shared(*x.shape[:2]))
        stream, leading = run(self.leading, stream, parts[0], True)
        periods: tuple[Any, ...] = ()
        if len(self.periods):
            graph, parameters = nnx.split(self.periods)

            def body(stream, inputs):
                parameters, caches = inputs
                # XLA unrolls a scan of one step; forward and recomputation could then merge.
                return run(nnx.merge(graph, parameters), stream, caches, self.count == 1)

            stream, periods = jax.lax.scan(body, stream, (parameters, parts[1]))
        (x, _), trailing = run(self.trailing, stream, parts[2], True)
        return x, None if cache is None else StackCache(leading, periods, trailing)

    def _init_shared(self, batch: int, time: int) -> dict[str, Any]:
        """What the lowest of the layers that hand something upwards get, by `shared_name`."""
        blocks = (*self.leading, *self.periods, *self.trailing)
        mixers = (block.mixer for block in blocks)
        return {
            m.shared_name: m.init_shared(batch, time) for m in mixers if hasattr(m, "shared_name")
        }

    def init_cache(self, batch: int, capacity: int) -> StackCache:
        """Empty caches of all blocks for ``capacity`` tokens."""

        def stacked(leaf: jax.Array) -> jax.Array:
            return jnp.broadcast_to(leaf, (self.count, *leaf.shape))

        leading, periods, trailing = (
            tuple(block.mixer.init_cache(batch, capacity) for block in blocks)
            for blocks in (self.leading, self.periods, self.trailing)
        )
        return StackCache(leading, jax.tree.map(stacked, periods), trailing)
