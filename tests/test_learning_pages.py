"""Tutorial, FAQ and glossary: outputs are those of runs, and every name in them is there."""

import dataclasses
import functools
import inspect
import itertools
import json
import re
import runpy
from pathlib import Path

import pytest

import fastrl
import fastrl.alignment
from fastrl.tools.commands.completion import flags_by_command

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TUTORIAL = DOCS / ".api" / "tutorial.py"


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


def test_the_tutorials_outputs_are_those_of_its_commands() -> None:
    module, text = runpy.run_path(str(TUTORIAL)), text_of("tutorial")
    assert module["render"](text) == text, "python docs/.api/tutorial.py writes them anew"
    kept = json.loads(TUTORIAL.with_suffix(".json").read_text(encoding="utf-8"))
    assert list(kept) == module["commands"](text), "python docs/.api/tutorial.py run runs it anew"
    changed = text.replace("--steps 30", "--steps 31", 1)
    with pytest.raises(KeyError, match="--steps 31"):
        module["render"](changed)


def codes(page: str) -> list[str]:
    """What stands in code in a page's sentences and tables."""
    prose = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


@functools.cache
def known_names() -> set[str]:
    """Settings, arguments of trainers, flags, public names; names that reference pages explain."""
    known = set(itertools.chain(*map(codes, ("statistics", "runs", "grpo", "ready_rewards"))))
    for module in (fastrl, fastrl.alignment):
        for name in module.__all__:
            thing = getattr(module, name)
            known.add(name)
            if dataclasses.is_dataclass(thing):
                known |= {field.name for field in dataclasses.fields(thing)}
            elif inspect.isclass(thing):
                known |= {*dir(thing), *inspect.signature(thing.__init__).parameters}
    known |= set(inspect.signature(fastrl.PPOTrainer.train).parameters)
    for flags in flags_by_command().values():
        known |= {name.strip("-").replace("-", "_") for flag in flags for name in flag.names}
    return known


def names(code: str) -> set[str]:
    """The settings, flags and metrics in a piece of code in a sentence."""
    if re.fullmatch(r"[a-z]\w*(/\w+)+", code) and not code.startswith("runs/"):
        return {code}
    setting = re.fullmatch(r"([a-z]\w*)(=\S+)?", code)
    if setting and ("_" in setting[1] or setting[2]):
        return {setting[1]}
    return {flag.replace("-", "_") for flag in re.findall(r"--([a-z][\w-]+)", code)}


@pytest.mark.parametrize("page", ["tutorial", "faq", "glossary"])
def test_every_setting_and_metric_is_there(page: str) -> None:
    found = {name for code in codes(page) for name in names(code)}
    assert len(found) > 10
    assert found <= known_names(), found - known_names()


def test_the_glossary_is_in_order() -> None:
    entries = re.findall(r"^### (.+)$", text_of("glossary"), re.MULTILINE)
    assert entries == sorted(entries, key=lambda entry: entry.lower().replace("β", "beta"))
