"""Each measure of `python -m tests.house` sees what is planted in a tiny checkout, and the budget
says what to do about it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.house import __main__ as house
from tests.house import budget
from tests.house.measures import KINDS, attributes, is_fragment, kinds_of_lines, measured
from tests.house.source import ROOT, Source

TREE = {
    "fastrl/__init__.py": '"""A library."""\n',
    "fastrl/settings.py": (
        "from dataclasses import field\n\n\ndef setting(text):\n    return field(metadata=text)\n"
    ),
    "fastrl/low/__init__.py": '"""What is below."""\n',
    "fastrl/low/parts.py": (
        "class Parts:\n    def part(self):\n        return self\n\n\n"
        "class Others:\n    def other(self):\n        self.seen = self.known = self.unknown\n"
    ),
    "fastrl/high/__init__.py": "from fastrl.high.ppo import PPOTrainer\n\n__all__ = []\n",
    "fastrl/high/ppo.py": (
        "from ..low import parts as of\n\n\n"
        "class PPOTrainer(of.Parts):\n    def step(self):\n        return self.part()\n"
    ),
    "tests/test_low.py": "def test_one():\n    pass\n",
}
PLANTED = {
    "a line": ("low/parts.py", "X = 1\n", {}),
    "a file": ("single.py", "X = 1\n", {"files": 1, "single files": 1}),
    "a room": ("new/__init__.py", "", {"files": 1, "rooms": 1}),
    "a container": ("low/parts.py",
     "@dataclass\nclass Rows:\n    texts: list[str]\n    scores: Tensor\n\n\n"
     "@dataclass\nclass One:\n    texts: list[str]\n    count: Tensor\n", {"containers": 1}),
    "a container by its operations": ("low/parts.py",
     "class Rows:\n    def select(self): pass\n    def joined(self): pass\n\n\n"
     "class One:\n    def select(self): pass\n\n\n"
     "class Any(Protocol):\n    def select(self): pass\n    def joined(self): pass\n",
     {"containers": 1}),
    "a container above another": ("low/parts.py",
     "class Rows(NamedTuple):\n    texts: list[str]\n    scores: Tensor\n\n\n"
     "@dataclass\nclass More:\n    rows: Rows\n    masks: Tensor\n\n\n"
     "@dataclass\nclass F:\n    run: Callable[[], Rows]\n    of: Callable[[Rows], int]\n\n\n"
     "@dataclass\nclass J:\n    prompts: list[str] = setting('')\n    ids: list[int] = 0\n\n\n"
     "class Sum(NamedTuple):\n    texts: int\n    scores: float\n",
     {"containers": 2, "settings": 1}),
    "a name again": ("high/ppo.py", "def setting():\n    pass\n", {"names defined twice": 1}),
    "a fragment": ("low/parts.py", 'def f():\n    """Of the rows."""\n',
     {"docstrings that begin with a fragment": 1}),
    "settings": ("settings.py", "def by_name(text):\n    return setting(text)\n\n\n"
     "class Config:\n    a: int = setting('')\n    b: int = by_name('')\n    c: int = 1\n",
     {"settings": 2}),
    "a circle": ("low/parts.py", "if TYPE_CHECKING:\n    from fastrl.high.ppo import PPOTrainer\n",
     {"files in circles": 2}),
    "a base": ("low/parts.py", "class Parts(Others):\n    pass\n", {"bases": 1}),
    "an attribute": ("high/ppo.py",
     "class PPOTrainer(of.Others):\n    def step(self):\n        self.seen = self.known\n"
     "        return self.seen, self.other()\n", {"read below, not declared": 1}),
}  # fmt: skip


def checkout(folder: Path, files: dict[str, str] = TREE) -> Source:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Source(folder)


def flat(numbers: budget.Numbers) -> dict[str, int]:
    """The totals, and those of the one trainer."""
    of_trainer = {"bases": numbers["bases"]["PPOTrainer"], **numbers["attributes"]}
    return {**numbers["totals"], **of_trainer}


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_is_counted_and_nothing_else(what: str, tmp_path: Path) -> None:
    file, text, more = PLANTED[what]
    before = budget.numbers(measured(checkout(tmp_path)))
    old = TREE.get(f"fastrl/{file}", "")
    if text.startswith(("class Parts", "class PPOTrainer")):
        old = old.partition("class Parts" if "Parts" in text else "class PPOTrainer")[0]
        text += "class Others:\n    pass\n" if "Parts" in text else ""
    now = budget.numbers(measured(checkout(tmp_path, {f"fastrl/{file}": old + text})))
    changed = {name: n - flat(before)[name] for name, n in flat(now).items()}
    changed.pop("lines")
    assert {name: n for name, n in changed.items() if n} == more


def test_each_line_is_of_one_kind(tmp_path: Path) -> None:
    text = '"""One\n\n# two\n"""\n\nimport os  # why\nfrom os import (\n\n    path,\n)\n  \n# so\n'
    text += 'X = """\n\n#"""\n'
    source = checkout(tmp_path, {"fastrl/low.py": text, "fastrl/__init__.py": "# so\n\nX = '#'\n"})
    kinds = ["docstring"] * 4 + ["blank"] + ["imports"] * 5 + ["blank", "comment"] + ["code"] * 3
    assert kinds_of_lines(source, "fastrl.low") == kinds
    assert measured(source)["rooms"] == {
        "single files": dict(zip(KINDS, (4, 4, 2, 3, 5), strict=True))
    }


