# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that cannot be loaded, and models that cannot be written."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from seqmix.interop import hf
from seqmix.interop.hf.checkpoint import Checkpoint, write_tensors
from seqmix.interop.hf.families.ssm import read_dt_limit, write_dt_limit
from seqmix.interop.hf.keys import Keys
from seqmix.layers import AttentionConfig
from seqmix.models import FeedForwardConfig, HybridLM, HybridLMConfig
from tests.interop.cases import FIXTURES

_GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture
def folder(tmp_path):
    """A copy of a small checkpoint with a tied head."""
    return Path(shutil.copytree(FIXTURES / "llama" / "grouped", tmp_path / "model"))


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(folder, change):
    """Writes the tensors again, as a function makes them of {name: array}."""
    checkpoint = Checkpoint(folder)
    arrays = {name: checkpoint.read(name) for name in checkpoint.entries}
    change(arrays)
    (folder / "model.safetensors").unlink()
    about = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    write_tensors(folder, about, arrays.items(), 10**9)


def refused(folder, message, error=ValueError):
    with pytest.raises(error, match=re.escape(message)):
        hf.load(folder)


def test_unknown_missing_and_misshaped_tensors_are_all_named(folder):
    def change(arrays):
        arrays["model.extra"] = np.zeros(3, np.float32)
        del arrays["model.norm.weight"]
        arrays[_GATE] = arrays[_GATE][:-1]

    change_tensors(folder, change)
    with pytest.raises(ValueError) as error:
        hf.load(folder)
    text = str(error.value)
    assert "unknown tensors: model.extra" in text
    assert "missing tensors: model.norm.weight" in text
    assert f"tensors of another shape: {_GATE} has shape [55, 32], [56, 32] is expected" in text


def test_pickles_are_refused_unread(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "only pytorch_model.bin: a pickle can run code when it is opened")


def test_folders_without_a_model(folder, tmp_path):
    refused(tmp_path / "nowhere", "is no folder of a Hugging Face model", FileNotFoundError)
    (folder / "model.safetensors").unlink()
    refused(folder, "holds neither model.safetensors nor model.safetensors.index.json")


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5])
def test_files_that_are_cut_short_are_named(folder, kept):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    refused(folder, f"{path}: cut short")


def test_files_of_another_format_are_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes((8).to_bytes(8, "little") + b"no JSON!" + bytes(50))
    refused(folder, f"{path}: no safetensors file")


def test_an_index_must_name_files_of_the_folder(folder):
    names = list(Checkpoint(folder).entries)
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = folder / "model.safetensors.index.json"
    for file, message in (
        ("../part.safetensors", "'../part.safetensors' is no file name"),
        ("other.safetensors", "other.safetensors is missing"),
        ("part.bin", "'part.bin' is no safetensors file"),
    ):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))
        refused(folder, message)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names[1:], "part.safetensors")}))
    refused(folder, f"the index lists other tensors for it: {names[0]}")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "part.safetensors")}))
    assert hf.load(folder).config.layers == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "gpt2"}, "model_type = 'gpt2' is not supported; supported: llama,"),
        ({"architectures": ["LlamaModel"]}, "architectures = ['LlamaModel'] is not supported"),
        ({"hidden_act": "tanh"}, 'family llama: hidden_act = "tanh": supported: "silu"'),
        ({"hidden_size": "32"}, 'hidden_size = "32": a whole number >= 1 is expected'),
        ({"rms_norm_eps": True}, "rms_norm_eps = true: a number is expected"),
        ({"attention_bias": 1}, "attention_bias = 1: true or false is expected"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "kinds of scaling that are supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": 3}, "rope_parameters = 3: an object is expected"),
        ({"quantization_config": {"bits": 4}}, "quantised weights are not supported"),
        ({"vocab_size": None}, "config.json of the family llama lacks 'vocab_size'"),
        ({"model_type": ["llama"]}, "model_type = ['llama'] is not supported"),
        ({"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM' is not"),
        ({"rope_parameters": {"full": {"rope_theta": 1e4}}}, "positions of their own for full"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta must be positive and finite"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "fast"}},
            'beta_fast = "fast": a number is expected',
        ),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers = 10000000, more than the"),
    ],
)
def test_settings_that_are_not_supported_are_named(folder, values, message):
    change_config(folder, **values)
    refused(folder, message)


