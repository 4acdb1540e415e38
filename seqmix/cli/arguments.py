# SPDX-License-Identifier: Apache-2.0
"""Subcommands and their flags; light to import, so that `seqmix --help` is quick."""

import dataclasses
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from absl import flags

from seqmix.config.errors import nearest

_GIN = "gin."
_MAXIMUM_SEED = 2**32 - 1


class UsageError(Exception):
    """A command line that cannot be followed; the message says how to write it."""


class Help(Exception):
    """The help of one subcommand was asked for."""


@dataclasses.dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
      name: its word on the command line.
      summary: what it does, one line.
      example: a command line, without `seqmix`.
      define: defines its flags.
      takes_gin: whether `--gin.Name.parameter=value` makes sense for it.
    """

    name: str
    summary: str
    example: str
    define: Callable[[flags.FlagValues], None]
    takes_gin: bool = True


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A parsed command line.

    Attributes:
      command: the subcommand.
      values: its flags, by name.
      overrides: the text after `--gin.` of each override, in order.
    """

    command: Command
    values: dict[str, Any]
    overrides: tuple[str, ...]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None


def _gin_file(values: flags.FlagValues) -> None:
    flags.DEFINE_multi_string(
        "gin_file", [], "Config file; may be repeated, later files win.", flag_values=values
    )


def _run_dir(values: flags.FlagValues, text: str) -> None:
    flags.DEFINE_string("run_dir", None, text, flag_values=values)


def _step(values: flags.FlagValues) -> None:
    text = "Step of the checkpoint to load; default the newest."
    flags.DEFINE_integer("step", None, text, lower_bound=0, flag_values=values)


def _define_train(values: flags.FlagValues) -> None:
    _gin_file(values)
    _run_dir(
        values,
        "Folder of the run. Default runs/<name of the gin file>, with a suffix made from the "
        "--gin overrides if there are any. Without --gin_file: the run to resume.",
    )
    text = "Join the other processes of a run on many hosts first (jax.distributed)."
    flags.DEFINE_bool("distributed", False, text, flag_values=values)


def _define_eval(values: flags.FlagValues) -> None:
    _run_dir(values, "Folder of the run; required.")
    _step(values)
    text = "Evaluate on this many batches at most; default the whole validation split."
    flags.DEFINE_integer("batches", None, text, lower_bound=1, flag_values=values)


def _define_generate(values: flags.FlagValues) -> None:
    named = {"flag_values": values}
    _run_dir(values, "Folder of the run; required.")
    _step(values)
    flags.DEFINE_string("prompt", None, "Text to continue.", **named)
    text = "File with the text to continue, UTF-8; - for standard input."
    flags.DEFINE_string("prompt_file", None, text, **named)
    text = "Tokens to add at most."
    flags.DEFINE_integer("max_new_tokens", 256, text, lower_bound=1, **named)
    text = "Divides the logits; 0 always takes the likeliest token."
    flags.DEFINE_float("temperature", 0.8, text, **named)
    flags.DEFINE_integer("top_k", None, "Choose among the k likeliest tokens.", **named)
    text = "Choose among the likeliest tokens whose probabilities sum to top_p."
    flags.DEFINE_float("top_p", None, text, **named)
    text = "Choose among tokens of at least min_p times the likeliest one's probability."
    flags.DEFINE_float("min_p", None, text, **named)
    text = "The same seed draws the same text."
    flags.DEFINE_integer(
        "seed", 0, text, lower_bound=0, upper_bound=_MAXIMUM_SEED, flag_values=values
    )
    text = "Text to stop before; may be repeated. In a shell $'\\n' is a line break."
    flags.DEFINE_multi_string("stop", [], text, **named)


def _define_inspect(values: flags.FlagValues) -> None:
    _gin_file(values)
    _run_dir(values, "Folder of a run, instead of --gin_file.")
    text = "File of the plot; default inspect.png in the folder that the run has or would have."
    flags.DEFINE_string("out", None, text, flag_values=values)


def _define_import(values: flags.FlagValues) -> None:
    named = {"flag_values": values}
    text = "Folder in the layout of Hugging Face transformers, with safetensors; required."
    flags.DEFINE_string("hf", None, text, **named)
    flags.DEFINE_string("out", None, "Run folder to make; required.", **named)
    text = "dtype of parameters and computing; default bfloat16 where the checkpoint is."
    flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], text, **named)
    text = "A tokenizer.json, or bytes for a model of bytes; default the one in the folder."
    flags.DEFINE_string("tokenizer", None, text, **named)


def _define_export(values: flags.FlagValues) -> None:
    _run_dir(values, "Folder of the run; required.")
    _step(values)
    text = "Folder to write, for Hugging Face transformers; required."
    flags.DEFINE_string("hf", None, text, flag_values=values)
    text = "model_type to write; default that of an imported run, or the first that fits."
    flags.DEFINE_string("family", None, text, flag_values=values)


