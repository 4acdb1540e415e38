# SPDX-License-Identifier: Apache-2.0
"""Projections that take turns in one tensor, head by head."""

import itertools
from collections.abc import Sequence

import numpy as np

from seqmix.interop.hf.rules import Arrays, Path, Rule


def interleaved(
    paths: Sequence[Path], name: str, groups: int, sizes: Sequence[int], *, transpose: bool = True
) -> Rule:
    """Parameters of which a tensor holds one group each, then the next group of each, and so on.

    Args:
      paths: the parameters, in their order within a group.
      name: the tensor, [groups * sum(sizes), ...].
      groups: number of groups, such as heads.
      sizes: outputs of each parameter in one group.
      transpose: whether the parameters are transposed, as kernels are; not for biases.
    """
    ends = list(itertools.accumulate(sizes))

    def load(arrays: Arrays) -> Arrays:
        whole = arrays[0].reshape(groups, ends[-1], *arrays[0].shape[1:])
        parts = np.split(whole, ends[:-1], 1)
        parts = [part.reshape(-1, *part.shape[2:]) for part in parts]
        return [part.T for part in parts] if transpose else parts

    def save(arrays: Arrays) -> Arrays:
        parts = [array.T for array in arrays] if transpose else arrays
        parts = [
            part.reshape(groups, size, *part.shape[1:])
            for part, size in zip(parts, sizes, strict=True)
        ]
        whole = np.concatenate(parts, 1)
        return [whole.reshape(-1, *whole.shape[2:])]

    return Rule(tuple(paths), (name,), load, save)


def interleaved_linear(
    paths: Sequence[Path], name: str, groups: int, sizes: Sequence[int], *, bias: bool = False
) -> list[Rule]:
    """`Linear`s of the same input that are one torch module, interleaved by groups.

    Args:
      paths: of the modules.
      name: of the torch module.
      groups, sizes: of `interleaved`.
      bias: whether all of them have biases.
    """
    rules = [interleaved([(*path, "kernel") for path in paths], f"{name}.weight", groups, sizes)]
    if bias:
        parts = [(*path, "bias") for path in paths]
        rules.append(interleaved(parts, f"{name}.bias", groups, sizes, transpose=False))
    return rules
