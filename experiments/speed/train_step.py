# SPDX-License-Identifier: Apache-2.0
"""Times real training steps of hybrids on one GPU, with the kernels and with the chunked form.

    python experiments/speed/train_step.py --out=experiments/speed/results/h200_train

It is the trainer's own step on one device: packed rows of 4,096 random tokens, AdamW, float32
parameters. Writes `train_step.json` and `train_step.md` into --out after every model and form:
tokens/s, utilisation by the model's own FLOPs (`seqmix.training.flops`), memory, and the loss of
the first and the last step, which the forms must agree on. Needs the project installed.
"""

import argparse
import json
import pathlib
import statistics
import time
import traceback
from typing import Any, NamedTuple

import jax
import numpy as np
import timing

from seqmix import config
from seqmix.training.experiment import Experiment
from seqmix.training.flops import model_flops_utilisation
from seqmix.training.program import build_program, define_model
from seqmix.training.step import metric_names

RECIPE = pathlib.Path(__file__).resolve().parents[2] / "configs" / "demo.gin"


class Model(NamedTuple):
    """Changes to the recipe, which binds nothing of a mixer.

    Attributes:
      mixer: config name of the layer whose `impl` is compared.
      overrides: of the recipe.
    """

    mixer: str
    overrides: tuple[str, ...]


_COMMON = (
    "Mesh.fsdp=1",
    "Data.sequence_length=4096",
    "HybridLM.layers=24",
    "HybridLM.dtype='bfloat16'",
    "HybridLM.remat='full'",
    "Attention.head_width=128",
    "Attention.qk_norm=True",
)
_SMALL = (
    *_COMMON,
    "HybridLM.width=1024",
    "HybridLM.vocabulary=32768",
    "Attention.heads=8",
    "Attention.kv_heads=4",
    "FeedForward.hidden=2816",
    "Trainer.batch_size=8",
)
MODELS = {
    "gated_delta_net 0.4B": Model(
        "GatedDeltaNet",
        (
            *_SMALL,
            "HybridLM.pattern='3 gated_delta_net, attention'",
            "GatedDeltaNet.heads=8",
            "GatedDeltaNet.value_heads=16",
            "GatedDeltaNet.head_width=128",
        ),
    ),
    "mamba2 0.4B": Model("Mamba2", (*_SMALL, "HybridLM.pattern='3 mamba2, attention'")),
    # Of the size that others published a throughput of: 24 layers, 65,536 tokens a step.
    "gated_delta_net 1.8B": Model(
        "GatedDeltaNet",
        (
            *_COMMON,
            "HybridLM.width=2048",
            "HybridLM.vocabulary=128256",
            "HybridLM.pattern='3 gated_delta_net, attention'",
            "GatedDeltaNet.heads=16",
            "GatedDeltaNet.value_heads=32",
            "GatedDeltaNet.head_width=128",
            "Attention.heads=16",
            "Attention.kv_heads=8",
            "FeedForward.hidden=5632",
            "Trainer.batch_size=16",
        ),
    ),
}


def load(model: Model, form: str, overrides: tuple[str, ...] = ()) -> Experiment:
    """The experiment of a model on one device, its mixer in a form."""
    mine = (*model.overrides, f"{model.mixer}.impl='{form}'", *overrides)
    return config.load([RECIPE], overrides=mine).build(Experiment)


def make_batch(experiment: Experiment, documents: int) -> dict[str, np.ndarray]:
    """Random tokens in rows of `documents` documents of random lengths, [B, T + 1] int32 each."""
    rng = np.random.default_rng(0)
    rows, length = experiment.trainer.batch_size, experiment.data.sequence_length + 1
    shape = (rows, length)
    borders = np.sort(rng.choice(length - 1, (documents - 1,), replace=False) + 1)
    ids = 1 + np.searchsorted(borders, np.arange(length), side="right")
    starts = np.concatenate([[0], borders])
    positions = np.arange(length) - starts[ids - 1]
    return {
        "tokens": rng.integers(0, experiment.model.vocabulary, shape, np.int32),
        "segment_ids": np.broadcast_to(ids, shape).astype(np.int32),
        "positions": np.broadcast_to(positions, shape).astype(np.int32),
    }


