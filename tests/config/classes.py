# SPDX-License-Identifier: Apache-2.0
"""Small configurables for the tests of seqmix.config. All annotations here are strings."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from seqmix import config

type Size = int


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@config.configurable("TestAdam")
@dataclasses.dataclass(frozen=True)
class AdamConfig:
    rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)


@config.configurable("TestMuon")
@dataclasses.dataclass(frozen=True)
class MuonConfig:
    rate: float = 0.02
    inner: AdamConfig = dataclasses.field(default_factory=AdamConfig)


@config.configurable("TestMixer")
@dataclasses.dataclass(frozen=True)
class MixerConfig:
    window: int | None = None
    heads: int = 4

    def __post_init__(self):
        if self.heads < 1:
            raise ValueError(f"TestMixer.heads must be >= 1, got {self.heads}")


@config.configurable("TestRecurrence")
@dataclasses.dataclass(frozen=True)
class RecurrenceConfig:
    state_size: int = 16


KINDS = {"mixer": MixerConfig, "recurrence": RecurrenceConfig}


@config.configurable("TestModel")
@dataclasses.dataclass(frozen=True)
class ModelConfig:
    pattern: str = "recurrence, mixer"
    layers: int = 4
    width: Size = 128
    inner_width: int | None = None
    remat: Literal["none", "full", "dots"] = "none"
    mixers: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.layers < 1:
            raise config.ConfigError(f"TestModel.layers must be >= 1, got {self.layers}")
        if self.layers == self.width == 13:
            raise ValueError("thirteen brings bad luck")
        if self.inner_width is None:
            object.__setattr__(self, "inner_width", 4 * self.width)
        if self.inner_width < self.width:
            raise ValueError(f"inner_width must be >= width, got {self.inner_width}")
        mixers = {c.key: c.config() for c in self.gin_children({"pattern": self.pattern}).values()}
        object.__setattr__(self, "mixers", {**mixers, **self.mixers})

    @classmethod
    def gin_children(cls, values: Mapping[str, Any]) -> Mapping[str, config.Child]:
        children = {}
        for key in map(str.strip, values["pattern"].split(",")):
            scope, _, kind = key.rpartition("/")
            if kind == "nothing":
                raise ValueError("unknown kind 'nothing'")
            if kind not in KINDS:
                raise ValueError(f"TestModel.pattern has an unknown mixer {kind!r}")
            children[key] = config.Child("mixers", key, KINDS[kind], scope)
        return children


@config.configurable("TestCorpus")
@dataclasses.dataclass(frozen=True)
class CorpusConfig:
    path: str = "."
    weight: float = 1.0


@config.configurable("TestData")
@dataclasses.dataclass(frozen=True)
class DataConfig:
    corpora: tuple[CorpusConfig, ...] = dataclasses.field(default_factory=lambda: (CorpusConfig(),))
    lengths: Sequence[int] = (8,)
    options: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    colour: Colour = Colour.RED
    shuffle: bool = True
    limit: float = 1.0
    note: Any = None


@config.configurable  # the name is the class's: TestRun
@dataclasses.dataclass(frozen=True)
class TestRunConfig:
    __test__ = False  # not a test class

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: AdamConfig | MuonConfig = dataclasses.field(default_factory=AdamConfig)
    teacher: ModelConfig | None = None
    steps: int = 100


@config.configurable("TestRequired")
@dataclasses.dataclass(frozen=True)
class RequiredConfig:
    size: int
    optimizer: AdamConfig | MuonConfig
    model: ModelConfig


@config.configurable("TestLoop")
@dataclasses.dataclass(frozen=True)
class LoopConfig:
    next: LoopConfig | None = None
