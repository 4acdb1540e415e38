# SPDX-License-Identifier: Apache-2.0
"""Stacked (scanned) and unstacked (unrolled) parameters, converted exactly both ways."""

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from seqmix.models.config import HybridLMConfig
from seqmix.models.language_model import HybridLM
from seqmix.models.pattern import Plan

Path = tuple[Any, ...]


def unstack_paths(flat: Mapping[Path, Any], config: HybridLMConfig) -> dict[Path, Any]:
    """Converts flat parameters of a scanned model to those of the unrolled one.

    Args:
      flat: arrays or Variables by path, from ``nnx.to_flat_state``. Only paths with
        ('stack', 'leading' | 'periods' | 'trailing', index) in them change, so the moments of an
        optimizer convert as well.
      config: of the model, scanned or not.

    Returns:
      The same with every layer under ('stack', 'leading', layer).
    """
    plan = config.plan()
    length, first = len(plan.period), len(plan.leading)
    result: dict[Path, Any] = {}
    for path, leaf in flat.items():
        split = _split(path)
        if split is None or split[1] == "leading":
            result[path] = leaf
            continue
        before, part, index, after = split
        if part == "trailing":
            result[*before, "leading", first + length * plan.periods + index, *after] = leaf
            continue
        for period in range(plan.periods):
            target = (*before, "leading", first + length * period + index, *after)
            result[target] = _apply(operator.itemgetter(period), leaf)
    return result


def scanned_place(plan: Plan, layer: int) -> tuple[str, int, int | None]:
    """Where a layer of the unrolled model is in the scanned one.

    Returns:
      The list of `Stack` ('leading', 'periods' or 'trailing'), the index in it, and for 'periods'
      the period, which is the index on the first axis of its arrays, else None.
    """
    length, first = len(plan.period), len(plan.leading)
    if layer < first:
        return "leading", layer, None
    period, index = divmod(layer - first, length)
    if period < plan.periods:
        return "periods", index, period
    return "trailing", layer - first - length * plan.periods, None


def stack_paths(flat: Mapping[Path, Any], config: HybridLMConfig) -> dict[Path, Any]:
    """Converts flat parameters of an unrolled model to those of the scanned one.

    The inverse of `unstack_paths`, same arguments.

    Raises:
      ValueError: a period lacks a parameter that another has.
    """
    plan = config.plan()
    result: dict[Path, Any] = {}
    groups: dict[Path, dict[int, Any]] = {}
    for path, leaf in flat.items():
        split = _split(path)
        if split is None:
            result[path] = leaf
            continue
        before, _, layer, after = split
        part, index, period = scanned_place(plan, layer)
        target = (*before, part, index, *after)
        if period is None:
            result[target] = leaf
        else:
            groups.setdefault(target, {})[period] = leaf
    for path, leaves in groups.items():
        if len(leaves) != plan.periods:
            raise ValueError(
                f"parameter {path} is in {len(leaves)} of {plan.periods} periods; "
                f"is this the model of pattern {config.pattern!r}?"
            )
        result[path] = _apply(
            lambda *arrays: jnp.stack(arrays), *(leaves[period] for period in range(plan.periods))
        )
    return result


def unstack(model: HybridLM) -> HybridLM:
    """The unrolled model with the parameters of a scanned one (itself if it is unrolled)."""
    return _convert(model, unstack_paths, scan=False)


def stack(model: HybridLM) -> HybridLM:
    """The scanned model with the parameters of an unrolled one (itself if it is scanned)."""
    return _convert(model, stack_paths, scan=True)


def _convert(model: HybridLM, convert: Any, *, scan: bool) -> HybridLM:
    if model.config.scan == scan:
        return model
    config = dataclasses.replace(model.config, scan=scan)
    target = nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0)))
    flat = convert(dict(nnx.to_flat_state(nnx.state(model))), config)
    return nnx.merge(nnx.graphdef(target), nnx.from_flat_state(flat))


def _split(path: Path) -> tuple[Path, str, int, Path] | None:
    """(path up to 'stack', part, index, rest) of a parameter inside the stack, else None."""
    for at, key in enumerate(path[:-2]):
        if key == "stack" and path[at + 1] in ("leading", "periods", "trailing"):
            return path[: at + 1], path[at + 1], int(path[at + 2]), path[at + 3 :]
    return None


def _apply(function: Any, *leaves: Any) -> Any:
    """Applies a function of arrays to arrays or Variables; a Variable stays one."""
    if not isinstance(leaves[0], nnx.Variable):
        return function(*leaves)
    return leaves[0].replace(function(*(leaf[...] for leaf in leaves)))
