# SPDX-License-Identifier: Apache-2.0
"""Types are checked and coerced on construction, in plain Python and in gin alike."""

import copy
import dataclasses
import math
import pickle
import re
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from seqmix import config
from tests.config.classes import (
    AdamConfig,
    Colour,
    CorpusConfig,
    DataConfig,
    MixerConfig,
    ModelConfig,
    TestRunConfig,
)


def test_an_int_becomes_a_float_and_a_list_a_tuple():
    adam = AdamConfig(rate=1, betas=[0, 1])
    assert (type(adam.rate), adam.rate) == (float, 1.0)
    assert adam.betas == (0.0, 1.0)
    assert [type(beta) for beta in adam.betas] == [float, float]
    data = DataConfig(lengths=[1, 2], options={"a": [1, 2.5]})
    assert data.lengths == (1, 2)
    assert data.options == {"a": (1.0, 2.5)}
    assert type(data.options["a"][0]) is float


def test_a_numpy_scalar_becomes_a_plain_float():
    assert type(AdamConfig(rate=np.float64(0.5)).rate) is float


def test_an_enum_takes_its_values():
    assert DataConfig(colour="blue").colour is Colour.BLUE
    assert DataConfig(colour=Colour.BLUE).colour is Colour.BLUE


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelConfig(layers="four"), "TestModel.layers: expected int, got str 'four'"),
        (lambda: ModelConfig(layers=4.0), "TestModel.layers: expected int, got float 4.0"),
        (lambda: ModelConfig(layers=True), "TestModel.layers: expected int, got bool True"),
        (lambda: ModelConfig(layers=None), "TestModel.layers: expected int, got None"),
        (lambda: ModelConfig(width="wide"), "TestModel.width: expected int, got str 'wide'"),
        (lambda: AdamConfig(rate=False), "TestAdam.rate: expected float, got bool False"),
        (
            lambda: AdamConfig(betas=(0.9,)),
            "TestAdam.betas: expected tuple[float, float], got tuple (0.9,)",
        ),
        (
            lambda: AdamConfig(betas=(0.9, "x")),
            "TestAdam.betas[1]: expected float, got str 'x'",
        ),
        (
            lambda: DataConfig(lengths="12"),
            "TestData.lengths: expected Sequence[int], got str '12'",
        ),
        (
            lambda: DataConfig(options={"a": (1.0, None)}),
            "TestData.options['a'][1]: expected float, got None",
        ),
        (
            lambda: DataConfig(options={1: (1.0,)}),
            "TestData.options key: expected str, got int 1",
        ),
        (
            lambda: DataConfig(colour="bleu"),
            "TestData.colour: expected one of 'red', 'blue', got 'bleu'; did you mean 'blue'?",
        ),
        (lambda: DataConfig(shuffle=1), "TestData.shuffle: expected bool, got int 1"),
        (
            lambda: ModelConfig(remat="ful"),
            "TestModel.remat: expected one of 'none', 'full', 'dots', got 'ful'; "
            "did you mean 'full'?",
        ),
        (
            lambda: MixerConfig(window="8"),
            "TestMixer.window: expected int | None, got str '8'",
        ),
        (
            lambda: DataConfig(corpora=(CorpusConfig(), "x")),
            "TestData.corpora[1]: expected TestCorpus, got str 'x'",
        ),
        (
            lambda: TestRunConfig(optimizer=CorpusConfig()),
            "TestRun.optimizer: expected TestAdam | TestMuon, got TestCorpus "
            "CorpusConfig(path='.', weight=1.0)",
        ),
    ],
)
def test_a_wrong_type_is_refused(make, message):
    with pytest.raises(config.ConfigError) as error:
        make()
    assert str(error.value) == message
    assert error.value.location is None


type Count = int


@dataclasses.dataclass(frozen=True)
class _Mixed:
    number: int | float = 0
    either: tuple[int, ...] | int = 1
    share: Annotated[float, "0 to 1"] = 0.5
    count: Count | Annotated[None, "none"] = None
    mode: Literal["a", "b"] | None = None
    level: Literal["low"] | int | None = None
    ones: Literal[1, 2] = 1
    items: list[int] = dataclasses.field(default_factory=list)
    anything: Any = None


Mixed = config.configurable("TestMixed")(_Mixed)


def test_a_union_prefers_the_member_that_takes_the_value_as_it_is():
    assert type(Mixed(number=3).number) is int
    assert type(Mixed(number=3.0).number) is float
    assert Mixed(either=[1, 2]).either == (1, 2)
    assert Mixed(level="low").level == "low"
    assert type(Mixed(share=1).share) is float
    assert Mixed(items=(1, 2)).items == [1, 2]


