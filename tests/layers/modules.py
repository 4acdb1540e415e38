# SPDX-License-Identifier: Apache-2.0
"""Layers with random parameters, drawn by NumPy: nothing to compile, and no constant is special."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from seqmix.layers import LayerInfo, registry

# Compile time is most of a test's time; these passes change speed, not what is computed.
quick_jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)
COMMON = {"layer": LayerInfo(), "dtype": "float32", "param_dtype": "float32"}


def layer_of(config):
    return next(e.layer for e in map(registry.get, registry.names()) if e.config is type(config))


def graph_and_shapes(config, width):
    """Graph definition and abstract parameters of the layer of a config."""
    layer = layer_of(config)
    return nnx.split(nnx.eval_shape(lambda: layer(config, width, rngs=nnx.Rngs(0), **COMMON)))


def random_parameters(shapes, seed=0):
    """Normal, of standard deviation 1/sqrt(inputs) for matrices; norm scales around one.

    Slopes are positive: they are rates of decay.
    """
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        values = rng.normal(size=leaf.shape) / np.sqrt(leaf.shape[-2] if leaf.ndim > 1 else 4)
        if any(getattr(key, "key", None) == "slopes" for key in path):
            values = np.abs(values)
        offset = 1 if any(getattr(key, "key", None) == "scale" for key in path) else 0
        return jnp.asarray(values + offset, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)
