# SPDX-License-Identifier: Apache-2.0
"""Meshes and shardings; what needs several devices runs in processes with virtual CPU devices."""

import socket
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from seqmix.parallel import MeshConfig, make_mesh, parameter_spec
from seqmix.training import load_run, train
from tests.training.runs import losses, spawn, tiny_experiment

DEVICES = "--xla_force_host_platform_device_count="


@pytest.mark.parametrize(
    ("shape", "fsdp", "stacked", "wanted"),
    [
        ((16, 32), 4, False, P(None, "fsdp")),
        ((32, 16), 4, False, P("fsdp")),
        ((16, 16), 4, False, P("fsdp")),
        ((8, 2, 6), 4, True, P()),  # the period axis is whole, 2 and 6 are not multiples of 4
        ((8, 6, 4), 2, True, P(None, "fsdp")),
        ((64, 4, 6), 2, True, P(None, None, "fsdp")),
        ((6,), 4, False, P()),
        ((2,), 4, False, P()),
        ((), 4, False, P()),
        ((16, 32), 1, False, P()),
    ],
)
def test_parameter_rule(shape, fsdp, stacked, wanted):
    assert parameter_spec(shape, fsdp, stacked=stacked) == wanted


def test_mesh_sizes():
    assert dict(make_mesh(MeshConfig()).shape) == {"data": jax.device_count(), "fsdp": 1}
    with pytest.raises(ValueError, match="at most one axis"):
        MeshConfig(data=-1, fsdp=-1)
    with pytest.raises(ValueError, match="Mesh.fsdp must be >= 1, or -1 for the rest, got 0"):
        MeshConfig(fsdp=0)
    fake = [SimpleNamespace(id=i) for i in range(6)]
    with pytest.raises(ValueError, match=r"Mesh.data=-1, Mesh.fsdp=4: .* devices, 6"):
        make_mesh(MeshConfig(data=-1, fsdp=4), fake)
    with pytest.raises(ValueError, match=r"Mesh.data=2, Mesh.fsdp=2: .* devices, 6"):
        make_mesh(MeshConfig(data=2, fsdp=2), fake)


EIGHT = """
import dataclasses, sys
from pathlib import Path
import jax, numpy as np
from seqmix import data
from seqmix.parallel import MeshConfig
from seqmix.training import Checkpointer, train
from seqmix.training.program import build_program
from tests.training.runs import losses, tiny_experiment

assert jax.device_count() == 8
base = tiny_experiment(Path(sys.argv[1]), batch_size=8, gradient_accumulation=1)
folder = Path(sys.argv[2])
dataset = data.build(base.data, split="train", batch_size=8)
batches = [batch for batch, _ in zip(dataset, range(4))]


def program_on(count, **mesh):
    experiment = dataclasses.replace(base, mesh=MeshConfig(**mesh))
    return build_program(experiment, dataset.tokenizer.byte_lengths(), jax.devices()[:count])


def run(program, state, batches):
    found = []
    for batch in batches:
        state, vector = program.train_step(state, program.put(batch))
        found.append(np.asarray(vector[0] / vector[2]))
    return state, found


one = program_on(1)
start = jax.device_get(one.initialise())
state, alone = run(one, one.initialise(), batches)

eight = program_on(8, data=2, fsdp=4)
state = eight.initialise()
for name, value in start.params.items():
    # Any mesh draws the same numbers; the compiler vectorises the last digit differently.
    np.testing.assert_allclose(state.params[name], value, rtol=1e-6, err_msg=name)
name = max(state.params, key=lambda name: state.params[name].size)
kernel, moments = state.params[name], state.optimizer[1][0]
assert len(kernel.addressable_shards) == 8
assert kernel.addressable_shards[0].data.size * 4 == kernel.size
assert moments.mu[name].sharding == moments.nu[name].sharding == kernel.sharding
state, together = run(eight, state, batches[:3])
np.testing.assert_allclose(together, alone[:3], rtol=2e-5)

saved = jax.device_get(state)
checkpointer = Checkpointer(folder / "eight")
checkpointer.save(3, state, {}, {})
checkpointer.wait()
for count, mesh in ((1, {}), (2, {}), (4, {"fsdp": 4}), (8, {"data": 4, "fsdp": 2}), (8, {})):
    program = one if count == 1 else program_on(count, **mesh)
    restored, _ = checkpointer.restore(3, program.abstract, program.shardings)
    assert jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(restored), saved)), mesh
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, restored, program.shardings))
    if count == 1:
        _, rest = run(program, restored, batches[3:])
        np.testing.assert_allclose(rest, alone[3:], rtol=2e-5)
checkpointer.close()
print("DONE")
"""


@pytest.mark.slow
def test_eight_devices_train_as_one_and_checkpoints_move_between_meshes(corpus, tmp_path):
    process = spawn(EIGHT, corpus, tmp_path, XLA_FLAGS=DEVICES + "8")
    out, error = process.communicate(timeout=400)
    assert process.returncode == 0, error
    assert "DONE" in out


PROCESSES = """
import dataclasses, sys
from pathlib import Path
from seqmix.parallel import MeshConfig, initialize_distributed
initialize_distributed(f"localhost:{sys.argv[3]}", 2, int(sys.argv[4]))
initialize_distributed()  # a second call does nothing
import jax
from seqmix.training import loop, train
from tests.training.runs import tiny_experiment
assert (jax.process_count(), jax.device_count()) == (2, 4)
base = tiny_experiment(Path(sys.argv[1]))
loop.StopRequest.reached = lambda self, step: step >= 15
experiment = dataclasses.replace(base, mesh=MeshConfig(data=2, fsdp=2))
print("RESULT", train(experiment, sys.argv[2], progress=False).step)
"""


@pytest.mark.slow
def test_two_processes_train_as_one_and_one_goes_on(corpus, tmp_path):
    """Saved by two processes of two devices each, resumed by one process (failures 43, 44)."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    run_dir = tmp_path / "run"
    processes = [
        spawn(PROCESSES, corpus, run_dir, port, rank, XLA_FLAGS=DEVICES + "2") for rank in (0, 1)
    ]
    for process in processes:
        out, error = process.communicate(timeout=400)
        assert process.returncode == 0, error
        assert "RESULT 15" in out
    assert load_run(run_dir).step == 15
    train(tiny_experiment(corpus), run_dir, progress=False)
    train(tiny_experiment(corpus), tmp_path / "alone", progress=False)
    found, alone = losses(run_dir), losses(tmp_path / "alone")
    assert sorted(found) == sorted(alone) == list(range(1, 51))
    # Sums in another order differ in the last digit, and training makes differences grow.
    for step in range(1, 26):
        np.testing.assert_allclose(found[step], alone[step], rtol=1e-5, err_msg=str(step))