def measure(experiment: Experiment, steps: int, documents: int) -> dict[str, Any]:
    """Compiles and times the training step of an experiment on the first device."""
    device = jax.devices()[0]
    program = build_program(experiment, np.ones(experiment.model.vocabulary), [device])
    rows = make_batch(experiment, documents)
    batch = program.put(rows)
    start = time.perf_counter()
    compiled = program.train_step.lower(program.abstract, batch).compile()
    found: dict[str, Any] = {
        "parameters": parameters(experiment),
        "tokens_per_step": rows["tokens"][:, 1:].size,
        "compile_s": round(time.perf_counter() - start, 1),
        "gib": round(memory(compiled) / timing.GIB, 2),
    }
    print(found, flush=True)
    state, losses, times = program.initialise(), [], []
    names = metric_names(program.definition.auxiliary)
    for step in range(steps + 2):  # two of them warm up
        start = time.perf_counter()
        state, vector = compiled(state, batch)
        metrics = dict(zip(names, np.asarray(vector), strict=True))
        if step >= 2:
            times.append(time.perf_counter() - start)
        losses.append(float(metrics["loss"] / metrics["tokens"]))
    del state
    spent = statistics.median(times)
    speed = float(metrics["tokens"]) / spent
    flops = experiment.model.flops_per_token(float(metrics["context"] / metrics["tokens"]))
    return found | {
        "step_ms": round(spent * 1e3, 2),
        "tokens_per_s": round(speed),
        "mfu": model_flops_utilisation(flops, speed, [device]),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def parameters(experiment: Experiment) -> int:
    """Parameters of an experiment's model."""
    return sum(p.size for p in define_model(experiment).params.values())


def memory(compiled: jax.stages.Compiled) -> int:
    """Bytes that the device holds at most: the state is donated and takes room once."""
    sizes = compiled.memory_analysis()
    results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + results


def table(facts: dict[str, Any]) -> str:
    """A Markdown page."""
    head = f"{facts['device']}, jax {facts['jax']}, {facts['date']}; the trainer's step, one device"
    names = ["model", "form", "parameters", "tokens a step", "ms a step", "tokens/s", "MFU"]
    names += ["GiB", "first loss", "last loss", "compiled in"]
    lines = [f"{head}.", "", "| " + " | ".join(names) + " |"]
    lines.append("|---|---" + "|--:" * (len(names) - 2) + "|")
    for row in facts["rows"]:
        cells = [row["model"], row["form"]]
        if "error" in row:
            cells += [row["error"][:80].replace("|", "/")] + [""] * (len(names) - 3)
        else:
            mfu = "" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"
            cells += [f"{row['parameters']:,}", f"{row['tokens_per_step']:,}"]
            cells += [f"{row['step_ms']:.1f}", f"{row['tokens_per_s']:,}", mfu, f"{row['gib']}"]
            cells += [f"{row['first_loss']:.4f}", f"{row['last_loss']:.4f}"]
            cells.append(f"{row['compile_s']:.0f} s")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def run(options: argparse.Namespace, start: float) -> None:
    """Measures and writes; `start` is when the program began."""
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "train_step.json"
    facts = timing.facts("flax", "optax") | {"method": "median of steps, each fetched", "rows": []}
    work = [(name, form) for name in options.models for form in options.forms]
    if path.exists():  # what is not measured again stays
        before = json.loads(path.read_text())["rows"]
        facts["rows"] = [row for row in before if (row["model"], row["form"]) not in work]
    longest = 0.0
    for name, form in work:
        begin = time.perf_counter()
        if begin - start + longest > options.seconds - 15:
            print(f"no time left for {name}, {form}", flush=True)
            continue
        row = {"model": name, "form": form, "date": facts["date"]}
        try:
            experiment = load(MODELS[name], form, tuple(options.overrides))
            row |= measure(experiment, options.steps, options.documents)
        except Exception as error:
            traceback.print_exc(limit=-2)
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        jax.clear_caches()
        facts["rows"].append(row)
        print(row, flush=True)
        path.write_text(json.dumps(facts, indent=1) + "\n")
        path.with_suffix(".md").write_text(table(facts))
        longest = max(longest, time.perf_counter() - begin)
    print(table(facts), flush=True)


def main() -> None:
    """Runs from the command line."""
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--forms", nargs="+", default=["pallas", "chunked"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--documents", type=int, default=4, help="in a row")
    parser.add_argument("--overrides", nargs="*", default=[], help="of every model's recipe")
    parser.add_argument("--seconds", type=float, default=1e6, help="end before so many")
    options = parser.parse_args()
    with timing.time_limit(options.seconds):
        run(options, start)


if __name__ == "__main__":
    main()
