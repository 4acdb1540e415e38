# SPDX-License-Identifier: Apache-2.0
"""Errors that name the place and, for a typo, the nearest name."""

import dataclasses
import difflib
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Location:
    """Where a statement stands: a file and its line, or an override's flag (no line)."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


class ConfigError(ValueError):
    """A mistake in a config.

    Attributes:
      message: What is wrong, without the place.
      location: The statement at fault, or None for a config built in plain Python.
    """

    def __init__(self, message: str, location: Location | None = None):
        super().__init__(message if location is None else f"{location}: {message}")
        self.message = message
        self.location = location

    def __reduce__(self):
        return type(self), (self.message, self.location)


def nearest(name: str, options: Iterable[str]) -> str | None:
    """Returns the option that `name` is most likely a typo of, case aside; None if none is near."""
    by_folded = {option.casefold(): option for option in sorted(options)}
    near = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[near[0]] if near else None


def suggestion(name: str, options: Iterable[str]) -> str:
    """Returns ``; did you mean 'x'?`` for the option nearest to `name`, or nothing."""
    near = nearest(name, options)
    return f"; did you mean {near!r}?" if near else ""


def raise_all(errors: Iterable[ConfigError]) -> None:
    """Raises the errors as one, a line each; the first gives the location.

    Raises:
      ConfigError: If there is any.
    """
    errors = list(errors)
    if not errors:
        return
    first, *rest = errors
    raise ConfigError("\n".join([first.message, *map(str, rest)]), first.location)
