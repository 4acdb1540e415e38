# SPDX-License-Identifier: Apache-2.0
"""Generation: prefill, a decode loop with a cache of constant size, sampling."""

from seqmix.inference.generate import generate, stream
from seqmix.inference.request import Options
from seqmix.inference.sampling import (
    SamplingArrays,
    SamplingConfig,
    apply_temperature,
    filter_logits,
    greedy,
    min_p,
    row_keys,
    sample,
    top_k,
    top_p,
)
from seqmix.inference.text import Completion, generate_text, stream_text

__all__ = [
    "Completion",
    "Options",
    "SamplingArrays",
    "SamplingConfig",
    "apply_temperature",
    "filter_logits",
    "generate",
    "generate_text",
    "greedy",
    "min_p",
    "row_keys",
    "sample",
    "stream",
    "stream_text",
    "top_k",
    "top_p",
]