def test_unknown_settings_are_warned_of(folder):
    change_config(folder, new_gate="fancy", auto_map={"AutoModel": "evil.Model"})
    with pytest.warns(UserWarning, match="not known and not used: new_gate$"):
        hf.load(folder)


def test_older_spellings_of_rotary_settings(folder):
    before = hf.load(folder).config
    values = json.loads((folder / "config.json").read_text())["rope_parameters"]
    theta = values.pop("rope_theta")
    change_config(folder, rope_parameters=None, rope_theta=theta, rope_scaling=values)
    assert hf.load(folder).config == before


def test_a_head_that_is_there_twice_must_be_the_embedding(folder, tmp_path):
    def twice(arrays):
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()

    change_tensors(folder, twice)
    model = hf.load(folder)
    hf.save(model, tmp_path / "copy")
    assert "lm_head.weight" in Checkpoint(tmp_path / "copy").entries

    def otherwise(arrays):
        arrays["lm_head.weight"] = arrays["lm_head.weight"] + ml_dtypes.bfloat16(1)

    change_tensors(folder, otherwise)
    refused(folder, "lm_head.weight differs from model.embed_tokens.weight")


def test_tensors_of_other_dtypes_are_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"I16" ', 1))
    refused(folder, "tensors of dtype I16, which is not supported (F32, BF16, F16 are)")


def test_settings_nested_without_end_are_no_json(folder):
    (folder / "config.json").write_text('{"a": ' + "[" * 100_000)
    refused(folder, "no JSON")


@pytest.mark.parametrize("dtype", ["float16", "half a float", 3])
def test_models_are_float32_or_bfloat16(folder, dtype):
    with pytest.raises(ValueError, match="dtype must be float32 or bfloat16, got"):
        hf.load(folder, dtype=dtype)


def test_a_folder_with_a_model_is_not_written_over(folder, tmp_path):
    model = hf.load(folder)
    with pytest.raises(ValueError, match="holds a model already"):
        hf.save(model, folder)
    with pytest.raises(ValueError, match="shard_bytes must be positive, got 0"):
        hf.save(model, tmp_path / "new", shard_bytes=0)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is no folder"):
        hf.save(model, tmp_path / "file")


def model_of(**fields):
    plain = HybridLMConfig(
        vocabulary=32,
        width=16,
        layers=2,
        pattern="attention",
        mixers={"attention": AttentionConfig(heads=2, head_width=8)},
        feed_forward=FeedForwardConfig(hidden=24),
        scan=False,
    )
    return HybridLM(dataclasses.replace(plain, **fields), rngs=nnx.Rngs(0))


def test_models_that_no_family_can_express_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no form in any family: llama: every layer must be"):
        hf.save(model_of(pattern="gla", mixers={}), tmp_path / "gla")
    windowed = {"attention": AttentionConfig(heads=2, head_width=8, window=4)}
    message = "no form in llama: .*layer 0, Attention.window: 4, None"
    with pytest.raises(ValueError, match=message):
        hf.save(model_of(mixers=windowed), tmp_path / "window", family="llama")
    with pytest.raises(ValueError, match="unknown family 'lama'; there are llama,"):
        hf.save(model_of(), tmp_path / "x", family="lama")
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_this_framework_finds_its_family(tmp_path):
    model = model_of()
    hf.save(model, tmp_path / "new")
    values = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (values["model_type"], values["dtype"]) == ("llama", "float32")
    again = hf.load(tmp_path / "new")
    tokens = np.arange(12).reshape(2, 6)
    np.testing.assert_allclose(again(tokens), model(tokens), rtol=1e-5, atol=1e-6)


def test_changed_models_do_not_keep_an_older_config(folder, tmp_path):
    model = hf.load(folder)
    model.config = dataclasses.replace(model.config, norm_epsilon=0.5)
    hf.save(model, tmp_path / "new")
    assert json.loads((tmp_path / "new" / "config.json").read_text())["rms_norm_eps"] == 0.5


def test_infinite_limits_are_read():
    def limit(*values):
        return read_dt_limit(Keys({"time_step_limit": list(values)}, "mamba2"))

    assert limit(0.0, {"__float__": "Infinity"}) is None
    assert limit(0.0, float("inf")) is None
    assert limit(0.1, {"__float__": "Infinity"}) == (0.1, float("inf"))
    assert limit(*write_dt_limit((0.1, float("inf")))["time_step_limit"]) == (0.1, float("inf"))
    with pytest.raises(ValueError, match="two numbers are expected"):
        limit(0.1, "1")
