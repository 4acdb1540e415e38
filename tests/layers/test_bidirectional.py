# SPDX-License-Identifier: Apache-2.0
"""Layers that are not causal: both directions of every recurrent layer, and the 2-D scan."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix import config as configs
from seqmix.layers import BidirectionalConfig, VMambaConfig, registry
from seqmix.layers.bidirectional import NOT_RECURRENT
from seqmix.models import HybridLM, HybridLMConfig, inspect
from tests.layers.modules import graph_and_shapes, quick_jit, random_parameters
from tests.layers.test_contract import BATCH, CASES, TIME, WIDTH, close

NAMES = {registry.get(n).config: n for n in registry.names()}
LAYERS = {type(c): c for c in CASES.values() if NAMES[type(c)] not in NOT_RECURRENT}
INNER = {NAMES[kind]: config for kind, config in LAYERS.items()}


def compiled(config, width=WIDTH):
    graph, shapes = graph_and_shapes(config, width)
    parameters = random_parameters(shapes)
    run = quick_jit(lambda p, x, ids: nnx.merge(graph, p)(x, segment_ids=ids)[0])
    return run, parameters


@pytest.mark.parametrize("name", list(INNER))
def test_both_directions_of_each_document(name):
    run, parameters = compiled(BidirectionalConfig(inner=name, layers={name: INNER[name]}))
    one_way, _ = compiled(INNER[name])
    x = jax.random.normal(jax.random.key(1), (BATCH, TIME, WIDTH))
    # Two documents, padding before, inside and after them.
    ids = jnp.asarray(np.repeat([0, 1, 0, 1, 2, 0], (2, 5, 1, 4, 7, 2)))
    packed = run(parameters, x, jnp.tile(ids, (BATCH, 1)))
    for identity in (1, 2):
        (places,) = np.nonzero(np.asarray(ids) == identity)
        real = jnp.tile(jnp.asarray(np.arange(TIME) < len(places), jnp.int32), (BATCH, 1))

        def alone(parameters, tokens, real=real):
            count = tokens.shape[1]
            padded = jnp.zeros_like(x).at[:, :count].set(tokens)
            return one_way(parameters, padded, real)[:, :count]

        ahead = alone(parameters["forward"], x[:, places])
        back = alone(parameters["backward"], x[:, places[::-1]])[:, ::-1]
        close(packed[:, places], ahead + back)
        assert jnp.abs(back).max() > 1e-3
    assert not packed[:, np.asarray(ids) == 0].any()


def test_the_concatenated_form_projects_both():
    inner = {"mamba2": INNER["mamba2"]}
    run, parameters = compiled(BidirectionalConfig(merge="concatenate", layers=inner))
    one_way, _ = compiled(inner["mamba2"])
    x = jax.random.normal(jax.random.key(1), (BATCH, TIME, WIDTH))
    ahead = one_way(parameters["forward"], x, None)
    back = one_way(parameters["backward"], x[:, ::-1], None)[:, ::-1]
    both = jnp.concatenate([ahead, back], axis=-1)
    close(run(parameters, x, None), both @ parameters["output"]["kernel"][...], 1e-5)


def test_counts():
    inner = INNER["mamba2"]
    for merge, extra in (("sum", 0), ("concatenate", 4 * WIDTH**2)):
        config = BidirectionalConfig(merge=merge, layers={"mamba2": inner})
        assert config.flops_per_token(WIDTH, 9) == 2 * inner.flops_per_token(WIDTH, 9) + extra
        assert config.cache_bytes(WIDTH, 9, "float32") == 0


@pytest.mark.parametrize(
    "config",
    [
        BidirectionalConfig(inner="mamba"),
        BidirectionalConfig(inner="rg_lru", merge="concatenate"),
        VMambaConfig(grid=(1, 1)),
    ],
)
def test_flops_are_the_compilers(config):
    width = 512
    graph, state = graph_and_shapes(config, width)

    def flops(batch):
        x = jax.ShapeDtypeStruct((batch, 1, width), jnp.float32)
        compiled = jax.jit(lambda s, x: nnx.merge(graph, s)(x)[0]).lower(state, x).compile()
        return compiled.cost_analysis()["flops"]

    # What a second row of one token adds; norms, gates and the activations are not counted.
    added = flops(2) - flops(1)
    assert config.flops_per_token(width, context=1) == pytest.approx(added, rel=0.05)


@pytest.mark.parametrize("config", [BidirectionalConfig(), VMambaConfig(grid=(2, 2))])
def test_no_cache(config):
    graph, shapes = graph_and_shapes(config, 128)
    model = nnx.merge(graph, shapes)
    with pytest.raises(ValueError, match="is not causal and cannot decode"):
        model.init_cache(1, 8)
    with pytest.raises(ValueError, match="is not causal and cannot decode"):
        jax.eval_shape(lambda x: model(x, cache=x)[0], jnp.zeros((1, 4, 128)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BidirectionalConfig(inner="attention"), "must be a recurrent layer, got 'att"),
        (lambda: BidirectionalConfig(inner="bidirectional"), "must be a recurrent layer"),
        (lambda: BidirectionalConfig(inner="mamba9"), "unknown layer 'mamba9'; did you mean"),
        (lambda: BidirectionalConfig(layers={"mamba": None}), "must hold a Mamba2Config for 'mam"),
        (lambda: VMambaConfig(grid=(0, 3)), r"VMamba.grid must be .* got \(0, 3\)"),
        (lambda: VMambaConfig(convolution=4), "VMamba.convolution must be odd, got 4"),
    ],
)
def test_bad_settings_name_themselves(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_from_gin_inside_a_model():
    text = """
        HybridLM.pattern = 'wide/bidirectional, bidirectional, vmamba'
        HybridLM.layers = 3
        HybridLM.width = 16
        HybridLM.vocabulary = 11
        Bidirectional.inner = 'mamba'
        wide/Bidirectional.merge = 'concatenate'
        Mamba.state_size = 3
        wide/Mamba.state_size = 5
        VMamba.grid = (2, 3)
    """
    settings = configs.from_text(text, filename="a.gin").build(HybridLMConfig)
    inner = [settings.mixers[k].layers["mamba"] for k in ("bidirectional", "wide/bidirectional")]
    assert [c.state_size for c in inner] == [3, 5]
    assert (
        configs.from_text(configs.resolved(settings), filename="b.gin").build(HybridLMConfig)
        == settings
    )
    assert inspect(settings, contexts=(8,)).parameters > 0
    graph, shapes = nnx.split(nnx.eval_shape(lambda: HybridLM(settings, rngs=nnx.Rngs(0))))
    model = nnx.merge(graph, random_parameters(shapes))
    ones = jnp.ones((1, 12), jnp.int32)
    logits = quick_jit(lambda: model(ones, ones))()
    assert logits.shape == (1, 12, 11) and bool(jnp.all(jnp.isfinite(logits)))
    with pytest.raises(ValueError, match="Bidirectional is not causal"):
        model.init_cache(1, 12)


def test_grids_of_a_row_do_not_meet_and_padding_is_inert():
    config = VMambaConfig(grid=(3, 4), expand=1, state_size=3)
    run, parameters = compiled(config)
    x = jax.random.normal(jax.random.key(1), (1, 24, WIDTH))
    ids = jnp.asarray(np.repeat([1, 0, 1, 2], (5, 2, 5, 12)))[None]
    y = run(parameters, x, ids)
    noisy = jnp.where((ids == 0)[..., None], jnp.nan, x)
    np.testing.assert_array_equal(run(parameters, noisy, ids), y)
    assert not y[:, 5:7].any()
    other = x.at[:, :12].add(1.0)
    np.testing.assert_array_equal(run(parameters, other, ids)[:, 12:], y[:, 12:])
    # Every cell of the grid sees every other.
    moved = run(parameters, x.at[:, 23].add(1.0), ids)
    assert (jnp.abs(moved - y)[0, 12:].max(-1) > 1e-6).all() and not (moved - y)[:, :12].any()
    with pytest.raises(ValueError, match=r"whole grids of \(3, 4\) = 12 tokens, got T = 23"):
        run(parameters, x[:, :23], None)


def test_a_token_between_two_documents_of_one_grid_is_seen_by_its_own():
    config = dataclasses.replace(VMambaConfig(), grid=(2, 4), expand=1, state_size=3)
    run, parameters = compiled(config)
    x = jax.random.normal(jax.random.key(1), (1, 8, WIDTH))
    ids = jnp.asarray([[1, 1, 2, 2, 1, 1, 2, 2]])
    y = run(parameters, x, ids)
    moved = run(parameters, x.at[:, jnp.asarray([0, 5])].add(1.0), ids)
    np.testing.assert_array_equal(moved[ids == 2], y[ids == 2])
