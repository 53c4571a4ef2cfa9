"""What a run writes, beside the steps whose records it is.

The steps are those of `test_ppo.py`, in `PPOTrainer.train`. A gate comes first: what is read of the
records is what the run did. Each turn is as many steps as a file of the ledger has, so that the
file's cost is in it.
"""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import models, results
from benchmarks.cases import OURS, Case, Goal
from benchmarks.harness import Measurement, Run
from benchmarks.models import fill_by_name, model_of, word_tokenizer
from benchmarks.sides.ppo import sampling
from benchmarks.test_ppo import Iteration
from benchmarks.test_ref_model import own_accelerate
from benchmarks.timing import Seconds, Side
from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from fastrl.run.ledger import Ledger, read_ledger

SHARE = "share of a step"


@dataclasses.dataclass(frozen=True)
class Recording:
    """A PPO iteration, and how many of them a file of the ledger has."""

    iteration: Iteration
    every: int = 20

    @property
    def what(self) -> str:
        work = self.iteration
        return (
            f"{work.model}, {work.model.dtype}: steps on {work.batch} samples of {work.query} + "
            f"{work.response} tokens, mini-batches of {work.mini_batch}, {work.epochs} epochs; the "
            f"ledger has a row for each sample and a file for {self.every} steps, which are a turn"
        )


def cases(run: Run) -> list[Case]:
    """The steps of the PPO benchmark."""
    if run.toy:
        found = [Recording(Iteration(models.TOY, 4, 8, 8, 2), every=2)]
    elif run.device.type == "cpu":
        found = [Recording(Iteration(models.SMALL, 16, 16, 48, 4))]
    else:
        large = {"batch": 64, "query": 128, "response": 256, "mini_batch": 8}
        found = [Recording(Iteration(model, **large)) for model in (models.GPT2, models.QWEN)]
    goal = Goal(SHARE, 0.01, ("cpu", "nvidia", "amd"))
    return [
        Case(
            "run",
            job.iteration.model.name,
            "ledger",
            job.what,
            job,
            goals=(goal,),
            seconds=1.0 if run.toy else 400.0,
        )
        for job in found
    ]


class Recorded:
    """A PPO run that keeps a ledger.

    Args:
        folder: of the ledger.
    """

    def __init__(self, job: Recording, device: torch.device, folder: Path) -> None:
        self.job, self.work = job, job.iteration
        self.ledger = Ledger(folder, job.every)
        self.completions: list[list[int]] = []  # of every sample so far
        self.took = {"step": 0.0, "ledger": 0.0}
        shape = self.work.shape
        model = AutoModelForCausalLMWithValueHead.from_pretrained(
            model_of(shape, self.work.query + self.work.response), summary_dropout_prob=0.0
        )
        fill_by_name(model.pretrained_model, model.v_head)
        config = PPOConfig(
            batch_size=self.work.batch,
            mini_batch_size=self.work.mini_batch,
            ppo_epochs=self.work.epochs,
            seed=0,
            accelerator_kwargs={
                "cpu": device.type == "cpu",
                "mixed_precision": "no" if shape["dtype"] == "fp32" else shape["dtype"],
            },
        )
        tokenizer = word_tokenizer(self.work.model.vocabulary)
        self.trainer = PPOTrainer(config, model, tokenizer=tokenizer)
        ids = np.random.RandomState(0).randint(
            models.EOS + 1, self.work.model.vocabulary, (4 * self.work.batch, self.work.query)
        )
        self.prompts = list(torch.from_numpy(ids))

    def reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.completions += completion_ids
        return [float(np.mean(ids)) / self.work.model.vocabulary for ids in completion_ids]

    def turn(self) -> Seconds:
        """Seconds of a step, and of its records, as means of a turn."""
        with warnings.catch_warnings():
            # Responses of one length do not come from the policy's own distribution.
            warnings.simplefilter("ignore")
            found = self.trainer.train(
                self.reward,
                steps=self.job.every,
                prompts=self.prompts,
                generation_kwargs=sampling(self.work.response),
                progress=False,
                ledger=self.ledger,
            )
        taken = {
            name: sum(metrics[f"time/{name}"] for metrics in found.history) for name in self.took
        }
        self.took = {name: self.took[name] + seconds for name, seconds in taken.items()}
        return {name: seconds / self.job.every for name, seconds in taken.items()}

    def wrong(self) -> Iterator[str]:
        """A line for each way in which the ledger is not that of the run so far."""
        found = read_ledger(self.ledger.folder, ["step", "completion_ids", "advantages", "reward"])
        if found["completion_ids"].to_pylist() != self.completions:
            yield "the ledger's completions are not those that were scored"
        steps = np.repeat(np.arange(1, self.trainer.current_step + 1), self.work.batch)
        if found["step"].to_pylist() != steps.tolist():
            yield "the ledger's rows are not those of the steps"
        if not np.isfinite(found["advantages"].combine_chunks().flatten()).all():
            yield "the ledger's advantages are not finite"

    def facts(self) -> dict[str, float]:
        nbytes = sum(path.stat().st_size for path in self.ledger.folder.iterdir())
        return {
            SHARE: self.took["ledger"] / self.took["step"],
            "bytes per sample": nbytes / len(self.completions),
        }


def test_ledger(measurement: Measurement, case: Case, run: Run) -> None:
    run.result("run")["versions"] = results.versions("torch", "transformers", "pyarrow")
    measure(measurement, case.of)


def measure(measurement: Measurement, job: Recording) -> None:
    """Gate, then turns."""
    with tempfile.TemporaryDirectory() as folder, own_accelerate():
        recorded = Recorded(job, measurement.run.device, Path(folder))
        recorded.turn()  # uncounted, and what the gate reads
        if wrong := list(recorded.wrong()):
            measurement.refuse("; ".join(wrong))
        recorded.took = dict.fromkeys(recorded.took, 0.0)

        def turn() -> Seconds:
            seconds = recorded.turn()
            side.facts = recorded.facts()
            return seconds

        side = Side(turn)
        measurement.measure({OURS: side}, 3)
