# SPDX-License-Identifier: Apache-2.0
"""Each kind of mistake gives an error with its file and line, and for a typo the nearest name."""

import pytest

from seqmix import config
from seqmix.config import parse
from tests.config.classes import LoopConfig, RequiredConfig, TestRunConfig


def error_of(text, root=TestRunConfig, overrides=()):
    with pytest.raises(config.ConfigError) as error:
        config.from_text(text, "run.gin", overrides).build(root)
    return str(error.value)


TYPOS = {
    "parameter": (
        "TestRun.steps = 1\nTestModel.layer = 4\n",
        "run.gin:2: TestModel has no parameter 'layer'; did you mean 'layers'?",
    ),
    "parameter far from any": (
        "TestCorpus.zzz = 4\n",
        "run.gin:1: TestCorpus has no parameter 'zzz'; it has path, weight",
    ),
    "configurable": (
        "\nTestModle.layers = 4\n",
        "run.gin:2: unknown configurable 'TestModle'; did you mean 'TestModel'?",
    ),
    "configurable's case": (
        "testmodel.layers = 4\n",
        "run.gin:1: unknown configurable 'testmodel'; did you mean 'TestModel'?",
    ),
    "configurable by its module": (
        "tests.config.TestModel.layers = 4\n",
        "run.gin:1: unknown configurable 'tests.config.TestModel'; did you mean 'TestModel'?",
    ),
    "reference": (
        "TestRun.steps = 1\n\nTestRun.optimizer = @TestMoun()\n",
        "run.gin:3: unknown configurable 'TestMoun'; did you mean 'TestMuon'?",
    ),
    "reference in a container": (
        "TestData.corpora = [\n    @TestCorpse(),\n]\n",
        "run.gin:1: unknown configurable 'TestCorpse'; did you mean 'TestCorpus'?",
    ),
    "reference in no pair of parentheses": (
        "TestRun.optimizer = @TestMuon\n",
        "run.gin:1: @TestMuon is a class; to build a config write @TestMuon()",
    ),
    "macro": (
        "width = 3\nTestModel.layers = %width\nTestModel.width = %widht\n",
        "run.gin:3: unknown macro %widht; did you mean 'width'?",
    ),
    "block": (
        "TestModl:\n    layers = 4\n    width = 3\n",
        "run.gin:1: unknown configurable 'TestModl'; did you mean 'TestModel'?",
    ),
    "parameter in a block": (
        "TestModel:\n    layers = 4\n\n    # here\n    widht = 3\n",
        "run.gin:5: TestModel has no parameter 'widht'; did you mean 'width'?",
    ),
}


@pytest.mark.parametrize(("text", "message"), TYPOS.values(), ids=TYPOS)
def test_a_typo(text, message):
    assert error_of(text) == message


def test_all_wrong_names_are_told_at_once():
    text = "TestModel.layer = 4\nTestRun.optimiser = 3\nbig/TestModel.layer = 3\n"
    # Each once, where it first stands.
    assert error_of(text).splitlines() == [
        "run.gin:1: TestModel has no parameter 'layer'; did you mean 'layers'?",
        "run.gin:2: TestRun has no parameter 'optimiser'; did you mean 'optimizer'?",
    ]


TYPES = {
    "scalar": (
        "# c\nTestModel.layers = 'four'\n",
        "run.gin:2: TestModel.layers: expected int, got str 'four'",
    ),
    "bool for int": (
        "TestModel.layers = True\n",
        "run.gin:1: TestModel.layers: expected int, got bool True",
    ),
    "in a container": (
        "TestData.lengths = [1,\n 2.5]\n",
        "run.gin:1: TestData.lengths[1]: expected int, got float 2.5",
    ),
    "in a block": (
        "TestModel:\n  width = 3\n  layers = None\n",
        "run.gin:3: TestModel.layers: expected int, got None",
    ),
    "literal": (
        "TestModel.remat = 'dot'\n",
        "run.gin:1: TestModel.remat: expected one of 'none', 'full', 'dots', got 'dot'; "
        "did you mean 'dots'?",
    ),
    "enum": (
        "TestData.colour = 'green'\n",
        "run.gin:1: TestData.colour: expected one of 'red', 'blue', got 'green'",
    ),
    "reference to another class": (
        "TestRun.optimizer = @TestCorpus()\n",
        "run.gin:1: TestRun.optimizer: expected TestAdam | TestMuon, got TestCorpus "
        "CorpusConfig(path='.', weight=1.0)",
    ),
    "string for a config": (
        "TestRun.optimizer = 'TestMuon'\n",
        "run.gin:1: TestRun.optimizer: expected TestAdam | TestMuon, got str 'TestMuon'",
    ),
    "through a macro": (
        "m = 1.5\nTestModel.layers = %m\n",
        "run.gin:2: TestModel.layers: expected int, got float 1.5",
    ),
    "scoped": (
        "TestRun.teacher = @big/TestModel()\nbig/TestModel.layers = 'x'\n",
        "run.gin:2: TestModel.layers: expected int, got str 'x'",
    ),
}


