# SPDX-License-Identifier: Apache-2.0
"""A folder of the Hugging Face layout: config.json, safetensors in one file or several, tokenizer.

Nothing in it is executed: weights in pickles are refused, and code that a config names
(``auto_map``) is not looked at.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqmix.interop.hf import tensor_file

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Files that say how text becomes tokens and how to generate; they travel along unread.
TOKENIZER_FILE = "tokenizer.json"
COMPANIONS = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHOWN = 8
_OTHERS = (".h5", ".msgpack", ".gguf")


class Checkpoint:
    """A folder to read from.

    Attributes:
      folder: its path.
      config: the parsed config.json.
      entries: (file, entry) of each tensor, by name.
    """

    def __init__(self, folder: Path | str):
        """Reads config.json and the headers of the tensor files.

        Raises:
          FileNotFoundError: no such folder, or no config.json in it.
          ValueError: no safetensors in it, or a file that cannot be read; names the file.
        """
        self.folder = Path(folder)
        self.config = read_json(self.folder / CONFIG_FILE)
        self.entries: dict[str, tuple[Path, tensor_file.Entry]] = {}
        for file, listed in self._files().items():
            found = tensor_file.read_header(file)
            lacking = sorted(set(found) ^ set(found if listed is None else listed))
            if lacking:
                raise ValueError(f"{file}: the index lists other tensors for it: {some(lacking)}")
            self.entries |= {name: (file, entry) for name, entry in found.items()}
        strange = [n for n, (_, e) in self.entries.items() if e.dtype not in tensor_file.DTYPES]
        if strange:
            kinds = sorted({self.entries[name][1].dtype for name in strange})
            raise ValueError(
                f"{self.folder}: tensors of dtype {', '.join(kinds)}, which is not supported "
                f"({', '.join(tensor_file.DTYPES)} are): {some(strange)}"
            )

    def _files(self) -> dict[Path, list[str] | None]:
        """The tensor files, with the names that an index lists for each."""
        single, index = self.folder / SINGLE_FILE, self.folder / INDEX_FILE
        if single.is_file():
            return {single: None}
        if not index.is_file():
            raise ValueError(self._no_tensors())
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ValueError(f"{index}: no weight_map")
        files: dict[Path, list[str] | None] = {}
        for name, file in places.items():
            # A path would let a file outside the folder be read.
            if not isinstance(file, str) or Path(file).name != file or not file:
                raise ValueError(f"{index}: {file!r} is no file name")
            if not file.endswith(".safetensors"):
                raise ValueError(f"{index}: {file!r} is no safetensors file")
            files.setdefault(self.folder / file, []).append(name)
        for file in files:
            if not file.is_file():
                raise ValueError(f"{file} is missing; {index.name} names it")
        return files

    def _no_tensors(self) -> str:
        text = f"{self.folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}"
        names = sorted(path.name for path in self.folder.iterdir())
        if found := [name for name in names if name.endswith(_PICKLES)]:
            return (
                f"{text}, only {some(found)}: a pickle can run code when it is opened, and is "
                "never read; convert it to safetensors where you trust it"
            )
        if found := [name for name in names if name.endswith(_OTHERS)]:
            return f"{text}; {some(found)} is another format"
        return text

    def read(self, name: str) -> np.ndarray:
        """One tensor, in its own memory and dtype."""
        return tensor_file.read_tensor(*self.entries[name])

    def dtype(self, name: str) -> np.dtype:
        """The dtype of a tensor."""
        return tensor_file.DTYPES[self.entries[name][1].dtype]

    def size(self, name: str) -> int:
        """Bytes of a tensor."""
        return self.entries[name][1].size

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors by name."""
        return {name: entry.shape for name, (_, entry) in self.entries.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self.entries[name][1].shape


def write_tensors(
    folder: Path,
    tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    arrays: Iterable[tuple[str, np.ndarray]],
    limit: int,
) -> None:
    """Writes tensor files, one tensor in memory at a time.

    Args:
      folder: of the files.
      tensors: dtype and shape by name.
      arrays: the tensors, in the same order.
      limit: bytes of a file; more are split over several, with an index.
    """
    sizes = {n: int(np.prod(shape)) * dtype.itemsize for n, (dtype, shape) in tensors.items()}
    groups = tensor_file.shards(sizes.items(), limit)
    files = [SINGLE_FILE]
    if len(groups) > 1:
        count = len(groups)
        files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    arrays = iter(arrays)
    for file, group in zip(files, groups, strict=True):
        writer = tensor_file.Writer(folder / file, {name: tensors[name] for name in group})
        for _ in group:
            writer.write(*next(arrays))
        writer.close()
    if len(groups) > 1:
        places = {name: file for file, group in zip(files, groups, strict=True) for name in group}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        write_json(folder / INDEX_FILE, index)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it holds something else.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path.parent} is no folder of a Hugging Face model: no {path.name}"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a JSON object is expected")
    return values


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON object as published files have it."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def some(names: Sequence[str], separator: str = ", ") -> str:
    """Some of the names, and how many more there are."""
    text = separator.join(names[:_SHOWN])
    return text if len(names) <= _SHOWN else f"{text} and {len(names) - _SHOWN} more"
