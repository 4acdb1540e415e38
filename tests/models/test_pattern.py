# SPDX-License-Identifier: Apache-2.0
"""The grammar of patterns and how they are laid over the layers."""

import pytest

from seqmix.models import Element, PatternError, expand, parse

G, A, L = Element("gated_delta_net"), Element("attention"), Element("attention", "local")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("attention", (A,)),
        ("3 gated_delta_net, attention", (G, G, G, A)),
        ("  2gated_delta_net ,local/attention,1 attention ", (G, G, L, A)),
        ("a/b/attention", (Element("attention", "a/b"),)),
        (
            "2 attention+ moe, b/moe",
            (*[Element("attention", "", Element("moe"))] * 2, Element("moe", "b")),
        ),
        ("l/attention + f/moe", (Element("attention", "l", Element("moe", "f")),)),
    ],
)
def test_parse(text, expected):
    assert parse(text) == expected
    assert parse(", ".join(map(str, expected))) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "character 1: expected a count or a layer name, got the end"),
        ("attention,", "character 11: expected a count or a layer name, got the end"),
        ("attention,, mamba2", "character 11: expected a count or a layer name, got ','"),
        ("3", "character 2: expected a layer name, got the end"),
        ("3 3 mamba2", "character 3: expected a layer name, got '3'"),
        ("0 mamba2", "character 1: expected a count of at least 1, got '0'"),
        ("mamba2 attention", "character 8: expected '\\+', ',' or the end, got 'attention'"),
        ("local/", "character 7: expected a layer name, got the end"),
        ("mamba2, *attention", r"character 9: expected a count or a layer name, got '\*'"),
        ("mamba2 + ", "character 10: expected a feed-forward part, got the end"),
        ("mamba2 + 2 moe", "character 10: expected a feed-forward part, got '2'"),
        ("mamba2 + moe + moe", "character 14: expected ',' or the end, got '\\+'"),
        ("mamba2; attention", "character 7: expected '\\+', ',' or the end, got ';'"),
    ],
)
def test_errors_name_the_place_and_what_was_expected(text, message):
    with pytest.raises(PatternError, match=message):
        parse(text)


def test_expand():
    plan = expand("2 gated_delta_net, attention", 9, "attention", "local/attention")
    assert plan.leading == (A,) and plan.trailing == (L,)
    assert plan.period == (G, G, A) and plan.periods == 2 and plan.remainder == (G,)
    assert plan.elements == (A, G, G, A, G, G, A, G, L)
    short = expand("3 gated_delta_net, attention", 2)
    assert short.periods == 0 and short.elements == (G, G)
    with pytest.raises(PatternError, match="take 3 layers, the model has 2"):
        expand("attention", 2, "2 attention", "attention")
