# SPDX-License-Identifier: Apache-2.0
"""What a published checkpoint holds beside the numbers, so that an export gives it back."""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from seqmix.interop.hf import tensor_file
from seqmix.interop.hf.checkpoint import COMPANIONS, Checkpoint, read_json, write_json

FACTS_FILE = "tensors.json"
CONSTANTS_FILE = "constants.safetensors"
CONFIG_FILE = "config.json"


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """Where a model came from. Equal origins have the same config and tensors of the same dtypes.

    Attributes:
      config: the config.json.
      dtypes: names of the tensors' dtypes, by tensor, copies included.
      shapes: their shapes.
      constants: the tensors that are no parameters.
      companions: contents of the files of tokenizer and generation, by name.
    """

    config: dict[str, Any]
    dtypes: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    constants: dict[str, np.ndarray]
    companions: dict[str, bytes]

    @classmethod
    def of(cls, checkpoint: Checkpoint, constants: dict[str, np.ndarray]) -> "Origin":
        """That of a folder with these constants."""
        dtypes = {name: entry.dtype for name, (_, entry) in checkpoint.entries.items()}
        companions = _read_companions(checkpoint.folder)
        return cls(checkpoint.config, dtypes, checkpoint.shapes(), constants, companions)

    @classmethod
    def load(cls, folder: Path) -> "Origin":
        """What `save` wrote.

        Raises:
          FileNotFoundError, ValueError: the folder holds something else.
        """
        facts = read_json(folder / FACTS_FILE)
        config = read_json(folder / CONFIG_FILE)
        shapes = {name: tuple(shape) for name, shape in facts["shapes"].items()}
        path = folder / CONSTANTS_FILE
        header = tensor_file.read_header(path) if path.is_file() else {}
        constants = {n: tensor_file.read_tensor(path, entry) for n, entry in header.items()}
        return cls(config, facts["dtypes"], shapes, constants, _read_companions(folder))

    def save(self, folder: Path) -> None:
        """Writes it into a folder, created if missing."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / CONFIG_FILE, self.config)
        write_json(folder / FACTS_FILE, {"dtypes": self.dtypes, "shapes": self.shapes})
        if self.constants:
            tensors = {name: (array.dtype, array.shape) for name, array in self.constants.items()}
            writer = tensor_file.Writer(folder / CONSTANTS_FILE, tensors)
            for name, array in self.constants.items():
                writer.write(name, array)
            writer.close()
        self.save_companions(folder)

    def save_companions(self, folder: Path) -> None:
        """Writes the files of tokenizer and generation into a folder."""
        for name, content in self.companions.items():
            (folder / name).write_bytes(content)

    @functools.cached_property
    def _digest(self) -> str:
        text = json.dumps([self.config, self.dtypes, self.shapes], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    # A model keeps its origin as a static attribute, which is part of what programs compile for.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)


def _read_companions(folder: Path) -> dict[str, bytes]:
    return {n: (folder / n).read_bytes() for n in COMPANIONS if (folder / n).is_file()}
