"""``fastrl plan``: what a run needs of memory, from the model's configuration alone."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from fastrl.config import PPOConfig, json_object
from fastrl.run.terminal import run_console
from fastrl.tools.commands.aliases import aliases_of
from fastrl.tools.commands.flags import early_value, parse, planned_method, recipe_of
from fastrl.tools.commands.plan_job import METHODS, PREFERENCES, PlanJob, check_method

if TYPE_CHECKING:
    from fastrl.tools.commands.planned_run import PlannedRun
    from fastrl.trainers.plan.report import Plan


def run_plan(arguments: Sequence[str]) -> None:
    """Prints the plan of a run's memory.

    Raises:
        UsageError: no model, an unknown flag or value.
        FileNotFoundError: a folder without a model's configuration.
        ValueError: settings that the method's trainer refuses.
    """
    from fastrl.models.asked_once import answers_kept

    with answers_kept():  # one run, planned with a few changes
        _print_plan(planned_run(arguments))


def _print_plan(run: PlannedRun) -> None:
    console = run_console()
    gpu = run.job.gpu_gib
    with console.status("planning") if not run.job.as_json else nullcontext():
        if gpu is None:
            plan = run.plan()
        else:
            run, plan = run.fitted(gpu)
    if run.job.as_json:
        print(json.dumps({**plan.as_json(), "advice": list(_advice(run, plan))}, indent=1))
        return
    console.print(plan.table())
    for name, value in plan.settings.items():
        console.print(f"{name.replace('_', ' ')}: {value}", highlight=False)
    for guess in plan.guesses:
        console.print(f"a guess: {guess}", highlight=False)
    with console.status("planning changed runs"):
        for line in _advice(run, plan):
            console.print(line, highlight=False)


def _advice(run: PlannedRun, plan: Plan) -> Iterator[str]:
    """Whether a run fits ``gpu_gib``, and what can be larger or must change; nothing without it."""
    from fastrl.trainers.plan.advice import what_fits, what_to_change
    from fastrl.trainers.plan.report import gib, usable

    gpu = run.job.gpu_gib
    if gpu is None:
        return
    fits = plan.fits(gpu)
    room = f"{gib(usable(gpu))} of {gpu:g} GiB can be used"
    yield f"{'fits' if fits else 'does not fit'}: {gib(plan.peak)}; {room}"
    if fits:
        yield from what_fits(run, plan, gpu)
    else:
        yield f"cheapest change: {what_to_change(run, plan, gpu)}"


def planned_run(arguments: Sequence[str]) -> PlannedRun:
    """The run that "MODEL [--flag value ...]" describes."""
    job, flags = parse_plan(arguments)
    from fastrl.tools.commands.planned_run import PlannedRun  # loads torch: --help needs none

    return PlannedRun(job, job.skeleton(), flags)


def parse_plan(arguments: Sequence[str]) -> tuple[PlanJob, Any]:
    """What to plan, and the flags of the method's command."""
    words = list(arguments)
    if words and not words[0].startswith("-") and not words[0].endswith((".yaml", ".yml")):
        words = ["--model", *words]
    method = _method(words)
    check_method(method)
    module, name = METHODS.get(method, PREFERENCES).flags
    kind = getattr(importlib.import_module(f"fastrl.tools.commands.{module}"), name)
    aliases = aliases_of("plan", method if method in METHODS else "align")
    job, flags = parse("plan", [PlanJob, kind], words, aliases)
    if job.mixed_precision:
        if isinstance(flags, PPOConfig):
            given_to_accelerate = json_object(flags.accelerator_kwargs)
            flags.accelerator_kwargs = {"mixed_precision": "bf16", **given_to_accelerate}
        else:
            flags.bf16 = True
    return job, flags


def _method(arguments: Sequence[str]) -> str:
    """The method, which determines the flags: read before these are parsed."""
    if (method := early_value("method", arguments)) is not None:
        return method
    recipe = early_value("recipe", arguments)
    return PlanJob.method if recipe is None else planned_method(recipe_of("plan", recipe))
