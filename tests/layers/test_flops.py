# SPDX-License-Identifier: Apache-2.0
"""Each layer's count of FLOPs against the decode step's, compiled: it computes what is counted."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from seqmix.layers import DeltaNetConfig, GLAConfig, HGRN2Config, RWKV5Config, RWKV6Config
from tests.layers import cases_scalar_decay
from tests.layers.modules import graph_and_shapes

WIDTH = 1024
WIDE = {
    "gla": GLAConfig(heads=16),
    "grouped_gla": GLAConfig(heads=8, kv_heads=2, expand_key=1, convolution=4),
    "hgrn2": HGRN2Config(head_width=64, convolution=4),
    "rwkv5": RWKV5Config(),
    "rwkv6": RWKV6Config(),
    "delta_net": DeltaNetConfig(head_width=64, output_gate=True),
    **cases_scalar_decay.WIDE,
}


@pytest.mark.parametrize("name", list(WIDE))
def test_decode_step(name):
    config = WIDE[name]
    graph, state = graph_and_shapes(config, WIDTH)

    def step(state, x, cache):
        return nnx.merge(graph, state)(x, cache=cache)

    cache = jax.eval_shape(lambda s: nnx.merge(graph, s).init_cache(1, 256), state)
    x = jax.ShapeDtypeStruct((1, 1, WIDTH), jnp.float32)
    compiled = jax.jit(step).lower(state, x, cache).compile().cost_analysis()["flops"]
    # On top of the count come the elementwise passes over states and activations.
    assert config.flops_per_token(WIDTH, context=257) == pytest.approx(compiled, rel=0.05)
