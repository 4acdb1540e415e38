# SPDX-License-Identifier: Apache-2.0
import shlex
import subprocess
import sys

import pytest

import seqmix
from seqmix.cli.arguments import COMMANDS, Help, UsageError, parse, split_overrides
from seqmix.cli.commands import default_run_dir
from tests.cli.conftest import fails, run


def test_overrides_are_taken_out_before_the_flags():
    argv = ["--gin_file=a.gin", "--gin.A.b='x=y'", "--run_dir", "r", "-gin.s/C.d=(1, 2)"]
    assert split_overrides(argv) == (
        ["--gin_file=a.gin", "--run_dir", "r"],
        ("A.b='x=y'", "s/C.d=(1, 2)"),
    )
    arguments = parse(["train", *argv, "--gin_file=b.gin"])
    assert arguments.gin_file == ["a.gin", "b.gin"]
    assert arguments.run_dir == "r"
    assert arguments.overrides == ("A.b='x=y'", "s/C.d=(1, 2)")


def test_flags_have_types_and_defaults():
    arguments = parse(["generate", "--run_dir=r", "--top_p=0.5", "--stop=a", "--stop", "b, c"])
    assert arguments.values == {
        "run_dir": "r",
        "step": None,
        "prompt": None,
        "prompt_file": None,
        "max_new_tokens": 256,
        "temperature": 0.8,
        "top_k": None,
        "top_p": 0.5,
        "min_p": None,
        "seed": 0,
        "stop": ["a", "b, c"],
    }
    assert parse(["train", "--distributed"]).distributed is True
    # One command's flags are not another's, and nothing is left from an earlier parse.
    assert parse(["train"]).gin_file == []
    with pytest.raises(UsageError, match="unknown flag --top_p"):
        parse(["train", "--top_p=0.5"])


@pytest.mark.parametrize("argv", [("--help",), ("-h",), ("help",)])
def test_help_lists_commands_and_examples(argv):
    result = run(*argv)
    assert result.code == 0
    for command in COMMANDS.values():
        assert f"seqmix {command.example}" in result.out
        assert command.summary in result.out


def test_no_command_shows_the_help_as_an_error():
    result = run()
    assert (result.code, result.out) == (2, "")
    assert "usage: seqmix <command>" in result.err


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_of_a_command_lists_its_flags(name):
    result = run(name, "--help")
    assert result.code == 0
    with pytest.raises(Help):
        parse([name, "--run_dir=x", "-h"])
    for flag in parse([name]).values:
        assert f"  --{flag}\n" in result.out
    assert ("--gin.Name.parameter=value" in result.out) == COMMANDS[name].takes_gin
    assert f"seqmix {COMMANDS[name].example}" in result.out
    assert "repeat this option" not in result.out


def test_examples_parse():
    for command in COMMANDS.values():
        parse(shlex.split(command.example))


def test_version():
    assert run("--version") == (0, f"seqmix {seqmix.__version__}\n", "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "unknown subcommand 'trian'; did you mean train?"),
        (["xyz"], "unknown subcommand 'xyz'; there are train, eval, generate, inspect"),
        (["--run_dir=r"], "unknown flag before the subcommand '--run_dir=r'; there are train, "),
        (["train", "--gin_fil=x"], "train: unknown flag --gin_fil; did you mean --gin_file?"),
        (["eval", "--zzz"], "eval: unknown flag --zzz; there are --run_dir, --step, --batches"),
        (["train", "extra"], "train: unexpected 'extra'; flags are written --name=value"),
        (["train", "--", "extra"], "train: unexpected 'extra'"),
        (["generate", "--top_k=many"], "generate: flag --top_k=many: invalid literal for int()"),
        (["generate", "--max_new_tokens=0"], "generate: flag --max_new_tokens=0: 0 is not a pos"),
        (["generate", "--seed=-1"], "generate: flag --seed=-1: -1 "),
        (["generate", "--temperature=warm"], "generate: flag --temperature=warm: "),
        (["train", "--distributed=maybe"], "train: flag --distributed=maybe: "),
        (["train", "--run_dir"], "train: Missing value for flag --run_dir"),
        (["generate", "--gin.A.b=1"], "generate takes no --gin overrides, the run has its config"),
        (["train"], "train needs --gin_file to start a run, --run_dir to resume one"),
        (["eval"], "eval needs --run_dir"),
        (["generate", "--prompt=x"], "generate needs --run_dir"),
        (["inspect"], "inspect: give one of --gin_file and --run_dir"),
        (["inspect", "--gin_file=a", "--run_dir=b"], "inspect: give one of --gin_file and"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(argv, message):
    assert fails(*argv).startswith(message)


def test_a_runs_folder_is_named_after_its_config_and_overrides():
    plain = default_run_dir(["configs/demo.gin"], ())
    assert plain.as_posix() == "runs/demo"
    assert default_run_dir(["configs/demo.gin", "wide.gin"], ()).name == "demo-wide"
    swapped = default_run_dir(["configs/demo.gin"], ("HybridLM.pattern='mamba2'",))
    assert swapped == default_run_dir(["demo.gin"], ("HybridLM.pattern='mamba2'",))
    assert swapped != default_run_dir(["demo.gin"], ("HybridLM.pattern='attention'",))
    name, mark = swapped.name.split("-")
    assert (name, len(mark), int(mark, 16) >= 0) == ("demo", 6, True)


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from seqmix.cli import main; main(['train', '--help']); main(['trian']);"
        "assert not {'jax', 'numpy', 'flax', 'seqmix.training'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
