# SPDX-License-Identifier: Apache-2.0
"""A published checkpoint as a model of this framework."""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from seqmix.interop.hf import families
from seqmix.interop.hf.checkpoint import Checkpoint, some
from seqmix.interop.hf.family import Constants, Family
from seqmix.interop.hf.keys import Keys
from seqmix.interop.hf.origin import Origin
from seqmix.interop.hf.placement import Slots, abstract_state, parameter_shape, placement
from seqmix.interop.hf.rules import Rule, tensor_shapes
from seqmix.models import HybridLM, HybridLMConfig


def load(folder: FilePath | str, *, dtype: Any = None, scan: bool = True) -> HybridLM:
    """Loads a folder of the Hugging Face layout.

    Tensors are read one at a time into the arrays that the model keeps, so that the memory in use
    peaks at little more than one copy of the model. Nothing in the folder is executed.

    Args:
      folder: holds config.json and model.safetensors, or several files with an index.
      dtype: of computing and of the parameters (those that are always float32 aside):
        'float32', 'bfloat16' or a jnp dtype of these; None for bfloat16 where most of the
        checkpoint is, else float32.
      scan: stack the layers; see `HybridLMConfig.scan`.

    Returns:
      The model. `save` gives its tensors back in the dtypes that they had.

    Raises:
      FileNotFoundError: no such folder, or no config.json in it.
      ValueError: a family or a setting that is not supported, no safetensors, a damaged file, or
        tensors that are unknown, missing or of another shape; names them.
    """
    checkpoint = Checkpoint(folder)
    family = family_of(checkpoint.config)
    layers = checkpoint.config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(checkpoint.entries):
        # Each has tensors of its own; without this check a huge number would be laid out first.
        raise ValueError(
            f"{checkpoint.folder}: config.json: num_hidden_layers = {layers}, more than the "
            f"{len(checkpoint.entries)} tensors of the files"
        )
    config = dataclasses.replace(
        read_config(checkpoint.config), scan=scan, **dtypes(checkpoint, dtype)
    )
    graph, flat = abstract_state(config)
    rules = family.rules_of(config, checkpoint.shapes())
    shapes = _parameter_shapes(config, flat, rules)
    constants = family.constants_of(config, checkpoint.config)
    _check(checkpoint, family, rules, shapes, constants)

    slots = Slots(config, flat)
    place = placement(config)

    def key(rule: Rule) -> tuple[int, str]:
        """The largest first: while they are read, there is little else; and a stack together."""
        largest = max(checkpoint.size(name) for name in rule.names)
        return -largest, str(place(rule.paths[0]).path)

    for rule in sorted(rules, key=key):
        arrays = [checkpoint.read(name) for name in rule.names]
        _check_copies(checkpoint, rule, arrays[0])
        for path, array in zip(rule.paths, rule.load(arrays), strict=True):
            slots.put(path, array)
        del arrays, array
    slots.fill(config, [path for path in flat if path not in slots.arrays])
    state = {path: like.replace(slots.arrays[path]) for path, like in flat.items()}
    model = nnx.merge(graph, nnx.from_flat_state(state))
    model.origin = Origin.of(checkpoint, _read_constants(checkpoint, constants))
    return model


def family_of(values: Mapping[str, Any]) -> Family:
    """The family of a config.json.

    Raises:
      ValueError: it is not known, or the architecture is not one with a language model's head.
    """
    name = values.get("model_type")
    known = families.families()
    if not isinstance(name, str) or name not in known:
        raise ValueError(
            f"config.json: model_type = {name!r} is not supported; supported: {', '.join(known)}"
        )
    family = known[name]
    architectures = values.get("architectures") or family.architectures
    listed = isinstance(architectures, list | tuple)
    if not listed or not any(one in family.architectures for one in architectures):
        raise ValueError(
            f"config.json: architectures = {architectures!r} is not supported for the family "
            f"{name}; supported: {', '.join(family.architectures)}"
        )
    return family


def read_config(values: Mapping[str, Any]) -> HybridLMConfig:
    """The model of a config.json, in the default dtypes.

    Raises:
      ValueError: what `family_of` raises, or a value that is not supported; names key and value.
    """
    family = family_of(values)
    keys = Keys(values, family.name, family.inert)
    config = family.to_config(keys)
    keys.finish()
    return config


