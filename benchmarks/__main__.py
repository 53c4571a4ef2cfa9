"""`python -m benchmarks report` and its kin, see COMMANDS; what measures is `pytest benchmarks`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# Modules with ``add_arguments(parser)`` and ``run(args) -> int``, imported when asked for.
COMMANDS = {
    "report": "write the result files' figures into the READMEs, or compare two of them",
    "predict": "count what each op should take on a GPU, and write it beside peers' figures",
    "fits": "plan what fits in 24 and 80 GiB, and write it into the documents",
    "recipes": "plan the memory of every recipe, and write it beside them and into the documents",
    "curves": "keep and draw what a run of `fastrl demo` measured at each step",
    "distilled": "measure what a policy learns of a teacher, and of itself with hints",
    "calls": "measure what a model learns of tools that it has to call",
    "support": "measure what learning from the samples of top-p and top-k does",
    "answers": "compare a trainer's probabilities with those of vLLM's samples of top-p and top-k",
    "gpu": "on an NVIDIA GPU, unattended: the tests, then all that can be measured",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Hands the arguments after the command's name to its module; its exit code is ours."""
    summary = "; ".join(f"{name}: {what}" for name, what in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", epilog=f"{summary}. Measurements: pytest benchmarks --help"
    )
    parser.add_argument("command", choices=tuple(COMMANDS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="COMMAND --help lists them")
    chosen = parser.parse_args(argv)
    module = importlib.import_module(f"benchmarks.{chosen.command}")
    own = argparse.ArgumentParser(
        prog=f"python -m benchmarks {chosen.command}", description=COMMANDS[chosen.command]
    )
    module.add_arguments(own)
    return module.run(own.parse_args(chosen.arguments))


if __name__ == "__main__":
    sys.exit(main())
