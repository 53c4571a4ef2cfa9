"""The program ``fastrl``: runs a command, and prints errors as one line."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import warnings
from collections.abc import Sequence

from fastrl.run.launcher import (
    check_one_process,
    connect_cpus,
    is_main_process,
    leave_group,
    process_count,
    process_index,
)
from fastrl.run.progress import drop_bars, line_start
from fastrl.run.stopping import Stopped, Terminated
from fastrl.run.terminal import visible
from fastrl.tools.commands import COMMANDS
from fastrl.tools.commands.flags import UsageError, parse, unknown_name
from fastrl.user_code import exits_are_errors, fault_of, forget_files

USAGE = """\
usage: fastrl COMMAND [CONFIG.yaml] [--flag value ...]

Reinforcement learning from rewards and preferences, and distillation, for
language models.

commands:
  demo    train a small model on film reviews, improve it with PPO, in minutes
  new     a folder with a script, a recipe and a reward, which trains at once
  sft     supervised fine-tuning of your language model on texts
  reward  train a reward model on preference pairs
  align   learn from preferences, as data or live: DPO, KTO, ORPO and others
  distill learn a teacher's distributions, or one's own with a hint
  ppo     PPO on your model, prompts and reward
  grpo    PPO without a value function: GRPO, Dr. GRPO, RLOO (--advantage)
  recipes settings of whole runs for public models and GPUs of 8, 24 and 80 GB
  report  a page with the figures, results and samples of runs, overlaid
  doctor  the usual illnesses of a run: what shows them, and what to change
  samples print or export the samples that a run was trained on
  chat    talk with a trained model in the terminal
  merge   an adapter becomes a whole model, which any library loads
  push    upload a model to the Hugging Face Hub, with its card
  replay  draw a sample of a run again, and compare it with the recorded one
  plan    the memory that a run needs, before it is run, and what fits a GPU
  env     versions, devices, and the kernels that would be used
  run-trl run a program that was written for TRL, as it is
  migrate what becomes of such a program, line by line; --write changes it
  completion  bash, zsh or fish: what completes these commands and their flags

"fastrl COMMAND --help" shows the flags that matter, --help-all the rest. A YAML
file may hold any of them; flags given beside it win. With FASTRL_DEBUG=1 an
error shows its traceback.

exit status: 0 done; 1 a goal was missed, a run is ill, a replay differs, a
program cannot be migrated, or a bug in fastrl; 2 an error in the input, or in a
function that it names; 130, 143 stopped by Ctrl-C, SIGTERM
"""

# Errors of the user's input, which are printed as one line.
_USER_ERRORS = (ValueError, TypeError, OSError, ImportError, FloatingPointError)
# Switch off libraries' progress bars where stderr is no terminal; those of runs stay.
_NO_BARS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
# Environment variables of all processes but the main one.
_QUIET = {**_NO_BARS, "TRANSFORMERS_VERBOSITY": "error"}
# Further errors that are printed as one line, by their names: torch, say, need not be imported yet.
_ERRORS_BY_NAME = ("OutOfMemoryError", "SafetensorError", "TrainingDiverged", "PeerFailed")


def program() -> int:
    """The program ``fastrl``: calls :func:`main`, and leaves the processes' group after a run."""
    if not sys.stderr.isatty():
        for name, value in _NO_BARS.items():
            os.environ.setdefault(name, value)
    status = main()
    if status < 2:  # after an error other processes may still wait for this one
        leave_group()
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        the exit status: 0; 1 if a goal was missed, a run is ill, a replay differs, or a program
        cannot be migrated; 2 after an error of the user, 130 after Ctrl-C, 141 if a pager closed
        the output, 143 after SIGTERM; that of the program of ``run-trl``. A bug is raised.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in ("--help", "-h", "help"):
        print(USAGE, end="")
        return 0
    if command == "--version":
        from importlib.metadata import version

        print(f"fastrl {version('fastrl-lm')}")
        return 0
    if not is_main_process():
        _leave_messages_to_the_main_process()
    forget_files()  # an earlier command in this process may have run files
    format_before = warnings.formatwarning
    warnings.formatwarning = _warning_line
    try:
        if command not in COMMANDS:
            instead = _METHODS.get(command.lower())
            if instead is not None:
                raise UsageError(f"unknown command {command!r}: it is fastrl {instead}")
            raise UsageError(unknown_name("command", command, COMMANDS))
        if command in _ONE_PROCESS:
            check_one_process(f"fastrl {command}")
        if command in _TRAINING:
            connect_cpus()
        return _run(command, arguments[1:])
    except BrokenPipeError:  # head or a pager has closed the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Terminated as stop:  # Terminated has printed its message
        shown, status = "", stop.status
    except Stopped as stop:
        shown, status = _from_main(f"fastrl: {stop}"), stop.status
    except KeyboardInterrupt as interrupt:
        shown, status = _from_main(f"fastrl: {str(interrupt) or 'interrupted'}"), 130
    except Exception as error:
        drop_bars()
        fault = fault_of(error)
        if os.environ.get("FASTRL_DEBUG", "0") == "1" or not (fault or _is_users(error)):
            raise
        message = fault.message if fault else _message(error)
        shown, status = f"{fault.where if fault else ''}{_name()}: error: {message}", 2
    finally:
        warnings.formatwarning = format_before
    # Objects in the error's frames are freed now, and may print; the message comes last.
    drop_bars()
    gc.collect()
    sys.stdout.flush()
    if shown:
        print(visible(shown), file=sys.stderr)
    return status


