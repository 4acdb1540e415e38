# SPDX-License-Identifier: Apache-2.0
"""Attention's options and multi-head latent attention in the shared layer tests."""

from seqmix.layers import AttentionConfig, MLAConfig, YarnScaling

# A short trained length, so that the few pairs of a small head are scaled differently.
YARN = YarnScaling(factor=4.0, original_max_position_embeddings=50, beta_fast=4.0)

CASES = {
    "attention_options": AttentionConfig(
        heads=4,
        kv_heads=2,
        head_width=4,
        window=4,
        rotary_interleaved=True,
        rotary_scaling=YARN,
        qk_norm="full",
        zero_centred_norm=True,
        output_gate=True,
        sinks=True,
        output_bias=True,
    ),
    "mla": MLAConfig(
        heads=3, head_width=5, rotary_width=4, value_width=7, kv_rank=6, query_rank=8, bias=True
    ),
}

CHANGES = {
    "mla": [{"rotary_base": 3.0}, {"rotary_interleaved": False}, {"scale": 0.1}],
}

WIDE = {
    "gated_attention": AttentionConfig(kv_heads=4, output_gate=True),
    # As wide as the latent, so that the absorbed form of decoding costs what is counted.
    "mla": MLAConfig(head_width=64, rotary_width=32, value_width=64, kv_rank=64),
    "low_rank_mla": MLAConfig(
        head_width=64, rotary_width=0, value_width=64, kv_rank=64, query_rank=96
    ),
}
