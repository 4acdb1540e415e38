# SPDX-License-Identifier: Apache-2.0
"""Generation with a model whose documents begin with meta tokens."""

import jax
import numpy as np
import pytest
from flax import nnx

from seqmix import inference
from seqmix.layers import AttentionConfig
from seqmix.models import FeedForwardConfig, HybridLM, HybridLMConfig

META, NEW = 3, 8
CONFIG = HybridLMConfig(
    vocabulary=61,
    meta_tokens=META,
    width=16,
    layers=2,
    pattern="attention",
    mixers={"attention": AttentionConfig(heads=2, head_width=8, window=3, prefix=META)},
    feed_forward=FeedForwardConfig(hidden=32),
    tied=False,
    embedding_std=1.0,
)


def test_prompts_come_after_them():
    """Continuations far beyond the window are those of whole passes; pieces cut the meta tokens."""
    model = HybridLM(CONFIG, rngs=nnx.Rngs(0))
    prompts = [[5, 17, 40, 2, 9], [60, 1]]
    new = inference.generate(model, prompts, max_new_tokens=NEW, temperature=0, prefill_chunk=2)
    rows = np.zeros((2, META + 5 + NEW), np.int32)
    for row, prompt in enumerate(prompts):
        whole = [*CONFIG.meta_ids, *prompt, *new[row]]
        rows[row, : len(whole)] = whole
    graph, state = nnx.split(model)
    expected = jax.jit(lambda tokens: nnx.merge(graph, state)(tokens))(rows).argmax(-1)
    for row, prompt in enumerate(prompts):
        first = META + len(prompt) - 1
        np.testing.assert_array_equal(expected[row, first : first + NEW], new[row])
    assert len(set(new.ravel().tolist())) > 4
    with pytest.raises(ValueError, match=r"id 61 is outside the model's vocabulary \[0, 61\)"):
        inference.generate(model, [[61]], max_new_tokens=1)
