# SPDX-License-Identifier: Apache-2.0
"""DSA over grouped heads and over latents in the shared layer tests; rows longer than `top_k`."""

from seqmix.layers import AttentionConfig, DSAConfig, MLAConfig

GROUPED = AttentionConfig(heads=3, kv_heads=1, head_width=6, qk_norm=True, output_gate=True)
LATENT = MLAConfig(heads=3, head_width=5, rotary_width=4, value_width=7, kv_rank=6, query_rank=8)
INDEX = {"top_k": 2, "index_heads": 3, "index_width": 4, "chunk_size": 8}

CASES = {
    "dsa": DSAConfig(attention=GROUPED, **INDEX),
    "latent_dsa": DSAConfig(attention=LATENT, **INDEX),
}

CHANGES = {
    "dsa": [
        {"top_k": 1},
        {"stage": "warmup"},
        {"index_rotary_fraction": 0.0},
    ],
}

WIDE = {
    "dsa": DSAConfig(attention=AttentionConfig(kv_heads=4), top_k=64),
    "latent_dsa": DSAConfig(
        attention=MLAConfig(
            head_width=64, rotary_width=32, value_width=64, kv_rank=64, query_rank=96
        ),
        top_k=64,
    ),
}

# Learns from its own loss alone.
UNUSED_ALONE = ("indexer",)
