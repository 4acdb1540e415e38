# SPDX-License-Identifier: Apache-2.0
import collections
import dataclasses
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from seqmix.data import ByteTokenizer, DataConfig, DataError, JsonlCorpus, TrainBPE, build
from tests.data.conftest import some_texts, write_jsonl

PACKINGS = ("concat", "first_fit")
KEYS = {"tokens", "segment_ids", "positions"}
BYTE = ByteTokenizer()


def with_(data, **changes):
    return dataclasses.replace(data, **changes)


def take(dataset, count):
    iterator = iter(dataset)
    batches = list(itertools.islice(iterator, count))
    iterator.close()
    return batches


def same(left, right):
    assert left.keys() == right.keys() == KEYS
    for key in KEYS:
        assert left[key].dtype == right[key].dtype == np.int32
        np.testing.assert_array_equal(left[key], right[key])


def segments(batches):
    """The tokens of every segment, checking the ids and positions of every row."""
    for batch in batches:
        for tokens, ids, positions in zip(
            batch["tokens"], batch["segment_ids"], batch["positions"], strict=True
        ):
            real = int((ids > 0).sum())
            assert not ids[real:].any()
            assert not tokens[real:].any()
            assert not positions[real:].any()
            count = int(ids.max(initial=0))
            # 1, 2, ... from left to right.
            assert ids[:real].tolist() == sorted(ids[:real])
            assert set(ids[:real].tolist()) == set(range(1, count + 1))
            for segment in range(1, count + 1):
                piece = tokens[ids == segment]
                assert positions[ids == segment].tolist() == list(range(len(piece)))
                yield tuple(piece.tolist())


@pytest.mark.parametrize("packing", PACKINGS)
def test_segments_begin_with_meta_tokens(packing, data):
    config = with_(data, packing=packing, meta_tokens=3)
    dataset = build(config, split="train", batch_size=4, one_pass=True, vocabulary=300)
    found = list(segments(list(dataset)))
    assert {piece[:3] for piece in found} == {(300, 301, 302)}
    assert min(map(len, found)) > 3
    rest = collections.Counter(itertools.chain.from_iterable(piece[3:] for piece in found))
    assert rest == collections.Counter(itertools.chain.from_iterable(documents(config, "train")))
    assert dataset.tokens == rest.total()
    # Without a model they follow the tokenizer's.
    assert build(config, batch_size=4).meta_ids == range(257, 260)


def test_a_place_saved_with_other_meta_tokens_is_refused(data):
    plain, meta = (iter(build(with_(data, meta_tokens=n), batch_size=4)) for n in (0, 3))
    state = plain.get_state()
    with pytest.raises(DataError, match="meta_tokens was 0 and is 3"):
        meta.set_state(state)
    # Places saved before there were meta tokens have none.
    del state["data"]["meta_tokens"]
    plain.set_state(state)
    plain.close()
    meta.close()


def documents(data, split):
    return [
        (*BYTE.encode(d.text), 256)
        for corpus in data.corpora
        for s, d in corpus.documents()
        if s == split
    ]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(
    ("length", "split"), [(1, "validation"), (63, "validation"), (63, "train"), (2000, "train")]
)
def test_every_document_once_in_a_pass(packing, length, split, data):
    config = with_(data, packing=packing, sequence_length=length)
    dataset = build(config, split=split, batch_size=4, one_pass=True)
    batches = list(dataset)
    assert {b["tokens"].shape for b in batches} == {(4, length + 1)}
    found = list(segments(batches))
    wanted = documents(data, split)
    assert sum(map(len, found)) == sum(map(len, wanted)) == dataset.tokens
    # Tokens in all, end-of-document tokens among them.
    counts = collections.Counter(itertools.chain.from_iterable(found))
    assert counts == collections.Counter(itertools.chain.from_iterable(wanted))
    assert counts[256] == len(wanted) == dataset.documents
    # Each whole document or, cut, each of its pieces.
    whole = collections.Counter(f for f in found if f in set(wanted))
    if length == 2000 and packing == "first_fit":
        assert whole == collections.Counter(wanted)
    pieces = [f for f in found if f not in set(wanted)]
    joined = {w for w in wanted if w not in whole}
    for piece in pieces:
        assert any(contains(document, piece) for document in joined)


def contains(document, piece):
    return bytes_of(piece) in bytes_of(document)


def bytes_of(tokens):
    return np.array(tokens, "<u2").tobytes()


