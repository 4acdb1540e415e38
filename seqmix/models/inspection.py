# SPDX-License-Identifier: Apache-2.0
"""What a config will cost, without allocating it: parameters, FLOPs, cache bytes."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from rich.console import Group
from rich.table import Table

from seqmix.layers.parameters import Buffer
from seqmix.models.config import HybridLMConfig
from seqmix.models.language_model import HybridLM

CONTEXTS = (1024, 4096, 16_384, 65_536, 262_144)


@dataclasses.dataclass(frozen=True)
class LayerRow:
    """One layer of the report.

    Attributes:
      index: position from the bottom.
      element: the pattern's text for it, such as 'local/attention'.
      parameters: number of parameters, norms and feed-forward part included.
      active: those that a token uses: without the experts that it does not go to.
      flops: forward FLOPs per token.
      cache_bytes: bytes per sequence at each of the report's contexts.
    """

    index: int
    element: str
    parameters: int
    active: int
    flops: float
    cache_bytes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """What `inspect` found.

    Attributes:
      layers: a row per layer.
      embedding_parameters: of the token embedding (also the head when tied) and meta tokens.
      head_parameters: of an untied head, else 0.
      shared_parameters: of the transformers that layers share, each counted once; their FLOPs are
        in the rows of the layers that use them.
      norm_parameters: of the norms of output and, where there is one, embedding.
      parameters: of the whole model.
      active: those that a token uses, embedding and head included.
      head_flops: forward FLOPs per token of the head.
      flops: forward FLOPs per token of the whole model at ``sequence_length``.
      sequence_length: tokens per row that FLOPs are counted for.
      contexts: context lengths of the byte columns.
      cache_bytes: bytes per sequence of the decode cache at each of them.
    """

    layers: tuple[LayerRow, ...]
    embedding_parameters: int
    head_parameters: int
    shared_parameters: int
    norm_parameters: int
    parameters: int
    active: int
    head_flops: float
    flops: float
    sequence_length: int
    contexts: tuple[int, ...]
    cache_bytes: tuple[int, ...]

    @property
    def training_flops(self) -> float:
        """FLOPs per token of a training step: the backward pass costs two forward passes."""
        return 3 * self.flops

    def render(self) -> Group:
        """The report as tables for `rich.print`."""
        layers = Table(title=f"Layers (FLOPs at {self.sequence_length} tokens per row)")
        sparse = self.active < self.parameters
        for column in ("layer", "mixer", "parameters", *(["active"] * sparse), "FLOPs per token"):
            layers.add_column(column, justify="left" if column == "mixer" else "right")

        def add(index: str, name: str, total: str, active: str, flops: str, **options: bool):
            layers.add_row(index, name, total, *([active] * sparse), flops, **options)

        count = f"{self.embedding_parameters:,}"
        add("", "embedding", count, count, "0")
        for row in self.layers:
            add(
                str(row.index),
                row.element,
                f"{row.parameters:,}",
                f"{row.active:,}",
                _si(row.flops),
            )
        if self.shared_parameters:
            count = f"{self.shared_parameters:,}"
            add("", "shared blocks", count, count, "by use")
        head = f"{self.head_parameters:,}" if self.head_parameters else "tied"
        count = f"{self.norm_parameters:,}"
        add("", "norm", count, count, "not counted")
        add("", "head", head, head, _si(self.head_flops), end_section=True)
        add("", "total, forward", f"{self.parameters:,}", f"{self.active:,}", _si(self.flops))
        add("", "training step", "", "", _si(self.training_flops))

        cache = Table(title="State and KV bytes per sequence by context length")
        cache.add_column("mixer")
        for context in self.contexts:
            cache.add_column(f"{context:,}", justify="right")
        for element in dict.fromkeys(row.element for row in self.layers):
            rows = [row for row in self.layers if row.element == element]
            sums = [sum(values) for values in zip(*(r.cache_bytes for r in rows), strict=True)]
            cache.add_row(f"{len(rows)} x {element}", *map(_bytes, sums))
        cache.add_section()
        cache.add_row("total", *map(_bytes, self.cache_bytes))
        return Group(layers, cache)

    def plot(self, path: str | Path) -> None:
        """Draws cache bytes against context length, the whole model and each kind of layer.

        Args:
          path: image file; the suffix decides the format. Its folder must exist.
        """
        from matplotlib.figure import Figure  # slow to import, and only needed here

        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.add_subplot()
        for element in dict.fromkeys(row.element for row in self.layers):
            rows = [row.cache_bytes for row in self.layers if row.element == element]
            sums = [sum(values) for values in zip(*rows, strict=True)]
            axes.plot(self.contexts, sums, marker=".", label=f"{len(rows)} x {element}")
        axes.plot(self.contexts, self.cache_bytes, "k--", linewidth=3, alpha=0.5, label="model")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("context length (tokens)")
        axes.set_ylabel("state and KV bytes per sequence")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=150)


def inspect(
    config: HybridLMConfig,
    *,
    sequence_length: int = 2048,
    contexts: Sequence[int] = CONTEXTS,
) -> Report:
    """Counts parameters, FLOPs and cache bytes of a model without allocating it.

    Args:
      config: of the model.
      sequence_length: tokens per row for the FLOPs; attention's share grows with it.
      contexts: context lengths for the cache bytes.

    Raises:
      ValueError: a length is below 1.
    """
    for name, length in (
        ("sequence_length", sequence_length),
        *(("contexts", c) for c in contexts),
    ):
        if length < 1:
            raise ValueError(f"{name} must be >= 1, got {length}")
    # Unrolled, so that every layer has parameters of its own to count.
    unrolled = dataclasses.replace(config, scan=False)
    model = nnx.eval_shape(lambda: HybridLM(unrolled, rngs=nnx.Rngs(0)))
    context = (sequence_length + 1) / 2
    rows = []
    for index, element in enumerate(config.plan().elements):
        part = config.feed_forward_of(element)
        flops = config.layer_flops(element, context)
        cache = tuple(config.layer_cache_bytes(element, c) for c in contexts)
        parameters = parameter_count(model.stack.leading[index])
        active = parameters - (0 if part is None else part.inactive_parameters(config.width))
        rows.append(LayerRow(index, str(element), parameters, active, flops, cache))
    return Report(
        layers=tuple(rows),
        embedding_parameters=parameter_count((model.embedding, model.meta)),
        head_parameters=0 if model.head is None else parameter_count(model.head),
        shared_parameters=parameter_count(model.stack.shared),
        norm_parameters=parameter_count((model.norm, model.embedding_norm)),
        parameters=parameter_count(model),
        active=parameter_count(model) - config.inactive_parameters,
        head_flops=2.0 * config.width * config.vocabulary,
        flops=config.flops_per_token(context),
        sequence_length=sequence_length,
        contexts=tuple(contexts),
        cache_bytes=tuple(config.cache_bytes(c) for c in contexts),
    )


def parameter_count(tree: Any) -> int:
    """Number of elements of all arrays of modules, states or Variables, abstract or not.

    Buffers, which are not trained, do not count.
    """
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return sum(math.prod(leaf.shape) for leaf in leaves if not isinstance(leaf, Buffer))


def _si(value: float) -> str:
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g}"


def _bytes(value: int) -> str:
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value >= 1024**power:
            return f"{value / 1024**power:.3g} {unit}"
    return f"{value} B"
