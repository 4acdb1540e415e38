# SPDX-License-Identifier: Apache-2.0
"""Small hybrids, built once, whose greedy continuations vary."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from seqmix.layers import AttentionConfig, GatedDeltaNetConfig, Mamba2Config
from seqmix.models import FeedForwardConfig, HybridLM, HybridLMConfig

VOCABULARY = 61
WINDOW = 6
_DELTA = GatedDeltaNetConfig(heads=2, head_width=8, chunk_size=8)
_ATTENTION = AttentionConfig(heads=2, kv_heads=1, head_width=8)
_MAMBA = Mamba2Config(head_width=8, state_size=8, chunk_size=8)
_COMMON = {
    "vocabulary": VOCABULARY,
    "width": 16,
    "feed_forward": FeedForwardConfig(hidden=32, multiple_of=1),
    "tied": False,
    "embedding_std": 1.0,
}
CONFIGS = {
    "delta": HybridLMConfig(
        pattern="3 gated_delta_net, attention",
        layers=4,
        mixers={"gated_delta_net": _DELTA, "attention": _ATTENTION},
        **_COMMON,
    ),
    # Two scanned periods, and a layer on either side of them.
    "mamba": HybridLMConfig(
        pattern="mamba2, local/attention",
        leading="attention",
        trailing="gated_delta_net",
        layers=6,
        mixers={
            "gated_delta_net": _DELTA,
            "mamba2": _MAMBA,
            "attention": _ATTENTION,
            "local/attention": AttentionConfig(heads=2, head_width=8, window=WINDOW),
        },
        **_COMMON,
    ),
}


@functools.cache
def model(name: str) -> HybridLM:
    """A model with random weights; norm scales and biases stay as initialised."""
    return HybridLM(CONFIGS[name], rngs=nnx.Rngs(0))


@functools.cache
def _forward(name: str):
    graph, state = nnx.split(model(name))
    return jax.jit(lambda tokens: nnx.merge(graph, state)(tokens))


def full_logits(name: str, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, T, vocabulary] of one pass over all tokens."""
    return np.asarray(_forward(name)(jnp.asarray(tokens)))


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    draw = np.random.default_rng(seed)
    return [draw.integers(0, VOCABULARY, length).tolist() for length in lengths]