def test_the_last_batch_of_a_pass_is_padded(data):
    config = with_(data, sequence_length=199)
    batches = list(build(config, split="validation", batch_size=16))
    rows = np.concatenate([b["segment_ids"] for b in batches])
    empty = ~rows.any(axis=1)
    tokens = sum(map(len, documents(data, "validation")))
    assert (~empty).sum() == -(-tokens // 200)
    assert 0 < empty.sum() < 16
    assert empty[-1]
    assert not empty[: -empty.sum()].any()


@pytest.mark.parametrize("packing", PACKINGS)
def test_evaluation_is_the_same_each_time(packing, data):
    config = with_(data, packing=packing)
    first = list(build(config, split="validation", batch_size=4))
    for other in (
        list(build(config, split="validation", batch_size=4, seed=9)),
        list(build(with_(config, seed=5, prefetch=2), split="validation", batch_size=4)),
    ):
        assert len(other) == len(first) > 3
        for left, right in zip(first, other, strict=True):
            same(left, right)


def test_order_depends_on_the_seed_alone(data):
    first = take(build(data, batch_size=4), 5)
    for left, right in zip(
        first, take(build(with_(data, prefetch=3), batch_size=4), 5), strict=True
    ):
        same(left, right)
    for left, right in zip(first, take(build(data, batch_size=4, seed=0), 5), strict=True):
        same(left, right)
    other = take(build(data, batch_size=4, seed=1), 1)
    assert not np.array_equal(first[0]["tokens"], other[0]["tokens"])
    set_in_config = take(build(with_(data, seed=1), batch_size=4), 1)
    same(other[0], set_in_config[0])


def test_epochs_differ_and_each_has_every_document(data):
    """Over 3 epochs of the endless stream, each document ends about three times."""
    dataset = build(with_(data, sequence_length=2000, packing="first_fit"), batch_size=1)
    ends, order = collections.Counter(), []
    stream = iter(dataset)
    while sum(ends.values()) < 3 * dataset.documents:
        for segment in segments([next(stream)]):
            ends[segment] += 1
            order.append(segment)
    assert set(ends) == set(documents(data, "train"))
    # The order of rows inside a window may move the ends of an epoch by a window.
    assert set(ends.values()) <= {2, 3, 4}
    count = dataset.documents
    assert order[:count] != order[count : 2 * count]


@pytest.fixture(scope="module")
def mixture(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    long = write_jsonl(folder / "long.jsonl", ["L" * 400] * 30)
    short = write_jsonl(folder / "short.jsonl", ["s" * 20] * 50)
    return with_(
        data,
        corpora=tuple(JsonlCorpus(files=(f,), validation_fraction=0.0) for f in (long, short)),
        weights=(1.0, 3.0),
        sequence_length=31,
    )


@pytest.mark.parametrize("packing", PACKINGS)
def test_weights_are_shares_of_tokens(packing, mixture):
    batches = take(build(with_(mixture, packing=packing), batch_size=8), 200)
    tokens = np.concatenate([b["tokens"][b["segment_ids"] > 0] for b in batches])
    long, short = (tokens == ord("L")).sum(), (tokens == ord("s")).sum()
    # Without the end-of-document tokens, 1 in 401 and 1 in 21.
    assert long / (long + short * 21 / 20) == pytest.approx(0.25, abs=0.02)


CASES = {
    "concat": {"packing": "concat"},
    "first_fit": {"packing": "first_fit"},
    "concat, mixed": {"packing": "concat", "mixed": True},
    "first_fit, mixed": {"packing": "first_fit", "mixed": True},
}


def case(name, data, mixture):
    changes = dict(CASES[name])
    return with_(mixture if changes.pop("mixed", False) else data, **changes)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_resume_is_exact(name, prefetch, data, mixture):
    """After any number of batches, inside windows and at their ends, over several epochs."""
    dataset = build(with_(case(name, data, mixture), prefetch=prefetch), batch_size=3)
    iterator = iter(dataset)
    states, batches = [iterator.get_state()], []
    for _ in range(160):
        batches.append(next(iterator))
        states.append(iterator.get_state())
    assert states[-1]["position"]["window"] > 3
    for after in (0, 1, 7, 41, 100, 159):
        other = iter(dataset)
        other.set_state(json.loads(json.dumps(states[after])))
        assert other.get_state() == states[after]
        for batch in batches[after : after + 30]:
            same(next(other), batch)
        # An iterator that has been used goes back, too.
        other.set_state(states[3])
        same(next(other), batches[3])
        other.close()
    iterator.close()
    assert all(len(json.dumps(state)) < 512 for state in states)


def test_resume_in_another_process(data, tmp_path):
    """And an interpreter that ends with an iterator open, or closed, makes no noise."""
    iterator = iter(build(data, batch_size=3))
    for _ in range(20):
        next(iterator)
    corpus = data.corpora[0]
    (tmp_path / "state.json").write_text(json.dumps(iterator.get_state()))
    code = f"""
import json, numpy as np
from seqmix.data import *
corpus = JsonlCorpus(files={corpus.files}, validation_fraction={corpus.validation_fraction})
data = DataConfig(corpora=(corpus,), sequence_length=63, packing_window=2000,
                  cache_dir={data.cache_dir!r}, prefetch=2)
iterator = iter(build(data, batch_size=3))
iterator.set_state(json.load(open({str(tmp_path / "state.json")!r})))
np.savez({str(tmp_path / "next.npz")!r}, **next(iterator))
closed = iter(build(data, batch_size=3))
next(closed)
closed.close()
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout + run.stderr == ""
    same(next(iterator), dict(np.load(tmp_path / "next.npz")))


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_processes(name, data, mixture):
    """(failures 43) Saved on 4 processes, resumed on 2, 8 and 1: same documents, same order."""
    config = case(name, data, mixture)
    whole = take(build(config, batch_size=8), 30)

    def processes(count, state=None, batches=10):
        iterators = [
            iter(build(config, batch_size=8, process_index=i, process_count=count))
            for i in range(count)
        ]
        if state is not None:
            for iterator in iterators:
                iterator.set_state(state)
        joined = []
        for _ in range(batches):
            parts = [next(iterator) for iterator in iterators]
            assert {part["tokens"].shape[0] for part in parts} == {8 // count}
            joined.append({key: np.concatenate([part[key] for part in parts]) for key in KEYS})
        states = [iterator.get_state() for iterator in iterators]
        assert all(other == states[0] for other in states)
        return joined, states[0]

    four, state = processes(4)
    for batch, expected in zip(four, whole[:10], strict=True):
        same(batch, expected)
    for count in (2, 8, 1):
        for batch, expected in zip(processes(count, state)[0], whole[10:20], strict=True):
            same(batch, expected)


def test_another_batch_size_goes_on_at_the_same_row(data):
    rows = np.concatenate([b["tokens"] for b in take(build(data, batch_size=4), 12)])
    iterator = iter(build(data, batch_size=4))
    for _ in range(6):
        next(iterator)
    other = iter(build(data, batch_size=6))
    other.set_state(iterator.get_state())
    np.testing.assert_array_equal(next(other)["tokens"], rows[24:30])


def test_state_of_other_data_is_refused(data, tmp_path):
    state = iter(build(data, batch_size=4)).get_state()
    for changes, named in (
        ({"sequence_length": 64}, "sequence_length was 63 and is 64"),
        ({"packing": "first_fit"}, "packing was 'concat' and is 'first_fit'"),
        ({"seed": 3}, "seed was 0 and is 3"),
        ({"packing_window": 4000}, "packing_window was 2000 and is 4000"),
    ):
        iterator = iter(build(with_(data, **changes), batch_size=4))
        with pytest.raises(DataError, match=f"the saved place in the data does not fit: {named}"):
            iterator.set_state(state)
    bpe = with_(data, tokenizer=TrainBPE(vocabulary_size=300))
    with pytest.raises(DataError, match="vocabulary_size was 257 and is 300"):
        iter(build(bpe, batch_size=4)).set_state(state)
    # The same file name and number of documents, another text.
    corpus = JsonlCorpus(files=(write_jsonl(tmp_path / "texts.jsonl", some_texts(150, 2)),))
    iterator = iter(build(with_(data, corpora=(corpus,)), batch_size=4))
    with pytest.raises(DataError, match="corpora was"):
        iterator.set_state(state)


def test_closed_iterator(data):
    iterator = iter(build(with_(data, prefetch=2), batch_size=4))
    next(iterator)
    iterator.close()
    iterator.close()
    with pytest.raises(ValueError, match="the iterator is closed"):
        next(iterator)


def test_a_pass_that_is_over_stays_over(data):
    for prefetch in (0, 2):
        iterator = iter(build(with_(data, prefetch=prefetch), split="validation", batch_size=64))
        assert len(list(iterator)) > 0
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(iterator)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a positive multiple of process_count=1, got 0"),
        ({"batch_size": 6, "process_count": 4}, "multiple of process_count=4, got 6"),
        ({"process_index": 2, "process_count": 2}, r"process_index must be in \[0, .*=2\), got 2"),
    ],
)
def test_bad_arguments(changes, message, data):
    with pytest.raises(ValueError, match=message):
        build(data, **({"batch_size": 4} | changes))


def test_no_validation_documents(mixture):
    with pytest.raises(DataError, match="no validation document in 'jsonl', 'jsonl'"):
        build(mixture, split="validation", batch_size=2)


def test_corpus_without_training_documents(data, tmp_path):
    path = write_jsonl(tmp_path / "one.jsonl", ["x"])
    corpus = JsonlCorpus(files=(path,), validation_fraction=0.999999)
    with pytest.raises(DataError, match="the corpus 'jsonl' has no training document"):
        build(DataConfig(corpora=(corpus,), cache_dir=data.cache_dir), batch_size=2)
