# SPDX-License-Identifier: Apache-2.0
"""The token store: the documents of a corpus as tokens, in ArrayRecord files.

A store is a folder with one sub-folder for each split::

    index.json                  format, tokenizer, digests, sizes of the files below
    train/offsets.npy           int64 [documents + 1]: document d begins at token offsets[d]
    train/bigrams.npy           int64 [257, 257]: byte pairs of the text (see `bigram`)
    train/tokens-00000.arecord  the token stream, `BLOCK_TOKENS` a record
    validation/...

Every document ends with the end-of-document token. Tokens are little-endian unsigned integers, 16
bits wide where the vocabulary allows. Records are blocks of the stream and not documents, so
that ten thousand documents of three tokens and one document of ten gigabytes read equally well.
"""

import dataclasses
import json
import pathlib
import threading
import zlib
from collections import OrderedDict
from typing import Any

import numpy as np

from seqmix.data.corpora.base import Split
from seqmix.data.errors import DataError

FORMAT = 1
INDEX_FILE = "index.json"
BLOCK_TOKENS = 8192
BLOCKS_PER_FILE = 16384  # 2**27 tokens: 256 MiB before compression
_CACHED_BLOCKS = 512  # 8 MiB of 16-bit tokens


def token_file(number: int) -> str:
    """File name of a part of the token stream."""
    return f"tokens-{number:05d}.arecord"


def file_key(path: pathlib.Path) -> dict[str, int]:
    """Size and CRC-32 of a file, as the index holds them (no CRC for files with their own)."""
    key = {"size": path.stat().st_size}
    if path.suffix == ".npy":
        key["crc32"] = 0
        with path.open("rb") as handle:
            while chunk := handle.read(1 << 20):
                key["crc32"] = zlib.crc32(chunk, key["crc32"])
    return key


@dataclasses.dataclass(frozen=True)
class SplitInfo:
    """What the index says of a split.

    Attributes:
        documents: Number of documents.
        tokens: Number of tokens, end-of-document tokens included.
        bytes: Bytes of text (UTF-8).
        digest: SHA-256 (hex) of tokens and offsets: the identity of the content.
        files: Size (and CRC-32) of each file.
    """

    documents: int
    tokens: int
    bytes: int
    digest: str
    files: dict[str, dict[str, int]]


class TokenStore:
    """Random access to the tokens of one split, from any thread."""

    def __init__(self, folder: pathlib.Path, split: Split):
        """Opens a split and checks its files against the index.

        Raises:
            DataError: a file is missing, truncated or changed, named.
        """
        index = read_index(folder)
        self.folder = folder / split
        self.info = SplitInfo(**index["splits"][split])
        for name, expected in self.info.files.items():
            _check_file(self.folder / name, expected)
        self.offsets: np.ndarray = np.load(self.folder / "offsets.npy", mmap_mode="r")
        self._dtype = np.dtype(index["dtype"])
        self._readers: dict[int, Any] = {}
        self._blocks: OrderedDict[int, np.ndarray] = OrderedDict()  # the latest used last
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.info.documents

    def document(self, index: int) -> np.ndarray:
        """The tokens of a document, int32 [tokens], its end-of-document token last."""
        start, stop = (int(self.offsets[i]) for i in (index, index + 1))
        return self.gather(np.arange(start, stop))

    def bigrams(self) -> np.ndarray:
        """Byte pair counts of the documents' text, int64 [257, 257] (see `bigram`)."""
        return np.load(self.folder / "bigrams.npy")

    def gather(self, places: np.ndarray) -> np.ndarray:
        """The tokens at places of the stream.

        Args:
            places: int64 [n], each in [0, tokens), in any order.

        Returns:
            int32 [n].

        Raises:
            DataError: a damaged file, named.
        """
        tokens = np.empty(len(places), np.int32)
        blocks, inverse = np.unique(places // BLOCK_TOKENS, return_inverse=True)
        order = np.argsort(inverse, kind="stable")
        ends = np.searchsorted(inverse[order], np.arange(len(blocks) + 1))
        for number, block in enumerate(blocks.tolist()):
            chosen = order[ends[number] : ends[number + 1]]
            with self._lock:
                content = self._block(block)
            tokens[chosen] = content[places[chosen] % BLOCK_TOKENS]
        return tokens

    def _block(self, block: int) -> np.ndarray:
        if block in self._blocks:
            self._blocks.move_to_end(block)
            return self._blocks[block]
        number, record = divmod(block, BLOCKS_PER_FILE)
        path = self.folder / token_file(number)
        try:
            if number not in self._readers:
                self._readers[number] = _open(path)
            data = self._readers[number].read([record])[0]
        except RuntimeError as error:
            raise DataError(
                f"{path}: damaged token store ({error}); delete {self.folder.parent} to have it "
                "built again"
            ) from error
        tokens = np.frombuffer(data, self._dtype)
        expected = min(BLOCK_TOKENS, self.info.tokens - block * BLOCK_TOKENS)
        if len(tokens) != expected:
            raise DataError(
                f"{path}: damaged token store (record {record} has {len(tokens)} tokens, "
                f"expected {expected}); delete {self.folder.parent} to have it built again"
            )
        self._blocks[block] = tokens
        if len(self._blocks) > _CACHED_BLOCKS:
            self._blocks.popitem(last=False)
        return tokens


def read_index(folder: pathlib.Path) -> dict[str, Any]:
    """The index of a store.

    Raises:
        DataError: missing, damaged, or of another format.
    """
    path = folder / INDEX_FILE
    try:
        index = json.loads(path.read_text())
        found = index["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged token store ({error}); delete {folder}") from error
    if found != FORMAT:
        raise DataError(f"{path}: token store of format {found}, expected {FORMAT}")
    return index


def _check_file(path: pathlib.Path, expected: dict[str, int]) -> None:
    try:
        found = file_key(path)
    except OSError as error:
        raise DataError(
            f"{path}: damaged token store ({error.strerror}); delete {path.parents[1]} to have "
            "it built again"
        ) from error
    for what, value in expected.items():
        if found[what] != value:
            raise DataError(
                f"{path}: damaged token store ({what} is {found[what]}, expected {value}); "
                f"delete {path.parents[1]} to have it built again"
            )


def _open(path: pathlib.Path) -> Any:
    from array_record.python import array_record_module

    # Without read-ahead, and with a small buffer: access is random.
    return array_record_module.ArrayRecordReader(
        str(path), options="readahead_buffer_size:0", file_reader_buffer_size=32768
    )
