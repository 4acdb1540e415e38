# SPDX-License-Identifier: Apache-2.0
"""Mamba and Mamba-2 layers as several families hold them."""

import math
from collections.abc import Callable
from typing import Any

from seqmix.interop.hf.families import common
from seqmix.interop.hf.keys import Keys, real
from seqmix.interop.hf.rules import (
    Path,
    Rule,
    block,
    convolution,
    fused_linear,
    linear,
    plain,
)
from seqmix.layers import Mamba2Config, MambaConfig
from seqmix.models import HybridLMConfig


def read_dt_rank(keys: Keys, key: str) -> int | None:
    """``time_step_rank``: a number, or 'auto' for the default of both sides."""
    return None if keys.raw(key, "auto") == "auto" else keys.integer(key)


def read_dt_limit(keys: Keys, key: str = "time_step_limit") -> tuple[float, float] | None:
    """Least and greatest time step; None where nothing is cut off."""
    values = keys.items(key, None)
    if values is None:
        return None
    try:
        low, high = map(real, values)
    except ValueError:
        raise keys.unsupported(key, "two numbers are expected") from None
    return None if low <= 0 and math.isinf(high) else (low, high)


def write_dt_limit(limit: tuple[float, float] | None) -> dict[str, Any]:
    """``time_step_limit`` in the form of `transformers`; nothing where there is none."""
    if limit is None:
        return {}
    infinity = {"__float__": "Infinity"}
    return {"time_step_limit": [infinity if math.isinf(value) else value for value in limit]}


def whole_expansion(inner: int, width: int) -> int:
    """The inner width over the model width, which published configs hold as a whole number.

    Raises:
      ValueError: it is none.
    """
    if inner % width:
        raise ValueError(f"the inner width {inner} must be a multiple of the model width {width}")
    return inner // width


def mamba(path: Path, name: str, config: MambaConfig, width: int) -> list[Rule]:
    """A `Mamba` with one head: [x, z], [dt, B, C] in one projection each, norms if any."""
    inner, rank = config.sizes(width)
    sizes = [rank, config.state_size, config.state_size]
    x, gate = (*path, "x"), (*path, "gate")
    low_rank = [(*path, part) for part in ("dt_rank", "B", "C")]
    rules = [
        *fused_linear([x, gate], f"{name}.in_proj", [inner, inner], bias=config.bias),
        *convolution(
            [(*path, "x_convolution")], f"{name}.conv1d", [inner], bias=config.convolution_bias
        ),
        *fused_linear(low_rank, f"{name}.x_proj", sizes),
        *linear((*path, "dt"), f"{name}.dt_proj"),
        plain((*path, "dt_bias"), f"{name}.dt_proj.bias"),
        plain((*path, "A_log"), f"{name}.A_log"),
        plain((*path, "D"), f"{name}.D"),
        *linear((*path, "output"), f"{name}.out_proj", bias=config.bias),
    ]
    if config.inner_norms:
        rules += [
            plain((*path, f"{part}_norm", "scale"), f"{name}.{part.lower()}_layernorm.weight")
            for part in ("dt", "B", "C")
        ]
    return rules


def mamba2(path: Path, name: str, config: Mamba2Config, width: int) -> list[Rule]:
    """A `Mamba2`: [z, x, B, C, dt] in one projection, [x, B, C] in one convolution."""
    inner, heads = config.sizes(width)
    shared = config.groups * config.state_size
    parts = [(*path, part) for part in ("gate", "x", "B", "C", "dt")]
    convolutions = [(*path, f"{part}_convolution") for part in ("x", "B", "C")]
    sizes = [inner, shared, shared]
    rules = [
        *fused_linear(parts, f"{name}.in_proj", [inner, *sizes, heads], bias=config.bias),
        *convolution(convolutions, f"{name}.conv1d", sizes, bias=config.convolution_bias),
        plain((*path, "dt_bias"), f"{name}.dt_bias"),
        plain((*path, "A_log"), f"{name}.A_log"),
        plain((*path, "D"), f"{name}.D"),
        *linear((*path, "output"), f"{name}.out_proj", bias=config.has_output_bias),
    ]
    if config.norm:
        rules.append(plain((*path, "norm", "scale"), f"{name}.norm.weight"))
    return rules


def backbone(
    config: HybridLMConfig, mixer_rules: Callable[[Path, str, Any, int], list[Rule]]
) -> list[Rule]:
    """A model of one kind of layer without feed-forward parts, as `state-spaces` names it.

    Args:
      config: the model.
      mixer_rules: `mamba` or `mamba2`.
    """
    rules = common.ends(
        config, embedding="backbone.embeddings.weight", norm="backbone.norm_f.weight"
    )
    for index, element in enumerate(config.plan().elements):
        name = f"backbone.layers.{index}"
        rules.append(plain(block(index, "mixer_norm", "scale"), f"{name}.norm.weight"))
        mixer = config.mixer(element)
        rules += mixer_rules(block(index, "mixer"), f"{name}.mixer", mixer, config.width)
    return rules
