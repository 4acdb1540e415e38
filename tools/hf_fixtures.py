# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints in the Hugging Face layout, with the logits that `transformers` computes.

Needs `transformers` and `torch`, which the project itself does not::

    python tools/hf_fixtures.py                    # all families
    python tools/hf_fixtures.py llama jamba/dense  # some

Each case is a folder ``tests/interop/fixtures/<family>/<case>`` with ``config.json``, the weights
as `save_pretrained` writes them, and ``expected.npz``:

| name | what |
|---|---|
| tokens | [2, 20] int32 |
| logits | [2, 20, vocabulary] float32, weights widened to float32 |
| prompt | [P] int32 |
| continuation | [64] int32, greedy, each token from a full forward pass without a cache |

Seeds are tried until every greedy step is clear (the two best logits are ``MIN_GAP`` apart), no
choice of experts or of attended tokens is close to a tie (both would depend on rounding), the
continuation has at least ``MIN_DISTINCT`` different tokens, and the float32 logits are within
``MAX_ROUNDING`` of float64 ones.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import pathlib
import sys
import tempfile

import numpy
import torch
import transformers
from hf_fixture_cases import CASES

ROOT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "interop" / "fixtures"
TOKENS, PROMPT, NEW = (2, 20), 7, 64
MIN_GAP, MIN_CHOICE_GAP, MIN_DISTINCT, MAX_ROUNDING = 1e-3, 1e-5, 12, 2e-5
SHARD = "40KB"


@dataclasses.dataclass
class Expected:
    """What a case stores, and how clear its choices were."""

    arrays: dict[str, numpy.ndarray]
    gap: float
    choice_gap: float


