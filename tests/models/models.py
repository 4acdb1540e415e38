# SPDX-License-Identifier: Apache-2.0
"""A small hybrid with every kind of layer, random parameters and compiled functions to share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from seqmix.layers import AttentionConfig, GatedDeltaNetConfig, Mamba2Config
from seqmix.models import FeedForwardConfig, HybridLM, HybridLMConfig
from tests.layers.modules import quick_jit, random_parameters

# What rounding may do to logits and gradients of these models. Their random parameters make them
# sensitive: half an ulp on every parameter moves the logits of `config(layers=6)` by 1.4e-5 of
# their largest (the norm over a Gated DeltaNet head whose output is almost zero does most of it).
ROUNDING = 3e-5

MIXERS = {
    "gated_delta_net": GatedDeltaNetConfig(heads=2, head_width=6, value_heads=4, chunk_size=8),
    "mamba2": Mamba2Config(head_width=6, groups=1, state_size=5, chunk_size=8),
    "attention": AttentionConfig(heads=4, kv_heads=2, head_width=6, qk_norm=True),
    "local/attention": AttentionConfig(heads=3, head_width=6, window=5, rotary_fraction=0.34),
}


def config(pattern="gated_delta_net, mamba2, local/attention, attention", **settings):
    text = ", ".join([pattern, settings.get("leading", ""), settings.get("trailing", "")])
    settings = {
        "vocabulary": 61,
        "width": 21,
        "layers": 4,
        "feed_forward": FeedForwardConfig(hidden=18),
        "mixers": {k: v for k, v in MIXERS.items() if k in text.replace(",", " ").split()},
        **settings,
    }
    return HybridLMConfig(pattern=pattern, **settings)


class Model:
    """Functions of a model's parameters, compiled once per shape."""

    def __init__(self, settings):
        self.config = settings
        model = nnx.eval_shape(lambda: HybridLM(settings, rngs=nnx.Rngs(0)))
        self.graph, shapes = nnx.split(model)
        self.parameters = random_parameters(shapes)

    def __call__(self, parameters=None):
        return nnx.merge(self.graph, self.parameters if parameters is None else parameters)

    @functools.partial(quick_jit, static_argnums=0)
    def logits(self, parameters, tokens, segment_ids=None):
        return self(parameters)(tokens, segment_ids)

    @functools.partial(quick_jit, static_argnums=0)
    def gradient(self, parameters, tokens, segment_ids, weights):
        """Logits, and the gradient of their sum weighted by ``weights`` [B, T]."""

        def loss(parameters):
            logits = self(parameters)(tokens, segment_ids)
            probe = jnp.cos(jnp.arange(logits.shape[-1]))
            return jnp.sum((logits @ probe) * weights), logits

        gradient, logits = jax.grad(loss, has_aux=True)(parameters)
        return logits, gradient

    @functools.partial(quick_jit, static_argnums=0)
    def prefill(self, parameters, tokens, segment_ids, cache):
        model = self(parameters)
        hidden, cache = model.hidden(tokens, segment_ids, cache=cache)
        return model.logits(hidden), cache

    @functools.partial(quick_jit, static_argnums=0)
    def decode(self, parameters, tokens, cache):
        """Token by token; logits [B, T, vocabulary] and the positions after each step."""
        model = self(parameters)

        def step(cache, token):
            hidden, cache = model.hidden(token[:, None], cache=cache)
            return cache, (model.logits(hidden)[:, 0], cache.position)

        cache, (logits, positions) = jax.lax.scan(step, cache, tokens.T)
        return logits.swapaxes(0, 1), positions.T, cache


def close(actual, expected, tolerance=ROUNDING):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    error = np.abs(actual - expected).max() / max(1.0, np.abs(expected).max())
    assert error <= tolerance, error


def rms_ratio(actual, expected):
    """Root mean square of the error over that of the expected values."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))


def tree_close(actual, expected, tolerance=ROUNDING):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: close(a, b, tolerance), actual, expected)
