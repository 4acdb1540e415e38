# SPDX-License-Identifier: Apache-2.0
"""What a tokenizer is, and how one is saved beside a run and loaded again."""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from seqmix.data.errors import DataError

CONFIG_FILE = "seqmix_tokenizer.json"


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        name: Short name for messages.
        vocabulary_size: Number of ids; every id is in [0, vocabulary_size).
        end_of_document: The id that ends each document. Text never encodes to it, it decodes to
            nothing, and its byte length is 0.
        fingerprint: Hex digest that changes when any encoding could.
    """

    name: str
    vocabulary_size: int
    end_of_document: int
    fingerprint: str

    def encode(self, text: str | bytes) -> list[int]:
        """The ids of a text, without an end-of-document token."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of many texts: one integer array [tokens] each."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD."""

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of ids; those of a part of a text are a part of its bytes."""

    def byte_lengths(self) -> np.ndarray:
        """Bytes of text that each id stands for, int32 [vocabulary_size]; special ids 0."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes everything `load_tokenizer` needs into a folder, created if missing."""


def write_config(folder: str | os.PathLike[str], values: dict[str, Any]) -> pathlib.Path:
    """Writes the settings file of a saved tokenizer; returns its folder."""
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n")
    return path


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the settings file of a saved tokenizer.

    Raises:
        DataError: the file is missing or is not what `write_config` writes.
    """
    path = pathlib.Path(folder) / CONFIG_FILE
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise DataError(f"{path}: cannot read the saved tokenizer: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: not a saved tokenizer: {error}") from error
    if not isinstance(values, dict) or "kind" not in values:
        raise DataError(f"{path}: not a saved tokenizer: no 'kind'")
    return values


def check_ids(ids: Sequence[int], vocabulary_size: int) -> np.ndarray:
    """Returns the ids as an int64 array [tokens].

    Raises:
        ValueError: an id outside [0, vocabulary_size).
    """
    array = np.asarray(ids, dtype=np.int64).reshape(-1)
    if array.size and (array.min() < 0 or array.max() >= vocabulary_size):
        wrong = array[(array < 0) | (array >= vocabulary_size)][0]
        raise ValueError(f"token id {wrong} is outside the vocabulary [0, {vocabulary_size})")
    return array
