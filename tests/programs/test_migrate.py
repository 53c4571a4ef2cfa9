"""``fastrl migrate``: what becomes of a program, and a changed one that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastrl.cli import main
from fastrl.eras import DEFAULTS
from fastrl.programs.migrate import read_program, rewritten

PROGRAM = """\
import os
from trl import PPOConfig, PPOTrainer, SFTConfig as Config
from trl.core import LengthSampler
from transformers import AutoModelForCausalLM

args = Config(
    "out", max_seq_length=8, use_mps_device=True, packing=False, save_safetensors=False,
    learning_rate=1e-4, nonsense=1,
)
ppo = PPOTrainer(args=PPOConfig("out", num_ppo_epochs=2), reward_model=None)
model = AutoModelForCausalLM.from_pretrained("a", load_in_8bit=True)
"""


def test_each_name_and_setting_is_told() -> None:
    found = {(x.line, x.name): x for x in read_program(PROGRAM)}
    kinds = {key: x.kind for key, x in found.items()}
    assert kinds == {
        (2, "trl"): "renamed",
        (2, "PPOConfig"): "renamed",
        (2, "PPOTrainer"): "renamed",
        (2, "SFTConfig"): "as it is",
        (3, "trl.core"): "renamed",
        (3, "LengthSampler"): "as it is",
        (6, "SFTConfig(logging_steps=)"): "another default",
        (6, "SFTConfig(gradient_checkpointing=)"): "another default",
        (7, "SFTConfig(max_seq_length=)"): "renamed",
        (7, "SFTConfig(use_mps_device=)"): "changes nothing",
        (7, "SFTConfig(packing=)"): "as it is",
        (7, "SFTConfig(save_safetensors=)"): "refused",
        (8, "SFTConfig(learning_rate=)"): "as it is",
        (8, "SFTConfig(nonsense=)"): "not there",
        (10, "PPOv2Config(num_ppo_epochs=)"): "as it is",
        (11, "from_pretrained(load_in_8bit=)"): "renamed",
    }
    assert found[6, "SFTConfig(logging_steps=)"].text == "500 here, 10 in TRL 1.16"


def test_what_is_safe_is_changed() -> None:
    changed = rewritten(PROGRAM, read_program(PROGRAM))
    assert "trl" not in changed.replace("fastrl", "")
    names = "PPOv2Config as PPOConfig, PPOv2Trainer as PPOTrainer, SFTConfig as Config"
    assert f"from fastrl import {names}\n" in changed
    assert "from fastrl import LengthSampler" in changed
    assert "max_length=8, packing=False" in changed
    assert [x.kind for x in read_program(changed)] == ["renamed"]  # load_in_8bit is left


def test_defaults_are_those_of_trl() -> None:
    trl = pytest.importorskip("trl")
    for name, defaults in DEFAULTS.items():
        fields = getattr(trl, name).__dataclass_fields__
        assert {setting: fields[setting].default for setting in defaults} == defaults


def test_the_command_writes_and_keeps_what_was(tmp_path: Path, capsys: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text("from trl import SFTConfig\nprint(SFTConfig.__module__)\n")
    assert main(["migrate", str(script), "--write"]) == 0
    assert "train.py:1: trl: renamed: now fastrl" in capsys.readouterr().out.replace("\n/", "/")
    assert script.read_text().startswith("from fastrl import SFTConfig\n")
    (before,) = [x for x in tmp_path.iterdir() if x != script]
    assert before.read_text().startswith("from trl")
    assert main(["migrate", str(script), "--write"]) == 0
    assert len(list(tmp_path.iterdir())) == 2
    script.write_text("from trl import SFTConfig, Nonsense\n")
    assert main(["migrate", str(script)]) == 1
    script.write_text("x = 1\ndef f(:\n")
    assert main(["migrate", str(script)]) == 2
    assert "train.py does not parse: line 2" in capsys.readouterr().err
