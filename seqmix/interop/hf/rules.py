# SPDX-License-Identifier: Apache-2.0
"""How the parameters of a model lie in the tensors of a published layout, both ways and exactly.

A rule moves numbers and never changes one, so that what was imported is exported bit for bit. Its
parameters are named by their paths in the unrolled model, ``('stack', 'leading', layer, ...)``;
whether the model is scanned is no concern of a rule.

Weights of torch's ``nn.Linear`` are [outputs, inputs], ours [inputs, outputs]; those of its
depthwise ``nn.Conv1d`` are [channels, 1, taps], ours [taps, channels].
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

type Path = tuple[str | int, ...]
type Arrays = list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A group of parameters that is a group of tensors.

    Attributes:
      paths: the parameters, as in the flat state of an unrolled model.
      names: the tensors.
      load: arrays of the tensors, in the order of ``names``, to arrays of the parameters in the
        order of ``paths``. It may transpose, reshape, cut and join, in whatever dtype comes in, and
        return views.
      save: the inverse of ``load``.
      copies: names under which a file may hold the first tensor once more, as tied heads; they must
        then be equal.
    """

    paths: tuple[Path, ...]
    names: tuple[str, ...]
    load: Callable[[Arrays], Arrays]
    save: Callable[[Arrays], Arrays]
    copies: tuple[str, ...] = ()


def block(layer: int, *rest: str | int) -> Path:
    """The path of a part of one layer, counted from the bottom of the model."""
    return ("stack", "leading", layer, *rest)


def _same(arrays: Arrays) -> Arrays:
    return list(arrays)


def _transposed(arrays: Arrays) -> Arrays:
    return [array.T for array in arrays]


def plain(path: Path, name: str, *, copies: Sequence[str] = ()) -> Rule:
    """A parameter that is a tensor: norm scales, biases, embeddings, decay rates."""
    return Rule((path,), (name,), _same, _same, tuple(copies))


def kernel(path: Path, name: str) -> Rule:
    """A projection [inputs, outputs] that is a tensor [outputs, inputs]."""
    return Rule((path,), (name,), _transposed, _transposed)


def linear(path: Path, name: str, *, bias: bool = False) -> list[Rule]:
    """The kernel of a `Linear` at a path, and its bias if it has one.

    Args:
      path: of the module.
      name: of the torch module: the tensors are ``name.weight`` and ``name.bias``.
      bias: whether there is one.
    """
    rules = [kernel((*path, "kernel"), f"{name}.weight")]
    return [*rules, plain((*path, "bias"), f"{name}.bias")] if bias else rules


def reshaped(path: Path, name: str, ours: Sequence[int], theirs: Sequence[int]) -> Rule:
    """A parameter of one shape that is a tensor of another, its elements in the same order."""
    return Rule(
        (path,),
        (name,),
        lambda arrays: [arrays[0].reshape(ours)],
        lambda arrays: [arrays[0].reshape(theirs)],
    )


def fused(
    paths: Sequence[Path], name: str, sizes: Sequence[int], *, transpose: bool = True, axis: int = 0
) -> Rule:
    """Parameters that lie one after another in one tensor.

    Args:
      paths: the parameters, in the order of the tensor.
      name: the tensor.
      sizes: of each part along the tensor's axis.
      transpose: whether each part is transposed, as kernels are; not for biases and norm scales.
      axis: of the tensor along which the parts lie.
    """
    turn = _transposed if transpose else _same
    ends = list(itertools.accumulate(sizes))

    def load(arrays: Arrays) -> Arrays:
        return turn(np.split(arrays[0], ends[:-1], axis))

    def save(arrays: Arrays) -> Arrays:
        return [np.concatenate(turn(arrays), axis)]

    return Rule(tuple(paths), (name,), load, save)


def fused_linear(
    paths: Sequence[Path], name: str, sizes: Sequence[int], *, bias: bool = False
) -> list[Rule]:
    """Several `Linear`s of the same input that are one torch module.

    Args:
      paths: of the modules, in the order of the outputs.
      name: of the torch module.
      sizes: outputs of each.
      bias: whether all of them have biases.
    """
    rules = [fused([(*path, "kernel") for path in paths], f"{name}.weight", sizes)]
    if bias:
        parts = [(*path, "bias") for path in paths]
        rules.append(fused(parts, f"{name}.bias", sizes, transpose=False))
    return rules


def convolution(
    paths: Sequence[Path], name: str, sizes: Sequence[int], *, bias: bool = True
) -> list[Rule]:
    """`ShortConvolution`s of neighbouring channels that are one depthwise torch ``Conv1d``.

    Args:
      paths: of the modules, in the order of the channels; one is enough.
      name: of the torch module.
      sizes: channels of each.
      bias: whether there are biases.
    """
    ends = list(itertools.accumulate(sizes))

    def load(arrays: Arrays) -> Arrays:
        return [part[:, 0].T for part in np.split(arrays[0], ends[:-1])]

    def save(arrays: Arrays) -> Arrays:
        return [np.concatenate([part.T[:, None] for part in arrays])]

    kernels = tuple((*path, "kernel") for path in paths)
    rules = [Rule(kernels, (f"{name}.weight",), load, save)]
    if bias:
        parts = [(*path, "bias") for path in paths]
        rules.append(fused(parts, f"{name}.bias", sizes, transpose=False))
    return rules


def experts(path: Path, names: Sequence[str]) -> Rule:
    """Kernels of experts [E, inputs, outputs] that are a tensor [outputs, inputs] each."""

    def load(arrays: Arrays) -> Arrays:
        return [np.stack([array.T for array in arrays])]

    def save(arrays: Arrays) -> Arrays:
        return [array.T for array in arrays[0]]

    return Rule((path,), tuple(names), load, save)


def fused_experts(paths: Sequence[Path], name: str, sizes: Sequence[int]) -> Rule:
    """Kernels of experts [E, inputs, size] that lie beside each other in [E, outputs, inputs]."""
    ends = list(itertools.accumulate(sizes))

    def load(arrays: Arrays) -> Arrays:
        return [part.swapaxes(1, 2) for part in np.split(arrays[0], ends[:-1], 1)]

    def save(arrays: Arrays) -> Arrays:
        return [np.concatenate([part.swapaxes(1, 2) for part in arrays], 1)]

    return Rule(tuple(paths), (name,), load, save)


def tensor_shapes(rule: Rule, shapes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Shapes of a rule's tensors, from those of its parameters."""
    # A byte without strides stands for each array, so that views of it take no memory.
    blank: Any = np.zeros((), np.int8)
    arrays = rule.save([np.broadcast_to(blank, tuple(shape)) for shape in shapes])
    return [array.shape for array in arrays]
