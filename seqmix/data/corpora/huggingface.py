# SPDX-License-Identifier: Apache-2.0
"""Hugging Face datasets as a corpus, streamed."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, override

from seqmix import config
from seqmix.data.corpora.base import Corpus, Document, Source, Split
from seqmix.data.corpora.files import check_text, file_keys, find_files, is_empty
from seqmix.data.errors import DataError, missing_extra


@config.configurable()
@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceCorpus(Corpus):
    """A dataset read with `datasets.load_dataset(..., streaming=True)`, one document a row.

    The rows are streamed once into the token store, so a limit (`max_documents`, `max_bytes`)
    bounds both the download and the disk. A remote dataset that changes is seen only through
    `revision`: name one to pin what is read.

    Attributes:
        path: Name of the dataset on the hub, or of a packaged loader (`json`, `parquet`, ...).
        name: Configuration of the dataset.
        data_files: Files for a packaged loader: paths or glob patterns.
        split: Split for training documents.
        validation_split: Split for validation documents; None: by `validation_fraction`.
        column: Name of the column that holds the text.
        revision: Git revision of the dataset on the hub.
        skip_empty: Leave out rows without text instead of stopping with an error.
    """

    path: str = ""
    name: str | None = None
    data_files: tuple[str, ...] = ()
    split: str = "train"
    validation_split: str | None = None
    column: str = "text"
    revision: str | None = None
    skip_empty: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise ValueError("HuggingFaceCorpus.path is empty: name a dataset")

    @override
    def sources(self) -> Sequence[Source]:
        if self.validation_split is None:
            return [Source(self._documents(self.split))]
        splits: list[tuple[str, Split]] = [
            (self.split, "train"),
            (self.validation_split, "validation"),
        ]
        return [Source(self._documents(name), split) for name, split in splits]

    @override
    def content_key(self) -> Any:
        # The settings, revision included, name a remote dataset; local files can change.
        return file_keys(self._local_files()) if self.data_files else None

    def _local_files(self) -> Any:
        return find_files("HuggingFaceCorpus.data_files", self.data_files)

    def _documents(self, split: str) -> Iterator[Document]:
        where = f"Hugging Face dataset {self.path!r}, split {split!r}"
        number = 0
        for number, row in enumerate(self._rows(split, where), 1):
            if self.column not in row:
                raise DataError(
                    f"{where}: no column {self.column!r}; it has: {', '.join(sorted(row))}"
                )
            text = row[self.column]
            if self.skip_empty and is_empty(text):
                continue
            name = f"{split}:{number}"
            yield Document(name, check_text(text, f"{where}, row {number}"))
        if not number:
            raise DataError(f"{where}: no rows")

    def _rows(self, split: str, where: str) -> Iterator[dict[str, Any]]:
        try:
            import datasets
        except ImportError as error:
            raise missing_extra("HuggingFaceCorpus", "datasets", "hf") from error
        files = [str(file.path) for file in self._local_files()] if self.data_files else None
        try:
            yield from datasets.load_dataset(
                self.path,
                self.name,
                data_files=files,
                split=split,
                revision=self.revision,
                streaming=True,
            )
        except Exception as error:  # the library raises errors of many kinds
            raise DataError(f"{where}: cannot read: {error}") from error
