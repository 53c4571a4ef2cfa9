"""`python -m tests.mutants`: which changes of the sources does no test notice?

Draws mutants of fastrl/learn, collect, data, run and trainers, and gives each the tests that run
its line, the cheapest first, until one fails. The first call runs the tests once, half an hour, to
see which test runs which line; `--map` does so anew. What a program of its own runs is not seen.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.mutants import draw, reach, run
from tests.mutants.draw import Mutant

_MAP = Path(".cache") / "mutants" / "lines.npz"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="mutants to draw (100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=Path, metavar="FILE", help="those of a file of --json")
    parser.add_argument("--status", help="of those, the ones that were this, such as survived")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what became of each")
    parser.add_argument("--tests", nargs="+", help="files or tests, in place of the map's")
    parser.add_argument("--seconds", type=float, default=30, help="of tests for a mutant (30)")
    parser.add_argument("--control", action="store_true", help="change nothing: none may die")
    parser.add_argument("--map", action="store_true", help="see anew which test runs which line")
    parser.add_argument("--lines", type=Path, default=_MAP, metavar="FILE", help="of the map")
    args = parser.parse_args(argv)
    if args.map or not (args.tests or args.lines.exists()):
        os.waitpid(run.apart(lambda: reach.record(args.lines)), 0)
    texts = reach.sources()
    before = _read(args.only, args.status) if args.only else []
    mutants = [x for x, _ in before] or draw.draw(texts, args.count, args.seed)
    records = _run(mutants, texts, args)
    print(_table(list(records.values())))
    lost = [(x, by) for x, by in before if by and records[x]["status"] != "killed"]
    for mutant, by in lost:
        print(f"killed before, by {by}, now {records[mutant]['status']}: {mutant}")
    return int(any(records[x]["status"] != "gone" for x, _ in lost))  # a line that is not there


def _read(path: Path, status: str | None) -> list[tuple[Mutant, str]]:
    """The mutants of a file, each with the test that killed it, "" where none did."""
    names = Mutant.__dataclass_fields__
    records = [x for x in json.loads(path.read_text()) if status in (None, x["status"])]
    return [(Mutant(**{name: x[name] for name in names}), x["by"]) for x in records]


def _run(mutants: list[Mutant], texts: dict[str, str], args: Any) -> dict[Mutant, dict[str, Any]]:
    """What became of each, which is printed and written as it comes."""
    records = dict[Mutant, dict[str, Any]]()

    def add(mutant: Mutant, now: Mutant, verdict: run.Verdict) -> None:
        records[mutant] = {**asdict(now), **verdict._asdict()}
        by = f" by {verdict.by}: {verdict.how}" if verdict.how else ""
        print(f"{len(records)} {verdict.status} ({verdict.ran} of {verdict.of}){by}\n  {now}")
        if args.json:
            part = args.json.with_suffix(".part")  # a stop in the middle loses nothing
            part.write_text(json.dumps(list(records.values()), indent=1))
            part.replace(args.json)

    places = {x: draw.found_again(x, texts) if args.only else x for x in mutants}
    for mutant in (x for x in mutants if places[x] is None):
        add(mutant, mutant, run.Verdict("gone"))
    olds = {now: old for old, now in places.items() if now is not None}
    run.warm()
    known = None if args.tests else reach.Reach.read(args.lines)

    def tests(mutant: Mutant) -> tuple[list[str], int]:
        if known is None:
            return args.tests, len(args.tests)
        names = run.tests_of(mutant, texts[mutant.file], known)
        return run.chosen(names, known, args.seconds), len(names)

    for now, verdict in run.verdicts(list(olds), texts, tests, args.control):
        add(olds[now], now, verdict)
    return records


def _table(records: list[dict[str, Any]]) -> str:
    rooms = {room: [x for x in records if f"fastrl/{room}/" in x["file"]] for room in reach.ROOMS}
    statuses = ("killed", "survived", "not run", "gone", "error")
    rows = ["", *statuses, "all"], *([room, *_counts(x, statuses)] for room, x in rooms.items())
    rows = *rows, ["all", *_counts(records, statuses)]
    return "\n".join("".join(f"{cell!s:>10}" for cell in row) for row in rows)


def _counts(records: list[dict[str, Any]], statuses: Sequence[str]) -> list[int]:
    counts = Counter(x["status"] for x in records)
    return [*(counts[x] for x in statuses), len(records)]


if __name__ == "__main__":
    sys.exit(main())
