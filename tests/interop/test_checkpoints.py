# SPDX-License-Identifier: Apache-2.0
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqmix import config as configs
from seqmix import inference
from seqmix.interop import hf
from seqmix.interop.hf.layout import differences
from seqmix.interop.hf.loading import read_config
from seqmix.models import unstack
from seqmix.training import Experiment
from tests.interop.cases import ALL, FIRST_FAST, FIXTURES, expected, tensors


@pytest.mark.parametrize("case", FIRST_FAST)
def test_logits_are_those_of_transformers(case):
    wanted = expected(case)
    model = hf.load(case, dtype=jnp.float32)
    logits = np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, wanted.tokens))
    assert logits.dtype == np.float32
    assert logits.shape == wanted.logits.shape
    error = np.abs(logits - wanted.logits).max() / np.abs(wanted.logits).max()
    assert error < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL)
def test_decoding_continues_as_transformers_does(case):
    wanted = expected(case)
    model = hf.load(case, dtype=jnp.float32)
    options = {"max_new_tokens": len(wanted.continuation), "temperature": 0}
    tokens = inference.generate(model, wanted.prompt[None], **options)
    np.testing.assert_array_equal(tokens[0], wanted.continuation)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL)
def test_unrolled_and_scanned_models_agree(case):
    wanted = expected(case)
    scanned, unrolled = (hf.load(case, dtype=jnp.float32, scan=scan) for scan in (True, False))
    for path, (one, other) in parameters(scanned, unrolled).items():
        # Slopes are computed, not read, and may differ by the rounding of another program.
        tolerance = 1e-6 if path[-1] == "slopes" else 0
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=0, err_msg=str(path))
    logits = np.asarray(jax.jit(lambda model, tokens: model(tokens))(unrolled, wanted.tokens))
    assert np.abs(logits - wanted.logits).max() < 1e-4 * np.abs(wanted.logits).max()


@pytest.mark.parametrize("case", ALL)
def test_export_gives_back_the_same_tensors(case, tmp_path):
    hf.save(hf.load(case, dtype=jnp.float32), tmp_path / "copy")
    assert tensors(tmp_path / "copy") == tensors(case)
    again, before = (
        json.loads((path / "config.json").read_text()) for path in (tmp_path / "copy", case)
    )
    assert again == before


def parameters(*models):
    """The arrays of models of one layout, by path."""
    flat = [dict(nnx.to_flat_state(nnx.state(unstack(model)))) for model in models]
    assert flat[0].keys() == flat[1].keys()
    return {path: tuple(np.asarray(one[path][...]) for one in flat) for path in flat[0]}


@pytest.mark.parametrize("case", FIRST_FAST)
def test_a_model_without_its_origin_is_written_as_the_same_model(case, tmp_path):
    model = hf.load(case, dtype=jnp.float32)
    model.origin = None
    family = json.loads((case / "config.json").read_text())["model_type"]
    hf.save(model, tmp_path / "new", family=family)
    again = hf.load(tmp_path / "new", dtype=jnp.float32)
    assert differences(model.config, again.config) == []
    hf.save(again, tmp_path / "again")
    assert tensors(tmp_path / "again") == tensors(tmp_path / "new")
    # The numbers are those of the checkpoint, whatever their names and dtypes there.
    for path, (before, after) in parameters(model, again).items():
        np.testing.assert_array_equal(before, after, err_msg=str(path))


@pytest.mark.parametrize("case", ALL)
def test_imported_configs_have_a_gin_form(case):
    values = json.loads((case / "config.json").read_text())
    experiment = Experiment(model=read_config(values))
    text = configs.resolved(experiment)
    assert configs.from_text(text).build(Experiment) == experiment


def test_bfloat16_checkpoints_are_bfloat16_models_unless_asked():
    case = FIXTURES / "llama" / "grouped"
    model = hf.load(case)
    assert (model.config.dtype, model.config.param_dtype) == ("bfloat16", "bfloat16")
    assert model.embedding.dtype == jnp.bfloat16
    assert hf.load(case, dtype="float32").embedding.dtype == jnp.float32
    assert hf.load(FIXTURES / "llama" / "biased").config.dtype == "float32"
    with pytest.raises(ValueError, match="dtype must be float32 or bfloat16, got float16"):
        hf.load(case, dtype=jnp.float16)


def test_shards_hold_the_same_tensors(tmp_path):
    case = FIXTURES / "llama" / "grouped"
    hf.save(hf.load(case), tmp_path / "shards", shard_bytes=8000)
    files = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert tensors(tmp_path / "shards") == tensors(case)
