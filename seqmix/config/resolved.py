# SPDX-License-Identifier: Apache-2.0
"""Writes a built config as gin text, complete and in one canonical form."""

import enum
import math
from collections.abc import Mapping
from typing import Any

from seqmix.config import parse, registry
from seqmix.config.errors import ConfigError
from seqmix.config.source import allowed_imports, from_text

_WIDTH = 70  # of a value, so that the line with its name stays readable


def resolved(root: Any) -> str:
    """Returns the complete config of a built object, as gin text.

    Bindings are sorted by name, scope and parameter. Loading the text builds an equal object; this
    is checked before the text is returned. Configs that are equal in name but not in value are told
    apart by scopes: those they were built in, or, for an object made in plain Python, the name of
      the field that holds them.

    Args:
      root: An instance of a registered class.

    Raises:
      ConfigError: If a value has no gin form.
    """
    writer = _Writer()
    writer.place(root, scope="", hint="")
    text = writer.text()
    again = from_text(text, "<resolved config>").build(type(root))
    if again != root:
        changed = [
            f"{registry.gin_name(type(root))}.{field.name}"
            for field in registry.init_fields(type(root))
            if getattr(again, field.name) != getattr(root, field.name)
        ]
        raise ConfigError(f"the config does not survive being written as gin: {', '.join(changed)}")
    return text


class _Writer:
    def __init__(self) -> None:
        self._placed: dict[tuple[str, str], Any] = {}  # (name, scope) -> the config there
        self._lines: dict[tuple[str, str], dict[str, str]] = {}

    def place(self, config: Any, scope: str, hint: str, fixed: bool = False) -> str:
        """Writes the bindings of one config and returns its scope.

        Args:
          config: The config.
          scope: The scope of its parent; its own if `fixed`.
          hint: The name for a new scope, where another config has this name and scope.
          fixed: Whether the scope cannot be chosen, as for a derived child.
        """
        name = registry.gin_name(type(config))
        own = scope if fixed else getattr(config, registry.SCOPE, "") or scope
        count = 1
        while (other := self._placed.get((name, own))) is not None:
            if other == config:
                return own
            if fixed:
                path = parse.join(own, name)
                raise ConfigError(
                    f"two different configs are both {path}: gin cannot tell them apart"
                )
            own = "/".join(filter(None, [scope, hint if count == 1 else f"{hint}_{count}"]))
            count += 1
        self._placed[name, own] = config
        lines = self._lines[name, own] = {}
        children = self._children(config, own)
        for field in registry.init_fields(type(config)):
            if field.name not in children:
                value = getattr(config, field.name)
                label = f"{parse.join(own, name)}.{field.name}"
                lines[field.name] = self._value(value, own, field.name, label, 0)
        return own

    def text(self) -> str:
        """Returns the whole text."""
        imports = {
            type(config).__module__
            for config in self._placed.values()
            # What seqmix defines is there without an import; classes may move within it.
            if type(config).__module__.partition(".")[0] in allowed_imports()[1:]
        }
        parts = ["".join(f"import {module}\n" for module in sorted(imports))] if imports else []
        for (name, scope), values in sorted(self._lines.items()):
            path = parse.join(scope, name)
            lines = [
                f"{path}.{parameter} = {value}\n" for parameter, value in sorted(values.items())
            ]
            if lines:
                parts.append("".join(lines))
        return "\n".join(parts)

    def _children(self, config: Any, scope: str) -> set[str]:
        """Writes the derived children; returns the fields that hold them."""
        cls = type(config)
        values = {field.name: getattr(config, field.name) for field in registry.init_fields(cls)}
        children = registry.children(cls, values)
        for field in {child.field for child in children}:
            derived = {child.key for child in children if child.field == field}
            if surplus := sorted(set(values[field]) - derived):
                path = f"{registry.gin_name(cls)}.{field}"
                raise ConfigError(
                    f"{path} holds {surplus}, which the other parameters do not call for"
                )
        for child in children:
            own = "/".join(filter(None, [scope, child.scope]))
            self.place(values[child.field][child.key], own, child.key, fixed=True)
        fields = {child.field for child in children}
        if hasattr(cls, "gin_children"):
            # A mapping of children that is empty has no text: gin could not bind it later.
            fields |= {n for n, v in values.items() if isinstance(v, Mapping) and not v}
        return fields

    def _value(self, value: Any, scope: str, hint: str, path: str, indent: int) -> str:
        if registry.is_registered(type(value)):
            own = self.place(value, scope, hint)
            return str(parse.Reference(own, registry.gin_name(type(value)), called=True))
        if isinstance(value, enum.Enum):
            return self._value(value.value, scope, hint, path, indent)
        if isinstance(value, float):
            if math.isnan(value):
                raise ConfigError(f"{path} is nan, which gin cannot write")
            # gin has no name for infinity; a number past the largest float reads as it.
            return repr(value) if math.isfinite(value) else ("1e999" if value > 0 else "-1e999")
        if value is None or isinstance(value, bool | int | str | bytes):
            return repr(value)
        if isinstance(value, list | tuple):
            items = [
                self._value(v, scope, hint, f"{path}[{i}]", indent + 4) for i, v in enumerate(value)
            ]
            if isinstance(value, list):
                return _container("[", items, "]", indent)
            return f"({items[0]},)" if len(items) == 1 else _container("(", items, ")", indent)
        if isinstance(value, dict):
            items = [
                f"{self._value(k, scope, hint, path, indent + 4)}: "
                f"{self._value(v, scope, hint, f'{path}[{k!r}]', indent + 4)}"
                for k, v in value.items()
            ]
            return _container("{", items, "}", indent)
        kind = type(value).__qualname__
        raise ConfigError(
            f"{path} holds a {kind}, which gin cannot write: is its class configurable?"
        )


def _container(opening: str, items: list[str], closing: str, indent: int) -> str:
    line = f"{opening}{', '.join(items)}{closing}"
    if len(line) + indent <= _WIDTH and "\n" not in line:
        return line
    pad = " " * (indent + 4)
    return "\n".join([opening, *(f"{pad}{item}," for item in items), " " * indent + closing])