def _leave_messages_to_the_main_process() -> None:
    """Silences this process's UserWarnings, and bars and notices of libraries imported later."""
    warnings.simplefilter("ignore", UserWarning)
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


def _from_main(message: str) -> str:
    return message if is_main_process() else ""


def _name() -> str:
    """The program's name in errors, with the process's number where there are several."""
    count = process_count()
    return "fastrl" if count == 1 else f"fastrl (process {process_index()} of {count})"


def _warning_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Formats a warning as a line; a warning of another category than UserWarning, for
    programmers, gets its file and line."""
    text, start = visible(" ".join(str(message).split())), line_start(sys.stderr)
    if category is UserWarning:
        return f"{start}fastrl: warning: {text}\n"
    return f"{start}{filename}:{lineno}: {category.__name__}: {text}\n"


def _message(error: BaseException) -> str:
    """An error as one line, without the line breaks of transformers' messages."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    text = " ".join(str(error).split()) or type(error).__name__
    if type(error).__name__ == "OutOfMemoryError":
        return f"{text} Lower the batch size, or the lengths of prompts and responses."
    return text


def _is_users(error: BaseException) -> bool:
    return isinstance(error, _USER_ERRORS) or type(error).__name__ in _ERRORS_BY_NAME


def _run(command: str, arguments: Sequence[str]) -> int:
    module, kinds, function = COMMANDS[command]
    home = importlib.import_module(f"fastrl.{module}")
    run = getattr(home, function)
    if not kinds:
        return run(arguments) or 0
    settings = parse(command, [getattr(home, kind) for kind in kinds], arguments)
    with exits_are_errors():
        status = run(*settings)
    return status if command == "demo" else 0


# Names of methods that are no commands, with the command that learns by each method.
_METHODS = {
    **{name: f"align --loss {name}" for name in ("dpo", "ipo", "kto", "orpo", "simpo")},
    **dict.fromkeys(("rm", "reward_model"), "reward"),
    **dict.fromkeys(("distillation", "opd", "gkd"), "distill"),
    "sdft": "distill --hint-column",
    **{name: f"grpo --advantage {name}" for name in ("rloo", "dr_grpo", "reinforce++")},
}
_ONE_PROCESS = ("demo", "new", "chat", "merge", "push", "replay", "plan")
_TRAINING = ("sft", "reward", "align", "distill", "ppo", "grpo", "run-trl")

if __name__ == "__main__":
    sys.exit(main())
