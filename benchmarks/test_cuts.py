"""Draws from a part of the vocabulary: what it costs to keep the sets and to learn over them, and
texts of a form.

A GRPO step on responses that are drawn with top-p, with log-probs over all of the vocabulary and
over the sets that tokens were drawn from. First a gate: the ratio of update to rollout is 1.

And rollouts whose texts are JSON of a schema, beside rollouts of any text, and beside vLLM's of
both. A gate comes first: answers of a short schema are parsed and validated by `jsonschema`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import models
from benchmarks.cases import OURS, Case, Goal
from benchmarks.harness import Measurement, Run
from benchmarks.sides.rollout import workload
from benchmarks.test_grpo import Step
from benchmarks.test_rollout import RolloutJob, vllms_python, why_absent, wrong_lengths
from benchmarks.worker import Worker, asking, together, turns_with_memory

FULL, FREE = "fastrl, over all", "fastrl, any text"
VLLM, VLLM_FREE = "vllm", "vllm, any text"
EXACT = 1e-5  # of the ratio of the update to the rollout
# A person with tags; so many that no text ends within what is timed.
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {
            "type": "array",
            "items": {"type": "string", "maxLength": 12},
            "minItems": 3,
            "maxItems": 6,
        },
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 50}
ANSWER = {
    "type": "object",
    "properties": {
        "answer": {"enum": ["yes", "no"]},
        "sure": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["answer", "sure"],
    "additionalProperties": False,
}


@dataclasses.dataclass(frozen=True)
class CutStep(Step):
    top_p: float = 0.95

    @property
    def what(self) -> str:
        return (
            f"{super().what}, drawn with top_p={self.top_p:g}; memory is a step's, with its rollout"
        )


@dataclasses.dataclass(frozen=True)
class FormJob(RolloutJob):
    form: Any = dataclasses.field(default_factory=lambda: PEOPLE)
    answer: Any = dataclasses.field(default_factory=lambda: ANSWER)

    @property
    def what(self) -> str:
        return (
            f"{self.model}: {super().what}; JSON of a list of people, each a name, an age and "
            "three to six tags, without white space"
        )


def cases(run: Run) -> list[Case]:
    """A step with top-p, and rollouts of a form."""
    small = dataclasses.replace(models.SMALL, context=1024)
    step = CutStep(small, 16, batch=32)
    job = FormJob(_LLAMA, 32, 32, (16, 16), 48, 48)
    if run.toy:
        step = CutStep(models.TOY, 6, completion=5, batch=4, group=2)
        job = FormJob(models.TOY, 4, 2, (1, 4), 24, 24)
    within = [Goal("speedup", 1 / 1.1, against=FULL, phase=x) for x in ("rollout", "update")]
    beside = [Goal("speedup", 1 / 1.25, against=FREE), Goal("speedup", 1.0, against=VLLM)]
    seconds = 1.0 if run.toy else 120.0
    return [
        Case("cuts", "top-p", "sets of the draws", step.what, step, tuple(within), seconds=seconds),
        Case("cuts", "a form", "JSON of a schema", job.what, job, tuple(beside), seconds=seconds),
    ]


_LLAMA = dataclasses.replace(models.LLAMA, name="Llama 8×512", vocabulary=50257)


def test_cuts(measurement: Measurement, case: Case) -> None:
    if isinstance(case.of, CutStep):
        measure_step(measurement, case.of)
    else:
        pytest.importorskip("llguidance")
        measure_form(measurement, case.of)


def measure_step(measurement: Measurement, step: CutStep) -> None:
    """Gate, memory, then turns of the two sides."""
    measurement.entry["units"] = ["tokens", step.batch * step.completion]
    with contextlib.ExitStack() as stack:
        workers = {}
        for name, support in ((OURS, "sampled"), (FULL, "full")):
            here = {name: (Path(sys.executable), "fastrl")}
            opened = together(measurement, here, "cut_step", step.shape, support=support)
            workers |= stack.enter_context(opened)
        for name, side in workers.items():
            off = side.ask("check")["ratio"]
            if not off <= EXACT:  # NaN is not
                measurement.refuse(f"{name}: a ratio of the update to the rollout is {off:.1e} off")
        turns_with_memory(measurement, workers)


def measure_form(measurement: Measurement, job: FormJob) -> None:
    """Gate, an uncounted rollout of each side, then turns."""
    run, entry, work = measurement.run, measurement.entry, workload(job.shape)
    entry["shape"], entry["units"] = job.shape, ["tokens", sum(work.limits)]
    here = Path(sys.executable)
    ways = {OURS: (here, "fastrl", "engine, form"), FREE: (here, "fastrl", "engine")}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        models.build(job.model, run.device).save_pretrained(folder)
        models.text_tokenizer(job.model.vocabulary).save_pretrained(folder)
        if run.peers and not run.toy:
            try:
                theirs = vllms_python(), "vllm"
                ways |= {VLLM: (*theirs, "vllm, form"), VLLM_FREE: (*theirs, "vllm")}
            except Exception as error:  # it cannot be installed here
                measurement.absent(VLLM, why_absent(error))
        sides = {}
        for name, (python, library, generator) in ways.items():
            options = {"folder": folder, "generator": generator}
            started = Worker(python, library, "form", job.shape, run.device.type, **options)
            try:
                worker = stack.enter_context(started)
                run.result("cuts")["versions"][name] = worker.ready()
                made = worker.ask("check")
            except Exception as error:  # other libraries fail in any way
                if library == "fastrl":
                    raise
                measurement.absent(name, why_absent(error))
                continue
            wrong = wrong_lengths(made["sequences"], work) or _invalid(made.get("texts", ()))
            if wrong:
                measurement.refuse(f"{name}: {wrong}")
            sides[name] = asking(worker)
            sides[name].note = made["note"]
            sides[name].facts = worker.ask("facts")
        measurement.measure(sides, 7)


def _invalid(texts: Sequence[str]) -> str | None:
    """Which of the texts is no answer."""
    from jsonschema import ValidationError, validate

    for text in texts:
        try:
            validate(json.loads(text), ANSWER)
        except (ValueError, ValidationError) as error:
            return f"{text!r} is no answer: {str(error).splitlines()[0]}"
    return None
