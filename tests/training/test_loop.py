# SPDX-License-Identifier: Apache-2.0
import dataclasses
import signal

import jax
import numpy as np
import pytest
from flax import nnx

from seqmix.data import TextCorpus, TrainBPE
from seqmix.models import HybridLMConfig
from seqmix.training import (
    CheckpointError,
    CheckpointMismatchError,
    Experiment,
    NonFiniteError,
    ResumeError,
    evaluate,
    load_experiment,
    load_run,
    read_metrics,
    train,
)
from seqmix.training import loop as loop_module
from seqmix.training.stopping import StopRequest, catch_signals
from tests.training.runs import losses, tiny_experiment


def stop_at(monkeypatch, step):
    def reached(self, current):
        if current >= step:
            self.reason = "test"
        return current >= step

    monkeypatch.setattr(StopRequest, "reached", reached)


def params_of(run_dir):
    return jax.tree.leaves(jax.device_get(nnx.state(load_run(run_dir).model)))


def test_run_folder_and_result(straight):
    run_dir, result = straight
    assert (result.step, result.stopped) == (50, None)
    found = losses(run_dir)
    assert sorted(found) == list(range(1, 51))
    assert np.mean([found[s] for s in range(46, 51)]) < 0.75 * np.mean([found[s] for s in (1, 2)])
    assert sorted(losses(run_dir, "validation")) == [10, 20, 30, 40, 50]
    assert result.validation["loss"] == losses(run_dir, "validation")[50]
    assert result.validation["bits_per_byte"] == pytest.approx(
        result.validation["loss"] / np.log(2) * result.validation["tokens"]
        / result.validation["bytes"]
    )  # fmt: skip
    assert next(r for r in read_metrics(run_dir) if r["split"] == "bigram")[
        "bits_per_byte"
    ] == pytest.approx(result.bigram)
    names = {path.name for path in run_dir.iterdir()}
    assert names == {
        "config.gin",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "loss.png",
        "tokenizer",
    }
    assert load_experiment(run_dir).trainer.steps == 50


def test_resumed_losses_are_those_of_the_straight_run(straight, corpus, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 23)
        result = train(tiny_experiment(corpus), tmp_path, progress=False)
        assert (result.step, result.stopped) == (23, "test")
    result = train(tiny_experiment(corpus), tmp_path, progress=False)
    assert (result.step, result.stopped) == (50, None)
    for split in ("train", "validation"):
        assert losses(tmp_path, split) == losses(straight[0], split)
    for new, old in zip(params_of(tmp_path), params_of(straight[0]), strict=True):
        np.testing.assert_array_equal(new, old)


def test_a_finished_run_repeats_nothing(straight, corpus):
    run_dir, result = straight
    before = (run_dir / "metrics.jsonl").read_bytes()
    again = train(tiny_experiment(corpus), run_dir, progress=False)
    assert again.step == 50 and again.validation == result.validation
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_evaluate_and_load(straight):
    run_dir, result = straight
    found = evaluate(None, run_dir, batches=3)
    assert found == {"step": 50, **result.validation}
    assert evaluate(None, run_dir, step=40, batches=3)["loss"] == pytest.approx(
        losses(run_dir, "validation")[40], rel=1e-6
    )
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 7 in .*\[40, 50\]"):
        evaluate(None, run_dir, step=7)
    run = load_run(run_dir)
    assert run.step == 50 and run.tokenizer.vocabulary_size == 257
    logits = run.model(np.array([run.tokenizer.encode("line 1 of")]))
    # Enough was learnt to go on with the text all documents share.
    assert run.tokenizer.decode([int(logits[0, -1].argmax())]) == " "


def test_an_unknown_run_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no run folder: it holds no config.gin"):
        evaluate(None, tmp_path)


