"""`python -m benchmarks rollout`: useful tokens per second of the engine and of transformers' ways.

A gate comes first: greedy tokens equal to `model.generate`'s, log-probs equal to a plain forward's,
or there are no figures. Then the sides take turns, one whole rollout at a time. Useful are the
tokens within each sample's limit, whatever a side makes beyond them.

The result file: the header of `record.py`, and {"versions", "threads", "rollouts": [entries of
`measure`]}.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.before import rollout_gate, rollout_sides, suite, timing
from benchmarks.before.ops import pick_device
from benchmarks.before.peers import described
from benchmarks.before.rollout_cases import (
    Case,
    Workload,
    build,
    cases,
    kv_bytes,
    workload,
)
from benchmarks.before.rollout_sides import CONTINUOUS, GENERATE, Engine, Side
from benchmarks.before.rollout_tables import render
from fastrl.rollout.floor import weight_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks rollout`."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--case", metavar="TEXT", help="cases whose label contains TEXT")
    parser.add_argument("--rounds", type=int, default=7, help="counted rollouts of each side")
    parser.add_argument("--slots", type=int, metavar="N", help="instead of the cases' own")
    parser.add_argument("--threads", type=int, metavar="N", help="default: all cores")
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="begin no case that takes longer"
    )
    parser.add_argument("--no-peers", action="store_true", help="the engine alone")
    parser.add_argument("--no-save", action="store_true", help="write no result file")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="where result files go")


def run(args: argparse.Namespace) -> int:
    """Measure, print and save; 1 where a gate is red, 2 where the request is wrong."""
    device = pick_device(args.device)
    if device is None:
        print("no GPU here: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    if mistake := suite.wrong(args, "rounds", "slots", "threads"):
        print(mistake, file=sys.stderr)
        return 2
    return suite.run(
        args,
        device,
        cases(device.type, args.slots),
        start_of_result,
        "rollouts",
        lambda case: measure(case, device, args.rounds, peers=not args.no_peers),
        render,
    )


def start_of_result(device: torch.device, threads: int) -> dict[str, Any]:
    """A result without entries."""
    packages = ("torch", "triton", "transformers", "flash-attn")
    return suite.start_of_result("rollout", device, threads, "rollouts", *packages)


def measure(case: Case, device: torch.device, rounds: int, *, peers: bool = True) -> dict[str, Any]:
    """The case's entry in a result file; without times where the gate is red.

    {"label", "lengths", "case", "goal", "red", "absent": {side: why}, "useful": tokens per round,
     "weight_bytes": read in a step, "kv_bytes": read in a round, "copy": [bytes per second],
     "sides": {name: {"note", "seconds": [of a round]}}}; a side that is the engine's also has
    {"prefill", "decode": [seconds], "steps": of a round, "utilisation", "audit", "graphs": None or
     {"first", "later": {"captures", "capture_seconds", "replays"}}}.
    """
    work = workload(case)
    model = build(case.shape, device)
    entry: dict[str, Any] = {
        "label": case.label,
        "lengths": case.lengths,
        "case": {k: v for k, v in dataclasses.asdict(case).items() if k != "goal"},
        "goal": dataclasses.asdict(case.goal) if case.goal else None,
        "useful": work.useful,
        "weight_bytes": weight_bytes(model),
        "kv_bytes": kv_bytes(case, work),
        "copy": [],
        "sides": {},
        "absent": {},
        "red": None,
    }
    sides: dict[str, Side] = {}
    try:
        absent = entry["absent"] = _gate_tokens(model, entry, peers and case.all_peers)
        if entry["red"]:
            return entry
        sides |= rollout_sides.engines(model, case.slots)
        if peers:
            names = None if case.all_peers else (GENERATE,)
            found, missing = rollout_sides.peers(model, case.slots, work, names)
            absent |= missing
            sides |= {name: side for name, side in found.items() if name not in absent}
            for name in found.keys() & absent.keys():
                found[name].close()
        _warm_up(model, work, sides, entry)
        if not entry["red"]:
            _take_turns(sides, work, device, rounds, entry)
    finally:
        for side in sides.values():
            side.close()
    return entry


def _gate_tokens(model: Any, entry: dict[str, Any], peers: bool) -> dict[str, str]:
    """Greedy tokens: the engine's, whose difference is red, and those of a peer that schedules by
    itself, which is then absent."""
    exact = rollout_gate.in_fp32(model)
    short = rollout_gate.short_work(model.config.vocab_size)
    expected = rollout_gate.greedy_tokens(exact, short)
    entry["red"] = rollout_gate.wrong_tokens(exact, expected, short)
    if entry["red"] or not peers:
        return {}
    try:
        side = rollout_sides.continuous(exact, 2, short, greedy=True)
    except Exception:  # it will be said where the side is made for the case
        return {}
    try:
        wrong = rollout_gate.differing(exact, short, side.call(short), expected)
    except Exception as error:  # whatever it is, it is the peer's affair
        wrong = described(error)
    finally:
        side.close()
    return {CONTINUOUS: wrong} if wrong else {}


def _warm_up(model: Any, work: Workload, sides: dict[str, Side], entry: dict[str, Any]) -> None:
    """A first rollout of each side, uncounted, and what it shows: log-probs that are off are red,
    a peer that fails is absent."""
    for name, side in list(sides.items()):
        if isinstance(side.call, Engine):
            wrong = rollout_gate.wrong_lengths(side.call(work), work)
            audit = rollout_gate.audit(model, work, side.call.output)
            if wrong or audit.wrong:
                entry["red"] = f"{name}: {wrong or audit.wrong}"
                return
            entry["sides"][name] = {"note": side.note, "audit": audit._asdict()} | _first(side.call)
            continue
        try:
            wrong = rollout_gate.wrong_lengths(side.call(work), work)
        except Exception as error:
            wrong = described(error)
        if wrong:
            entry["absent"][name] = wrong
            sides.pop(name).close()
        else:
            entry["sides"][name] = {"note": side.note, "seconds": []}


def _first(engine: Engine) -> dict[str, Any]:
    """What an engine's first rollout says of all that follow."""
    stats = engine.output.stats
    graphs = _graphs(stats)
    return {
        "seconds": [],
        "prefill": [],
        "decode": [],
        "steps": int(stats["perf/decode_steps"]),
        "utilisation": stats["perf/slot_utilisation"],
        "graphs": {"first": graphs, "later": dict.fromkeys(graphs, 0.0)} if graphs else None,
    }


def _graphs(stats: dict[str, float]) -> dict[str, float]:
    prefix = "perf/graph_"
    return {k.removeprefix(prefix): v for k, v in stats.items() if k.startswith(prefix)}


def _take_turns(
    sides: dict[str, Side],
    work: Workload,
    device: torch.device,
    rounds: int,
    entry: dict[str, Any],
) -> None:
    for _ in range(rounds):
        entry["copy"].append(timing.roofline(device, ()).copy)
        for name, side in sides.items():
            begin = timing.now(device)
            side.call(work)
            taken = entry["sides"][name]
            taken["seconds"].append(timing.now(device) - begin)
            if isinstance(side.call, Engine):
                stats = side.call.output.stats
                for phase in ("prefill", "decode"):
                    taken[phase].append(stats[f"time/rollout/{phase}"])
                for key, value in _graphs(stats).items():
                    taken["graphs"]["later"][key] += value
