# SPDX-License-Identifier: Apache-2.0
"""What gin files build: defaults, references, scopes, macros, includes, overrides, children."""

import dataclasses

import pytest

from seqmix import config
from tests.config.classes import (
    AdamConfig,
    CorpusConfig,
    DataConfig,
    MixerConfig,
    ModelConfig,
    MuonConfig,
    RecurrenceConfig,
    RequiredConfig,
    TestRunConfig,
)


def build(text, root=TestRunConfig, overrides=()):
    return config.from_text(text, overrides=overrides).build(root)


def test_nothing_bound_builds_the_defaults():
    assert build("") == TestRunConfig()
    assert build("# only a comment\n") == TestRunConfig()
    assert config.load([]).build(TestRunConfig) == TestRunConfig()


def test_fields_take_the_bindings_of_their_own_class():
    run = build("TestModel.layers = 8\nTestAdam.rate = 0.5\nTestRun.steps = 7\n")
    assert run == TestRunConfig(
        model=ModelConfig(layers=8), optimizer=AdamConfig(rate=0.5), steps=7
    )


def test_a_derived_value_follows_a_binding():
    # The default model has inner_width 512 by then; it must not stay.
    assert build("TestModel.width = 64").model.inner_width == 256


def test_a_default_with_values_of_its_own_keeps_them_under_a_binding():
    @config.configurable("TestBase")
    @dataclasses.dataclass(frozen=True)
    class BaseConfig:
        model: ModelConfig = dataclasses.field(default_factory=lambda: ModelConfig(layers=9))

    built = build("TestModel.width = 32\nTestMixer.heads = 2", BaseConfig).model
    assert (built.layers, built.width, built.inner_width) == (9, 32, 128)
    assert built.mixers["mixer"].heads == 2


def test_a_default_with_children_of_its_own_keeps_them_under_a_binding():
    @config.configurable("TestChildBase")
    @dataclasses.dataclass(frozen=True)
    class ChildBaseConfig:
        model: ModelConfig = dataclasses.field(
            default_factory=lambda: ModelConfig(
                pattern="local/mixer", mixers={"local/mixer": MixerConfig(window=3)}
            )
        )

    text = "TestMixer.heads = 2\nlocal/TestMixer.heads = 6"
    assert build(text, ChildBaseConfig).model.mixers == {"local/mixer": MixerConfig(3, 6)}


def test_references():
    run = build(
        """
        TestRun.optimizer = @TestMuon()
        TestMuon.rate = 0.1
        TestAdam.rate = 0.25
        TestRun.teacher = @TestModel()
        """
    )
    assert run.optimizer == MuonConfig(rate=0.1, inner=AdamConfig(rate=0.25))
    assert run.teacher == ModelConfig()
    assert build("TestRun.teacher = None").teacher is None


def test_references_in_containers():
    run = build(
        """
        TestData.corpora = [@code/TestCorpus(), @TestCorpus()]
        TestData.note = {'deep': (@prose/TestCorpus(),)}
        TestCorpus.path = 'p'
        code/TestCorpus.weight = 2
        prose/TestCorpus.weight = 3
        """
    )
    assert run.data.corpora == (CorpusConfig("p", 2.0), CorpusConfig("p", 1.0))
    assert run.data.note == {"deep": (CorpusConfig("p", 3.0),)}


def test_bindings_reach_configs_in_a_default_container():
    assert build("TestCorpus.weight = 5").data.corpora == (CorpusConfig(".", 5.0),)


def test_a_scoped_binding_falls_back_to_the_unscoped():
    run = build(
        """
        TestRun.teacher = @big/TestModel()
        TestModel.layers = 2
        TestModel.width = 32
        big/TestModel.layers = 6
        """
    )
    assert (run.model.layers, run.model.width) == (2, 32)
    assert (run.teacher.layers, run.teacher.width) == (6, 32)


def test_scopes_nest_and_are_inherited():
    run = build(
        """
        TestRun.teacher = @big/TestModel()
        TestModel.pattern = 'local/mixer, mixer'
        TestMixer.heads = 1
        TestMixer.window = 10
        big/TestMixer.heads = 2
        big/local/TestMixer.window = 30
        local/TestMixer.window = 20
        """
    )
    assert run.model.mixers == {"local/mixer": MixerConfig(20, 1), "mixer": MixerConfig(10, 1)}
    assert run.teacher.mixers == {"local/mixer": MixerConfig(30, 2), "mixer": MixerConfig(10, 2)}


def test_children_are_built_from_their_own_bindings():
    run = build(
        """
        TestModel.pattern = 'recurrence, local/mixer, mixer'
        TestRecurrence.state_size = 3
        local/TestMixer.window = 256
        TestMixer.heads = 8
        """
    )
    assert run.model.mixers == {
        "recurrence": RecurrenceConfig(3),
        "local/mixer": MixerConfig(256, 8),
        "mixer": MixerConfig(None, 8),
    }
    assert ModelConfig().mixers == {"recurrence": RecurrenceConfig(), "mixer": MixerConfig()}


def test_macros():
    run = build(
        """
        width = 64
        double = (%width, %sizes/layers)
        sizes/layers = 3
        TestModel.width = %width
        TestModel.layers = %sizes/layers
        TestData.lengths = %double
        TestData.note = {'w': [%width]}
        """
    )
    assert (run.model.width, run.model.layers) == (64, 3)
    assert run.data == DataConfig(lengths=(64, 3), note={"w": [64]})


