# SPDX-License-Identifier: Apache-2.0
"""Layers on the vector-decay and delta cores in the shared layer tests."""

from seqmix.layers import DeltaNetConfig, GLAConfig, HGRN2Config, RWKV5Config, RWKV6Config

CASES = {
    "gla": GLAConfig(heads=5, expand_key=1, expand_value=2, gate_rank=3, chunk_size=8),
    "grouped_gla": GLAConfig(heads=3, kv_heads=1, expand_key=1, convolution=3, chunk_size=8),
    "hgrn2": HGRN2Config(heads=3, head_width=4, convolution=2, chunk_size=8),
    "rwkv5": RWKV5Config(heads=3, head_width=7, chunk_size=8),
    "rwkv6": RWKV6Config(heads=3, head_width=5, mix_rank=2, decay_rank=3, chunk_size=8),
    "delta_net": DeltaNetConfig(heads=3, head_width=5, value_width=7, chunk_size=8),
    "gated_output": DeltaNetConfig(heads=5, head_width=3, output_gate=True, chunk_size=8),
}

CHANGES = {
    "gla": [{"gate_normaliser": 1.0}, {"min_log_decay": -1e-3}, {"norm_epsilon": 1.0}],
    "hgrn2": [{"norm_epsilon": 1.0}],
    "rwkv5": [{"norm_epsilon": 1.0}],
    "rwkv6": [{"norm_epsilon": 1.0}],
    "delta_net": [{"allow_negative_eigenvalues": True}, {"norm_epsilon": 1.0}],
}
