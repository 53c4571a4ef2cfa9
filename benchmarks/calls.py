"""`python -m benchmarks calls`: a model that was trained on nothing, and tools that it has to call.

It is kept as a result file, drawn, and written into `docs/response_format.md`; `report` does these
two anew. The runs are those of `examples/grpo_calls.py`, with ``tool_choice="required"`` and
without it.
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT, results
from benchmarks.experiments import add_places, write_newest
from benchmarks.markdown import table
from benchmarks.panels import Line, Panel, grid, legend, spread
from benchmarks.plots import COLOURS, document

NAME, PAGE = "calls", "response_format.md"
SEEDS = (0, 1)
ARMS = {"required": COLOURS["fastrl"], "auto": COLOURS["trl"]}
# What is shown, its name in the trainer's log, and its title.
SHOWN = (
    ("valid", "rewards/valid/mean", "responses with a valid call"),
    ("reward", "reward", "reward"),
)


def write(folder: Path, docs: Path) -> None:
    """Writes `plots/calls.svg` and the figures of `response_format.md`, where that page is, by the
    newest result file, if there is one."""
    write_newest(folder, docs, NAME, PAGE, curves, figures)


def figures(result: dict[str, Any]) -> str:
    """The table: means over the seeds, with the least and the most of them."""
    rows = []
    for arm in ARMS:
        logs = [run["rows"] for run in result["runs"] if run["arm"] == arm]
        for title, at in (("first step", 0), ("last step", -1)):
            cells = [spread([log[at][name] for log in logs], ".2f") for name, *_ in SHOWN]
            rows.append([f'`"{arm}"`' if title == "first step" else "", title, *cells])
    head = ("`tool_choice`", "", *(title for *_, title in SHOWN))
    said = f"{result['settings']['steps']} steps of GRPO, {len(result['settings']['seeds'])} seeds"
    return f"{table(head, rows, 2)}\n\n{said}; {result['machine']['cpu']}, one thread."


def curves(result: dict[str, Any]) -> str:
    """The SVG: a panel for each of what is shown, a curve for each run."""
    panels = []
    for name, _, title in SHOWN:
        lines = [
            Line(ARMS[run["arm"]], [(row["step"], row[name]) for row in run["rows"]])
            for run in result["runs"]
        ]
        panels.append(Panel(title, "step", lines))
    drawn, high = grid(panels)
    drawn += legend({f"tool_choice: {arm}": colour for arm, colour in ARMS.items()})
    return document(high, "GRPO from random weights with tools, calls required and not", drawn)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks calls`."""
    add_places(parser, NAME, SEEDS)
    parser.add_argument("--steps", type=int, default=40, help="of GRPO")


def run(args: argparse.Namespace) -> int:
    """Runs all of it on one thread, keeps what was measured, and writes it."""
    torch.set_num_threads(1)
    example = runpy.run_path(str(ROOT / "examples" / "grpo_calls.py"))
    result = results.start_of_result(NAME, torch.device("cpu"))
    result["versions"] = results.versions("fastrl-lm", "torch", "transformers", "llguidance")
    result["settings"] = {"steps": args.steps, "seeds": list(args.seeds)}
    result["runs"] = []
    for seed in args.seeds:
        for arm in ARMS:
            logs = example["train"](str(args.folder), arm == "auto", seed, args.steps)
            rows = [
                {"step": i, **{name: log[key] for name, key, _ in SHOWN}}
                for i, log in enumerate(logs, 1)
            ]
            result["runs"].append({"arm": arm, "seed": seed, "rows": rows})
            print(f"{arm}, seed {seed}: {rows[0]} → {rows[-1]}", flush=True)
    results.save(result, args.results)
    write(args.results, args.docs)
    return 0
