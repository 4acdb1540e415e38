# SPDX-License-Identifier: Apache-2.0
import builtins
import json
import re

import pyarrow
import pyarrow.parquet
import pytest

from seqmix.data import (
    DataError,
    HuggingFaceCorpus,
    JsonlCorpus,
    ParquetCorpus,
    StdlibCorpus,
    TextCorpus,
)
from tests.data.conftest import some_texts, write_jsonl


def texts(corpus, split=None):
    return [d.text for s, d in corpus.documents() if split in (None, s)]


def names(corpus, split=None):
    return [d.name for s, d in corpus.documents() if split in (None, s)]


def parquet(path, values, kind=None, column="text"):
    table = pyarrow.table({column: pyarrow.array(values, kind)})
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    return str(path)


def test_stdlib():
    corpus = StdlibCorpus()
    found = names(corpus)
    assert "argparse.py" in found
    assert "asyncio/tasks.py" in found
    assert len(found) == len(set(found)) > 200
    assert not [n for n in found if re.search(r"(^|/)(tests?|site-packages|__pycache__)/", n)]
    assert found == names(corpus)
    train, validation = set(names(corpus, "train")), set(names(corpus, "validation"))
    assert not train & validation
    assert 0.02 < len(validation) / len(found) < 0.09


def test_stdlib_limits():
    """A limit is a sample of all, and moves no document between the splits."""
    everything = {d.name: s for s, d in StdlibCorpus().documents()}
    small = {d.name: s for s, d in StdlibCorpus(max_documents=40).documents()}
    assert len(small) == 40
    assert small.items() <= everything.items()
    assert len({name[0] for name in small}) > 8  # not only the files that begin with "a"
    sized = texts(StdlibCorpus(max_bytes=300_000))
    assert 100_000 < sum(len(text.encode()) for text in sized) <= 300_000


def test_text_files(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.txt").write_bytes("é\r\nb".encode())
    (tmp_path / "two.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
    (tmp_path / "other.md").write_text("no")
    corpus = TextCorpus(files=(f"{tmp_path}/**/*.txt", f"{tmp_path}/two.txt"))
    assert names(corpus) == ["a/one.txt", "two.txt"]
    assert texts(corpus) == ["é\r\nb", "with a mark"]


def test_text_separator(tmp_path):
    (tmp_path / "t.txt").write_text("one\n==\n\n==\ntwo\nlines\n==\n")
    corpus = TextCorpus(files=(f"{tmp_path}/t.txt",), separator="\n==\n")
    assert names(corpus) == ["t.txt:1", "t.txt:3"]
    assert texts(corpus) == ["one", "two\nlines"]


def test_split_by_name_is_stable(tmp_path):
    """The same names fall into the same split wherever they are, however many there are."""
    for folder, count in (("x", 60), ("y", 100)):
        (tmp_path / folder).mkdir()
        for i in range(count):
            (tmp_path / folder / f"{i}.txt").write_text(str(i))
    x, y = (
        set(names(TextCorpus(files=(f"{tmp_path}/{f}/*",), validation_fraction=0.3), "validation"))
        for f in "xy"
    )
    assert 8 < len(x) < 30
    assert x < y


def test_validation_files(tmp_path):
    train = write_jsonl(tmp_path / "train.jsonl", some_texts(30, 1))
    validation = write_jsonl(tmp_path / "validation.jsonl", some_texts(4, 2))
    corpus = JsonlCorpus(files=(train,), validation_files=(validation,), max_documents=10)
    assert texts(corpus, "train") == some_texts(10, 1)
    assert texts(corpus, "validation") == some_texts(4, 2)


def test_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"content": "\\u00e9", "n": 1}\n{"content": "two"}')
    corpus = JsonlCorpus(files=(str(path),), field="content")
    assert texts(corpus) == ["é", "two"]
    assert names(corpus) == ["a.jsonl:1", "a.jsonl:2"]


GOOD = b'{"text": "good"}\n'
BAD_LINES = {
    "not JSON": (b'{"text": "x"', r"a\.jsonl:2: not JSON: .* \(column 13\)"),
    "not UTF-8": (b'{"text": "\xff"}', r"a\.jsonl:2: not UTF-8: .*0xff at byte 10 of the line"),
    "blank": (b"  ", r"a\.jsonl:2: empty line"),
    "empty": (b'{"text": " "}', r"a\.jsonl:2: field 'text': empty text"),
    "null": (b'{"text": null}', r"a\.jsonl:2: field 'text': expected text, got NoneType"),
    "number": (b'{"text": 3}', r"a\.jsonl:2: field 'text': expected text, got int"),
    "list": (b'["x"]', r"a\.jsonl:2: expected a JSON object, got list"),
    "no field": (b'{"txt": "x", "n": 1}', r"a\.jsonl:2: no field 'text'; it has: n, txt"),
    "surrogate": (b'{"text": "a\\ud800"}', r"a\.jsonl:2: .*lone surrogate at character 1"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_bad_jsonl(kind, tmp_path):
    line, message = BAD_LINES[kind]
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD)
    with pytest.raises(DataError, match=message):
        texts(JsonlCorpus(files=(str(path),)))
    skipping = JsonlCorpus(files=(str(path),), skip_empty=True)
    if kind in ("blank", "empty", "null"):
        assert texts(skipping) == ["good", "good"]
        assert names(skipping) == ["a.jsonl:1", "a.jsonl:3"]
    else:
        with pytest.raises(DataError, match=message):
            texts(skipping)


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.binary()])
def test_parquet(kind, tmp_path):
    values = ["é", "two", "three"]
    path = parquet(tmp_path / "a.parquet", [v.encode() for v in values], pyarrow.binary())
    if kind != pyarrow.binary():
        path = parquet(tmp_path / "a.parquet", values, kind)
    corpus = ParquetCorpus(files=(path,))
    assert texts(corpus) == values
    assert names(corpus) == ["a.parquet:1", "a.parquet:2", "a.parquet:3"]