def test_a_union_says_what_is_wrong():
    with pytest.raises(config.ConfigError, match=r"TestMixed.either\[1\]: expected int, got str"):
        Mixed(either=[1, "x"])
    with pytest.raises(config.ConfigError, match="TestMixed.ones: expected one of 1, 2, got True"):
        Mixed(ones=True)
    with pytest.raises(
        config.ConfigError, match="TestMixed.number: expected int | float, got bool"
    ):
        Mixed(number=True)

    with pytest.raises(config.ConfigError, match="TestMixed.share: expected float, got None"):
        Mixed(share=None)
    with pytest.raises(config.ConfigError, match=r"count: expected int \| None, got str 'x'"):
        Mixed(count="x")
    message = "mode: expected one of 'a', 'b', None, got 'B'; did you mean 'b'?"
    with pytest.raises(config.ConfigError, match=re.escape(message)):
        Mixed(mode="B")


def test_annotations_of_a_class_in_a_function():
    @config.configurable("TestInner")
    @dataclasses.dataclass(frozen=True)
    class InnerConfig:
        size: int = 1

    @config.configurable("TestOuter")
    @dataclasses.dataclass(frozen=True)
    class OuterConfig:
        inner: "InnerConfig | None" = None

    @config.configurable("TestLost")
    @dataclasses.dataclass(frozen=True)
    class LostConfig:
        inner: "NoSuchConfig | None" = None

    assert OuterConfig(InnerConfig(2)).inner.size == 2
    with pytest.raises(config.ConfigError, match=r"expected TestInner \| None, got int 3"):
        OuterConfig(3)
    with pytest.raises(TypeError, match="annotation of .*LostConfig is unknown: .*NoSuchConfig"):
        LostConfig()


def test_an_error_survives_pickling():
    error = config.ConfigError("wrong", config.Location("run.gin", 3))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.location) == ("run.gin:3: wrong", config.Location("run.gin", 3))


def test_a_wrong_default_is_refused_too():
    @config.configurable("TestWrongDefault")
    @dataclasses.dataclass(frozen=True)
    class WrongDefaultConfig:
        size: int = "x"

    with pytest.raises(config.ConfigError, match="Default.size: expected int, got str 'x'"):
        WrongDefaultConfig()


def test_a_configurable_is_still_a_plain_dataclass():
    run = TestRunConfig(steps=3)
    assert dataclasses.replace(run, steps=4).steps == 4
    assert copy.deepcopy(run) == pickle.loads(pickle.dumps(run)) == run
    assert hash(MixerConfig(2)) == hash(MixerConfig(window=2))
    assert dataclasses.asdict(MixerConfig(2)) == {"window": 2, "heads": 4}
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.steps = 5
    with pytest.raises(TypeError, match="unexpected keyword argument 'step'"):
        TestRunConfig(step=3)


def test_what_cannot_be_configurable():
    class Plain:
        pass

    @dataclasses.dataclass
    class Thawed:
        pass

    @dataclasses.dataclass(frozen=True, slots=True)
    class Slotted:
        size: int = 1

    @dataclasses.dataclass(frozen=True)
    class Taken:
        pass

    for cls, message in ((Plain, "frozen=True"), (Thawed, "frozen=True"), (Slotted, "__slots__")):
        with pytest.raises(TypeError, match=message):
            config.configurable(cls)
    with pytest.raises(ValueError, match="name 'TestModel' .* is taken by .*ModelConfig"):
        config.configurable("TestModel")(Taken)
    with pytest.raises(ValueError, match=r"'a\.b' is no name"):
        config.configurable("a.b")(Taken)
    with pytest.raises(TypeError, match="Taken is not configurable"):
        config.gin_name(Taken)


def test_names():
    assert config.gin_name(ModelConfig) == "TestModel"
    assert config.gin_name(TestRunConfig) == "TestRun"


def test_gin_values_are_coerced_as_in_python():
    text = """
    TestAdam.rate = 1
    TestAdam.betas = [0, 1]
    TestData.options = {'a': [1, 2]}
    TestData.colour = 'blue'
    TestData.limit = 1e999
    """
    run = config.from_text(text).build(TestRunConfig)
    assert run.optimizer == AdamConfig(rate=1.0, betas=(0.0, 1.0))
    assert type(run.optimizer.rate) is float
    assert run.data == DataConfig(options={"a": (1.0, 2.0)}, colour=Colour.BLUE, limit=math.inf)
