# SPDX-License-Identifier: Apache-2.0
"""Layers on the scalar-decay core in the shared layer tests."""

from seqmix.layers import (
    BasedConfig,
    LightningConfig,
    LinearAttentionConfig,
    Mamba2ndConfig,
    Mamba2SConfig,
    Mamba3Config,
    PerformerConfig,
    RetNetConfig,
)

CASES = {
    "linear_attention": LinearAttentionConfig(heads=3, head_width=5, chunk_size=8),
    "hedgehog": LinearAttentionConfig(
        heads=3, head_width=3, feature_map="hedgehog", normalize=False, chunk_size=8
    ),
    "performer": PerformerConfig(heads=3, head_width=5, features=7, chunk_size=8),
    "retnet": RetNetConfig(heads=3, head_width=6, value_width=7, chunk_size=8),
    "lightning": LightningConfig(heads=3, head_width=5, chunk_size=8),
    "based": BasedConfig(heads=3, feature_width=3, head_width=5, chunk_size=8),
    "mamba2s": Mamba2SConfig(heads=3, head_width=5, convolution=3, chunk_size=8),
    "mamba_2nd": Mamba2ndConfig(heads=3, head_width=5, chunk_size=8),
    "exponential": Mamba2ndConfig(heads=3, head_width=5, exponential=True, chunk_size=8),
    "mamba3": Mamba3Config(
        expand=3, head_width=5, state_size=12, groups=3, output_norm=True, chunk_size=8
    ),
}

CHANGES = {
    "linear_attention": [
        {"feature_map": "relu"},
        {"feature_map": "dpfp"},
        {"epsilon": 1.0},
    ],
    "performer": [{"epsilon": 1.0}],
    "retnet": [{"norm_epsilon": 1.0}, {"rotary_base": 3.0}],
    "lightning": [{"norm_epsilon": 1.0}],
    "based": [{"epsilon": 1.0}],
    "mamba2s": [{"norm_epsilon": 1.0}],
    "mamba_2nd": [{"epsilon": 1.0}, {"exponential": True}],
    "mamba3": [{"norm_epsilon": 1.0}, {"least_rate": 2.0}],
}

WIDE = {
    "linear_attention": LinearAttentionConfig(),
    "hedgehog": LinearAttentionConfig(feature_map="hedgehog", normalize=False),
    "performer": PerformerConfig(),
    "retnet": RetNetConfig(),
    "lightning": LightningConfig(),
    "based": BasedConfig(),
    "mamba2s": Mamba2SConfig(),
    "mamba_2nd": Mamba2ndConfig(),
    "exponential": Mamba2ndConfig(exponential=True),
    "mamba3": Mamba3Config(),
}

# Operations on each number of the state in a decode step besides the products of write and read:
# decay and sums; Mamba-3 also writes the token's own part.
STATE_PASSES = {"performer": 4, "based": 2, "mamba_2nd": 4, "mamba3": 7}

# Of the cache. Rotations of a few radians a token add up, each with the rounding of its projection.
TOLERANCES = {"mamba3": 1e-5}
