"""`python -m benchmarks report`: renders result files as tables and plots, or compares two of them.

`benchmarks/NOTES.md` and the plots below `docs/plots/` are written whole; in `docs/benchmarks.md`
and the project's `README.md` only what lies between `<!-- figures:begin -->` and
`<!-- figures:end -->`. Nothing else writes figures there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import ROOT, calls, curves, distilled_figures, old_results, predict, support_figures
from benchmarks.cases import (
    OURS,
    Entry,
    duration,
    durations,
    faster,
    own,
    phase_of,
    rooflines,
    size,
    spread,
    verdicts,
)
from benchmarks.markdown import BEGIN, END, filled, table
from benchmarks.plots import plots
from benchmarks.results import RESULTS, WAIT_POLICY, Result, device_of
from benchmarks.terminal import compared, speeds
from benchmarks.tunables import TUNABLES

PAGES = "README.md", "docs/benchmarks.md"  # with a short table, and with all of them
TITLES = {
    "ppo": "A PPO iteration",
    "grpo": "A GRPO step",
    "sft": "Supervised fine-tuning",
    "dpo": "Direct preference optimization",
    "scripts": "TRL 1.x scripts with fastrl's trainers or rollouts",
    "rollout": "Rollouts",
    "cuts": "Draws from a part of the vocabulary",
    "ref_model": "Kinds of PPO's reference",
    "run": "Cost of what a run writes",
    "plan": "Memory plans and the profiler's sum of allocations",
    "ops": "Single ops",
}
HEADLINES = ("ppo", "grpo", "sft", "dpo", "rollout")  # in the project's README


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks report`."""
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"))


def run(args: argparse.Namespace) -> int:
    """Writes all of it; 1 where there is nothing to write or no place for it."""
    if args.compare:
        print("\n".join(compared(*(read(path) for path in args.compare))))
        return 0
    devices = newest(args.results)
    if not devices:
        print(f"no result files in {args.results}", file=sys.stderr)
        return 1
    pages = {path: path.read_text() for path in map(args.root.joinpath, PAGES)}
    for path, text in pages.items():
        if BEGIN not in text or END not in text:
            print(f"{path} lacks {BEGIN} … {END}", file=sys.stderr)
            return 1
    docs = args.root / "docs"
    sections = []
    for device, results in devices.items():
        made = plots(docs / "plots" / device, results, TITLES, HEADLINES)
        pictures = [(path.relative_to(docs), said) for path, said in made]
        sections.append(section(device, results, pictures))
    curves.draw(args.results, docs / "plots")
    distilled_figures.write(args.results, docs)
    support_figures.write(args.results, docs)
    calls.write(args.results, docs)
    predict.fill_file(args.results)
    predicted = predict.section(predict.read(args.results / predict.FILE))
    parts = [missing(devices), *sections, predicted]
    figures = (brief(devices), "\n\n".join(part for part in parts if part))
    for (path, text), written in zip(pages.items(), figures, strict=True):
        path.write_text(filled(text, written))
    (args.root / "benchmarks" / "NOTES.md").write_text(notes_on_tunables(devices))
    return 0


def newest(folder: Path) -> dict[str, list[Result]]:
    """The newest result of each benchmark, and of each op, by the name of the device."""
    latest: dict[tuple[str, str, str], tuple[tuple[str, str], Result]] = {}
    for path in sorted(folder.glob("*/*.json")):
        if (result := read(path)) is None:
            continue
        names = {e["name"] for e in result["entries"]} if result["benchmark"] == "ops" else {""}
        for name in names or {""}:
            key = path.parent.name, result["benchmark"], name
            age = result["date"], result.get("time", "")
            if key not in latest or age > latest[key][0]:
                latest[key] = (age, result)
    order = [*TITLES, "tune"]
    devices: dict[str, list[Result]] = {}
    for key in sorted(latest, key=lambda key: (key[0], order.index(key[1]), key[2])):
        device, _, name = key
        result = latest[key][1]
        if name:
            kept = [entry for entry in result["entries"] if entry["name"] == name]
            result = {**result, "entries": kept}
        devices.setdefault(device, []).append(result)
    return devices


def read(path: Path) -> Result | None:
    """A result file of any form; None where it is of no benchmark."""
    result = json.loads(path.read_text())
    if "entries" not in result:
        return old_results.converted(result)
    return result if result["benchmark"] in (*TITLES, "tune") else None


