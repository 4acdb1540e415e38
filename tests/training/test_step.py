# SPDX-License-Identifier: Apache-2.0
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqmix.training import MuonConfig
from seqmix.training.evaluation import validation_data
from seqmix.training.program import build_program
from seqmix.training.step import (
    EVAL_SUMS,
    METRICS,
    StepOptions,
    label_weights,
    make_gradient,
    summarise,
)
from tests.training.runs import tiny_experiment, tiny_model

LENGTHS = np.ones(257, np.int32)


@pytest.fixture(scope="module")
def experiment(corpus):
    return tiny_experiment(corpus)


@pytest.fixture(scope="module")
def program(experiment):
    return build_program(experiment, LENGTHS)


def make_batch(rows=4, time=17, seed=0):
    """Rows of two documents and some padding, uneven over the rows."""
    random = np.random.default_rng(seed)
    segments = np.zeros((rows, time), np.int32)
    positions = np.zeros((rows, time), np.int32)
    for row in range(rows):
        first, second = 3 + row, 10 + row
        segments[row, :first], segments[row, first:second] = 1, 2
        positions[row, :first] = np.arange(first)
        positions[row, first:second] = np.arange(second - first)
    tokens = random.integers(0, 256, (rows, time)).astype(np.int32)
    return {"tokens": tokens, "segment_ids": segments, "positions": positions}


def metrics_of(vector):
    return dict(zip(METRICS, map(float, vector), strict=True))


def test_which_labels_count():
    segments = jnp.array([[1, 1, 2, 2, 2, 0, 0], [0, 1, 1, 0, 2, 2, 3]])
    wanted = [[1, 0, 1, 1, 0, 0], [0, 1, 0, 0, 1, 0]]
    assert label_weights(segments).tolist() == wanted
    tokens = jnp.array([[9, 8, 7, 8, 9, 7, 0], [0, 5, 9, 0, 8, 6, 1]])
    # 8 and 9 are meta tokens: no labels, but inputs.
    wanted = [[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0]]
    assert label_weights(segments, tokens, range(8, 10)).tolist() == wanted


def test_meta_tokens_are_read_and_never_predicted(corpus):
    experiment = tiny_experiment(corpus, {"meta_tokens": 2, "vocabulary": 259}, meta_tokens=2)
    meta = build_program(experiment, LENGTHS)
    state, batch = meta.initialise(), make_batch()
    for segment in (1, 2):
        for position in (0, 1):
            where = (batch["segment_ids"] == segment) & (batch["positions"] == position)
            batch["tokens"][where] = 259 + position
    sums = meta.eval_step(state.params, state.variables, meta.put(batch))
    result = summarise(np.asarray(sums), z_loss=0.0)
    model = meta.definition.merge(state.params, state.variables)
    inputs = {name: jnp.asarray(value[:, :-1]) for name, value in batch.items()}
    logits = jax.jit(lambda m, i: m(i["tokens"], i["segment_ids"], i["positions"]))(model, inputs)
    log_p = np.asarray(jax.nn.log_softmax(logits))
    counted = [
        (row, t)
        for row, t in np.ndindex(4, 16)
        if batch["segment_ids"][row, t + 1] and batch["positions"][row, t + 1] >= 2
    ]
    nll = -np.mean([log_p[row, t, batch["tokens"][row, t + 1]] for row, t in counted])
    assert result["loss"] == pytest.approx(nll, rel=1e-5)
    assert result["tokens"] == result["bytes"] == len(counted)
    # Data of a run has the ids of its model.
    assert validation_data(experiment).meta_ids == range(259, 261) == model.config.meta_ids


def test_accumulated_gradient_is_the_big_batch_gradient(program):
    options = StepOptions(1, 0.01, 64, LENGTHS)
    state, batch = program.initialise(), make_batch()
    arguments = (state.params, state.variables, program.put(batch))
    grads, _, sums = jax.jit(make_gradient(program.definition, options))(*arguments)
    cut = dataclasses.replace(options, gradient_accumulation=2)
    cut_grads, _, cut_sums = jax.jit(make_gradient(program.definition, cut))(*arguments)
    np.testing.assert_allclose(cut_sums, sums, rtol=1e-5)
    for name, grad in grads.items():
        scale = np.abs(grad).max()
        np.testing.assert_allclose(cut_grads[name], grad, atol=1e-5 * scale, err_msg=name)