@pytest.mark.parametrize(("text", "message"), TYPES.values(), ids=TYPES)
def test_a_wrong_type(text, message):
    assert error_of(text) == message


UNUSED = {
    "class not in the pattern": (
        "TestModel.pattern = 'mixer'\nTestRecurrence.state_size = 8\n",
        "run.gin:2: unused binding TestRecurrence.state_size: no TestRecurrence is part of this "
        "config; in use: TestAdam, TestCorpus, TestData, TestMixer, TestModel, TestRun",
    ),
    "class not referred to": (
        "TestMuon.rate = 1\n",
        "run.gin:1: unused binding TestMuon.rate: no TestMuon is part of this config; in use: ",
    ),
    "unknown scope": (
        "TestModel.pattern = 'local/mixer, mixer'\nlocla/TestMixer.window = 1\n",
        "run.gin:2: unknown scope 'locla' in locla/TestMixer.window; did you mean 'local'?",
    ),
    "unknown scope far from any": (
        "TestModel.pattern = 'local/mixer, mixer'\nzzz/TestMixer.window = 1\n",
        "run.gin:2: unknown scope 'zzz' in zzz/TestMixer.window; scopes in use: local",
    ),
    "scope without any": (
        "zzz/TestMixer.window = 1\n",
        "run.gin:1: unknown scope 'zzz' in zzz/TestMixer.window",
    ),
    "class not in that scope": (
        "TestModel.pattern = 'local/mixer, recurrence'\nlocal/TestRecurrence.state_size = 1\n",
        "run.gin:2: unused binding local/TestRecurrence.state_size: no TestRecurrence is built in "
        "scope 'local'",
    ),
    "macro": (
        "TestModel.width = %width\nwidth = 3\nwidht = 4\n",
        "run.gin:3: unused macro 'widht': nothing refers to %widht; did you mean 'width'?",
    ),
}


@pytest.mark.parametrize(("text", "message"), UNUSED.values(), ids=UNUSED)
def test_what_nothing_uses(text, message):
    assert error_of(text).startswith(message)


def test_a_replaced_binding_keeps_its_macro_in_use():
    source = config.from_text("w = 3\nTestModel.width = %w\n", overrides=["TestModel.width=5"])
    assert source.build(TestRunConfig).model.width == 5


