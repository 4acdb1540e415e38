# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from seqmix import config
from seqmix.layers import parameters
from seqmix.layers.attention import AttentionConfig
from seqmix.layers.gated_delta_net import GatedDeltaNetConfig
from seqmix.layers.mamba2 import Mamba2Config
from seqmix.models import HybridLM, HybridLMConfig
from seqmix.training import (
    AdamWConfig,
    Experiment,
    MuonConfig,
    WarmupCosineConfig,
    WarmupLinearConfig,
    WSDConfig,
)
from seqmix.training.program import is_stacked
from seqmix.training.state import ModelDefinition

PATTERN = "gated_delta_net, mamba2, attention"


@pytest.fixture(scope="module")
def definition():
    mixers = {
        "gated_delta_net": GatedDeltaNetConfig(heads=1, head_width=8),
        "mamba2": Mamba2Config(head_width=8, state_size=8),
        "attention": AttentionConfig(heads=2, head_width=8),
    }
    model = HybridLMConfig(width=16, layers=7, pattern=PATTERN, mixers=mixers, tied=False)
    return ModelDefinition(lambda: HybridLM(model, rngs=nnx.Rngs(0)))


def variables(definition):
    """{name: Variable} of a model's parameters, read off the module itself."""
    state = nnx.state(nnx.eval_shape(definition._build), nnx.Param)
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def test_names_are_paths_and_masks_follow_types(definition):
    found = variables(definition)
    assert set(definition.params) == set(found)
    kinds = set()
    for name, variable in found.items():
        kind = type(variable)
        kinds.add(kind)
        assert definition.params[name].shape == variable.shape
        decays = not issubclass(kind, parameters.NoDecayParam | parameters.EmbeddingParam)
        assert definition.decay[name] == (decays or kind is parameters.HeadParam), name
        assert definition.muon[name] == (kind is nnx.Param), name
        # A matrix, of one layer or of one layer per period.
        assert not definition.muon[name] or variable.ndim == 2 + is_stacked(name), name
    kept = [name for name, v in found.items() if type(v) is parameters.Float32Param]
    assert any("A_log" in name for name in kept) and any("dt_bias" in name for name in kept)
    assert not any(definition.decay[name] for name in kept)
    assert {nnx.Param, parameters.Float32Param, parameters.EmbeddingParam} <= kinds


@pytest.mark.parametrize("optimizer", [AdamWConfig(), MuonConfig()])
def test_without_gradient_only_decaying_parameters_shrink(definition, optimizer):
    params = {name: jnp.ones(value.shape) for name, value in definition.params.items()}
    transformation = optimizer.build(definition.decay, definition.muon)
    zeros = jax.tree.map(jnp.zeros_like, params)

    @jax.jit
    def one_update(params):
        return transformation.update(zeros, transformation.init(params), params)[0]

    for name, update in one_update(params).items():
        wanted = -optimizer.weight_decay if definition.decay[name] else 0.0
        np.testing.assert_allclose(update, wanted, rtol=1e-6, err_msg=name)


def test_muon_orthogonalises_each_slice_of_a_stacked_parameter():
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"matrix": jnp.zeros((3, 8, 24)), "embedding": jnp.zeros((5, 8))}
    grads = {
        # Slices of very different sizes: orthogonalised together the small ones would vanish.
        "matrix": jax.random.normal(keys[0], (3, 8, 24))
        * jnp.array([1.0, 1e-2, 1e2])[:, None, None],
        "embedding": jax.random.normal(keys[1], (5, 8)),
    }
    muon = {"matrix": True, "embedding": False}
    settings = MuonConfig(weight_decay=0.0, clip_norm=None, adam_learning_rate=3e-3)
    transformation = settings.build(dict.fromkeys(params, True), muon)
    updates, _ = jax.jit(transformation.update)(grads, transformation.init(params), params)

    # optax's own Muon, on one slice at a time.
    single = optax.contrib.muon(1.0, consistent_rms=0.2)
    for part, gradient in zip(updates["matrix"], grads["matrix"], strict=True):
        matrix = {"x": gradient}
        alone, _ = jax.jit(single.update)(matrix, single.init(matrix), matrix)
        np.testing.assert_allclose(part, alone["x"], rtol=1e-4, atol=1e-5)
        values = np.linalg.svd(part, compute_uv=False) / (0.2 * 24**0.5)
        assert values.min() > 0.6 and values.max() < 1.3  # what five quintic iterations leave
        u, _, v = np.linalg.svd(gradient, full_matrices=False)
        assert np.sum(-part * (u @ v)) > 0.9 * np.linalg.norm(part) * np.linalg.norm(u @ v)
    # The first Adam update is the sign of the gradient, at Adam's own learning rate.
    np.testing.assert_allclose(updates["embedding"], -3.0 * np.sign(grads["embedding"]), rtol=1e-4)


