# SPDX-License-Identifier: Apache-2.0
"""The safetensors format: a JSON header and the bytes of the tensors, one after another.

Read and written tensor by tensor with plain file calls: a mapped file would count into the memory
of the process as its pages are touched, and the library's writer takes all tensors at once.
Format: https://github.com/huggingface/safetensors.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
_LONGEST_HEADER = 100_000_000
_ALIGNMENT = 8


class Entry(NamedTuple):
    """One tensor of a file.

    Attributes:
      dtype: its name in the format: 'F32', 'BF16', ...
      shape: its shape.
      start: of its bytes in the file.
      size: of its bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file by name, without reading any.

    Raises:
      ValueError: the file is cut short, or is not of the format; names the file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_LONGEST_HEADER, size - 8):
            raise ValueError(f"{path}: cut short, or no safetensors file: the header does not fit")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = {name: _entry(value, 8 + length) for name, value in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}: no safetensors file: its header: {error}") from None
    for name, entry in entries.items():
        if entry.start + entry.size > size:
            raise ValueError(
                f"{path}: cut short: the tensor {name!r} ends at byte {entry.start + entry.size}, "
                f"the file has {size}"
            )
    return entries


def _entry(value: Mapping[str, Any], offset: int) -> Entry:
    shape = tuple(value["shape"])
    start, end = value["data_offsets"]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, end)) or end < start:
        raise ValueError(f"shape {shape} and offsets {start}, {end} are not natural numbers")
    dtype = value["dtype"]
    if not isinstance(dtype, str):
        raise ValueError(f"dtype {dtype!r} is no name")
    expected = math.prod(shape) * DTYPES[dtype].itemsize if dtype in DTYPES else end - start
    if end - start != expected:
        raise ValueError(f"{end - start} bytes for {dtype} of shape {shape}")
    return Entry(dtype, shape, offset + start, end - start)


def read_tensor(path: Path, entry: Entry) -> np.ndarray:
    """One tensor, in its own memory.

    Raises:
      ValueError: the file has become shorter.
    """
    array = np.empty(entry.shape, DTYPES[entry.dtype])
    with path.open("rb", buffering=0) as file:
        file.seek(entry.start)
        _fill(file, memoryview(array.reshape(-1).view(np.uint8)), path)
    return array


def _fill(file: BinaryIO, buffer: memoryview, path: Path) -> None:
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])
        if not count:
            raise ValueError(f"{path}: cut short while it was read")
        done += count


class Writer:
    """Writes tensors into a file whose contents are known beforehand, in that order."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]):
        """Creates the file and writes its header.

        Args:
          path: of the file, which must not exist.
          tensors: dtype and shape by name.
        """
        names = {dtype: name for name, dtype in DTYPES.items()}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name, (dtype, shape) in tensors.items():
            end = position + math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": names[dtype],
                "shape": list(shape),
                "data_offsets": [position, end],
            }
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._tensors, self._names = dict(tensors), iter(tensors)
        self._file = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, array: np.ndarray) -> None:
        """Writes the next tensor."""
        if next(self._names) != name or (array.dtype, array.shape) != self._tensors[name]:
            raise AssertionError(f"{name} {array.dtype} {array.shape} is not the next tensor")
        self._file.write(memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))

    def close(self) -> None:
        """Ends the file; its bytes are on disk then."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def shards(sizes: Iterable[tuple[str, int]], limit: int) -> list[list[str]]:
    """Names in groups of at most ``limit`` bytes, in order; a larger tensor has its own group."""
    groups: list[list[str]] = [[]]
    total = 0
    for name, size in sizes:
        if groups[-1] and total + size > limit:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += size
    return groups
