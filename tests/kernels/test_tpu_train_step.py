# SPDX-License-Identifier: Apache-2.0
"""The trainer's own step goes through the compiler of TPU pods with the kernels in it."""

import importlib
from pathlib import Path

import pytest

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
    found = hlo.relayouts(step.compiled.as_text())
    # One forward and one backward kernel: the layers are scanned, and nothing is recomputed.
    assert found.kernels == 2
    assert step.devices == 4
    assert all("delta" in name for name in aot.vmem_used(step.compiled))
