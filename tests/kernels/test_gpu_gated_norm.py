# SPDX-License-Identifier: Apache-2.0
"""The gated norm as it is written for a GPU gives what it gives elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import seqmix_kernels
from seqmix.layers import GatedRMSNorm


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("order", ["gate_then_norm", "norm_then_gate"])
@pytest.mark.parametrize(
    ("shape", "group"),
    [((2, 8, 3, 12), None), ((2, 5, 3, 12), 4), ((2, 7, 12), 4), ((5, 12), None)],
)
def test_value_and_gradients(order, activation, shape, group):
    norm = GatedRMSNorm(
        12, order=order, activation=activation, group_size=group,
        dtype=jnp.float32, param_dtype=jnp.float32,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    graph, start = nnx.split(norm)
    weights = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), start)
    x, gate, d_y = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(3))

    def results(platform):
        with seqmix_kernels.compile_for(platform):
            y, pull = jax.vjp(lambda w, x, gate: nnx.merge(graph, w)(x, gate), weights, x, gate)
        return jax.tree.leaves((y, pull(d_y)))

    for got, want in zip(results("gpu"), results("cpu"), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
