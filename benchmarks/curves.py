"""`python -m benchmarks curves RUN`: keeps what a run of `fastrl demo` measured at each step, as a
result file, and draws it; `report` draws it anew."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT, results
from benchmarks.plots import COLOURS, document, text

NAME = "demo"
SAMPLED, HELD_OUT = COLOURS["eager"], COLOURS["fastrl"]
LEFT, TOP, WIDE, HIGH, NEXT = 40, 44, 296, 170, 372
# Of each panel: its title, the statistics of the samples and of held-out prompts, the error's.
PANELS = (
    ("reward", "ppo/mean_scores", "eval/reward_mean", "eval/reward_sem"),
    ("KL from the reference, nats per sequence", "objective/kl", "eval/kl", None),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks curves`."""
    parser.add_argument("run", type=Path, help="folder of a finished `fastrl demo`")
    parser.add_argument("--results", type=Path, default=results.RESULTS, metavar="FOLDER")
    parser.add_argument("--plots", type=Path, default=ROOT / "docs" / "plots")


def run(args: argparse.Namespace) -> int:
    """Keeps the curves and draws them."""
    kept = {"step", *(name for _, *names in PANELS for name in names)}
    lines = (args.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [{k: v for k, v in json.loads(line).items() if k in kept} for line in lines]
    settings = json.loads((args.run / "run.json").read_text(encoding="utf-8"))
    result = results.start_of_result(NAME, torch.device("cpu"))
    results.save(result | {"settings": settings["settings"], "metrics": rows}, args.results)
    draw(args.results, args.plots)
    return 0


def draw(folder: Path, plots: Path) -> None:
    """`demo.svg` of the newest result file, if there is one."""
    if (newest := results.newest_of(folder, NAME)) is not None:
        (plots / f"{NAME}.svg").write_text(curves(newest), encoding="utf-8")


def curves(result: dict[str, Any]) -> str:
    """The SVG: reward and KL by step, of the samples that are learned from and of held-out
    prompts, with the standard error."""
    rows = result["metrics"]
    steps = max(row["step"] for row in rows)
    drawn = []
    for i, (title, sampled, held_out, error) in enumerate(PANELS):
        drawn += _panel(LEFT + i * NEXT, title, rows, steps, sampled, held_out, error)
    x = LEFT
    for colour, words in ((SAMPLED, "the samples of a step"), (HELD_OUT, "held-out prompts")):
        drawn.append(f'<circle cx="{x + 4}" cy="8" r="4.5" fill="{colour}"/>')
        drawn.append(text(x + 14, 12, words))
        x += 160
    said = "fastrl demo: mean reward and KL from the reference at each step of PPO"
    return document(TOP + HIGH + 36, said, drawn)


def _panel(
    left: int, title: str, rows: list[dict[str, Any]], steps: int, sampled: str, held_out: str,
    error: str | None,
) -> list[str]:  # fmt: skip
    values = [row[name] for row in rows for name in (sampled, held_out) if name in row]
    unit = 0.5
    low, high = unit * math.floor(min(values) / unit), unit * math.ceil(max(values) / unit)

    def at(step: float, value: float) -> tuple[float, float]:
        return left + WIDE * step / steps, TOP + HIGH * (high - value) / (high - low)

    drawn = [text(left, TOP - 12, title, "bold")]
    for i in range(round((high - low) / unit) + 1):
        value = low + i * unit
        y = at(0, value)[1]
        drawn.append(f'<path class="grid" d="M{left} {y:.1f}h{WIDE}"/>')
        drawn.append(text(left - 8, y + 4, f"{value:g}", "faint", "end"))
    for step in range(0, steps + 1, max(1, steps // 5)):
        drawn.append(text(at(step, low)[0], TOP + HIGH + 16, str(step), "faint", "middle"))
    drawn.append(text(left + WIDE / 2, TOP + HIGH + 32, "step", "faint", "middle"))
    line = [at(row["step"], row[sampled]) for row in rows if sampled in row]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in line)
    drawn.append(f'<path d="M{path}" fill="none" stroke="{SAMPLED}" stroke-width="1.5"/>')
    for row in rows:
        if held_out in row:
            x, y = at(row["step"], row[held_out])
            if error:
                half = HIGH * row[error] / (high - low)
                ends = f'd="M{x:.1f} {y - half:.1f}v{2 * half:.1f}"'
                drawn.append(f'<path {ends} stroke="{HELD_OUT}" stroke-width="1.5"/>')
            drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{HELD_OUT}"/>')
    return drawn
