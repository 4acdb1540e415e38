# SPDX-License-Identifier: Apache-2.0
"""Runs that start from another's parameters and train a part of them; losses of layers' own."""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix import config, training
from seqmix.layers import AttentionConfig, DSAConfig
from seqmix.training import CheckpointMismatchError, Experiment, read_metrics
from seqmix.training.program import build_program, select_parameters
from seqmix.training.step import (
    StepOptions,
    batch_loss,
    label_weights,
    make_gradient,
    metric_names,
    summarise,
)
from tests.layers.modules import quick_jit
from tests.training.runs import tiny_experiment
from tests.training.test_step import LENGTHS, make_batch

INDEX = {"top_k": 4, "index_heads": 2, "index_width": 8, "chunk_size": 8}
DSA = {"dsa": DSAConfig(attention=AttentionConfig(heads=2, head_width=8), **INDEX)}
KL = "dsa.index_loss"

GIN = """
HybridLM.width = 16
HybridLM.layers = 1
HybridLM.pattern = 'attention'
HybridLM.scan = False
HybridLM.feed_forward = None
Attention.heads = 2
Attention.head_width = 8
Data.corpora = (@TextCorpus(),)
Data.sequence_length = 16
Data.packing = 'first_fit'
TextCorpus.files = ('{corpus}/[0-5].txt',)
TextCorpus.validation_files = ('{corpus}/[67].txt',)
AdamW.learning_rate = 0.01
WarmupCosine.warmup = 1
Trainer.batch_size = 4
Trainer.steps = 6
Trainer.eval_every = None
Trainer.log_every = 1
"""
INDEXED = [
    "HybridLM.pattern='dsa'",
    "DSA.top_k=4",
    "DSA.index_heads=2",
    "DSA.index_width=8",
]


def parameters(run_dir):
    state = nnx.state(training.load_run(run_dir).model, nnx.Param)
    return {".".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(state)}


def records(run_dir, split="train"):
    return [r for r in read_metrics(run_dir) if r["split"] == split]


@pytest.fixture(scope="module")
def load(corpus, tmp_path_factory):
    """Builds the config above with settings on top, as the command line does."""
    file = tmp_path_factory.mktemp("gin") / "tiny.gin"
    file.write_text(GIN.format(corpus=corpus))
    return lambda *settings: config.load([file], settings).build(Experiment)


@pytest.fixture(scope="module")
def dense(load, tmp_path_factory):
    """A run of dense attention: its folder."""
    folder = tmp_path_factory.mktemp("stages") / "dense"
    training.train(load(), folder, progress=False)
    return folder


@pytest.mark.slow
def test_three_stages_of_sparse_attention(load, dense, tmp_path, capsys):
    warm, sparse = tmp_path / "warm", tmp_path / "sparse"
    indexer_only = [
        "DSA.stage='warmup'",
        "Trainer.trainable=('indexer',)",
        "Trainer.init_new=('indexer',)",
        "Trainer.steps=25",
        "Trainer.eval_every=25",
        "Trainer.eval_batches=2",
    ]
    training.train(load(*INDEXED, *indexer_only, f"Trainer.init_from='{dense}'"), warm)
    shown = capsys.readouterr().out
    assert f"parameters of {dense}, checkpoint 6; drawn anew: stack.leading.0.mixer" in shown
    assert "of them are trained: stack.leading.0.mixer.indexer.key.kernel, " in shown
    assert f"{KL} " in shown
    losses = [record[KL] for record in records(warm)]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    assert records(warm, "validation")[0][KL] == pytest.approx(np.mean(losses[-5:]), rel=0.3)
    before, after = parameters(dense), parameters(warm)
    for name, value in after.items():
        if "indexer" in name:
            assert name not in before
        else:
            np.testing.assert_array_equal(value, before.pop(name), err_msg=name)
    assert not before

    settings = [*INDEXED, f"Trainer.init_from='{warm}'", "Trainer.steps=2"]
    experiment = load(*settings)
    training.train(experiment, sparse, progress=False)
    final = parameters(sparse)
    changed = {name for name, value in final.items() if not np.array_equal(value, after[name])}
    assert changed == set(final)
    # It goes on from its own checkpoint, the source gone or not.
    shutil.rmtree(warm)
    assert training.train(experiment, sparse, progress=False).step == 2
    assert len(records(sparse)) == 2

    program = build_program(experiment, LENGTHS)
    options = StepOptions(1, 0.0, 64, LENGTHS)

    def language_loss(params, batch):
        model = program.definition.merge(params, {})
        return batch_loss(model, batch, options, auxiliary_weight=0.0)[0]

    gradient = quick_jit(jax.grad(language_loss))(final, make_batch())
    assert {name for name, g in gradient.items() if not np.any(g)} == {
        name for name in final if "indexer" in name
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (INDEXED, "it lacks 'stack.leading.0.mixer.indexer.key.kernel', .* Trainer.init_new"),
        (["HybridLM.scan=True"], r"it lacks 'stack.periods.0.* the model has no 'stack.leading"),
        (["Attention.head_width=4"], r"key.kernel' has shape \(16, 16\), the model's \(16, 8"),
        (["Attention.qk_norm=True", *INDEXED, "Trainer.init_new=('indexer',)"], "key_norm.scale"),
    ],
)
def test_a_source_that_does_not_fit_names_what(load, dense, tmp_path, settings, message):
    experiment = load(*settings, f"Trainer.init_from='{dense}'")
    with pytest.raises(CheckpointMismatchError, match=f"Trainer.init_from: .*{message}"):
        training.train(experiment, tmp_path / "run", progress=False)


