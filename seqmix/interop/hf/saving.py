# SPDX-License-Identifier: Apache-2.0
"""A model of this framework as a folder of the Hugging Face layout."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from flax import nnx

from seqmix.interop.hf import families
from seqmix.interop.hf.checkpoint import CONFIG_FILE, some, write_json, write_tensors
from seqmix.interop.hf.family import Constants, Family
from seqmix.interop.hf.layout import differences
from seqmix.interop.hf.loading import family_of, read_config
from seqmix.interop.hf.origin import Origin
from seqmix.interop.hf.placement import parameter_shape, placement
from seqmix.interop.hf.rules import Path, Rule, tensor_shapes
from seqmix.interop.hf.tensor_file import DTYPES
from seqmix.models import HybridLM, HybridLMConfig

_SHARD_BYTES = 5_000_000_000
_CONTEXT = 2048


def save(
    model: HybridLM,
    folder: FilePath | str,
    *,
    family: str | None = None,
    origin: Origin | None = None,
    context: int | None = None,
    special_tokens: Mapping[str, int] | None = None,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Writes config.json and safetensors that `transformers` loads, one tensor in memory at a time.

    A model that `load` gave is written with the config.json, the tensor names and dtypes, and the
    tokenizer files that it came with. Any other is written as the first family that can express it.

    Args:
      model: the model.
      folder: created if missing; it must hold no model yet.
      family: the ``model_type`` to write; None for that of the origin, or the first that fits.
      origin: where the model came from; None for what `load` noted on it.
      context: ``max_position_embeddings`` of a config.json that is written anew.
      special_tokens: ``eos_token_id`` and the like of such a config.json.
      shard_bytes: greatest size of a file.

    Raises:
      ValueError: no family expresses the model, or the folder holds a model; names the settings
        that do not fit.
    """
    folder = FilePath(folder)
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be positive, got {shard_bytes}")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    origin = getattr(model, "origin", None) if origin is None else origin
    values, config, chosen = _describe(model.config, family, origin)
    if origin is None or values is not origin.config:
        values = _complete(values, model.config, context, special_tokens or {})
    if folder.is_dir():
        held = [p.name for p in folder.iterdir() if p.suffix == ".safetensors"]
        if held or (folder / CONFIG_FILE).exists():
            raise ValueError(f"{folder} holds a model already ({some(held or [CONFIG_FILE])})")
    folder.mkdir(parents=True, exist_ok=True)
    known = origin is not None and values is origin.config
    rules = chosen.rules_of(config, origin.shapes if known else {})
    constants = chosen.constants_of(config, values)
    if known:
        held = origin.constants
        constants = {name: functools.partial(held.get, name) for name in constants if name in held}
    dtypes = {} if origin is None else origin.dtypes
    _write(model, rules, constants, dtypes, folder, shard_bytes)
    if origin is not None:
        origin.save_companions(folder)
    # Last: a folder without it is no model, so that one that was cut short is not taken for one.
    write_json(folder / CONFIG_FILE, values)


def _describe(
    config: HybridLMConfig, name: str | None, origin: Origin | None
) -> tuple[dict[str, Any], HybridLMConfig, Family]:
    """A config.json, the model that it makes, and the family."""
    if origin is not None and name in (None, origin.config["model_type"]):
        again = read_config(origin.config)
        if not differences(config, again):
            return origin.config, again, family_of(origin.config)
        name = origin.config["model_type"]
    candidates = families.families().values() if name is None else [families.get(name)]
    reasons = []
    for family in candidates:
        try:
            values, again = _express(config, family)
            return values, again, family
        except ValueError as error:
            reasons.append(f"{family.name}: {error}")
    where = "any family" if name is None else name
    raise ValueError(f"this model has no form in {where}: {' | '.join(reasons)}")


def _express(config: HybridLMConfig, family: Family) -> tuple[dict[str, Any], HybridLMConfig]:
    """A config.json of the family, and the model that it makes.

    Raises:
      ValueError: that model is another one; names the settings.
    """
    values = family.from_config(config)
    common = {
        "model_type": family.name,
        "architectures": [family.architectures[0]],
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "tie_word_embeddings": config.tied,
    }
    values = common | values
    again = read_config(values)
    if faults := differences(config, again):
        raise ValueError(f"settings (here, there) differ: {some(faults, '; ')}")
    return values, again


def _complete(
    values: Mapping[str, Any],
    config: HybridLMConfig,
    context: int | None,
    special_tokens: Mapping[str, int],
) -> dict[str, Any]:
    """A config.json with the keys that describe no computation."""
    # Null, where a family's own default may lie outside the vocabulary.
    tokens = {f"{kind}_token_id": None for kind in ("bos", "eos", "pad")}
    rope = values.get("rope_parameters") or {}
    # Scaled positions are for so many tokens, even where the run had shorter rows.
    scaled = rope.get("original_max_position_embeddings", 0) * rope.get("factor", 1)
    longest = max(context or _CONTEXT, int(scaled))
    extra = {"max_position_embeddings": longest, "dtype": config.param_dtype}
    return extra | tokens | dict(special_tokens) | dict(values)


def _write(
    model: HybridLM,
    rules: list[Rule],
    constants: Constants,
    dtypes: Mapping[str, str],
    folder: FilePath,
    shard_bytes: int,
) -> None:
    flat = dict(nnx.to_flat_state(nnx.state(model)))
    place = placement(model.config)
    tensors: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for rule in rules:
        places = [place(path) for path in rule.paths]
        shapes = tensor_shapes(rule, [parameter_shape(p, flat) for p in places])
        own = np.dtype(flat[places[0].path].dtype)
        for name, shape in zip(rule.names, shapes, strict=True):
            tensors[name] = (DTYPES[dtypes[name]] if name in dtypes else own), shape
        for name in rule.copies:
            if name in dtypes:
                tensors[name] = DTYPES[dtypes[name]], shapes[0]
    tensors |= {n: ((array := compute()).dtype, array.shape) for n, compute in constants.items()}

    def get(path: Path) -> np.ndarray:
        where = place(path)
        array = flat[where.path][...]
        return np.asarray(array if where.period is None else array[where.period])

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        for rule in rules:
            found = rule.save([get(path) for path in rule.paths])
            for name, array in zip(rule.names, found, strict=True):
                yield name, array.astype(tensors[name][0], copy=False)
            for name in rule.copies:
                if name in tensors:
                    yield name, found[0].astype(tensors[name][0], copy=False)
        for name, compute in constants.items():
            yield name, compute()

    write_tensors(folder, tensors, arrays(), shard_bytes)
