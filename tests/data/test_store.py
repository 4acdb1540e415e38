# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
import multiprocessing
import os
import queue
import shutil
import threading

import numpy as np
import pytest

from seqmix.data import ByteTokenizer, DataError, JsonlCorpus, StdlibCorpus, cache, train_bpe
from seqmix.data import store as store_module
from seqmix.data.store import TokenStore
from seqmix.data.store_writer import token_store
from tests.data.conftest import some_texts, write_jsonl

TEXTS = some_texts(400, 3)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Many records and files from a small corpus: 100 tokens a record, 8 records a file."""
    monkeypatch.setattr(store_module, "BLOCK_TOKENS", 100)
    monkeypatch.setattr(store_module, "BLOCKS_PER_FILE", 8)
    monkeypatch.setattr(store_module, "_CACHED_BLOCKS", 3)


@pytest.fixture
def corpus(tmp_path):
    return JsonlCorpus(files=(write_jsonl(tmp_path / "a.jsonl", TEXTS),), validation_fraction=0.1)


def folders(path):
    return sorted(p.name for p in (path / "stores").iterdir())


def expected(corpus, tokenizer, split):
    end = [tokenizer.end_of_document]
    return [tokenizer.encode(d.text) + end for s, d in corpus.documents() if s == split]


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_holds_every_document(kind, corpus, tmp_path):
    tokenizer = ByteTokenizer() if kind == "byte" else train_bpe(TEXTS, 300)
    folder = token_store(corpus, tokenizer, tmp_path / "cache")
    for split in ("train", "validation"):
        wanted = expected(corpus, tokenizer, split)
        store = TokenStore(folder, split)
        assert len(store) == len(wanted) > 20
        assert [store.document(i).tolist() for i in range(len(store))] == wanted
        stream = np.concatenate([np.array(w) for w in wanted])
        assert store.info.tokens == len(stream)
        assert store.info.bytes == len(tokenizer.decode_bytes(stream))
        places = np.random.default_rng(0).integers(len(stream), size=1000)
        np.testing.assert_array_equal(store.gather(places), stream[places])
        assert store.gather(np.zeros(0, np.int64)).shape == (0,)
    assert len(list((folder / "train").glob("*.arecord"))) > 2


def test_wide_vocabularies_get_32_bits(corpus, tmp_path):
    class Wide(ByteTokenizer):
        vocabulary_size = 1 << 17
        fingerprint = "wide"

        def encode_batch(self, texts):
            return [np.frombuffer(t.encode(), np.uint8).astype(np.uint32) + 70_000 for t in texts]

    folder = token_store(corpus, Wide(), tmp_path / "cache")
    document = TokenStore(folder, "train").document(0)
    text = next(d.text for s, d in corpus.documents() if s == "train")
    assert document.tolist() == [b + 70_000 for b in text.encode()] + [256]


def test_built_once_and_again_when_something_changed(corpus, tmp_path):
    path, byte = tmp_path / "cache", ByteTokenizer()
    first = token_store(corpus, byte, path)
    made = (first / "index.json").stat().st_mtime_ns
    assert token_store(corpus, byte, path) == first
    assert (first / "index.json").stat().st_mtime_ns == made
    assert folders(path) == [first.name]  # no lock, no temporary folder left

    others = {
        token_store(dataclasses.replace(corpus, max_documents=50), byte, path),
        token_store(corpus, train_bpe(TEXTS, 300), path),
    }
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:-1])
    os.utime(tmp_path / "a.jsonl", ns=(1, 1))
    changed = token_store(corpus, byte, path)
    assert len({first, changed, *others}) == 4
    assert sum(len(TokenStore(changed, s)) for s in ("train", "validation")) == len(TEXTS) - 1


def test_failed_build_leaves_nothing(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "good"}) + '\n{"text": ""}\n')
    corpus = JsonlCorpus(files=(str(path),))
    with pytest.raises(DataError, match=r"a\.jsonl:2: field 'text': empty text"):
        token_store(corpus, ByteTokenizer(), tmp_path / "cache")
    assert folders(tmp_path / "cache") == []


def _race(corpus, path, barrier, results):
    barrier.wait()
    folder = token_store(corpus, ByteTokenizer(), path)
    results.put(TokenStore(folder, "train").document(0).tolist())


@pytest.mark.parametrize("kind", ["processes", "threads without locks"])
def test_racing(kind, corpus, tmp_path, monkeypatch):
    if kind == "processes":
        context = multiprocessing.get_context("spawn")
        barrier, results, start = context.Barrier(2), context.SimpleQueue(), context.Process
    else:  # as on a file system without locks: the rename alone must do
        monkeypatch.setattr("fcntl.flock", refuse_locks)
        barrier, results, start = threading.Barrier(4), queue.SimpleQueue(), threading.Thread
    arguments = (corpus, tmp_path / "cache", barrier, results)
    jobs = [start(target=_race, args=arguments) for _ in range(barrier.parties)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(120)
    wanted = expected(corpus, ByteTokenizer(), "train")[0]
    assert [results.get() for _ in jobs] == [wanted] * len(jobs)
    assert len(folders(tmp_path / "cache")) == 1


def refuse_locks(*_):
    raise OSError("no locks here")


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "truncated":
        del content[len(content) // 2 :]
    elif how == "empty":
        content.clear()
    else:
        content[500] ^= 0xFF  # well inside the data, before the padding of a small file
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["missing", "truncated", "empty", "flipped"])
@pytest.mark.parametrize("name", ["tokens-00001.arecord", "offsets.npy", "bigrams.npy"])
def test_damaged_files_are_named(name, how, corpus, tmp_path):
    folder = token_store(corpus, ByteTokenizer(), tmp_path / "cache")
    damage(folder / "train" / name, how)

    def read():
        store = TokenStore(folder, "train")
        store.gather(np.arange(store.info.tokens))

    with pytest.raises(DataError, match=rf"train/{name}: damaged token store .*delete {folder} "):
        read()
    shutil.rmtree(folder)  # what the message says
    assert token_store(corpus, ByteTokenizer(), tmp_path / "cache") == folder
    read()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_damaged_index(content, corpus, tmp_path):
    folder = token_store(corpus, ByteTokenizer(), tmp_path / "cache")
    (folder / "index.json").write_text(content)
    with pytest.raises(DataError, match=r"index\.json: damaged token store"):
        TokenStore(folder, "train")


def test_store_of_another_format(corpus, tmp_path):
    folder = token_store(corpus, ByteTokenizer(), tmp_path / "cache")
    (folder / "index.json").write_text('{"format": 99}')
    with pytest.raises(DataError, match=r"index\.json: token store of format 99, expected 1"):
        TokenStore(folder, "train")


def test_cache_folder(tmp_path, monkeypatch, corpus):
    monkeypatch.setenv("SEQMIX_CACHE", str(tmp_path / "env"))
    assert cache.cache_dir() == tmp_path / "env"
    assert cache.cache_dir(str(tmp_path / "set")) == tmp_path / "set"
    monkeypatch.delenv("SEQMIX_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_dir() == tmp_path / ".cache" / "seqmix"
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write the cache folder .*Data\.cache_dir or SEQM"):
        token_store(corpus, ByteTokenizer(), tmp_path / "file")


def test_stdlib_store(tmp_path, monkeypatch):
    monkeypatch.undo()  # real block sizes
    folder = token_store(StdlibCorpus(max_documents=30), ByteTokenizer(), tmp_path)
    store = TokenStore(folder, "train")
    texts = [d.text for s, d in StdlibCorpus(max_documents=30).documents() if s == "train"]
    got = [ByteTokenizer().decode(store.document(i)) for i in range(len(store))]
    assert got == texts