def test_bad_parquet(tmp_path):
    path = parquet(tmp_path / "a.parquet", ["one", "", None], column="body")
    with pytest.raises(DataError, match=r"a\.parquet: no column 'text'; it has: body"):
        texts(ParquetCorpus(files=(path,)))
    with pytest.raises(DataError, match=r"a\.parquet: row 2, column 'body': empty text"):
        texts(ParquetCorpus(files=(path,), column="body"))
    assert texts(ParquetCorpus(files=(path,), column="body", skip_empty=True)) == ["one"]

    path = parquet(tmp_path / "n.parquet", [1, 2])
    with pytest.raises(DataError, match=r"n\.parquet: row 1, column 'text': expected text, got in"):
        texts(ParquetCorpus(files=(path,)))
    path = parquet(tmp_path / "u.parquet", [b"ok", b"ok", b"a\xfe"], pyarrow.binary())
    with pytest.raises(DataError, match=r"u\.parquet: row 3, .*: not UTF-8: .*0xfe at byte 1"):
        texts(ParquetCorpus(files=(path,)))
    path = parquet(tmp_path / "e.parquet", [], pyarrow.string())
    with pytest.raises(DataError, match=r"e\.parquet: no rows"):
        texts(ParquetCorpus(files=(path,)))
    (tmp_path / "t.parquet").write_bytes((tmp_path / "n.parquet").read_bytes()[:50])
    with pytest.raises(DataError, match=r"t\.parquet: cannot read"):
        texts(ParquetCorpus(files=(str(tmp_path / "t.parquet"),)))


def test_parquet_strings_that_are_not_utf8(tmp_path):
    """Arrow's string type promises UTF-8 and other writers break it."""
    raw = pyarrow.array([b"ok", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": raw}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: row 2, .*not UTF-8"):
        texts(ParquetCorpus(files=(str(tmp_path / "a.parquet"),)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"bad\.txt: empty text"),
        (b" \n ", r"bad\.txt: empty text"),
        (b"ok\nok\nx\xe9y", r"bad\.txt:3: not UTF-8: .* 0xe9 at byte 7"),
    ],
)
def test_bad_text_files(content, message, tmp_path):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        texts(TextCorpus(files=(f"{tmp_path}/bad.txt",)))


