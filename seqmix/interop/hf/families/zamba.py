# SPDX-License-Identifier: Apache-2.0
"""Zamba (arXiv 2405.16712): Mamba with heads, and one shared transformer at several depths."""

from typing import Any

import numpy as np

from seqmix.interop.hf.families import common, shared, ssm
from seqmix.interop.hf.families.joint import interleaved_linear
from seqmix.interop.hf.family import Family
from seqmix.interop.hf.keys import Keys
from seqmix.interop.hf.layout import layout
from seqmix.interop.hf.rules import (
    Arrays,
    Path,
    Rule,
    block,
    convolution,
    linear,
    plain,
    reshaped,
)
from seqmix.layers import MambaConfig
from seqmix.models import FeedForwardConfig, HybridLMConfig, SharedBlockConfig


def _uses(keys: Keys, count: int) -> list[bool]:
    """Whether each layer uses the shared block."""
    period = keys.integer("attn_layer_period", 6)
    offset = keys.integer("attn_layer_offset", 4, least=0)
    found = shared.uses(keys, count)
    if found is not None:
        return found
    return [False, False, True, *(i % period == offset for i in range(count - 3))][:count]


def _to_config(keys: Keys) -> HybridLMConfig:
    width, count = keys.integer("hidden_size"), keys.integer("num_hidden_layers")
    keys.only("hidden_mamba_act", "silu", "swish")
    mamba = MambaConfig(
        expand=keys.number("mamba_expand", 2),
        state_size=keys.integer("mamba_d_state", 16),
        convolution=keys.integer("mamba_d_conv", 4),
        dt_rank=ssm.read_dt_rank(keys, "mamba_dt_rank"),
        heads=keys.integer("n_mamba_heads", 2),
        bias=keys.flag("mamba_proj_bias", False),
        convolution_bias=keys.flag("mamba_conv_bias", True),
    )
    part = SharedBlockConfig(
        mixer=mamba,
        attention=shared.attention(keys, rotary_fraction=0.0),
        feed_forward=FeedForwardConfig(
            hidden=keys.integer("intermediate_size"),
            activation=common.read_activation(keys, default="gelu"),
        ),
    )
    tied = keys.flag("tie_word_embeddings", True)
    elements, mixers = shared.elements(_uses(keys, count), "mamba", mamba, part, 1 if tied else 0)
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
    values = shared.write(config, MambaConfig)
    mamba = shared.mixer_of(config)
    inner, rank = mamba.sizes(config.width)
    return {
        **values,
        "mamba_expand": ssm.whole_expansion(inner, config.width),
        "mamba_d_state": mamba.state_size,
        "mamba_d_conv": mamba.convolution,
        "mamba_dt_rank": rank,
        "n_mamba_heads": mamba.heads,
        "mamba_proj_bias": mamba.bias,
        "mamba_conv_bias": mamba.convolution_bias,
    }


def _by_head(paths: list[Path], name: str, sizes: list[int], heads: int) -> Rule:
    """Kernels [heads, inputs, size] that lie beside each other in [heads, sizes, inputs].

    With one head, the kernels have no axis for it.
    """
    ends = np.cumsum(sizes)[:-1]

    def load(arrays: Arrays) -> Arrays:
        parts = [part.swapaxes(1, 2) for part in np.split(arrays[0], ends, 1)]
        return parts if heads > 1 else [part[0] for part in parts]

    def save(arrays: Arrays) -> Arrays:
        parts = arrays if heads > 1 else [array[None] for array in arrays]
        return [np.concatenate([part.swapaxes(1, 2) for part in parts], 1)]

    return Rule(tuple(paths), (name,), load, save)


def _mamba(path: Path, name: str, config: MambaConfig, width: int) -> list[Rule]:
    """Channels of x and of the gate alternate; what a head makes lies apart from the others'."""
    (inner, rank), heads = config.sizes(width), config.heads
    each, states = inner // heads, config.state_size
    low_rank = [(*path, part, "kernel") for part in ("dt_rank", "B", "C")]
    return [
        *interleaved_linear(
            [(*path, "x"), (*path, "gate")], f"{name}.in_proj", inner, [1, 1], bias=config.bias
        ),
        *convolution(
            [(*path, "x_convolution")], f"{name}.conv1d", [inner], bias=config.convolution_bias
        ),
        _by_head(low_rank, f"{name}.x_proj_weight", [rank, states, states], heads),
        _by_head([(*path, "dt", "kernel")], f"{name}.dt_proj_weight", [each], heads),
        reshaped((*path, "dt_bias"), f"{name}.dt_proj_bias", (inner,), (heads, each)),
        reshaped((*path, "A_log"), f"{name}.A_log", (inner, states), (heads, each, states)),
        reshaped((*path, "D"), f"{name}.D", (inner,), (heads, each)),
        *linear((*path, "output"), f"{name}.out_proj", bias=config.bias),
    ]


def _rules(config: HybridLMConfig) -> list[Rule]:
    rules = common.ends(config, norm="model.final_layernorm.weight")
    for index, element in enumerate(config.plan().elements):
        name, path, mixer = f"model.layers.{index}", block(index, "mixer"), config.mixer(element)
        if isinstance(mixer, SharedBlockConfig):
            rules += shared.own(index, name)
            rules += _mamba(path, f"{name}.mamba_decoder.mamba", mixer.mixer, config.width)
            continue
        rules.append(plain(block(index, "mixer_norm", "scale"), f"{name}.input_layernorm.weight"))
        rules += _mamba(path, f"{name}.mamba", mixer, config.width)
    for label, layers in shared.users(config).items():
        first, *others = (f"model.layers.{index}.shared_transf" for index in layers)
        part = config.mixer(config.plan().elements[layers[0]])
        path = ("stack", "shared", label)
        own = [
            *shared.weights(path, first, part),
            *common.feed_forward(
                (*path, "feed_forward"), f"{first}.feed_forward", part.feed_forward
            ),
        ]
        rules += shared.copied(own, first, others)
    return rules


FAMILY = Family(
    name="zamba",
    architectures=("ZambaForCausalLM",),
    to_config=_to_config,
    from_config=_from_config,
    rules=_rules,
    inert=("time_step_floor", "time_step_max", "time_step_min", "use_associative_scan"),
)
