# SPDX-License-Identifier: Apache-2.0
"""The elementwise family in the shared suite: D channels (heads times values), N = key width."""

import numpy as np

from tests.mixers import dense_elementwise as dense


def mixers_elementwise(Mixer):
    """The entries; `Mixer` comes from `cases`, which imports this module."""

    def width(s):
        return s.states * s.value

    def selective_scan(rng, s):
        rows, D = (s.batch, s.time), width(s)
        return {
            "x": rng.normal(size=(*rows, D)),
            "dt": np.logaddexp(0, rng.normal(size=(*rows, D)) - 1),
            "A": -np.exp(rng.uniform(-3, 2, size=(D, s.key))),
            "B": rng.normal(size=(*rows, s.key)),
            "C": rng.normal(size=(*rows, s.key)),
            "D": rng.normal(size=D),
        }

    def rg_lru(rng, s):
        size = (s.batch, s.time, width(s))
        return {"x": rng.normal(size=size), "log_a": -np.exp(rng.normal(size=size) * 1.5 - 2)}

    def poles(rng, s):
        real = -np.exp(rng.uniform(-2, 1, size=(width(s), s.key)))
        return np.stack([real, rng.normal(size=real.shape) * 3], axis=-1)

    def s4d(rng, s):
        D = width(s)
        return {
            "u": rng.normal(size=(s.batch, s.time, D)),
            "dt": np.exp(rng.uniform(-4, -1, size=D)),
            "A": poles(rng, s),
            "C": rng.normal(size=(D, s.key, 2)),
            "D": rng.normal(size=D),
        }

    def s4(rng, s):
        size = (width(s), s.key, 2)
        return s4d(rng, s) | {"P": rng.normal(size=size) / 2, "B": rng.normal(size=size)}

    def pairs(s):
        return (s.batch, width(s), s.key, 2)

    common = {"groupings": ((1, 1, 1), (1, 1, 3)), "scales": False, "channels": True}
    # The associative form is the family's own: S6 takes it through the whole suite, RG-LRU and S4D
    # through `test_elementwise.py`.
    forms = ("associative", "chunked")
    return (
        Mixer(
            "selective_scan",
            selective_scan,
            lambda s: (s.batch, width(s), s.key),
            forms,
            dense.selective_scan,
            frozenset({"dt", "A", "D"}),
            gate=None,
            kernels=("tpu",),
            **common,
        ),
        Mixer(
            "rg_lru",
            rg_lru,
            lambda s: (s.batch, width(s)),
            ("chunked",),
            dense.rg_lru,
            frozenset({"log_a"}),
            gate="log_a",
            kernels=("tpu",),
            **common,
        ),
        Mixer(
            "s4d",
            s4d,
            pairs,
            ("chunked",),
            dense.s4d,
            frozenset({"dt", "A", "C", "D"}),
            gate=None,
            parameters=frozenset({"A", "C"}),
            **common,
        ),
        Mixer(
            "s4",
            s4,
            pairs,
            ("chunked",),
            dense.s4,
            frozenset({"dt", "A", "P", "B", "C", "D"}),
            gate=None,
            parameters=frozenset({"A", "P", "B", "C"}),
            thin=True,
            **common,
        ),
    )
