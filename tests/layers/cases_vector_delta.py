# SPDX-License-Identifier: Apache-2.0
"""KDA and RWKV-7 in the shared layer tests."""

from seqmix.layers import KDAConfig, RWKV7Config

RANKS = {"decay_rank": 3, "rate_rank": 2, "value_rank": 2, "gate_rank": 3}
CASES = {
    "kda": KDAConfig(heads=3, head_width=5, chunk_size=8),
    "bounded_kda": KDAConfig(heads=5, head_width=3, min_log_decay=-5.0, gate_rank=0, chunk_size=8),
    "rwkv7": RWKV7Config(heads=3, head_width=5, chunk_size=8, **RANKS),
}

CHANGES = {
    "kda": [
        {"allow_negative_eigenvalues": True},
        {"min_log_decay": -5.0},
        {"norm_epsilon": 1.0},
    ],
    "rwkv7": [{"norm_epsilon": 1.0}],
}

# What moves values towards those of the model's first RWKV-7 layer: nothing to move to in the first
# one. tests/models/test_shared.py tests them in a model.
UNUSED_ALONE = ("value_down", "value_up", "value_bias")
