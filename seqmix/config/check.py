# SPDX-License-Identifier: Apache-2.0
"""Checks the names in a source before a build, and that everything was used after it."""

from collections.abc import Iterable, Iterator, Mapping

from seqmix.config import parse, registry
from seqmix.config.errors import ConfigError, Location, raise_all, suggestion


def check_names(statements: Iterable[parse.Statement], macros: Mapping[str, parse.Binding]) -> None:
    """Checks the names in all statements, in replaced bindings too.

    Raises:
      ConfigError: For unknown configurables, parameters and macros, all in one message.
    """
    errors: dict[str, ConfigError] = {}  # by name, so that a name is reported where it first stands
    for statement in statements:
        if isinstance(statement, parse.Binding | parse.Block):
            for thing, error in _wrong_names(statement, macros):
                errors.setdefault(thing, error)
    raise_all(errors.values())


def check_used(
    statements: Iterable[parse.Statement],
    bindings: Mapping[tuple[str, str, str], parse.Binding],
    macros: Mapping[str, parse.Binding],
    used: set[tuple[str, str]],
) -> None:
    """Checks that builds used every binding, scope and macro.

    A macro that only a replaced binding refers to counts as used, and so does an unscoped binding
    that scoped ones replace wherever its config is built.

    Args:
      statements: All statements, the replaced too.
      bindings: The bindings that hold, by scope, name and parameter.
      macros: By name.
      used: The (scope, name) of the bindings that the builds asked for.

    Raises:
      ConfigError: Names all that were not used.
    """
    errors = []
    mentioned = {
        item.name
        for statement in statements
        if isinstance(statement, parse.Binding)
        for item in parse.references(statement.value)
        if isinstance(item, parse.Macro)
    }
    for name, macro in macros.items():
        if name not in mentioned:
            message = (
                f"unused macro {name!r}: nothing refers to %{name}{suggestion(name, mentioned)}"
            )
            errors.append(ConfigError(message, macro.location))
    names = {name for _, name in used}
    scopes = {scope for scope, _ in used if scope}
    for binding in bindings.values():
        scope, name = binding.scope, binding.name
        if (scope, name) in used:
            continue
        if scope and scope not in scopes:
            message = f"unknown scope {scope!r} in {binding.path}"
            message += suggestion(scope, scopes) or _listing("scopes in use", scopes)
        elif scope:
            message = f"unused binding {binding.path}: no {name} is built in scope {scope!r}"
        else:
            message = f"unused binding {binding.path}: no {name} is part of this config"
            message += _listing("in use", names)
        errors.append(ConfigError(message, binding.location))
    raise_all(errors)


def _wrong_names(
    statement: parse.Binding | parse.Block, macros: Mapping[str, parse.Binding]
) -> Iterator[tuple[str, ConfigError]]:
    if isinstance(statement, parse.Block):
        yield from _wrong_class(statement.name, statement.location)
        return
    location = statement.location
    if statement.parameter:
        yield from _wrong_class(statement.name, location)
        cls = registry.find(statement.name)
        parameters = [field.name for field in registry.init_fields(cls)] if cls else []
        if cls and statement.parameter not in parameters:
            message = f"{statement.name} has no parameter {statement.parameter!r}"
            near = suggestion(statement.parameter, parameters)
            message += near or f"; it has {', '.join(parameters) or 'none'}"
            yield f"{statement.name}.{statement.parameter}", ConfigError(message, location)
    for item in parse.references(statement.value):
        if isinstance(item, parse.Reference):
            yield from _wrong_class(item.name, location)
            if not item.called:
                message = f"{item} is a class; to build a config write {item}()"
                yield f"{location} {item}", ConfigError(message, location)
        elif item.name not in macros:
            message = f"unknown macro {item}{suggestion(item.name, macros)}"
            yield str(item), ConfigError(message, location)


def _wrong_class(name: str, location: Location) -> Iterator[tuple[str, ConfigError]]:
    if registry.find(name) is None:
        near = suggestion(name.rpartition(".")[2], registry.names())
        yield name, ConfigError(f"unknown configurable {name!r}{near}", location)


def _listing(head: str, names: set[str]) -> str:
    return f"; {head}: {', '.join(sorted(names))}" if names else ""