def test_a_macro_may_be_given_after_its_use_and_by_an_override():
    assert build("TestModel.width = %w\nw = 3").model.width == 3
    assert build("TestModel.width = %w\nw = 3", overrides=["w=5"]).model.width == 5


def test_a_macro_may_hold_a_reference():
    assert build("o = @TestMuon()\nTestRun.optimizer = %o").optimizer == MuonConfig()


def test_values_over_many_lines_and_blocks():
    run = build(
        """
TestModel:
    layers = 2  # a comment

    # another
    width = 16
big/TestModel:
    pattern = ('recurrence, '
               'recurrence')
TestData.lengths = (
    1,
    2,  # two
)
TestRun.teacher = @big/TestModel()
TestRun.steps = -3
        """
    )
    assert (run.model.layers, run.model.width) == (2, 16)
    assert run.teacher.pattern == "recurrence, recurrence"
    assert run.data.lengths == (1, 2)
    assert run.steps == -3


def test_later_bindings_replace_earlier_ones(tmp_path):
    (tmp_path / "a.gin").write_text("TestModel.layers = 1\nTestModel.width = 1\n")
    (tmp_path / "b.gin").write_text("TestModel.layers = 2\n")
    paths = [tmp_path / "a.gin", tmp_path / "b.gin"]
    model = config.load(paths).build(TestRunConfig).model
    assert (model.layers, model.width) == (2, 1)
    overrides = ["TestModel.layers=3", "TestModel.layers=4"]
    assert config.load(paths, overrides).build(TestRunConfig).model.layers == 4
    assert config.load(str(paths[0])).build(TestRunConfig).model.layers == 1


def test_overrides():
    run = build(
        "TestModel.pattern = 'mixer'",
        overrides=[
            "TestModel.pattern='local/mixer, recurrence'",
            "local/TestMixer.window=7",
            "TestRun.optimizer=@TestMuon()",
            "TestData.lengths=[1, 2]",
        ],
    )
    assert run.model.mixers == {"local/mixer": MixerConfig(7), "recurrence": RecurrenceConfig()}
    assert run.optimizer == MuonConfig()
    assert run.data.lengths == (1, 2)


def test_includes_are_relative_to_the_including_file(tmp_path, monkeypatch):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "base.gin").write_text("width = 48\nTestModel.layers = 1\nTestRun.steps = 9\n")
    (tmp_path / "deep" / "middle.gin").write_text(
        "include '../base.gin'\nTestModel.layers = 2\nTestModel.width = %width\n"
    )
    (tmp_path / "deep" / "er" / "top.gin").write_text(
        "TestModel.layers = 3\ninclude '../middle.gin'\nwidth = 24\n"
    )
    monkeypatch.chdir(tmp_path / "deep")
    run = config.load(["er/top.gin"]).build(TestRunConfig)
    # An include stands where it is written: what it binds replaces what came before it.
    assert (run.model.layers, run.model.width, run.steps) == (2, 24, 9)


def test_one_file_may_be_included_twice(tmp_path):
    (tmp_path / "base.gin").write_text("TestModel.layers = 1\n")
    for name in ("a", "b"):
        (tmp_path / f"{name}.gin").write_text("include 'base.gin'\n")
    (tmp_path / "top.gin").write_text("include 'a.gin'\ninclude 'b.gin'\n")
    assert config.load([tmp_path / "top.gin"]).build(TestRunConfig).model.layers == 1


def test_imports(monkeypatch, tmp_path):
    package = tmp_path / "config_plugin"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "extra.py").write_text(
        "import dataclasses\n"
        "from seqmix import config\n"
        "@config.configurable('TestPlugin')\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class PluginConfig:\n"
        "    size: int = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SEQMIX_CONFIG_IMPORTS", "other, config_plugin")
    text = "import config_plugin.extra\nTestData.note = @TestPlugin()\nTestPlugin.size = 2\n"
    run = build(text)
    assert run.data.note.size == 2
    assert config.resolved(run).startswith("import config_plugin.extra\n\n")
    assert build("import seqmix.config\nfrom seqmix import config\n") == TestRunConfig()


def test_a_field_without_default_is_built_or_asked_for():
    built = build("TestRequired.size = 1\nTestRequired.optimizer = @TestAdam()", RequiredConfig)
    assert built == RequiredConfig(1, AdamConfig(), ModelConfig())


def test_two_sources_know_nothing_of_each_other():
    one, two = (config.from_text(f"TestModel.layers = {n}") for n in (1, 2))
    assert two.build(TestRunConfig).model.layers == 2
    assert one.build(TestRunConfig).model.layers == 1
    assert two.build(ModelConfig).layers == 2


def test_several_roots_of_one_source():
    source = config.from_text("TestModel.layers = 2\nTestCorpus.weight = 3\n")
    assert source.build(ModelConfig, check_used=False).layers == 2
    with pytest.raises(config.ConfigError, match="<text>:2: unused binding TestCorpus.weight"):
        source.check_all_used()
    assert source.build(DataConfig, check_used=False).corpora == (CorpusConfig(".", 3.0),)
    source.check_all_used()
