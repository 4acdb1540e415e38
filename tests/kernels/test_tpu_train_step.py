# SPDX-License-Identifier: Apache-2.0
"""The trainer's own step goes through the compiler of TPU pods with the kernels in it."""

import importlib
from pathlib import Path

import pytest

from seqmix_kernels.tpu import chips
from tests.kernels import aot

ROOT = Path(__file__).resolve().parents[2]
_TINY = (
    "HybridLM.layers=2",
    "HybridLM.width=256",
    "HybridLM.pattern='gated_delta_net'",
    "HybridLM.dtype='bfloat16'",
    "GatedDeltaNet.head_width=128",
)


@pytest.fixture
def speed(monkeypatch):
    """Two scripts of experiments/speed."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments" / "speed"))
    return importlib.import_module("tpu_train_step"), importlib.import_module("tpu_hlo")


@aot.needs_libtpu
def test_a_step_on_a_mesh_runs_the_kernels_on_each_devices_rows(speed):
    train_step, hlo = speed
    step = train_step.compile_step(str(ROOT / "configs" / "demo.gin"), "v5e:2x2", _TINY)
    # One forward and one backward kernel: the layers are scanned, and nothing is recomputed.
    assert hlo.relayouts(step.compiled.as_text()).kernels == 2
    assert step.devices == 4
    assert all("delta" in name for name in aot.vmem_used(step.compiled))


@aot.needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("topology", ["v5e:4x4", "v6e:4x4", "v5p:2x2x4"])
def test_the_hybrid_fits_a_pod_without_copies_around_the_kernels(topology, speed):
    train_step, hlo = speed
    step = train_step.compile_step(str(ROOT / train_step.CONFIG), topology)
    assert train_step.hbm(step.compiled) < chips.CHIPS[topology.partition(":")[0]].hbm
    found = hlo.relayouts(step.compiled.as_text())
    assert found.kernels == 9  # 3 layers of a period: forward, again, backward
    assert not found.large
