# SPDX-License-Identifier: Apache-2.0
"""Settings of the model, in Python and from gin text."""

import dataclasses

import pytest

from seqmix import config as configs
from seqmix.layers import AttentionConfig, GatedDeltaNetConfig, Mamba2Config
from seqmix.models import FeedForwardConfig, HybridLMConfig


def test_mixers_are_filled_and_the_config_hashes():
    config = HybridLMConfig(
        pattern="mamba2, local/attention", mixers={"mamba2": Mamba2Config(groups=2)}
    )
    assert config.mixers == {"mamba2": Mamba2Config(groups=2), "local/attention": AttentionConfig()}
    same = HybridLMConfig(pattern="mamba2, local/attention", mixers=config.mixers)
    assert same == config and hash(same) == hash(config)
    deeper = dataclasses.replace(config, layers=12)
    assert deeper.mixers == config.mixers and deeper != config


def test_gin_fills_the_mixers_from_names_and_scopes():
    source = configs.from_text(
        """
        HybridLM.pattern = 'gated_delta_net, local/attention, attention'
        HybridLM.leading = 'attention'
        GatedDeltaNet.head_width = 32
        Attention.heads = 2
        local/Attention.window = 16
        FeedForward.hidden = 96
        """,
        filename="test.gin",
    )
    config = source.build(HybridLMConfig)
    assert config.mixers == {
        "attention": AttentionConfig(heads=2),
        "gated_delta_net": GatedDeltaNetConfig(head_width=32),
        "local/attention": AttentionConfig(heads=2, window=16),
    }
    assert config.feed_forward == FeedForwardConfig(hidden=96)
    assert (
        configs.from_text(configs.resolved(config), filename="again.gin").build(HybridLMConfig)
        == config
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("HybridLM.pattern = 'mamba2'\nAttention.window = 3", r"t\.gin:2"),
        ("HybridLM.pattern = 'mamba9'", r"t\.gin:1.*unknown layer 'mamba9'; did you mean 'mamba"),
        ("HybridLM.pattern = 'mamba2,'", r"t\.gin:1.*character 8: expected a count or a layer"),
        ("HybridLM.remat = 'dot'", r"t\.gin:1.*'dots'"),
        ("HybridLM.layers = 0", r"t\.gin:1.*HybridLM.layers must be >= 1, got 0"),
        ("local/Attention.window = 3", r"t\.gin:1"),
        ("HybridLM.feed_forward = None\nFeedForward.hidden = 3", r"t\.gin:2"),
    ],
)
def test_gin_mistakes_are_errors_with_their_line(text, message):
    with pytest.raises(configs.ConfigError, match=message):
        configs.from_text(text, filename="t.gin").build(HybridLMConfig)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixers": {"mamba2": Mamba2Config()}}, "has 'mamba2', which is in no pattern"),
        ({"mixers": {"attention": Mamba2Config()}}, "must be a AttentionConfig, got Mamba2Config"),
        ({"vocabulary": 0}, "HybridLM.vocabulary must be >= 1, got 0"),
        ({"embedding_std": 0.0}, "HybridLM.embedding_std must be positive"),
        ({"layers": 1, "leading": "2 attention"}, "take 2 layers, the model has 1"),
        ({"dtype": "float16"}, "float16"),
        ({"width": "128"}, "width"),
    ],
)
def test_bad_settings_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        HybridLMConfig(**settings)


def test_feed_forward_width():
    assert FeedForwardConfig().hidden_width(768) == 2048
    assert FeedForwardConfig(multiple_of=1).hidden_width(100) == 267
    assert FeedForwardConfig(hidden=5).hidden_width(100) == 5


def test_a_width_that_the_heads_do_not_fill_is_refused_at_once():
    with pytest.raises(ValueError, match=r"GatedDeltaNet.head_width = 64 does not divide .* 33"):
        HybridLMConfig(width=33)
