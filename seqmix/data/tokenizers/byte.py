# SPDX-License-Identifier: Apache-2.0
"""The built-in tokenizer: one id a byte."""

import os
from collections.abc import Sequence

import numpy as np

from seqmix.data.tokenizers.base import check_ids, read_config, write_config


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8, 256 is the end of a document."""

    name = "byte"
    vocabulary_size = 257
    end_of_document = 256
    fingerprint = "byte-257"

    def encode(self, text: str | bytes) -> list[int]:
        """The bytes of the text as ids; any bytes at all are accepted."""
        return list(text.encode() if isinstance(text, str) else text)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The bytes of each text, uint8 arrays [bytes]."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text; end-of-document ids vanish, bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes exactly; end-of-document ids vanish.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        array = check_ids(ids, self.vocabulary_size)
        return array[array != self.end_of_document].astype(np.uint8).tobytes()

    def byte_lengths(self) -> np.ndarray:
        """1 for each byte, 0 for the end of a document: int32 [257]."""
        lengths = np.ones(self.vocabulary_size, np.int32)
        lengths[self.end_of_document] = 0
        return lengths

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the settings file into the folder, created if missing."""
        write_config(folder, {"kind": self.name})

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "ByteTokenizer":
        """Loads what `save` wrote.

        Raises:
            DataError: the folder holds no saved tokenizer.
        """
        read_config(folder)
        return cls()
