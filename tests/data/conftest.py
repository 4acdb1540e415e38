# SPDX-License-Identifier: Apache-2.0
import json
import random

import pytest

from seqmix.data import DataConfig, JsonlCorpus

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "théta", "iota", "kappa")


def write_jsonl(path, texts, field="text"):
    lines = [json.dumps({field: text}, ensure_ascii=False) for text in texts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def some_texts(count, seed, longest=60):
    """Different texts, from one word to `longest`, each beginning with its number."""
    rng = random.Random(seed)
    return [
        f"{seed}.{i} " + " ".join(rng.choices(WORDS, k=rng.randint(1, longest)))
        for i in range(count)
    ]


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "texts.jsonl", some_texts(150, 1))


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def data(corpus_file, cache_dir):
    """150 documents, about 25 kB; windows of about 30 rows."""
    return DataConfig(
        corpora=(JsonlCorpus(files=(corpus_file,), validation_fraction=0.2),),
        sequence_length=63,
        packing_window=2000,
        cache_dir=cache_dir,
        prefetch=0,
    )