@pytest.mark.slow
def test_sources_that_are_none(load, dense, tmp_path):
    for source in (tmp_path, tmp_path / "run"):
        experiment = load(f"Trainer.init_from='{source}'")
        with pytest.raises(ValueError, match=r"Trainer\.init_from = "):
            training.train(experiment, tmp_path / "run", progress=False)
    with pytest.raises(training.ResumeError, match="Trainer.init_from was None"):
        training.train(load(f"Trainer.init_from='{dense}'"), dense, progress=False)


def test_bad_settings(load):
    with pytest.raises(config.ConfigError, match=r"Trainer.trainable: '\(' is no regular expr"):
        load("Trainer.trainable=('(',)")
    with pytest.raises(config.ConfigError, match="Trainer.init_new needs Trainer.init_from"):
        load("Trainer.init_new=('indexer',)")


def test_warm_up_trains_the_indexer_alone(corpus):
    """No gradient, moment or decay of anything else; the divergence falls."""
    model = {"pattern": "dsa", "layers": 1, "feed_forward": None}
    model["mixers"] = {"dsa": dataclasses.replace(DSA["dsa"], stage="warmup")}
    experiment = tiny_experiment(corpus, model=model, trainable=("indexer",), z_loss=0.0)
    program = build_program(experiment, LENGTHS)
    trained = set(program.trained)
    assert trained == {name for name in program.abstract.params if "indexer" in name}
    moments = jax.tree.leaves(program.abstract.optimizer)
    count = sum(int(np.prod(program.abstract.params[name].shape)) for name in trained)
    assert sum(x.size for x in moments if x.ndim) == 2 * count
    state, batch = program.initialise(), program.put(make_batch())
    before, found = jax.device_get(state.params), []
    for _ in range(15):
        state, vector = program.train_step(state, batch)
        found.append(summarise(np.asarray(vector), 0.0, (KL,)))
    assert found[-1][KL] < 0.7 * found[0][KL]
    assert found[-1]["loss"] == found[0]["loss"]
    for name, value in before.items():
        assert np.array_equal(value, state.params[name]) == (name not in trained), name


def test_a_pattern_that_matches_nothing_lists_what_there_is():
    names = ("stack.leading.0.mixer.query.kernel", "stack.leading.1.mixer.query.kernel")
    assert select_parameters(names, (r"\.0\.",)) == {names[0]}
    with pytest.raises(
        ValueError, match=r"Trainer.trainable: 'indexer' matches none .* stack.leading.mixer.query"
    ):
        select_parameters(names, ("query", "indexer"))


@pytest.fixture(scope="module")
def gradients(corpus):
    """Of a model with losses of its own: the definition, and (grads, sums) by micro-batches."""

    @functools.cache
    def run(parts, **model):
        settings = {"pattern": "dsa", "mixers": DSA, "feed_forward": None, "scan": True} | model
        experiment = tiny_experiment(corpus, model=settings)
        program = build_program(experiment, LENGTHS)
        options = StepOptions(parts, 0.01, 64, LENGTHS)
        params, variables = quick_jit(program.definition.initialise)()
        gradient = quick_jit(make_gradient(program.definition, options))
        grads, _, sums = gradient(params, variables, make_batch())
        return program.definition, params, variables, grads, sums

    return run


def test_losses_of_layers_are_means_over_real_tokens(gradients):
    """Rows of uneven length, cut into micro-batches, against the two means by their definition."""
    definition, params, variables, grads, sums = gradients(2)
    batch = make_batch()
    options = StepOptions(1, 0.01, 64, LENGTHS)
    segments = batch["segment_ids"]
    labels = float(label_weights(segments).sum())
    real = float((segments[:, :-1] != 0).sum())
    assert labels != real

    def objective(params):
        model = definition.merge(params, variables)
        inputs = (batch[n][:, :-1] for n in ("tokens", "segment_ids", "positions"))
        _, auxiliary = model.hidden_and_auxiliary(*inputs)
        language, _ = batch_loss(model, batch, options, auxiliary_weight=0.0)
        return language / labels + auxiliary.loss / real, auxiliary.metrics[KL] / real

    (_, mean), want = quick_jit(jax.value_and_grad(objective, has_aux=True))(params)
    for name, gradient in want.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(grads[name], gradient, atol=1e-5 * scale, err_msg=name)
    found = dict(zip(metric_names((KL,)), np.asarray(sums), strict=False))
    assert found["real_tokens"] == real and found["tokens"] == labels
    assert found[KL] / real == pytest.approx(float(mean), rel=1e-5)


@pytest.mark.slow
def test_losses_of_layers_under_rematerialisation(gradients):
    (*_, want, sums), (*_, got, other) = gradients(2), gradients(1, remat="full")
    np.testing.assert_allclose(other, sums, rtol=1e-5)
    for name, gradient in want.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(got[name], gradient, atol=1e-5 * scale, err_msg=name)


def test_nothing_is_added_where_no_layer_has_a_loss(corpus):
    experiment = tiny_experiment(corpus)
    definition = build_program(experiment, LENGTHS).definition
    assert definition.auxiliary == ()
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)

    def auxiliary(params, tokens):
        return definition.merge(params, {}).hidden_and_auxiliary(tokens)[1]

    assert jax.eval_shape(auxiliary, definition.params, tokens) is None
