"""``python -m benchmarks COMMAND``: each command is a module with ``add_arguments`` and ``run``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """A module with ``add_arguments(parser)`` and ``run(args) -> int``, imported when asked for."""

    module: str
    summary: str


COMMANDS = {
    "aot": Command("benchmarks.aot", "compile every kernel for every target, without a GPU"),
    "ppo": Command("benchmarks.ppo", "a whole PPO iteration, side by side with TRL's"),
    "report": Command("benchmarks.report", "write the result files' figures into the READMEs"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Hand the arguments after the command's name to its module; its exit code is ours."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n"
        + "\n".join(f"  {name:<8} {command.summary}" for name, command in COMMANDS.items()),
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="COMMAND --help lists them")
    chosen = parser.parse_args(argv)

    command = COMMANDS[chosen.command]
    module = importlib.import_module(command.module)
    subparser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {chosen.command}", description=command.summary
    )
    module.add_arguments(subparser)
    return module.run(subparser.parse_args(chosen.arguments))


if __name__ == "__main__":
    sys.exit(main())
