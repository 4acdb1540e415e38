# SPDX-License-Identifier: Apache-2.0
"""Building a token store from a corpus, once."""

import dataclasses
import hashlib
import json
import logging
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from seqmix.data import bigram, cache, store
from seqmix.data.corpora import SPLITS, Corpus, Split
from seqmix.data.tokenizers import Tokenizer

_log = logging.getLogger(__name__)

# Texts are tokenised together, for the tokenizer's threads, until one of these is reached.
_BATCH_CHARACTERS = 4 << 20
_BATCH_DOCUMENTS = 4096


def token_store(corpus: Corpus, tokenizer: Tokenizer, folder: pathlib.Path) -> pathlib.Path:
    """The store of a corpus under a tokenizer, built if it is not there yet.

    The store's name holds a fingerprint of the corpus (settings, and names, sizes and times of
    change of its files), of the tokenizer and of the format, so a change of any builds another.

    Args:
        corpus: The documents.
        tokenizer: Makes tokens of them.
        folder: The cache folder.

    Returns:
        The store's folder.

    Raises:
        DataError: the corpus has a bad record, or no document; the cache cannot be written.
    """
    key = {
        "format": store.FORMAT,
        "corpus": corpus.key(),
        "tokenizer": tokenizer.fingerprint,
    }
    digest = cache.fingerprint(key)
    target = folder / "stores" / f"{corpus.label}-{digest[:20]}"
    return cache.build_once(target, lambda path: _write(corpus, tokenizer, path))


def _write(corpus: Corpus, tokenizer: Tokenizer, folder: pathlib.Path) -> None:
    began = time.monotonic()
    dtype = np.dtype("<u2" if tokenizer.vocabulary_size <= 1 << 16 else "<u4")
    writers = {split: _SplitWriter(folder / split, dtype) for split in SPLITS}
    for split, texts in _batches(corpus):
        encoded = tokenizer.encode_batch(texts)
        writers[split].add(texts, encoded, tokenizer.end_of_document)
    infos = {split: writer.close() for split, writer in writers.items()}
    index = {
        "format": store.FORMAT,
        "dtype": dtype.str,
        "corpus": repr(corpus),
        "tokenizer": tokenizer.name,
        "splits": {split: dataclasses.asdict(info) for split, info in infos.items()},
    }
    (folder / store.INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")
    _log.info(
        "tokenised %s with %s: %d + %d documents, %d + %d tokens, %.1f s",
        corpus.label,
        tokenizer.name,
        *(infos[split].documents for split in SPLITS),
        *(infos[split].tokens for split in SPLITS),
        time.monotonic() - began,
    )


def _batches(corpus: Corpus) -> Iterator[tuple[Split, list[str]]]:
    """The texts of each split in batches, order kept within a split."""
    waiting: dict[Split, list[str]] = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    for split, document in corpus.documents():
        waiting[split].append(document.text)
        sizes[split] += len(document.text)
        if sizes[split] >= _BATCH_CHARACTERS or len(waiting[split]) >= _BATCH_DOCUMENTS:
            yield split, waiting[split]
            waiting[split], sizes[split] = [], 0
    for split, texts in waiting.items():
        if texts:
            yield split, texts


class _SplitWriter:
    """Writes one split."""

    def __init__(self, folder: pathlib.Path, dtype: np.dtype):
        folder.mkdir()
        self._folder = folder
        self._dtype = dtype
        self._pending = np.empty(0, dtype)  # tokens of the block that is not full yet
        self._blocks = 0
        self._file: Any = None
        self._names: list[str] = []
        self._lengths: list[np.ndarray] = []
        self._bigrams = bigram.count_bigrams([])
        self._bytes = 0
        self._digest = hashlib.sha256()

    def add(self, texts: list[str], encoded: list[np.ndarray], end_of_document: int) -> None:
        """Appends documents."""
        raw = [text.encode() for text in texts]
        self._bytes += sum(map(len, raw))
        self._bigrams += bigram.count_bigrams(raw)
        self._lengths.append(np.array([len(tokens) + 1 for tokens in encoded], np.int64))
        end = np.array([end_of_document], self._dtype)
        parts = [self._pending]
        for tokens in encoded:
            parts += [tokens.astype(self._dtype), end]
        stream = np.concatenate(parts)
        full = len(stream) - len(stream) % store.BLOCK_TOKENS
        for block in stream[:full].reshape(-1, store.BLOCK_TOKENS):
            self._write_block(block)
        self._pending = stream[full:]

    def close(self) -> store.SplitInfo:
        """Writes what is left and the arrays beside the tokens."""
        if len(self._pending):
            self._write_block(self._pending)
        if self._file is not None:
            self._file.close()
        lengths = np.concatenate([np.zeros(1, np.int64), *self._lengths])
        offsets = np.cumsum(lengths, dtype=np.int64)
        self._digest.update(offsets.astype("<i8").tobytes())
        np.save(self._folder / "offsets.npy", offsets)
        np.save(self._folder / "bigrams.npy", self._bigrams)
        names = [*self._names, "offsets.npy", "bigrams.npy"]
        return store.SplitInfo(
            documents=len(offsets) - 1,
            tokens=int(offsets[-1]),
            bytes=self._bytes,
            digest=self._digest.hexdigest(),
            files={name: store.file_key(self._folder / name) for name in names},
        )

    def _write_block(self, block: np.ndarray) -> None:
        if self._blocks % store.BLOCKS_PER_FILE == 0:
            self._next_file()
        data = block.tobytes()
        self._digest.update(data)
        self._file.write(data)
        self._blocks += 1

    def _next_file(self) -> None:
        from array_record.python import array_record_module

        if self._file is not None:
            self._file.close()
        self._names.append(store.token_file(len(self._names)))
        path = self._folder / self._names[-1]
        self._file = array_record_module.ArrayRecordWriter(str(path), "group_size:1,zstd:1")
