"""The budget that only falls: how much of what is measured there may be.

`budget.json` has a ceiling for each number, a reason for each ceiling that was raised, and
``within``: the share by which a number may lie below its ceiling before that has to follow.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("budget.json")
Numbers = dict[str, dict[str, int]]
_TABLES = ("totals", "rooms", "bases", "attributes", "journeys")
_NAME = "tests/house/budget.json"
_FOLLOW = "`python -m tests.house --lower`"


def numbers(measured: dict[str, Any]) -> Numbers:
    """The measured numbers that have a ceiling, in tables as the budget's; journeys are among them
    where they were run."""
    rooms = {name: sum(kinds.values()) for name, kinds in measured["rooms"].items()}
    totals = {
        "lines": sum(rooms.values()), "files": measured["files"], **measured["top floor"],
        "containers": len(measured["containers"]),
        "names defined twice": len(measured["defined twice"]),
        "docstrings that begin with a fragment": len(measured["fragments"]),
        "settings": measured["settings"], "files in circles": len(measured["circles"]),
        "lines of tests": measured["tests"]["lines"],
    }  # fmt: skip
    of_trainers = {
        "bases": {name: each["bases"] for name, each in measured["trainers"].items()},
        "attributes": {kind: len(x) for kind, x in measured.get("attributes", {}).items()},
    }
    journeys = {
        f"{name}: {kind}": each[kind]
        for name, each in measured.get("journeys", {}).items()
        for kind in ("frames", "functions", "files")
        if kind in each
    }
    found = {"totals": totals, "rooms": rooms, **of_trainers}
    return {**found, "journeys": journeys} if journeys else found


def above(budget: dict[str, Any], now: Numbers) -> list[str]:
    """What has grown beyond its ceiling, and what to do."""
    found = []
    for table in now:
        for name, number in now[table].items():
            ceiling = budget[table].get(name)
            if ceiling is None:
                found.append(f"{_what(table, name)} {number:,}, which is new: {_FOLLOW}")
            elif number > ceiling:
                more = f"{number - ceiling:,} above the budget of {ceiling:,}"
                found.append(f"{_what(table, name)} {number:,}, {more}: {_remedy(table, name)}")
    return found


def below(budget: dict[str, Any], now: Numbers) -> list[str]:
    """What has fallen so far below its ceiling that the ceiling has to follow: by more than the
    budget's share ``within``."""
    found = []
    for table in now:
        for name, ceiling in budget[table].items():
            number = now[table].get(name)
            if number is None:
                found.append(f"{_NAME} has {table}.{name}, which is gone")
            elif number < ceiling * (1 - budget["within"]):
                found.append(
                    f"{_what(table, name)} {number:,}, less than the budget of {ceiling:,}"
                )
    return [f"{x}: {_FOLLOW}" for x in found]


def raised(budget: dict[str, Any], past: list[dict[str, Any]]) -> list[str]:
    """The ceilings that stand above what they once were without a reason in the file. A room's need
    none as long as the ceiling of all lines has never been lower: another room gave as much."""
    found = []
    lowest = {
        (table, name): min(each.get(table, {}).get(name, ceiling) for each in [budget, *past])
        for table in _TABLES
        for name, ceiling in budget[table].items()
    }
    paid = budget["totals"]["lines"] <= lowest["totals", "lines"]
    for (table, name), low in lowest.items():
        key = f"{table}.{name}"
        free = budget["reasons"].get(key) or (table == "rooms" and paid)
        if budget[table][name] > low and not free:
            found.append(f"{key} was {low:,} and is {budget[table][name]:,}: {_reason(key)}")
    return found


def lowered(budget: dict[str, Any], now: Numbers) -> dict[str, Any]:
    """The budget with its ceilings at what is measured, where that is lower; without what is gone,
    and with what is new."""
    tables = {
        table: {name: min(n, budget[table].get(name, n)) for name, n in of_table.items()}
        for table, of_table in now.items()
    }
    return {**budget, **tables}


def read() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def write(budget: dict[str, Any]) -> None:
    FILE.write_text(json.dumps(budget, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def versions(most: int = 100) -> list[dict[str, Any]]:
    """The budgets of the latest commits that changed it; none where there is no repository."""
    where = ["git", "-C", str(FILE.parent)]
    log = [*where, "log", f"-{most}", "--format=%H:./budget.json", "--", FILE.name]
    show = [*where, "cat-file", "--batch"]
    try:
        names = subprocess.run(log, capture_output=True, text=True, check=True).stdout
        shown = subprocess.run(show, input=names, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    decoder, found, begin = json.JSONDecoder(), [], shown.find("{")
    while begin >= 0:
        budget, end = decoder.raw_decode(shown, begin)
        found.append(budget)
        begin = shown.find("{", end)
    return found


def _what(table: str, name: str) -> str:
    return {
        "totals": f"{name}:",
        "rooms": f"the room {name} has lines:",
        "bases": f"classes of ours above {name}:",
        "attributes": f"attributes of trainers that are {name} (`--list attributes`):",
        "journeys": f"the journey through {name}:",
    }[table]


def _remedy(table: str, name: str) -> str:
    if table == "rooms":
        both = f"lower another room by as much in the same commit and write both in {_NAME}"
        return f"{both}, or {_reason(f'{table}.{name}')}"
    return f"lower it, or raise it in {_NAME} and {_reason(f'{table}.{name}')}"


def _reason(key: str) -> str:
    return f'say in its "reasons" what users get for it: {{"{key}": "…"}}'