def brief(devices: dict[str, list[Result]]) -> str:
    """The project's README: a figure of each benchmark that has a headline."""
    parts = []
    for results in devices.values():
        shown = []
        for result in results:
            timed = [e for e in result["entries"] if len(e["sides"]) > 1 and not e["red"]]
            if result["benchmark"] in HEADLINES and timed:
                shown.append((result, timed[0]))
        # Machines that are called alike may have had different processors.
        found = list(dict.fromkeys(processor(result) for result, _ in shown))
        marks = {name: f"({i})" if len(found) > 1 else "" for i, name in enumerate(found, start=1)}
        rows = [_headline(result, entry, marks[processor(result)]) for result, entry in shown]
        head = ("benchmark", "fastrl", "peer", "", "speed-up", "memory, relative to the peer's")
        if rows:
            where = ", ".join(f"{mark} {name}".strip() for name, mark in marks.items())
            where = f"On {where}; medians of alternating rounds (range):"
            parts.append(f"{where}\n\n{table(head, rows)}")
    return "\n\n".join([*parts, missing(devices)]).rstrip()


def _headline(result: Result, entry: Entry, mark: str) -> list[str]:
    peer = next(name for name in entry["sides"] if name != OURS)
    ours, theirs = entry["sides"][OURS], entry["sides"][peer]
    share = "–"
    if "peak" in ours["memory"] and "peak" in theirs["memory"]:
        share = f"{ours['memory']['peak'] / theirs['memory']['peak']:.2f}"
    title = f"{TITLES[result['benchmark']]}: {entry['name']}, {entry['label']} {mark}".rstrip()
    taken = [duration(statistics.median(phase_of(side))) for side in (ours, theirs)]
    return [title, taken[0], peer, taken[1], spread(faster(entry, peer), ".2f"), share]


def section(device: str, results: list[Result], pictures: list[tuple[Path, str]]) -> str:
    """All there is on a device."""
    parts = [f"## {device}"]
    parts += [f"![{said}]({path})" for path, said in pictures]
    for benchmark, title in TITLES.items():
        found = [result for result in results if result["benchmark"] == benchmark]
        if not found:
            continue
        parts.append(f"### {title}")
        parts += dict.fromkeys(provenance(result) for result in found)
        entries = [(result, entry) for result in found for entry in result["entries"]]
        parts += [full_table(entries), checks(found[0]), "\n".join(remarks(found))]
    return "\n\n".join(part.rstrip() for part in parts if part)


def provenance(result: Result) -> str:
    """When, of which commit, on what versions, beside which roofline."""
    found = result["versions"]
    by_side = found if any(isinstance(x, dict) for x in found.values()) else {"": found}
    said = [f"{result['date']}, commit {result['commit']}, {processor(result)}"]
    if roof := result.get("roofline"):
        gemm = ", ".join(f"{x / 1e12:.3g} in {dtype}" for dtype, x in of_fastest(roof["gemm"]))
        said.append(f"copies {roof['copy'] / 1e9:.3g} GB/s, matrix products [TFLOP/s] {gemm}")
    for side, versions in by_side.items():
        named = ", ".join(f"{name} {version}" for name, version in versions.items())
        said.append(f"{side}: {named}" if side else named)
    return "; ".join(said) + "."


def full_table(entries: list[tuple[Result, Entry]]) -> str:
    """A row for each side of each case: seconds of each phase and by how much fastrl is the faster,
    memory, the share of the roofline, and the goals."""
    shown = [(result, entry) for result, entry in entries if not entry["red"]]
    sides = [side for _, entry in shown for side in entry["sides"].values()]
    phases = list(dict.fromkeys(phase for side in sides for phase in side["seconds"]))
    kinds = list(dict.fromkeys(kind for side in sides for kind in side["memory"]))
    facts = list(dict.fromkeys(fact for side in sides for fact in side["facts"]))
    rates = {e["units"][0] for _, e in shown if e["units"]}
    limited = any(side["limit"] for side in sides)
    head = ["case", "side", *phases, *(f"{unit}/s" for unit in sorted(rates))]
    head += [f"memory, {kind}" for kind in kinds] + ["of the roofline"] * limited + facts + ["goal"]
    rows = []
    for result, entry in shown:
        base = own(entry)
        for i, (name, side) in enumerate(entry["sides"].items()):
            cells = [f"`{entry['name']}` {entry['label']}" if i == 0 else "", name]
            for phase in phases:
                cells.append(durations(side["seconds"][phase]) if phase in side["seconds"] else "")
                if cells[-1] and name != base and phase in entry["sides"][base]["seconds"]:
                    cells[-1] += f": **{spread(faster(entry, name, phase), '.2f', '×')}**"
            for _ in rates:
                seconds = statistics.median(phase_of(side))
                rate = entry["units"][1] / seconds
                cells.append(f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}")
            cells += [size(side["memory"][k]) if k in side["memory"] else "" for k in kinds]
            if limited:
                share = side["limit"] and f"{statistics.median(rooflines(entry, name)):.0%}"
                cells.append(share or "")
            cells += [f"{side['facts'][f]:.3g}" if f in side["facts"] else "" for f in facts]
            found = verdicts(entry, device_of(result)) if i == 0 else []
            cells.append("; ".join(f"{g}: {'reached' if ok else '**missed**'}" for g, ok in found))
            rows.append(cells)
    return table(head, rows, left=2)


