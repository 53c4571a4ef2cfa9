"""Plots of the result files, as SVG that comes out the same from the same figures."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.before import ppo_tables, reference_tables, rollout_tables, training
from benchmarks.before.dpo import DPO
from benchmarks.before.measure import OURS, speedups
from benchmarks.before.reference_cases import COPY, MODES
from benchmarks.before.sft import SFT
from benchmarks.before.tables import timed

OURS_COLOUR, PEER_COLOURS = "#2266aa", ("#999999", "#cc7722", "#669944", "#aa4466", "#8866bb")
MORE_COLOURS = (*PEER_COLOURS, "#33aaaa", "#555555")


def write(folder: Path, results: list[dict[str, Any]]) -> list[Path]:
    """The plots that a device's results allow; files that are there and no longer made go."""
    import matplotlib

    entries = [e for result in results for e in timed(result) if e["case"]["main"]]
    rollouts = [
        entry
        for result in results
        if result["benchmark"] == "rollout"
        for entry in rollout_tables.timed(result)
        if rollout_tables.peers_of(entry)
    ]
    references = [
        entry
        for result in results
        if result["benchmark"] == "reference"
        for entry in reference_tables.timed(result)
    ]
    iterations = [
        result
        for result in results
        if result["benchmark"] == "ppo" and any(map(ppo_tables.timed, ppo_tables.cases_of(result)))
    ]
    epochs = {result["benchmark"]: result for result in results}
    made = []
    with matplotlib.rc_context(
        # Ids from the content and text as text: nothing depends on the run.
        {"svg.hashsalt": "fastrl", "svg.fonttype": "none", "font.size": 9, "axes.axisbelow": True}
    ):
        if entries:
            made.append(_save(folder / "speed.svg", _speed(entries)))
            made.append(_save(folder / "memory.svg", _memory(entries)))
        if iterations:
            made.append(_save(folder / "ppo.svg", _ppo(iterations[-1])))
        for each in (SFT, DPO):
            if each.name in epochs:
                figure = _training(each, epochs[each.name])
                made.append(_save(folder / f"{each.name}.svg", figure))
        if rollouts:
            made.append(_save(folder / "rollout.svg", _rollout(rollouts)))
        if references:
            made.append(_save(folder / "reference.svg", _reference(references)))
    for path in folder.glob("*.svg"):
        if path not in made:
            path.unlink()
    return made


