# SPDX-License-Identifier: Apache-2.0
"""Any tokenizer of the Hugging Face `tokenizers` library, from its `tokenizer.json`."""

import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from seqmix.data.errors import DataError
from seqmix.data.tokenizers.base import check_ids, read_config, write_config

TOKENIZER_FILE = "tokenizer.json"

# The end-of-document tokens of the common families, tried in this order.
_END_OF_DOCUMENT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
    "[SEP]",
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library.

    Attributes beside those of `Tokenizer`:
      end_token: the text of the end-of-document token.

    Special tokens are never read out of text (a document that spells `<|endoftext|>` keeps it as
    text), no beginning or ending tokens are added, and truncation and padding settings of the
    file are switched off: a document's ids are its text and nothing else.

    `decode_bytes` is exact for byte-level vocabularies. With others (SentencePiece, WordPiece)
    it gives the bytes that the vocabulary holds: what a normaliser changed is not undone.
    """

    def __init__(self, library_tokenizer: Any, end_of_document: str, name: str = TOKENIZER_FILE):
        """Wraps a `tokenizers.Tokenizer`.

        Args:
            library_tokenizer: The tokenizer; its settings are changed as described above.
            end_of_document: The token that ends a document.
            name: Where it came from, for messages.

        Raises:
            DataError: the vocabulary has no such token.
        """
        self.name = name
        self._tokenizer = library_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        found = self._tokenizer.token_to_id(end_of_document)
        if found is None:
            raise DataError(f"{name}: the vocabulary has no token {end_of_document!r}")
        self.end_of_document: int = found
        self.end_token = end_of_document
        self._vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary_size = max(self._vocabulary.values()) + 1
        self._settings = json.loads(self._tokenizer.to_str())
        canonical = json.dumps([self._settings, end_of_document], sort_keys=True)
        self.fingerprint = hashlib.sha256(canonical.encode()).hexdigest()

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], end_of_document: str | None = None
    ) -> "HuggingFaceTokenizer":
        """Reads a `tokenizer.json`.

        Args:
            path: The file, or a folder that holds `tokenizer.json`.
            end_of_document: The token that ends a document. None: the `eos_token` of a
                `tokenizer_config.json` beside the file, else the first known one it has.

        Raises:
            DataError: the file cannot be read, or has no such token.
        """
        import tokenizers

        file = pathlib.Path(path).expanduser()
        if file.is_dir():
            file = file / TOKENIZER_FILE
        try:
            found = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"{file}: cannot read the tokenizer: {error.strerror}") from error
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{file}: not a tokenizer file: {error}") from error
        if end_of_document is None:
            end_of_document = _named_end(file) or _known_end(file, found)
        return cls(found, end_of_document, str(file))

    def encode(self, text: str | bytes) -> list[int]:
        """The ids of a text.

        Raises:
            ValueError: bytes that are not UTF-8.
        """
        if isinstance(text, bytes):
            text = text.decode()
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, uint32 arrays [tokens]; runs on all cores."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, np.uint32) for one in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """The text, special tokens left out.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        checked = check_ids(ids, self.vocabulary_size).tolist()
        return self._tokenizer.decode(checked, skip_special_tokens=True)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of the tokens, special tokens left out.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        table = self._token_bytes
        return b"".join([table[i] for i in check_ids(ids, self.vocabulary_size).tolist()])

    def byte_lengths(self) -> np.ndarray:
        """Bytes of text each id stands for, int32 [vocabulary_size]; special ids 0."""
        return np.array([len(token) for token in self._token_bytes], np.int32)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `tokenizer.json` and the settings file into the folder, created if missing."""
        path = write_config(folder, {"kind": "huggingface", "end_of_document": self.end_token})
        (path / TOKENIZER_FILE).write_text(self._tokenizer.to_str(), encoding="utf-8")

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "HuggingFaceTokenizer":
        """Loads what `save` wrote.

        Raises:
            DataError: the folder holds no saved tokenizer.
        """
        return cls.from_file(folder, read_config(folder).get("end_of_document"))

    @functools.cached_property
    def _token_bytes(self) -> list[bytes]:
        added = self._tokenizer.get_added_tokens_decoder()
        parts = json.dumps([self._settings["pre_tokenizer"], self._settings["decoder"]])
        if '"ByteLevel"' in parts:
            to_bytes = _byte_level
        else:
            to_bytes = _word_piece if '"WordPiece"' in parts else _sentence_piece
        table = [b""] * self.vocabulary_size
        for token, index in self._vocabulary.items():
            if index in added:
                table[index] = b"" if added[index].special else token.encode()
            else:
                table[index] = to_bytes(token)
        table[self.end_of_document] = b""
        return table


def _byte_level(token: str) -> bytes:
    """The bytes of a byte-level token, whose characters stand for one byte each."""
    alphabet = _byte_alphabet()
    if all(character in alphabet for character in token):
        return bytes([alphabet[character] for character in token])
    return token.encode()


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Character to byte in byte-level vocabularies.

    Printable characters of Latin-1 stand for themselves; the other bytes, in order, are the
    characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + order): byte for order, byte in enumerate(others)}


def _sentence_piece(token: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(_SPACE_MARK, " ").encode()


def _word_piece(token: str) -> bytes:
    # A token without "##" begins a word; the vocabulary has no other trace of the space before.
    return token[2:].encode() if token.startswith("##") else b" " + token.encode()


def _named_end(file: pathlib.Path) -> str | None:
    """The `eos_token` of the `tokenizer_config.json` beside a tokenizer file, if there is one."""
    path = file.with_name("tokenizer_config.json")
    if not path.is_file():
        return None
    try:
        token = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: cannot read eos_token: {error}") from error
    return token.get("content") if isinstance(token, dict) else token


def _known_end(file: pathlib.Path, tokenizer: Any) -> str:
    for token in _END_OF_DOCUMENT:
        if tokenizer.token_to_id(token) is not None:
            return token
    raise DataError(
        f"{file}: no end-of-document token found (tried {', '.join(_END_OF_DOCUMENT)}); "
        "name it with TokenizerFile.end_of_document"
    )
