"""Modules that have moved are there by their old names, too, and are the same objects."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastrl
from fastrl.moved import new_name

OLD = {
    "fastrl.ppo": "fastrl.trainers.ppo",
    "fastrl.ppo.replay": "fastrl.trainers.ppo.replay",
    "fastrl.trl": "fastrl.trainers.groups",
    "fastrl.trl.replay": "fastrl.trainers.groups.replay",
    "fastrl.trl.dpo": "fastrl.trainers.pairs.dpo",
    "fastrl.trl.ppo_config": "fastrl.compat.older.ppo_config",
    "fastrl.trl.rollout_func": "fastrl.compat.rollout_func",
    "fastrl.patch": "fastrl.compat.patch",
    "fastrl.scripts.helpers": "fastrl.compat.scripts.helpers",
    "fastrl.commands.flags": "fastrl.tools.commands.flags",
    "fastrl.demo.text": "fastrl.tools.demo.text",
    "fastrl.reports.curves": "fastrl.tools.reports.curves",
    "fastrl.plan.passes": "fastrl.trainers.plan.passes",
    "fastrl.ref_model.trunk": "fastrl.learn.ref_model.trunk",
    "fastrl.learn.kl": "fastrl.learn.kl_penalty",
}


@pytest.mark.parametrize("old", OLD)
def test_an_old_name_is_the_module(old: str) -> None:
    module = importlib.import_module(OLD[old])
    assert importlib.import_module(old) is module
    assert module.__name__ == OLD[old]
    assert module.__spec__ is not None
    assert module.__spec__.name == OLD[old]


def test_a_program_that_knows_the_old_names_alone_runs() -> None:
    names = "\n".join(f"import {name}" for name in OLD)
    program = f"import fastrl\n{names}\nfrom fastrl.trl.dpo import DPOTrainer\n"
    program += "assert DPOTrainer is fastrl.DPOTrainer\n"
    program += "assert fastrl.patch.call_counts() == {}\n"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_was_never_there_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("fastrl.ppo.nothing")
    assert new_name("torch.plan") is None
    assert new_name("fastrl.data.plan") is None


def test_no_module_stands_at_a_name_that_has_moved() -> None:
    folder = str(Path(fastrl.__file__).parent)
    names = [x.name for x in pkgutil.walk_packages([folder], "fastrl.")]
    assert len(names) > 300
    assert [name for name in names if new_name(name)] == []
