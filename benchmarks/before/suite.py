"""What benchmarks of whole cases have in common: a request checked, cases measured one by one while
there is time, a result file that is saved after each."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.utils import logging

from benchmarks.before import record
from benchmarks.before.ops import device_name, file_of, free
from benchmarks.before.planner import Outcome, Step, carry_out

Entry = dict[str, Any]
GUESS = 60.0  # seconds of a case; the pace of those before corrects it


def wrong(args: argparse.Namespace, *names: str) -> str | None:
    """What is wrong with options that must be at least 1, where they are given."""
    for name in names:
        if getattr(args, name) is not None and getattr(args, name) < 1:
            return f"--{name} must be at least 1, got {getattr(args, name)}"
    return None


def run(
    args: argparse.Namespace,
    device: torch.device,
    cases: Sequence[Any],
    header: Callable[[torch.device, int], Entry],
    entries: str,
    measure: Callable[[Any], Entry],
    render: Callable[[Entry, str], str],
) -> int:
    """Measure, print and save; 1 where a gate is red, 2 where no case is meant.

    Args:
        cases: all that there are; ``args.case`` chooses by label.
        header: a result without entries, of a device and a number of threads.
        entries: under what name the result has them.
        measure, render: an entry of a case; its table for a device's name.
    """
    chosen = [case for case in cases if not args.case or args.case in case.label]
    if not chosen:
        labels = "\n".join(case.label for case in cases)
        print(f"no case has {args.case!r} in its label:\n{labels}", file=sys.stderr)
        return 2
    logging.set_verbosity_error()  # advice of transformers, in between the figures
    threads = args.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    result = header(device, threads)
    record.warn_if_busy(result["machine"])
    print(f"{device_name(device)}, {threads} threads")
    path = None

    def save(outcome: Outcome) -> None:
        nonlocal path
        if not args.no_save and result[entries]:
            result["left"] = outcome.left | outcome.failed
            path = record.save(result, file_of(result, args.results))

    def one(case: Any) -> None:
        entry = measure(case)
        result[entries].append(entry)
        print("\n" + render(entry, device_name(device)), flush=True)
        free(device)

    steps = [Step(case.label, GUESS, lambda case=case: one(case)) for case in chosen]
    seconds = math.inf if args.minutes is None else 60 * args.minutes
    outcome = carry_out(steps, seconds, save=save)
    for what in (outcome.failed, outcome.left):
        for name, why in what.items():
            print(f"{name}: {why}", file=sys.stderr)
    if path:
        print(f"\nsaved as {path}")
    red = any(entry["red"] for entry in result[entries])
    return 1 if red or outcome.failed else 0


def start_of_result(
    benchmark: str, device: torch.device, threads: int, entries: str, *packages: str
) -> Entry:
    """A result without entries."""
    header = record.header(benchmark)
    if device.type == "cpu":
        header["machine"].pop("accelerator", None)
    versions = record.versions(*packages)
    return {**header, "versions": versions, "threads": threads, entries: []}
