# SPDX-License-Identifier: Apache-2.0
"""Experts, dense parts and layers without one of the two parts in one model."""

import dataclasses
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from flax import nnx

from seqmix import config as configs
from seqmix.layers import AttentionConfig, Mamba2Config
from seqmix.models import (
    FeedForwardConfig,
    HybridLMConfig,
    MoE,
    MoEConfig,
    inspect,
    unstack,
    unstack_paths,
)
from tests.layers.modules import quick_jit
from tests.models.models import MIXERS, Model, close, config, tree_close

TIME = 12
EXPERTS = MoEConfig(experts=6, top_k=2, hidden=9, selection_bias=True, z_loss=0.1)
# A dense first layer, two periods with experts in every second layer, a layer without a
# feed-forward part and one without a mixer.
SETTINGS = config(
    "attention, attention + moe",
    layers=7,
    leading="attention + first/feed_forward",
    trailing="attention + none, moe",
    mixers={
        "attention": MIXERS["attention"],
        "moe": EXPERTS,
        "first/feed_forward": FeedForwardConfig(hidden=7, gated=False, activation="relu2"),
    },
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, TIME)), jnp.int32)
SEGMENTS = jnp.asarray([[1] * 5 + [2] * 7, [0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 0, 0]], jnp.int32)


class WithLosses(Model):
    @functools.partial(quick_jit, static_argnums=0)
    def train(self, state, tokens, segment_ids):
        """(logits, auxiliary, state with the load counted) and the objective's gradient."""

        def loss(state):
            model = self(state)
            hidden, auxiliary = model.hidden_and_auxiliary(tokens, segment_ids)
            logits = model.logits(hidden)
            probe = jnp.cos(jnp.arange(logits.shape[-1])) * (segment_ids != 0)[..., None]
            return jnp.sum(logits * probe) + auxiliary.loss, (logits, auxiliary, nnx.state(model))

        gradient, out = jax.grad(loss, has_aux=True)(state)
        return out, gradient


@pytest.fixture(scope="module")
def model():
    return WithLosses(SETTINGS)


@pytest.fixture(scope="module")
def trained(model):
    return model.train(model.parameters, TOKENS, SEGMENTS)


def test_parts_follow_the_pattern(model):
    flat = unstack(model())
    parts = [(type(b.mixer).__name__, type(b.feed_forward).__name__) for b in flat.stack.leading]
    attention, none = "Attention", "NoneType"
    assert parts == [
        (attention, "FeedForward"),
        *[(attention, "FeedForward"), (attention, "MoE")] * 2,
        (attention, none),
        (none, "MoE"),
    ]
    assert flat.stack.leading[0].feed_forward.gate is None
    assert flat.stack.leading[6].mixer_norm is None
    assert SETTINGS.branches == 12


def test_scanned_is_unrolled(model, trained):
    unrolled = WithLosses(dataclasses.replace(SETTINGS, scan=False))
    (logits, auxiliary, after), gradient = trained
    state = nnx.state(unstack(model()))
    (wanted, expected, expected_after), expected_gradient = unrolled.train(state, TOKENS, SEGMENTS)
    close(logits, wanted)
    tree_close(auxiliary, expected)
    for found, other in ((gradient, expected_gradient), (after, expected_after)):
        found = unstack_paths(dict(nnx.to_flat_state(found)), SETTINGS)
        tree_close(found, dict(nnx.to_flat_state(other)))


def test_load_and_metrics_of_all_layers(model, trained):
    (_, auxiliary, after), _ = trained
    real = int((SEGMENTS != 0).sum())
    stack, before = after["stack"], model.parameters["stack"]
    loads = [
        np.asarray(stack[part][i]["feed_forward"]["load"][...])
        - np.asarray(before[part][i]["feed_forward"]["load"][...])
        for part, i in (("periods", 1), ("trailing", 1))
    ]
    loads = np.concatenate([loads[0], loads[1][None]])
    np.testing.assert_allclose(loads.sum(1), 2 * real, rtol=1e-6)
    largest = (loads.max(1) / loads.mean(1)).mean()
    close(auxiliary.metrics["moe.max_load"] / real, largest)
    assert tuple(auxiliary.metrics) == MoE.auxiliary_names == model().auxiliary_names
    # The objective has the sum over layers of what the log shows as their mean.
    metrics = auxiliary.metrics
    close(auxiliary.loss, 3 * (0.01 * metrics["moe.balance_loss"] + 0.1 * metrics["moe.z_loss"]))