def test_methods_that_are_defined_again_and_tests_are_counted(tmp_path: Path) -> None:
    again = "    def part(self):\n        return 1\n"
    files = {**TREE, "fastrl/high/ppo.py": TREE["fastrl/high/ppo.py"] + again}
    found = measured(checkout(tmp_path, files))
    of_ppo = {"bases": 1, "methods": 2, "defined again": 1}
    assert found["trainers"] == {"PPOTrainer": of_ppo}
    assert found["circles"] == []
    assert found["tests"] == {"files": 1, "lines": 2, "functions": 1}


def test_bases_are_in_pythons_order(tmp_path: Path) -> None:
    text = "class A: pass\nclass B(A): pass\nclass C(A): pass\nclass D(B, Generic[T], C): pass\n"
    source = checkout(tmp_path, {"fastrl/__init__.py": text})
    assert [x.node.name for x in source.mro(source.classes[-1])] == ["D", "B", "C", "A"]


READS, SETS = "def reads(self): return self.x", "def sets(self): self.x = 1"


@pytest.mark.parametrize(("above", "below", "from_below", "undeclared"), [
    ([READS], [SETS], ["Base.x"], []),
    (["x: int", READS], [SETS], ["Base.x"], []),
    (["x = 0", READS], [SETS], ["Base.x"], []),
    ([READS], ["x = 1"], ["Base.x"], []),
    (["x: int", READS], ["x = 1"], [], []),
    ([READS], ["def x(self): pass"], ["Base.x"], []),
    (["def x(self): pass", READS], ["def x(self): pass"], [], []),
    ([READS, SETS], [SETS], [], []),
    ([READS.replace("x", "state")], [SETS.replace("x", "state")], [], []),
    ([SETS], [READS], [], ["PPOTrainer.x"]),
    (["x: int", SETS], [READS], [], []),
    ([SETS], [SETS, READS], [], []),
    ([SETS.replace("x", "state")], [READS.replace("x", "state")], [], []),
])  # fmt: skip
def test_what_classes_of_a_trainer_read_of_each_other_is_set_or_declared_above(
    above: list[str], below: list[str], from_below: list[str], undeclared: list[str], tmp_path: Path
) -> None:
    classes = ["class Base(transformers.Trainer):", *above, "class PPOTrainer(Base):", *below]
    lines = [x if x.startswith("class") else f"    {x}" for x in classes]
    source = checkout(tmp_path, {"fastrl/ppo.py": "\n".join(lines)})
    assert [*attributes(source).values()] == [from_below, undeclared]


def test_what_transformers_sets_is_known_below_its_trainer_alone(tmp_path: Path) -> None:
    text = f"class A:\n    {READS}\n\nclass PPOTrainer(A):\n    {SETS}\n".replace("x", "state")
    found = attributes(checkout(tmp_path, {"fastrl/ppo.py": text}))
    assert [*found.values()] == [["A.state"], []]


@pytest.mark.parametrize(("docstring", "found"), [
    ("Of each sample's generations, [samples, generations].", True),
    ("Those of all environments.", True),
    ("As :meth:`UpdateLoss.joined`.", True),
    ("By the policy alone, each [B, T-1].", True),
    ("With further responses behind, which came about in the same way.", True),
    ("As in ``Trainer``, but ``eval_loss`` is a mean.", True),
    ("Of a result.\n\nIt has a shape.", True),
    ("Likewise.", True),
    ("For each sample, returns its score.", False),
    ("Of two equal ones, the first is taken.", False),
    ("The loss of a mini-batch, [].", False),
    ("Whether tokens count.", False),
    ("What the loss reads.", False),
    ("Returns the rows of some samples.", False),
    ("``as`` of a program.", False),
])  # fmt: skip
def test_what_counts_as_a_fragment(docstring: str, found: bool) -> None:
    assert is_fragment(docstring) == found


