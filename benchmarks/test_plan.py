"""Plans of memory beside the memory that training takes.

Configurations are drawn by a seed. Each is planned in one process, from its configuration alone,
and trained for two optimizer steps in another, of which torch.profiler sums up all allocations.
There is no gate: the deviation is the figure.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from typing import Any

from benchmarks import ROOT, results
from benchmarks.cases import OURS, Case, Goal
from benchmarks.environments import source_tree
from benchmarks.harness import Measurement, Run
from benchmarks.timing import Seconds, Side

SEED, COUNT = 20, 33
OFF = "off by"
FAMILIES = (
    "GPT2", "Llama", "Qwen2", "Qwen3", "Gemma2", "Gemma3Text", "Mistral", "Phi", "GPTNeoX", "OPT",
)  # fmt: skip
# Methods, and how much of the model each trains.
KINDS = (
    ("ppo", "full"), ("ppo", "lora"), ("ppo", "trunk"), ("grpo", "full"), ("grpo", "lora"),
    ("grpo", "trunk"), ("sft", "full"), ("sft", "lora"), ("dpo", "full"), ("dpo", "lora"),
    ("dpo", "trunk"),
)  # fmt: skip
_TIED = ("GPT2", "Gemma2", "Gemma3Text", "OPT", "Qwen2")


@dataclasses.dataclass(frozen=True)
class PlanJob:
    """A model, a method and a batch."""

    family: str
    method: str
    mode: str  # what is trained: full, lora or, above a trunk of half of the layers, trunk
    layers: int
    width: int
    vocabulary: int
    tied: bool
    batch: int
    mini_batch: int
    prompt: int
    response: int
    checkpointing: bool
    micro_batch_tokens: int | None = None

    @property
    def label(self) -> str:
        saved = ", checkpointing" if self.checkpointing else ""
        tied = ", tied" if self.tied else ""
        parts = f", {self.micro_batch_tokens} in a pass" if self.micro_batch_tokens else ""
        return (
            f"{self.family} {self.layers}×{self.width}, V={self.vocabulary}{tied}, "
            f"{self.mini_batch} × ({self.prompt} + {self.response}) tokens{saved}{parts}"
        )


def drawn(seed: int = SEED, count: int = COUNT) -> list[PlanJob]:
    """Jobs, by a seed; all families and kinds come in turn."""
    rng = random.Random(seed)
    jobs = []
    for i in range(count):
        method, mode = KINDS[i % len(KINDS)]
        family = FAMILIES[i % len(FAMILIES)]
        mini_batch = 8 if mode == "lora" else rng.choice((4, 8))
        jobs.append(
            PlanJob(
                family,
                method,
                mode,
                layers=rng.choice((6, 8)),
                width=rng.choice((512, 640)),
                vocabulary=rng.choice((16000, 32000, 50257)),
                tied=mode != "trunk" and family in _TIED and rng.random() < 0.5,
                batch=2 * mini_batch,
                mini_batch=mini_batch,
                prompt=rng.choice((96, 160, 224)),
                response=rng.choice((32, 48, 64)),
                checkpointing=mode == "full" and method in ("ppo", "grpo") and rng.random() < 0.5,
            )
        )
    return jobs


def cases(run: Run) -> list[Case]:
    """The drawn jobs; on a CPU, whose allocations the profiler follows."""
    if run.device.type != "cpu":
        return []
    if run.toy:
        jobs = [PlanJob("Llama", "ppo", "full", 2, 64, 503, False, 4, 2, 8, 8, False)]
    else:
        jobs = drawn()
    return [
        Case(
            "plan",
            f"{job.method} {job.mode}",
            job.label,
            of=job,
            goals=() if run.toy else (Goal(OFF, 0.05),),
            seconds=30.0,
        )
        for job in jobs
    ]


def ask(what: str, *jobs: PlanJob) -> list[dict[str, Any]]:
    """Bytes and seconds of each, from one process of their own."""
    shapes = [json.dumps(vars(job)) for job in jobs]
    words = [sys.executable, "-m", "benchmarks.sides.plan", what, *shapes]
    environment = {**os.environ, "PYTHONPATH": f"{source_tree()}{os.pathsep}{ROOT}"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode:
        labels = ", ".join(job.label for job in jobs)
        raise RuntimeError(f"{what}, {labels}:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()[-len(jobs) :]]


def test_plan(measurement: Measurement, case: Case, run: Run) -> None:
    run.result("plan")["versions"] = results.versions("torch", "transformers", "accelerate", "peft")
    (found,) = ask("measured", case.of)
    (planned,) = ask("planned", case.of)

    def turn() -> Seconds:  # once is enough
        return {"planning": planned["seconds"]}

    side = Side(
        turn,
        memory={"measured": found["bytes"], "planned": planned["bytes"]},
        facts={OFF: abs(planned["bytes"] / found["bytes"] - 1)},
    )
    measurement.measure({OURS: side}, 1)
