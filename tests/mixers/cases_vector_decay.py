# SPDX-License-Identifier: Apache-2.0
"""GLA, HGRN2, RWKV-6 and RWKV-5 in the shared suite."""

import numpy as np

from tests.mixers import dense_vector_decay as dense


def mixers_vector_decay(Mixer, qkv, matrix_state):
    """The entries; `Mixer` and the draws come from `cases`, which imports this module."""

    def gates(rng, *shape):
        return -np.exp(rng.normal(size=shape) * 1.5 - 2)

    def gla(rng, s):
        return qkv(rng, s) | {"log_decay": gates(rng, s.batch, s.time, s.states, s.key)}

    def hgrn2(rng, s):
        arrays = gla(rng, s)
        del arrays["k"]
        return arrays

    def rwkv6(rng, s):
        arrays = gla(rng, s)
        arrays["r"] = arrays.pop("q")
        return arrays | {"bonus": rng.normal(size=(s.states, s.key))}

    def rwkv5(rng, s):
        return rwkv6(rng, s) | {"log_decay": gates(rng, s.states, s.key)}

    forms, kernels = ("associative", "chunked"), ("tpu",)
    gate, bonus = frozenset({"log_decay"}), frozenset({"log_decay", "bonus"})
    return (
        Mixer("gla", gla, matrix_state, forms, dense.gla, gate, kernels=kernels),
        Mixer(
            "hgrn2",
            hgrn2,
            matrix_state,
            forms,
            dense.hgrn2,
            gate,
            groupings=((2, 2, 2), (4, 2, 2)),
            thin=True,
            kernels=kernels,
        ),
        Mixer("rwkv6", rwkv6, matrix_state, forms, dense.rwkv6, bonus, kernels=kernels),
        Mixer(
            "rwkv5",
            rwkv5,
            matrix_state,
            forms,
            dense.rwkv5,
            bonus,
            gate=None,
            thin=True,
            kernels=kernels,
        ),
    )
