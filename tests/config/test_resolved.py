# SPDX-License-Identifier: Apache-2.0
"""The resolved text is complete, deterministic and builds an equal object."""

import dataclasses
import math

import pytest

from seqmix import config
from tests.config.classes import (
    AdamConfig,
    CorpusConfig,
    DataConfig,
    MixerConfig,
    ModelConfig,
    MuonConfig,
    TestRunConfig,
)


def round_trip(run):
    text = config.resolved(run)
    again = config.from_text(text).build(type(run))
    assert again == run
    assert config.resolved(again) == text
    return text


def test_the_whole_text():
    text = """
    TestRun.teacher = @big/TestModel()
    TestModel.pattern = 'local/mixer, mixer'
    big/TestModel.pattern = 'recurrence'
    local/TestMixer.window = 8
    TestRun.optimizer = @TestMuon()
    """
    assert config.resolved(config.from_text(text).build(TestRunConfig)) == (
        """\
TestAdam.betas = (0.9, 0.95)
TestAdam.rate = 0.001

TestCorpus.path = '.'
TestCorpus.weight = 1.0

TestData.colour = 'red'
TestData.corpora = (@TestCorpus(),)
TestData.lengths = (8,)
TestData.limit = 1.0
TestData.note = None
TestData.options = {}
TestData.shuffle = True

TestMixer.heads = 4
TestMixer.window = None

local/TestMixer.heads = 4
local/TestMixer.window = 8

TestModel.inner_width = 512
TestModel.layers = 4
TestModel.pattern = 'local/mixer, mixer'
TestModel.remat = 'none'
TestModel.width = 128

big/TestModel.inner_width = 512
big/TestModel.layers = 4
big/TestModel.pattern = 'recurrence'
big/TestModel.remat = 'none'
big/TestModel.width = 128

TestMuon.inner = @TestAdam()
TestMuon.rate = 0.02

big/TestRecurrence.state_size = 16

TestRun.data = @TestData()
TestRun.model = @TestModel()
TestRun.optimizer = @TestMuon()
TestRun.steps = 100
TestRun.teacher = @big/TestModel()
"""
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "TestModel.pattern = 'local/mixer, mixer'\nlocal/TestMixer.window = 8\nTestMixer.heads = 2",
        "TestRun.teacher = @big/TestModel()\nTestModel.layers = 2\nbig/TestModel.layers = 6\n"
        "TestModel.pattern = 'local/mixer, mixer'\nbig/local/TestMixer.heads = 7\n",
        "TestData.corpora = [@code/TestCorpus(), @prose/TestCorpus(), @code/TestCorpus()]\n"
        "code/TestCorpus.weight = 2\nTestCorpus.path = 'x'\nprose/TestCorpus.weight = 0.1\n",
        "w = 3\nTestModel.width = %w\nTestRun.optimizer = @a/TestMuon()\na/TestAdam.rate = 7\n",
        "TestData.limit = 1e999\nTestData.note = {'a': -1e999, 2: (None, b'x', \"it's\\n\")}\n",
        "TestData.note = [" + ", ".join(f"'{i:040}'" for i in range(5)) + ", {'a': (1,)}, ()]",
    ],
)
def test_round_trip(text):
    round_trip(config.from_text(text).build(TestRunConfig))


def test_plain_objects_get_scopes_from_their_fields():
    run = TestRunConfig(
        model=ModelConfig(pattern="mixer", mixers={"mixer": MixerConfig(window=3)}),
        teacher=ModelConfig(layers=9, pattern="mixer"),
        data=DataConfig(corpora=[CorpusConfig("a"), CorpusConfig("b"), CorpusConfig("c")]),
        optimizer=MuonConfig(inner=AdamConfig(rate=3)),
    )
    text = round_trip(run)
    assert "TestRun.teacher = @teacher/TestModel()\n" in text
    assert "teacher/TestMixer.window = None\n" in text
    corpora = "(@TestCorpus(), @corpora/TestCorpus(), @corpora_2/TestCorpus())"
    assert f"TestData.corpora = {corpora}\n" in text


def test_a_loaded_part_in_a_plain_whole():
    teacher = config.from_text("TestModel.layers = 3").build(ModelConfig)
    round_trip(TestRunConfig(teacher=teacher))


def test_equal_objects_give_one_text():
    loaded = config.from_text("TestModel.layers = 3\nTestRun.steps = 1").build(TestRunConfig)
    assert config.resolved(TestRunConfig(ModelConfig(layers=3), steps=1)) == config.resolved(loaded)


def test_a_change_of_one_value_changes_its_line_alone():
    before, after = (config.resolved(TestRunConfig(steps=n)).splitlines() for n in (1, 2))
    assert [(a, b) for a, b in zip(before, after, strict=True) if a != b] == [
        ("TestRun.steps = 1", "TestRun.steps = 2")
    ]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (DataConfig(limit=math.nan), "TestData.limit is nan, which gin cannot write"),
        (DataConfig(note=[1, {2}]), r"TestData.note\[1\] holds a set, which gin cannot write"),
        (
            ModelConfig(pattern="mixer", mixers={"recurrence": 1}),
            r"TestModel.mixers holds \['recurrence'\], which the other parameters do not call for",
        ),
    ],
)
def test_what_gin_cannot_write(run, message):
    with pytest.raises(config.ConfigError, match=message):
        config.resolved(run)


def test_two_children_of_one_name_and_scope_cannot_be_told_apart():
    @config.configurable("TestTwins")
    @dataclasses.dataclass(frozen=True)
    class TwinsConfig:
        mixers: dict[str, MixerConfig] = dataclasses.field(default_factory=dict)

        @classmethod
        def gin_children(cls, values):
            return [config.Child("mixers", key, MixerConfig) for key in ("a", "b")]

    twins = TwinsConfig({"a": MixerConfig(), "b": MixerConfig()})
    assert config.from_text(config.resolved(twins)).build(TwinsConfig) == twins
    with pytest.raises(config.ConfigError, match="two different configs are both TestMixer"):
        config.resolved(TwinsConfig({"a": MixerConfig(1), "b": MixerConfig(2)}))


@config.configurable("TestRestless")
@dataclasses.dataclass(frozen=True)
class RestlessConfig:
    size: int = 1

    def __post_init__(self):
        object.__setattr__(self, "size", self.size + 1)


def test_a_config_that_does_not_survive_is_told():
    with pytest.raises(config.ConfigError, match="does not survive .*: TestRestless.size"):
        config.resolved(RestlessConfig())
