"""The figures of `python -m benchmarks support`: a plot, and tables in `docs/policy_support.md`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.experiments import write_newest
from benchmarks.markdown import table
from benchmarks.panels import Line, Panel, grid, legend, spread
from benchmarks.plots import COLOURS, document

NAME, ANSWERS, PAGE = "support", "answers", "policy_support.md"
SUPPORT_COLOURS = {"full": COLOURS["trl"], "sampled": COLOURS["fastrl"]}
WORDS = {"full": "all tokens", "sampled": "the sets"}
# What is judged, its title in the plot, its column in the table, and digits.
JUDGED = (
    ("outside", "probability that is left out", "left out", ".3f"),
    ("entropy", "entropy [nats per token]", "entropy [nats]", ".2f"),
    ("kl", "KL from the start [nats per token]", "KL from the start [nats]", ".2f"),
    ("reward", "reward", "reward", ".2f"),
)


def write(folder: Path, docs: Path) -> None:
    """Writes `plots/support.svg`, and the figures of `policy_support.md` where that page is, by the
    newest result file, if there is one; beside it the newest of `python -m benchmarks answers`."""
    theirs = results.newest_of(folder, ANSWERS)
    write_newest(folder, docs, NAME, PAGE, curves, lambda result: figures(result, theirs))


def figures(result: dict[str, Any], theirs: dict[str, Any] | None = None) -> str:
    """The tables: of ratios, of fastrl's samples and of vLLM's, and of what is judged before and
    after GRPO, means over the seeds with the least and the most of them."""
    settings, machine = result["settings"], result["machine"]["cpu"]
    head = ("drawn with", "tokens", "kept", "sampler's log-probs over", "trainer's over")
    head += ("mean ratio", "median", "outside [0.9, 1.1]")
    same = min(row["same_sets"] for row in result["ratios"])
    said = f"Ratios of a model with a vocabulary of {settings['vocabulary']}, {settings['width']} "
    said += f"wide, of {settings['layers']} layers. Of the recorded sets at least {same:.2%} are "
    said += "those that float64 takes."
    seeds = len({x["seed"] for x in result["curves"]})
    after = f"GRPO from there, {settings['steps']} steps of {settings['batch']} responses in groups"
    after += f" of {settings['group']} at a learning rate of {settings['rate']:g}; means of {seeds}"
    after += f" seeds, and their range; {machine}, {settings.get('threads', 1)} of its threads."
    parts = [table(head, _ratios(result)), said]
    if theirs is not None:
        version, same = theirs["versions"]["vllm"], min(x["same_sets"] for x in theirs["ratios"])
        answers = f"The same of answers of vLLM {version}, whose log-probs are over the sets that "
        answers += f"it drew from; {same:.2%} of the sets at least are those that float64 takes."
        parts += [answers, table(head, _ratios(theirs))]
    parts += [_learned(result), after]
    return "\n\n".join(parts)


def _ratios(result: dict[str, Any]) -> list[list[str]]:
    rows = []
    for row in result["ratios"]:
        first = [row["name"], str(row["tokens"]), f"{row['kept']:.3f}"]
        for of in row["ratios"] if row["kept"] < 1 else row["ratios"][-1:]:  # else all are one
            over = [WORDS[of["sampler"]], WORDS[of["trainer"]]]
            taken = [f"{of['mean']:.3f}", f"{of['median']:.3f}", f"{of['outside']:.1%}"]
            rows.append([*first, *over, *taken])
            first = ["", "", ""]
    return rows


def _learned(result: dict[str, Any]) -> str:
    rows = []
    for cut in dict.fromkeys(x["cut"] for x in result["curves"]):
        of_cut = [x for x in result["curves"] if x["cut"] == cut]
        begun = of_cut[0]["rows"][0]
        rows.append([cut, "before", *(f"{begun[name]:{digits}}" for name, *_, digits in JUDGED)])
        for support in dict.fromkeys(x["support"] for x in of_cut):
            last = [x["rows"][-1] for x in of_cut if x["support"] == support]
            cells = [spread([row[name] for row in last], digits) for name, *_, digits in JUDGED]
            rows.append(["", WORDS[support], *cells])
    return table(("drawn with", "log-probs over", *(title for *_, title, _ in JUDGED)), rows, 2)


def curves(result: dict[str, Any]) -> str:
    """The SVG: a row for each of what is judged, a column for each cut, a curve for each seed."""
    cuts = list(dict.fromkeys(x["cut"] for x in result["curves"]))
    panels = []
    for name, title, *_ in JUDGED:
        for cut in cuts:
            lines = [
                Line(SUPPORT_COLOURS[x["support"]], [(row["step"], row[name]) for row in x["rows"]])
                for x in result["curves"]
                if x["cut"] == cut
            ]
            panels.append(Panel(f"{cut}: {title}", "step", lines))
    drawn, high = grid(panels)
    drawn += legend({f"log-probs over {WORDS[x]}": SUPPORT_COLOURS[x] for x in SUPPORT_COLOURS})
    said = "GRPO on samples of top-p and top-k, with log-probs over all tokens and over the sets"
    return document(high, said, drawn)
