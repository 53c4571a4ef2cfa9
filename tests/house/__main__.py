"""`python -m tests.house [CHECKOUT …]`: how large is fastrl, how far is a formula from its step?

Prints a column for each checkout, this one by default, so that `python -m tests.house ../before .`
shows what a change of structure has changed. A file that `--json` wrote stands for its checkout.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.house import architecture, budget
from tests.house.measures import KINDS, measured
from tests.house.source import FOLDERS, ROOT, Source

# Rooms that serve other libraries' programs, and those that look at runs from outside.
_AROUND = {"compat", "tools", "patch", "programs", "scripts"}  # the last of earlier trees
_AROUND |= {"commands", "demo", "plan", "recipes", "reports"}
_LISTS = ("containers", "attributes", "defined twice", "fragments", "circles", "journeys")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("checkouts", type=Path, nargs="*", default=[ROOT], metavar="CHECKOUT")
    parser.add_argument("--run", action="store_true", help="train tiny models, too: a minute each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the last one's numbers")
    parser.add_argument("--list", choices=_LISTS, help="name them, for the last checkout")
    parser.add_argument("--lower", action="store_true", help="let the budget follow the numbers")
    parser.add_argument("--architecture", action="store_true", help="write ARCHITECTURE.md")
    args = parser.parse_args(argv)
    if args.architecture:
        architecture.FILE.write_text(architecture.page(Source(ROOT)), encoding="utf-8")
        return 0
    if args.lower:
        now = budget.numbers(measure(ROOT, args.run))
        budget.write(budget.lowered(budget.read(), now))
        print("\n".join(budget.above(budget.read(), now)) or f"{budget.FILE}: written")
        return 0
    run = args.run or args.list == "journeys"
    found = [measure(path, run) for path in args.checkouts]
    if args.json:
        args.json.write_text(json.dumps(found[-1], indent=1))
    if args.list:
        print(*_entries(found[-1][args.list]), sep="\n")
        return 0
    if len(found) == 1:
        print(_table([_header(), *_by_kind(found[0])]), end="\n\n")
    rows = [dict(_rows(each)) for each in found]
    names = list(dict.fromkeys(name for each in rows for name in each))
    print(_table([[name, *(each.get(name, "") for each in rows)] for name in names]))
    return 0


def measure(path: Path, run: bool) -> dict[str, Any]:
    """All that is measured of a checkout, or was and stands in a file.

    Args:
        run: train tiny models, too, to see what runs.
    """
    if path.is_file():
        return json.loads(path.read_text())
    found = measured(Source(path))
    if run:
        found["journeys"] = {**_journeys(path, "steps"), **_journeys(path, "command")}
    return found


def _journeys(path: Path, what: str) -> dict[str, Any]:
    """See tests/house/journeys.py, of that checkout's fastrl."""
    places = [path.resolve(), *((path / folder).resolve().parent for folder in FOLDERS.values())]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places)), "HF_HUB_OFFLINE": "1"}
    script = Path(__file__).with_name("journeys.py")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, script, what], cwd=folder, env=env, capture_output=True, text=True
        )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def _entries(listed: Any) -> Iterator[str]:
    if not isinstance(listed, dict):
        yield from listed
        return
    for name, each in listed.items():
        if isinstance(each, list):
            yield f"{name}: {', '.join(each)}"
        elif "path" in each:
            yield "\n  ".join([f"{name}: {each['frames']} frames", *each["path"]])


def _header() -> list[str]:
    return ["lines", *KINDS, "all"]


def _by_kind(found: dict[str, Any]) -> Iterator[list[Any]]:
    rooms = {**found["rooms"], "all": _sums(found)}
    for name, kinds in rooms.items():
        yield [name, *(kinds[kind] for kind in KINDS), sum(kinds.values())]


def _sums(found: dict[str, Any]) -> dict[str, int]:
    return {kind: sum(each[kind] for each in found["rooms"].values()) for kind in KINDS}


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The numbers by their names."""
    now = budget.numbers(found)
    yield from ((f"lines: {name}", n) for name, n in {**_sums(found), **now["rooms"]}.items())
    core = (n for name, n in now["rooms"].items() if name not in _AROUND)
    yield "lines of the core", sum(core)
    yield from now["totals"].items()
    yield from ((f"attributes of trainers: {x}", n) for x, n in now["attributes"].items())
    yield "tests", found["tests"]["functions"]
    yield "files of tests", found["tests"]["files"]
    for name, each in found["trainers"].items():
        methods = f"{each['methods']} ({each['defined again']})"
        yield f"{name}: bases, methods (defined again)", f"{each['bases']}, {methods}"
    for name, each in found.get("journeys", {}).items():
        if "frames" in each:
            yield f"{name} to the formula: frames, files", f"{each['frames']}, {each['files']}"
        else:
            yield f"a step of {name}: functions, files", f"{each['functions']:,}, {each['files']}"


def _table(rows: list[list[Any]]) -> str:
    texts = [[f"{x:,}" if isinstance(x, int) else str(x) for x in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = []
    for first, *others in texts:
        cells = [x.rjust(width) for x, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
