"""The command ``fastrl``: reads flags and YAML files, and hands over to a command's job."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fastrl.processes import check_one_process

USAGE = """\
usage: fastrl COMMAND [CONFIG.yaml] [--flag value ...]

Reinforcement learning from rewards and preferences for language models.

commands:
  demo   train a small model on film reviews, then improve it with PPO; minutes on two CPU cores
  sft    fit your language model to texts
  reward train a reward model on preference pairs
  align  align your model by a loss: DPO, KTO, ORPO and others, from data or from live feedback
  ppo    PPO on your model, prompts and reward
  grpo   the same without a value function: GRPO, Dr. GRPO or RLOO, by --advantage
  env    versions, devices, and the kernels that would be used

"fastrl COMMAND --help" lists a command's flags. A YAML file may hold any of them; flags given
beside it win. With FASTRL_DEBUG=1 an error shows its traceback.
"""

# What a user can get wrong; anything else is a defect of fastrl and keeps its traceback.
_USER_ERRORS = (ValueError, TypeError, OSError, ImportError)


class UsageError(ValueError):
    """A command line or a configuration file that does not make sense."""


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """One spelling per flag (underscores work as well), and defaults where there is one."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        flags = ", ".join(flag for flag in action.option_strings if "_" not in flag)
        if action.nargs == 0:
            return flags
        kind = getattr(action.type, "__name__", "value")
        return f"{flags} {'true|false' if kind == 'string_to_bool' else kind}"

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.required:
            return f"{action.help} (required)"
        if action.default in (None, {}, argparse.SUPPRESS) or action.nargs == 0:
            return action.help
        return super()._get_help_string(action)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 1 where a goal was missed, 2 after a user's error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in ("--help", "-h", "help"):
        print(USAGE, end="")
        return 0
    if command == "--version":
        from importlib.metadata import version

        print(f"fastrl {version('fastrl-lm')}")
        return 0
    try:
        if command not in _COMMANDS:
            raise UsageError(_unknown("command", command, _COMMANDS))
        if command in _ONE_PROCESS:
            check_one_process(f"fastrl {command}")
        return _COMMANDS[command](arguments[1:])
    except _USER_ERRORS as error:
        if os.environ.get("FASTRL_DEBUG", "0") == "1":
            raise
        # transformers' messages come with line breaks and indents of their own.
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"fastrl: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fastrl: interrupted", file=sys.stderr)
        return 130


def parse(command: str, dataclasses: Sequence[Any], arguments: Sequence[str]) -> tuple[Any, ...]:
    """Instances of ``dataclasses`` from "[config.yaml] [--flag value ...]".

    Raises:
        UsageError: an unknown flag or setting, a value of the wrong type, a missing one.
    """
    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError(f"{message} (see fastrl {command} --help)")

    parser = Parser(
        list(dataclasses),
        prog=f"fastrl {command}",
        usage=f"fastrl {command} [CONFIG.yaml] [--flag value ...]",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    known = {action.dest for action in parser._actions}
    flags = list(arguments)
    if flags and not flags[0].startswith("-"):
        flags = [*_flags_of(Path(flags[0]), known), *flags[1:]]
    *parsed, unknown = parser.parse_args_into_dataclasses(
        flags, return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        names = [f"--{name.replace('_', '-')}" for name in sorted(known)]
        raise UsageError(_unknown("argument", unknown[0].replace("_", "-"), names))
    return tuple(parsed)


def _flags_of(path: Path, known: set[str]) -> list[str]:
    """A YAML file's settings as flags, so that both are parsed and checked by the same code."""
    import yaml

    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"unexpected argument {str(path)!r}: a configuration ends in .yaml")
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not valid YAML: {error}") from error
    if settings is None:
        return []
    if not isinstance(settings, dict):
        raise UsageError(f"{path} must hold settings, one 'name: value' per line")
    flags = []
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise UsageError(f"{path}: {_unknown('setting', name, known)}")
        if value is not None:  # null leaves the default
            flags.append(f"--{name}={_as_text(value)}")
    return flags


def _as_text(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    return str(value)


def _unknown(kind: str, name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown {kind} {name!r}" + (f": did you mean {near[0]!r}?" if near else "")


def _demo(arguments: Sequence[str]) -> int:
    from fastrl.demo import Demo, run_demo

    (demo,) = parse("demo", [Demo], arguments)
    return run_demo(demo)


def _ppo(arguments: Sequence[str]) -> int:
    from fastrl.jobs.ppo import PPOFlags, PPOJob, run_ppo

    job, flags = parse("ppo", [PPOJob, PPOFlags], arguments)
    run_ppo(job, flags)
    return 0


def _grpo(arguments: Sequence[str]) -> int:
    from fastrl.jobs.ppo import GRPOFlags, GRPOJob, run_ppo

    job, flags = parse("grpo", [GRPOJob, GRPOFlags], arguments)
    run_ppo(job, flags)
    return 0


def _sft(arguments: Sequence[str]) -> int:
    from fastrl.jobs.sft import SFTFlags, SFTJob, run_sft

    job, flags = parse("sft", [SFTJob, SFTFlags], arguments)
    run_sft(job, flags)
    return 0


def _reward(arguments: Sequence[str]) -> int:
    from fastrl.jobs.reward import RewardFlags, RewardJob, run_reward

    job, flags = parse("reward", [RewardJob, RewardFlags], arguments)
    run_reward(job, flags)
    return 0


def _align(arguments: Sequence[str]) -> int:
    from fastrl.jobs.align import AlignFlags, AlignJob, run_align

    job, flags = parse("align", [AlignJob, AlignFlags], arguments)
    run_align(job, flags)
    return 0


def _env(arguments: Sequence[str]) -> int:
    parse("env", [], arguments)
    from fastrl.environment import describe

    print(describe())
    return 0


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "demo": _demo,
    "sft": _sft,
    "reward": _reward,
    "align": _align,
    "ppo": _ppo,
    "grpo": _grpo,
    "env": _env,
}
_ONE_PROCESS = tuple(name for name in _COMMANDS if name != "env")

if __name__ == "__main__":
    sys.exit(main())
