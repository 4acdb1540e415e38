# SPDX-License-Identifier: Apache-2.0
"""What every layer owes its model: packing, padding, caches, sizes, counts, gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix.layers import (
    AttentionConfig,
    DSAConfig,
    GatedDeltaNetConfig,
    Mamba2Config,
    MambaConfig,
    MLAConfig,
    NTKScaling,
    RWKV7Config,
)
from tests.layers import (
    cases_attention,
    cases_dsa,
    cases_elementwise,
    cases_parallel,
    cases_scalar_decay,
    cases_sparse,
    cases_sparse_static,
    cases_vector_decay,
    cases_vector_delta,
)
from tests.layers.modules import COMMON, graph_and_shapes, layer_of, quick_jit, random_parameters

# Odd model width and odd head counts throughout; chunks of 8 put several in a row.
WIDTH, BATCH, TIME = 15, 2, 21
CASES = {
    "gated_delta_net": GatedDeltaNetConfig(
        heads=3, head_width=5, value_width=7, value_heads=9, chunk_size=8
    ),
    "mamba2": Mamba2Config(expand=3, head_width=5, groups=3, state_size=7, chunk_size=8),
    "mamba2_without_norm": Mamba2Config(
        expand=3,
        head_width=5,
        state_size=7,
        bias=True,
        norm=False,
        multipliers=(0.5, 2.0, 1.5, 0.75, 1.25),
        chunk_size=8,
    ),
    "attention": AttentionConfig(heads=3, kv_heads=1, head_width=6, qk_norm=True),
    "window": AttentionConfig(heads=5, head_width=4, window=4, rotary_fraction=0.5),
    **cases_attention.CASES,
    **cases_dsa.CASES,
    **cases_elementwise.CASES,
    **cases_parallel.CASES,
    **cases_scalar_decay.CASES,
    **cases_sparse.CASES,
    **cases_sparse_static.CASES,
    **cases_vector_decay.CASES,
    **cases_vector_delta.CASES,
}

# Variants of a layer that another case covers.
VARIANTS = (
    "window",
    "latent_dsa",
    "jamba",
    "mamba_heads",
    "mamba2_without_norm",
    "hedgehog",
    "exponential",
    "grouped_gla",
    "gated_output",
    "bounded_kda",
    "mamba2s",
    "parallel_heads",
    "rwkv6_channel_mix",
)


def cases():
    """All names, those of variants left to the slow suite."""
    return [
        pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name for name in CASES
    ]


class Case:
    """A layer, one compiled function of it, and what it gives for a batch of whole rows."""

    def __init__(self, name):
        self.config = CASES[name]
        self.tolerance = cases_scalar_decay.TOLERANCES.get(name, 2e-6)
        self.graph, shapes = graph_and_shapes(self.config, WIDTH)
        self.parameters = random_parameters(shapes)
        self.x = jax.random.normal(jax.random.key(1), (BATCH, TIME, WIDTH))
        self.full = self.run(self.x, jnp.ones((BATCH, TIME), jnp.int32))[0]

    @functools.partial(quick_jit, static_argnums=0)
    def run(self, x, segment_ids, cache=None):
        return nnx.merge(self.graph, self.parameters)(x, segment_ids=segment_ids, cache=cache)

    def empty(self, capacity=TIME):
        return nnx.merge(self.graph, self.parameters).init_cache(BATCH, capacity)

    @functools.partial(quick_jit, static_argnums=0)
    def decode(self, x, cache):
        """Token by token."""

        def step(cache, token):
            y, cache = nnx.merge(self.graph, self.parameters)(token[:, None], cache=cache)
            return cache, y[:, 0]

        cache, y = jax.lax.scan(step, cache, x.swapaxes(0, 1))
        return y.swapaxes(0, 1), cache


@pytest.fixture(scope="module", params=cases())
def case(request):
    return Case(request.param)


def close(actual, expected, tolerance=2e-6):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    error = np.abs(actual - expected).max()
    assert error <= tolerance * max(1.0, np.abs(expected).max()), error


def tree_close(actual, expected, tolerance=2e-6):
    jax.tree.map(lambda a, b: close(a, b, tolerance), actual, expected)


def test_packed_documents_do_not_meet(case):
    # Boundaries inside a chunk (5) and on its edge (16); padding inside the row.
    lengths, ids = (5, 11, 5), np.repeat([1, 2, 3], (5, 11, 5))
    packed, _ = case.run(case.x, jnp.broadcast_to(jnp.asarray(ids), (BATCH, TIME)))
    for start, length in zip(np.cumsum((0, *lengths)), lengths, strict=False):
        alone = jnp.zeros_like(case.x).at[:, :length].set(case.x[:, start : start + length])
        real = (jnp.arange(TIME) < length).astype(jnp.int32)
        y, _ = case.run(alone, jnp.broadcast_to(real, (BATCH, TIME)))
        close(packed[:, start : start + length], y[:, :length])


def test_padding_changes_nothing_wherever_it_stands(case):
    length, cache = 9, case.empty()
    results = []
    for where in (slice(0, length), slice(TIME - length, TIME), slice(0, 2 * length, 2)):
        x = jnp.full_like(case.x, 1e3).at[:, where].set(case.x[:, :length])
        ids = jnp.zeros((BATCH, TIME), jnp.int32).at[:, where].set(1)
        y, after = case.run(x, ids, cache)
        results.append((y[:, where], after))
        close(jnp.where((ids == 0)[..., None], y, 0), 0)
    close(results[0][0], case.full[:, :length])
    tree_close(results[1], results[0])
    tree_close(results[2], results[0])


def test_an_all_padding_row_leaves_the_cache_as_it_is(case):
    _, cache = case.run(case.x, jnp.ones((BATCH, TIME), jnp.int32), case.empty(2 * TIME))
    y, after = case.run(case.x, jnp.zeros((BATCH, TIME), jnp.int32), cache)
    assert not y.any()
    jax.tree.map(np.testing.assert_array_equal, after, cache)


def test_decoding_token_by_token_is_the_full_pass(case):
    y, cache = case.decode(case.x, case.empty())
    close(y, case.full)
    _, prefilled = case.run(case.x, jnp.ones((BATCH, TIME), jnp.int32), case.empty())
    tree_close(cache, prefilled, case.tolerance)


def test_prefill_in_pieces_is_one_pass(case):
    cache, pieces = case.empty(), []
    for start, stop in ((0, 6), (6, 8), (8, TIME)):
        ids = jnp.zeros((BATCH, TIME), jnp.int32).at[:, : stop - start].set(7)
        x = jnp.zeros_like(case.x).at[:, : stop - start].set(case.x[:, start:stop])
        y, cache = case.run(x, ids, cache)
        pieces.append(y[:, : stop - start])
    close(jnp.concatenate(pieces, axis=1), case.full)


def test_cache_shapes_and_bytes_hold(case):
    for capacity in (TIME, 3 * TIME):
        cache = case.empty(capacity)
        expected = case.config.cache_bytes(WIDTH, capacity, "float32")
        assert sum(x.nbytes for x in jax.tree.leaves(cache)) == BATCH * expected
    _, after = case.run(case.x, jnp.ones((BATCH, TIME), jnp.int32), cache)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, cache)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, cache)


def test_gradients_reach_every_parameter(case):
    def loss(parameters):
        y, _ = nnx.merge(case.graph, parameters)(case.x)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape))

    unused = {RWKV7Config: cases_vector_delta.UNUSED_ALONE, DSAConfig: cases_dsa.UNUSED_ALONE}
    alone = unused.get(type(case.config), ())
    for path, gradient in nnx.to_flat_state(quick_jit(jax.grad(loss))(case.parameters)):
        if path[0] in alone:
            continue
        assert jnp.isfinite(gradient[...]).all() and gradient[...].any(), path


CHANGES = {
    "gated_delta_net": [{"allow_negative_eigenvalues": True}, {"norm_epsilon": 1.0}],
    "mamba2": [{"dt_limit": (0.5, 0.6)}, {"norm_epsilon": 1.0}],
    "attention": [
        {"window": 2},
        {"rotary_fraction": 0.0},
        {"rotary_base": 3.0},
        {"logit_softcap": 0.1},
        {"norm_epsilon": 1.0},
    ],
    **cases_attention.CHANGES,
    **cases_dsa.CHANGES,
    **cases_elementwise.CHANGES,
    **cases_parallel.CHANGES,
    **cases_scalar_decay.CHANGES,
    **cases_sparse.CHANGES,
    **cases_sparse_static.CHANGES,
    **cases_vector_decay.CHANGES,
    **cases_vector_delta.CHANGES,
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_options_change_the_result(name):
    parameters = random_parameters(graph_and_shapes(CASES[name], WIDTH)[1])
    configs = [CASES[name], *(dataclasses.replace(CASES[name], **c) for c in CHANGES[name])]
    graphs = [graph_and_shapes(config, WIDTH)[0] for config in configs]
    x = jax.random.normal(jax.random.key(1), (1, 4, WIDTH))
    base, *others = quick_jit(lambda: [nnx.merge(g, parameters)(x)[0] for g in graphs])()
    for change, other in zip(CHANGES[name], others, strict=True):
        assert jnp.abs(other - base).max() > 1e-3, change


@pytest.mark.parametrize("name", ["gated_delta_net", "mamba2"])
def test_implementation_and_chunk_reach_the_mixer(name):
    for change, message in (({"impl": "magic"}, "magic"), ({"chunk_size": 3}, None)):
        config = dataclasses.replace(CASES[name], **change)
        graph, shapes = graph_and_shapes(config, WIDTH)
        parameters = random_parameters(shapes)

        def trace(graph=graph, parameters=parameters):
            run = lambda x: nnx.merge(graph, parameters)(x)[0]  # noqa: E731
            return str(jax.make_jaxpr(run)(jnp.zeros((1, 6, WIDTH))))

        if message:
            with pytest.raises(ValueError, match=message):
                trace()
        else:
            assert ",3,3]" in trace()  # the pairs of a chunk of three tokens


def test_initial_time_steps_follow_the_settings():
    config = Mamba2Config(head_width=5, dt_min=0.4, dt_max=0.6, dt_floor=0.5)
    layer = layer_of(config)(config, WIDTH, rngs=nnx.Rngs(0), **COMMON)
    steps = jax.nn.softplus(layer.dt_bias[...])
    assert steps.min() == pytest.approx(0.5) and 0.5 < steps.max() <= 0.6
    assert (jnp.exp(layer.A_log[...]) >= 1).all() and (layer.D[...] == 1).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AttentionConfig(window=0), "Attention.window must be >= 1, got 0"),
        (lambda: AttentionConfig(heads=4, kv_heads=3), "Attention.heads must be a multiple of kv"),
        (lambda: AttentionConfig(head_width=64, rotary_fraction=0.3), "rotary_fraction.* 19 chan"),
        (lambda: AttentionConfig(rotary_fraction=1.5), "between 0 and 1, got 1.5"),
        (lambda: AttentionConfig(logit_softcap=-1.0), "logit_softcap must be positive, got -1"),
        (lambda: AttentionConfig(scale=0.0), "Attention.scale must be positive, got 0"),
        (lambda: AttentionConfig(zero_centred_norm=True), "zero_centred_norm needs qk_norm"),
        (lambda: AttentionConfig(qk_norm="half"), "Attention.qk_norm"),
        (lambda: AttentionConfig(prefix=3), "Attention.prefix = 3 needs a window"),
        (lambda: AttentionConfig(key_multiplier=0.0), "key_multiplier must be positive, got 0"),
        (lambda: AttentionConfig(kv_from=""), "Attention.kv_from must be a name or None"),
        (lambda: AttentionConfig(kv_from="a", share_kv_as="b"), "same name .* got 'a' and 'b'"),
        (
            lambda: AttentionConfig(
                head_width=8, rotary_fraction=0.25, rotary_scaling=NTKScaling(2.0)
            ),
            "Attention.rotary_scaling: NTKScaling needs more than 2 rotated channels, got 2",
        ),
        (lambda: MLAConfig(rotary_width=3), "MLA.rotary_width must be even, got 3"),
        (lambda: MLAConfig(kv_rank=0), "MLA.kv_rank must be >= 1, got 0"),
        (
            lambda: MLAConfig().flops_per_token(100, 1),
            "MLA.head_width = 128 does not divide",
        ),
        (lambda: AttentionConfig().head_counts(100), "head_width = 64 does not divide .* 100"),
        (lambda: GatedDeltaNetConfig(heads=2, value_heads=3), "value_heads must be a multiple"),
        (lambda: GatedDeltaNetConfig(convolution=0), "GatedDeltaNet.convolution must be >= 1"),
        (lambda: Mamba2Config(dt_min=1.0), "dt_min must be <= dt_max, got 1.0 > 0.1"),
        (lambda: Mamba2Config(dt_limit=(2.0, 1.0)), "dt_limit must be 0 <= low < high"),
        (lambda: Mamba2Config(expand=1.5).sizes(15), "expand = 1.5 times the model width 15"),
        (lambda: Mamba2Config(norm=False, norm_before_gate=True), "needs Mamba2.norm"),
        (lambda: MambaConfig(heads=2, inner_norms=True), "inner_norms needs Mamba.heads = 1"),
        (
            lambda: MambaConfig(heads=3).sizes(16),
            r"multiple of heads = 3, got 32",
        ),
        (lambda: Mamba2Config().sizes(40), r"expand \* width must be a multiple of head_width"),
        (lambda: Mamba2Config(groups=3).sizes(64), r"heads .* multiple of groups = 3, got 2"),
    ],
)
def test_bad_settings_name_themselves(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_window_mean_is_the_mean():
    config = AttentionConfig(window=7)
    for time in (1, 6, 7, 8, 100):
        exact = np.minimum(np.arange(1, time + 1), 7).mean()
        assert config.mean_keys((time + 1) / 2) == pytest.approx(exact)


def test_a_prefix_adds_the_keys_before_the_window():
    config = AttentionConfig(window=7, prefix=3)
    for time in (5, 8, 11, 40):
        counts = [sum(s < 3 or t - s < 7 for s in range(t + 1)) for t in range(time)]
        assert config.mean_keys((time + 1) / 2) == pytest.approx(np.mean(counts))
