"""ARCHITECTURE.md and the READMEs of rooms say what is there."""

import importlib
import os
import re
from pathlib import Path

import pytest

from tests.house import architecture, journeys
from tests.house.source import ROOT, Source, here

ENTRY = re.compile(r"^- `(fastrl\.[\w.]+)`: .+$", re.MULTILINE)


def test_the_page_is_what_the_sources_say() -> None:
    written = architecture.FILE.read_text(encoding="utf-8")
    assert written == architecture.page(here()), "python -m tests.house --architecture"


def test_a_place_is_a_functions_first_line(tmp_path: Path) -> None:
    (tmp_path / "fastrl").mkdir()
    text = "class A:\n    x = 1\n\n    @property\n    def b(self):\n        return 1\n"
    (tmp_path / "fastrl" / "one.py").write_text(text)
    assert architecture.place(Source(tmp_path), "fastrl.one.A.b") == ("fastrl/one.py", 4)
    with pytest.raises(KeyError, match=r"fastrl\.one\.A\.c"):
        architecture.place(Source(tmp_path), "fastrl.one.A.c")


@pytest.mark.parametrize("title", architecture.JOURNEYS)
def test_a_journeys_stops_are_entered_in_their_order(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = architecture.JOURNEYS[title]
    monkeypatch.chdir(tmp_path)  # of the command
    runs = {
        "PPOTrainer": journeys.step_of_ppo,
        "GRPOTrainer": lambda: journeys.step_of_grpo(str(tmp_path), beta=0.1),
        "DPOTrainer": lambda: journeys.step_of_dpo(str(tmp_path)),
        "fastrl grpo": lambda: journeys.command(journeys.prepared(tmp_path)),
    }
    (run,) = (run for name, run in runs.items() if name in title)
    places = [architecture.place(here(), name) for name, _ in stops]
    places = [(os.path.realpath(ROOT / file), line) for file, line in places]
    seen = journeys.in_order(run, places)
    assert [stops[i][0] for i in seen] == [name for name, _ in stops]


@pytest.mark.parametrize("name", architecture.ROOMS)
def test_a_rooms_readme_names_what_is_there(name: str) -> None:
    text = (ROOT / "fastrl" / name / "README.md").read_text(encoding="utf-8")
    entries = ENTRY.findall(text)
    assert len(entries) == 3
    for entry in entries:
        module, _, last = entry.rpartition(".")
        assert module.startswith(f"fastrl.{name}")
        assert hasattr(importlib.import_module(module), last), entry
    assert {"It knows:", "It does not know:", "Words:"} <= set(re.findall(r"^[\w ]+:", text, re.M))


def test_every_room_has_a_readme() -> None:
    rooms = {x.parent.name for x in (ROOT / "fastrl").glob("*/__init__.py")}
    assert rooms == set(architecture.ROOMS)
