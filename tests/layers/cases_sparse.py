# SPDX-License-Identifier: Apache-2.0
"""NSA and MoBA, which choose what they see, in the shared layer tests."""

from seqmix.layers import MoBAConfig, NSAConfig

NSA_SIZES = {
    "compression_block": 4,
    "stride": 2,
    "block_size": 4,
    "selected_blocks": 3,
    "local_blocks": 1,
    "window": 5,
}

CASES = {
    "nsa": NSAConfig(
        heads=3,
        kv_heads=1,
        head_width=6,
        value_width=5,
        compression_hidden=3,
        qk_norm=True,
        **NSA_SIZES,
    ),
    "moba": MoBAConfig(heads=3, kv_heads=1, head_width=6, block_size=4, top_k=2),
}

CHANGES = {
    "nsa": [
        {"window": 2},
        {"block_size": 2, "selected_blocks": 1, "initial_blocks": 0},
        {"rotary_base": 3.0},
        {"norm_epsilon": 1.0},
    ],
    "moba": [{"block_size": 2, "top_k": 1}, {"block_size": 1}, {"rotary_base": 3.0}],
}

WIDE = {
    "nsa": NSAConfig(kv_heads=4, compression_hidden=4, block_size=16, selected_blocks=4, window=64),
    "mean_nsa": NSAConfig(
        kv_heads=4, compression="mean", block_size=16, selected_blocks=4, window=64
    ),
    "moba": MoBAConfig(block_size=16),
}