def test_loss_is_that_of_the_logits(program):
    state, batch = program.initialise(), make_batch()
    sums = program.eval_step(state.params, state.variables, program.put(batch))
    result = summarise(np.asarray(sums), z_loss=0.0)
    model = program.definition.merge(state.params, state.variables)
    inputs = {name: jnp.asarray(value[:, :-1]) for name, value in batch.items()}
    logits = jax.jit(lambda m, i: m(i["tokens"], i["segment_ids"], i["positions"]))(model, inputs)
    weights = np.asarray(label_weights(batch["segment_ids"]))
    log_p = np.asarray(jax.nn.log_softmax(logits))
    nll = -np.take_along_axis(log_p, batch["tokens"][:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(result["loss"], (nll * weights).sum() / weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(result["bits_per_byte"], result["loss"] / np.log(2), rtol=1e-6)
    assert result["tokens"] == result["bytes"] == weights.sum()
    seen = (batch["positions"][:, :-1] + 1) * weights
    assert sums[EVAL_SUMS.index("context")] == seen.sum()


def test_batch_of_padding_changes_only_by_decay(program):
    batch = {name: np.zeros_like(value) for name, value in make_batch().items()}
    state = program.initialise()
    before = jax.device_get(state.params)
    state, vector = program.train_step(state, program.put(batch))
    metrics = metrics_of(vector)
    assert metrics["finite"] == 1 and metrics["tokens"] == 0 and metrics["grad_norm"] == 0
    for name, value in before.items():
        if not program.definition.decay[name]:
            np.testing.assert_array_equal(state.params[name], value, err_msg=name)
    assert np.isnan(summarise(np.asarray(vector), 0.0)["loss"])


def test_non_finite_step_is_skipped_and_counted(program):
    state, batch = program.initialise(), program.put(make_batch())
    state, _ = program.train_step(state, batch)
    good = jax.device_get(state)
    # A token outside the vocabulary makes the embedding NaN.
    broken = program.put({**make_batch(), "tokens": np.full((4, 17), 999, np.int32)})
    for count in (1, 2):
        state, vector = program.train_step(state, broken)
        metrics = metrics_of(vector)
        assert metrics["finite"] == 0
        assert metrics["skipped"] == metrics["consecutive"] == count
        assert int(state.step) == 1 + count
    for part in ("params", "optimizer", "variables"):
        before, after = getattr(good, part), jax.device_get(getattr(state, part))
        assert jax.tree.all(jax.tree.map(np.array_equal, before, after)), part
    state, vector = program.train_step(state, batch)
    metrics = metrics_of(vector)
    assert (metrics["finite"], metrics["skipped"], metrics["consecutive"]) == (1, 2, 0)
    # The rate follows the batches: 3 of 5 warm-up steps were consumed before this one.
    np.testing.assert_allclose(metrics["learning_rate"], 1e-2 * 4 / 5, rtol=1e-6)


def test_one_compilation_for_every_step_and_short_batches(program):
    before = program.train_step._cache_size(), program.eval_step._cache_size()
    state = program.initialise()
    for step in range(20):
        rows = 3 if step % 5 == 4 else 4
        batch = program.put(make_batch(rows, seed=step))
        state, vector = program.train_step(state, batch)
        if step % 7 == 0:
            program.eval_step(state.params, state.variables, batch)
    assert metrics_of(vector)["finite"] == 1
    assert (program.train_step._cache_size(), program.eval_step._cache_size()) == (1, 1), before


def test_too_many_rows(program):
    with pytest.raises(ValueError, match="batch: expected at most 4 rows, got 5"):
        program.put(make_batch(5))


def test_settings_that_do_not_go_together(experiment):
    with pytest.raises(
        ValueError, match="HybridLM.vocabulary must be at least the tokenizer's 300"
    ):
        build_program(experiment, np.ones(300, np.int32))
    with pytest.raises(ValueError, match=r"HybridLM.meta_tokens and Data.meta_tokens .* 2 and 0"):
        dataclasses.replace(experiment, model=tiny_model(meta_tokens=2))


@pytest.mark.slow
def test_muon_trains_the_real_model(corpus):
    attention = tiny_model().mixers["attention"]
    stacked = {"pattern": "attention", "mixers": {"attention": attention}, "scan": True}
    experiment = dataclasses.replace(
        tiny_experiment(corpus, model=stacked), optimizer=MuonConfig(learning_rate=1e-2)
    )
    program = build_program(experiment, LENGTHS)
    assert any("stack.periods" in name for name in program.definition.params)
    state, batch = program.initialise(), program.put(make_batch())
    found = []
    for _ in range(25):
        state, vector = program.train_step(state, batch)
        found.append(metrics_of(vector)["loss"] / metrics_of(vector)["tokens"])
    assert found[-1] < 0.6 * found[0]
