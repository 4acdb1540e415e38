# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from seqmix.interop.hf.checkpoint import write_json, write_tensors

_VOCABULARY, _WIDTH, _HIDDEN, _LAYERS = 32_000, 1024, 4096, 8

# A thread looks at the memory of the process while the work goes on; prints what it adds at most,
# in bytes.
_MEASURE = """
import sys, threading, time
import jax
from seqmix.interop import hf

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.002)

jax.numpy.zeros(3).block_until_ready()
before = peak = resident()
done = False
thread = threading.Thread(target=watch)
thread.start()
{work}
done = True
thread.join()
print(peak - before)
"""


def write(folder: Path) -> int:
    """Writes a Llama of some 300 MB; returns its size."""
    layer = {
        "self_attn.q_proj": (_WIDTH, _WIDTH),
        "self_attn.k_proj": (_WIDTH // 4, _WIDTH),
        "self_attn.v_proj": (_WIDTH // 4, _WIDTH),
        "self_attn.o_proj": (_WIDTH, _WIDTH),
        "mlp.gate_proj": (_HIDDEN, _WIDTH),
        "mlp.up_proj": (_HIDDEN, _WIDTH),
        "mlp.down_proj": (_WIDTH, _HIDDEN),
        "input_layernorm": (_WIDTH,),
        "post_attention_layernorm": (_WIDTH,),
    }
    shapes = {"embed_tokens": (_VOCABULARY, _WIDTH), "norm": (_WIDTH,)}
    shapes |= {f"layers.{i}.{part}": s for i in range(_LAYERS) for part, s in layer.items()}
    dtype = np.dtype(ml_dtypes.bfloat16)
    tensors = {f"model.{name}.weight": (dtype, shape) for name, shape in shapes.items()}
    ones = ((name, np.ones(shape, dtype)) for name, (dtype, shape) in tensors.items())
    write_tensors(folder, tensors, ones, 10**9)
    values = {
        "model_type": "llama",
        "vocab_size": _VOCABULARY,
        "hidden_size": _WIDTH,
        "intermediate_size": _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    }
    write_json(folder / "config.json", values)
    return (folder / "model.safetensors").stat().st_size


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
@pytest.mark.parametrize(
    ("work", "copies"),
    [
        ("model = hf.load(sys.argv[1], dtype='bfloat16')", 1),
        ("model = hf.load(sys.argv[1], dtype='float32')", 2),
    ],
    ids=["bfloat16", "float32"],
)
def test_loading_takes_little_more_than_one_copy(work, copies, tmp_path):
    size = write(tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE.format(work=work), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    added = int(result.stdout.splitlines()[-1])
    assert copies * size <= added < 1.3 * copies * size
