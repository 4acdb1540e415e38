# SPDX-License-Identifier: Apache-2.0
"""Tiny experiments for the tests of the loop."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from seqmix.data import DataConfig, TextCorpus
from seqmix.layers.attention import AttentionConfig
from seqmix.layers.gated_delta_net import GatedDeltaNetConfig
from seqmix.models import FeedForwardConfig, HybridLMConfig
from seqmix.training import AdamWConfig, Experiment, TrainerConfig, WarmupCosineConfig
from seqmix.training.metrics import read_metrics

ROOT = Path(__file__).parents[2]


def write_corpus(folder: Path) -> None:
    """Eight documents of a regular text, each of its own length."""
    folder.mkdir(parents=True)
    for number in range(8):
        lines = [f"line {i} of document {number}: the quick brown fox\n" for i in range(4 + number)]
        (folder / f"{number}.txt").write_text("".join(lines))


def tiny_model(**changes: Any) -> HybridLMConfig:
    settings = {
        "width": 16,
        "layers": 2,
        "pattern": "gated_delta_net, attention",
        "mixers": {
            "gated_delta_net": GatedDeltaNetConfig(heads=1, head_width=8),
            "attention": AttentionConfig(heads=2, head_width=8),
        },
        "feed_forward": FeedForwardConfig(hidden=32),
        "scan": False,  # quicker to compile than a scan over one period
    }
    return HybridLMConfig(**{**settings, **changes})


def tiny_experiment(
    corpus: Path, model: dict[str, Any] | None = None, meta_tokens: int = 0, **trainer
) -> Experiment:
    """Two layers of width 16 on rows of 16 bytes."""
    settings = {
        "steps": 50,
        "batch_size": 4,
        "eval_every": 10,
        "eval_batches": 3,
        "log_every": 1,
        "checkpoint_every": 10,
    }
    files = [TextCorpus(files=(f"{corpus}/[0-5].txt",), validation_files=(f"{corpus}/[67].txt",))]
    return Experiment(
        model=tiny_model(**(model or {})),
        data=DataConfig(
            corpora=files, sequence_length=16, packing="first_fit", meta_tokens=meta_tokens
        ),
        optimizer=AdamWConfig(learning_rate=1e-2),
        schedule=WarmupCosineConfig(warmup=5),
        trainer=TrainerConfig(**{**settings, **trainer}),
    )


def losses(run_dir: Path, split: str = "train") -> dict[int, float]:
    records = [r for r in read_metrics(run_dir) if r["split"] == split]
    found = {r["step"]: r["loss"] for r in records}
    assert len(found) == len(records), "a step is recorded twice"
    return found


def spawn(code: str, *arguments: Any, **environment: str) -> subprocess.Popen:
    """Starts Python on `code`, with the repository importable, and pipes for its output."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


TRAIN = """
import sys
from pathlib import Path
from seqmix.training import train
from tests.training.runs import tiny_experiment
corpus, run_dir, settings = Path(sys.argv[1]), Path(sys.argv[2]), eval(sys.argv[3])
result = train(tiny_experiment(corpus, **settings), run_dir)
print("RESULT", result.step, result.stopped)
"""
