# SPDX-License-Identifier: Apache-2.0
"""Sparse attention that chooses what it reads finds what a window of as many keys cannot."""

import pytest

from experiments.needle.needle import accuracy, mixers, model_config, train

LENGTH, BUDGET, WIDTH = 64, 16, 64


def far_answers(name, steps):
    """Share of right answers with the needle at the beginning, out of two windows' reach."""
    config = model_config(*mixers(BUDGET, WIDTH // 4)[name], WIDTH)
    answers = train(config, length=LENGTH, steps=steps, batch=16, enough=0.05)
    return accuracy(answers, length=LENGTH, depth=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moba", "nsa"])
def test_chosen_blocks_reach_the_needle(name):
    assert far_answers(name, steps=500) > 0.9


@pytest.mark.slow
def test_a_window_does_not_reach_it():
    # 13 values are possible.
    assert far_answers("window", steps=300) < 0.25
