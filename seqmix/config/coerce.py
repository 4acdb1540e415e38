# SPDX-License-Identifier: Apache-2.0
"""Checks a value against an annotation and brings it to its canonical type.

typeguard decides; this module goes through containers and unions before it, so that gin's lists
become tuples, an int becomes a float where a float is asked for, and a bool never passes for a
number.
"""

import collections.abc
import enum
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

import typeguard

from seqmix.config.errors import suggestion

_SEQUENCES = (
    tuple,
    collections.abc.Sequence,
    collections.abc.Collection,
    collections.abc.Iterable,
)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


class Mismatch(Exception):
    """A value that its annotation does not allow; `message` includes the path into a container."""

    def __init__(self, path: str, message: str):
        super().__init__(f"{path}: {message}")
        self.path = path
        self.message = message


def coerce(value: Any, annotation: Any, path: str, describe: Callable[[type], str]) -> Any:
    """Returns `value` as the annotation wants it.

    Args:
      value: The value, from gin or from plain Python.
      annotation: A resolved annotation (no strings in it).
      path: Name of the value in messages, such as ``HybridLM.layers``.
      describe: Gives the name of a class in messages.

    Raises:
      Mismatch: If the annotation does not allow the value.
    """
    if isinstance(annotation, typing.TypeAliasType):
        return coerce(value, annotation.__value__, path, describe)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return coerce(value, arguments[0], path, describe)
    if origin in (typing.Union, types.UnionType):
        return _union(value, annotation, path, describe)
    if origin is Literal:
        return _choice(value, {argument: argument for argument in arguments}, path)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        if isinstance(value, annotation):
            return value
        return _choice(value, {member.value: member for member in annotation}, path)
    kind = origin or annotation
    if kind in _SEQUENCES or kind is list:
        return _sequence(value, annotation, path, describe)
    if kind in _MAPPINGS and isinstance(value, Mapping):
        key_type, item_type = arguments or (Any, Any)
        return {
            coerce(key, key_type, f"{path} key", describe): coerce(
                item, item_type, f"{path}[{key!r}]", describe
            )
            for key, item in value.items()
        }
    if annotation in (int, float, complex) and isinstance(value, bool):
        raise _mismatch(value, annotation, path, describe)
    if annotation is float and isinstance(value, int):
        return float(value)
    try:
        value = typeguard.check_type(
            value,
            annotation,
            collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS,
        )
    except typeguard.TypeCheckError as error:
        raise _mismatch(value, annotation, path, describe) from error
    if annotation in (int, float, str) and type(value) is not annotation:
        # A NumPy scalar or an enum member would neither print nor compare as the plain value does.
        return annotation(value.value if isinstance(value, enum.Enum) else value)
    return value


def type_name(annotation: Any, describe: Callable[[type], str]) -> str:
    """Returns the annotation as messages show it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is None or annotation is type(None):
        return "None"
    if annotation is Ellipsis:
        return "..."
    if isinstance(annotation, typing.TypeAliasType):
        return type_name(annotation.__value__, describe)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    names = [type_name(argument, describe) for argument in arguments]
    if origin is typing.Annotated:
        return names[0]
    if origin in (typing.Union, types.UnionType):
        return " | ".join(names)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(names)}]"
    return describe(annotation) if isinstance(annotation, type) else str(annotation)


def _mismatch(value: Any, annotation: Any, path: str, describe: Callable[[type], str]) -> Mismatch:
    expected = type_name(annotation, describe)
    kind = describe(type(value))
    came = "None" if value is None else f"{kind} {_short(value)}"
    return Mismatch(path, f"expected {expected}, got {came}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _choice(value: Any, choices: Mapping[Any, Any], path: str) -> Any:
    for choice, result in choices.items():
        # By type as well: 1 == True == 1.0.
        if type(choice) is type(value) and choice == value:
            return result
    names = ", ".join(map(repr, choices))
    near = ""
    if isinstance(value, str):
        near = suggestion(value, [choice for choice in choices if isinstance(choice, str)])
    raise Mismatch(path, f"expected one of {names}, got {_short(value)}{near}")


def _union(value: Any, annotation: Any, path: str, describe: Callable[[type], str]) -> Any:
    results, failures = [], []
    for member in typing.get_args(annotation):
        try:
            results.append(coerce(value, member, path, describe))
        except Mismatch as failure:
            failures.append(failure)
    for (
        result
    ) in results:  # a member that takes the value as it is goes first: 3 stays int in int | float
        if type(result) is type(value):
            return result
    if results:
        return results[0]
    deeper = [failure for failure in failures if failure.path != path]
    if len(deeper) == 1:  # one member has the right container: say which item is wrong
        raise deeper[0]
    literals = [m for m in typing.get_args(annotation) if typing.get_origin(m) is Literal]
    if len(literals) == 1 and isinstance(value, str):
        choices = {argument: argument for argument in typing.get_args(literals[0])}
        _choice(
            value,
            choices | ({None: None} if type(None) in typing.get_args(annotation) else {}),
            path,
        )
    raise _mismatch(value, annotation, path, describe)


def _sequence(value: Any, annotation: Any, path: str, describe: Callable[[type], str]) -> Any:
    kind, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    # A string is a Sequence[str] to Python and never meant as one in a config.
    if not isinstance(value, list | tuple):
        raise _mismatch(value, annotation, path, describe)
    if kind is tuple and arguments and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        if len(value) != len(arguments):
            raise _mismatch(value, annotation, path, describe)
        item_types = arguments
    else:
        item_types = (arguments[0] if arguments else Any,) * len(value)
    items = [
        coerce(item, item_type, f"{path}[{index}]", describe)
        for index, (item, item_type) in enumerate(zip(value, item_types, strict=True))
    ]
    return items if kind is list else tuple(items)
