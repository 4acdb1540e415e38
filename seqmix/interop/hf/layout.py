# SPDX-License-Identifier: Apache-2.0
"""Layers as a pattern, and whether two configs are the same model."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from seqmix import config as configs
from seqmix.config import registry
from seqmix.layers import AttentionConfig, Mamba2Config, MambaConfig, RGLRUConfig
from seqmix.models import Element, FeedForwardConfig, HybridLMConfig, MoEConfig


def layout(elements: Sequence[str]) -> dict[str, Any]:
    """The fields of `HybridLMConfig` for a list of layers, one pattern element each.

    Takes the leading layers and the period that leave the fewest layers to compile, so that a
    scan runs over as many as possible.

    Returns:
      layers, leading and pattern.
    """
    count = len(elements)

    def period_from(first: int) -> int:
        """The shortest period of the layers from one on, the last one perhaps cut short."""
        rest = elements[first:]
        return next(
            size
            for size in range(1, len(rest) + 1)
            if all(a == b for a, b in zip(rest, rest[size:], strict=False))
        )

    def unrolled(first: int) -> int:
        period = period_from(first)
        return first + period + (count - first) % period

    first = min(range(count), key=lambda first: (unrolled(first), first))
    period = elements[first : first + period_from(first)]
    return {"layers": count, "leading": _text(elements[:first]), "pattern": _text(period)}


def _text(elements: Sequence[str]) -> str:
    runs = [(name, len(list(run))) for name, run in itertools.groupby(elements)]
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in runs)


# Fields that say how a model starts, trains or is computed, not what it computes.
_SETTINGS = frozenset(
    [
        "balance_loss",
        "balance_over",
        "bias_rate",
        "chunk_size",
        "dt_floor",
        "dt_max",
        "dt_min",
        "dtype",
        "embedding_std",
        "impl",
        "multiple_of",
        "param_dtype",
        "radius",
        "remat",
        "residual_dtype",
        "scan",
        "z_loss",
    ]
)
# Fields that are compared layer by layer instead.
_LAYOUT = frozenset(
    ["feed_forward", "leading", "mixers", "pattern", "residual", "residuals", "trailing"]
)

type Resolver = Callable[[Any, int], Mapping[str, Any]]
_RESOLVERS: dict[type, Resolver] = {}


def resolver(config: type) -> Callable[[Resolver], Resolver]:
    """Registers what stands for the fields of a config that depend on others.

    The function gets a config and the model width. It returns values for fields whose default is
    derived from others, and None for those that change nothing beside the rest.
    """

    def register(function: Resolver) -> Resolver:
        _RESOLVERS[config] = function
        return function

    return register


@resolver(AttentionConfig)
def _attention(config: AttentionConfig, width: int) -> Mapping[str, Any]:
    heads, kv_heads = config.head_counts(width)
    fields: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads}
    fields["value_width"] = config.value_width or config.head_width
    fields["scale"] = config.head_width**-0.5 if config.scale is None else config.scale
    if not config.rotary_fraction:
        fields |= {"rotary_base": None, "rotary_interleaved": None, "rotary_scaling": None}
    if not config.qk_norm:
        fields |= {"norm_epsilon": None}
    return fields


@resolver(FeedForwardConfig)
def _feed_forward(config: FeedForwardConfig, width: int) -> Mapping[str, Any]:
    return {"hidden": config.hidden_width(width)}


@resolver(MoEConfig)
def _moe(config: MoEConfig, width: int) -> Mapping[str, Any]:
    shared = config.shared_part(width)
    fields: dict[str, Any] = {"hidden": config.hidden_width(width)}
    # Several shared experts are one of their joint width.
    fields["shared_hidden"] = None if shared is None else shared.hidden
    fields["shared_experts"] = None
    if config.top_groups == config.groups:
        fields |= {"groups": None, "top_groups": None}
    return fields


@resolver(MambaConfig)
def _mamba(config: MambaConfig, width: int) -> Mapping[str, Any]:
    inner, rank = config.sizes(width)
    epsilon = config.norm_epsilon if config.inner_norms else None
    return {"expand": inner, "dt_rank": rank, "norm_epsilon": epsilon}


@resolver(Mamba2Config)
def _mamba2(config: Mamba2Config, width: int) -> Mapping[str, Any]:
    fields: dict[str, Any] = {"expand": config.sizes(width)[0]}
    fields["output_bias"] = config.has_output_bias
    if not config.norm:
        fields |= {"norm_epsilon": None}
    return fields


@resolver(RGLRUConfig)
def _rg_lru(config: RGLRUConfig, width: int) -> Mapping[str, Any]:
    return {"expand": config.sizes(width)}


def differences(one: HybridLMConfig, other: HybridLMConfig) -> list[str]:
    """What one model computes otherwise than the other: 'layer 3, Attention.window: 256, None'.

    Initialisation, dtypes, scan, rematerialisation and losses beside that of the next token do
    not count.
    """
    first, second = _form(one), _form(other)
    # Where a part is another, the fields of the one say nothing about the other.
    return [
        f"{key}: {value}, {second[key]}"
        for key, value in first.items()
        if key in second and value != second[key]
    ]


def _form(config: HybridLMConfig) -> dict[str, Any]:
    """Everything that a config computes, flat."""
    form = {
        f"HybridLM.{field.name}": getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in _SETTINGS | _LAYOUT
    }
    for index, element in enumerate(config.plan().elements):
        parts = (config.mixer(element), config.feed_forward_of(element))
        for kind, part in zip(("mixer", "feed-forward part"), parts, strict=True):
            where = f"layer {index}"
            if part is None:
                form[f"{where}, {kind}"] = "none"
                continue
            name = element.name if kind == "mixer" else configs.gin_name(type(part))
            form[f"{where}, {kind}"] = name
            form |= _part(part, config.width, f"{where}, ")
        form |= _residuals(config, element, f"layer {index}, ")
    return form


def _part(part: Any, width: int, where: str) -> dict[str, Any]:
    """The fields of one config, and of those inside it."""
    name = configs.gin_name(type(part))
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    resolve = _RESOLVERS.get(type(part))
    values |= {} if resolve is None else resolve(part, width)
    form: dict[str, Any] = {}
    for field, value in values.items():
        if field in _SETTINGS:
            continue
        if registry.is_registered(type(value)):
            form[f"{where}{name}.{field}"] = configs.gin_name(type(value))
            form |= _part(value, width, f"{where}{name}.{field}, ")
        else:
            form[f"{where}{name}.{field}"] = value
    return form


def _residuals(config: HybridLMConfig, element: Element, where: str) -> dict[str, Any]:
    """The residual forms of a layer's parts, of those that it has."""
    parts = (config.mixer(element), config.feed_forward_of(element))
    form: dict[str, Any] = {}
    for kind, part, residual in zip(
        ("mixer", "feed-forward part"), parts, config.residuals_of(element), strict=True
    ):
        if part is not None:
            form |= _part(residual, config.width, f"{where}{kind}, ")
    return form
