# SPDX-License-Identifier: Apache-2.0
"""Where the parameters of an unrolled model are in a scanned one, and arrays to fill in pieces."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from seqmix.interop.hf.rules import Path
from seqmix.models import HybridLM, HybridLMConfig
from seqmix.models.convert import scanned_place

# XLA takes arrays of the host as they are, without a copy, where they begin at multiples of this.
_ALIGNMENT = 64


class Place(NamedTuple):
    """Where a parameter is.

    Attributes:
      path: in the flat state of the model.
      period: index on the first axis, None where the array is the parameter itself.
    """

    path: Path
    period: int | None


def placement(config: HybridLMConfig) -> Callable[[Path], Place]:
    """Gives the place of each path of the unrolled model."""
    plan = config.plan()

    def place(path: Path) -> Place:
        if path[:2] != ("stack", "leading") or not config.scan:
            return Place(path, None)
        part, index, period = scanned_place(plan, path[2])
        return Place(("stack", part, index, *path[3:]), period)

    return place


def abstract_state(config: HybridLMConfig) -> tuple[Any, dict[Path, nnx.Variable]]:
    """The structure of a model, and its flat state without arrays."""
    model = nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    return graph, dict(nnx.to_flat_state(state))


def parameter_shape(place: Place, flat: dict[Path, nnx.Variable]) -> tuple[int, ...]:
    """Shape of a parameter of the unrolled model."""
    shape = tuple(flat[place.path].shape)
    return shape if place.period is None else shape[1:]


class Slots:
    """The arrays of a model, filled slice by slice; each goes to the device once it is full."""

    def __init__(self, config: HybridLMConfig, flat: dict[Path, nnx.Variable]):
        self._place = placement(config)
        self._flat = flat
        self._periods = config.plan().periods
        self._open: dict[Path, tuple[np.ndarray, int]] = {}
        self.arrays: dict[Path, jax.Array] = {}

    def put(self, path: Path, array: np.ndarray) -> None:
        """Writes a parameter of the unrolled model, cast to its dtype.

        Raises:
          AssertionError: it has another shape than the model's.
        """
        place = self._place(path)
        shape = parameter_shape(place, self._flat)
        if array.shape != shape:
            raise AssertionError(f"{path}: a rule gave shape {array.shape}, the model has {shape}")
        slot, missing = self._open.pop(place.path, (None, 0))
        if slot is None:
            like = self._flat[place.path]
            slot = _aligned(tuple(like.shape), np.dtype(like.dtype))
            missing = 1 if place.period is None else self._periods
        slot[... if place.period is None else place.period] = array
        if missing > 1:
            self._open[place.path] = slot, missing - 1
        else:
            self.arrays[place.path] = jax.device_put(slot)

    def fill(self, config: HybridLMConfig, paths: Iterable[Path]) -> None:
        """Gives variables that no tensor holds, such as fixed slopes, their initial values."""
        paths = list(paths)
        if not paths:
            return

        def initial() -> list[jax.Array]:
            flat = dict(nnx.to_flat_state(nnx.state(HybridLM(config, rngs=nnx.Rngs(0)))))
            return [flat[path][...] for path in paths]

        # Compiled, the parameters that nobody asks for are not drawn.
        self.arrays |= zip(paths, jax.jit(initial)(), strict=True)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array that begins at a multiple of the alignment."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    first = -buffer.ctypes.data % _ALIGNMENT
    return buffer[first : first + size].view(dtype).reshape(shape)
