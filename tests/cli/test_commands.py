# SPDX-License-Identifier: Apache-2.0
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from seqmix import inference, training
from seqmix.cli import commands
from tests.cli.conftest import fails, run

ROOT = Path(__file__).parents[2]


def test_train_prints_where_the_run_is(trained):
    folder, result = trained
    assert (result.code, result.err) == (0, "")
    assert "HybridLM.width = 16" in result.out  # the resolved config
    assert "step 3 of 3 is saved in runs/tiny" in result.out
    assert "bigram" in result.out
    for name in ("config.gin", "metrics.jsonl", "loss.png", "checkpoints/3", "tokenizer"):
        assert (folder / "runs/tiny" / name).exists(), name


def test_train_resumes_a_run_without_its_config_file(workplace):
    shutil.copytree("runs/tiny", "runs/longer")
    result = run("train", "--run_dir=runs/longer", "--gin.Trainer.steps=5")
    assert (result.code, result.err) == (0, "")
    assert "resumed at step 3" in result.out
    assert "step 5 of 5 is saved in runs/longer" in result.out
    records = map(json.loads, Path("runs/longer/metrics.jsonl").read_text().splitlines())
    assert [r["step"] for r in records if r["split"] == "train"] == [1, 2, 3, 4, 5]


def test_swapping_a_mixer_trains_beside_the_run(workplace):
    # Settings of the mixer that goes would be unused bindings.
    lines = Path("tiny.gin").read_text().splitlines()
    Path("swap.gin").write_text("\n".join(x for x in lines if not x.startswith("GatedDeltaNet")))
    swap = ("--gin.HybridLM.pattern='attention'", "--gin.Trainer.eval_every=None")
    result = run("train", "--gin_file=swap.gin", *swap)
    assert (result.code, result.err) == (0, "")
    folder = next(Path("runs").glob("swap-??????"))
    assert f"step 3 of 3 is saved in {folder}" in result.out
    assert "HybridLM.pattern = 'attention'" in (folder / "config.gin").read_text()


def test_eval_prints_the_metrics(workplace):
    result = run("eval", "--run_dir=runs/tiny")
    assert (result.code, result.err) == (0, "")
    assert "runs/tiny, step 3, validation split" in result.out
    records = map(json.loads, Path("runs/tiny/metrics.jsonl").read_text().splitlines())
    trained_on = next(r for r in records if r["split"] == "validation")
    limited = run("eval", "--run_dir=runs/tiny", "--batches=2", "--step=3")
    assert limited.code == 0
    shown = dict(re.split(r"  +", line.strip()) for line in limited.out.splitlines()[1:])
    # Training evaluated on two batches as well.
    assert float(shown["bits per byte"]) == pytest.approx(trained_on["bits_per_byte"], rel=1e-5)
    assert limited.out != result.out


def test_eval_takes_overrides(workplace, monkeypatch):
    seen = []
    monkeypatch.setattr(
        training, "evaluate", lambda e, *_, **__: seen.append(e) or {"step": 3, "x": 1}
    )
    result = run("eval", "--run_dir=runs/tiny", "--gin.Data.sequence_length=8")
    assert result == (0, "runs/tiny, step 3, validation split\n  x  1\n", "")
    assert seen[0].data.sequence_length == 8


def test_generate_prints_the_prompt_and_its_continuation(workplace):
    run_ = training.load_run("runs/tiny")
    options = {"max_new_tokens": 20, "temperature": 0.9, "top_k": 200, "top_p": 0.9, "min_p": 0.001}
    expected = inference.generate_text(run_.model, run_.tokenizer, "the qü", seed=5, **options)
    flags = [f"--{name}={value}" for name, value in options.items()]
    result = run("generate", "--run_dir=runs/tiny", "--prompt=the qü", "--seed=5", *flags)
    assert (result.code, result.err) == (0, "")
    assert result.out == f"the qü{expected[0].text}\n"
    assert len(expected[0].text) > 5
    for flag in ("--temperature=0", "--top_k=1", "--top_p=0.01", "--min_p=1", "--seed=6"):
        changed = run(
            "generate", "--run_dir=runs/tiny", "--prompt=the qü", "--seed=5", *flags, flag
        )
        assert changed.out != result.out, flag
    stop = expected[0].text[3]
    cut = run(
        "generate", "--run_dir=runs/tiny", "--prompt=the qü", "--seed=5", *flags, f"--stop={stop}"
    )
    assert cut.out == f"the qü{expected[0].text[: expected[0].text.index(stop)]}\n"


