# SPDX-License-Identifier: Apache-2.0
"""Flax NNX layers: projections, short convolution, gates, norms and decode cache around a mixer.

A layer is one file here and one line below; importing it registers it under its name in patterns.
"""

from seqmix.layers import parameters as parameters
from seqmix.layers import registry as registry
from seqmix.layers.attention import Attention, AttentionConfig
from seqmix.layers.based import Based, BasedConfig
from seqmix.layers.bidirectional import Bidirectional, BidirectionalConfig
from seqmix.layers.bigbird import BigBird, BigBirdConfig
from seqmix.layers.delta_net import DeltaNet, DeltaNetCache, DeltaNetConfig
from seqmix.layers.dsa import DSAConfig, GroupedDSA, LatentDSA
from seqmix.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetCache, GatedDeltaNetConfig
from seqmix.layers.gla import GLA, GLACache, GLAConfig
from seqmix.layers.hgrn2 import HGRN2, HGRN2Cache, HGRN2Config
from seqmix.layers.kda import KDA, KDAConfig
from seqmix.layers.lightning import Lightning, LightningConfig
from seqmix.layers.linear import BlockLinear, Linear
from seqmix.layers.linear_attention import LinearAttention, LinearAttentionConfig
from seqmix.layers.longformer import Longformer, LongformerConfig
from seqmix.layers.mamba import Mamba, MambaCache, MambaConfig
from seqmix.layers.mamba2 import Mamba2, Mamba2Cache, Mamba2Config
from seqmix.layers.mamba2s import Mamba2S, Mamba2SCache, Mamba2SConfig
from seqmix.layers.mamba3 import Mamba3, Mamba3Config
from seqmix.layers.mamba_2nd import Mamba2nd, Mamba2ndCache, Mamba2ndConfig
from seqmix.layers.mla import MLA, MLAConfig
from seqmix.layers.moba import MoBA, MoBAConfig
from seqmix.layers.norms import GatedRMSNorm, GroupNorm, RMSNorm
from seqmix.layers.nsa import NSA, NSAConfig
from seqmix.layers.parallel_heads import (
    ParallelHeads,
    ParallelHeadsCache,
    ParallelHeadsConfig,
)
from seqmix.layers.performer import Performer, PerformerConfig, redraw_features
from seqmix.layers.registry import LayerInfo, get, names, register
from seqmix.layers.retnet import RetNet, RetNetCache, RetNetConfig
from seqmix.layers.rg_lru import RGLRU, RGLRUCache, RGLRUConfig
from seqmix.layers.rotary import rotary
from seqmix.layers.rotary_scaling import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    YarnScaling,
)
from seqmix.layers.rwkv5 import RWKV5, RWKV5Config
from seqmix.layers.rwkv6 import RWKV6, RWKV6Config
from seqmix.layers.rwkv7 import RWKV7, RWKV7Config
from seqmix.layers.rwkv_channel_mix import (
    RWKVChannelMix,
    RWKVChannelMixCache,
    RWKVChannelMixConfig,
)
from seqmix.layers.rwkv_time_mix import RWKVCache
from seqmix.layers.s4 import S4, S4Config
from seqmix.layers.s4d import S4D, S4DConfig
from seqmix.layers.short_convolution import ShortConvolution
from seqmix.layers.vmamba import VMamba, VMambaConfig

__all__ = [
    "GLA",
    "HGRN2",
    "KDA",
    "MLA",
    "NSA",
    "RGLRU",
    "RWKV5",
    "RWKV6",
    "RWKV7",
    "S4",
    "S4D",
    "Attention",
    "AttentionConfig",
    "Based",
    "BasedConfig",
    "Bidirectional",
    "BidirectionalConfig",
    "BigBird",
    "BigBirdConfig",
    "BlockLinear",
    "DSAConfig",
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
    "GroupedDSA",
    "HGRN2Cache",
    "HGRN2Config",
    "KDAConfig",
    "LatentDSA",
    "LayerInfo",
    "Lightning",
    "LightningConfig",
    "Linear",
    "LinearAttention",
    "LinearAttentionConfig",
    "LinearScaling",
    "Llama3Scaling",
    "Longformer",
    "LongformerConfig",
    "MLAConfig",
    "Mamba",
    "Mamba2",
    "Mamba2Cache",
    "Mamba2Config",
    "Mamba2S",
    "Mamba2SCache",
    "Mamba2SConfig",
    "Mamba2nd",
    "Mamba2ndCache",
    "Mamba2ndConfig",
    "Mamba3",
    "Mamba3Config",
    "MambaCache",
    "MambaConfig",
    "MoBA",
    "MoBAConfig",
    "NSAConfig",
    "NTKScaling",
    "ParallelHeads",
    "ParallelHeadsCache",
    "ParallelHeadsConfig",
    "Performer",
    "PerformerConfig",
    "RGLRUCache",
    "RGLRUConfig",
    "RMSNorm",
    "RWKV5Config",
    "RWKV6Config",
    "RWKV7Config",
    "RWKVCache",
    "RWKVChannelMix",
    "RWKVChannelMixCache",
    "RWKVChannelMixConfig",
    "RetNet",
    "RetNetCache",
    "RetNetConfig",
    "S4Config",
    "S4DConfig",
    "ShortConvolution",
    "VMamba",
    "VMambaConfig",
    "YarnScaling",
    "get",
    "names",
    "parameters",
    "redraw_features",
    "register",
    "registry",
    "rotary",
]
