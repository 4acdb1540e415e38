# SPDX-License-Identifier: Apache-2.0
"""Flax NNX layers: projections, short convolution, gates, norms and decode cache around a mixer.

A layer is one file here and one line below; importing it registers it under its name in patterns.
"""

from seqmix.layers import parameters as parameters
from seqmix.layers import registry as registry
from seqmix.layers.attention import Attention, AttentionConfig
from seqmix.layers.delta_net import DeltaNet, DeltaNetCache, DeltaNetConfig
from seqmix.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetCache, GatedDeltaNetConfig
from seqmix.layers.gla import GLA, GLACache, GLAConfig
from seqmix.layers.hgrn2 import HGRN2, HGRN2Cache, HGRN2Config
from seqmix.layers.linear import BlockLinear, Linear
from seqmix.layers.mamba import Mamba, MambaCache, MambaConfig
from seqmix.layers.mamba2 import Mamba2, Mamba2Cache, Mamba2Config
from seqmix.layers.norms import GatedRMSNorm, GroupNorm, RMSNorm
from seqmix.layers.registry import LayerInfo, get, names, register
from seqmix.layers.rg_lru import RGLRU, RGLRUCache, RGLRUConfig
from seqmix.layers.rotary import rotary
from seqmix.layers.rwkv5 import RWKV5, RWKV5Config
from seqmix.layers.rwkv6 import RWKV6, RWKV6Config
from seqmix.layers.rwkv_time_mix import RWKVCache
from seqmix.layers.short_convolution import ShortConvolution

__all__ = [
    "GLA",
    "HGRN2",
    "RGLRU",
    "RWKV5",
    "RWKV6",
    "Attention",
    "AttentionConfig",
    "BlockLinear",
    "DeltaNet",
    "DeltaNetCache",
    "DeltaNetConfig",
    "GLACache",
    "GLAConfig",
    "GatedDeltaNet",
    "GatedDeltaNetCache",
    "GatedDeltaNetConfig",
    "GatedRMSNorm",
    "GroupNorm",
    "HGRN2Cache",
    "HGRN2Config",
    "LayerInfo",
    "Linear",
    "Mamba",
    "Mamba2",
    "Mamba2Cache",
    "Mamba2Config",
    "MambaCache",
    "MambaConfig",
    "RGLRUCache",
    "RGLRUConfig",
    "RMSNorm",
    "RWKV5Config",
    "RWKV6Config",
    "RWKVCache",
    "ShortConvolution",
    "get",
    "names",
    "parameters",
    "register",
    "registry",
    "rotary",
]