def test_one_compilation(corpus, tmp_path, monkeypatch):
    """Twenty steps with evaluations and a changing learning rate (failures 42)."""
    lowered, programs, after_first = [], [], []
    build = loop_module.build_program

    def remember(*arguments):
        program = build(*arguments)
        step = program.train_step

        def counting(*args):
            out = step(*args)
            after_first.append(len(lowered))
            return out

        programs.append(program)
        return dataclasses.replace(program, train_step=counting)

    def listen(event, duration, **_):
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            lowered.append(duration)

    monkeypatch.setattr(loop_module, "build_program", remember)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        stop_at(monkeypatch, 20)
        train(tiny_experiment(corpus, eval_every=5), tmp_path, progress=False)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert programs[0].train_step._cache_size() == programs[0].eval_step._cache_size() == 1
    assert len(after_first) == 20 and after_first[0] > 0
    # After the first step one more program is compiled, the evaluation's.
    assert after_first[-1] == after_first[0] + 1
    rates = [r["learning_rate"] for r in read_metrics(tmp_path) if r["split"] == "train"]
    assert len(set(rates)) > 15


def test_another_config_is_refused_by_name(straight, corpus):
    run_dir, _ = straight
    other = tiny_experiment(corpus, batch_size=8, log_every=7)
    other = dataclasses.replace(other, model=dataclasses.replace(other.model, layers=4))
    with pytest.raises(ResumeError) as caught:
        train(other, run_dir, progress=False)
    lines = str(caught.value).splitlines()[1:]
    assert lines == [
        "  HybridLM.layers was 2, is 4",
        "  Trainer.batch_size was 4, is 8",
    ]


def test_stacking_of_the_checkpoint_is_named(straight, corpus, tmp_path):
    run_dir, _ = straight
    other = tiny_experiment(corpus, model={"scan": True})
    (tmp_path / "checkpoints").symlink_to(run_dir / "checkpoints")
    with pytest.raises(CheckpointMismatchError, match="HybridLM.scan is True.*written with False"):
        train(other, tmp_path, progress=False)


def test_a_run_goes_on_for_more_steps(straight, corpus, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 10)
        train(tiny_experiment(corpus), tmp_path, progress=False)
    # Where nothing depends on it the cadence may change between the parts.
    longer = tiny_experiment(corpus, log_every=4, eval_every=None, checkpoint_every=None)
    result = train(longer, tmp_path, progress=False)
    assert result.step == 50 and result.validation is None
    assert sorted(losses(tmp_path))[:14] == [*range(1, 11), 12, 16, 20, 24]
    assert load_experiment(tmp_path).trainer.log_every == 4


@pytest.mark.slow
def test_300_steps_in_bfloat16_stay_finite(corpus, tmp_path):
    experiment = tiny_experiment(
        corpus,
        model={"dtype": "bfloat16"},
        steps=300,
        eval_every=100,
        checkpoint_every=None,
    )
    result = train(experiment, tmp_path, progress=False)
    records = [r for r in read_metrics(tmp_path) if r["split"] == "train"]
    assert len(records) == 300 and records[-1]["skipped"] == 0
    for record in records:
        assert np.isfinite([record["loss"], record["grad_norm"]]).all(), record
    assert np.mean([r["loss"] for r in records[-20:]]) < 0.5 * records[0]["loss"]
    assert result.validation["loss"] < 0.5 * records[0]["loss"]
    assert {str(leaf.dtype) for leaf in params_of(tmp_path)} == {"float32"}


def test_too_many_nonfinite_steps_stop_the_run(corpus, tmp_path, monkeypatch):
    build = loop_module.build_program

    def broken(*arguments):
        program = build(*arguments)
        put = program.put
        calls = []

        def spoil(self, batch):
            calls.append(1)
            tokens = batch["tokens"] + (1000 if len(calls) > 12 else 0)
            return put({**batch, "tokens": tokens})

        monkeypatch.setattr(type(program), "put", spoil)
        return program

    monkeypatch.setattr(loop_module, "build_program", broken)
    experiment = tiny_experiment(corpus, eval_every=None, max_consecutive_nonfinite=3)
    with pytest.raises(NonFiniteError, match="step 15: .* 3 steps in a row.* those of step 12"):
        train(experiment, tmp_path, progress=False)
    assert load_run(tmp_path).step == 10
    assert max(losses(tmp_path)) == 14


