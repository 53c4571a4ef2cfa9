"""``python -m benchmarks [COMMAND]``: each command is a module with ``add_arguments`` and ``run``.

The name of an op stands for ``ops`` and that op; nothing at all for ``ops`` and all of them.
"""

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
    "ops": Command("benchmarks.before.ops", "every op, or those named, beside its peers"),
    "gpu": Command(
        "benchmarks.before.gpu", "on an NVIDIA GPU: gates, then the most telling timings"
    ),
    "device": Command(
        "benchmarks.before.device", "all that a GPU has to say, tests first, unattended"
    ),
    "tune": Command("benchmarks.before.tune", "other numbers for the kernels, in turns, on a GPU"),
    "ppo": Command("benchmarks.before.ppo", "a whole PPO iteration, side by side with TRL's"),
    "sft": Command("benchmarks.before.sft", "supervised fine-tuning, side by side with TRL's"),
    "dpo": Command("benchmarks.before.dpo", "DPO on pairs of responses, side by side with TRL's"),
    "rollout": Command(
        "benchmarks.before.rollout", "generation, in turns with transformers' own ways"
    ),
    "reference": Command("benchmarks.before.reference", "PPO's reference, by the way it is kept"),
    "report": Command(
        "benchmarks.before.report", "write the result files' figures into the READMEs"
    ),
}
OPS = (
    "token_logprobs",
    "linear_logprobs",
    "linear_ppo_loss",
    "full_kl",
    "kl_rewards",
    "gae",
    "ppo_loss",
    "whiten",
    "sample_tokens",
    "decode_attention",
)
EPILOG = (
    "commands:\n"
    + "\n".join(f"  {name:<10} {command.summary}" for name, command in COMMANDS.items())
    + "\n\nA command's own options: python -m benchmarks COMMAND --help\n"
    + "The name of an op stands for 'ops' and that op:\n  "
    + ", ".join(OPS[:5])
    + ",\n  "
    + ", ".join(OPS[5:])
    + "\nWithout a command, all ops are measured."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Hand the arguments after the command's name to its module; its exit code is ours."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
    )
    parser.add_argument(
        "command", nargs="?", choices=(*COMMANDS, *OPS), default="ops", metavar="COMMAND"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="COMMAND --help lists them")
    chosen = parser.parse_args(argv)

    name, arguments = chosen.command, chosen.arguments
    if name in OPS:
        name, arguments = "ops", [chosen.command, *arguments]
    command = COMMANDS[name]
    module = importlib.import_module(command.module)
    subparser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}", description=command.summary
    )
    module.add_arguments(subparser)
    return module.run(subparser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
