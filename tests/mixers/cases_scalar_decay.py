# SPDX-License-Identifier: Apache-2.0
"""Linear attention, Performer, 2Mamba, retention, lightning attention and Mamba-3."""

import numpy as np

from seqmix import mixers
from tests.mixers import dense_scalar_decay as dense

FEATURES, TURNS = 10, 2


def mixers_scalar_decay(Mixer, qkv, log_decay, matrix_state):
    """The entries; `Mixer` and the draws come from `cases`, which imports this module."""

    def gated(rng, s):
        return qkv(rng, s) | {"log_decay": log_decay(rng, s)}

    def lightning(rng, s):
        return qkv(rng, s) | {"slopes": np.exp(rng.uniform(-6, 1, size=s.states))}

    def performer(rng, s):
        return qkv(rng, s) | {"projection": rng.normal(size=(FEATURES, s.key))}

    def mamba3(rng, s):
        _, groups, heads = s.heads
        rows = (s.batch, s.time)
        return {
            "x": rng.normal(size=(*rows, heads, s.value)),
            "dt": np.logaddexp(0, rng.normal(size=(*rows, heads)) - 1),
            "A": -np.exp(rng.uniform(-3, 2, size=(*rows, heads))),
            "B": rng.normal(size=(*rows, groups, s.key)),
            "C": rng.normal(size=(*rows, groups, s.key)),
            "trapezoid": rng.uniform(size=(*rows, heads)),
            "rotation": rng.normal(size=(*rows, groups, min(TURNS, s.key // 2))),
            "D": rng.normal(size=heads),
        }

    def mamba3_state(s):
        turns = min(TURNS, s.key // 2)
        _, groups, heads = s.heads
        return mixers.Mamba3State(
            (s.batch, heads, s.key, s.value),
            (s.batch, groups, s.key),
            (s.batch, heads, s.value),
            (s.batch, groups, turns),
        )

    def normalised(width):
        return lambda s: (s.batch, s.states, width(s.key), s.value + 1)

    def left_by_tokens(features):
        """Numerator and normaliser that a dozen tokens leave: weights of any query are positive."""

        def draw(rng, s):
            rows = (s.batch, s.states, 12)
            keys = rng.normal(size=(*rows, s.key)) / np.sqrt(s.key)
            values = np.concatenate([rng.normal(size=(*rows, s.value)), np.ones((*rows, 1))], -1)
            return np.einsum("bhtf,bhtv->bhfv", np.apply_along_axis(features, -1, keys), values)

        return draw

    def second_order(x):
        return len(x) ** -0.5 * dense.pairs(x)

    def left_in_performer(rng, s):
        matrix = left_by_tokens(lambda x: np.exp(np.resize(x, FEATURES)))(rng, s)
        return mixers.PerformerState(matrix, rng.normal(size=(s.batch, s.heads[1])))

    def performer_state(s):
        shape = (s.batch, s.states, FEATURES, s.value + 1)
        return mixers.PerformerState(shape, (s.batch, s.heads[1]))

    def empty_performer_state(s):
        return mixers.init_performer_state(s.batch, s.heads[1], s.states, FEATURES, s.value)

    groups = ((2, 2, 2), (1, 1, 3), (2, 2, 4))
    common = {"function": "linear_attention", "gate": None}
    chunked = ("chunked",)
    return (
        Mixer(
            "linear_attention",
            qkv,
            normalised(lambda width: width),
            chunked,
            dense.by_map(dense.elu_plus_one, 1e-6),
            gate=None,
            draw_state=left_by_tokens(dense.elu_plus_one),
        ),
        Mixer(
            "linear_attention_taylor",
            qkv,
            normalised(lambda width: 1 + width + width * (width + 1) // 2),
            chunked,
            dense.taylor_attention,
            options=(("feature_map", "taylor"),),
            draw_state=left_by_tokens(dense.taylor),
            thin=True,
            **common,
        ),
        Mixer(
            "linear_attention_relu",
            qkv,
            matrix_state,
            chunked,
            dense.by_map(lambda x: np.maximum(x, 0), None),
            options=(("feature_map", "relu"), ("normalize", False)),
            thin=True,
            kernels=("tpu",),
            **common,
        ),
        Mixer(
            "second_order_attention",
            gated,
            normalised(lambda width: width * (width + 1) // 2),
            ("chunked", "quadratic"),
            dense.second_order_attention,
            frozenset({"log_decay"}),
            draw_state=left_by_tokens(second_order),
        ),
        Mixer(
            "performer_attention",
            performer,
            performer_state,
            chunked,
            dense.performer_attention,
            frozenset({"projection"}),
            gate=None,
            empty=empty_performer_state,
            draw_state=left_in_performer,
            parameters=frozenset({"projection"}),
        ),
        Mixer(
            "retention",
            qkv,
            matrix_state,
            chunked,
            dense.retention,
            gate=None,
            thin=True,
            kernels=("tpu",),
        ),
        Mixer(
            "lightning_attention",
            lightning,
            matrix_state,
            chunked,
            dense.lightning_attention,
            frozenset({"slopes"}),
            gate=None,
            thin=True,
            parameters=frozenset({"slopes"}),
            kernels=("tpu",),
        ),
        Mixer(
            "mamba3",
            mamba3,
            mamba3_state,
            chunked,
            dense.mamba3,
            frozenset({"dt", "A", "D", "trapezoid", "rotation"}),
            groupings=groups,
            gate=None,
            kernels=("tpu",),
        ),
    )
