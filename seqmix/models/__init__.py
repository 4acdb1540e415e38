# SPDX-License-Identifier: Apache-2.0
"""Models: blocks, hybrid patterns, the language model, and what a config will cost."""

from seqmix.models.block import Block
from seqmix.models.config import HybridLMConfig
from seqmix.models.convert import stack, stack_paths, unstack, unstack_paths
from seqmix.models.feed_forward import FeedForward, FeedForwardConfig
from seqmix.models.inspection import LayerRow, Report, inspect, parameter_count
from seqmix.models.language_model import HybridCache, HybridLM
from seqmix.models.logits import LogitScaling
from seqmix.models.moe import MoE, MoEConfig
from seqmix.models.pattern import Element, PatternError, Plan, expand, parse
from seqmix.models.residual import ResidualConfig
from seqmix.models.shared_block import SharedBlockConfig
from seqmix.models.stack import Stack, StackCache

__all__ = [
    "Block",
    "Element",
    "FeedForward",
    "FeedForwardConfig",
    "HybridCache",
    "HybridLM",
    "HybridLMConfig",
    "LayerRow",
    "LogitScaling",
    "MoE",
    "MoEConfig",
    "PatternError",
    "Plan",
    "Report",
    "ResidualConfig",
    "SharedBlockConfig",
    "Stack",
    "StackCache",
    "expand",
    "inspect",
    "parameter_count",
    "parse",
    "stack",
    "stack_paths",
    "unstack",
    "unstack_paths",
]
