# SPDX-License-Identifier: Apache-2.0
"""The shared transformer of Zamba and Zamba2: which layers use it, and its tensors."""

import dataclasses
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from seqmix.interop.hf.families import common, parts
from seqmix.interop.hf.keys import Keys
from seqmix.interop.hf.layout import resolver
from seqmix.interop.hf.rules import Path, Rule, block, kernel, plain
from seqmix.layers import AttentionConfig, Mamba2Config, MambaConfig
from seqmix.models import HybridLMConfig, SharedBlockConfig

# Names of a layer's kind in config.json; the first is the older one.
_KINDS = ("mamba", "linear_attention", "hybrid")


@resolver(SharedBlockConfig)
def _resolve(config: SharedBlockConfig, width: int) -> Mapping[str, Any]:
    # Its attention reads twice the model width.
    heads, kv_heads = config.attention.head_counts(2 * width)
    attention = dataclasses.replace(config.attention, heads=heads, kv_heads=kv_heads)
    return {"attention": attention}


def uses(keys: Keys, count: int) -> list[bool] | None:
    """Whether each layer uses a shared block, from ``layers_block_type``; None without that key."""
    types = parts.types(keys, "layers_block_type", count, _KINDS)
    return None if types is None else [kind == "hybrid" for kind in types]


def attention(keys: Keys, **fields: Any) -> AttentionConfig:
    """The attention of a shared block, with Zamba's scale."""
    width, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    head_width = keys.integer("attention_head_dim", 2 * width // heads)
    keys.only("attention_hidden_size", 2 * width)
    return AttentionConfig(
        heads=heads,
        kv_heads=keys.integer("num_key_value_heads", heads),
        head_width=head_width,
        scale=(head_width / 2) ** -0.5,
        **fields,
    )


def elements(
    uses: Sequence[bool], name: str, mixer: Any, part: SharedBlockConfig, blocks: int
) -> tuple[list[str], dict[str, Any]]:
    """Elements of a pattern and their configs, where shared blocks take turns.

    One block is called 'shared'; of several, 'a' is the lowest.

    Args:
      uses: whether each layer uses a block.
      name: the element of the other layers.
      mixer: its config.
      part: the config of a use.
      blocks: how many blocks there are; 0 for one in each use, as `transformers` has it where
        nothing is tied.
    """
    blocks = min(blocks or sum(uses), sum(uses))
    found, configs, seen = [], {}, 0
    for use in uses:
        key, config = name, mixer
        if use:
            label = "shared" if blocks == 1 else _label(seen % blocks)
            key = "shared_block" if blocks == 1 else f"{label}/shared_block"
            config, seen = dataclasses.replace(part, block=label), seen + 1
        found.append(key)
        configs[key] = config
    return found, configs


def _label(index: int) -> str:
    letters = string.ascii_lowercase
    return letters[index] if index < len(letters) else f"block_{index}"


def write(config: HybridLMConfig, mixer: type) -> dict[str, Any]:
    """The keys of both families for the uses and the attention.

    Raises:
      ValueError: a layer is neither of the mixer nor a shared block of it, or none is shared.
    """
    kinds = {mixer: "linear_attention", SharedBlockConfig: "hybrid"}
    names = parts.kinds(config, kinds, "Mamba or a shared block")
    shared = parts.pick(config, SharedBlockConfig)
    if shared is None:
        raise ValueError("there must be a shared block")
    if not isinstance(shared.mixer, mixer):
        raise ValueError(f"SharedBlock.mixer must be @{mixer.__name__.removesuffix('Config')}()")
    heads, kv_heads = shared.attention.head_counts(2 * config.width)
    return {
        "layers_block_type": names,
        "rms_norm_eps": config.norm_epsilon,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "attention_head_dim": shared.attention.head_width,
        "attention_hidden_size": 2 * config.width,
        "hidden_act": common.write_activation(shared.feed_forward.activation),
        "intermediate_size": shared.feed_forward.hidden_width(config.width),
    }


def mixer_of(config: HybridLMConfig) -> MambaConfig | Mamba2Config:
    """The mixer of the first layer, inside or outside a shared block."""
    mixer = config.mixer(config.plan().elements[0])
    return mixer.mixer if isinstance(mixer, SharedBlockConfig) else mixer


def users(config: HybridLMConfig) -> dict[str, list[int]]:
    """The layers that use each shared block, from the bottom up."""
    found: dict[str, list[int]] = {}
    for index, element in enumerate(config.plan().elements):
        mixer = config.mixer(element)
        if isinstance(mixer, SharedBlockConfig):
            found.setdefault(mixer.block, []).append(index)
    return found


def own(index: int, name: str) -> list[Rule]:
    """What a use has of its own beside adapters and mixer."""
    return [
        plain(block(index, "mixer_norm", "scale"), f"{name}.mamba_decoder.input_layernorm.weight"),
        kernel(block(index, "use", "linear", "kernel"), f"{name}.linear.weight"),
    ]


def weights(path: Path, name: str, config: SharedBlockConfig) -> list[Rule]:
    """Norms and attention of a shared block at a path of the stack."""
    return [
        plain((*path, "input_norm", "scale"), f"{name}.input_layernorm.weight"),
        *common.attention((*path, "attention"), f"{name}.self_attn", config.attention),
        plain((*path, "feed_forward_norm", "scale"), f"{name}.pre_ff_layernorm.weight"),
    ]


def copied(rules: Iterable[Rule], first: str, others: Sequence[str]) -> list[Rule]:
    """Rules whose tensors a file may repeat under the names of later layers that share them.

    Args:
      rules: of one tensor each.
      first: beginning of their names, of the first layer.
      others: the same of the later layers.
    """
    return [
        dataclasses.replace(
            rule, copies=tuple(rule.names[0].replace(first, other, 1) for other in others)
        )
        if len(rule.names) == 1
        else rule
        for rule in rules
    ]
