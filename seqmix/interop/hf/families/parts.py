# SPDX-License-Identifier: Apache-2.0
"""Layers of two kinds of feed-forward parts: patterns, configs and tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

from seqmix.interop.hf.families import common
from seqmix.interop.hf.keys import Keys
from seqmix.interop.hf.layout import layout
from seqmix.interop.hf.rope import read_rope
from seqmix.interop.hf.rules import Path, Rule, kernel, plain
from seqmix.models import FeedForwardConfig, HybridLMConfig, MoEConfig


def layers(
    names: Sequence[str],
    mixers: Mapping[str, Any],
    sparse: Sequence[bool],
    dense: FeedForwardConfig,
    experts: MoEConfig | None,
) -> dict[str, Any]:
    """The fields of `HybridLMConfig` for layers of which some have experts.

    Args:
      names: the mixer of each layer.
      mixers: their configs; those that no layer names are left out.
      sparse: whether a layer has experts.
      dense: the part of the others.
      experts: the part with experts; None where no layer has any.
    """
    main = experts if any(sparse) else dense
    other = "feed_forward" if any(sparse) else ""
    elements = [
        name if has or not other else f"{name} + {other}"
        for name, has in zip(names, sparse, strict=True)
    ]
    used = {name: mixers[name] for name in dict.fromkeys(names)}
    if other and not all(sparse):
        used[other] = dense
    return {**layout(elements), "mixers": used, "feed_forward": main}


def pick(config: HybridLMConfig, kind: type) -> Any:
    """The first config of a kind among mixers and feed-forward parts, or None."""
    for element in config.plan().elements:
        for part in (config.mixer(element), config.feed_forward_of(element)):
            if isinstance(part, kind):
                return part
    return None


def kinds(config: HybridLMConfig, names: Mapping[type, str], what: str) -> list[str]:
    """A name for the mixer of each layer, by the type of its config.

    Raises:
      ValueError: a layer has another mixer; ``what`` says which there may be.
    """
    found = []
    for index, element in enumerate(config.plan().elements):
        name = names.get(type(config.mixer(element)))
        if name is None:
            raise ValueError(f"every layer must be {what}; layer {index} is '{element}'")
        found.append(name)
    return found


def has_experts(config: HybridLMConfig) -> list[bool]:
    """Whether each layer has experts.

    Raises:
      ValueError: a layer has no feed-forward part.
    """
    found = []
    for index, element in enumerate(config.plan().elements):
        part = config.feed_forward_of(element)
        if part is None:
            raise ValueError(
                f"every layer must have a feed-forward part; layer {index} ('{element}') has none"
            )
        found.append(isinstance(part, MoEConfig))
    return found


def types(keys: Keys, key: str, count: int, known: Sequence[str]) -> tuple[str, ...] | None:
    """A list of one of the known names for each layer; None where there is none.

    Raises:
      ValueError: another length or name.
    """
    values = keys.items(key, None)
    if values is None:
        return None
    if len(values) != count or not set(values) <= set(known):
        raise keys.unsupported(key, f"{count} layers of {', '.join(known)} are expected")
    return values


def whole_rope(keys: Keys, **options: Any) -> dict[str, Any]:
    """`read_rope` of a family that rotates all channels of a head, whatever a config says.

    Raises:
      ValueError: what `read_rope` raises, or a config that says otherwise.
    """
    rope = read_rope(keys, **options)
    if rope["rotary_fraction"] != 1.0:
        key = first_of(keys, "partial_rotary_factor", "rope_scaling", "rope_parameters")
        raise keys.unsupported(key, "the family rotates whole heads, partial_rotary_factor is 1")
    return rope


def first_of(keys: Keys, *names: str) -> str:
    """The one of several names of a key that a config.json holds; the last if it holds none."""
    return next((name for name in names if keys.has(name)), names[-1])


def mixture(
    path: Path,
    name: str,
    config: MoEConfig,
    *,
    router: str = "gate",
    shared: str = "shared_expert",
    shared_gate: str = "shared_expert_gate",
    matrices: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Rule]:
    """A `MoE` with a tensor for each matrix of each expert.

    Args:
      path: of the part.
      name: of the torch module.
      config: its settings.
      router, shared, shared_gate: names of the torch modules in it.
      matrices: those of an expert: gate, up and down.
    """
    gate, up, down = matrices
    rules = [
        kernel((*path, "router", "kernel"), f"{name}.{router}.weight"),
        *common.separate_experts(path, name, config, gate=gate, up=up, down=down),
    ]
    if config.selection_bias:
        rules.append(plain((*path, "bias"), f"{name}.{router}.e_score_correction_bias"))
    if config.shared_experts:
        dense = FeedForwardConfig(gated=config.gated)
        rules += common.feed_forward((*path, "shared"), f"{name}.{shared}", dense)
    if config.shared_gate:
        rules.append(kernel((*path, "shared_gate", "kernel"), f"{name}.{shared_gate}.weight"))
    return rules
