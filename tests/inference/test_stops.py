# SPDX-License-Identifier: Apache-2.0
import random

import pytest

from seqmix.inference.stops import TextCutter, cut_text, stop_bytes, utf8_decoder


class Pieces:
    """A tokenizer whose ids are byte strings of any length, characters cut in two included."""

    end_of_document = 0

    def __init__(self, *pieces: bytes):
        self.pieces = [b"", *pieces]
        self.vocabulary_size = len(self.pieces)

    def decode_bytes(self, ids):
        return b"".join(self.pieces[i] for i in ids)


def cut(text: bytes, stops, sizes=(1,)):
    """(kept, stopped) of a text that comes in pieces of these sizes, in turn."""
    pieces, at = [], 0
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    cutter = TextCutter(Pieces(*pieces), stop_bytes(stops))
    kept = [cutter.feed(i + 1) for i in range(len(pieces))]
    return b"".join([*kept, cutter.finish()]), cutter.stopped


@pytest.mark.parametrize("sizes", [(1,), (2,), (3, 1), (100,)])
def test_cuts_before_the_stop_string_wherever_tokens_end(sizes):
    assert cut(b"one two STOP three", ["STOP"], sizes) == (b"one two ", True)
    assert cut(b"one two STO three", ["STOP"], sizes) == (b"one two STO three", False)
    assert cut(b"ends in ST", ["STOP"], sizes) == (b"ends in ST", False)
    assert cut(b"STOP", ["STOP"], sizes) == (b"", True)
    # A start that fails overlaps the one that succeeds.
    assert cut(b"aaab!", ["aab"], sizes) == (b"a", True)
    assert cut("größe».".encode(), ["»"], sizes) == ("größe".encode(), True)
    assert cut(b"no stops", [], sizes) == (b"no stops", False)


def test_the_first_of_several_stop_strings_counts():
    assert cut(b"x\n\ny END", ["END", "\n\n"]) == (b"x", True)
    assert cut(b"x END\n\ny", ["END", "\n\n"]) == (b"x ", True)
    # Both in one token.
    assert cut(b"x END\n\ny", ["\n\n", "END"], (100,)) == (b"x ", True)


def test_agrees_with_a_search_in_the_whole_text():
    draw = random.Random(0)
    for _ in range(500):
        text = bytes(draw.choices(b"ab", k=draw.randint(1, 12)))
        stop = "".join(draw.choices("ab", k=draw.randint(1, 4)))
        sizes = [draw.randint(1, 3) for _ in range(4)]
        at = text.find(stop.encode())
        expected = (text, False) if at < 0 else (text[:at], True)
        assert cut(text, [stop], sizes) == expected


def test_text_is_given_out_as_soon_as_it_is_sure():
    pieces = [b"ab", b"cS", b"T", b"x", b"S"]
    cutter = TextCutter(Pieces(*pieces), (b"STOP",))
    assert [cutter.feed(i + 1) for i in range(5)] == [b"ab", b"c", b"", b"STx", b""]
    assert cutter.finish() == b"S"


def test_nothing_comes_after_a_stop():
    cutter = TextCutter(Pieces(b"aSb", b"c"), (b"S",))
    assert (cutter.feed(1), cutter.feed(2), cutter.finish()) == (b"a", b"", b"")


def test_one_string_stands_for_itself():
    assert stop_bytes("ab") == (b"ab",)
    assert stop_bytes(["a", "é"]) == (b"a", b"\xc3\xa9")
    assert stop_bytes(()) == ()


@pytest.mark.parametrize("stops", [[""], ["a", ""], [b"a"], [1], ""])
def test_bad_stop_strings(stops):
    with pytest.raises(ValueError, match=r"stop_strings\[\d\] must be a non-empty string"):
        stop_bytes(stops)


def test_characters_cut_in_two_and_bytes_that_are_no_utf8():
    euro = "€".encode()
    assert cut_text(Pieces(euro[:1], euro[1:]), (), [1, 2]) == "€"
    draw = random.Random(1)
    for _ in range(300):
        data = bytes(draw.choices(b"a\xe2\x82\xac\xff\xc3\xa4\xf0\x9f", k=8))
        decoder = utf8_decoder()
        parts = [decoder.decode(data[i : i + 1]) for i in range(8)]
        assert "".join([*parts, decoder.decode(b"", final=True)]) == data.decode(errors="replace")