def _save(path: Path, figure: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(
        path, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": "fastrl"}
    )
    text = path.read_text()
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
    return path


def _figure(rows: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # no pyplot: nothing is shown, nothing stays open

    figure = Figure(figsize=(8, 0.8 + 0.42 * rows))
    return figure, figure.subplots()


def _title(entry: dict[str, Any]) -> str:
    return f"{entry['op']}\n{entry['label']}"


def _colours(names: list[str]) -> dict[str, str]:
    return {name: PEER_COLOURS[i % len(PEER_COLOURS)] for i, name in enumerate(names)}


def _peers(entries: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(n for e in entries for n in e["implementations"] if n != OURS))


def _bars(axes: Any, groups: list[tuple[str, dict[str, float]]], colours: dict[str, str]) -> None:
    """A group of horizontal bars for each title, from the top down, each with its name's colour."""
    ticks, row, named = [], 0.0, set()
    for title, bars in groups:
        ticks.append((row + (len(bars) - 1) / 2, title))
        for name, value in bars.items():
            label = name if name not in named else None
            named.add(name)
            axes.barh(row, value, height=0.8, color=colours[name], label=label)
            written = f" {value:.0f}" if value >= 1000 else f" {value:.3g}"
            axes.annotate(written, (value, row), va="center", fontsize=8)
            row += 1
        row += 0.7
    axes.set_yticks([y for y, _ in ticks], [title for _, title in ticks])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)


def _speed(entries: list[dict[str, Any]]) -> Any:
    groups = []
    for entry in entries:
        peers = [name for name in entry["implementations"] if name != OURS]
        if peers:
            bars = {name: statistics.median(speedups(entry, name)) for name in peers}
            groups.append((_title(entry), bars))
    figure, axes = _figure(sum(len(bars) + 1 for _, bars in groups))
    axes.axvline(1.0, color=OURS_COLOUR, label=OURS)
    _bars(axes, groups, _colours(_peers(entries)))
    axes.set_xscale("log")
    axes.set_xlabel("device time of the peer / device time of fastrl")
    return figure


def _memory(entries: list[dict[str, Any]]) -> Any:
    groups = [
        (
            _title(entry),
            {
                name: max(taken["memory"]["peak"], 1) / 2**20
                for name, taken in entry["implementations"].items()
            },
        )
        for entry in entries
    ]
    figure, axes = _figure(sum(len(bars) + 1 for _, bars in groups))
    _bars(axes, groups, {OURS: OURS_COLOUR, **_colours(_peers(entries))})
    axes.set_xscale("log")
    axes.set_xlabel("peak memory above inputs and returned gradients [MiB]")
    return figure


def _ppo(result: dict[str, Any]) -> Any:
    """For each shape the phases with the first reference that has figures, and the iteration with
    others."""
    sides = {"fastrl": "fastrl", "peer": result["peer"]}
    cases = ppo_tables.cases_of(result)
    shown = []
    for case in cases:
        shape = f"{case['shape']['name']}\n" if len(cases) > 1 else ""
        titles = {name: f"{shape}{phase}" for name, phase in ppo_tables.PHASES.items()}
        for i, entry in enumerate(ppo_tables.timed(case)):
            if i == 0:
                shown += [(titles[name], entry["phases"][name]) for name in titles]
                continue
            title = f"{titles['iteration']},\nreference {entry['reference']}"
            shown.append((title, entry["phases"]["iteration"]))
    groups = [
        (title, {name: statistics.median(phase[side]) for side, name in sides.items()})
        for title, phase in shown
    ]
    figure, axes = _figure(3 * len(shown))
    _bars(axes, groups, {"fastrl": OURS_COLOUR, result["peer"]: PEER_COLOURS[0]})
    axes.set_xlabel("seconds of one PPO iteration, median")
    return figure


def _training(which: training.Training, result: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure

    peer, runs = result["peer"], training.runs_of(result)
    speed, memory = [], []
    for run in runs:
        sides = {"fastrl": run["sides"]["fastrl"], peer: run["sides"]["peer"]}
        title = f"reference\n{run['reference']}" if "reference" in run else ""
        count = result[which.unit]
        speed.append(
            (title, {n: count / statistics.median(s["seconds"]) for n, s in sides.items()})
        )
        memory.append((title, {name: side["peak"] / 2**20 for name, side in sides.items()}))
    figure = Figure(figsize=(8, 0.6 + 1.2 * len(runs)), layout="constrained")
    # Side by side: rates and bytes have no axis in common.
    for axes, groups, label in zip(
        figure.subplots(1, 2),
        (speed, memory),
        (f"{which.unit} per second, median", "peak memory above weights [MiB]"),
        strict=True,
    ):
        _bars(axes, groups, {"fastrl": OURS_COLOUR, peer: PEER_COLOURS[0]})
        axes.set_xlabel(label)
    return figure


def _rollout(entries: list[dict[str, Any]]) -> Any:
    groups = []
    for entry in entries:
        name, rest = entry["label"].split(": ", 1)
        peers = rollout_tables.peers_of(entry)
        bars = {n: statistics.median(rollout_tables.speedups(entry, n)) for n in peers}
        groups.append((f"{name}\n{rest}", bars))
    figure, axes = _figure(sum(len(bars) + 1 for _, bars in groups))
    axes.axvline(1.0, color=OURS_COLOUR, label=OURS)
    names = list(dict.fromkeys(name for _, bars in groups for name in bars))
    _bars(axes, groups, _colours(names))
    axes.set_xlabel("seconds of the peer / seconds of fastrl, whole rollouts")
    return figure


def _reference(entries: list[dict[str, Any]]) -> Any:
    names = [n for n in MODES if n != COPY and any(n in entry["sides"] for entry in entries)]
    groups = [
        (
            f"{entry['case']['shape']['name']}\n{phase}",
            {
                name: statistics.median(reference_tables.speedups(entry, name, phase))
                for name in names
                if name in entry["sides"]
            },
        )
        for entry in entries
        for phase in reference_tables.PHASES
    ]
    figure, axes = _figure(sum(len(bars) + 1 for _, bars in groups))
    axes.axvline(1.0, color=OURS_COLOUR, label=COPY)
    _bars(axes, groups, dict(zip(names, MORE_COLOURS, strict=False)))
    axes.set_xlabel("seconds with a copy / seconds with the reference kept otherwise")
    return figure
