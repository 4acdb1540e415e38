# SPDX-License-Identifier: Apache-2.0
"""Statements of a gin text, read by gin-config's parser, with their places."""

import dataclasses
import re
import tokenize
from collections.abc import Iterator
from typing import Any

from gin import config_parser

from seqmix.config.errors import ConfigError, Location


@dataclasses.dataclass(frozen=True)
class Reference:
    """``@scope/Name()`` in a value; `called` is False where the parentheses are missing."""

    scope: str
    name: str
    called: bool

    def __str__(self) -> str:
        return f"@{join(self.scope, self.name)}" + ("()" if self.called else "")


@dataclasses.dataclass(frozen=True)
class Macro:
    """``%name`` in a value."""

    name: str

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclasses.dataclass(frozen=True)
class Binding:
    """``scope/name.parameter = value``; a macro's definition has no parameter."""

    scope: str
    name: str
    parameter: str
    value: Any
    location: Location

    @property
    def key(self) -> tuple[str, str, str]:
        """What a later binding of the same thing replaces it by."""
        return self.scope, self.name, self.parameter

    @property
    def path(self) -> str:
        """The left side as written."""
        path = join(self.scope, self.name)
        return f"{path}.{self.parameter}" if self.parameter else path


@dataclasses.dataclass(frozen=True)
class Import:
    """``import module``."""

    module: str
    alias: str | None
    location: Location


@dataclasses.dataclass(frozen=True)
class Include:
    """``include 'path'``."""

    path: str
    location: Location


@dataclasses.dataclass(frozen=True)
class Block:
    """The head of ``scope/name:``; the bindings under it follow as statements of their own."""

    scope: str
    name: str
    location: Location


type Statement = Binding | Import | Include | Block


def join(scope: str, name: str) -> str:
    """Returns ``scope/name``, or the name alone in no scope."""
    return f"{scope}/{name}" if scope else name


def references(value: Any) -> Iterator[Reference | Macro]:
    """Yields the references and macros in a value, in containers too."""
    if isinstance(value, Reference | Macro):
        yield value
    elif isinstance(value, dict):
        for item in value.items():
            yield from references(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from references(item)


def statements(text: str, source: str) -> list[Statement]:
    """Reads a whole text.

    Args:
      text: gin statements.
      source: The file's name in locations.

    Raises:
      ConfigError: If the text is no gin; with the line.
    """
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ConfigError("a NUL byte: this is no text file", Location(source, line))
    found: list[Statement] = []
    line = 1
    try:
        parser = config_parser.ConfigParser(text, _Delegate())
        while (statement := parser.parse_statement()) is not None:
            line = statement.location.line_num
            found.append(_convert(statement, Location(source, line)))
    except SyntaxError as error:  # IndentationError is one
        raise ConfigError(_explain(error), Location(source, error.lineno or line)) from None
    except tokenize.TokenError as error:
        message, (line, _) = error.args
        raise ConfigError(message, Location(source, line)) from None
    except TypeError as error:  # a dict's key that cannot be one
        line = parser.current_token.start[0]
        raise ConfigError(f"bad value: {error}", Location(source, line)) from None
    return found


def override(text: str) -> Binding:
    """Reads one ``Name.parameter=value`` of the command line.

    Raises:
      ConfigError: If it is no binding; names the flag.
    """
    path, equals, value = text.partition("=")
    location = Location(f"--gin.{path.strip()}")
    if not equals:
        raise ConfigError("a value is missing: expected --gin.Name.parameter=value", location)
    try:
        found = statements(text, str(location))
    except ConfigError as error:
        hint = f"; a string needs quotes of its own: \"--gin.{path.strip()}='{value}'\""
        hint = "" if value.strip()[:1] in ("'", '"', "[", "(", "{") else hint
        raise ConfigError(f"cannot read {value!r}: {error.message}{hint}", location) from None
    if len(found) != 1 or not isinstance(found[0], Binding):
        raise ConfigError("expected one binding, --gin.Name.parameter=value", location)
    return dataclasses.replace(found[0], location=location)


class _Delegate(config_parser.ParserDelegate):
    """Makes plain values of references and macros; nothing is looked up while a text is read."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        scope, _, name = scoped_configurable_name.rpartition("/")
        return Reference(scope, name, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


def _convert(statement: Any, location: Location) -> Statement:
    match statement:
        case config_parser.BindingStatement():
            scope, name, parameter = statement.scope, statement.selector, statement.arg_name
            return Binding(scope, name, parameter, statement.value, location)
        case config_parser.ImportStatement():
            return Import(statement.module, statement.alias, location)
        case config_parser.IncludeStatement():
            return Include(statement.filename, location)
        case config_parser.BlockDeclaration():
            return Block(statement.scope, statement.selector, location)
    raise AssertionError(f"unknown statement {statement!r}")


def _explain(error: SyntaxError) -> str:
    """Returns gin's syntax message in a reader's words."""
    message = error.msg
    if token := re.search(r"Failed to parse token '(.*)'", message, re.DOTALL):
        if token[1].isidentifier():
            near = {"true": "True", "false": "False", "none": "None", "null": "None"}
            if token[1].lower() in near:
                return f"{token[1]} is no value; write {near[token[1].lower()]}"
            return f"{token[1]} is no value; a string needs quotes: '{token[1]}'"
        return f"{token[1]} is no value ({message.splitlines()[0]})"
    if message == "Expected newline.":
        rest = (error.text or "")[error.offset or 0 :].strip()
        return f"unexpected {rest!r} after the value; a string needs quotes"
    if message == "Unable to parse value.":
        return "a value is missing or is no Python literal, @reference() or %macro"
    return message.strip()
