# SPDX-License-Identifier: Apache-2.0
"""The dense feed-forward part against its formula."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix.models import FeedForwardConfig
from seqmix.models.feed_forward import FeedForward
from tests.layers.modules import COMMON


@pytest.mark.parametrize(
    "options",
    [
        {"gate_multiplier": 0.5, "down_multiplier": 3.0},  # Falcon-H1
        {"gate_multiplier": 0.5, "down_multiplier": 3.0, "bias": True},
        {"gated": False, "activation": "relu2", "down_multiplier": 3.0},
    ],
)
def test_multipliers(options):
    module = FeedForward(FeedForwardConfig(hidden=7, **options), 5, rngs=nnx.Rngs(0), **COMMON)
    x = np.random.default_rng(0).normal(size=(4, 5))
    if options.get("bias"):
        for name in ("gate", "up", "down"):
            bias = getattr(module, name).bias
            bias[...] = jnp.cos(jnp.arange(bias[...].size, dtype=jnp.float32))

    def project(y, name):
        linear = getattr(module, name)
        y = y @ np.asarray(linear.kernel[...], np.float64)
        return y if linear.bias is None else y + np.asarray(linear.bias[...], np.float64)

    hidden = project(x, "up")
    if module.gate is None:
        hidden = np.maximum(hidden, 0) ** 2
    else:
        gate = 0.5 * project(x, "gate")
        hidden = gate / (1 + np.exp(-gate)) * hidden
    expected = 3.0 * project(hidden, "down")
    np.testing.assert_allclose(module(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5, atol=1e-6)


def test_bad_multipliers_name_themselves():
    with pytest.raises(ValueError, match="FeedForward.down_multiplier must be positive, got 0"):
        FeedForwardConfig(down_multiplier=0.0)
    with pytest.raises(ValueError, match="gate_multiplier = 2.0 needs a gate, got gated = False"):
        FeedForwardConfig(gated=False, gate_multiplier=2.0)
