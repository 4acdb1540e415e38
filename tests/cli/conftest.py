# SPDX-License-Identifier: Apache-2.0
import contextlib
import io
from typing import NamedTuple

import pytest

from seqmix.cli import main

CONFIG = """
Experiment.optimizer = @AdamW()
Experiment.schedule = @WarmupCosine()
HybridLM:
    width = 16
    layers = 2
    pattern = 'gated_delta_net, attention'
    scan = False
GatedDeltaNet.heads = 1
GatedDeltaNet.head_width = 8
Attention.heads = 2
Attention.head_width = 8
FeedForward.hidden = 32
Data:
    corpora = (@TextCorpus(),)
    sequence_length = 16
    cache_dir = 'cache'
TextCorpus.files = ('corpus/[0-5].txt',)
TextCorpus.validation_files = ('corpus/[67].txt',)
WarmupCosine.warmup = 1
Trainer:
    steps = 3
    batch_size = 4
    eval_every = 3
    eval_batches = 2
    log_every = 1
    compilation_cache = False
"""


class Output(NamedTuple):
    code: int
    out: str
    err: str


def run(*argv: str) -> Output:
    """Runs a command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    return Output(code, out.getvalue(), err.getvalue())


def fails(*argv: str, code: int = 2) -> str:
    """The one line that a command line which cannot work prints; nothing else may be printed."""
    result = run(*argv)
    assert (result.code, result.out) == (code, "")
    message = result.err.removesuffix("\n")
    assert message.startswith("seqmix: ")
    assert "\n" not in message
    return message.removeprefix("seqmix: ")


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder with a config, a corpus, and the output of 3 steps of training in runs/tiny."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "corpus").mkdir()
    (folder / "tiny.gin").write_text(CONFIG)
    for number in range(8):
        lines = [f"line {i} of document {number}: the quick brown fox\n" for i in range(4 + number)]
        (folder / "corpus" / f"{number}.txt").write_text("".join(lines))
    with contextlib.chdir(folder):
        result = run("train", "--gin_file=tiny.gin")
    return folder, result


@pytest.fixture
def workplace(trained, monkeypatch):
    """The folder of `trained`, as the working directory."""
    monkeypatch.chdir(trained[0])
    return trained[0]
