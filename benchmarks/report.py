"""`python -m benchmarks report`: writes the figures that the result files hold into the READMEs.

`benchmarks/README.md` is written whole; in `README.md` only what lies between
`<!-- figures:begin -->` and `<!-- figures:end -->`. Nothing else writes figures there.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import ppo, record

BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"
INTRODUCTION = """# Benchmarks

Written by `python -m benchmarks report` from the newest files in `results/`; do not edit.
A ratio is the median over pairs of neighbouring runs, its range in brackets; above 1, fastrl is
the faster.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks report`."""
    parser.add_argument("--results", type=Path, default=record.RESULTS, metavar="FOLDER")
    parser.add_argument("--root", type=Path, default=record.ROOT, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Writes both files; 1 where there is nothing to write or no place for it."""
    results = newest(args.results)
    if not results:
        print(f"no result files in {args.results}", file=sys.stderr)
        return 1
    readme = args.root / "README.md"
    text = readme.read_text()
    if BEGIN not in text or END not in text:
        print(f"{readme} lacks {BEGIN} … {END}", file=sys.stderr)
        return 1
    readme.write_text(between_markers(text, "\n\n".join(map(brief, results))))
    details = args.root / "benchmarks" / "README.md"
    details.write_text("\n".join([INTRODUCTION, *map(section, results)]))
    return 0


def newest(folder: Path) -> list[dict[str, Any]]:
    """The newest result of each device, devices by name; files of other benchmarks are left out."""
    latest: dict[Path, tuple[tuple[str, float], dict[str, Any]]] = {}
    for path in sorted(folder.glob("*/*.json")):
        result = json.loads(path.read_text())
        if result.get("benchmark") != "ppo":
            continue
        age = (result["date"], path.stat().st_mtime)
        if path.parent not in latest or age > latest[path.parent][0]:
            latest[path.parent] = (age, result)
    return [result for _, (_, result) in sorted(latest.items())]


def between_markers(text: str, figures: str) -> str:
    """`text` with `figures` in place of what lay between the markers."""
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    return f"{before}{BEGIN}\n{figures}\n{END}{after}"


def brief(result: dict[str, Any]) -> str:
    """The README's table: the whole iteration and its two halves."""
    return f"{caption(result)}\n\n{table(result, ('generate', 'step', 'iteration'))}"


def section(result: dict[str, Any]) -> str:
    """The full table of a device."""
    versions = "\n".join(
        f"- {side}: " + ", ".join(f"{name} {version}" for name, version in found.items())
        for side, found in result["versions"].items()
    )
    return (
        f"## {device(result)}\n\n{caption(result)}\n\n"
        f"{table(result, tuple(result['phases']))}\n\n{versions}\n"
    )


def caption(result: dict[str, Any]) -> str:
    """What was measured, where, when, and by which command."""
    return (
        f"One PPO iteration against {result['peer']} on {device(result)}, "
        f"{ppo.describe(result['shape'])} "
        f"({len(result['phases']['iteration']['fastrl'])} paired runs, {result['date']}, commit "
        f"{result['commit']}; `python -m benchmarks ppo --peer {result['peer']}`):"
    )


def device(result: dict[str, Any]) -> str:
    """The accelerator, or the processor and its threads."""
    machine = result["machine"]
    cpu = f"{machine['cpu']}, threads: {result['shape']['threads']}"
    return machine.get("accelerator", cpu)


def table(result: dict[str, Any], phases: tuple[str, ...]) -> str:
    """Median seconds of both sides and the ratio, a row for each phase."""
    peer = result["peer"]
    rows = [f"| phase | fastrl [s] | {peer} [s] | {peer} / fastrl |", "| --- | --: | --: | --: |"]
    for name in phases:
        phase = result["phases"][name]
        rows.append(
            f"| {ppo.PHASES[name]} | {ppo.spread(phase['fastrl'], '.3g')} "
            f"| {ppo.spread(phase['peer'], '.3g')} | {ppo.spread(ppo.ratios(phase), '.2f')} |"
        )
    return "\n".join(rows)