REFUSED = {
    "located by the parameter it names": (
        "TestModel.width = 2\nTestModel.layers = 0\n",
        "run.gin:2: TestModel.layers must be >= 1, got 0 (TestModel is bound here: layers at "
        "run.gin:2, width at run.gin:1)",
    ),
    "with one binding": (
        "\nTestModel.layers = 0\n",
        "run.gin:2: TestModel.layers must be >= 1, got 0",
    ),
    "with two names": (
        "TestModel.width = 8\nTestModel.inner_width = 4\n",
        "run.gin:2: TestModel: inner_width must be >= width, got 4 (TestModel is bound here: ",
    ),
    "in a child": (
        "TestModel.pattern = 'local/mixer'\nlocal/TestMixer.heads = 0\n",
        "run.gin:2: TestMixer.heads must be >= 1, got 0",
    ),
    "located by the value it quotes": (
        "TestModel.layers = 2\nTestModel.pattern = 'mixer,  nothing'\n",
        "run.gin:2: TestModel: unknown kind 'nothing' (TestModel is bound here: ",
    ),
    "with an error of two bindings that it does not name": (
        "TestModel.layers = 13\nTestModel.width = 13\n",
        "run.gin:1: TestModel: thirteen brings bad luck (TestModel is bound here: layers at "
        "run.gin:1, width at run.gin:2)",
    ),
    "in the children hook": (
        "TestModel.pattern = 'mixre'\n",
        "run.gin:1: TestModel.pattern has an unknown mixer 'mixre'",
    ),
    "derived field bound": (
        "TestModel.mixers = {}\n",
        "run.gin:1: TestModel.mixers is derived and cannot be bound; bind the parameters of "
        "TestRecurrence instead",
    ),
    "macro that contains itself": (
        "a = %b\nb = [%a]\nTestModel.layers = %a\n",
        "run.gin:3: a macro that contains itself: %a -> %b -> %a",
    ),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_a_value_that_the_class_refuses(text, message):
    assert error_of(text).startswith(message)


def test_a_missing_value():
    assert error_of("TestRequired.optimizer = @TestAdam()", RequiredConfig) == (
        "TestRequired.size has no value and no default; bind TestRequired.size = ..."
    )
    assert error_of("TestRequired.size = 1", RequiredConfig) == (
        "TestRequired.optimizer has no value and no default; bind TestRequired.optimizer = "
        "@TestAdam()"
    )
    text = "TestRun.steps = 1\nTestData.note = @a/TestRequired()\n"
    assert error_of(text).startswith("run.gin:2: a/TestRequired.size has no value and no default")


def test_a_config_that_contains_itself():
    assert error_of("TestLoop.next = @TestLoop()\n", LoopConfig) == (
        "run.gin:1: a config that contains itself: TestLoop -> TestLoop"
    )
    text = (
        "TestLoop.next = @b/TestLoop()\nb/TestLoop.next = @c/TestLoop()\nc/TestLoop.next = None\n"
    )
    assert config.from_text(text).build(LoopConfig) == LoopConfig(LoopConfig(LoopConfig()))


SYNTAX = {
    "no value": ("TestRun.steps = 1\nTestModel.layers =\n", "run.gin:2: a value is missing"),
    "bare word": (
        "TestModel.pattern = mixer\n",
        "run.gin:1: mixer is no value; a string needs quotes: 'mixer'",
    ),
    "bare words": (
        "TestModel.layers = 3 mixer\n",
        "run.gin:1: unexpected 'mixer' after the value; a string needs quotes",
    ),
    "true": ("TestData.shuffle = true\n", "run.gin:1: true is no value; write True"),
    "leading zero": ("TestModel.layers = 007\n", "run.gin:1: 007 is no value"),
    "open bracket": ("TestData.lengths = (1,\n2", "run.gin:2: unexpected EOF"),
    "open string": ("\nTestModel.pattern = 'x\n", "run.gin:2: unterminated string"),
    "no statement": ("TestModel layers\n", "run.gin:1: Couldn't parse statement"),
    "indentation": ("TestModel:\n    layers = 1\n  width = 2\n", "run.gin:3: unindent"),
    "empty block": ("TestModel:\nTestRun.steps = 1\n", "run.gin:2: Expected indentation"),
    "key that is none": ("TestData.note = {\n[1]: 2}\n", "run.gin:2: bad value: "),
    "bad selector": ("a//b.c = 2\n", "run.gin:1: "),
    "include of no string": ("\ninclude 3\n", "run.gin:2: Expected file path"),
    "NUL byte": ("TestModel.layers = 1\nTestModel.width = \0\n", "run.gin:2: a NUL byte"),
    "operator": ("TestModel.layers = 3 + 4\n", "run.gin:1: unexpected '+ 4' after the value"),
    "twice": (
        "TestModel.layers = 1\nTestModel:\n    layers = 2\n",
        "run.gin:3: TestModel.layers is bound twice in this file, first at run.gin:1",
    ),
    "macro twice": (
        "m = 1\nm = 2\n",
        "run.gin:2: m is bound twice in this file, first at run.gin:1",
    ),
}


@pytest.mark.parametrize(("text", "message"), SYNTAX.values(), ids=SYNTAX)
def test_syntax(text, message):
    with pytest.raises(config.ConfigError) as error:
        config.from_text(text, "run.gin")
    assert str(error.value).startswith(message)


def test_a_damaged_text_is_told_or_read():
    text = """include 'a.gin'
import seqmix.layers
w = 3
A:
    b = [1, @x/C(), %m]  # c
    c = {'a': -1.5,
         2: (None, True)}
s/A.d = 'x' "y"
"""
    locations = []
    for start in range(len(text)):
        for damaged in (text[:start], text[start:], text[:start] + text[start + 1 :]):
            try:
                parse.statements(damaged, "run.gin")
            except config.ConfigError as error:
                locations.append((error.location.source, error.location.line))
    assert {source for source, _ in locations} == {"run.gin"}
    assert {line for _, line in locations} <= set(range(1, text.count("\n") + 2))


OVERRIDES = {
    "TestModel.layer=4": "--gin.TestModel.layer: TestModel has no parameter 'layer'; did you mean "
    "'layers'?",
    "TestModel.layers='x'": "--gin.TestModel.layers: TestModel.layers: expected int, got str 'x'",
    "TestModel.layers=0": "--gin.TestModel.layers: TestModel.layers must be >= 1, got 0",
    "TestModel.layers": "--gin.TestModel.layers: a value is missing: expected "
    "--gin.Name.parameter=value",
    "TestModel.layers=": "--gin.TestModel.layers: cannot read '': a value is missing",
    "TestModel.pattern=3 mixer, recurrence": "--gin.TestModel.pattern: cannot read '3 mixer, "
    "recurrence': unexpected 'mixer, recurrence' after the value; a string needs quotes; a string "
    "needs quotes of its own: \"--gin.TestModel.pattern='3 mixer, recurrence'\"",
    "TestModel.pattern=mixer": "--gin.TestModel.pattern: cannot read 'mixer': mixer is no value",
    "TestData.lengths=[1": "--gin.TestData.lengths: cannot read '[1': unexpected EOF",
    "TestModel.layers=1\nTestModel.width=2": "--gin.TestModel.layers: expected one binding",
    "TestMuon.rate=1": "--gin.TestMuon.rate: unused binding TestMuon.rate",
    "zz/TestMixer.heads=1": "--gin.zz/TestMixer.heads: unknown scope 'zz'",
    "width=1": "--gin.width: unused macro 'width'",
    "include 'x'": "--gin.include 'x': a value is missing",
}


@pytest.mark.parametrize(("override", "message"), OVERRIDES.items())
def test_an_override_names_its_flag(override, message):
    assert error_of("", overrides=[override]).startswith(message)


def test_a_missing_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo.gin").write_text("include 'bsae.gin'\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "base.gin").write_text("\ninclude 'nothing.gin'\n")
    with pytest.raises(config.ConfigError) as error:
        config.load(["deom.gin"])
    assert str(error.value) == "deom.gin: no such file; did you mean 'demo.gin'?"
    with pytest.raises(config.ConfigError) as error:
        config.load(["sub/bas.gin"])
    assert str(error.value) == "sub/bas.gin: no such file; did you mean 'sub/base.gin'?"
    with pytest.raises(config.ConfigError) as error:
        config.load(["no/bas.gin"])
    assert str(error.value) == "no/bas.gin: no such file (there is no folder 'no' either)"
    with pytest.raises(config.ConfigError) as error:
        config.load(["demo.gin"])
    assert str(error.value) == "demo.gin:1: include 'bsae.gin': no such file"
    with pytest.raises(config.ConfigError) as error:
        config.load(["sub/base.gin"])
    assert str(error.value) == "sub/base.gin:2: include 'sub/nothing.gin': no such file"


