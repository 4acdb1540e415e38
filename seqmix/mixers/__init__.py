# SPDX-License-Identifier: Apache-2.0
"""Sequence mixers as pure functions: no parameters, no Flax, one contract.

Every mixer returns `(out, final_state)`, takes `initial_state` and `segment_ids`, and gives the
same numbers whichever implementation runs.
"""

from seqmix.mixers._segments import segment_positions
from seqmix.mixers.attention import attention
from seqmix.mixers.gated_delta_rule import delta_rule, gated_delta_rule
from seqmix.mixers.kv_cache import KVCache, init_kv_cache
from seqmix.mixers.short_convolution import short_convolution
from seqmix.mixers.simple_gla import simple_gla
from seqmix.mixers.ssd import ssd

__all__ = [
    "KVCache",
    "attention",
    "delta_rule",
    "gated_delta_rule",
    "init_kv_cache",
    "segment_positions",
    "short_convolution",
    "simple_gla",
    "ssd",
]
