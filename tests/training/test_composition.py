# SPDX-License-Identifier: Apache-2.0
"""A model with shared blocks, other residuals and capped logits through the whole trainer."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix import inference
from seqmix.layers import AttentionConfig, Mamba2Config
from seqmix.models import FeedForwardConfig, ResidualConfig, SharedBlockConfig
from seqmix.training import evaluate, load_run, loop, train
from seqmix.training.evaluation import validation_data
from tests.layers.modules import quick_jit
from tests.training.runs import losses, spawn, tiny_experiment

MODEL = {
    # Two periods of one layer under the scan: both read the shared weights.
    "pattern": "x/shared_block + post/feed_forward",
    "scan": True,
    "mixers": {
        "x/shared_block": SharedBlockConfig(
            mixer=Mamba2Config(head_width=8, state_size=4, impl="recurrent"),
            attention=AttentionConfig(heads=2, head_width=8),
            feed_forward=FeedForwardConfig(hidden=16, activation="gelu"),
            adapter_rank=2,
        ),
        "post/feed_forward": FeedForwardConfig(hidden=16),
    },
    "residuals": {"post/feed_forward": ResidualConfig("post", 1.0, 0.5)},
    "norm": "layer",
    "embedding_norm": True,
    "embedding_multiplier": 4.0,
    "logits_multiplier": 0.5,
    "logit_softcap": 2.0,
}


@pytest.mark.slow
def test_training_resumes_evaluates_and_generates(corpus, tmp_path, monkeypatch):
    experiment = tiny_experiment(corpus, MODEL, steps=6, eval_every=None, checkpoint_every=3)
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    train(experiment, straight, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(loop.StopRequest, "reached", lambda self, step: step >= 3)
        assert train(experiment, broken, progress=False).step == 3
    train(experiment, broken, progress=False)
    assert losses(broken) == losses(straight) and len(losses(straight)) == 6
    assert losses(straight)[6] < losses(straight)[1]

    model = load_run(broken).model
    graph, state = nnx.split(model)

    @quick_jit
    def forward(tokens, ids, positions):
        return nnx.merge(graph, state)(tokens, ids, positions)

    total = count = 0.0
    for batch in itertools.islice(validation_data(experiment), 2):
        tokens, ids, positions = (batch[name] for name in ("tokens", "segment_ids", "positions"))
        logits = forward(tokens[:, :-1], ids[:, :-1], positions[:, :-1])
        assert jnp.abs(logits).max() <= 2.0
        chosen = np.take_along_axis(
            np.asarray(jax.nn.log_softmax(logits)), tokens[:, 1:, None], -1
        )[..., 0]
        real = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] != 0)
        total, count = total - chosen[real].sum(), count + real.sum()
    found = evaluate(None, broken, batches=2)
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)

    # A row of the batch's shape: prompt and continuation in one pass of the same program.
    new = inference.generate(model, np.arange(97, 107)[None], max_new_tokens=5, temperature=0.0)
    row = np.zeros_like(tokens[:, :-1])
    row[:, :10], row[:, 10:15] = np.arange(97, 107), new[0]
    logits = forward(row, np.ones_like(row), np.arange(row.shape[1])[None].repeat(len(row), 0))
    np.testing.assert_array_equal(jnp.argmax(logits[0, 9:14], axis=-1), new[0])


FSDP = """
import dataclasses, sys
from pathlib import Path
import jax, numpy as np
from seqmix import data
from seqmix.parallel import MeshConfig
from seqmix.training.program import build_program
from tests.training.runs import tiny_experiment
from tests.training.test_composition import MODEL

base = tiny_experiment(Path(sys.argv[1]), MODEL)
dataset = data.build(base.data, split="train", batch_size=4)
batches = [batch for batch, _ in zip(dataset, range(3))]
found = {}
for count in (1, 2):
    experiment = dataclasses.replace(base, mesh=MeshConfig(data=1, fsdp=count))
    lengths = dataset.tokenizer.byte_lengths()
    program = build_program(experiment, lengths, jax.devices()[:count])
    state = program.initialise()
    name = "stack.shared.shared.attention.query.kernel"
    kernel = state.params[name]
    assert kernel.shape == (32, 16)
    assert kernel.addressable_shards[0].data.size * count == kernel.size
    assert state.optimizer[1][0].mu[name].sharding == kernel.sharding
    for batch in batches:
        state, vector = program.train_step(state, program.put(batch))
        found.setdefault(count, []).append(np.asarray(vector[0] / vector[2]))
np.testing.assert_allclose(found[2], found[1], rtol=2e-5)
print("DONE")
"""


@pytest.mark.slow
def test_sharded_shared_weights_train_as_on_one_device(corpus):
    process = spawn(FSDP, corpus, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    out, error = process.communicate(timeout=400)
    assert process.returncode == 0, error
    assert "DONE" in out
