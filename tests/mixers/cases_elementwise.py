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

    common = {"groupings": ((1, 1, 1), (1, 1, 3)), "scales": False, "channels": True}
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
            **common,
        ),
        Mixer(
            "rg_lru",
            rg_lru,
            lambda s: (s.batch, width(s)),
            forms,
            dense.rg_lru,
            frozenset({"log_a"}),
            gate="log_a",
            **common,
        ),
    )
