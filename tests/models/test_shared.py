# SPDX-License-Identifier: Apache-2.0
"""What layers hand to later layers of their class: the values of the first RWKV-7 layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix.layers import RWKV7Config, names
from seqmix.models import HybridLM, HybridLMConfig
from tests.layers.modules import quick_jit
from tests.models.models import MIXERS, Model, close, config

TIME = 12
RANKS = {"decay_rank": 3, "rate_rank": 2, "value_rank": 2, "gate_rank": 3}
RWKV7 = {"rwkv7": RWKV7Config(heads=3, head_width=5, chunk_size=8, **RANKS)}


@pytest.fixture(scope="module")
def model():
    """Attention below, so that the first RWKV-7 layer is not the model's first; then a scan."""
    mixers = RWKV7 | {"attention": MIXERS["attention"]}
    return Model(config("rwkv7", layers=4, leading="attention", mixers=mixers))


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, TIME)), jnp.int32)


def _gradient(model, tokens):
    def loss(parameters):
        logits = nnx.merge(model.graph, parameters)(tokens)
        return jnp.sum(logits * jnp.cos(jnp.arange(logits.size)).reshape(logits.shape))

    return quick_jit(jax.grad(loss))(model.parameters)


def test_every_layer_but_the_first_moves_towards_the_first_ones_values(model, tokens):
    flat = dict(nnx.to_flat_state(_gradient(model, tokens)))
    (path,) = (p for p in flat if p[-1] == "value_bias")
    bias = flat[path][...]
    assert bias.shape[0] == 3  # the scanned RWKV-7 layers
    assert not bias[0].any()
    assert bias[1].any() and bias[2].any()


def test_decoding_is_the_full_pass(model, tokens):
    logits, _, _ = model.decode(model.parameters, tokens, model().init_cache(2, TIME))
    close(logits, model.logits(model.parameters, tokens))


@pytest.mark.parametrize("name", [n for n in names() if n not in ("bidirectional", "vmamba")])
def test_every_layer_has_a_cache_in_a_scanned_stack(name):
    """Modules of a scanned stack hold parameters with one more axis; caches must not read them."""
    settings = HybridLMConfig(vocabulary=61, width=128, layers=2, pattern=name)
    model = nnx.eval_shape(lambda: HybridLM(settings, rngs=nnx.Rngs(0)))
    cache = jax.eval_shape(lambda: model.init_cache(3, 4))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.layers))
    assert size == 3 * 2 * settings.mixers[name].cache_bytes(128, 4, "float32")
