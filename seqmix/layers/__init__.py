# SPDX-License-Identifier: Apache-2.0
"""Flax NNX layers: projections, short convolution, gates, norms and decode cache around a mixer.

A layer is one file here and one line below; importing it registers it under its name in patterns.
"""

from seqmix.layers import parameters as parameters
from seqmix.layers import registry as registry
from seqmix.layers.attention import Attention, AttentionConfig
from seqmix.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetCache, GatedDeltaNetConfig
from seqmix.layers.linear import Linear
from seqmix.layers.mamba2 import Mamba2, Mamba2Cache, Mamba2Config
from seqmix.layers.norms import GatedRMSNorm, RMSNorm
from seqmix.layers.registry import LayerInfo, get, names, register
from seqmix.layers.rotary import rotary
from seqmix.layers.short_convolution import ShortConvolution

__all__ = [
    "Attention",
    "AttentionConfig",
    "GatedDeltaNet",
    "GatedDeltaNetCache",
    "GatedDeltaNetConfig",
    "GatedRMSNorm",
    "LayerInfo",
    "Linear",
    "Mamba2",
    "Mamba2Cache",
    "Mamba2Config",
    "RMSNorm",
    "ShortConvolution",
    "get",
    "names",
    "parameters",
    "register",
    "registry",
    "rotary",
]
