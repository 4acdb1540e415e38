# SPDX-License-Identifier: Apache-2.0
"""The trainer's own step goes through the compiler of TPU pods with the kernels in it."""

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from seqmix import mixers
from seqmix.layers.norms import GatedRMSNorm, l2_normalise
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


@aot.needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_norms_of_heads_leave_arrays_as_kernels_have_them(chip, speed):
    """Projections, norms and kernel of a layer, forward, again and backward: no copy in between."""
    _, hlo = speed
    tokens, width, keys, states, head = 2048, 1024, 8, 16, 128
    norm, scale = nnx.split(
        GatedRMSNorm(head, order="norm_then_gate", dtype=jnp.bfloat16, param_dtype=jnp.float32)
    )

    @jax.checkpoint
    def layer(p, x):
        def heads(name, count):
            return (x @ p[name]).reshape(1, tokens, count, head)

        gates = (x @ p["gates"]).astype(jnp.float32)
        out, _ = mixers.gated_delta_rule(
            l2_normalise(heads("q", keys)),
            l2_normalise(heads("k", keys)),
            heads("v", states),
            -jax.nn.softplus(gates[..., :states]),
            jax.nn.sigmoid(gates[..., states:]),
            impl="pallas",
        )
        y = nnx.merge(norm, p["scale"])(out, heads("gate", states))
        return x + y.reshape(1, tokens, -1) @ p["out"]

    def loss(p, x):
        x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, p)
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    def weights(*shape):
        return jax.ShapeDtypeStruct((2, *shape), jnp.bfloat16)

    p = {n: weights(width, keys * head) for n in ("q", "k")}
    p |= {n: weights(width, states * head) for n in ("v", "gate")}
    p |= {"gates": weights(width, 2 * states), "out": weights(states * head, width)}
    p["scale"] = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), scale)
    x = jax.ShapeDtypeStruct((1, tokens, width), jnp.bfloat16)
    found = hlo.relayouts(aot.compile_on(chip, jax.grad(loss), p, x).as_text())
    assert found.kernels == 3
    whole = tokens * keys * head * 2
    assert [c.name for c in found.large if c.size >= whole] == []