def stored_values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and those buffers that a checkpoint holds."""
    kept = model.state_dict().keys()
    buffers = {name: value for name, value in model.named_buffers() if name in kept}
    return dict(model.named_parameters()) | buffers


def randomise(model: torch.nn.Module, gain: float = 1.4) -> None:
    """Draws all weights, so that nothing is constant and every part matters to the logits.

    Matrices are normal with standard deviation ``gain / sqrt(inputs)``, so that layers are loud
    beside the embedding, which a tied head would otherwise just repeat; decay rates, time-step
    biases and norm scales keep their initial values plus noise.
    """
    logit_std = 1.0 if model.config.tie_word_embeddings else 3.0
    keep = ("A_log", "dt_bias", "dt_proj.bias", "dt_proj_bias", "recurrent_param")
    embeddings = {id(model.get_input_embeddings().weight)}
    if model.get_output_embeddings() is not None:
        embeddings.add(id(model.get_output_embeddings().weight))
    with torch.no_grad():
        for name, value in stored_values(model).items():
            if not isinstance(value, torch.nn.Parameter) and not name.endswith("correction_bias"):
                continue  # a constant that files hold
            noise = torch.randn(value.shape)
            if id(value) in embeddings:
                value.copy_(noise * logit_std * value.shape[-1] ** -0.5)
            elif name.endswith("correction_bias"):
                value.copy_(0.1 * noise)
            elif name.endswith(keep) or (value.ndim == 1 and not name.endswith("bias")):
                value.add_(0.3 * noise)
            elif value.ndim == 1 or name.endswith("_gate_bias"):
                value.copy_(0.3 * noise)
            else:
                value.copy_(noise * gain * value.shape[-1] ** -0.5)


@contextlib.contextmanager
def choice_gaps():
    """Collects, for every `topk` in the block, by how much the last chosen beats the first left."""
    gaps = [float("inf")]
    original = torch.topk

    def topk(values, k, dim=-1, *args, **kwargs):
        count = values.shape[dim]
        if k < count:
            best = original(values.detach(), k + 1, dim=dim)[0].transpose(dim, -1)
            last, after = best[..., -2], best[..., -1]
            real = (last > -1e30) & (after > -1e30)
            if real.any():
                gaps.append(float((last - after)[real].min()))
        return original(values, k, dim, *args, **kwargs)

    method = torch.Tensor.topk
    torch.topk = topk
    torch.Tensor.topk = topk
    try:
        yield gaps
    finally:
        torch.topk = original
        torch.Tensor.topk = method


@torch.no_grad()
def expect(model: torch.nn.Module, vocabulary: int) -> Expected:
    """Logits and greedy continuation of a model in float32."""
    random = numpy.random.default_rng(0)
    tokens = random.integers(0, vocabulary, TOKENS)
    prompt = random.integers(0, vocabulary, PROMPT)
    with choice_gaps() as gaps:
        logits = model(torch.tensor(tokens), use_cache=False).logits
        row, gap = list(prompt), float("inf")
        for _ in range(NEW):
            last = model(torch.tensor([row]), use_cache=False).logits[0, -1]
            best = last.sort(descending=True)
            gap = min(gap, float(best.values[0] - best.values[1]))
            row.append(int(best.indices[0]))
            if gap < MIN_GAP:
                break
    arrays = {
        "tokens": tokens.astype(numpy.int32),
        "logits": logits.numpy().astype(numpy.float32),
        "prompt": prompt.astype(numpy.int32),
        "continuation": numpy.asarray(row[PROMPT:], numpy.int32),
    }
    return Expected(arrays, gap, min(gaps))


def load(folder: pathlib.Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A saved model, with plain attention."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    problems = {name: value for name, value in report.items() if value}
    if problems:
        raise SystemExit(f"{folder}: {problems}")
    return model.eval()


@torch.no_grad()
def rounding_error(folder: pathlib.Path, arrays: dict[str, numpy.ndarray]) -> float:
    """Greatest difference of the float32 logits to float64 ones, relative to the greatest logit."""
    model = load(folder, torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        exact = model(torch.tensor(arrays["tokens"]), use_cache=False).logits.numpy()
    finally:
        torch.set_default_dtype(torch.float32)
    return float(abs(exact - arrays["logits"]).max() / abs(exact).max())


def make(family: str, name: str, case: dict) -> str:
    """Writes one case; returns a line about it."""
    settings = dict(case)
    dtype = getattr(torch, settings.pop("dtype", "bfloat16"))
    shard = SHARD if settings.pop("sharded", False) else "1GB"
    for seed in itertools.count():
        torch.manual_seed(seed)
        config = transformers.AutoConfig.for_model(family, **settings)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        randomise(model)
        precise = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
        stored = stored_values(model)
        for key, value in stored.items():
            drawn = isinstance(value, torch.nn.Parameter)
            if drawn and not any(part in key for part in precise):
                value.data = value.data.to(dtype)
        model.config.dtype = dtype
        with tempfile.TemporaryDirectory() as temporary:
            folder = pathlib.Path(temporary)
            model.save_pretrained(folder, max_shard_size=shard)
            saved = load(folder)
            expected = expect(saved, config.vocab_size)
            distinct = len(set(expected.arrays["continuation"].tolist()))
            clear = expected.gap >= MIN_GAP and expected.choice_gap >= MIN_CHOICE_GAP
            clear = clear and distinct >= MIN_DISTINCT
            rounding = rounding_error(folder, expected.arrays) if clear else float("inf")
            clear = clear and rounding <= MAX_ROUNDING
            if not clear:
                if seed > 200:
                    raise SystemExit(f"{family}/{name}: no clear seed")
                continue
            # What was drawn is what was saved.
            for value in stored.values():
                value.data = value.data.float()
            with torch.no_grad():
                drawn = model.eval()(torch.tensor(expected.arrays["tokens"]), use_cache=False)
            difference = float((drawn.logits - torch.tensor(expected.arrays["logits"])).abs().max())
            if difference > 1e-5:
                raise SystemExit(f"{family}/{name}: reloaded logits differ by {difference}")
            target = ROOT / family / name
            target.mkdir(parents=True, exist_ok=True)
            for old in target.iterdir():
                old.unlink()
            for file in sorted(folder.glob("*")):
                if file.name != "generation_config.json":
                    target.joinpath(file.name).write_bytes(file.read_bytes())
            numpy.savez_compressed(target / "expected.npz", **expected.arrays)
        parameters = sum(value.numel() for value in model.parameters())
        size = sum(file.stat().st_size for file in target.iterdir())
        return (
            f"{family}/{name}: seed {seed}, {parameters} parameters, {size // 1024} kB, "
            f"gap {expected.gap:.1e}, choice {expected.choice_gap:.1e}, {distinct} distinct "
            f"tokens, logits {expected.arrays['logits'].std():.2f}, rounding {rounding:.1e}"
        )
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="family or family/case; default all")
    wanted = parser.parse_args().cases
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for family, cases in CASES.items():
        for name, case in cases.items():
            if not wanted or family in wanted or f"{family}/{name}" in wanted:
                print(make(family, name, case), flush=True)
    for wish in wanted:
        family, _, name = wish.partition("/")
        if family not in CASES or (name and name not in CASES[family]):
            sys.exit(
                f"unknown case {wish}; known: {json.dumps({f: list(c) for f, c in CASES.items()})}"
            )


if __name__ == "__main__":
    main()
