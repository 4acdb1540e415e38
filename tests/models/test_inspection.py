# SPDX-License-Identifier: Apache-2.0
"""What `inspect` says against what the model does."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import rich.console
from flax import nnx

from seqmix.layers import AttentionConfig, GatedDeltaNetConfig, Mamba2Config
from seqmix.models import FeedForwardConfig, HybridLM, HybridLMConfig, inspect
from tests.models.models import config


@pytest.mark.parametrize(
    "settings",
    [
        config(layers=6),
        config("mamba2", layers=2, tied=False, leading="local/attention", feed_forward=None),
    ],
)
def test_parameters_and_cache_bytes_are_the_models(settings):
    report = inspect(settings, contexts=(3, 40))
    graph, state = nnx.split(nnx.eval_shape(lambda: HybridLM(settings, rngs=nnx.Rngs(0))))
    assert report.parameters == sum(leaf.size for leaf in jax.tree.leaves(state))
    parts = report.embedding_parameters + report.head_parameters + report.norm_parameters
    assert report.parameters == parts + sum(row.parameters for row in report.layers)
    for context, expected in zip(report.contexts, report.cache_bytes, strict=True):
        cache = jax.eval_shape(lambda c=context: nnx.merge(graph, state).init_cache(2, c))
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
        assert held == 2 * expected


def compiled_flops(settings, tokens, capacity=None):
    graph, state = nnx.split(nnx.eval_shape(lambda: HybridLM(settings, rngs=nnx.Rngs(0))))
    shape = jax.ShapeDtypeStruct(tokens, jnp.int32)
    if capacity is None:
        function, arguments = (lambda s, t: nnx.merge(graph, s)(t)), (state, shape)
    else:

        def function(state, tokens, cache):
            model = nnx.merge(graph, state)
            hidden, cache = model.hidden(tokens, cache=cache)
            return model.logits(hidden), cache

        cache = jax.eval_shape(lambda: nnx.merge(graph, state).init_cache(tokens[0], capacity))
        arguments = (state, shape, cache)
    return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]


WIDE = HybridLMConfig(
    vocabulary=512,
    width=512,
    layers=3,
    scan=False,
    pattern="gated_delta_net, mamba2, attention",
    mixers={
        "gated_delta_net": GatedDeltaNetConfig(head_width=64),
        "mamba2": Mamba2Config(head_width=64, state_size=64),
        "attention": AttentionConfig(heads=8, kv_heads=2),
    },
    feed_forward=FeedForwardConfig(hidden=1024),
)


def test_flops_are_the_compilers():
    # The compiler adds elementwise work (norms, gates, softmax), which the count leaves out, and a
    # dense softmax over the whole square: the mean context it computes is T. One chunk's work:
    # the compiler counts the body of a loop once.
    time = 64
    counted = WIDE.flops_per_token(context=time) * time
    assert counted == pytest.approx(compiled_flops(WIDE, (1, time)), rel=0.05)


def test_decode_flops_are_the_compilers():
    # A decode step computes the recurrence that is counted, and attends to every slot of the cache
    # and the token itself. On top come the elementwise passes over the states.
    counted = WIDE.flops_per_token(context=257)
    assert counted == pytest.approx(compiled_flops(WIDE, (1, 1), capacity=256), rel=0.05)


def test_totals_add_up_and_training_is_three_forward_passes():
    report = inspect(WIDE, sequence_length=100)
    assert report.flops == sum(row.flops for row in report.layers) + report.head_flops
    assert report.flops == WIDE.flops_per_token(50.5)
    assert report.training_flops == 3 * report.flops
    assert inspect(WIDE, sequence_length=200).flops > report.flops
    with pytest.raises(ValueError, match="sequence_length must be >= 1, got 0"):
        inspect(WIDE, sequence_length=0)


def test_a_large_model_costs_nothing_to_inspect():
    large = dataclasses.replace(
        WIDE, layers=12, width=4096, vocabulary=150_000, scan=True, dtype="bfloat16"
    )
    report = inspect(large)
    assert report.parameters > 1e9
    mamba = [row for row in report.layers if row.element == "mamba2"]
    assert all(len(set(row.cache_bytes)) == 1 for row in mamba)
    attention = next(row for row in report.layers if row.element == "attention")
    growth = report.contexts[-1] / report.contexts[0]
    assert attention.cache_bytes[-1] == pytest.approx(growth * attention.cache_bytes[0], rel=1e-3)


def test_tables_and_plot(tmp_path):
    report = inspect(config(layers=6), contexts=(8, 64))
    console = rich.console.Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.render())
    text = console.export_text()
    for word in (
        "local/attention",
        f"{report.parameters:,}",
        "training step",
        "2 x mamba2",
        "tied",
    ):
        assert word in text
    report.plot(tmp_path / "bytes.png")
    assert (tmp_path / "bytes.png").read_bytes().startswith(b"\x89PNG")
