"""`python -m benchmarks gpu`: what a few minutes on an NVIDIA GPU can prove, the weightiest first.

It runs from a bare checkout: `PYTHONPATH=.:kernels/torch-ext python -m benchmarks gpu --minutes 8`
needs torch and triton. First the gates on the compiled kernels (`gates.py`), where an op with a red
one is not timed, and a pass of every kernel under compute-sanitizer. Then the cases that the goals
are set for, beside eager PyTorch; the same beside every peer that is there; and a count of bytes by
Nsight Compute. The result file is saved after every step; beside what `ops.py` writes it has
{"gates": [{"op", "check", "wrong"}], "bytes": [{"label", "op", "read", "written", "kernels"}],
 "sanitizer": [{"tool", "errors", "first"}], "done", "left", "failed"}.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.before import cases, gates, ncu, record, sanitizer, timing
from benchmarks.before.attention import GPT2, LLAMA3_8B, QWEN25_05B, Attention
from benchmarks.before.cases import HOPPER, Case, Goal
from benchmarks.before.measure import Effort, measure, render
from benchmarks.before.ops import device_name, file_of, free, start_of_result
from benchmarks.before.planner import Outcome, Step, carry_out

ROUNDS = 15
# Guesses, in seconds: an op's gates with their compilation, a case, and what peers add.
GATES, CASE, PEERS, BYTES, SANITIZER = 15.0, 12.0, 40.0, 30.0, 90.0
TIMING_SECONDS = 3.0  # of one case's rounds
AT_END = 5.0  # kept back for the end of the process


def _on_vocabulary(op: str, vocabulary: int, goal: float | None, **fields: Any) -> Case:
    return Case(op, 8192, "bf16", vocabulary=vocabulary, goal=_hopper(goal), main=True, **fields)


def _hopper(
    seconds: float | None, memory: int | None = None, launches: tuple[int, int] | None = None
) -> Goal | None:
    if seconds is launches is None:
        return None
    return Goal(seconds=seconds, memory_bytes=memory, launches=launches, device=HOPPER)


def _decode(layer: Attention, slots: int, tokens: int) -> Case:
    return Case(
        "decode_attention", slots, "bf16", steps=tokens, active=0.5, backward=False,
        attention=layer, main=True,
    )  # fmt: skip


_HEAD: dict[str, Any] = {"hidden": 4096, "vocabulary": 131072, "main": True}
TELLING = (
    _on_vocabulary("token_logprobs", 151936, 0.9e-3, backward=False),
    _on_vocabulary("token_logprobs", 151936, 2.6e-3),
    Case("linear_logprobs", 4096, "bf16", goal=_hopper(26e-3, 600 * 2**20), **_HEAD),
    Case("linear_ppo_loss", 4096, "bf16", goal=_hopper(19.5e-3), entropy="metric", **_HEAD),
    _on_vocabulary("full_kl", 128256, 3.7e-3),
    Case(
        "gae",
        512,
        steps=4096,
        active=0.7,
        whiten=True,
        main=True,
        goal=_hopper(25e-6, launches=(2, 0)),
    ),
    Case(
        "ppo_loss",
        1024,
        steps=1024,
        active=0.7,
        main=True,
        goal=_hopper(None, launches=(2, 1)),
    ),
    _on_vocabulary("sample_tokens", 151936, None, backward=False),
    _decode(QWEN25_05B, 256, 512),
    _decode(LLAMA3_8B, 64, 2048),
    _on_vocabulary("token_logprobs", 50257, None, entropy="gradient"),  # rows start unaligned
    Case("kl_rewards", 512, steps=4096, active=0.7, backward=False, main=True),
    Case("whiten", 512, steps=4096, active=0.7, backward=False, main=True),
    _decode(GPT2, 1, 512),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks gpu`."""
    parser.add_argument("--minutes", type=float, default=8.0, help="to be done within")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="where the file goes")
    parser.add_argument("--gates-only", action="store_true", help="no timings")


