# SPDX-License-Identifier: Apache-2.0
"""Parallel heads and RWKV's channel mixing in the shared layer tests."""

from seqmix.layers import (
    AttentionConfig,
    Mamba2Config,
    MambaConfig,
    ParallelHeadsConfig,
    RWKVChannelMixConfig,
)

HYMBA = ParallelHeadsConfig(
    attention=AttentionConfig(
        heads=3, kv_heads=1, head_width=4, value_width=10, window=3, prefix=2, rotary_base=50.0
    ),
    ssm=MambaConfig(expand=2, state_size=3, convolution=3, dt_rank=2, inner_norms=True),
    merge="mean",
    output_bias=True,
)
CASES = {
    "parallel_heads": ParallelHeadsConfig(
        attention=AttentionConfig(heads=5, kv_heads=1, head_width=4),
        ssm=Mamba2Config(expand=3, head_width=5, groups=3, state_size=7, chunk_size=8),
        attention_in=0.5,
        ssm_out=2.0,
    ),
    "hymba": HYMBA,
    "rwkv_channel_mix": RWKVChannelMixConfig(hidden=11),
    "rwkv6_channel_mix": RWKVChannelMixConfig(version=6, hidden=11),
}

CHANGES = {
    "parallel_heads": [
        {"attention_in": 1.0},
        {"attention_out": 2.0},
        {"ssm_in": 0.5},
        {"ssm_out": 1.0},
    ],
    "hymba": [{"norm_epsilon": 1.0}],
}

WIDE = {
    "parallel_heads": ParallelHeadsConfig(
        attention=AttentionConfig(kv_heads=4), ssm=Mamba2Config(state_size=16, groups=2)
    ),
    "hymba": ParallelHeadsConfig(
        attention=AttentionConfig(kv_heads=4, value_width=128),
        ssm=MambaConfig(inner_norms=True),
        merge="mean",
    ),
    "rwkv_channel_mix": RWKVChannelMixConfig(),
    "rwkv6_channel_mix": RWKVChannelMixConfig(version=6),
}
