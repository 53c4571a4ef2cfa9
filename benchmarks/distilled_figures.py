"""The figures of `python -m benchmarks distilled`: a plot, and tables in `docs/distillation.md`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.experiments import write_newest
from benchmarks.markdown import table
from benchmarks.panels import Line, Panel, grid, legend, spread
from benchmarks.plots import COLOURS, document

NAME, START = "distilled", "start"
ARM_COLOURS = {START: COLOURS["eager"], "distillation": COLOURS["fastrl"], "SFT": COLOURS["trl"]}
ARM_COLOURS |= {"no teacher": COLOURS["torch.compile"]}
LEARNED = {"distillation": "; sums that are learned", "SFT": "; sums held out"}


def write(folder: Path, docs: Path) -> None:
    """Writes `plots/distilled.svg` and the figures of `distillation.md` by the newest result file,
    if there is one."""
    write_newest(folder, docs, NAME, "distillation.md", curves, figures)


def figures(result: dict[str, Any]) -> str:
    """The tables: means over the seeds, and the least and the most of them."""
    seeds, arms = result["teacher"], []
    for name in result["rates"]:
        first, last = ([seed[name][i] for seed in seeds] for i in (0, -1))
        fell = [1 - y["kl"] / x["kl"] for x, y in zip(first, last, strict=True)]
        cells = [spread([row["kl"] for row in last], ".3f"), spread(fell, ".0%")]
        cells += [spread([row[x] for row in last], digits) for x, digits in _BESIDE]
        arms.append([f"{name}, {result['rates'][name]:g}", *cells])
    first = [seed[START][-1] for seed in seeds]
    before = [spread([row["kl"] for row in first], ".3f"), ""]
    before += [spread([row[x] for row in first], digits) for x, digits in _BESIDE]
    arms.insert(0, ["before", *before])
    head = ("learned by, at a learning rate of", "KL [nats per response]", "fallen by")
    parts = [table((*head, "reward", "tokens"), arms)]
    rows = [
        [str(i), *(f"{row[x]:.2f}" for x in ("learned", "held_out") for row in (rows[0], rows[-1]))]
        for i, rows in enumerate(result["hints"])
    ]
    head = ("seed", "learned sums, before", "after", "held out, before", "after")
    parts.append(table(head, rows))
    said = f"{result['machine']['cpu']}, one thread, {result['seconds']['arm']:g} seconds of the "
    said += f"processor for each arm; means of {len(seeds)} seeds, and their range."
    return "\n\n".join([parts[0], said, parts[1]])


_BESIDE = ("reward", ".2f"), ("tokens", ".1f")


def curves(result: dict[str, Any]) -> str:
    """The SVG: KL of the SFT that all begin with, KL and reward of the arms, answers with hints."""
    seeds, arms = result["teacher"], list(result["rates"])

    def lines(names: Sequence[str], x: str, y: str) -> Iterator[Line]:
        for name in names:
            for seed in seeds:
                rows = seed[name][1:] if name == START else seed[name]  # new weights: no samples
                yield Line(ARM_COLOURS[name], [(row[x], row[y]) for row in rows])

    hints = [
        Line(ARM_COLOURS[colour], [(row["step"], row[name]) for row in rows])
        for name, colour in (("learned", "distillation"), ("held_out", "SFT"))
        for rows in result["hints"]
    ]
    kl = "KL(student‖teacher), nats per response"
    panels = (
        Panel(
            "SFT from new weights: " + kl, "seconds", list(lines([START], "seconds", "kl")), True
        ),
        Panel("from there: " + kl, "seconds", list(lines(arms, "seconds", "kl")), True),
        Panel("reward", "seconds", list(lines(arms, "seconds", "reward"))),
        Panel("right answers, learned from hints", "step", hints),
    )
    drawn, high = grid(panels)
    named = {name + LEARNED.get(name, ""): ARM_COLOURS[name] for name in result["rates"]}
    drawn += legend(named)
    said = "What a student learns of a teacher by distillation, SFT and neither, and of itself"
    return document(high, said, drawn)