def remarks(results: list[Result]) -> Iterator[str]:
    """Lines on what a table does not show: what is measured, notes, absentees, red gates, what
    there was no time for."""
    said = []
    for result in results:
        for entry in result["entries"]:
            case = f"{entry['name']} {entry['label']}"
            if entry["red"]:
                said.append(f"- No figures for {case}: {entry['red']}")
            if entry["what"]:
                said.append(f"- {entry['name']}: {entry['what']}.")
            said += [f"- {n}: {s['note']}." for n, s in entry["sides"].items() if s["note"]]
            said += [f"- {case}: {remark}." for remark in entry["remarks"]]
            said += [f"- {case}, GFLOP/s of {speeds(roof)}." for roof in entry.get("roofs", ())]
            said += [f"- Absent, {name}: {why}." for name, why in entry["absent"].items()]
        said += [f"- Left, {name}: {why}." for name, why in result["left"].items()]
    yield from dict.fromkeys(said)


def of_fastest(gemm: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The flops per second of each dtype, of the fastest provider where there are several."""
    for dtype, found in gemm.items():
        yield dtype, max(found.values()) if isinstance(found, dict) else found


def checks(result: Result) -> str:
    """What a GPU's checks of the kernels found, the sanitizer and the counter of bytes."""
    lines = []
    if gates := result.get("gates"):
        green = sum(not gate["wrong"] for gate in gates)
        lines.append(f"- {green} of {len(gates)} checks of the kernels are green.")
        lines += [f"- Red: `{g['op']}`, {g['check']}: {g['wrong']}" for g in gates if g["wrong"]]
    for found in result.get("sanitizer", ()):
        lines.append(f"- compute-sanitizer, {found['tool']}: {found['errors']} errors.")
    least = {(e["name"], e["label"]): e["work"] for e in result["entries"] if e["work"]}
    for counted in result.get("bytes", ()):
        moved = counted["read"] + counted["written"]
        if work := least.get((counted["op"], counted["label"])):
            lines.append(
                f"- `{counted['op']}` {counted['label']}: {size(moved)} in {counted['kernels']} "
                f"kernels, {moved / work['bytes']:.3f} of the least bytes (Nsight Compute)."
            )
    return "\n".join(lines)


def missing(devices: dict[str, list[Result]]) -> str:
    """Which figures there are not: no GPU at all, or benchmarks that a device lacks."""
    on_gpu = [d for d, results in devices.items() if "accelerator" in results[0]["machine"]]
    lines = [] if on_gpu else ["No GPU has been measured yet."]
    if len(on_gpu) == len(devices):
        lines.append("No machine without a GPU has been measured yet.")
    for device, results in devices.items():
        there = {result["benchmark"] for result in results}
        if lacking := [name for name in TITLES if name not in there]:
            lines.append(f"Not measured yet on {device}: {', '.join(lacking)}.")
    return " ".join(lines)


def processor(result: Result) -> str:
    """The accelerator, or the processor and the threads that were used, and how they wait where
    that was said."""
    machine = result["machine"]
    policy = machine.get("wait_policy")
    waiting = f", {WAIT_POLICY}={policy}" if policy else ""
    return machine.get("accelerator", f"{machine['cpu']}, threads: {result['threads']}{waiting}")


def notes_on_tunables(devices: dict[str, list[Result]]) -> str:
    """`NOTES.md`: every prediction, and beside it what was measured on each device."""
    parts = [
        "# What should make the kernels faster, and what did",
        "Written by `python -m benchmarks report`; predictions are made in `tunables.py`, before "
        "`python -m benchmarks gpu --only tune` measures them. A value is taken over where it is "
        "faster in every round and every case of its ops, and the checks stay green.",
    ]
    for tunable in TUNABLES:
        parts.append(f"## {tunable.name}: {tunable.what}\n\nPredicted: {tunable.predicted}")
        found = [
            table(
                (f"{device}: `{entry['name']}` {entry['label']}", "device time", "× the speed now"),
                [
                    [name, durations(phase_of(side)), spread(faster(entry, name), ".3f")]
                    for name, side in entry["sides"].items()
                ]
                + [[name, "–", why] for name, why in entry["absent"].items()],
            )
            for device, results in devices.items()
            for result in results
            if result["benchmark"] == "tune"
            for entry in result["entries"]
            if entry["tunable"] == tunable.name
        ]
        parts += found or ["Measured: not yet."]
    return "\n\n".join(parts) + "\n"
