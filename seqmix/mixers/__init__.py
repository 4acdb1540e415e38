# SPDX-License-Identifier: Apache-2.0
"""Sequence mixers as pure functions: no parameters, no Flax, one contract.

Every mixer returns `(out, final_state)`, takes `initial_state` and `segment_ids`, and gives the
same numbers whichever implementation runs.
"""

from seqmix.mixers import feature_maps as feature_maps
from seqmix.mixers._segments import segment_positions
from seqmix.mixers.attention import attention
from seqmix.mixers.bigbird_attention import bigbird_attention
from seqmix.mixers.dsa_attention import DSACache, dsa_attention, init_dsa_cache
from seqmix.mixers.forgetting_attention import (
    ForgettingCache,
    forgetting_attention,
    init_forgetting_cache,
)
from seqmix.mixers.gated_delta_rule import delta_rule, gated_delta_rule
from seqmix.mixers.gla import gla
from seqmix.mixers.hgrn2 import hgrn2
from seqmix.mixers.kda import kda
from seqmix.mixers.kv_cache import KVCache, init_kv_cache
from seqmix.mixers.latent_attention import LatentCache, init_latent_cache, latent_attention
from seqmix.mixers.lightning_attention import alibi_slopes, lightning_attention
from seqmix.mixers.linear_attention import linear_attention
from seqmix.mixers.longformer_attention import (
    LongformerCache,
    init_longformer_cache,
    longformer_attention,
)
from seqmix.mixers.mamba3 import Mamba3State, mamba3
from seqmix.mixers.moba_attention import MoBAState, init_moba_state, moba_attention
from seqmix.mixers.nsa_attention import (
    NSABranches,
    NSACompression,
    NSAState,
    init_nsa_state,
    nsa_attention,
)
from seqmix.mixers.performer_attention import (
    PerformerState,
    init_performer_state,
    performer_attention,
)
from seqmix.mixers.retention import retention
from seqmix.mixers.rg_lru import rg_lru
from seqmix.mixers.rwkv6 import rwkv5, rwkv6
from seqmix.mixers.rwkv7 import rwkv7
from seqmix.mixers.s4 import s4
from seqmix.mixers.s4d import s4d
from seqmix.mixers.second_order_attention import second_order_attention
from seqmix.mixers.selective_scan import selective_scan
from seqmix.mixers.short_convolution import short_convolution
from seqmix.mixers.simple_gla import simple_gla
from seqmix.mixers.ssd import ssd
from seqmix.mixers.structured_mask import structured_mask
from seqmix.mixers.token_shift import token_shift

__all__ = [
    "DSACache",
    "ForgettingCache",
    "KVCache",
    "LatentCache",
    "LongformerCache",
    "Mamba3State",
    "MoBAState",
    "NSABranches",
    "NSACompression",
    "NSAState",
    "PerformerState",
    "alibi_slopes",
    "attention",
    "bigbird_attention",
    "delta_rule",
    "dsa_attention",
    "feature_maps",
    "forgetting_attention",
    "gated_delta_rule",
    "gla",
    "hgrn2",
    "init_dsa_cache",
    "init_forgetting_cache",
    "init_kv_cache",
    "init_latent_cache",
    "init_longformer_cache",
    "init_moba_state",
    "init_nsa_state",
    "init_performer_state",
    "kda",
    "latent_attention",
    "lightning_attention",
    "linear_attention",
    "longformer_attention",
    "mamba3",
    "moba_attention",
    "nsa_attention",
    "performer_attention",
    "retention",
    "rg_lru",
    "rwkv5",
    "rwkv6",
    "rwkv7",
    "s4",
    "s4d",
    "second_order_attention",
    "segment_positions",
    "selective_scan",
    "short_convolution",
    "simple_gla",
    "ssd",
    "structured_mask",
    "token_shift",
]