def run(args: argparse.Namespace) -> int:
    """0 where every gate is green, 1 where one is red or a step failed, 2 without a GPU."""
    began = time.monotonic()
    if not torch.cuda.is_available():
        print(
            "no GPU here: torch.cuda.is_available() is False. On a machine without one, "
            "`python -m benchmarks ops` measures the CPU paths and `aot` compiles the kernels.",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cuda")
    roof = timing.roofline(device)
    session = Session(device, roof, args.results)
    print(f"{device_name(device)}: copies {roof.copy / 1e12:.3g} TB/s, matrix products {roof.gemm}")
    left = 60 * args.minutes - AT_END - (time.monotonic() - began)
    outcome = carry_out(session.steps(args.gates_only), left, save=session.save)
    print(summary(session, outcome))
    return 1 if session.red or outcome.failed else 0


class Session:
    """The result of one run, as its steps fill it."""

    def __init__(
        self,
        device: torch.device,
        roof: timing.Roofline,
        folder: Path | None,
        *,
        backend: str = "auto",
        sizes: gates.Sizes | None = None,
        telling: tuple[Case, ...] = TELLING,
    ) -> None:
        self.device, self.folder = device, folder
        self.backend, self.sizes, self.telling = backend, sizes, telling
        self.result = start_of_result("gpu", device, roof, os.cpu_count() or 1)
        self.result |= {"gates": [], "bytes": [], "sanitizer": []}
        self.path: Path | None = None
        self.uncountable = None if ncu.available() else "ncu is not on the path"

    @property
    def red(self) -> set[str]:
        """Ops with a gate that is red."""
        red = {gate["op"] for gate in self.result["gates"] if gate["wrong"]}
        red |= {f"all, by {found['tool']}" for found in self.result["sanitizer"] if found["errors"]}
        return red | {entry["op"] for entry in self.result["cases"] if entry["red"]}

    def steps(self, gates_only: bool = False) -> Iterator[Step]:
        """All that there is to do, the weightiest first."""
        there = cases.available()
        for op in there:
            yield Step(f"gates: {op}", GATES, lambda op=op: self.gates(op))
        yield from self._sanitizer_steps()
        if gates_only:
            return
        telling = [case for case in self.telling if case.op in there]
        for kind, guess, peers in (("timing", CASE, False), ("peers", PEERS, True)):
            for case in telling:
                yield Step(
                    f"{kind}: {case.op} {case.label}",
                    guess,
                    lambda case=case, peers=peers: self.time(case, peers),
                    lambda case=case: self._obstacle(case),
                )
        for case in telling:
            yield Step(
                f"bytes: {case.op} {case.label}",
                BYTES,
                lambda case=case: self.bytes(case),
                lambda case=case: self._obstacle(case) or self.uncountable,
            )

    def _sanitizer_steps(self) -> Iterator[Step]:
        absent = None if sanitizer.available() else "compute-sanitizer is not on the path"
        for tool in sanitizer.TOOLS:
            yield Step(
                f"sanitizer: {tool}",
                SANITIZER,
                lambda tool=tool: self.sanitize(tool),
                lambda: absent,
            )

    def _obstacle(self, case: Case) -> str | None:
        gated = {gate["op"] for gate in self.result["gates"]}
        if case.op in self.red:
            return "a gate is red"
        return None if case.op in gated else "its gates have not run"

    def gates(self, op: str) -> None:
        """Every check of an op; one that raises is red, and so is the op."""
        for check in gates.checks(op, self.device, self.backend, self.sizes):
            try:
                wrong = check.run()
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"[:500]
            self.result["gates"].append({"op": op, "check": check.name, "wrong": wrong})
            if wrong:
                print(f"RED {op}: {check.name}: {wrong}", flush=True)
            free(self.device)

    def time(self, case: Case, peers: bool) -> None:
        """A case; measured again, it takes the place of its first entry."""
        effort = Effort(ROUNDS, TIMING_SECONDS, memory=0, peers=peers)
        entry = measure(case, self.device, effort, self.backend)
        same = (entry["op"], entry["label"])
        kept = [e for e in self.result["cases"] if (e["op"], e["label"]) != same]
        self.result["cases"] = [*kept, entry]
        print("\n" + render(entry, device_name(self.device)), flush=True)
        free(self.device)

    def bytes(self, case: Case) -> None:
        """What Nsight Compute counts."""
        try:
            counted = ncu.count(case, timeout=3 * BYTES)
        except (ncu.Refused, subprocess.TimeoutExpired) as reason:
            self.uncountable = f"ncu cannot count here: {reason}"[:500]
            print(self.uncountable, flush=True)
            return
        self.result["bytes"].append({"op": case.op, "label": case.label, **counted})

    def sanitize(self, tool: str) -> None:
        """One pass of every kernel under a tool that looks for what no result shows."""
        found = sanitizer.check(tool, timeout=2 * SANITIZER)
        self.result["sanitizer"].append(found)
        print(f"{tool}: {found['errors']} errors", *found["first"], sep="\n", flush=True)

    def save(self, outcome: Outcome) -> None:
        """Writes the file with all there is so far."""
        self.result |= dataclasses.asdict(outcome)
        self.path = record.save(self.result, file_of(self.result, self.folder))


def summary(session: Session, outcome: Outcome) -> str:
    """The last lines: how many gates, what was left, where it is saved."""
    checked = session.result["gates"]
    green = sum(not gate["wrong"] for gate in checked)
    lines = [f"\n{green} of {len(checked)} gates are green"]
    lines += [f"failed: {name}: {why}" for name, why in outcome.failed.items()]
    lines += [f"left: {name}: {why}" for name, why in outcome.left.items()]
    lines.append(f"saved as {session.path}")
    return "\n".join(lines)
