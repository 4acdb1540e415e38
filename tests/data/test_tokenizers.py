# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys

import numpy as np
import pytest
import tokenizers

from seqmix.data import (
    ByteTokenizer,
    DataError,
    HuggingFaceTokenizer,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)
from seqmix.data.tokenizers.bpe import END_OF_DOCUMENT
from tests.data.conftest import some_texts

TEXT = "Grüße, 世界! 🙂\n\tdef main(): pass  # <|endoftext|>\r\n"


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(some_texts(200, 0), 300)


def word_piece_file(folder, **changes):
    """A small WordPiece tokenizer.json with the given changes to its settings."""
    words = ["[UNK]", "[SEP]", "hello", "##lo", "hel", "world"]
    model = tokenizers.models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[SEP]"])
    settings = json.loads(tokenizer.to_str()) | changes
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(settings))
    return path


def test_bytes_round_trip():
    tokenizer = ByteTokenizer()
    everything = bytes(range(256)) * 2
    assert tokenizer.encode(everything) == list(everything)
    assert tokenizer.decode_bytes([*everything, 256]) == everything
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.decode([0xFF, 65]) == "\ufffdA"
    assert tokenizer.encode_batch([TEXT])[0].tolist() == tokenizer.encode(TEXT)
    assert (tokenizer.vocabulary_size, tokenizer.end_of_document) == (257, 256)
    assert tokenizer.byte_lengths().tolist() == [1] * 256 + [0]


@pytest.mark.parametrize("ids", [[300], [-1], [0, 1, 99999]])
def test_ids_outside_the_vocabulary(ids, bpe):
    for tokenizer in (ByteTokenizer(), bpe):
        with pytest.raises(ValueError, match=rf"token id {ids[-1]} is outside the vocabulary"):
            tokenizer.decode_bytes(ids)


def test_bpe_round_trip(bpe):
    for text in (TEXT, *some_texts(3, 5)):
        ids = bpe.encode(text)
        assert bpe.decode(ids) == text
        assert bpe.decode_bytes(ids) == text.encode()
        assert bpe.byte_lengths()[ids].sum() == len(text.encode())
    assert len(bpe.encode(some_texts(1, 0)[0])) < 0.6 * len(some_texts(1, 0)[0])
    assert bpe.vocabulary_size == 300
    # A character cut in two: each part has its bytes.
    ids = bpe.encode("世")
    assert len(ids) == 3
    assert bpe.decode_bytes(ids[:2]) == "世".encode()[:2]


def test_every_byte_is_in_the_alphabet(bpe):
    """The table of characters against the library's own decoder."""
    for byte in range(128):
        assert bpe.decode_bytes(bpe.encode(chr(byte))) == bytes([byte])
    single = [i for i, length in enumerate(bpe.byte_lengths()) if length == 1]
    assert {bpe.decode_bytes([i]) for i in single} == {bytes([b]) for b in range(256)}


def test_text_never_ends_a_document(bpe):
    assert bpe.end_of_document not in bpe.encode(f"a{END_OF_DOCUMENT}b")
    assert bpe.decode([*bpe.encode("ab"), bpe.end_of_document]) == "ab"
    assert bpe.decode_bytes([bpe.end_of_document]) == b""
    assert bpe.byte_lengths()[bpe.end_of_document] == 0


def test_training_is_deterministic(bpe):
    code = (
        "from tests.data.conftest import some_texts; from seqmix.data import train_bpe;"
        "print(train_bpe(some_texts(200, 0), 300).fingerprint)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == bpe.fingerprint


def test_bpe_that_the_corpus_cannot_give():
    with pytest.raises(DataError, match=r"at most.*asks for 5000"):
        train_bpe(["a b c"], 5000)
    with pytest.raises(ValueError, match="must be >= 257"):
        train_bpe(["a b c"], 256)


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_save_and_load(kind, bpe, tmp_path):
    tokenizer = ByteTokenizer() if kind == "byte" else bpe
    tokenizer.save(tmp_path / "made" / "tokenizer")
    loaded = load_tokenizer(tmp_path / "made" / "tokenizer")
    assert type(loaded) is type(tokenizer)
    assert isinstance(loaded, Tokenizer)
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    assert loaded.end_of_document == tokenizer.end_of_document
    assert loaded.fingerprint == tokenizer.fingerprint
    np.testing.assert_array_equal(loaded.byte_lengths(), tokenizer.byte_lengths())


def test_load_errors(tmp_path):
    with pytest.raises(DataError, match=r"seqmix_tokenizer\.json: cannot read"):
        load_tokenizer(tmp_path)
    (tmp_path / "seqmix_tokenizer.json").write_text('{"kind": "morse"}')
    with pytest.raises(DataError, match="unknown kind 'morse'; known: byte, huggingface"):
        load_tokenizer(tmp_path)


def test_word_piece_file(tmp_path):
    path = word_piece_file(tmp_path)
    tokenizer = HuggingFaceTokenizer.from_file(path)
    assert tokenizer.end_of_document == 1  # [SEP]
    assert tokenizer.encode("hello hel world") == [2, 4, 5]
    assert tokenizer.decode_bytes([2, 3, 5]) == b" hellolo world"
    assert tokenizer.byte_lengths().tolist() == [0, 0, 6, 2, 4, 6]


def test_settings_that_would_change_documents_are_off(tmp_path):
    """Truncation drops tokens and padding adds some, silently; a template adds its own."""
    path = word_piece_file(
        tmp_path,
        truncation={
            "direction": "Right",
            "max_length": 2,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        padding={
            "strategy": {"Fixed": 9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "[UNK]",
        },
    )
    tokenizer = HuggingFaceTokenizer.from_file(path)
    assert tokenizer.encode("hello hello hello") == [2, 2, 2]
    assert tokenizer.encode_batch(["hello", "hello hel hello"])[1].tolist() == [2, 4, 2]


def test_end_of_document(tmp_path):
    path = word_piece_file(tmp_path)
    assert HuggingFaceTokenizer.from_file(path, "[UNK]").end_of_document == 0
    with pytest.raises(DataError, match=r"tokenizer\.json: the vocabulary has no token '<eod>'"):
        HuggingFaceTokenizer.from_file(path, "<eod>")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "world"}}')
    named = HuggingFaceTokenizer.from_file(tmp_path)
    assert named.end_of_document == 5
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: cannot read eos_token"):
        HuggingFaceTokenizer.from_file(tmp_path)


def test_no_end_of_document(tmp_path):
    model = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    path = tmp_path / "plain.json"
    tokenizers.Tokenizer(model).save(str(path))
    with pytest.raises(DataError, match=r"plain\.json: no end-of-document token found \(tried <"):
        HuggingFaceTokenizer.from_file(path)


def test_unreadable_file(tmp_path):
    with pytest.raises(DataError, match=r"none\.json: cannot read the tokenizer: No such file"):
        HuggingFaceTokenizer.from_file(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"a": 1}')
    with pytest.raises(DataError, match=r"bad\.json: not a tokenizer file"):
        HuggingFaceTokenizer.from_file(tmp_path / "bad.json")
    (tmp_path / "latin.json").write_bytes(b'"\xe9"')
    with pytest.raises(DataError, match=r"latin\.json: not a tokenizer file: 'utf-8'"):
        HuggingFaceTokenizer.from_file(tmp_path / "latin.json")
