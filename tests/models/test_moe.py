# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts against NumPy float64, its load and its losses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix.models import FeedForward, FeedForwardConfig, MoE, MoEConfig
from tests.layers.modules import COMMON, quick_jit, random_parameters
from tests.models.dense_moe import ACTIVATIONS, dense_part, moe

WIDTH, BATCH, TIME = 5, 2, 9
CASES = {
    "mixtral": MoEConfig(experts=6, top_k=2, hidden=4, balance_loss=0.3, z_loss=0.2, impl="ragged"),
    "jamba": MoEConfig(
        experts=4, top_k=3, hidden=3, renormalise=False, gated=False, activation="relu2"
    ),
    "qwen3_next": MoEConfig(
        experts=5, top_k=2, hidden=4, shared_experts=1, shared_hidden=6, shared_gate=True
    ),
    "kimi": MoEConfig(
        experts=8,
        top_k=3,
        hidden=4,
        router="sigmoid",
        scale=2.446,
        selection_bias=True,
        groups=4,
        top_groups=2,
        shared_experts=2,
        balance_over="row",
        activation="gelu_tanh",
    ),
}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(BATCH, TIME, WIDTH))
PROBE = RNG.normal(size=X.shape)
SEGMENTS = np.array([[1, 1, 1, 0, 2, 2, 2, 2, 0], [0, 1, 1, 1, 1, 1, 1, 2, 2]], np.int32)
REAL = SEGMENTS != 0
# Names of the reference by path in the module.
PATHS = {
    "router": ("router", "kernel"),
    "gate": ("experts", "gate", "kernel"),
    "up": ("experts", "up", "kernel"),
    "down": ("experts", "down", "kernel"),
    "shared_gate": ("shared", "gate", "kernel"),
    "shared_up": ("shared", "up", "kernel"),
    "shared_down": ("shared", "down", "kernel"),
    "shared_gate_w": ("shared_gate", "kernel"),
    "bias": ("bias",),
}


class Case:
    """A module with random parameters and its compiled function."""

    def __init__(self, config):
        self.config = config
        self.graph, shapes = nnx.split(
            nnx.eval_shape(lambda: MoE(config, WIDTH, rngs=nnx.Rngs(0), **COMMON))
        )
        self.state = random_parameters(shapes)

    def __call__(self, state=None):
        return nnx.merge(self.graph, self.state if state is None else state)

    @functools.partial(quick_jit, static_argnums=0)
    def run(self, state, x, segment_ids):
        """(y, auxiliary, load) and the gradients of PROBE's product with y plus the loss."""

        def loss(state, x):
            y, auxiliary, load = self(state)(x, segment_ids=segment_ids, auxiliary=True)
            value = jnp.sum(jnp.where((segment_ids != 0)[..., None], y, 0) * PROBE)
            return value + auxiliary.loss, (y, auxiliary, load)

        (gradient, of_x), out = jax.grad(loss, (0, 1), has_aux=True)(state, x)
        return out, gradient, of_x

    def arrays(self, state):
        """The reference's parameters: float64, by its names."""
        flat = {path: leaf[...] for path, leaf in nnx.to_flat_state(state)}
        found = {name: flat.get(path) for name, path in PATHS.items()}
        return {n: np.asarray(v, np.float64) for n, v in found.items() if v is not None}

    def reference(self, p, x, segment_ids):
        y, balance, z, load = moe(self.config, p, x, segment_ids)
        loss = self.config.balance_loss * balance + self.config.z_loss * z
        value = np.sum(np.where((segment_ids != 0)[..., None], y, 0) * PROBE) + loss
        return value, y, balance, z, load, loss


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return Case(CASES[request.param])


def close(actual, expected, tolerance=1e-5):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    error = np.abs(actual - expected).max() / max(1.0, np.abs(expected).max())
    assert error <= tolerance, error


def differences(function, p, name):
    """Central differences of a function of the arrays ``p`` in some elements of one of them.

    Returns:
      The flat indices of the elements, and the differences.
    """
    array, gradient = p[name], []
    elements = np.random.default_rng(1).permutation(array.size)[:40]
    for index in zip(*np.unravel_index(elements, array.shape), strict=True):
        values = []
        for step in (1e-5, -1e-5):
            moved = array.copy()
            moved[index] += step
            values.append(function(p | {name: moved}))
        gradient.append((values[0] - values[1]) / 2e-5)
    return elements, np.array(gradient)


