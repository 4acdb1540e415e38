# SPDX-License-Identifier: Apache-2.0
"""Builds configs from bindings.

Scopes are gin's: what is built in scope ``a/b`` takes the bindings without a scope, replaced by
those of ``a``, replaced by those of ``a/b``. A config inside another is built in the scope of that
one, unless the reference to it (``@scope/Name()``) names its own.
"""

import contextlib
import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from seqmix.config import parse, registry
from seqmix.config.errors import ConfigError, Location


def prefixes(scope: str) -> list[str]:
    """Returns the scopes whose bindings hold in `scope`: ``["", "a", "a/b"]`` for ``"a/b"``."""
    parts = scope.split("/") if scope else []
    return ["/".join(parts[:count]) for count in range(len(parts) + 1)]


class Builder:
    """One build of a root."""

    def __init__(
        self,
        bindings: Mapping[tuple[str, str, str], parse.Binding],
        macros: Mapping[str, parse.Binding],
        used: set[tuple[str, str]],
    ):
        """Prepares a build.

        Args:
          bindings: By scope, name and parameter.
          macros: By name.
          used: Gets the (scope, name) of all bindings that the build asks for.
        """
        self._bindings = bindings
        self._macros = macros
        self._used = used
        self._open: list[tuple[type, str]] = []  # what is being built, outermost first

    def build(
        self,
        cls: type,
        scope: str = "",
        base: Any = None,
        asked_at: Location | None = None,
    ) -> Any:
        """Builds one config in a scope.

        Args:
          cls: A registered class.
          scope: The scope.
          base: An instance whose constructor arguments stand where there is no binding.
          asked_at: The place of the reference to it, for errors.

        Raises:
          ConfigError: As `Source.build`.
        """
        name = registry.gin_name(cls)
        if (cls, scope) in self._open:
            chain = [parse.join(s, registry.gin_name(c)) for c, s in self._open]
            chain = " -> ".join([*chain[self._open.index((cls, scope)) :], parse.join(scope, name)])
            raise ConfigError(f"a config that contains itself: {chain}", asked_at)
        self._open.append((cls, scope))
        bindings: dict[str, parse.Binding] = {}
        for part in prefixes(scope):
            self._used.add((part, name))
            for field in registry.init_fields(cls):
                if binding := self._bindings.get((part, name, field.name)):
                    bindings[field.name] = binding
        values = {}
        for field in registry.init_fields(cls):
            value = self._field(cls, field, scope, bindings.get(field.name), base, asked_at)
            values[field.name] = value
        with _located(name, bindings, asked_at):
            children = registry.children(cls, values)
        self._children(children, scope, bindings, values, asked_at)
        with _located(name, bindings, asked_at):
            built = cls(**values)
        object.__setattr__(built, registry.SCOPE, scope)
        self._open.pop()
        return built

    def _field(
        self,
        cls: type,
        field: dataclasses.Field,
        scope: str,
        binding: parse.Binding | None,
        base: Any,
        asked_at: Location | None,
    ) -> Any:
        if binding is not None:
            value = self._resolve(binding.value, scope, binding.location, ())
            try:
                return registry.check_field(cls, field.name, value)
            except ConfigError as error:
                raise ConfigError(error.message, binding.location) from None
        given = getattr(base, registry.GIVEN, {})
        if field.name in given:
            value = given[field.name]
            if isinstance(value, Mapping) and hasattr(cls, "gin_children"):
                return value  # children, each built in its own scope once all values are there
            return self._rebuild(value, scope, asked_at)
        if registry.is_registered(field.default_factory):
            return self.build(field.default_factory, scope, asked_at=asked_at)
        default = registry.field_default(field)
        if default is not dataclasses.MISSING:
            return self._rebuild(default, scope, asked_at)
        annotation = registry.field_types(cls)[field.name]
        if registry.is_registered(annotation):
            return self.build(annotation, scope, asked_at=asked_at)
        path = parse.join(scope, f"{registry.gin_name(cls)}.{field.name}")
        members = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else ()
        choices = [f"@{registry.gin_name(m)}()" for m in members if registry.is_registered(m)]
        example = choices[0] if choices else "..."
        raise ConfigError(f"{path} has no value and no default; bind {path} = {example}", asked_at)

    def _children(
        self,
        children: list[registry.Child],
        scope: str,
        bindings: Mapping[str, parse.Binding],
        values: dict[str, Any],
        asked_at: Location | None,
    ) -> None:
        """Builds the children and puts them into the values of their parent."""
        derived: dict[str, dict[str, Any]] = {}
        for child in children:
            if binding := bindings.get(child.field):
                raise ConfigError(
                    f"{binding.path} is derived and cannot be bound; bind the parameters of "
                    f"{parse.join(child.scope, registry.gin_name(child.config))} instead",
                    binding.location,
                )
            base = (values.get(child.field) or {}).get(child.key)
            built = self.build(
                child.config,
                "/".join(filter(None, [scope, child.scope])),
                base if type(base) is child.config else None,
                asked_at,
            )
            derived.setdefault(child.field, {})[child.key] = built
        values.update(derived)

    def _rebuild(self, value: Any, scope: str, asked_at: Location | None) -> Any:
        """Returns a default with the configs in it built again, so that bindings reach them."""
        if registry.is_registered(type(value)):
            return self.build(type(value), scope, value, asked_at)
        if type(value) in (list, tuple):
            return type(value)(self._rebuild(item, scope, asked_at) for item in value)
        if type(value) is dict:
            return {key: self._rebuild(item, scope, asked_at) for key, item in value.items()}
        return value

    def _resolve(self, value: Any, scope: str, location: Location, open_macros: tuple) -> Any:
        """Returns a bound value with references built and macros replaced."""
        if isinstance(value, parse.Reference):
            # `check.check_names` has made sure of the name and the parentheses.
            return self.build(registry.find(value.name), value.scope or scope, asked_at=location)
        if isinstance(value, parse.Macro):
            if value.name in open_macros:
                chain = " -> ".join(f"%{name}" for name in (*open_macros, value.name))
                raise ConfigError(f"a macro that contains itself: {chain}", location)
            macro = self._macros[value.name]
            return self._resolve(macro.value, scope, location, (*open_macros, value.name))
        if isinstance(value, list | tuple):
            return type(value)(self._resolve(v, scope, location, open_macros) for v in value)
        if isinstance(value, dict):
            return {
                self._resolve(k, scope, location, open_macros): self._resolve(
                    v, scope, location, open_macros
                )
                for k, v in value.items()
            }
        return value