@pytest.mark.parametrize("kind", [TextCorpus, JsonlCorpus, ParquetCorpus])
def test_files_that_are_not_there(kind, tmp_path):
    name = kind.__name__
    with pytest.raises(DataError, match=rf"{name}\.files: no file matches '.*/\*\.x' \(looked in "):
        texts(kind(files=(f"{tmp_path}/*.x",)))
    with pytest.raises(ValueError, match=rf"{name}\.files is empty"):
        kind(files=())
    (tmp_path / "a.y").write_text("x")
    with pytest.raises(DataError, match=rf"{name}\.validation_files: no file matches"):
        texts(kind(files=(f"{tmp_path}/a.y",), validation_files=(f"{tmp_path}/*.x",)))


def test_a_folder_is_not_a_file_and_unreadable_files_are_named(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="no file matches"):
        texts(TextCorpus(files=(str(tmp_path),)))
    path = tmp_path / "locked.txt"
    path.write_text("x")

    def denied(self):
        raise PermissionError(13, "Permission denied")

    # Not by file modes, which do not stop a test that runs as root.
    monkeypatch.setattr("pathlib.Path.read_bytes", denied)
    with pytest.raises(DataError, match=r"locked\.txt: cannot read: Permission denied"):
        texts(TextCorpus(files=(str(path),)))


@pytest.mark.parametrize(
    "settings", [{"validation_fraction": 1.0}, {"max_documents": 0}, {"max_bytes": -1}]
)
def test_bad_settings(settings):
    with pytest.raises(ValueError, match=rf"StdlibCorpus\.{next(iter(settings))} must be"):
        StdlibCorpus(**settings)


def test_limit_smaller_than_the_first_document(tmp_path):
    (tmp_path / "a.txt").write_text("long enough")
    with pytest.raises(DataError, match="no document within max_bytes=5"):
        texts(TextCorpus(files=(f"{tmp_path}/a.txt",), max_bytes=5))


def test_hugging_face(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"], field="body")
    corpus = HuggingFaceCorpus(path="json", data_files=(path,), column="body", max_documents=2)
    assert texts(corpus) == ["one", "two"]
    assert names(corpus) == ["train:1", "train:2"]
    with pytest.raises(DataError, match=r"dataset 'json', split 'train': no column 'text'; .*body"):
        texts(HuggingFaceCorpus(path="json", data_files=(path,)))
    with pytest.raises(DataError, match="split 'other': cannot read"):
        texts(HuggingFaceCorpus(path="json", data_files=(path,), split="other"))
    both = HuggingFaceCorpus(
        path="json", data_files=(path,), column="body", validation_split="train"
    )
    assert texts(both, "validation") == texts(both, "train") == ["one", "two", "three"]
    empty = write_jsonl(tmp_path / "e.jsonl", ["one", " "])
    with pytest.raises(DataError, match="split 'train', row 2: empty text"):
        texts(HuggingFaceCorpus(path="json", data_files=(empty,)))
    assert texts(HuggingFaceCorpus(path="json", data_files=(empty,), skip_empty=True)) == ["one"]


def test_hugging_face_without_the_package(monkeypatch):
    original = builtins.__import__

    def without(name, *arguments, **more):
        if name == "datasets":
            raise ImportError(name)
        return original(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"'datasets'.*not installed: pip install 'seqmix\[hf\]'"):
        texts(HuggingFaceCorpus(path="json"))


def test_key_follows_the_content(tmp_path):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, ["one"])
    corpus = JsonlCorpus(files=(str(path),))
    before = json.dumps(corpus.key())
    assert json.dumps(corpus.key()) == before
    write_jsonl(path, ["one", "two"])
    assert json.dumps(corpus.key()) != before
    assert JsonlCorpus(files=(str(path),), max_documents=1).key() != corpus.key()


def test_a_limit_of_the_standard_library_samples_both_splits():
    splits = [split for split, _ in StdlibCorpus(max_documents=100).documents()]
    assert 0 < splits.count("validation") < 20
    assert splits.count("train") > 80