def test_gradients_are_clipped_by_global_norm():
    params = {"a": jnp.zeros(3), "b": jnp.zeros(1)}
    grads = {"a": jnp.full(3, 20.0), "b": jnp.full(1, 20.0)}  # norm 40
    none = dict.fromkeys(params, False)
    # With a huge epsilon Adam divides by a constant, so that updates keep the gradient's size.
    adam = AdamWConfig(eps=1e6, weight_decay=0.0, clip_norm=2.0).build(none, none)
    updates, _ = adam.update(grads, adam.init(params), params)
    np.testing.assert_allclose(optax.tree.norm(updates) * 1e6, 2.0, rtol=1e-4)


STEPS = 100


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        (WarmupCosineConfig(warmup=10, final=0.1), {0: 0.1, 9: 1.0, 10: 1.0, 55: 0.55, 100: 0.1}),
        (WarmupLinearConfig(warmup=10, final=0.0), {0: 0.1, 9: 1.0, 55: 0.5, 100: 0.0}),
        (WSDConfig(warmup=10, decay=0.2), {0: 0.1, 9: 1.0, 80: 1.0, 90: 0.5, 100: 0.0}),
        (WSDConfig(warmup=10, decay=0.2, shape="sqrt"), {80: 1.0, 85: 0.5, 100: 0.0}),
        (WSDConfig(warmup=0, decay=1.0, final=0.5), {0: 1.0, 50: 0.75, 100: 0.5}),
        (WarmupCosineConfig(warmup=0, final=0.0), {0: 1.0, 50: 0.5, 100: 0.0}),
    ],
)
def test_schedules(schedule, points):
    factor = jax.jit(schedule.build(STEPS))
    for step, wanted in points.items():
        np.testing.assert_allclose(factor(jnp.int32(step)), wanted, rtol=1e-5, atol=1e-6)


def test_a_warmup_that_fills_the_run():
    for schedule in (WarmupCosineConfig(), WSDConfig(), WarmupLinearConfig()):
        with pytest.raises(ValueError, match=r"warmup must be shorter than the run of 100 steps"):
            schedule.build(100)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: AdamWConfig(beta2=1.0), r"AdamW.beta2 must be in \[0, 1\), got 1.0"),
        (lambda: AdamWConfig(learning_rate=0.0), "AdamW.learning_rate must be > 0"),
        (lambda: MuonConfig(weight_decay=-1.0), "Muon.weight_decay must be >= 0"),
        (lambda: MuonConfig(iterations=0), "Muon.iterations must be >= 1"),
        (lambda: WSDConfig(decay=0.0), "WSD.decay must be a fraction"),
        (lambda: WSDConfig(shape="cubic"), "WSD.shape must be 'linear' or 'sqrt', got 'cubic'"),
        (lambda: WarmupCosineConfig(warmup=-1), "WarmupCosine.warmup must be >= 0"),
    ],
)
def test_bad_settings(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_gin_chooses_optimizer_and_schedule():
    text = "Experiment.optimizer = @Muon()\nExperiment.schedule = @WSD()\nMuon.beta = 0.9\n"
    experiment = config.from_text(text).build(Experiment)
    assert experiment.optimizer == MuonConfig(beta=0.9)
    assert experiment.schedule == WSDConfig()
