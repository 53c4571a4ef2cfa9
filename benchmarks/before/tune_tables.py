"""What was measured of the kernels' knobs: for a terminal, and with the predictions in NOTES.md."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.before import timing
from benchmarks.before.knobs import KNOBS, Knob
from benchmarks.before.measure import LIMIT, duration, spread_of_durations

Result = dict[str, Any]


def against_now(entry: dict[str, Any], value: str) -> list[float]:
    """The present value's seconds over another's, round by round: above 1, it would be faster."""
    values = entry["values"]
    return timing.ratios(values[entry["now"]]["seconds"], values[value]["seconds"])


def render(knob: Knob, entry: dict[str, Any], device: str) -> str:
    """A case's lines for a terminal."""
    lines = [f"{knob.name} ({knob.what}), {entry['op']} {entry['label']}, {device}"]
    for value, found in entry["values"].items():
        name = knob.told(int(value)) + (" (now)" if value == entry["now"] else "")
        if "absent" in found:
            lines.append(f"  {name:<16}{found['absent']}")
            continue
        ratio = ""
        if value != entry["now"] and "seconds" in entry["values"].get(entry["now"], {}):
            ratio = f"{timing.spread(against_now(entry, value), '.3f')}× its speed now"
        lines.append(f"  {name:<16}{spread_of_durations(found['seconds']):>28}  {ratio}")
    lines.append(f"  {LIMIT:<16}{spread_of_durations(entry['limit']):>28}")
    return "\n".join(lines)


def notes(devices: dict[str, Result]) -> str:
    """`NOTES.md`: every prediction, and beside it what was measured on each device."""
    parts = [
        "# What should make the kernels faster, and what did",
        "Written by `python -m benchmarks report`; predictions are made in `knobs.py`, before "
        "`python -m benchmarks tune` measures them. A value is taken over where it is faster in "
        "every round and every case of its ops, and the gates stay green.",
    ]
    for knob in KNOBS:
        parts.append(f"## {knob.name}: {knob.what}\n\nPredicted: {knob.predicted}")
        tables = [
            _outcome(knob, device, entry)
            for device, result in devices.items()
            for found in result["knobs"]
            if found["name"] == knob.name
            for entry in found["cases"]
        ]
        parts += tables or ["Measured: not yet."]
    return "\n\n".join(parts) + "\n"


def _outcome(knob: Knob, device: str, entry: dict[str, Any]) -> str:
    rows = [f"| {device}: `{entry['op']}` {entry['label']} | device time | × the speed now |"]
    rows.append("| --- | --: | --: |")
    for value, found in entry["values"].items():
        name = knob.told(int(value))
        if "absent" in found:
            rows.append(f"| {name} | – | {found['absent']} |")
        elif value == entry["now"]:
            rows.append(f"| {name}, now | {spread_of_durations(found['seconds'])} | 1 |")
        else:
            seconds = spread_of_durations(found["seconds"])
            known = "seconds" in entry["values"].get(entry["now"], {})
            ratio = timing.spread(against_now(entry, value), ".3f") if known else "–"
            rows.append(f"| {name} | {seconds} | {ratio} |")
    least = duration(statistics.median(entry["limit"]))
    rows.append(f"| the limit | {least} | |")
    return "\n".join(rows)