COMMANDS = {
    command.name: command
    for command in (
        Command(
            "train",
            "Train a model from a config, or resume a run.",
            "train --gin_file=configs/demo.gin --gin.HybridLM.pattern=\"'3 mamba2, attention'\"",
            _define_train,
        ),
        Command(
            "eval",
            "Evaluate a run's checkpoint on its validation split.",
            "eval --run_dir=runs/demo",
            _define_eval,
        ),
        Command(
            "generate",
            "Continue a prompt with a run's checkpoint.",
            'generate --run_dir=runs/demo --prompt="def main():" --temperature=0.8 --top_p=0.95',
            _define_generate,
            takes_gin=False,
        ),
        Command(
            "inspect",
            "Show layers, parameters, FLOPs per token and cache bytes against context length.",
            "inspect --gin_file=configs/demo.gin",
            _define_inspect,
        ),
        Command(
            "import",
            "Make a run folder of a Hugging Face checkpoint.",
            "import --hf=checkpoints/jamba --out=runs/jamba",
            _define_import,
            takes_gin=False,
        ),
        Command(
            "export",
            "Write a run's checkpoint for Hugging Face transformers.",
            "export --run_dir=runs/jamba --hf=checkpoints/jamba-tuned",
            _define_export,
            takes_gin=False,
        ),
    )
}


def parse(argv: Sequence[str]) -> Arguments:
    """Reads a command line without the program's name.

    Raises:
      UsageError: an unknown subcommand or flag, a bad value, or something that is no flag.
      Help: the subcommand's help is wanted; its argument is the `Command`.
    """
    name, *rest = argv
    if name not in COMMANDS:
        what = "flag before the subcommand" if name.startswith("-") else "subcommand"
        raise UsageError(f"unknown {what} {name!r}{_hint(name.lstrip('-'), COMMANDS)}")
    command = COMMANDS[name]
    if {"-h", "-help", "--help"} & set(rest):
        raise Help(command)
    rest, overrides = split_overrides(rest)
    if overrides and not command.takes_gin:
        raise UsageError(
            f"{name} takes no --gin overrides, the run has its config: --gin.{overrides[0]}"
        )
    values = flags.FlagValues()
    command.define(values)
    known = list(values)
    try:
        positional = values(["seqmix", *rest])[1:]
    except flags.UnrecognizedFlagError as error:
        hint = _hint(error.flagname, known, dashes="--")
        raise UsageError(f"{name}: unknown flag --{error.flagname}{hint}") from None
    except flags.Error as error:
        raise UsageError(f"{name}: {error}") from None
    if positional:
        raise UsageError(f"{name}: unexpected {positional[0]!r}; flags are written --name=value")
    return Arguments(command, {flag: values[flag].value for flag in known}, overrides)


def split_overrides(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Takes `--gin.Name.parameter=value` out of a command line.

    Returns:
      The other arguments, and what follows `--gin.` in each override.
    """
    rest, overrides = [], []
    for argument in argv:
        flag = argument.removeprefix("-").removeprefix("-")
        if flag != argument and flag.startswith(_GIN):
            overrides.append(flag.removeprefix(_GIN))
        else:
            rest.append(argument)
    return rest, tuple(overrides)


def main_help() -> str:
    """The help of `seqmix --help`."""
    width = max(map(len, COMMANDS))
    commands = [f"  {c.name:{width}}  {c.summary}" for c in COMMANDS.values()]
    examples = [f"  seqmix {c.example}" for c in COMMANDS.values()]
    return "\n".join(
        [
            "seqmix: hybrid sequence models in JAX.",
            "",
            "usage: seqmix <command> [--flag=value ...] [--gin.Name.parameter=value ...]",
            "",
            "commands:",
            *commands,
            "",
            "examples:",
            *examples,
            "",
            "`seqmix <command> --help` lists a command's flags; `seqmix --version` the version.",
        ]
    )


def command_help(command: Command) -> str:
    """The help of one subcommand."""
    values = flags.FlagValues()
    command.define(values)
    lines = [command.summary, "", f"usage: seqmix {command.name} [--flag=value ...]", "", "flags:"]
    entries = [(f"--{name}", _described(values[name])) for name in sorted(values)]
    if command.takes_gin:
        text = "Changes one setting of the config; strings need quotes of their own."
        entries.append(("--gin.Name.parameter=value", text))
    for flag, text in entries:
        lines.append(f"  {flag}")
        lines.extend(textwrap.wrap(text, 88, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return "\n".join([*lines, "", "example:", f"  seqmix {command.example}"])


def _described(flag: flags.Flag) -> str:
    text = flag.help.partition(";\n")[0]  # absl appends how to repeat a flag
    quiet = flag.default is None or flag.default is False or flag.default == []
    return text if quiet else f"{text} Default {flag.default}."


def _hint(name: str, options: Iterable[str], dashes: str = "") -> str:
    near = nearest(name, options)
    if near:
        return f"; did you mean {dashes}{near}?"
    return f"; there are {', '.join(dashes + option for option in options)}"
