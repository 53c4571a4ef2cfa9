"""The command ``fastrl``: chooses a command, and prints errors as one line."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable, Sequence

from fastrl.commands.flags import UsageError, parse, unknown_name
from fastrl.run.processes import check_one_process
from fastrl.run.progress import drop_bars
from fastrl.user_code import fault_of

USAGE = """\
usage: fastrl COMMAND [CONFIG.yaml] [--flag value ...]

Reinforcement learning from rewards and preferences for language models.

commands:
  demo   train a small model on film reviews, improve it with PPO, in minutes
  sft    supervised fine-tuning of your language model on texts
  reward train a reward model on preference pairs
  align  learn from preferences, as data or live: DPO, KTO, ORPO and others
  ppo    PPO on your model, prompts and reward
  grpo   the same without a value function: GRPO, Dr. GRPO, RLOO (--advantage)
  report draw the figure of a run anew; results of several runs side by side
  env    versions, devices, and the kernels that would be used

"fastrl COMMAND --help" shows the flags that matter, --help-all the rest. A YAML
file may hold any of them; flags given beside it win. With FASTRL_DEBUG=1 an
error shows its traceback.

exit status: 0 done; 1 a goal was missed, or a defect of fastrl; 2 a mistake in
what was given, or in a function that was named; 130 interrupted
"""

# Mistakes in what was given; anything else is a defect of fastrl and keeps its traceback.
_USER_ERRORS = (ValueError, TypeError, OSError, ImportError)
_OF_LIBRARIES = ("OutOfMemoryError", "SafetensorError")  # by name: torch may not be imported


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0, 1 where a goal was missed, 2 after a user's error, 130 after Ctrl-C. A
        defect of fastrl is raised.
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
    with_place = warnings.formatwarning
    warnings.formatwarning = _warning_line
    try:
        if command not in _COMMANDS:
            raise UsageError(unknown_name("command", command, _COMMANDS))
        if command in _ONE_PROCESS:
            check_one_process(f"fastrl {command}")
        return _COMMANDS[command](arguments[1:])
    except BrokenPipeError:  # the reader of the output has closed it: head, or a pager
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        shown, status = "fastrl: interrupted", 130
    except Exception as error:
        drop_bars()
        fault = fault_of(error)
        if os.environ.get("FASTRL_DEBUG", "0") == "1" or not (fault or _is_users(error)):
            raise
        message = fault.message if fault else _message(error)
        shown, status = f"{fault.where if fault else ''}fastrl: error: {message}", 2
    finally:
        warnings.formatwarning = with_place
    # The error's frames are gone by now: objects in them are freed, and print what they print
    # then, before the message, which comes last.
    drop_bars()
    gc.collect()
    sys.stdout.flush()
    print(shown, file=sys.stderr)
    return status


def _warning_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """One line, as errors are; of other categories, which are for programmers, with the place."""
    text = " ".join(str(message).split())
    if category is UserWarning:
        return f"fastrl: warning: {text}\n"
    return f"{filename}:{lineno}: {category.__name__}: {text}\n"


def _message(error: BaseException) -> str:
    """One line; transformers' messages have breaks and indents of their own."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    text = " ".join(str(error).split()) or type(error).__name__
    if type(error).__name__ == "OutOfMemoryError":
        return f"{text} Lower the batch size, or the lengths of prompts and responses."
    return text


def _is_users(error: BaseException) -> bool:
    return isinstance(error, _USER_ERRORS) or type(error).__name__ in _OF_LIBRARIES


def _demo(arguments: Sequence[str]) -> int:
    from fastrl.demo.experiment import Demo, run_demo

    (demo,) = parse("demo", [Demo], arguments)
    return run_demo(demo)


def _ppo(arguments: Sequence[str]) -> int:
    from fastrl.commands.ppo import PPOFlags, PPOJob, run_ppo

    job, flags = parse("ppo", [PPOJob, PPOFlags], arguments)
    run_ppo(job, flags)
    return 0


def _grpo(arguments: Sequence[str]) -> int:
    from fastrl.commands.ppo import GRPOFlags, GRPOJob, run_ppo

    job, flags = parse("grpo", [GRPOJob, GRPOFlags], arguments)
    run_ppo(job, flags)
    return 0


def _sft(arguments: Sequence[str]) -> int:
    from fastrl.commands.sft import SFTFlags, SFTJob, run_sft

    job, flags = parse("sft", [SFTJob, SFTFlags], arguments)
    run_sft(job, flags)
    return 0


def _reward(arguments: Sequence[str]) -> int:
    from fastrl.commands.reward import RewardFlags, RewardJob, run_reward

    job, flags = parse("reward", [RewardJob, RewardFlags], arguments)
    run_reward(job, flags)
    return 0


def _align(arguments: Sequence[str]) -> int:
    from fastrl.commands.align import AlignFlags, AlignJob, run_align

    job, flags = parse("align", [AlignJob, AlignFlags], arguments)
    run_align(job, flags)
    return 0


def _report(arguments: Sequence[str]) -> int:
    from fastrl.commands.report import run_report

    run_report(arguments)
    return 0


def _env(arguments: Sequence[str]) -> int:
    parse("env", [], arguments)
    from fastrl.commands.env import describe

    print(describe())
    return 0


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "demo": _demo,
    "sft": _sft,
    "reward": _reward,
    "align": _align,
    "ppo": _ppo,
    "grpo": _grpo,
    "report": _report,
    "env": _env,
}
_ONE_PROCESS = tuple(name for name in _COMMANDS if name not in ("report", "env"))

if __name__ == "__main__":
    sys.exit(main())