def dtypes(checkpoint: Checkpoint, dtype: Any) -> dict[str, str]:
    """The dtype fields of a config, for an argument ``dtype`` of `load`.

    Raises:
      ValueError: another dtype than float32 and bfloat16.
    """
    if dtype is None:
        sizes: Counter[str] = Counter()
        for _, entry in checkpoint.entries.values():
            sizes[entry.dtype] += entry.size
        dtype = "bfloat16" if sizes.most_common(1)[0][0] == "BF16" else "float32"
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be float32 or bfloat16, got {name}")
    return {"dtype": name, "param_dtype": name}


def _parameter_shapes(
    config: HybridLMConfig, flat: Mapping[Any, Any], rules: Sequence[Rule]
) -> list[list[tuple[int, ...]]]:
    """Shapes of the parameters of each rule; checks that every parameter is in one rule."""
    place = placement(config)
    counts: Counter[Any] = Counter()
    shapes = []
    for rule in rules:
        places = [place(path) for path in rule.paths]
        if strange := [p.path for p in places if p.path not in flat]:
            raise AssertionError(f"a rule of {rule.names} names {strange}, which is no parameter")
        counts.update(p.path for p in places)
        shapes.append([parameter_shape(p, flat) for p in places])
    periods = config.plan().periods
    for path, variable in flat.items():
        stacked = path[:2] == ("stack", "periods")
        expected = periods if stacked else 1
        held = counts[path]
        if held != expected and (held or isinstance(variable, nnx.Param)):
            raise AssertionError(f"{path} is in {held} rules, {expected} are expected")
    return shapes


def _check(
    checkpoint: Checkpoint,
    family: Family,
    rules: Sequence[Rule],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    constants: Constants,
) -> None:
    """Raises ValueError unless the files hold the tensors of the rules, and no others."""
    expected: dict[str, tuple[int, ...]] = {}
    copies: set[str] = set()
    for rule, own in zip(rules, shapes, strict=True):
        expected |= zip(rule.names, tensor_shapes(rule, own), strict=True)
        copies.update(rule.copies)
    ignored = [re.compile(pattern) for pattern in family.ignored]
    unknown = [
        name
        for name in checkpoint.entries
        if name not in expected
        and name not in copies
        and name not in constants
        and not any(pattern.fullmatch(name) for pattern in ignored)
    ]
    missing = [name for name in expected if name not in checkpoint.entries]
    wrong = [
        f"{name} has shape {list(checkpoint.shape(name))}, {list(shape)} is expected"
        for name, shape in expected.items()
        if name in checkpoint.entries and checkpoint.shape(name) != shape
    ]
    faults = [
        f"{what}: {some(names)}"
        for what, names in (
            ("unknown tensors", sorted(unknown)),
            ("missing tensors", missing),
            ("tensors of another shape", wrong),
        )
        if names
    ]
    if faults:
        raise ValueError(f"{checkpoint.folder}, family {family.name}: {'; '.join(faults)}")


def _read_constants(checkpoint: Checkpoint, constants: Constants) -> dict[str, np.ndarray]:
    """The constants that the files hold.

    Raises:
      ValueError: one is not what follows from the config.
    """
    found = {}
    for name, compute in constants.items():
        if name not in checkpoint.entries:
            continue
        array, wanted = checkpoint.read(name), compute()
        # Exponentials differ by a few roundings between libraries.
        tolerance = 1e-5 if array.dtype == np.float32 else 1e-2
        given = array.astype(np.float32)
        if array.shape != wanted.shape or not np.allclose(given, wanted, tolerance, tolerance):
            raise ValueError(
                f"{checkpoint.folder}: {name} is no parameter, and does not hold the numbers that "
                "follow from config.json"
            )
        found[name] = array
    return found


def _check_copies(checkpoint: Checkpoint, rule: Rule, array: np.ndarray) -> None:
    for name in rule.copies:
        if name not in checkpoint.entries:
            continue
        copy = checkpoint.read(name)
        if copy.shape != array.shape or not np.array_equal(
            copy.view(np.uint8), array.view(np.uint8)
        ):
            raise ValueError(
                f"{checkpoint.folder}: {name} differs from {rule.names[0]}, to which config.json "
                "ties it"
            )