def test_an_unreadable_file(tmp_path):
    (tmp_path / "latin.gin").write_bytes(b"# caf\xe9\n")
    with pytest.raises(config.ConfigError, match=r"latin\.gin: not UTF-8 text"):
        config.load([tmp_path / "latin.gin"])
    with pytest.raises(config.ConfigError, match="cannot be read: Is a directory"):
        config.load([tmp_path])


def test_an_include_cycle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.gin").write_text("include 'b.gin'\n")
    (tmp_path / "b.gin").write_text("\ninclude './c.gin'\n")
    (tmp_path / "c.gin").write_text("include 'b.gin'\n")
    with pytest.raises(config.ConfigError) as error:
        config.load(["a.gin"])
    assert str(error.value) == "c.gin:1: include cycle: b.gin -> c.gin -> b.gin"


def test_an_error_in_an_included_file_names_that_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "base.gin").write_text("\nTestModel.layer = 4\n")
    (tmp_path / "demo.gin").write_text("include 'sub/base.gin'\n")
    with pytest.raises(config.ConfigError) as error:
        config.load(["demo.gin"]).build(TestRunConfig)
    assert str(error.value).startswith("sub/base.gin:2: TestModel has no parameter 'layer'")
    assert (error.value.location.source, error.value.location.line) == ("sub/base.gin", 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "\nimport os\n",
            "run.gin:2: import of 'os' is not allowed: a config imports from seqmix; ",
        ),
        ("import seqmixer\n", "run.gin:1: import of 'seqmixer' is not allowed"),
        ("from subprocess import run\n", "run.gin:1: import of 'subprocess.run' is not allowed"),
        ("import seqmix.nothing\n", "run.gin:1: cannot import 'seqmix.nothing': No module"),
        ("import seqmix.config as c\n", "run.gin:1: an import has no 'as'"),
    ],
)
def test_an_import(text, message, monkeypatch):
    monkeypatch.delenv("SEQMIX_CONFIG_IMPORTS", raising=False)
    assert error_of(text).startswith(message)
