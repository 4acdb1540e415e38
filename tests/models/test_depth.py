# SPDX-License-Identifier: Apache-2.0
"""Initial values that depend on depth, in a scanned stack as in an unrolled one."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from seqmix.layers import HGRN2Config, RWKV6Config
from seqmix.models import HybridLM, HybridLMConfig, unstack

CONFIG = HybridLMConfig(
    vocabulary=16,
    width=12,
    layers=6,
    pattern="rwkv6, hgrn2",
    leading="rwkv6",
    mixers={
        "rwkv6": RWKV6Config(head_width=4, mix_rank=2, decay_rank=2),
        "hgrn2": HGRN2Config(head_width=4),
    },
)


def test_each_layer_of_a_scanned_stack_starts_at_its_own_depth():
    models = [
        HybridLM(dataclasses.replace(CONFIG, scan=scan), rngs=nnx.Rngs(0)) for scan in (True, False)
    ]
    assert len(models[0].stack.periods)
    states = [
        dict(nnx.to_flat_state(nnx.state(m, nnx.Param))) for m in (unstack(models[0]), models[1])
    ]
    assert states[0].keys() == states[1].keys()
    for path, leaf in states[0].items():
        np.testing.assert_allclose(leaf[...], states[1][path][...], rtol=1e-6, err_msg=str(path))
    bounds = [
        float(jax.nn.sigmoid(leaf[...])[0])
        for path, leaf in states[0].items()
        if "lower_bound" in path
    ]
    assert bounds == pytest.approx([2 / 6, 4 / 6])
