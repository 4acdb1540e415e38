# SPDX-License-Identifier: Apache-2.0
"""What every mixer with a key-value cache owes to one that is too small."""

import jax.numpy as jnp
import numpy as np
import pytest

from seqmix import mixers
from tests.mixers.parity import quick_jit

_BLOCKS = {"compression_block": 2, "stride": 2, "block_size": 2, "selected_blocks": 3}


def _nsa(q, k, v, **options):
    gates = jnp.ones((*q.shape[:3], 3))
    options |= _BLOCKS
    return mixers.nsa_attention(q, [k] * 3, [v] * 3, gates, window=3, local_blocks=1, **options)


MIXERS = {
    "attention": mixers.attention,
    "window": lambda *a, **o: mixers.attention(*a, window=9, **o),
    "prefix": lambda *a, **o: mixers.attention(*a, window=2, prefix=5, **o),
    "forgetting": lambda q, k, v, **o: mixers.forgetting_attention(
        q, k, v, jnp.zeros(q.shape[:3]), **o
    ),
    "latent": lambda q, k, v, **o: mixers.latent_attention(
        q, k[:, :, 0], jnp.ones((4, 2, 4)), jnp.ones((4, 2, 4)), **o
    ),
    "longformer": lambda *a, **o: mixers.longformer_attention(*a, window=9, **o),
    "bigbird": lambda *a, **o: mixers.bigbird_attention(*a, block_size=2, **o),
    "moba": lambda *a, **o: mixers.moba_attention(*a, block_size=2, **o),
    "nsa": _nsa,
    "dsa": lambda q, k, v, **o: mixers.dsa_attention(q, k, v, q, k[:, :, 0], q[..., 0], **o),
}


FAST = ("window", "prefix", "latent", "dsa")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in MIXERS]
)
def test_what_continues_an_outgrown_document_is_nan_and_what_follows_is_not(name):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 10, h, 4)).astype(np.float32) for h in (2, 1, 1))

    @quick_jit
    def pieces(q, k, v):
        run = MIXERS[name]
        _, state = run(*(x[:, :6] for x in (q, k, v)), capacity=4)
        rest = [x[:, 6:] for x in (q, k, v)]
        ends, _ = run(*rest, initial_state=state, capacity=4, segment_ids=np.array([[1, 1, 2, 2]]))
        # A larger cache does not bring back what the smaller one lost.
        grown, _ = run(*rest, initial_state=state, segment_ids=np.array([[1, 0, 0, 0]]))
        return ends, grown

    ends, grown = pieces(q, k, v)
    assert bool(jnp.all(jnp.isnan(ends[:, :2]))) and bool(jnp.all(jnp.isfinite(ends[:, 2:])))
    assert bool(jnp.all(jnp.isnan(grown[:, 0]))) and not bool(jnp.any(grown[:, 1:]))