@pytest.fixture
def interruptible():
    """SIGINT raises KeyboardInterrupt, also where the suite runs in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_signals_ask_once():
    before = signal.getsignal(signal.SIGINT)
    with catch_signals() as stop:
        assert not stop.reached(0)
        signal.raise_signal(signal.SIGINT)
        assert stop.reached(1) and stop.reason == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_profile_window(corpus, tmp_path, monkeypatch):
    stop_at(monkeypatch, 6)
    experiment = tiny_experiment(corpus, eval_every=None, profile_start=3, profile_steps=2)
    train(experiment, tmp_path, progress=False)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_bad_trainer_settings(corpus):
    with pytest.raises(ValueError, match="Trainer.steps must be >= 1, got 0"):
        tiny_experiment(corpus, steps=0)
    with pytest.raises(ValueError, match="Trainer.batch_size must be a multiple of .*=3, got 4"):
        tiny_experiment(corpus, gradient_accumulation=3)


def test_messages(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("rich.console.Console.is_terminal", False)
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        train(tiny_experiment(corpus), tmp_path)
    first = capsys.readouterr().out
    assert "Trainer.batch_size = 4" in first and "bigram baseline: " in first
    assert f"stopped by test at step 5; saved, and resumes from {tmp_path}" in first
    train(tiny_experiment(corpus), tmp_path)
    second = capsys.readouterr().out
    assert "resumed at step 5" in second and "step 50/50  loss " in second
    assert second.splitlines()[-1].startswith("model ") and "bigram" in second.splitlines()[-1]


@pytest.mark.parametrize("layer", ["bidirectional", "vmamba"])
def test_layers_that_read_later_tokens_are_refused(layer):
    model = HybridLMConfig(pattern=f"attention, {layer}", layers=2, width=64)
    with pytest.raises(ValueError, match=f"HybridLM.pattern has '{layer}', which reads later"):
        Experiment(model=model)


def test_a_refused_resume_leaves_the_folder_and_eval_refuses_another_tokenizer(corpus, tmp_path):
    run_dir, more = tmp_path / "run", tmp_path / "more"
    experiment = tiny_experiment(corpus, steps=8)
    bpe = dataclasses.replace(experiment.data, tokenizer=TrainBPE(vocabulary_size=270))
    model = dataclasses.replace(experiment.model, vocabulary=270)
    experiment = dataclasses.replace(experiment, data=bpe, model=model)
    train(experiment, run_dir, progress=False)
    files = sorted(p for p in run_dir.rglob("*") if p.is_file() and "tokenizer" in p.parts)
    before = [p.read_bytes() for p in (*files, run_dir / "config.gin")]
    assert files
    more.mkdir()
    (more / "0.txt").write_text("zyxwv utsrq ponml kjihg fedcb " * 400)
    other = TextCorpus(files=(str(more / "*.txt"),), validation_fraction=0.0)
    grown = dataclasses.replace(bpe, corpora=(*bpe.corpora, other))
    changed = dataclasses.replace(experiment, data=grown)
    with pytest.raises(ResumeError, match="is not the tokenizer"):
        evaluate(changed, run_dir)
    with pytest.raises(ResumeError):
        train(changed, run_dir, progress=False)
    assert [p.read_bytes() for p in (*files, run_dir / "config.gin")] == before


def test_a_damaged_checkpoint_is_named(corpus, tmp_path):
    run_dir = tmp_path / "run"
    experiment = tiny_experiment(corpus, steps=8)
    train(experiment, run_dir, progress=False)
    for path in (run_dir / "checkpoints" / "8" / "params").rglob("*"):
        if path.is_file() and path.stat().st_size > 2000:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    longer = dataclasses.replace(
        experiment, trainer=dataclasses.replace(experiment.trainer, steps=10)
    )
    with pytest.raises(CheckpointError, match="checkpoint 8 in .*(cannot be read|is damaged)"):
        train(longer, run_dir, progress=False)