@contextlib.contextmanager
def _located(
    name: str, bindings: Mapping[str, parse.Binding], asked_at: Location | None
) -> Iterator[None]:
    """Gives an error that a class raises on its values the place of its bindings."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if isinstance(error, ConfigError) and error.location is not None:
            raise
        message = str(error)
        if name not in message:
            message = f"{name}: {message}"
        at_fault = _at_fault(message, bindings)
        places = [f"{parameter} at {binding.location}" for parameter, binding in bindings.items()]
        if len(places) > (1 if at_fault else 0):
            message += f" ({name} is bound here: {', '.join(places)})"
        first = next(iter(bindings.values())).location if bindings else asked_at
        raise ConfigError(message, at_fault or first) from error


def _at_fault(message: str, bindings: Mapping[str, parse.Binding]) -> Location | None:
    """Returns the place of the binding that a class's message is about.

    That is the one whose parameter the message names first, or else one whose value holds a text
    that the message quotes.
    """
    named = {
        match.start(): binding
        for parameter, binding in bindings.items()
        if (match := re.search(rf"\b{parameter}\b", message))
    }
    if named:
        return named[min(named)].location
    for quoted in re.findall(r"'([^']+)'", message):
        for binding in bindings.values():
            if isinstance(binding.value, str) and quoted in binding.value:
                return binding.location
    return None
