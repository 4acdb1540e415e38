# SPDX-License-Identifier: Apache-2.0
"""The pattern of a hybrid: which layers follow one another.

Grammar::

    pattern = item { "," item }
    item    = [ count ] element
    element = { scope "/" } name

``'3 gated_delta_net, attention'`` is three Gated DeltaNet layers and one attention layer, repeated
over the model. A scope gives an element settings of its own: ``'local/attention, attention'`` with
``local/Attention.window = 256``.
"""

import dataclasses
import re

_TOKEN = re.compile(r"\s*(?:(?P<count>\d+)|(?P<name>[A-Za-z_]\w*)|(?P<mark>[,/])|(?P<bad>\S))")


class PatternError(ValueError):
    """A pattern that cannot be read; the message names the place and what was expected there."""


@dataclasses.dataclass(frozen=True, order=True)
class Element:
    """One layer of a pattern.

    Attributes:
      name: the registered layer.
      scope: scope of its settings, '' for the plain ones.
    """

    name: str
    scope: str = ""

    def __str__(self) -> str:
        return f"{self.scope}/{self.name}" if self.scope else self.name


def parse(pattern: str) -> tuple[Element, ...]:
    """Reads a pattern.

    Args:
      pattern: see the module's grammar.

    Returns:
      The elements of one period, counts written out.

    Raises:
      PatternError: it does not follow the grammar, or a count is 0.
    """
    tokens = _tokens(pattern)
    elements: list[Element] = []
    position = 0

    def fail(expected: str) -> None:
        kind, text, start = tokens[position]
        came = "the end" if kind == "end" else repr(text)
        raise PatternError(
            f"pattern {pattern!r}, character {start + 1}: expected {expected}, got {came}"
        )

    while True:
        count = 1
        if tokens[position][0] == "count":
            count = int(tokens[position][1])
            if count == 0:
                fail("a count of at least 1")
            position += 1
        parts: list[str] = []
        while True:
            if tokens[position][0] != "name":
                fail("a layer name" if count > 1 or parts else "a count or a layer name")
            parts.append(tokens[position][1])
            position += 1
            if tokens[position][1] != "/":
                break
            position += 1
        elements.extend([Element(parts[-1], "/".join(parts[:-1]))] * count)
        if tokens[position][0] == "end":
            return tuple(elements)
        if tokens[position][1] != ",":
            fail("',' or the end")
        position += 1


def _tokens(pattern: str) -> list[tuple[str, str, int]]:
    tokens = [
        (str(match.lastgroup), match[match.lastgroup or 0], match.start(match.lastgroup or 0))
        for match in _TOKEN.finditer(pattern)
    ]
    return [*tokens, ("end", "", len(pattern))]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The layers of a model from the bottom up.

    Attributes:
      leading: layers before the first period.
      period: layers of one period.
      periods: number of whole periods.
      remainder: the beginning of a period, where the layers do not divide.
      trailing: layers after the last.
    """

    leading: tuple[Element, ...]
    period: tuple[Element, ...]
    periods: int
    remainder: tuple[Element, ...]
    trailing: tuple[Element, ...]

    @property
    def elements(self) -> tuple[Element, ...]:
        """Every layer from the bottom up."""
        return self.leading + self.period * self.periods + self.remainder + self.trailing


def expand(pattern: str, layers: int, leading: str = "", trailing: str = "") -> Plan:
    """Lays a pattern over the layers of a model.

    Args:
      pattern: repeated over the layers that leading and trailing leave.
      layers: total number of layers.
      leading: pattern of the first layers, once; '' for none.
      trailing: pattern of the last layers, once; '' for none.

    Raises:
      PatternError: a pattern cannot be read, or leading and trailing exceed the layers.
    """
    first = parse(leading) if leading.strip() else ()
    last = parse(trailing) if trailing.strip() else ()
    period = parse(pattern)
    body = layers - len(first) - len(last)
    if body < 0:
        raise PatternError(
            f"leading {leading!r} and trailing {trailing!r} take {len(first) + len(last)} layers, "
            f"the model has {layers}"
        )
    periods, rest = divmod(body, len(period))
    return Plan(first, period, periods, period[:rest], last)
