# SPDX-License-Identifier: Apache-2.0
import asyncio
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from seqmix.training import Checkpointer, CheckpointError, CheckpointMismatchError
from seqmix.training.checkpoint import check_facts, flatten, has_checkpoint, unflatten
from seqmix.training.state import TrainState


def make_state(step=3):
    params = {"a.kernel": jnp.arange(12.0).reshape(3, 4), "b": jnp.ones(3, jnp.bfloat16)}
    moments = optax.adamw(1.0).init(params)
    return TrainState(
        step=jnp.int32(step),
        params=params,
        variables={"rng.count": jnp.uint32(7)},
        optimizer=jax.tree.map(lambda x: x + 1, moments),
        skipped=jnp.int32(2),
        consecutive=jnp.int32(1),
    )


def shardings_of(state):
    return jax.tree.map(lambda x: x.sharding, state)


def test_flatten_and_back():
    state = make_state()
    flat = flatten(state)
    assert {"step", "variables/rng.count", "optimizer/0/mu/a.kernel"} <= set(flat)
    again = unflatten(flat, state.params, state)
    assert jax.tree.all(jax.tree.map(np.array_equal, state, again))


@pytest.mark.parametrize("data", [{"position": {"step": 4}}, b"\x00\xff"])
def test_everything_comes_back(tmp_path, data):
    state = make_state()
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    assert checkpointer.latest_step() is None
    assert checkpointer.save(3, state, data, {"HybridLM.scan": True})
    assert not checkpointer.save(3, state, data, {})
    checkpointer.wait()
    restored, position = checkpointer.restore(3, state, shardings_of(state))
    assert position == data and checkpointer.facts(3) == {"HybridLM.scan": True}
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for new, old in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert new.dtype == old.dtype
        np.testing.assert_array_equal(new, old)
    checkpointer.close()
    reader = Checkpointer(tmp_path / "checkpoints", read_only=True)
    params = reader.restore_params(3, state.params, shardings_of(state).params)
    np.testing.assert_array_equal(params["a.kernel"], state.params["a.kernel"])
    places = shardings_of(state).variables
    variables = reader.restore_variables(3, state.variables, places)
    assert variables == state.variables
    assert reader.restore_variables(3, {}, {}) == {}
    for wrong, match in (
        ({"b": jnp.ones(2)}, "'variables/b' is missing"),
        (
            {"rng.count": jnp.ones(2)},
            r"'variables/rng.count' has shape \(\), the model's is \(2,\)",
        ),
    ):
        with pytest.raises(CheckpointMismatchError, match=match):
            reader.restore_variables(3, wrong, places)
    reader.close()


def test_donated_buffers_do_not_reach_the_checkpoint(tmp_path):
    increment = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    big = {"a": jnp.zeros((1500, 1500)), "b": jnp.zeros(3)}
    zero = jnp.zeros((), jnp.int32)
    state = TrainState(zero, big, {}, (), zero + 0, zero + 0)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(0, state, {}, {})
    for _ in range(20):
        state = increment(state)
    checkpointer.wait()
    restored, _ = checkpointer.restore(0, state, shardings_of(state))
    assert not np.any(restored.params["a"]) and int(restored.step) == 0
    checkpointer.close()


def test_keep_last_and_keep_every(tmp_path):
    assert not has_checkpoint(tmp_path / "checkpoints")
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep_last=2, keep_every=4)
    state = make_state()
    for step in range(1, 8):
        checkpointer.save(step, state, {}, {})
    checkpointer.wait()
    checkpointer.close()
    assert has_checkpoint(tmp_path / "checkpoints")
    reader = Checkpointer(tmp_path / "checkpoints", read_only=True)
    assert reader.steps() == [4, 6, 7] and reader.latest_step() == 7
    reader.close()


def test_reading_needs_a_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoints: .*absent does not exist"):
        Checkpointer(tmp_path / "absent", read_only=True)
    assert not (tmp_path / "absent").exists()


def test_another_model_is_named(tmp_path):
    state = make_state()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state, {}, {})
    checkpointer.wait()
    shardings = shardings_of(state).params
    wider = {**state.params, "a.kernel": jnp.zeros((3, 5))}
    with pytest.raises(CheckpointMismatchError, match=r"'a.kernel' has shape \(3, 4\).*\(3, 5\)"):
        checkpointer.restore_params(1, wider, shardings)
    with pytest.raises(CheckpointMismatchError, match="checkpoint 1 in .*'c' is missing"):
        checkpointer.restore_params(1, {**state.params, "c": jnp.ones(1)}, shardings)
    with pytest.raises(CheckpointMismatchError, match="'b' is not in the model"):
        checkpointer.restore_params(1, {"a.kernel": state.params["a.kernel"]}, shardings)
    checkpointer.close()


def test_facts_name_every_setting_that_differs():
    saved = {"HybridLM.scan": True, "HybridLM.layers": 4, "Trainer.seed": 0}
    check_facts(saved, dict(saved), "run")
    with pytest.raises(
        CheckpointMismatchError,
        match="HybridLM.scan is False, the checkpoint was written with True; HybridLM.layers is 5",
    ):
        check_facts(saved, {**saved, "HybridLM.scan": False, "HybridLM.layers": 5}, "run")


def test_a_directory_that_cannot_be_written_fails_at_once(tmp_path):
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    checkpointer.save(1, make_state(), {}, {})
    checkpointer.wait()
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("a file where the directory was")
    with pytest.raises(CheckpointError, match="checkpoint 2 .*NotADirectoryError"):
        checkpointer.save(2, make_state(), {}, {})
    checkpointer.close()


@pytest.mark.parametrize("call", ["poll", "wait", "save"])
def test_an_asynchronous_failure_comes_out_of_the_next_call(tmp_path, monkeypatch, call):
    """The failure happens in the background, after `save` has returned (failures 48)."""
    checkpointer = Checkpointer(tmp_path)
    state = make_state()
    checkpointer.save(1, state, {}, {})
    checkpointer.wait()

    async def no_space(*_):
        await asyncio.sleep(0.2)  # after `save` has returned
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ocp.JsonCheckpointHandler, "_save_fn", no_space)
    assert checkpointer.save(2, state, {}, {})
    calls = {
        "poll": lambda: poll_until(checkpointer, seconds=30),
        "wait": checkpointer.wait,
        "save": lambda: checkpointer.save(3, state, {}, {}),
    }
    with pytest.raises(CheckpointError, match="OSError: .*No space left on device"):
        calls[call]()
    checkpointer.close()
    reader = Checkpointer(tmp_path, read_only=True)
    assert reader.latest_step() == 1
    reader.close()


def poll_until(checkpointer, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        checkpointer.poll()
        time.sleep(0.01)
