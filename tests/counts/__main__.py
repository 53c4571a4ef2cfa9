"""`python -m tests.counts`: what a GPU will charge for, counted without one, beside the goals.

Launches come from Triton's interpreter and torch's dispatcher, bytes from tensors without memory,
waits from a pretended device, instructions per byte and times from `benchmarks/results/
predictions.json`. `--json FILE` saves the figures, and `--before FILE` shows saved ones beside
them: by default those of the commit with which counting began.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

BEFORE = Path(__file__).with_name("before.json")


def main(argv: Sequence[str] | None = None) -> int:
    """Counts, prints, and returns 1 where a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.counts", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the figures")
    parser.add_argument(
        "--before", type=Path, default=BEFORE, metavar="FILE", help="figures to show beside them"
    )
    args = parser.parse_args(argv)
    os.environ["TRITON_INTERPRET"] = "1"  # read as triton is imported
    os.environ.pop("FASTRL_KERNELS_BACKEND", None)

    from rich.console import Console
    from rich.table import Table

    from tests.counts.all import COUNTS

    before = json.loads(args.before.read_text())
    table = Table("count", "unit", str(before["commit"]), "now", "goal", "")
    found: dict[str, float] = {}
    for count in COUNTS:
        now = found[count.what] = count.take()
        old = _number(before["figures"].get(count.what))
        said = "reached" if now <= count.goal else "missed"
        table.add_row(count.what, count.unit, old, _number(now), f"≤ {count.goal:g}", said)
    Console(width=110).print(table)
    if args.json:
        saved = {"commit": commit(), "figures": found}
        args.json.write_text(json.dumps(saved, indent=1) + "\n")
    return int(any(found[count.what] > count.goal for count in COUNTS))


def commit() -> str:
    """That is checked out."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=BEFORE.parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _number(x: float | None) -> str:
    return "–" if x is None else f"{x:.4g}"


if __name__ == "__main__":
    sys.exit(main())
