# SPDX-License-Identifier: Apache-2.0
"""Longformer and BigBird, whose sparsity is fixed beforehand, in the shared layer tests."""

from seqmix.layers import BigBirdConfig, LongformerConfig

CASES = {
    "longformer": LongformerConfig(heads=4, kv_heads=2, head_width=4, window=5, global_tokens=2),
    "bigbird": BigBirdConfig(heads=3, head_width=4, block_size=3, window_blocks=2, random_blocks=1),
}

CHANGES = {
    "longformer": [
        {"window": 1},
        {"global_tokens": 1},
        {"causal": False, "window": 4},
        {"rotary_base": 3.0},
    ],
    "bigbird": [
        {"block_size": 1, "window_blocks": 1},
        {"block_size": 1, "window_blocks": 1, "random_blocks": 0},
        {"causal": False, "window_blocks": 1},
        {"rotary_base": 3.0},
    ],
}

WIDE = {
    "longformer": LongformerConfig(window=32),
    "bigbird": BigBirdConfig(block_size=8),
}
