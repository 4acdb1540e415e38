# SPDX-License-Identifier: Apache-2.0
"""The pattern of a hybrid: which layers follow one another.

Grammar::

    pattern = item { "," item }
    item    = [ count ] element
    element = part [ "+" part ]
    part    = { scope "/" } name

``'3 gated_delta_net, attention'`` is three Gated DeltaNet layers and one attention layer, repeated
over the model. A scope gives an element settings of its own: ``'local/attention, attention'`` with
``local/Attention.window = 256``.

A layer is a mixer and the model's feed-forward part (`HybridLM.feed_forward`). ``+`` gives it
another, as in ``'mamba, mamba + moe'``: ``feed_forward``, ``moe``, with a scope
(``'mla + first/feed_forward'``) or without, or ``none``. The name of such a part alone is a layer
without a mixer: ``'mamba2 + none, feed_forward'``.
"""

import dataclasses
import re

_TOKEN = re.compile(r"\s*(?:(?P<count>\d+)|(?P<name>[A-Za-z_]\w*)|(?P<mark>[,/+])|(?P<bad>\S))")


class PatternError(ValueError):
    """A pattern that cannot be read; the message names the place and what was expected there."""


@dataclasses.dataclass(frozen=True)
class Element:
    """One layer of a pattern.

    Attributes:
      name: the registered mixer, or the feed-forward part of a layer without one.
      scope: scope of its settings, '' for the plain ones.
      feed_forward: the part after a '+', None for none there.
    """

    name: str
    scope: str = ""
    feed_forward: "Element | None" = None

    @property
    def key(self) -> str:
        """The text of the first part: what is left of a '+'."""
        return f"{self.scope}/{self.name}" if self.scope else self.name

    def __str__(self) -> str:
        return self.key if self.feed_forward is None else f"{self.key} + {self.feed_forward}"


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

    def read_part(expected: str) -> tuple[str, str]:
        nonlocal position
        names: list[str] = []
        while True:
            if tokens[position][0] != "name":
                fail("a layer name" if names else expected)
            names.append(tokens[position][1])
            position += 1
            if tokens[position][1] != "/":
                return names[-1], "/".join(names[:-1])
            position += 1

    while True:
        count = 1
        if tokens[position][0] == "count":
            count = int(tokens[position][1])
            if count == 0:
                fail("a count of at least 1")
            position += 1
        mixer = read_part("a layer name" if count > 1 else "a count or a layer name")
        feed_forward = None
        if tokens[position][1] == "+":
            position += 1
            feed_forward = Element(*read_part("a feed-forward part"))
        elements.extend([Element(*mixer, feed_forward)] * count)
        if tokens[position][0] == "end":
            return tuple(elements)
        if tokens[position][1] != ",":
            fail("',' or the end" if feed_forward else "'+', ',' or the end")
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