def test_outputs_losses_and_gradients_are_the_formulas(case):
    (y, auxiliary, load), gradient, of_x = case.run(case.state, X.astype(np.float32), SEGMENTS)
    p, x32 = case.arrays(case.state), X.astype(np.float32).astype(np.float64)
    _, expected, balance, z, expected_load, loss = case.reference(p, x32, SEGMENTS)
    close(y, expected)
    close(auxiliary.loss, loss)
    np.testing.assert_array_equal(load, expected_load)
    tokens, relative = REAL.sum(), expected_load / expected_load.mean()
    for name, value in {
        "moe.balance_loss": balance,
        "moe.z_loss": z,
        "moe.max_load": relative.max() * tokens,
        "moe.min_load": relative.min() * tokens,
        "moe.dead_experts": (expected_load == 0).mean() * tokens,
    }.items():
        close(auxiliary.metrics[name], value)
    actual = case.arrays(gradient)
    values = p | {"x": x32}

    def value(q):
        return case.reference(q, q["x"], SEGMENTS)[0]

    # Nothing flows through the choice.
    assert not actual.pop("bias", np.zeros(1)).any()
    for name, found in {**actual, "x": np.asarray(of_x)}.items():
        elements, wanted = differences(value, values, name)
        close(found.reshape(-1)[elements], wanted)


@pytest.mark.parametrize("impl", ["ragged", "blocked"])
def test_no_token_is_dropped_where_one_expert_takes_all(impl):
    case = Case(dataclasses.replace(CASES["mixtral"], impl=impl))
    x = np.abs(X).astype(np.float32)
    router = np.tile(np.linspace(-1, 1, WIDTH * 6).reshape(WIDTH, 6) * 0.1, 1)
    router[:, 2] += 3.0
    state = jax.tree.map(lambda leaf: leaf, case.state)
    state["router"]["kernel"][...] = jnp.asarray(router, jnp.float32)
    (y, _, load), _, _ = case.run(state, x, SEGMENTS)
    _, expected, *_ = case.reference(case.arrays(state), x.astype(np.float64), SEGMENTS)
    close(y, expected)
    assert load[2] == REAL.sum() and load.sum() == 2 * REAL.sum()


def test_padding_counts_for_nothing(case):
    noise = np.where(REAL[..., None], X, 7.0).astype(np.float32)
    (y, auxiliary, load), gradient, of_x = case.run(case.state, X.astype(np.float32), SEGMENTS)
    (y2, auxiliary2, load2), gradient2, of_x2 = case.run(case.state, noise, SEGMENTS)
    close(y2[REAL], y[REAL], 1e-6)
    np.testing.assert_array_equal(load2, load)
    assert not np.asarray(of_x)[~REAL].any() and not np.asarray(of_x2)[~REAL].any()
    jax.tree.map(
        functools.partial(close, tolerance=1e-6), (auxiliary2, gradient2), (auxiliary, gradient)
    )
    (_, empty, load), _, _ = case.run(case.state, noise, np.zeros_like(SEGMENTS))
    assert empty.loss == 0 and not load.any()
    assert all(value == 0 for value in empty.metrics.values())


def test_equal_scores_go_to_the_first_experts():
    case = Case(CASES["mixtral"])
    (_, auxiliary, load), _, _ = case.run(case.state, np.zeros(X.shape, np.float32), SEGMENTS)
    np.testing.assert_array_equal(load, REAL.sum() * np.array([1, 1, 0, 0, 0, 0]))
    close(auxiliary.metrics["moe.balance_loss"], REAL.sum())  # the probabilities are even


def test_few_tokens_read_the_chosen_experts_alone(case):
    """A decoding step takes another program than a row; same numbers, and the counted FLOPs."""
    full, _, _ = case.run(case.state, X.astype(np.float32), SEGMENTS)
    step = jax.jit(lambda state, x: case(state)(x))
    token = X[:1, 1:2].astype(np.float32)
    close(step(case.state, token), full[0][:1, 1:2])
    compiled = step.lower(case.state, token).compile().cost_analysis()["flops"]
    counted = case.config.flops_per_token(WIDTH)
    assert counted <= compiled <= counted + 40 * case.config.experts + 60 * WIDTH


def test_bfloat16():
    case, x = Case(CASES["kimi"]), jnp.asarray(X, jnp.bfloat16)
    (wanted, exact, _), _, _ = case.run(case.state, x.astype(jnp.float32), SEGMENTS)
    half = nnx.eval_shape(
        lambda: MoE(case.config, WIDTH, rngs=nnx.Rngs(0), **COMMON | {"dtype": "bfloat16"})
    )
    case.graph = nnx.graphdef(half)
    (y, auxiliary, _), gradient, _ = quick_jit(case.run.__wrapped__, static_argnums=0)(
        case, case.state, x, SEGMENTS
    )
    assert y.dtype == jnp.bfloat16 and auxiliary.loss.dtype == jnp.float32
    close(auxiliary.loss, exact.loss)  # the router is float32
    error = np.asarray(y, np.float32) - np.asarray(wanted)
    assert np.sqrt(np.mean(error**2) / np.mean(np.asarray(wanted) ** 2)) < 1e-2
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradient))


