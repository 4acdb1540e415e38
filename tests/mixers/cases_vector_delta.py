# SPDX-License-Identifier: Apache-2.0
"""KDA and RWKV-7 in the shared suite."""

import numpy as np

from tests.mixers import dense_vector_delta as dense


def mixers_vector_delta(Mixer, qkv, matrix_state):
    """The entries; `Mixer` and the draws come from `cases`, which imports this module."""

    def gates(rng, s):
        return -np.exp(rng.normal(size=(s.batch, s.time, s.states, s.key)) * 1.5 - 2)

    def sigmoid(rng, *shape):
        return 1 / (1 + np.exp(-rng.normal(size=shape)))

    def kda(rng, s):
        beta = sigmoid(rng, s.batch, s.time, s.states)
        return qkv(rng, s) | {"log_decay": gates(rng, s), "beta": beta}

    def rwkv7(rng, s):
        arrays = qkv(rng, s) | {"log_decay": gates(rng, s)}
        arrays["r"] = arrays.pop("q")
        kappa = rng.normal(size=arrays["k"].shape)
        kappa /= np.linalg.norm(kappa, axis=-1, keepdims=True)
        return arrays | {"a": -kappa, "b": kappa * sigmoid(rng, *kappa.shape)}

    return (
        Mixer(
            "kda",
            kda,
            matrix_state,
            ("chunked",),
            dense.kda,
            frozenset({"log_decay", "beta"}),
            kernels=("tpu",),
        ),
        Mixer(
            "rwkv7",
            rwkv7,
            matrix_state,
            ("chunked",),
            dense.rwkv7,
            frozenset({"log_decay"}),
            groupings=((2, 2, 2), (1, 1, 1), (3, 3, 3)),
        ),
    )
