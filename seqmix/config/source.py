# SPDX-License-Identifier: Apache-2.0
"""Gin files and overrides, read into one `Source` of bindings."""

import importlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from seqmix.config import build, check, parse
from seqmix.config.errors import ConfigError, Location, nearest

IMPORTS_VARIABLE = "SEQMIX_CONFIG_IMPORTS"


class Source:
    """The bindings of one config, and which of them a build has used.

    Attributes:
      bindings: Those that hold, by (scope, name, parameter).
      macros: Those that hold, by name.
      statements: All statements in order, replaced bindings too.
      used: The (scope, name) whose bindings builds have taken.
    """

    def __init__(self) -> None:
        self.bindings: dict[tuple[str, str, str], parse.Binding] = {}
        self.macros: dict[str, parse.Binding] = {}
        self.statements: list[parse.Statement] = []
        self.used: set[tuple[str, str]] = set()

    def build[T](self, root: type[T], *, check_used: bool = True) -> T:
        """Builds the root config and everything under it.

        Args:
          root: A registered class.
          check_used: Whether a binding that the root does not use is an error. Without it several
            roots can be built, with `check_all_used` at the end.

        Raises:
          ConfigError: For an unknown name, a wrong or missing value, a reference that leads back to
            itself, a value that the class refuses, or an unused binding; with the file and line.
        """
        check.check_names(self.statements, self.macros)
        built = build.Builder(self.bindings, self.macros, self.used).build(root)
        if check_used:
            self.check_all_used()
        return built

    def check_all_used(self) -> None:
        """Checks that what has been built so far used every binding and macro.

        Raises:
          ConfigError: For unused bindings and unknown scopes, all of them in one message.
        """
        check.check_used(self.statements, self.bindings, self.macros, self.used)

    def add(self, statement: parse.Statement) -> None:
        """Adds one statement; a binding replaces an earlier one of the same thing."""
        self.statements.append(statement)
        if isinstance(statement, parse.Binding):
            if statement.parameter:
                self.bindings[statement.key] = statement
            else:
                self.macros[parse.join(statement.scope, statement.name)] = statement


def load(
    paths: str | os.PathLike | Sequence[str | os.PathLike], overrides: Iterable[str] = ()
) -> Source:
    """Reads gin files in order, then the overrides; later bindings replace earlier ones.

    Args:
      paths: Files, relative to the working directory. What a file includes is relative to that
        file.
      overrides: ``Name.parameter=value`` each, the command line's ``--gin.Name.parameter=value``.

    Raises:
      ConfigError: For a missing or unreadable file, a syntax error, a binding given twice in one
        file, an include that leads back to itself or an import that is not allowed; with the file
        and line.
    """
    source = Source()
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        _read_file(source, os.fspath(path), location=None, open_files=())
    for text in overrides:
        source.add(parse.override(text))
    return source


def from_text(text: str, filename: str = "<text>", overrides: Iterable[str] = ()) -> Source:
    """Reads a gin text.

    Args:
      text: The statements.
      filename: The name for messages; includes are relative to its folder.
      overrides: As for `load`.

    Raises:
      ConfigError: As for `load`.
    """
    source = Source()
    _read_text(source, text, filename, open_files=())
    for override in overrides:
        source.add(parse.override(override))
    return source


def allowed_imports() -> list[str]:
    """Returns the packages a config file may import: seqmix, and what the environment names."""
    named = os.environ.get(IMPORTS_VARIABLE, "").replace(",", " ").split()
    return ["seqmix", *named]


def _read_file(
    source: Source, path: str, location: Location | None, open_files: tuple[str, ...]
) -> None:
    """Reads one file; `location` is that of the include, None for a file of the command line."""
    real = os.path.realpath(path)
    if real in map(os.path.realpath, open_files):
        chain = " -> ".join(
            [*open_files[list(map(os.path.realpath, open_files)).index(real) :], path]
        )
        raise ConfigError(f"include cycle: {chain}", location)
    at = location or Location(path)
    what = f"include {path!r}: " if location else ""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{what}no such file{_nearest_file(path)}", at) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what}not UTF-8 text: {error}", at) from None
    except OSError as error:
        raise ConfigError(f"{what}cannot be read: {error.strerror}", at) from None
    _read_text(source, text, path, open_files)


def _read_text(source: Source, text: str, filename: str, open_files: tuple[str, ...]) -> None:
    seen: dict[tuple[str, str, str], parse.Binding] = {}
    for statement in parse.statements(text, filename):
        match statement:
            case parse.Include():
                path = os.path.normpath(os.path.join(os.path.dirname(filename), statement.path))
                _read_file(source, path, statement.location, (*open_files, filename))
            case parse.Import():
                _import(statement)
            case parse.Binding():
                if first := seen.get(statement.key):
                    message = (
                        f"{statement.path} is bound twice in this file, first at {first.location}"
                    )
                    raise ConfigError(message, statement.location)
                seen[statement.key] = statement
        source.add(statement)


def _import(statement: parse.Import) -> None:
    """Imports a module so that its configurables are known."""
    module, location = statement.module, statement.location
    if statement.alias:
        raise ConfigError(
            "an import has no 'as' in a config: configurables go by gin name", location
        )
    allowed = allowed_imports()
    if not any(module == package or module.startswith(f"{package}.") for package in allowed):
        message = (
            f"import of {module!r} is not allowed: a config imports from {', '.join(allowed)}; "
            f"name further packages in the environment variable {IMPORTS_VARIABLE}"
        )
        raise ConfigError(message, location)
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"cannot import {module!r}: {error}", location) from error


def _nearest_file(path: str) -> str:
    """Returns a hint at the file that was meant."""
    folder = os.path.dirname(path)
    try:
        stems = [Path(name).stem for name in os.listdir(folder or ".") if name.endswith(".gin")]
    except OSError:
        return f" (there is no folder {folder!r} either)"
    near = nearest(Path(path).stem, stems)
    return f"; did you mean {os.path.join(folder, near) + '.gin'!r}?" if near else ""
