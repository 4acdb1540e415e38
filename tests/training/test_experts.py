# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts in training: the log, the selection bias and its checkpoints."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqmix.models import MoEConfig
from seqmix.training import load_run, read_metrics, train
from seqmix.training.program import build_program
from seqmix.training.step import metric_names, summarise
from tests.training.runs import spawn, tiny_experiment
from tests.training.test_loop import stop_at

LENGTHS = np.ones(257, np.int32)
BIASED = MoEConfig(
    experts=4,
    top_k=2,
    hidden=8,
    router="sigmoid",
    selection_bias=True,
    bias_rate=0.01,
    balance_loss=0.0,
)
BIAS, LOAD = (f"stack.leading.0.feed_forward.{name}" for name in ("bias", "load"))
ROUTER = "stack.leading.0.feed_forward.router.kernel"


def model(part=BIASED, **settings):
    """Experts alone: quick to compile."""
    return {"pattern": "moe", "layers": 1, "mixers": {"moe": part}} | settings


def run(program, state, batches):
    records = []
    for batch in batches:
        state, vector = program.train_step(state, program.put(batch))
        auxiliary = program.definition.auxiliary
        values = dict(zip(metric_names(auxiliary), map(float, vector), strict=True))
        records.append(summarise(np.asarray(vector), 0.0, auxiliary) | {"finite": values["finite"]})
    return state, records


def random_batches(count):
    """Rows of random tokens: 240 each step, all different from step to step."""
    random = np.random.default_rng(0)
    for _ in range(count):
        tokens = random.integers(0, 256, (4, 61)).astype(np.int32)
        positions = np.arange(61, dtype=np.int32)[None].repeat(4, 0)
        yield {"tokens": tokens, "segment_ids": np.ones_like(tokens), "positions": positions}


@pytest.fixture(scope="module")
def program(corpus):
    return build_program(tiny_experiment(corpus, model()), LENGTHS)


LOSS = dataclasses.replace(BIASED, router="softmax", selection_bias=False, balance_loss=0.3)


@pytest.mark.parametrize(
    "part", [BIASED, pytest.param(LOSS, marks=pytest.mark.slow)], ids=["bias", "loss"]
)
def test_a_skewed_start_evens_out(corpus, program, part):
    if part != BIASED:
        program = build_program(tiny_experiment(corpus, model(part)), LENGTHS)
    state = program.initialise()
    # The norm's output has no constant part, so the scale of one channel makes a skew of its sign.
    embedding = state.params["embedding"].at[:, 0].set(0.5)
    kernel = state.params[ROUTER].at[0, :2].add(1.0)
    state = state._replace(params=state.params | {"embedding": embedding, ROUTER: kernel})
    state, records = run(program, state, random_batches(50))
    found = [record["moe.max_load"] for record in records]
    assert found[0] > 1.8
    assert np.mean(found[-10:]) < 1.4
    assert all(record["moe.dead_experts"] == 0 for record in records[-10:])


def biases_after(program, start, **params):
    """The bias after one step, and whether its gradient was finite."""
    state = jax.device_put(start, program.shardings)
    state = state._replace(params=state.params | params)
    batch = next(random_batches(1))
    state, (record,) = run(program, state, [batch])
    assert not np.asarray(state.variables[LOAD]).any()
    return np.asarray(state.variables[BIAS]), record["finite"]


def test_finished_steps_move_the_bias(program):
    fresh = jax.device_get(program.initialise())
    bias, finite = biases_after(program, fresh)
    assert finite and set(np.unique(bias)) <= {np.float32(-0.01), 0.0, np.float32(0.01)}
    assert bias.any()
    norm = "stack.leading.0.feed_forward_norm.scale"
    nan = jnp.full_like(fresh.params[norm], jnp.nan)
    bias, finite = biases_after(program, fresh, **{norm: nan})
    assert not finite and not bias.any()


@pytest.mark.slow
def test_the_bias_follows_the_whole_batch_where_experts_are_trained(corpus, program):
    fresh = jax.device_get(program.initialise())
    bias, _ = biases_after(program, fresh)
    halves = build_program(tiny_experiment(corpus, model(), gradient_accumulation=2), LENGTHS)
    np.testing.assert_array_equal(biases_after(halves, fresh)[0], bias)
    frozen = build_program(tiny_experiment(corpus, model(), trainable=("^embedding",)), LENGTHS)
    bias, _ = biases_after(frozen, jax.device_get(frozen.initialise()))
    assert not bias.any()


@pytest.mark.slow
def test_a_run_resumes_to_the_bit_and_loads_its_bias(corpus, tmp_path, monkeypatch):
    settings = {"steps": 12, "eval_every": None, "checkpoint_every": 6}
    experiment = tiny_experiment(corpus, model(layers=2, scan=True), **settings)
    train(experiment, tmp_path / "straight", progress=False)
    with monkeypatch.context() as patch:
        stop_at(patch, 6)
        assert train(experiment, tmp_path / "cut", progress=False).step == 6
    train(experiment, tmp_path / "cut", progress=False)
    runs = [load_run(tmp_path / name).model for name in ("straight", "cut")]
    parts = [run.stack.periods[0].feed_forward for run in runs]
    assert parts[0].bias[...].shape == (2, 4) and parts[0].bias[...].any()
    np.testing.assert_array_equal(parts[0].bias[...], parts[1].bias[...])
    np.testing.assert_array_equal(parts[0].experts.up.kernel[...], parts[1].experts.up.kernel[...])
    records = [r for r in read_metrics(tmp_path / "cut") if r["split"] == "train"]
    assert all(1 <= r["moe.max_load"] <= 2 and 0 <= r["moe.min_load"] <= 1 for r in records)


EIGHT = """
import dataclasses, sys
from pathlib import Path
import jax, numpy as np
from seqmix.parallel import MeshConfig
from seqmix.training.program import build_program
from tests.training.test_experts import BIAS, BIASED, LENGTHS, model, random_batches, run
from tests.training.runs import tiny_experiment

assert jax.device_count() == 8
part = dataclasses.replace(BIASED, balance_loss=0.1, shared_experts=1)
base = tiny_experiment(Path(sys.argv[1]), model(part), batch_size=8, gradient_accumulation=1)


def losses(count, **mesh):
    experiment = dataclasses.replace(base, mesh=MeshConfig(**mesh))
    program = build_program(experiment, LENGTHS, jax.devices()[:count])
    batches = [{k: np.concatenate([v, v[::-1]]) for k, v in b.items()} for b in random_batches(3)]
    state, records = run(program, program.initialise(), batches)
    names = ("loss", "moe.balance_loss", "moe.max_load")
    return state, [[record[name] for name in names] for record in records], program


one, alone, _ = losses(1)
eight, together, program = losses(8, data=2, fsdp=4)
np.testing.assert_allclose(together, alone, rtol=2e-5)
np.testing.assert_array_equal(one.variables[BIAS], eight.variables[BIAS])
kernel = eight.params["stack.leading.0.feed_forward.experts.up.kernel"]
assert kernel.addressable_shards[0].data.shape == (4, 4, 8)
print("DONE")
"""


@pytest.mark.slow
def test_eight_devices_route_as_one(corpus):
    process = spawn(EIGHT, corpus, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    out, error = process.communicate(timeout=400)
    assert process.returncode == 0, error
    assert "DONE" in out
