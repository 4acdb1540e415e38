# SPDX-License-Identifier: Apache-2.0
"""The subcommands. Imports everything, so it is itself imported once a command is known."""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console

from seqmix import config, inference, models, training
from seqmix.cli.arguments import Arguments, UsageError
from seqmix.config.errors import suggestion
from seqmix.interop import hf
from seqmix.training import Experiment

RUNS = Path("runs")
_REPORT_WIDTH = 120


def train(arguments: Arguments) -> None:
    """Trains from gin files, or resumes a run folder."""
    if arguments.distributed:
        _join_processes()
    if arguments.gin_file:
        experiment = _from_files(arguments)
        folder = Path(arguments.run_dir or default_run_dir(arguments.gin_file, arguments.overrides))
    else:
        folder = _required_run_dir(arguments, "--gin_file to start a run, --run_dir to resume one")
        experiment = training.load_experiment(folder, arguments.overrides)
    result = training.train(experiment, folder)
    if jax.process_index() == 0:
        print(f"step {result.step} of {experiment.trainer.steps} is saved in {folder}")
        print(f'  seqmix generate --run_dir={folder} --prompt="..."')


def eval(arguments: Arguments) -> None:
    """Evaluates a checkpoint and prints its metrics."""
    folder = _required_run_dir(arguments, "--run_dir")
    experiment = training.load_experiment(folder, arguments.overrides)
    result = training.evaluate(experiment, folder, step=arguments.step, batches=arguments.batches)
    print(f"{folder}, step {result.pop('step')}, validation split")
    width = max(map(len, result))
    for name, value in result.items():
        print(f"  {name.replace('_', ' '):{width}}  {value:,.6g}")


def generate(arguments: Arguments) -> None:
    """Prints the prompt and streams its continuation."""
    folder = _required_run_dir(arguments, "--run_dir")
    prompt = _prompt(arguments)
    sampling = {
        name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p", "min_p")
    }
    try:
        inference.SamplingConfig(**sampling)  # before the model is loaded
    except ValueError as error:
        raise UsageError(f"generate: --{error}") from None
    if "" in arguments.stop:
        raise UsageError("generate: --stop must not be empty")
    run = training.load_run(folder, step=arguments.step)
    if run.experiment.trainer.compilation_cache:
        training.enable_compilation_cache()
    pieces = inference.stream_text(
        run.model,
        run.tokenizer,
        prompt,
        max_new_tokens=arguments.max_new_tokens,
        seed=arguments.seed,
        stop_strings=arguments.stop,
        **sampling,
    )
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character of the text
    _write(prompt)
    for piece in pieces:
        _write(piece)
    print()


def inspect(arguments: Arguments) -> None:
    """Prints what a config's model will cost, and plots its cache against context length."""
    if bool(arguments.gin_file) == (arguments.run_dir is not None):
        raise UsageError("inspect: give one of --gin_file and --run_dir")
    if arguments.gin_file:
        experiment = _from_files(arguments)
        folder = default_run_dir(arguments.gin_file, arguments.overrides)
    else:
        folder = _required_run_dir(arguments, "--run_dir")
        experiment = training.load_experiment(folder, arguments.overrides)
    report = models.inspect(experiment.model, sequence_length=experiment.data.sequence_length)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_REPORT_WIDTH)  # else cut at 80 columns
    console.print(report.render())
    out = Path(arguments.out) if arguments.out else folder / "inspect.png"
    out.parent.mkdir(parents=True, exist_ok=True)
    report.plot(out)
    print(f"plot: {out}")


def import_(arguments: Arguments) -> None:
    """Makes a run folder of a Hugging Face checkpoint."""
    source, out = _required(arguments, "hf"), _required(arguments, "out")
    experiment = hf.import_run(source, out, dtype=arguments.dtype, tokenizer=arguments.tokenizer)
    model = experiment.model
    print(f"{model.layers} layers, width {model.width}, {model.param_dtype}: saved in {out}")
    print(f'  seqmix generate --run_dir={out} --prompt="..."')


def export(arguments: Arguments) -> None:
    """Writes a run's checkpoint for Hugging Face transformers."""
    folder = _required_run_dir(arguments, "--run_dir")
    target = _required(arguments, "hf")
    hf.export_run(folder, target, family=arguments.family, step=arguments.step)
    print(f"{folder} is saved in {target}")


def _required(arguments: Arguments, flag: str) -> str:
    value = arguments.values[flag]
    if not value:
        raise UsageError(f"{arguments.command.name} needs --{flag}")
    return value


def default_run_dir(gin_files: Sequence[str], overrides: Sequence[str]) -> Path:
    """The run folder of a config: its name, and a mark of the overrides if there are any.

    Runs of one config with other settings then lie beside each other, and the same command line
    finds its run again.
    """
    name = "-".join(Path(file).stem for file in gin_files)
    if overrides:
        name += "-" + hashlib.sha256("\n".join(overrides).encode()).hexdigest()[:6]
    return RUNS / name


def _from_files(arguments: Arguments) -> Experiment:
    return config.load(arguments.gin_file, arguments.overrides).build(Experiment)


def _required_run_dir(arguments: Arguments, wanted: str) -> Path:
    """The run folder, which must exist."""
    name = arguments.command.name
    if not arguments.run_dir:
        raise UsageError(f"{name} needs {wanted}")
    folder = Path(arguments.run_dir)
    if not folder.is_dir():
        parent = folder.parent
        others = [path.name for path in parent.iterdir()] if parent.is_dir() else []
        near = suggestion(folder.name, others)
        raise UsageError(f"{name}: there is no run folder {str(folder)!r}{near}")
    return folder


def _prompt(arguments: Arguments) -> str:
    if (arguments.prompt is None) == (arguments.prompt_file is None):
        raise UsageError("generate: give one of --prompt and --prompt_file")
    if arguments.prompt_file is None:
        source, text = "--prompt", arguments.prompt
    else:
        source = f"--prompt_file={arguments.prompt_file}"
        text = _read(arguments.prompt_file, source)
    if not text:
        raise UsageError(f"generate: {source} is empty: the model continues a text of >= 1 byte")
    return text


def _read(path: str, source: str) -> str:
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode()
    except OSError as error:
        raise UsageError(f"generate: {source}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"generate: {source}: not UTF-8 text: {error}") from None


def _write(text: str) -> None:
    if sys.stdout.isatty():
        # Sampled bytes may spell control sequences, which a terminal would obey.
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    print(text, end="", flush=True)


def _join_processes() -> None:
    from seqmix.parallel import initialize_distributed

    try:
        initialize_distributed()
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"train: --distributed: cannot join the other processes: {error}"
        ) from None
