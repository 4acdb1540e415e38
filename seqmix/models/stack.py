# SPDX-License-Identifier: Apache-2.0
"""The layers of a model: periods under one scan, the rest unrolled."""

import collections
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqmix.layers import LayerInfo
from seqmix.layers.auxiliary import Auxiliary, means_of, no_auxiliary
from seqmix.models.block import AUXILIARY, LOAD, Block, run_block
from seqmix.models.config import HybridLMConfig
from seqmix.models.pattern import Element
from seqmix.models.shared_block import SharedInput, SharedTransformer


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
      shared: the transformers that layers share, by name; every use reads the same weights, so
        that their gradient is the sum over the uses.
    """

    def __init__(self, config: HybridLMConfig, *, rngs: nnx.Rngs):
        plan = config.plan()
        branches = config.branches / config.layers

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
        self.shared = nnx.Dict(
            {
                name: SharedTransformer(
                    block,
                    config.width,
                    norm=config.norm,
                    norm_epsilon=config.norm_epsilon,
                    dtype=config.dtype,
                    param_dtype=config.param_dtype,
                    rngs=rngs,
                )
                for name, block in config.shared_blocks().items()
            }
        )
        self.remat = config.remat
        self.count = plan.periods

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: StackCache | None = None,
        auxiliary: bool = False,
    ) -> tuple[jax.Array, StackCache | None, Auxiliary | None]:
        """Runs all blocks.

        Args:
          x: residual stream [B, T, D].
          segment_ids, positions: [B, T] int32, as layers take them.
          cache: from `init_cache` or an earlier call; None: no cache.
          auxiliary: let layers compute the losses that they have of their own.

        Returns:
          The residual stream, the cache (None without one) and the sums of the layers' own losses
          and metrics (None where none is asked for or none has any). Where it is asked for, layers
          with experts count their load.
        """
        embeddings = x

        def run(blocks: nnx.List, stream: Any, caches: Any, prevent_cse: bool):
            caches = (None,) * len(blocks) if caches is None else caches
            (x, shared), after, loads = stream, [], []
            for block, before in zip(blocks, caches, strict=True):
                used = None if block.use is None else self.shared[block.use.name]
                x, new, shared = run_block(
                    block,
                    x,
                    before,
                    shared,
                    shared_input=None if used is None else SharedInput(embeddings, used),
                    segment_ids=segment_ids,
                    positions=positions,
                    remat=self.remat,
                    prevent_cse=prevent_cse,
                )
                after.append(new)
                loads.append(shared.pop(LOAD, None))
            return (x, shared), (tuple(after), tuple(loads))

        parts = cache if cache is not None else (None, None, None)
        shared = self._init_shared(*x.shape[:2], parts)
        if auxiliary and self.auxiliary_names:
            shared[AUXILIARY] = no_auxiliary(self.auxiliary_names)
        stream = (x, shared)
        stream, (leading, first) = run(self.leading, stream, parts[0], True)
        periods: tuple[Any, ...] = ()
        scanned: tuple[Any, ...] = ()
        if len(self.periods):
            graph, parameters = nnx.split(self.periods)

            def body(stream, inputs):
                parameters, caches = inputs
                # XLA unrolls a scan of one step; forward and recomputation could then merge.
                return run(nnx.merge(graph, parameters), stream, caches, self.count == 1)

            stream, (periods, scanned) = jax.lax.scan(body, stream, (parameters, parts[1]))
        (x, shared), (trailing, last) = run(self.trailing, stream, parts[2], True)
        cache = None if cache is None else StackCache(leading, periods, trailing)
        # Here, since Variables cannot change inside the scan.
        for block, load in zip(self._blocks, (*first, *scanned, *last), strict=True):
            if load is not None:
                block.feed_forward.add_load(load)
        sums = shared.get(AUXILIARY)
        return x, cache, None if sums is None else self._average(sums)

    @property
    def auxiliary_names(self) -> tuple[str, ...]:
        """Metrics that the layers report, sorted; empty where none has losses of its own."""
        return tuple(sorted({name for block in self._blocks for name in block.auxiliary_names}))

    def finish_step(self) -> None:
        """Ends a training step for the parts that a step changes without a gradient."""
        for block in self._blocks:
            for part in (block.mixer, block.feed_forward):
                if hasattr(part, "finish_step"):
                    part.finish_step()

    @property
    def _blocks(self) -> tuple[Block, ...]:
        return (*self.leading, *self.periods, *self.trailing)

    def _average(self, sums: Auxiliary) -> Auxiliary:
        """Divides the metrics that are means over layers by the number of layers that report."""
        layers: collections.Counter[str] = collections.Counter()
        for blocks, count in ((self.leading, 1), (self.periods, self.count), (self.trailing, 1)):
            for block in blocks:
                layers.update(dict.fromkeys(means_of(block.feed_forward), count))
        metrics = {name: value / (layers[name] or 1) for name, value in sums.metrics.items()}
        return Auxiliary(sums.loss, metrics)

    def _init_shared(self, batch: int, time: int, caches: Any) -> dict[str, Any]:
        """What the lowest of the layers that hand something upwards get, by `shared_name`."""
        shared = {}
        blocks = (self.leading, self.periods, self.trailing)
        for part, held in zip(blocks, caches, strict=True):
            for index, block in enumerate(part):
                name = getattr(block.mixer, "shared_name", None)
                if name is None or name in shared:
                    continue
                cache = None if held is None else held[index]
                if part is self.periods:
                    cache = jax.tree.map(lambda leaf: leaf[0], cache)
                initial = block.mixer.init_shared(batch, time, cache)
                if initial is not None:
                    shared[name] = initial
        return shared

    def init_cache(self, batch: int, capacity: int) -> StackCache:
        """Empty caches of all blocks for ``capacity`` tokens."""

        def stacked(leaf: jax.Array) -> jax.Array:
            return jnp.broadcast_to(leaf, (self.count, *leaf.shape))

        leading, periods, trailing = (
            tuple(block.init_cache(batch, capacity, self.shared) for block in blocks)
            for blocks in (self.leading, self.periods, self.trailing)
        )
        return StackCache(leading, jax.tree.map(stacked, periods), trailing)