def test_finish_step_moves_every_bias_by_its_own_load(model, trained):
    (_, _, after), _ = trained
    finished = model(after)
    finished.finish_step()
    for part, i in (("periods", 1), ("trailing", 1)):
        old, new = (
            state["stack"][part][i]["feed_forward"] for state in (after, nnx.state(finished))
        )
        load = np.asarray(old["load"][...])
        sign = np.sign(load.mean(-1, keepdims=True) - load)
        close(new["bias"][...] - old["bias"][...], 1e-3 * sign, 1e-6)
        assert not new["load"][...].any()


def test_packed_documents_are_alone(model, trained):
    (logits, _, _), _ = trained
    alone = np.zeros((2, TIME), np.int32)
    alone[0, :7], alone[1, :6] = TOKENS[0, 5:], TOKENS[1, 4:10]
    ids = (np.arange(TIME) < np.array([[7], [6]])).astype(np.int32)
    (wanted, _, _), _ = model.train(model.parameters, jnp.asarray(alone), jnp.asarray(ids))
    close(wanted[0, :7], logits[0, 5:])
    close(wanted[1, :6], logits[1, 4:10])


def test_decoding_is_the_full_pass(model):
    full = model.logits(model.parameters, TOKENS)
    logits, _, _ = model.decode(model.parameters, TOKENS, model().init_cache(2, TIME))
    close(logits, full)


def test_gin_fills_the_parts_by_name_and_scope():
    source = configs.from_text(
        """
        HybridLM.feed_forward = @MoE()
        HybridLM.leading = 'mamba2 + first/feed_forward'
        HybridLM.pattern = 'mamba2, attention + none, feed_forward'
        MoE.experts = 16
        FeedForward.hidden = 96
        first/FeedForward.activation = 'gelu'
        """,
        filename="test.gin",
    )
    settings = source.build(HybridLMConfig)
    assert settings.feed_forward == MoEConfig(experts=16)
    assert settings.mixers == {
        "mamba2": Mamba2Config(),
        "attention": AttentionConfig(),
        "feed_forward": FeedForwardConfig(hidden=96),
        "first/feed_forward": FeedForwardConfig(hidden=96, activation="gelu"),
    }
    text = configs.resolved(settings)
    assert configs.from_text(text, filename="again.gin").build(HybridLMConfig) == settings


def test_a_part_without_settings_is_the_models():
    settings = HybridLMConfig(
        pattern="attention + moe, attention + feed_forward", feed_forward=EXPERTS
    )
    assert settings.mixers["moe"] == EXPERTS
    assert settings.mixers["feed_forward"] == FeedForwardConfig()
    assert configs.resolved(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": "attention + mamba2"}, "unknown feed-forward part 'mamba2' in 'attention \\+"),
        ({"pattern": "moe + feed_forward"}, "'moe \\+ feed_forward': only a mixer takes"),
        ({"pattern": "none"}, "unknown layer 'none'"),
        ({"pattern": "attention + local/none"}, "unknown feed-forward part 'local/none'"),
        (
            {"pattern": "attention + moe", "mixers": {"moe": FeedForwardConfig()}},
            "must be a MoEConfig, got FeedForwardConfig",
        ),
        ({"mixers": {"moe": EXPERTS}}, "has 'moe', which is in no pattern"),
    ],
)
def test_bad_parts_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        HybridLMConfig(**settings)


def test_inspection_counts_all_and_active_parameters():
    report = inspect(SETTINGS)
    assert report.parameters - report.active == SETTINGS.inactive_parameters
    assert SETTINGS.inactive_parameters == 3 * 4 * 3 * 21 * 9
    assert [row.parameters - row.active for row in report.layers].count(0) == 4
    assert report.active == report.parameters - 3 * 4 * 3 * 21 * 9
    assert report.flops == SETTINGS.flops_per_token(1024.5)
    console = rich.console.Console(width=120, file=io.StringIO())
    console.print(report.render())
    assert f"{report.active:,}" in console.file.getvalue()
    # The experts' products of a token, and the router's.
    last = report.layers[6]
    assert (last.element, last.cache_bytes[0]) == ("moe", 0)
    assert last.flops == 2 * (21 * 6 + 2 * 3 * 21 * 9)


def test_published_sizes():
    """Mixtral 8x7B: 46.7B parameters, 12.9B of them for a token."""
    mixtral = HybridLMConfig(
        vocabulary=32_000,
        width=4096,
        layers=32,
        pattern="attention",
        mixers={"attention": AttentionConfig(heads=32, kv_heads=8, head_width=128)},
        feed_forward=MoEConfig(experts=8, top_k=2, hidden=14_336),
        tied=False,
    )
    report = inspect(mixtral)
    assert (report.parameters, report.active) == (46_702_792_704, 12_879_925_248)
