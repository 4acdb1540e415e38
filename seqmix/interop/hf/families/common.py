# SPDX-License-Identifier: Apache-2.0
"""What many families have in common: names of layers and keys of configs."""

from typing import Any

from seqmix.interop.hf.keys import Keys
from seqmix.interop.hf.rules import Path, Rule, block, experts, fused_experts, kernel, linear, plain
from seqmix.layers import AttentionConfig
from seqmix.models import FeedForwardConfig, HybridLMConfig, MoEConfig

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}
_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu2": "relu2"}


def read_activation(keys: Keys, key: str = "hidden_act", default: str = "silu") -> Any:
    """The `FeedForward.activation` of a config.json."""
    return _ACTIVATIONS[keys.only(key, default, *(n for n in _ACTIVATIONS if n != default))]


def write_activation(name: str) -> str:
    """The name of a `FeedForward.activation` in a config.json."""
    return _NAMES[name]


def ends(
    config: HybridLMConfig,
    *,
    embedding: str = "model.embed_tokens.weight",
    norm: str = "model.norm.weight",
    head: str = "lm_head.weight",
) -> list[Rule]:
    """Embedding, final norm and head."""
    copies = (head,) if config.tied else ()
    rules = [plain(("embedding",), embedding, copies=copies), plain(("norm", "scale"), norm)]
    return rules if config.tied else [*rules, kernel(("head",), head)]


def pre_norms(
    index: int,
    name: str,
    *,
    mixer: str = "input_layernorm",
    feed_forward: str = "post_attention_layernorm",
) -> list[Rule]:
    """The norms before both parts of a layer, RMS without bias."""
    return [
        plain(block(index, "mixer_norm", "scale"), f"{name}.{mixer}.weight"),
        plain(block(index, "feed_forward_norm", "scale"), f"{name}.{feed_forward}.weight"),
    ]


def attention(path: Path, name: str, config: AttentionConfig, output: str = "o_proj") -> list[Rule]:
    """An `Attention` with separate query, key and value projections, norms per head if any."""
    parts = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
    rules = [
        rule
        for part, theirs in parts.items()
        for rule in linear((*path, part), f"{name}.{theirs}", bias=config.bias)
    ]
    rules += linear((*path, "output"), f"{name}.{output}", bias=config.output_bias)
    if config.qk_norm:
        rules.append(plain((*path, "query_norm", "scale"), f"{name}.q_norm.weight"))
        rules.append(plain((*path, "key_norm", "scale"), f"{name}.k_norm.weight"))
    return rules


def feed_forward(
    path: Path,
    name: str,
    config: FeedForwardConfig,
    *,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
) -> list[Rule]:
    """A dense feed-forward part."""
    parts = {"gate": gate} if config.gated else {}
    parts |= {"up": up, "down": down}
    return [
        rule
        for part, theirs in parts.items()
        for rule in linear((*path, part), f"{name}.{theirs}", bias=config.bias)
    ]


def separate_experts(
    path: Path,
    name: str,
    config: MoEConfig,
    *,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
) -> list[Rule]:
    """Experts with a tensor for each matrix of each: ``name.experts.3.up_proj.weight``."""
    parts = {"gate": gate} if config.gated else {}
    parts |= {"up": up, "down": down}
    return [
        experts(
            (*path, "experts", part, "kernel"),
            [f"{name}.experts.{index}.{theirs}.weight" for index in range(config.experts)],
        )
        for part, theirs in parts.items()
    ]


def joined_experts(path: Path, name: str, config: MoEConfig, width: int) -> list[Rule]:
    """Gated experts in two tensors, ``gate_up_proj`` and ``down_proj`` of ``name.experts``."""
    hidden = config.hidden_width(width)
    parts = [(*path, "experts", part, "kernel") for part in ("gate", "up", "down")]
    return [
        fused_experts(parts[:2], f"{name}.experts.gate_up_proj", [hidden, hidden]),
        fused_experts(parts[2:], f"{name}.experts.down_proj", [width]),
    ]
