# SPDX-License-Identifier: Apache-2.0
"""Every tiny twin learns in the steps it asks for, and those with experts spread their load."""

import numpy as np
import pytest

from seqmix import config, data
from seqmix.training import Experiment, read_metrics, train
from seqmix.training.program import build_program
from seqmix.training.step import summarise
from tools import presets

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]
OVERRIDES = (
    "Trainer.compilation_cache=False",  # the programs here are not to be found by others
    "Trainer.eval_every=None",
    "StdlibCorpus.max_bytes=200000",
)


def experiment(name: str) -> Experiment:
    return config.load([presets.FOLDER / "tiny" / f"{name}.gin"], OVERRIDES).build(Experiment)


@pytest.mark.parametrize("name", presets.names())
def test_a_twin_lowers_its_loss(name, tmp_path):
    train(experiment(name), tmp_path, progress=False)
    losses = [record["loss"] for record in read_metrics(tmp_path) if record["split"] == "train"]
    assert len(losses) == 10
    assert np.mean(losses[-2:]) < losses[0] - 1.0


@pytest.mark.parametrize("name", ["jamba", "qwen3_next", "kimi_linear", "minimax_01"])
def test_experts_of_a_twin_even_out_from_a_skewed_start(name):
    twin = experiment(name)
    batches = data.build(
        twin.data,
        split="train",
        batch_size=twin.trainer.batch_size,
        vocabulary=twin.model.vocabulary,
    )
    program = build_program(twin, batches.tokenizer.byte_lengths())
    state = program.initialise()
    # Routers have no bias, so one channel of the embedding is made constant, and every router that
    # reads it prefers expert 0.
    params = dict(state.params)
    params["embedding"] = params["embedding"].at[:, 0].set(params["embedding"].std() * 8)
    for key, value in params.items():
        if key.endswith("router.kernel"):
            params[key] = value.at[..., 0, 0].add(2.0)
    state, loads = state._replace(params=params), []
    # Twice the steps of the recipe: by then the load has settled.
    for batch, _ in zip(batches, range(2 * twin.trainer.steps), strict=False):
        state, vector = program.train_step(state, program.put(batch))
        record = summarise(np.asarray(vector), 0.0, program.definition.auxiliary)
        loads.append(record["moe.max_load"])
    part = twin.model.mixers.get("moe", twin.model.feed_forward)
    most = part.experts / part.top_k  # 1 is even
    assert loads[0] - 1 > 0.5 * (most - 1)
    assert np.mean(loads[-10:]) - 1 < 0.5 * (loads[0] - 1)
