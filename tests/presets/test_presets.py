# SPDX-License-Identifier: Apache-2.0
"""Every preset builds and counts what its table says; every tiny twin has its preset's layers."""

import itertools
import json

import jax
import pytest
from flax import nnx

from seqmix.models import HybridLM, inspect
from seqmix.models.inspection import parameter_count
from tools import presets

NAMES = presets.names()
TABLE = {
    row[0].partition("]")[0].strip("["): row
    for line in presets.TABLE.read_text().splitlines()
    if line.startswith("| [")
    for row in [[cell.strip() for cell in line.strip("|").split("|")]]
}
COUNTED = json.loads((presets.FOLDER / "counted.json").read_text())


def recipes(folder):
    return {path.stem for path in folder.glob("[!_]*.gin")}


def test_every_preset_has_a_twin_and_a_row():
    assert recipes(presets.FOLDER) == recipes(presets.FOLDER / "tiny") == set(NAMES) == set(TABLE)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_counts_what_the_table_says(name):
    model = presets.model(presets.FOLDER / f"{name}.gin")
    # Scanned, which is quicker than `inspect`: a period is traced once.
    abstract = nnx.eval_shape(lambda: HybridLM(model, rngs=nnx.Rngs(0)))
    count = parameter_count(abstract)
    assert TABLE[name][2] == f"{count:,}"
    assert (TABLE[name][4] == "=") == (name in COUNTED)
    if name in COUNTED:
        assert count == COUNTED[name]["total"]


@pytest.mark.slow
def test_the_table_is_what_the_tool_writes():
    assert presets.render() == presets.TABLE.read_text(), "see: python tools/presets.py"


def test_a_wrong_count_is_no_table():
    assert presets.is_rounded(8_030_261_248, "8.03B") and presets.is_rounded(7_499_999_999, "7B")
    assert not presets.is_rounded(8_036_000_000, "8.03B")
    assert presets.is_rounded(972_499_999, "972M") and not presets.is_rounded(973_387_520, "972M")
    assert presets.is_rounded(1_599_873_024, "1,599,873,024")
    assert not presets.is_rounded(1_599_873_025, "1,599,873,024")


def test_a_large_preset_is_inspected_without_memory():
    before = sum(array.nbytes for array in jax.live_arrays())
    report = inspect(presets.model(presets.FOLDER / "minimax_01.gin"))
    held = sum(array.nbytes for array in jax.live_arrays()) - before
    assert report.parameters > 4e11 and held < 1e6


@pytest.mark.parametrize("name", NAMES)
def test_a_twin_has_the_layers_of_its_preset_in_their_order(name):
    large, small = (
        [str(element) for element in presets.model(folder / f"{name}.gin").plan().elements]
        for folder in (presets.FOLDER, presets.FOLDER / "tiny")
    )
    assert set(small) == set(large)
    assert set(itertools.pairwise(small)) <= set(itertools.pairwise(large))
    assert len(small) <= 8
