# SPDX-License-Identifier: Apache-2.0
"""Norms, rotary positions, linear projections, the registry and the kinds of parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix.layers import (
    Attention,
    AttentionConfig,
    GatedDeltaNet,
    GatedDeltaNetConfig,
    GatedRMSNorm,
    LayerInfo,
    Linear,
    Mamba2,
    Mamba2Config,
    RMSNorm,
    parameters,
    registry,
    rotary,
)
from seqmix.layers.initialisation import decay_rates, time_step_bias

FLOAT32 = {"dtype": jnp.float32, "param_dtype": jnp.float32}
RNG = np.random.default_rng(0)


def silu(x):
    return x / (1 + np.exp(-x))


def test_rms_norm_is_the_formula_in_float32_whatever_the_dtype():
    x = RNG.normal(size=(2, 3, 8)) * 50
    norm = RMSNorm(8, epsilon=1e-2, **FLOAT32)
    norm.scale[...] = jnp.arange(1.0, 9.0)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-2) * np.arange(1, 9)
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-6)
    # 300 squared overflows float16; in float32 it does not.
    assert jnp.isfinite(norm(jnp.full((1, 8), 300.0, jnp.float16))).all()
    assert RMSNorm(8, dtype=jnp.bfloat16, param_dtype=jnp.float32)(jnp.ones((1, 8))).dtype == (
        jnp.bfloat16
    )


@pytest.mark.parametrize("order", ["gate_then_norm", "norm_then_gate"])
def test_gated_norm_orders_and_groups(order):
    x, gate = RNG.normal(size=(2, 2, 5, 12))
    norm = GatedRMSNorm(12, order=order, group_size=4, epsilon=1e-3, **FLOAT32)
    norm.scale[...] = jnp.asarray(scale := RNG.normal(size=12))
    y = x * silu(gate) if order == "gate_then_norm" else x
    y = y.reshape(2, 5, 3, 4)
    y = (y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-3)).reshape(2, 5, 12) * scale
    expected = y if order == "gate_then_norm" else y * silu(gate)
    np.testing.assert_allclose(norm(jnp.asarray(x), jnp.asarray(gate)), expected, rtol=2e-5)


def test_gated_norm_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match=r"group_size must divide the width 12, got 5"):
        GatedRMSNorm(12, order="gate_then_norm", group_size=5, **FLOAT32)
    with pytest.raises(ValueError, match="got 'norm_first'"):
        GatedRMSNorm(12, order="norm_first", **FLOAT32)


def test_rotary_rotates_half_split_pairs_and_leaves_the_rest():
    x = RNG.normal(size=(1, 3, 2, 10)).astype(np.float32)
    positions = np.array([[0, 1, 70_000]], np.int32)
    y = np.asarray(rotary(jnp.asarray(x), jnp.asarray(positions), width=6, base=100.0))
    for t, position in enumerate(positions[0]):
        for i in range(3):
            angle = position * 100.0 ** (-2 * i / 6)
            turn = np.exp(1j * angle)
            expected = (x[0, t, :, i] + 1j * x[0, t, :, i + 3]) * turn
            # A float32 angle of 7e4 radians is known to 4e-3.
            np.testing.assert_allclose(y[0, t, :, i], expected.real, atol=1e-2 if t == 2 else 1e-6)
            np.testing.assert_allclose(
                y[0, t, :, i + 3], expected.imag, atol=1e-2 if t == 2 else 1e-6
            )
    np.testing.assert_array_equal(y[..., 6:], x[..., 6:])


def test_rotary_logits_depend_on_distance_only():
    q, k = jnp.asarray(RNG.normal(size=(2, 1, 1, 1, 8)))
    at = lambda x, position: rotary(x, jnp.full((1, 1), position, jnp.int32))  # noqa: E731
    dots = [jnp.sum(at(q, start + 5) * at(k, start)) for start in (0, 3, 200)]
    np.testing.assert_allclose(dots, dots[0], rtol=1e-4)


def test_linear_initialisation_and_dtypes():
    linear = Linear(
        400, 300, bias=True, scale=0.5, dtype="bfloat16", param_dtype="float32", rngs=nnx.Rngs(0)
    )
    assert abs(float(linear.kernel[...].std()) / (0.5 / 20) - 1) < 0.02
    assert linear.kernel[...].dtype == linear.bias[...].dtype == jnp.float32
    assert linear(jnp.ones((2, 400))).dtype == jnp.bfloat16
    assert linear(jnp.ones((2, 400)), out_dtype=jnp.float32).dtype == jnp.float32


def test_time_steps_and_decay_rates_start_in_their_ranges():
    steps = jax.nn.softplus(time_step_bias(jax.random.key(0), 2000))
    assert steps.min() >= 1e-3 * 0.999 and steps.max() <= 0.1 * 1.001
    # Log-uniform: half of them lie below the geometric mean.
    assert abs(float(jnp.mean(steps < 1e-2)) - 0.5) < 0.04
    rates = jnp.exp(decay_rates(jax.random.key(1), 2000, 1.0, 16.0))
    assert rates.min() >= 1 and rates.max() <= 16 and abs(float(rates.mean()) - 8.5) < 0.4


def test_registry_names_the_nearest_layer():
    assert {"attention", "gated_delta_net", "mamba2"} <= set(registry.names())
    assert registry.get("mamba2") == (Mamba2, Mamba2Config)
    with pytest.raises(ValueError, match=r"unknown layer 'gated_deltanet'; did you mean 'gated_d"):
        registry.get("gated_deltanet")
    with pytest.raises(ValueError, match=r"unknown layer 'zzz'; known: attention, "):
        registry.get("zzz")


def test_registry_refuses_bad_and_taken_names():
    with pytest.raises(ValueError, match="snake case, got 'Mamba-2'"):
        registry.register("Mamba-2", Mamba2Config)
    with pytest.raises(ValueError, match="'mamba2' is taken by Mamba2"):
        registry.register("mamba2", AttentionConfig)(Attention)
    assert registry.get("mamba2").layer is Mamba2


def layers(param_dtype="float32"):
    """Abstract parameters of one layer of each kind."""
    common = {"layer": LayerInfo(), "dtype": "float32", "param_dtype": param_dtype}

    def build():
        make = {"rngs": nnx.Rngs(0), **common}
        attention = AttentionConfig(head_width=4, qk_norm=True, bias=True)
        return nnx.List(
            [
                Mamba2(Mamba2Config(head_width=8, state_size=4), 8, **make),
                GatedDeltaNet(GatedDeltaNetConfig(head_width=4), 8, **make),
                Attention(attention, 8, **make),
            ]
        )

    return nnx.state(nnx.eval_shape(build))


def by_name(tree):
    return {path[-2:]: leaf.get_value() for path, leaf in nnx.to_flat_state(tree)}


def test_masks_follow_the_type():
    state = layers()
    decay = by_name(parameters.decay_mask(state))
    muon = by_name(parameters.muon_mask(state))
    assert jax.tree.structure(parameters.decay_mask(state)) == jax.tree.structure(state)
    kernel, convolution = ("query", "kernel"), ("query_convolution", "kernel")
    assert decay[kernel] is True and muon[kernel] is True
    assert decay[convolution] is True and muon[convolution] is False
    for path in (
        (0, "A_log"),
        (0, "dt_bias"),
        (0, "D"),
        (1, "A_log"),
        ("x_convolution", "bias"),
        ("query", "bias"),
        ("norm", "scale"),
        ("query_norm", "scale"),
    ):
        assert decay[path] is False and muon[path] is False, path
    with pytest.raises(ValueError, match="bare"):
        parameters.decay_mask({"kernel": jnp.ones(3)})


def test_embedding_and_head_are_not_for_muon_and_only_the_head_decays():
    state = nnx.state(
        nnx.List([parameters.EmbeddingParam(jnp.ones(2)), parameters.HeadParam(jnp.ones(2))])
    )
    assert jax.tree.leaves(parameters.muon_mask(state)) == [False, False]
    assert jax.tree.leaves(parameters.decay_mask(state)) == [False, True]


@pytest.mark.parametrize("how", ["cast", "param_dtype"])
def test_rates_stay_float32(how):
    if how == "cast":
        state = jax.eval_shape(lambda state: parameters.cast(state, jnp.bfloat16), layers())
    else:
        state = layers("bfloat16")
    kept = {path for path, leaf in by_name(state).items() if leaf.dtype == jnp.float32}
    assert kept == {(0, "A_log"), (0, "dt_bias"), (0, "D"), (1, "A_log"), (1, "dt_bias")}
