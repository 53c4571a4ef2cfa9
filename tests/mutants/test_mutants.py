"""What is changed in the sources is found again, put in, and killed by the test that sees it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from tests.mutants import draw, reach
from tests.mutants.draw import Mutant

TEXT = '''"""A module."""
_MOST: int = 3

def least(values: list[int], *, most: int = 4) -> int:
    """The least."""
    logger.info("of %d", 5)
    if not values and most > 0:
        raise ValueError("1 value at least")
    return min(values[0], 0)
'''
FILE = "fastrl/data/some.py"


def drawn() -> dict[str, Mutant]:
    return {f"{x.line} {x.kind} {x.after}": x for x in draw.mutants({FILE: TEXT})}


def test_what_runs_is_changed_and_what_is_read_is_not() -> None:
    assert sorted(drawn()) == [
        *("2 constant + 1 4", "2 constant - 1 2", "4 constant + 1 5", "4 constant - 1 3"),
        "7 and/or not values or most > 0",
        "7 comparison most >= 0",
        *("7 constant + 1 1", "7 constant - 1 -1", "7 dropped not values"),
        "7 negated condition not (not values and most > 0)",
        "8 removed statement pass",
        *("9 constant + 1 1", "9 constant - 1 -1", "9 name max"),
        "9 returned None return None",
    ]


def test_a_mutant_is_the_sites_own() -> None:
    for mutant in draw.mutants({FILE: TEXT}):
        tree, site = draw.site_of(mutant, TEXT)
        before = ast.unparse(tree)
        site.change()
        assert ast.unparse(tree) == before.replace(mutant.before, mutant.after, 1) or (
            mutant.after in ast.unparse(tree) != before
        )


def test_a_mutant_is_found_again_where_lines_and_files_have_moved() -> None:
    old = drawn()["9 name max"]
    later = {"fastrl/learn/other.py": TEXT.replace('"""A module."""', "import os\n\n"), FILE: ""}
    found = draw.found_again(old, later)
    assert found is not None
    assert (found.file, found.line, found.after) == ("fastrl/learn/other.py", 11, "max")
    assert draw.found_again(old, {FILE: TEXT.replace("values[0]", "values[1]")}) is None
    assert draw.draw({FILE: TEXT}, 5, 1) == draw.draw({FILE: TEXT}, 5, 1)


def test_a_counter_before_each_statement_changes_nothing_else() -> None:
    ran = bytearray(20)
    names = {"logger": __import__("logging"), reach._COUNTER: ran}
    exec(compile(reach.counting(TEXT, 1), FILE, "exec"), names)
    assert names["least"]([2]) == 0
    assert [x - 1 for x in range(20) if ran[x]] == [6, 7, 9]


def test_mutants_are_killed_by_tests_that_see_them_and_by_no_others(tmp_path: Path) -> None:
    file = "fastrl/run/fingerprint.py"
    text = (reach.ROOT / file).read_text(encoding="utf-8")
    some = "json.JSONEncoder(default=_plain, sort_keys=True)"
    wanted = {
        f"{some} -> {some.replace('default=_plain, ', '')}": "killed",
        "5 -> 6": "survived",  # seconds until a bar is shown
        "1 -> 0": "killed",  # both at import: 1 << 12 rows at a time
        "1 -> 2": "survived",
    }
    mutants = {f"{x.before} -> {x.after}": x for x in draw.mutants({file: text})}
    before = [{**asdict(mutants[x]), "status": "killed", "by": "a test"} for x in wanted]
    (tmp_path / "before.json").write_text(json.dumps(before))
    command = [sys.executable, "-m", "tests.mutants", "--only", tmp_path / "before.json"]
    command += ["--tests", "tests/run/test_fingerprint.py", "--json", tmp_path / "after.json"]
    env = {k: v for k, v in os.environ.items() if k not in ("THOROUGH", "PART")}  # all tests
    done = subprocess.run(command, cwd=reach.ROOT, env=env, capture_output=True, text=True)
    after = json.loads((tmp_path / "after.json").read_text())
    found = {f"{x['before']} -> {x['after']}": x["status"] for x in after}
    assert found == wanted, done.stdout
    assert done.returncode == 1
    assert done.stdout.count("killed before, by a test, now survived: ") == 2
