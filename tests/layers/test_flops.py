# SPDX-License-Identifier: Apache-2.0
"""Each layer's count of FLOPs against the decode step's, compiled: it computes what is counted."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from seqmix.layers import DeltaNetConfig, GLAConfig, HGRN2Config, RWKV5Config, RWKV6Config
from tests.layers import (
    cases_attention,
    cases_dsa,
    cases_elementwise,
    cases_parallel,
    cases_scalar_decay,
    cases_sparse,
    cases_sparse_static,
)
from tests.layers.modules import graph_and_shapes

WIDTH = 1024
WIDE = {
    "gla": GLAConfig(heads=16),
    "grouped_gla": GLAConfig(heads=8, kv_heads=2, expand_key=1, convolution=4),
    "hgrn2": HGRN2Config(head_width=64, convolution=4),
    "rwkv5": RWKV5Config(),
    "rwkv6": RWKV6Config(),
    "delta_net": DeltaNetConfig(head_width=64, output_gate=True),
    **cases_attention.WIDE,
    **cases_dsa.WIDE,
    **cases_elementwise.WIDE,
    **cases_parallel.WIDE,
    **cases_scalar_decay.WIDE,
    **cases_sparse.WIDE,
    **cases_sparse_static.WIDE,
}


@pytest.mark.parametrize("name", list(WIDE))
def test_decode_step(name):
    config = WIDE[name]
    graph, state = graph_and_shapes(config, WIDTH)

    def step(state, x, cache):
        return nnx.merge(graph, state)(x, cache=cache)

    def cache_of(batch):
        return jax.eval_shape(lambda s: nnx.merge(graph, s).init_cache(batch, 256), state)

    def flops(batch):
        cache = cache_of(batch)
        x = jax.ShapeDtypeStruct((batch, 1, WIDTH), jnp.float32)
        return jax.jit(step).lower(state, x, cache).compile().cost_analysis()["flops"]

    counted = config.flops_per_token(WIDTH, context=257)
    passes = cases_scalar_decay.STATE_PASSES.get(name)
    if passes is None:
        # Sixteen rows, so that work on parameters alone (discretisation) hardly counts. On top of
        # the count come the elementwise passes over states and activations.
        compiled = flops(16) / 16
    else:
        # The state outweighs the projections, and its elementwise passes the tolerance.
        compiled = flops(1)
        counted += passes * max(leaf.size for leaf in jax.tree.leaves(cache_of(1)))
    assert counted == pytest.approx(compiled, rel=0.05)
