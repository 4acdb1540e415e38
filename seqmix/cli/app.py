# SPDX-License-Identifier: Apache-2.0
"""Runs a command line and turns foreseen errors into one line and an exit code."""

import importlib
import keyword
import os
import sys
from collections.abc import Sequence

from absl import flags

from seqmix import __version__
from seqmix.cli.arguments import Arguments, Help, UsageError, command_help, main_help, parse

USAGE = 2
"""Exit code for a mistake in the command line, the config or the input."""
FAILURE = 1
"""Exit code for a run that failed under way."""
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `seqmix`.

    Args:
      argv: the command line without the program's name; None for the process's own.

    Returns:
      The exit code: 0, `USAGE`, `FAILURE`, or 130 after Control-C. Errors that nobody foresaw are
      raised.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv:
        print(main_help(), file=sys.stderr)
        return USAGE
    if argv[0] in ("-h", "-help", "--help", "help"):
        print(main_help())
        return 0
    if argv[0] == "--version":
        print(f"seqmix {__version__}")
        return 0
    try:
        arguments = parse(argv)
        _run(arguments)
        sys.stdout.flush()
    except Help as help_wanted:
        print(command_help(help_wanted.args[0]))
    except UsageError as error:
        return _report(error, USAGE)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader has gone; without this Python complains again when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            return _report(f"{error.filename}: {error.strerror}", FAILURE)
        if not _foreseen(error):
            raise
        mistake = isinstance(error, ValueError | FileNotFoundError)
        return _report(error, USAGE if mistake else FAILURE)
    return 0


def _run(arguments: Arguments) -> None:
    # Grain and Orbax read flags of their own from absl, which asks for a parse before.
    flags.FLAGS.mark_as_parsed()
    commands = importlib.import_module("seqmix.cli.commands")
    name = arguments.command.name
    getattr(commands, f"{name}_" if keyword.iskeyword(name) else name)(arguments)


def _foreseen(error: Exception) -> bool:
    """Whether seqmix itself raised this error, on purpose: its message is for the user.

    JAX, whose frames are filtered out of tracebacks, leaves a note on its errors.
    """
    kinds = (ValueError, RuntimeError, FloatingPointError, FileNotFoundError)
    if not isinstance(error, kinds) or getattr(error, "__notes__", None):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals["__name__"].startswith("seqmix.")


def _report(error: object, code: int) -> int:
    print(f"seqmix: {error}", file=sys.stderr)
    return code
