# SPDX-License-Identifier: Apache-2.0
"""Mamba (arXiv 2312.00752)."""

from typing import Any

from seqmix.interop.hf.families import ssm
from seqmix.interop.hf.family import Family
from seqmix.interop.hf.keys import Keys
from seqmix.interop.hf.layout import layout
from seqmix.interop.hf.rules import Rule
from seqmix.layers import MambaConfig
from seqmix.models import HybridLMConfig


def _to_config(keys: Keys) -> HybridLMConfig:
    width = keys.integer("hidden_size")
    inner = int(keys.number("expand", 2) * width)
    keys.only("hidden_act", "silu", "swish")
    keys.only("rms_norm", True)
    keys.only("ssm_cfg", {})
    mamba = MambaConfig(
        # Where the file has both, its inner width counts.
        expand=keys.integer("intermediate_size", inner) / width,
        state_size=keys.integer("state_size", 16),
        convolution=keys.integer("conv_kernel", 4),
        dt_rank=ssm.read_dt_rank(keys, "time_step_rank"),
        bias=keys.flag("use_bias", False),
        convolution_bias=keys.flag("use_conv_bias", True),
    )
    return HybridLMConfig(
        vocabulary=keys.integer("vocab_size"),
        width=width,
        **layout(["mamba"] * keys.integer("num_hidden_layers")),
        mixers={"mamba": mamba},
        feed_forward=None,
        tied=keys.flag("tie_word_embeddings", True),
        norm_epsilon=keys.number("layer_norm_epsilon", 1e-5),
    )


def _from_config(config: HybridLMConfig) -> dict[str, Any]:
    mamba = config.mixer(config.plan().elements[0])
    if not isinstance(mamba, MambaConfig):
        raise ValueError("every layer must be Mamba")
    inner, rank = mamba.sizes(config.width)
    return {
        "expand": ssm.whole_expansion(inner, config.width),
        "state_size": mamba.state_size,
        "conv_kernel": mamba.convolution,
        "time_step_rank": rank,
        "use_bias": mamba.bias,
        "use_conv_bias": mamba.convolution_bias,
        "layer_norm_epsilon": config.norm_epsilon,
        "residual_in_fp32": config.residual_dtype == "float32",
    }


def _rules(config: HybridLMConfig) -> list[Rule]:
    return ssm.backbone(config, ssm.mamba)


FAMILY = Family(
    name="mamba",
    architectures=("MambaForCausalLM",),
    to_config=_to_config,
    from_config=_from_config,
    rules=_rules,
    # The older names d_model, d_inner and n_layer repeat what other keys say.
    inert=(
        "d_inner",
        "d_model",
        "fused_add_norm",
        "n_layer",
        "pad_vocab_size_multiple",
        "rescale_prenorm_residual",
        "residual_in_fp32",
        "time_step_floor",
        "time_step_init_scheme",
        "time_step_max",
        "time_step_min",
        "time_step_scale",
        "use_associative_scan",
        "use_mambapy",
    ),
)
