# SPDX-License-Identifier: Apache-2.0
"""Every recipe resolves to its checked-in config; ``make golden`` refreshes them."""

from pathlib import Path

import pytest

from seqmix import config
from seqmix.training.experiment import Experiment

GOLDEN = Path(__file__).parent
CONFIGS = GOLDEN.parent.parent / "configs"
RECIPES = sorted(path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.gin"))


def test_there_are_recipes_and_nothing_is_left_over():
    assert Path("demo.gin") in RECIPES
    assert sorted(path.relative_to(GOLDEN) for path in GOLDEN.rglob("*.gin")) == RECIPES


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_recipe_resolves_to_its_golden_config(recipe):
    experiment = config.load([CONFIGS / recipe]).build(Experiment)
    assert config.resolved(experiment) == (GOLDEN / recipe).read_text(), "see: make golden"


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_golden_config_builds_the_recipe(recipe):
    experiment = config.load([CONFIGS / recipe]).build(Experiment)
    assert config.load([GOLDEN / recipe]).build(Experiment) == experiment
