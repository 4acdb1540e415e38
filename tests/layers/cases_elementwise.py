# SPDX-License-Identifier: Apache-2.0
"""Layers of the elementwise family in the shared layer tests."""

from seqmix.layers import MambaConfig, RGLRUConfig, S4Config, S4DConfig

CASES = {
    "mamba": MambaConfig(expand=3, state_size=7, chunk_size=8),
    "jamba": MambaConfig(expand=1, state_size=3, dt_rank=2, inner_norms=True),
    "mamba_heads": MambaConfig(
        expand=2, heads=3, state_size=3, dt_rank=2, bias=True, convolution_bias=False
    ),
    "rg_lru": RGLRUConfig(expand=2, heads=5, chunk_size=8),
    "s4d": S4DConfig(state_size=6, chunk_size=8),
    "s4": S4Config(state_size=4, chunk_size=8),
}

WIDE = {
    "mamba": MambaConfig(),
    "jamba": MambaConfig(inner_norms=True, state_size=32),
    "mamba_heads": MambaConfig(heads=2, bias=True),
    "rg_lru": RGLRUConfig(),
    "s4d": S4DConfig(),
    "s4": S4Config(),
}

CHANGES = {
    "jamba": [{"norm_epsilon": 1.0}],
}
