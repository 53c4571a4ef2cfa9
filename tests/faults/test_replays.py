"""Samples of a run that was killed and resumed are drawn again, bit for bit."""

import os
import random

import pytest

from fastrl.run.ledger import read_ledger
from tests.faults.test_kills import command, kill

SAMPLES = 20 if os.environ.get("FAULTS") == "all" else 2


@pytest.mark.parametrize("name", ["ppo", "grpo", "hybrid"])
def test_samples_of_a_resumed_run_are_replayed(name, data, zygote, tmp_path):
    folder = tmp_path / "run"
    arguments = command(name, data, folder, **{"keep-last": 0})
    kill(zygote, arguments, ("update", 17), name)
    assert zygote.run([*arguments, "--resume"]).status == 0
    rows = read_ledger(folder / "ledger", ["step", "sample"]).to_pylist()
    for row in random.Random(name).sample(rows, SAMPLES):
        chosen = ["--step", str(row["step"]), "--sample", str(row["sample"])]
        outcome = zygote.run(["replay", str(folder), *chosen])
        assert outcome.status == 0, outcome.output
        assert "identical" in outcome.output
