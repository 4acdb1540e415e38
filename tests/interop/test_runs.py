# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as run folders: the commands import, generate, eval, inspect, train and export."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix import config as configs
from seqmix import data, training
from seqmix.interop import hf
from seqmix.layers import AttentionConfig
from seqmix.models import FeedForwardConfig, HybridLM, HybridLMConfig
from tests.cli.conftest import fails, run
from tests.interop.cases import FIXTURES, tensors

_TEXT = "def main():\n    return 0\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder as published: a model, a tokenizer of its own, settings of generation."""
    folder = tmp_path_factory.mktemp("published")
    tokenizer = data.train_bpe([_TEXT * 50], 270)
    config = HybridLMConfig(
        vocabulary=320,
        width=16,
        layers=2,
        pattern="attention",
        mixers={"attention": AttentionConfig(heads=2, head_width=8)},
        feed_forward=FeedForwardConfig(hidden=24),
        param_dtype="bfloat16",
    )
    hf.save(HybridLM(config, rngs=nnx.Rngs(0)), folder / "model", context=16)
    tokenizer.save(folder / "model")
    (folder / "model" / "seqmix_tokenizer.json").unlink()
    end = {"eos_token": tokenizer.end_token}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(end))
    (folder / "model" / "generation_config.json").write_text('{"top_p": 0.9}')
    return folder / "model"


@pytest.fixture
def imported(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("import", f"--hf={files}", "--out=runs/x", "--dtype=float32")
    assert result.code == 0, result.err
    return tmp_path / "runs" / "x"


def test_an_imported_run_generates_evaluates_and_is_inspected(imported):
    result = run("generate", "--run_dir=runs/x", "--prompt=def", "--max_new_tokens=5")
    assert result.code == 0, result.err
    assert result.out.startswith("def")
    result = run("inspect", "--run_dir=runs/x", f"--out={imported}/plot.png")
    assert result.code == 0, result.err
    assert "attention" in result.out
    for name in ("train", "valid"):
        (imported / name).write_text(_TEXT * 20)
    settings = (
        "Data.corpora=(@TextCorpus(),)",
        f"TextCorpus.files=('{imported}/train',)",
        f"TextCorpus.validation_files=('{imported}/valid',)",
        f"Data.cache_dir='{imported}/cache'",
    )
    overrides = [f"--gin.{setting}" for setting in settings]
    result = run("eval", "--run_dir=runs/x", "--batches=1", *overrides)
    assert result.code == 0, result.err
    assert "bits per byte" in result.out


def test_an_imported_run_is_exported_as_it_came(imported, files):
    result = run("export", "--run_dir=runs/x", "--hf=copy")
    assert result.code == 0, result.err
    assert tensors(imported.parents[1] / "copy") == tensors(files)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        copy = json.loads((imported.parents[1] / "copy" / name).read_text())
        assert copy == json.loads((files / name).read_text())
    copy = (imported.parents[1] / "copy" / "tokenizer.json").read_bytes()
    assert copy == (files / "tokenizer.json").read_bytes()


def test_training_starts_from_an_imported_run(imported, files, tmp_path):
    """Both ways: the run itself goes on, and another starts from it."""
    for name in ("train", "valid"):
        (tmp_path / name).write_text(_TEXT * 20)
    base = training.load_experiment(imported)
    experiment = dataclasses.replace(
        base,
        data=dataclasses.replace(
            base.data,
            corpora=(data.TextCorpus(files=("train",), validation_files=("valid",)),),
            cache_dir="cache",
        ),
        schedule=training.WarmupCosineConfig(warmup=0),
        trainer=dataclasses.replace(base.trainer, steps=1, eval_batches=1, compilation_cache=False),
    )
    (imported / "config.gin").write_text(configs.resolved(experiment))
    result = training.train(experiment, imported, progress=False)
    assert result.step == 1
    before = hf.load(files, dtype=jnp.float32)
    after = training.load_run(imported).model
    moved = np.abs(np.asarray(after.embedding[...] - before.embedding[...])).max()
    rate = experiment.optimizer.learning_rate
    assert 0 < moved <= 1.01 * rate * (1 + experiment.optimizer.weight_decay)
    start = dataclasses.replace(experiment.trainer, init_from=str(imported))
    other = dataclasses.replace(experiment, trainer=start)
    assert training.train(other, tmp_path / "other", progress=False).step == 1


def test_a_run_of_this_framework_is_exported_with_its_tokenizer(imported, files, tmp_path):
    shutil.rmtree(imported / "huggingface")
    hf.export_run(imported, tmp_path / "new")
    values = json.loads((tmp_path / "new" / "config.json").read_text())
    tokenizer = data.HuggingFaceTokenizer.from_file(tmp_path / "new")
    assert values["eos_token_id"] == tokenizer.end_of_document
    assert values["max_position_embeddings"] == 16
    run = training.load_run(imported)
    tokens = np.arange(12).reshape(2, 6)
    again = hf.load(tmp_path / "new", dtype=jnp.float32)
    np.testing.assert_array_equal(again(tokens), run.model(tokens))
    assert tokenizer.fingerprint == run.tokenizer.fingerprint


def test_mistakes_are_one_line(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fails("import", f"--hf={files}") == "import needs --out"
    assert fails("export", f"--hf={files}").startswith("export needs --run_dir")
    bare = FIXTURES / "llama" / "grouped"
    message = fails("import", f"--hf={bare}", "--out=runs/x")
    assert "holds no tokenizer.json; name one with --tokenizer" in message
    message = fails("import", f"--hf={bare}", "--out=runs/x", "--tokenizer=bytes")
    assert "has 257 ids, the model only 96" in message
    assert not (tmp_path / "runs").exists()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "config.gin").write_text("")
    assert "holds a run already" in fails("import", f"--hf={files}", "--out=used")


def test_the_origin_of_every_family_is_kept_on_disk(tmp_path):
    for case in sorted(FIXTURES.glob("*/biased")):
        origin = hf.load(case).origin
        origin.save(tmp_path / case.parent.name)
        again = hf.Origin.load(tmp_path / case.parent.name)
        assert again == origin
        assert set(again.constants) == set(origin.constants)
        for name, array in origin.constants.items():
            np.testing.assert_array_equal(again.constants[name], array)
