"""`python -m benchmarks reference`: what a step of PPO costs by the way its reference is kept.

A gate comes first: reference log-probs equal to a separate full copy's, after the policy has moved,
or there are no figures. Then trainers take turns, one whole step at a time, and say themselves what
they spent on scoring the batch (old and reference log-probs) and on an epoch of the update.

The result file: the header of `record.py`, and {"versions", "threads", "references": [entries of
`measure`]}.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.before import reference_gate, reference_sides, suite
from benchmarks.before.ops import pick_device
from benchmarks.before.reference_cases import MODES, Case, cases
from benchmarks.before.reference_sides import TIMERS, Side
from benchmarks.before.reference_tables import render


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks reference`."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--case", metavar="TEXT", help="cases whose label contains TEXT")
    parser.add_argument("--rounds", type=int, default=9, help="counted steps of each side")
    parser.add_argument("--threads", type=int, metavar="N", help="default: all cores")
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="begin no case that takes longer"
    )
    parser.add_argument("--no-save", action="store_true", help="write no result file")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="where result files go")


def run(args: argparse.Namespace) -> int:
    """Measure, print and save; 1 where a gate is red, 2 where the request is wrong."""
    device = pick_device(args.device)
    if device is None:
        print("no GPU here: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    if mistake := suite.wrong(args, "rounds", "threads"):
        print(mistake, file=sys.stderr)
        return 2
    return suite.run(
        args,
        device,
        cases(device.type),
        start_of_result,
        "references",
        lambda case: measure(case, device, args.rounds),
        render,
    )


def start_of_result(device: torch.device, threads: int) -> dict[str, Any]:
    """A result without entries."""
    packages = ("torch", "triton", "transformers", "accelerate", "peft")
    return suite.start_of_result("reference", device, threads, "references", *packages)


def measure(case: Case, device: torch.device, rounds: int) -> dict[str, Any]:
    """The case's entry in a result file; without times where the gate is red.

    {"label", "work", "case", "goal", "red", "absent": {side: why}, "sides": {name: {"note",
     "difference": largest |Δ| of reference log-probs in fp32, or None, "scores", "update":
     [seconds], and the bytes of `Observation`}}}.
    """
    verdict = reference_gate.judge(case, device)
    entry: dict[str, Any] = {
        "label": case.label,
        "work": case.work,
        "case": {k: v for k, v in dataclasses.asdict(case).items() if k != "goal"},
        "goal": dataclasses.asdict(case.goal) if case.goal else None,
        "sides": {},
        "absent": {},
        "red": verdict.red,
    }
    if entry["red"]:
        return entry
    with reference_sides.own_accelerate():
        sides, entry["absent"] = reference_sides.sides(case, device)
        for name, side in sides.items():
            side.step()  # uncounted
            seen = side.observe()
            if seen.samples_run_again:
                entry["red"] = f"{name}: {seen.samples_run_again} boundaries were not kept"
                return entry
            mode = name.split(",")[0]
            entry["sides"][name] = {
                "note": note(case, mode),
                "difference": verdict.differences[mode],
                **dict.fromkeys(TIMERS),
                **dataclasses.asdict(seen),
            }
        _take_turns(sides, rounds, entry)
    return entry


def note(case: Case, mode: str) -> str:
    """What a mode means for the case's model, in words."""
    layers = case.shape.layers
    shared = MODES[mode].shared_layers(layers)
    if shared is not None:
        head = ", and the head, which is tied to the embeddings" if case.shape.tied else ""
        return f"{shared} of {layers} layers are shared and frozen{head}"
    if MODES[mode].reference == "adapter":
        return f"LoRA of rank {reference_sides.LORA_RANK} on the attention, all else frozen"
    return ""


def _take_turns(sides: dict[str, Side], rounds: int, entry: dict[str, Any]) -> None:
    for taken in entry["sides"].values():
        taken |= {phase: [] for phase in TIMERS}
    for _ in range(rounds):
        for name, side in sides.items():
            for phase, seconds in side.step().items():
                entry["sides"][name][phase].append(seconds)
