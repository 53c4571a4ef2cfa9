"""A run that is killed at any instant, and resumed, ends bit for bit as one that was not.

Two instants of each trainer; with FAULTS=all (``make faults``) more than twenty, and some runs that
are killed twice.
"""

import hashlib
import json
import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fastrl.run.checkpoints import Checkpoints, verify
from fastrl.run.ledger import read_ledger
from tests.faults.zygote import FIT_PLACES, PLACES, Zygote
from tests.ppo.test_golden import without_key_bias

ALL = os.environ.get("FAULTS") == "all"
INSTANTS = 22 if ALL else 2
LEARNING = {
    "reward": "varied.py:varied", "dataset": "reviews.jsonl", "prompt-words": 5, "steps": 7,
    "max-new-tokens": 6, "batch-size": 8, "mini-batch-size": 4, "ppo-epochs": 2, "eval-prompts": 8,
    "eval-every": 3, "learning-rate": 1e-2,
}  # fmt: skip
FITTING = {
    "max-steps": 7, "eval-examples": 8, "eval-strategy": "steps", "eval-steps": 3,
    "logging-steps": 1, "use-cpu": "true", "learning-rate": 1e-2, "per-device-train-batch-size": 4,
}  # fmt: skip
TRAINERS = {
    "ppo": ("ppo", LEARNING, PLACES),
    "grpo": ("grpo", {**LEARNING, "group-size": 4}, PLACES),
    "hybrid": ("grpo", {**LEARNING, "group-size": 4, "model": "hybrid"}, PLACES),
    "sft": ("sft", {**FITTING, "dataset": "reviews.jsonl"}, FIT_PLACES),
    "reward": ("reward", {**FITTING, "dataset": "pairs.jsonl"}, FIT_PLACES),
    "dpo": ("align", {**FITTING, "dataset": "prompted.jsonl", "max-length": 40}, FIT_PLACES),
}
TWICE = [(name, number) for name in TRAINERS for number in range(4)] if ALL else [("ppo", 0)]
PATHS = ("model", "dataset", "reward")


@dataclass
class Straight:
    """A run that nothing interrupted."""

    name: str
    files: dict[str, str]
    calls: dict[str, int]

    def instants(self, count: int) -> list[tuple[str, int]]:
        """Calls of the places, the same in every test run; each place comes once at first."""
        draws = random.Random(f"{self.name} {count}")
        places = sorted(place for place, calls in self.calls.items() if calls)
        draws.shuffle(places)
        return [
            (place, draws.randint(1, self.calls[place]))
            for place in (places[i % len(places)] for i in range(count))
        ]


def command(name: str, world: Path, output: Path, **more: object) -> list[str]:
    first, settings, _ = TRAINERS[name]
    flags = {"model": "lm", "output": output, "save-every": 2, **settings, **more}
    flags |= {key: world / str(flags[key]) for key in PATHS if key in flags}
    return [first, *(word for k, v in flags.items() for word in (f"--{k}", str(v)))]


def results(folder: Path) -> dict[str, str]:
    """Hashes of what a run leaves, but for times; metrics as they are."""
    found = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in [*folder.glob("model/*.safetensors"), folder / "samples.jsonl"]
        if path.is_file()
    }
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in row.items() if not _is_time(k)} for row in rows]
    ledger = read_ledger(folder / "ledger").to_pylist()
    return {**found, "metrics": json.dumps(kept), "ledger": json.dumps(ledger)}


def _is_time(name: str) -> bool:
    parts = ("time/", "perf/", "runtime", "per_second", "total_flos")
    return any(part in name for part in parts)


_straight: dict[str, Straight] = {}


@pytest.fixture
def straight(request, data, zygote: Zygote, tmp_path_factory) -> Straight:
    name = request.getfixturevalue("name")
    if name not in _straight:
        folder = tmp_path_factory.mktemp("straight") / "run"
        places = TRAINERS[name][2]
        outcome = zygote.run(command(name, data, folder), places=places)
        assert outcome.status == 0, outcome.output
        _straight[name] = Straight(name, results(folder), outcome.calls)
    return _straight[name]


def kill(zygote: Zygote, arguments: list[str], instant: tuple[str, int], name: str) -> None:
    outcome = zygote.run(arguments, places=TRAINERS[name][2], kill=instant)
    assert outcome.status == -signal.SIGKILL, (instant, outcome.output)


@pytest.mark.parametrize("number", range(INSTANTS))
@pytest.mark.parametrize("name", TRAINERS)
def test_a_killed_run_is_resumed_bit_for_bit(name, number, straight, data, zygote, tmp_path):
    instant = straight.instants(INSTANTS)[number]
    folder = tmp_path / "run"
    kill(zygote, command(name, data, folder), instant, name)
    whole = Checkpoints(folder / "checkpoints").paths()
    for path in whole:
        verify(path)
    outcome = zygote.run([*command(name, data, folder), "--resume"])
    assert outcome.status == 0, (instant, outcome.output)
    assert results(folder) == straight.files, instant


@pytest.mark.parametrize(("name", "number"), TWICE)
def test_a_run_may_be_killed_more_than_once(name, number, straight, data, zygote, tmp_path):
    instants = straight.instants(8)[2 * number :][:2]
    folder = tmp_path / "run"
    kill(zygote, command(name, data, folder), instants[0], name)
    again = [*command(name, data, folder), "--resume"]
    second = zygote.run(again, places=TRAINERS[name][2], kill=instants[1])
    assert second.status in (0, -signal.SIGKILL), second.output
    assert zygote.run(again).status == 0
    assert results(folder) == straight.files, instants


def test_other_slots_change_no_sample_and_hardly_a_weight(data, zygote, tmp_path):
    flags = {"learning-rate": 1e-4}
    folder, straight = tmp_path / "run", tmp_path / "straight"
    kill(zygote, command("ppo", data, folder, **flags), ("update", 15), "ppo")
    resumed = command("ppo", data, folder, **flags, **{"rollout-slots": 3})
    for arguments in ([*resumed, "--resume"], command("ppo", data, straight, **flags)):
        outcome = zygote.run(arguments)
        assert outcome.status == 0, outcome.output
    assert results(folder)["samples.jsonl"] == results(straight)["samples.jsonl"]
    one, other = (load_file(x / "model" / "model.safetensors") for x in (folder, straight))
    for name, weight in one.items():
        pair = (without_key_bias(name, x) for x in (weight, other[name]))
        torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-6, msg=name)
