"""What a run writes, beside the steps whose records it is.

The steps are those of `test_ppo.py`, in `PPOTrainer.train`. A gate comes first: what is read of the
records is what the run did. Each turn is as many steps as a file of the ledger has, so that the
file's cost is in it, and one checkpoint.

The soak is a single run of many steps of a tiny model, with all that it writes: whether memory or
the time of a step grow.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import time
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
from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, TrainCallback
from fastrl.run.checkpoints import SAVE_EVERY
from fastrl.run.ledger import Ledger, read_ledger

SHARE = "share of a step"
SAVING = "checkpoints, of the time of the steps between"  # at the default of --save-every
GROWTH = "memory at the end, of that after 200 steps"
SLOWDOWN = "a step of the last 200, of one of the first"


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
    everywhere = ("cpu", "nvidia", "amd")
    goals = (Goal(SHARE, 0.01, everywhere), Goal(SAVING, 0.01, everywhere))
    soak = Soak(Iteration(models.TOY, 4, 8, 8, 2), *((6, 2) if run.toy else (2000, 200)))
    return [
        Case(
            "run",
            job.iteration.model.name,
            "ledger",
            job.what,
            job,
            goals=goals,
            seconds=1.0 if run.toy else 400.0,
        )
        for job in found
    ] + [
        Case(
            "run",
            soak.iteration.model.name,
            "soak",
            soak.what,
            soak,
            goals=(Goal(GROWTH, 1.02, everywhere), Goal(SLOWDOWN, 1.1, everywhere)),
            seconds=1.0 if run.toy else 200.0,
        )
    ]


@dataclasses.dataclass(frozen=True)
class Soak:
    """A run of many PPO iterations.

    Attributes:
        first: steps after which memory is to stay as it is.
    """

    iteration: Iteration
    steps: int
    first: int

    @property
    def what(self) -> str:
        work = self.iteration
        return (
            f"{self.steps} steps of {work.model}, on {work.batch} samples of {work.query} + "
            f"{work.response} tokens, with metrics, ledger and a checkpoint every {SAVE_EVERY}"
        )


class Watch(TrainCallback):
    """Resident memory and time after each step."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.seconds = [time.perf_counter()]

    def on_step(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.bytes.append(pages * os.sysconf("SC_PAGE_SIZE"))
        self.seconds.append(time.perf_counter())

    def facts(self, first: int) -> dict[str, float]:
        took = np.diff(self.seconds)
        ends = [float(np.median(part)) for part in (took[:first], took[-first:])]
        return {
            GROWTH: max(self.bytes[first:]) / self.bytes[first - 1],
            SLOWDOWN: ends[1] / ends[0],
            "MiB after it": self.bytes[-1] / 2**20,
        }


class Recorded:
    """A PPO run that keeps a ledger.

    Args:
        folder: of the ledger, and of checkpoints.
    """

    def __init__(self, job: Recording, device: torch.device, folder: Path) -> None:
        self.job, self.work = job, job.iteration
        self.folder = folder
        self.ledger = Ledger(folder / "ledger", job.every)
        self.completions: list[list[int]] = []  # of every sample so far
        self.took = {"step": 0.0, "ledger": 0.0}
        self.steps = 0
        self.saving: list[float] = []  # seconds of each checkpoint
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
        begin = time.perf_counter()
        path = self.trainer.save_checkpoint(self.folder)
        self.saving.append(time.perf_counter() - begin)
        shutil.rmtree(path)
        self.steps += self.job.every
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
        step = self.took["step"] / self.steps
        nbytes = sum(path.stat().st_size for path in self.ledger.folder.iterdir())
        return {
            SHARE: self.took["ledger"] / self.took["step"],
            SAVING: float(np.mean(self.saving)) / (SAVE_EVERY * step),
            "bytes per sample": nbytes / len(self.completions),
        }


def test_run(measurement: Measurement, case: Case, run: Run) -> None:
    run.result("run")["versions"] = results.versions("torch", "transformers", "pyarrow")
    (measure_soak if isinstance(case.of, Soak) else measure)(measurement, case.of)


def measure_soak(measurement: Measurement, job: Soak) -> None:
    """One run, without a gate: what it computes is measured elsewhere."""
    with tempfile.TemporaryDirectory() as folder, own_accelerate(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorded = Recorded(Recording(job.iteration), measurement.run.device, Path(folder))

        def run() -> Seconds:
            watch = Watch()
            recorded.trainer.train(
                recorded.reward,
                steps=job.steps,
                prompts=recorded.prompts,
                generation_kwargs=sampling(job.iteration.response),
                progress=False,
                output=Path(folder) / "run",
                overwrite=True,
                callbacks=[watch],
            )
            recorded.completions.clear()
            side.facts = side.facts or watch.facts(job.first)  # of a process that is new to it
            return {"step": float(np.mean(np.diff(watch.seconds)))}

        side = Side(run)
        measurement.measure({OURS: side}, 1)


def measure(measurement: Measurement, job: Recording) -> None:
    """Gate, then turns."""
    with tempfile.TemporaryDirectory() as folder, own_accelerate():
        recorded = Recorded(job, measurement.run.device, Path(folder))
        recorded.turn()  # uncounted, and what the gate reads
        if wrong := list(recorded.wrong()):
            measurement.refuse("; ".join(wrong))
        recorded.took, recorded.steps = dict.fromkeys(recorded.took, 0.0), 0
        recorded.saving.clear()

        def turn() -> Seconds:
            seconds = recorded.turn()
            side.facts = recorded.facts()
            return seconds

        side = Side(turn)
        measurement.measure({OURS: side}, 3)
