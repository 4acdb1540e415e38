# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 (arXiv 2405.21060)."""

from typing import Any

from seqmix.interop.hf.families import ssm
from seqmix.interop.hf.family import Family
from seqmix.interop.hf.keys import Keys
from seqmix.interop.hf.layout import layout
from seqmix.interop.hf.rules import Rule
from seqmix.layers import Mamba2Config
from seqmix.models import HybridLMConfig


def _to_config(keys: Keys) -> HybridLMConfig:
    width, epsilon = keys.integer("hidden_size"), keys.number("layer_norm_epsilon", 1e-5)
    heads, head_width = keys.integer("num_heads", 128), keys.integer("head_dim", 64)
    expand = keys.number("expand", 2)
    if heads * head_width != expand * width:
        raise keys.unsupported(
            "num_heads", f"times head_dim = {head_width} it must be expand * hidden_size"
        )
    keys.only("hidden_act", "silu", "swish")
    mamba2 = Mamba2Config(
        expand=expand,
        head_width=head_width,
        state_size=keys.integer("state_size", 128),
        groups=keys.integer("n_groups", 8),
        convolution=keys.integer("conv_kernel", 4),
        bias=keys.flag("use_bias", False),
        convolution_bias=keys.flag("use_conv_bias", True),
        dt_limit=ssm.read_dt_limit(keys),
        norm_epsilon=epsilon,
    )
    return HybridLMConfig(
        vocabulary=keys.integer("vocab_size"),
        width=width,
        **layout(["mamba2"] * keys.integer("num_hidden_layers")),
        mixers={"mamba2": mamba2},
        feed_forward=None,
        tied=keys.flag("tie_word_embeddings", False),
        norm_epsilon=epsilon,
    )


def _from_config(config: HybridLMConfig) -> dict[str, Any]:
    mamba2 = config.mixer(config.plan().elements[0])
    if not isinstance(mamba2, Mamba2Config):
        raise ValueError("every layer must be Mamba-2")
    inner, heads = mamba2.sizes(config.width)
    return {
        "expand": ssm.whole_expansion(inner, config.width),
        "num_heads": heads,
        "head_dim": mamba2.head_width,
        "state_size": mamba2.state_size,
        "n_groups": mamba2.groups,
        "conv_kernel": mamba2.convolution,
        "use_bias": mamba2.bias,
        "use_conv_bias": mamba2.convolution_bias,
        "layer_norm_epsilon": config.norm_epsilon,
        "residual_in_fp32": config.residual_dtype == "float32",
        **ssm.write_dt_limit(mamba2.dt_limit),
    }


def _rules(config: HybridLMConfig) -> list[Rule]:
    return ssm.backbone(config, ssm.mamba2)


FAMILY = Family(
    name="mamba2",
    architectures=("Mamba2ForCausalLM",),
    to_config=_to_config,
    from_config=_from_config,
    rules=_rules,
    # The order of norm and gate is fixed, whatever a file says of it.
    inert=(
        "chunk_size",
        "norm_before_gate",
        "rescale_prenorm_residual",
        "residual_in_fp32",
        "rms_norm",
        "time_step_floor",
        "time_step_max",
        "time_step_min",
        "time_step_rank",
    ),
)