def test_generate_reads_the_prompt_from_a_file_or_standard_input(workplace, monkeypatch):
    common = ("generate", "--run_dir=runs/tiny", "--max_new_tokens=20", "--temperature=0")
    expected = run(*common, "--prompt=line 1\n").out
    Path("prompt.txt").write_text("line 1\n")
    assert run(*common, "--prompt_file=prompt.txt").out == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"line 1\n")))
    assert run(*common, "--prompt_file=-").out == expected


def test_a_terminal_gets_no_control_sequences(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    commands._write("a\x1b[2Jé\n\tb\x07")
    assert capsys.readouterr().out == "a\ufffd[2Jé\n\tb\ufffd"


@pytest.mark.parametrize("source", ["--gin_file=tiny.gin", "--run_dir=runs/tiny"])
def test_inspect_prints_tables_and_writes_a_plot(workplace, source):
    plot = workplace / "runs/tiny/inspect.png"
    plot.unlink(missing_ok=True)
    result = run("inspect", source)
    assert (result.code, result.err) == (0, "")
    for text in ("gated_delta_net", "attention", "tied", "262,144", "16 tokens per row"):
        assert text in result.out
    assert "plot: runs/tiny/inspect.png" in result.out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_inspect_takes_overrides_and_a_place_for_the_plot(workplace):
    result = run("inspect", "--gin_file=tiny.gin", "--gin.HybridLM.layers=4", "--out=a/b.svg")
    assert result.out.count("│ gated_delta_net") == 2
    assert "<svg" in (workplace / "a/b.svg").read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("train --gin_file=tin.gin", "tin.gin: no such file; did you mean 'tiny.gin'?"),
        (
            "train --gin_file=tiny.gin --gin.HybridLM.layer=3",
            "--gin.HybridLM.layer: HybridLM has no parameter 'layer'; did you mean 'layers'?",
        ),
        ("train --gin_file=tiny.gin --gin.HybridLM.layers", "--gin.HybridLM.layers: a value is"),
        ("train --gin_file=tiny.gin --gin.HybridLM.layers='x'", "--gin.HybridLM.layers: "),
        ("inspect --gin_file=tiny.gin --gin.HybridLM.layers=0", "--gin.HybridLM.layers: "),
        ("train --run_dir=runs/tinny", "train: there is no run folder 'runs/tinny'; did you mean"),
        ("eval --run_dir=nowhere/at/all", "eval: there is no run folder 'nowhere/at/all'"),
        ("inspect --run_dir=corpus", "corpus is no run folder: it holds no config.gin"),
        ("eval --run_dir=corpus", "corpus is no run folder: it holds no config.gin"),
        ("generate --run_dir=corpus --prompt=x", "corpus is no run folder"),
        ("eval --run_dir=runs/tiny --step=2", "no checkpoint of step 2 in "),
        ("generate --run_dir=runs/tiny --prompt=x --step=7", "no checkpoint of step 7 in "),
        ("generate --run_dir=runs/tiny", "generate: give one of --prompt and --prompt_file"),
        ("generate --run_dir=runs/tiny --prompt=", "generate: --prompt is empty"),
        ("generate --run_dir=runs/tiny --prompt=a --prompt_file=b", "generate: give one of"),
        (
            "generate --run_dir=runs/tiny --prompt_file=no.txt",
            "generate: --prompt_file=no.txt: cannot be read: No such file or directory",
        ),
        ("generate --run_dir=runs/tiny --prompt=a --stop=", "generate: --stop must not be empty"),
        (
            "generate --run_dir=runs/tiny --prompt=a --top_p=1.5",
            "generate: --top_p must be a number in (0, 1], got 1.5",
        ),
        ("generate --run_dir=runs/tiny --prompt=a --top_k=0", "generate: --top_k must be an integ"),
        ("generate --run_dir=runs/tiny --prompt=a --min_p=-1", "generate: --min_p must be a numb"),
        (
            "generate --run_dir=runs/tiny --prompt=a --temperature=nan",
            "generate: --temperature must be a finite number >= 0, got nan",
        ),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(workplace, argv, message):
    assert fails(*argv.split()).startswith(message)


def test_another_config_in_the_same_folder_is_refused(workplace):
    argv = ("train", "--gin_file=tiny.gin", "--run_dir=runs/tiny", "--gin.HybridLM.width=24")
    result = run(*argv)
    assert result.code == 2
    assert result.err.startswith("seqmix: ")
    assert "HybridLM.width was 16, is 24" in result.err
    assert "Traceback" not in result.err


def test_a_run_without_a_checkpoint(workplace):
    Path("runs/bare").mkdir(parents=True, exist_ok=True)
    shutil.copy("runs/tiny/config.gin", "runs/bare/config.gin")
    assert "no checkpoint" in fails("eval", "--run_dir=runs/bare")
    assert "no checkpoint" in fails("generate", "--run_dir=runs/bare", "--prompt=x")


def test_a_prompt_file_that_is_no_text(workplace):
    Path("binary").write_bytes(b"\xff\xfe")
    message = fails("generate", "--run_dir=runs/tiny", "--prompt_file=binary")
    assert message.startswith("generate: --prompt_file=binary: not UTF-8 text: ")


def test_missing_data_is_one_line(workplace):
    files = "--gin.TextCorpus.files=('nothing/*.txt',)"
    message = fails("train", "--gin_file=tiny.gin", "--run_dir=runs/none", files)
    assert "nothing/*.txt" in message


def test_a_run_that_fails_under_way_has_exit_code_1(workplace):
    diverges = ("--gin.AdamW.learning_rate=1e38", "--gin.Trainer.max_consecutive_nonfinite=1")
    result = run("train", "--gin_file=tiny.gin", *diverges)
    assert result.code == 1
    assert re.fullmatch(r"seqmix: step \d: loss or gradient not finite .*\n", result.err)


def test_a_path_that_cannot_be_written_is_one_line(workplace):
    result = run("inspect", "--gin_file=tiny.gin", "--out=tiny.gin/plot.png")
    assert result.code == 1
    assert result.err == "seqmix: tiny.gin: File exists\n"
    result = run("train", "--gin_file=tiny.gin", "--run_dir=corpus/0.txt")
    assert result.code == 1
    assert result.err.endswith("corpus/0.txt/checkpoints: Not a directory\n")


def test_errors_that_nobody_foresaw_are_raised(workplace, monkeypatch):
    def broken(*_, **__):
        raise ValueError("operands could not be broadcast")

    monkeypatch.setattr(training, "evaluate", broken)
    with pytest.raises(ValueError, match="broadcast"):
        run("eval", "--run_dir=runs/tiny")


def test_control_c_ends_quietly(workplace, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "evaluate", interrupt)
    assert run("eval", "--run_dir=runs/tiny") == (130, "", "")


def test_the_command_of_a_shell(trained):
    folder, _ = trained
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "seqmix", "generate", "--run_dir=runs/tiny"]
    options = ["--prompt=line", "--max_new_tokens=5", "--temperature=0"]
    done = subprocess.run(
        [*argv, *options], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("line")
    failed = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True)
    assert failed.returncode == 2
    assert failed.stderr == "seqmix: generate: give one of --prompt and --prompt_file\n"


def test_a_trained_checkpoint_decodes_to_what_a_full_pass_gives(workplace):
    loaded = training.load_run("runs/tiny")
    prompts = [loaded.tokenizer.encode(text) for text in ("line 1 of", "fox\nl")]
    new = inference.generate(loaded.model, prompts, max_new_tokens=20, temperature=0)
    for prompt, tokens in zip(prompts, new, strict=True):
        row = np.array([[*prompt, *tokens]])
        logits = np.asarray(loaded.model(row))[0, len(prompt) - 1 : -1]
        # The chosen token's logit is the largest, but for rounding.
        chosen = np.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
        assert (logits.max(axis=1) - chosen).max() <= 1e-5 * np.abs(logits).max()
