# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest

from seqmix import config
from seqmix.data import (
    ByteTokenizerConfig,
    DataConfig,
    DataError,
    JsonlCorpus,
    StdlibCorpus,
    TextCorpus,
    TokenizerFile,
    TrainBPE,
    build,
    build_tokenizer,
)
from tests.data.conftest import some_texts, write_jsonl

GIN = """
Data.corpora = (@web/JsonlCorpus(), @books/TextCorpus())
Data.weights = (3, 1)
Data.tokenizer = @TrainBPE()
Data.packing = 'first_fit'
web/JsonlCorpus.files = ('a.jsonl', 'b.jsonl')
books/TextCorpus.files = ('*.txt',)
TrainBPE.vocabulary_size = 512
"""


def test_from_gin():
    built = config.from_text(GIN, "data.gin").build(DataConfig)
    assert built == DataConfig(
        corpora=(JsonlCorpus(files=("a.jsonl", "b.jsonl")), TextCorpus(files=("*.txt",))),
        weights=(3.0, 1.0),
        tokenizer=TrainBPE(vocabulary_size=512),
        packing="first_fit",
    )
    text = config.resolved(built)
    assert config.from_text(text, "again.gin").build(DataConfig) == built


def test_defaults_take_bindings():
    built = config.from_text("StdlibCorpus.max_bytes = 1000", "data.gin").build(DataConfig)
    assert built.corpora == (StdlibCorpus(max_bytes=1000),)
    assert built.tokenizer == ByteTokenizerConfig()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Data.sequence_length = 0", r"data\.gin:1: Data\.sequence_length must be >= 1, got 0"),
        ("Data.seed = -1", r"Data\.seed must be >= 0, got -1"),
        ("Data.packing = 'best_fit'", r"expected one of 'concat', 'first_fit', got 'best_fit'"),
        ("Data.weights = (1.0, 2.0)", r"one weight for each of the 1 corpora, got 2"),
        ("Data.weights = (0.0,)", r"Data\.weights must be positive, got 0\.0"),
        ("Data.corpora = ()", r"Data\.corpora is empty"),
        ("StdlibCorpus.max_bytes = 0", r"StdlibCorpus\.max_bytes must be >= 1 or None, got 0"),
        ("Data.corpora = (@TextCorpus(),)", r"TextCorpus\.files is empty"),
        ("Data.tokenizer = 'byte'", r"Data\.tokenizer: expected TokenizerConfig, got str 'byte'"),
        ("Data.tokenizer = @TrainBPE()\nTrainBPE.vocabulary_size = 256", r"must be >= 257"),
        ("Data.sequence_lenght = 1", r"sequence_length"),
    ],
)
def test_mistakes(line, message):
    with pytest.raises(config.ConfigError, match=message):
        config.from_text(line, "data.gin").build(DataConfig)


def test_trained_tokenizer_is_kept(data, tmp_path, monkeypatch):
    bpe = dataclasses.replace(data, tokenizer=TrainBPE(vocabulary_size=300), sequence_length=31)
    dataset = build(bpe, batch_size=2)
    assert dataset.tokenizer.vocabulary_size == 300
    assert 2 < dataset.bytes / dataset.tokens < 6  # bytes a token
    monkeypatch.setattr("seqmix.data.config.train_bpe", None)  # a second training would fail
    again = build_tokenizer(bpe)
    assert again.fingerprint == dataset.tokenizer.fingerprint

    again.save(tmp_path)
    from_file = dataclasses.replace(data, tokenizer=TokenizerFile(path=str(tmp_path)))
    assert build_tokenizer(from_file).fingerprint == again.fingerprint
    missing = dataclasses.replace(data, tokenizer=TokenizerFile(path=str(tmp_path / "no.json")))
    with pytest.raises(DataError, match=r"no\.json: cannot read the tokenizer"):
        build_tokenizer(missing)


def test_bpe_is_trained_on_training_documents_within_the_limit(data, tmp_path):
    train = write_jsonl(tmp_path / "train.jsonl", ["aaaa bbbb"] * 20 + ["zzzz yyyy"] * 20)
    validation = write_jsonl(tmp_path / "validation.jsonl", ["qqqq"] * 40)
    corpus = JsonlCorpus(files=(train,), validation_files=(validation,))
    settings = dataclasses.replace(
        data, corpora=(corpus,), tokenizer=TrainBPE(vocabulary_size=261, max_bytes=100)
    )
    tokenizer = build_tokenizer(settings)
    sizes = {text: len(tokenizer.encode(text)) for text in ("aaaa", "zzzz", "qqqq")}
    assert sizes == {"aaaa": 1, "zzzz": 4, "qqqq": 4}


def test_some_texts_are_deterministic():
    """The other tests count on it."""
    assert some_texts(3, 1) == some_texts(5, 1)[:3]
