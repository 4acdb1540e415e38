# SPDX-License-Identifier: Apache-2.0
"""Runs in processes of their own that are stopped, killed, or cannot write."""

import signal
import time

import numpy as np
import pytest

from seqmix.training import Checkpointer, load_run, train
from seqmix.training.metrics import read_metrics
from tests.training.runs import TRAIN, losses, spawn, tiny_experiment

TIMEOUT = 120


def wait_for(condition, process):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"the run ended too early: {process.communicate()}")
        time.sleep(0.002)


def steps_recorded(run_dir):
    return sum(record["split"] == "train" for record in read_metrics(run_dir))


# The steps of a tiny model are over before a signal arrives: this one's wait for each other.
SLOW = """
import time
from seqmix.training import loop
build = loop.build_program
def slow(*arguments):
    program = build(*arguments)
    put = program.put
    def later(self, batch):
        time.sleep(0.05)
        return put(batch)
    type(program).put = later
    return program
loop.build_program = slow
"""


def test_sigterm_saves_and_exits_cleanly(corpus, tmp_path, straight):
    process = spawn(SLOW + TRAIN, corpus, tmp_path, {"checkpoint_every": None})
    wait_for((tmp_path / "metrics.jsonl").exists, process)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, error
    result = next(line for line in out.splitlines() if line.startswith("RESULT"))
    step = int(result.split()[1])
    assert result.split()[2] == "SIGTERM" and step < 50
    reader = Checkpointer(tmp_path / "checkpoints", read_only=True)
    assert reader.steps() == [step]
    reader.close()
    train(tiny_experiment(corpus), tmp_path, progress=False)
    assert losses(tmp_path) == losses(straight[0])


def test_kill_at_any_moment_leaves_a_loadable_checkpoint(corpus, tmp_path, straight):
    """Killed twice while saving every step, at moments that differ from run to run."""
    checkpoints = tmp_path / "checkpoints"

    def saving():
        return checkpoints.is_dir() and any(
            "tmp" in entry.name and not entry.name.startswith("0")
            for entry in checkpoints.iterdir()
        )

    reached = 0
    for attempt in range(2):
        process = spawn(SLOW + TRAIN, corpus, tmp_path, {"checkpoint_every": 1})
        target = reached + 3

        def past_target(target=target):
            done = [int(p.name) for p in checkpoints.iterdir() if p.name.isdigit()]
            return bool(done) and max(done) >= target

        wait_for(lambda: checkpoints.is_dir() and past_target(), process)
        wait_for(saving, process)
        time.sleep(np.random.default_rng().uniform(0, 0.03))
        process.kill()
        process.communicate(timeout=TIMEOUT)
        reader = Checkpointer(checkpoints, read_only=True)
        latest = reader.latest_step()
        reader.close()
        assert latest is not None and latest >= target, attempt
        assert load_run(tmp_path).step == latest
        # No step that the checkpoint has seen is missing from the metrics.
        assert {s for s in losses(tmp_path) if s <= latest} == set(range(1, latest + 1))
        reached = latest
    train(tiny_experiment(corpus), tmp_path, progress=False)
    assert losses(tmp_path) == losses(straight[0])
    assert not saving()


def test_a_failing_asynchronous_save_stops_the_run_with_its_reason(corpus, tmp_path):
    """No file may grow past 12 KiB: what fails is the background write of the parameters."""
    limit = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from seqmix.training import loop
announce = loop._Run._announce
def limited(self):
    found = announce(self)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12 * 1024, resource.RLIM_INFINITY))
    return found
loop._Run._announce = limited
"""
    settings = {"checkpoint_every": 3, "eval_every": None}
    process = spawn(limit + TRAIN, corpus, tmp_path, settings)
    out, error = process.communicate(timeout=TIMEOUT)
    assert process.returncode != 0 and "RESULT" not in out
    last = [line for line in error.splitlines() if "CheckpointError" in line][-1]
    assert last.startswith("seqmix.training.checkpoint.CheckpointError: saving")
    assert "File too large" in last and "3.orbax-checkpoint-tmp/params" in last
    assert 3 <= steps_recorded(tmp_path) < 50