def ceilings(now: budget.Numbers, **more: object) -> dict[str, object]:
    return {"within": 0.02, **json.loads(json.dumps(now)), "reasons": {}, **more}


def test_a_new_line_over_budget_says_what_to_do(tmp_path: Path) -> None:
    now = budget.numbers(measured(checkout(tmp_path)))
    limits = ceilings(now)
    assert budget.above(limits, now) == budget.below(limits, now) == []
    longer = {"fastrl/low/parts.py": TREE["fastrl/low/parts.py"] + "X = 1\n"}
    grown = budget.numbers(measured(checkout(tmp_path, longer)))
    lines, room = budget.above(limits, grown)
    assert lines.startswith("lines: 25, 1 above the budget of 24: lower it, or raise it in tests/")
    assert room == (
        "the room low has lines: 10, 1 above the budget of 9: lower another room by as much in the "
        'same commit and write both in tests/house/budget.json, or say in its "reasons" what '
        'users get for it: {"rooms.low": "…"}'
    )
    (new,) = budget.above({**limits, "rooms": {**now["rooms"], "low": 10}}, grown)
    assert new == lines
    assert budget.lowered(limits, grown)["rooms"] == now["rooms"]  # it raises none


def test_a_ceiling_follows_what_has_fallen(tmp_path: Path) -> None:
    now = budget.numbers(measured(checkout(tmp_path)))
    limits = ceilings(now)
    limits["rooms"] |= {"low": 10, "gone": 5}  # type: ignore[operator]
    gone, low = sorted(budget.below(limits, now))
    assert low.startswith("the room low has lines: 9, less than the budget of 10: `python -m")
    assert gone.startswith("tests/house/budget.json has rooms.gone, which is gone: `python -m")
    assert budget.below({**limits, "within": 0.1, "rooms": {"low": 10}}, now) == []
    assert budget.lowered(limits, now) == ceilings(now)
    del limits["rooms"]["low"]  # type: ignore[attr-defined]
    (new,) = budget.above(limits, now)
    assert new == "the room low has lines: 9, which is new: `python -m tests.house --lower`"


def test_a_ceiling_is_raised_for_a_reason_or_for_another_rooms() -> None:
    def made(lines: int, a: int, **more: object) -> dict[str, object]:
        tables = {"totals": {"lines": lines}, "rooms": {"a": a, "b": lines - a}}
        return ceilings({**tables, "bases": {}, "attributes": {}, "journeys": {}}, **more)

    first = made(10, 4)
    assert budget.raised(made(10, 5), [first]) == []
    assert [x.partition(":")[0] for x in budget.raised(made(11, 5), [first])] == [
        *("totals.lines was 10 and is 11", "rooms.a was 4 and is 5")
    ]
    why = {"totals.lines": "it learns", "rooms.a": "it learns"}
    assert budget.raised(made(11, 5, reasons=why), [first]) == []
    assert len(budget.raised(made(10, 4), [first, made(9, 4)])) == 2  # what was lower, at any time


def test_ceilings_of_before_are_read_from_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "FILE", tmp_path / "house" / "budget.json")
    budget.FILE.parent.mkdir()
    assert budget.versions() == []
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    for number in (1, 2):
        budget.write({"totals": {"files": number}})
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", "a"], check=True)
    assert [x["totals"]["files"] for x in budget.versions()] == [2, 1]


def test_no_journey_is_longer_than_its_budget() -> None:
    """All of them end in a formula of the kernels, in the trainer that is named."""
    found = house.measure(ROOT, run=True)
    for name, each in found["journeys"].items():
        if "path" in each:
            assert each["path"][0].endswith(f" {name.partition('.')[2]}")
            assert each["path"][-1].startswith("fastrl_kernels/")
    table = {"journeys": budget.numbers(found)["journeys"]}
    assert not budget.above(budget.read(), table) + budget.below(budget.read(), table)


def test_the_command_prints_checkouts_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout(tmp_path)
    assert house.main([str(tmp_path), "--json", str(tmp_path / "before.json")]) == 0
    head, *_ = capsys.readouterr().out.splitlines()
    assert head.split() == ["lines", *KINDS, "all"]
    checkout(tmp_path, {"fastrl/low/more.py": "def setting():\n    pass\n"})
    assert house.main([str(tmp_path / "before.json"), str(tmp_path)]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    found = {row[0]: [x.strip() for x in row[1:] if x.strip()] for row in rows}
    assert found["lines: low"] == ["9", "11"]
    assert found["names defined twice"] == ["0", "1"]
    assert (
        house.main([str(tmp_path / "before.json"), str(tmp_path), "--list", "defined twice"]) == 0
    )
    listed = capsys.readouterr().out
    assert listed == "setting: fastrl/low/more.py, fastrl/settings.py\n"