def test_the_bias_evens_out_a_skewed_start():
    """Tokens prefer two experts of eight; the rule alone spreads them, whatever the scores say."""
    config = MoEConfig(
        experts=8, top_k=2, hidden=4, router="sigmoid", selection_bias=True, bias_rate=0.02
    )
    case = Case(config)
    state = jax.tree.map(jnp.zeros_like, case.state)
    kernel = 0.3 * RNG.normal(size=(WIDTH, 8))
    kernel[0, :2] += 2.0
    state["router"]["kernel"][...] = jnp.asarray(kernel, jnp.float32)

    @quick_jit
    def train(state, key):
        def step(state, key):
            x = jax.random.normal(key, (2, 64, WIDTH)).at[..., 0].set(1.0)
            module = case(state)
            _, auxiliary, load = module(x, auxiliary=True)
            for half in (0.25, 0.75):  # as of two micro-batches
                module.add_load(half * load)
            module.finish_step()
            return nnx.state(module), (load / 32, auxiliary.metrics["moe.max_load"] / 128)

        return jax.lax.scan(step, state, jax.random.split(key, 120))

    state, (load, largest) = train(state, jax.random.key(0))
    np.testing.assert_allclose(largest, load.max(1), rtol=1e-6)
    assert largest[0] > 3
    np.testing.assert_allclose(load[-40:].mean(0), 1.0, atol=0.15)
    bias = np.asarray(state["bias"][...])
    assert bias[:2].max() < 0 < bias[2:].min()
    assert not np.asarray(state["load"][...]).any()


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
def test_dense_part(name, gated):
    config = FeedForwardConfig(hidden=7, activation=name, gated=gated, bias=not gated)
    graph, shapes = nnx.split(
        nnx.eval_shape(lambda: FeedForward(config, WIDTH, rngs=nnx.Rngs(0), **COMMON))
    )
    module = nnx.merge(graph, random_parameters(shapes))
    assert (module.gate is None) != gated
    p = {n: np.asarray(getattr(module, n).kernel[...], np.float64) for n in ("up", "down")}
    if gated:
        p["gate"] = np.asarray(module.gate.kernel[...], np.float64)
        expected = np.stack([dense_part(ACTIVATIONS[name], p, "", x) for x in X[0]])
    else:
        biases = (np.asarray(getattr(module, n).bias[...], np.float64) for n in ("up", "down"))
        up, down = biases
        expected = ACTIVATIONS[name](X[0] @ p["up"] + up) @ p["down"] + down
    close(module(X[0].astype(np.float32)), expected)
    assert config.flops_per_token(WIDTH) == 2 * sum(v.size for v in p.values())
    assert FeedForwardConfig(gated=False).hidden_width(96) == 384


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 0}, "MoE.top_k must be >= 1, got 0"),
        ({"experts": 0}, "MoE.experts must be >= 1, got 0"),
        ({"top_k": 9}, "MoE.top_k must be <= experts = 8, got 9"),
        ({"groups": 3}, "MoE.groups must divide experts = 8, got 3"),
        ({"groups": 2, "top_groups": 3}, "MoE.top_groups must be <= groups = 2, got 3"),
        ({"groups": 4, "top_k": 3}, "MoE.top_k must be <= 2, the experts of top_groups = 1"),
        ({"shared_gate": True}, "MoE.shared_gate needs MoE.shared_experts >= 1, got 0"),
        ({"shared_experts": -1}, "MoE.shared_experts must be >= 0, got -1"),
        ({"balance_loss": -1.0}, "MoE.balance_loss must be >= 0, got -1.0"),
        ({"bias_rate": 0.0}, "MoE.bias_rate must be positive, got 0.0"),
        ({"router": "hash"}, "hash"),
        ({"impl": "dense"}, "dense"),
        ({"activation": "tanh"}, "tanh"),
    ],
)
def test_bad_settings_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig(**settings)


def test_default_width_is_that_of_the_dense_part_for_a_token():
    assert MoEConfig(top_k=2).hidden_width(768) * 2 == FeedForwardConfig().hidden_width(768)
    assert MoEConfig(top_k=3).hidden_width(768) == 704
