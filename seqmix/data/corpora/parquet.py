# SPDX-License-Identifier: Apache-2.0
"""Parquet files as a corpus."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, override

from seqmix import config
from seqmix.data.corpora.base import Document
from seqmix.data.corpora.files import LocalFile, check_text, is_empty, unreadable
from seqmix.data.corpora.text import FileCorpus
from seqmix.data.errors import DataError

_BATCH_ROWS = 1024


@config.configurable()
@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetCorpus(FileCorpus):
    """Parquet files, one document a row (rows are counted from 1 over the file).

    Attributes:
        column: Name of the column that holds the text (string, or bytes in UTF-8).
        skip_empty: Leave out rows without text (null, or only white space) instead of stopping
            with an error.
    """

    column: str = "text"
    skip_empty: bool = False

    @override
    def read(self, files: Sequence[LocalFile]) -> Iterator[Document]:
        for file in files:
            number = 0
            for number, value in enumerate(self._values(file), 1):
                where = f"{file.path}: row {number}, column {self.column!r}"
                if isinstance(value, bytes):
                    value = _decode(value, where)
                if self.skip_empty and is_empty(value):
                    continue
                yield Document(f"{file.name}:{number}", check_text(value, where))
            if not number:
                raise DataError(f"{file.path}: no rows")

    def _values(self, file: LocalFile) -> Iterator[Any]:
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(file.path) as table:
                names = table.schema_arrow.names
                if self.column not in names:
                    raise DataError(
                        f"{file.path}: no column {self.column!r}; it has: {', '.join(names)}"
                    )
                for batch in table.iter_batches(_BATCH_ROWS, columns=[self.column]):
                    yield from _column(batch.column(0))
        except (OSError, pyarrow.ArrowException) as error:
            raise unreadable(file.path, error) from error


def _column(values: Any) -> Iterator[Any]:
    """The values of an Arrow column; strings as bytes, so that bad UTF-8 is found row by row."""
    import pyarrow

    kind = values.type
    if pyarrow.types.is_string(kind):
        values = values.view(pyarrow.binary())
    elif pyarrow.types.is_large_string(kind):
        values = values.view(pyarrow.large_binary())
    return iter(values.to_pylist())


def _decode(value: bytes, where: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8: {error.reason} 0x{value[error.start]:02x} at byte {error.start}"
        ) from error
