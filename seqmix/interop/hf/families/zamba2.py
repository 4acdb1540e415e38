# SPDX-License-Identifier: Apache-2.0
"""Zamba2 (arXiv 2411.15242): Mamba-2, and shared transformers that take turns, with adapters."""

import math
from typing import Any

from seqmix.interop.hf.families import common, parts, shared, ssm
from seqmix.interop.hf.family import Family
from seqmix.interop.hf.keys import Keys
from seqmix.interop.hf.layout import layout
from seqmix.interop.hf.rope import write_rope
from seqmix.interop.hf.rules import Path, Rule, block, fused_linear, kernel, linear, plain
from seqmix.layers import Mamba2Config
from seqmix.models import FeedForwardConfig, HybridLMConfig, SharedBlockConfig

# The gated norm has it whatever the model's norms have.
_EPSILON = 1e-5
# Stands for no least time step: `transformers` takes its logarithm.
_NO_LIMIT = 1e-30
_ADAPTED = {"query": "q", "key": "k", "value": "v"}


def _mamba2(keys: Keys, width: int, bias: bool) -> Mamba2Config:
    expand, heads = keys.number("mamba_expand", 2), keys.integer("n_mamba_heads", 8)
    inner = int(expand * width)
    if inner % heads:
        raise keys.unsupported("n_mamba_heads", f"it must divide the inner width {inner}")
    least = keys.number("time_step_min", 1e-3)
    return Mamba2Config(
        expand=expand,
        head_width=keys.only("mamba_headdim", inner // heads),
        state_size=keys.integer("mamba_d_state", 64),
        groups=keys.integer("mamba_ngroups", 1),
        convolution=keys.integer("mamba_d_conv", 4),
        bias=bias,
        # Time steps are cut off below and not above, whatever the greatest initial one.
        dt_limit=(least, math.inf) if least > _NO_LIMIT else None,
        norm_epsilon=_EPSILON,
    )


def _to_config(keys: Keys) -> HybridLMConfig:
    width, count = keys.integer("hidden_size"), keys.integer("num_hidden_layers")
    hidden = keys.integer("intermediate_size", 4 * width)
    bias = keys.flag("add_bias_linear", False)
    mamba2 = _mamba2(keys, width, bias)
    head_width = 2 * width // keys.integer("num_attention_heads")
    keys.only("attention_head_dim", head_width)
    adapted = keys.flag("use_shared_attention_adapter", False)
    rope = {"rotary_fraction": 0.0}
    if keys.flag("use_mem_rope", False):
        rope = parts.whole_rope(keys, head_width=head_width)
    attention = shared.attention(keys, **rope)
    if adapted and attention.kv_heads != attention.heads:
        raise keys.unsupported(
            "num_key_value_heads", "with use_shared_attention_adapter as many as queries"
        )
    feed_forward = FeedForwardConfig(
        hidden=hidden, activation=common.read_activation(keys, default="gelu"), bias=bias
    )
    found = shared.uses(keys, count)
    if found is None:
        raise keys.unsupported("layers_block_type", "the kinds of the layers are missing")
    part = SharedBlockConfig(
        mixer=mamba2,
        attention=attention,
        feed_forward=feed_forward,
        adapter_rank=keys.integer("adapter_rank", 128),
        attention_adapters=adapted,
    )
    blocks, tied = keys.integer("num_mem_blocks", 1), keys.flag("tie_word_embeddings", True)
    if not tied and blocks < sum(found):
        raise keys.unsupported(
            "tie_word_embeddings", "without it, `transformers` shares no block between layers"
        )
    elements, mixers = shared.elements(found, "mamba2", mamba2, part, blocks)
    return HybridLMConfig(
        vocabulary=keys.integer("vocab_size"),
        width=width,
        **layout(elements),
        mixers=mixers,
        feed_forward=None,
        tied=tied,
        norm_epsilon=keys.number("rms_norm_eps", 1e-5),
    )


def _from_config(config: HybridLMConfig) -> dict[str, Any]:
    values = shared.write(config, Mamba2Config)
    elements, blocks = config.plan().elements, shared.users(config)
    first = next(mixer for e in elements if isinstance(mixer := config.mixer(e), SharedBlockConfig))
    if first.adapter_rank is None:
        raise ValueError("SharedBlock.adapter_rank is needed")
    mamba2, attention = shared.mixer_of(config), first.attention
    inner, heads = mamba2.sizes(config.width)
    low, high = mamba2.dt_limit or (0.0, math.inf)
    if math.isfinite(high):
        raise ValueError(f"Mamba2.dt_limit must have no upper end, got {mamba2.dt_limit}")
    values |= {
        "num_mem_blocks": len(blocks),
        "hybrid_layer_ids": sorted(index for users in blocks.values() for index in users),
        "adapter_rank": first.adapter_rank,
        "use_shared_attention_adapter": first.attention_adapters,
        "add_bias_linear": mamba2.bias,
        "mamba_expand": ssm.whole_expansion(inner, config.width),
        "n_mamba_heads": heads,
        "mamba_headdim": mamba2.head_width,
        "mamba_d_state": mamba2.state_size,
        "mamba_ngroups": mamba2.groups,
        "mamba_d_conv": mamba2.convolution,
        "time_step_min": max(low, _NO_LIMIT),
        "use_mem_rope": attention.rotary_fraction > 0,
    }
    return values | (write_rope(attention) if attention.rotary_fraction else {})


def _adapters(index: int, name: str, number: int, config: SharedBlockConfig) -> list[Rule]:
    """The low-rank additions of one use; they lie with the weights that they add to.

    Args:
      index: the layer.
      name: of the shared block's torch module.
      number: of the use among all uses of all blocks.
      config: of the use.
    """
    found = {"adapter": f"{name}.feed_forward.gate_up_proj_adapter_list.{number}"}
    if config.attention_adapters:
        for part, theirs in _ADAPTED.items():
            found[f"{part}_adapter"] = f"{name}.self_attn.linear_{theirs}_adapter_list.{number}"
    return [
        kernel(block(index, "use", part, way, "kernel"), f"{theirs}.{place}.weight")
        for part, theirs in found.items()
        for place, way in enumerate(("down", "up"))
    ]


def _weights(path: Path, name: str, config: SharedBlockConfig, width: int) -> list[Rule]:
    part, hidden = config.feed_forward, config.feed_forward.hidden_width(width)
    path, name = (*path, "feed_forward"), f"{name}.feed_forward"
    joint = [(*path, "gate"), (*path, "up")]
    return [
        *fused_linear(joint, f"{name}.gate_up_proj", [hidden, hidden], bias=part.bias),
        *linear((*path, "down"), f"{name}.down_proj", bias=part.bias),
    ]


def _rules(config: HybridLMConfig) -> list[Rule]:
    rules = common.ends(config, norm="model.final_layernorm.weight")
    blocks = shared.users(config)
    number = {index: k for k, index in enumerate(sorted(i for u in blocks.values() for i in u))}
    for index, element in enumerate(config.plan().elements):
        name, path, mixer = f"model.layers.{index}", block(index, "mixer"), config.mixer(element)
        if isinstance(mixer, SharedBlockConfig):
            rules += shared.own(index, name)
            rules += ssm.mamba2(path, f"{name}.mamba_decoder.mamba", mixer.mixer, config.width)
            continue
        rules.append(plain(block(index, "mixer_norm", "scale"), f"{name}.input_layernorm.weight"))
        rules += ssm.mamba2(path, f"{name}.mamba", mixer, config.width)
    for label, layers in blocks.items():
        first, *others = (f"model.layers.{index}.shared_transformer" for index in layers)
        mixers = [config.mixer(config.plan().elements[index]) for index in layers]
        path = ("stack", "shared", label)
        own = [
            *shared.weights(path, first, mixers[0]),
            *_weights(path, first, mixers[0], config.width),
        ]
        for index, mixer in zip(layers, mixers, strict=True):
            own += _adapters(index, first, number[index], mixer)
        rules += shared.copied(own, first, others)
    return rules


FAMILY = Family(
    name="zamba2",
    architectures=("Zamba2ForCausalLM",),
    to_config=_to_config,
    from_config=_from_config,
    rules=_rules,
    inert=(
        "chunk_size",
        "hybrid_layer_ids",
        "kv_channels",
        "num_query_groups",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "time_step_floor",
        "time_step_max",
        "use_conv_bias",
        "use_long_context",
        "use_mem_eff_path",
    ),
)
