"""`python -m benchmarks report`: writes the figures that the result files hold into the READMEs.

`README.md` and `NOTES.md` of `benchmarks/` and the plots below `benchmarks/plots/` are written
whole; in the project's `README.md` only what lies between `<!-- figures:begin -->` and
`<!-- figures:end -->`. Nothing else writes figures there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.before import (
    plots,
    ppo_tables,
    record,
    reference_tables,
    rollout_tables,
    tables,
    training,
    tune_tables,
)
from benchmarks.before.__main__ import OPS
from benchmarks.before.dpo import DPO
from benchmarks.before.sft import SFT

Result = dict[str, Any]

BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"
TRAININGS = {each.name: each for each in (SFT, DPO)}
# In the order of the report.
BENCHMARKS = ("ppo", *TRAININGS, "rollout", "reference", "gpu", *OPS, "tune")
INTRODUCTION = """# Benchmarks

Written by `python -m benchmarks report` from the newest files in `results/`; do not edit.

```
make bench                      # what this machine allows, and this report
python -m benchmarks            # every op; name some to measure those alone
python -m benchmarks ppo        # a whole PPO iteration beside TRL's
python -m benchmarks sft        # supervised fine-tuning beside TRL's
python -m benchmarks dpo        # DPO on pairs of responses beside TRL's
python -m benchmarks rollout    # generation beside transformers' own ways
python -m benchmarks reference  # PPO's reference, by the way it is kept
python -m benchmarks gpu        # on an NVIDIA GPU: gates, then the most telling timings
python -m benchmarks tune       # there: what could be faster, predicted and measured (NOTES.md)
python -m benchmarks device     # there, unattended: the tests, then all of the above
python -m benchmarks aot        # registers, spills and load widths, without a GPU
pytest benchmarks               # a small grid under pytest-benchmark
```

How to read it. A ratio is the median over rounds in which the sides took turns, its range in
brackets; above 1, fastrl is the faster. *Device time* is between two events on a GPU, with a cold
cache, and wall time on a CPU; *whole call* is by the caller's clock. *Of the roofline*: the time
of the stated work alone, a copy of as many bytes or the library's matrix products of the same
shapes, which takes its turns with the others, over the device time. *Of the floor*, in rollouts:
the time in which a copy moves the bytes that decode steps cannot but read, weights and live keys
and values, over the time of decoding. *Memory* is the peak above
inputs and returned gradients; in SFT and DPO, above weights, the reference's too, and AdamW's
state, gradients being counted unless it says otherwise; in PPO iterations, all that is allocated.
*Error* is against float64, in units of eager PyTorch's own in the same dtype (with a floor of 5e-8
of the result's norm); above 2 there are no figures at all.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks report`."""
    parser.add_argument("--results", type=Path, default=record.RESULTS, metavar="FOLDER")
    parser.add_argument("--root", type=Path, default=record.ROOT, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Writes all of it; 1 where there is nothing to write or no place for it."""
    devices = newest(args.results)
    if not devices:
        print(f"no result files in {args.results}", file=sys.stderr)
        return 1
    readme = args.root / "README.md"
    text = readme.read_text()
    if BEGIN not in text or END not in text:
        print(f"{readme} lacks {BEGIN} … {END}", file=sys.stderr)
        return 1
    readme.write_text(between_markers(text, brief(devices)))
    folder = args.root / "benchmarks"
    sections = []
    for device, results in devices.items():
        made = plots.write(folder / "plots" / device, results)
        sections.append(section(device, results, [path.relative_to(folder) for path in made]))
    details = "\n\n".join([INTRODUCTION.rstrip(), missing(devices), *sections])
    (folder / "README.md").write_text(details + "\n")
    tuned = {
        device: result
        for device, results in devices.items()
        for result in results
        if result["benchmark"] == "tune"
    }
    (folder / "NOTES.md").write_text(tune_tables.notes(tuned))
    return 0


def newest(folder: Path) -> dict[str, list[Result]]:
    """Of each device, by name, the newest result of each benchmark, in the report's order."""
    latest: dict[tuple[str, str], tuple[tuple[str, str], Result]] = {}
    for path in sorted(folder.glob("*/*.json")):
        result = json.loads(path.read_text())
        if result.get("benchmark") not in BENCHMARKS:
            continue
        key = path.parent.name, result["benchmark"]
        age = result["date"], result.get("time", "")
        if key not in latest or age > latest[key][0]:
            latest[key] = (age, result)
    devices: dict[str, list[Result]] = {}
    for device, benchmark in sorted(latest, key=lambda key: (key[0], BENCHMARKS.index(key[1]))):
        devices.setdefault(device, []).append(latest[device, benchmark][1])
    return devices


def between_markers(text: str, figures: str) -> str:
    """`text` with `figures` in place of what lay between the markers."""
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    return f"{before}{BEGIN}\n{figures}\n{END}{after}"


def missing(devices: dict[str, list[Result]]) -> str:
    """Which figures there are not: no GPU at all, or benchmarks that a device lacks."""
    lines = []
    on_gpu = [d for d, results in devices.items() if "accelerator" in results[0]["machine"]]
    if not on_gpu:
        lines.append("No GPU has been measured yet.")
    if len(on_gpu) == len(devices):
        lines.append("No machine without a GPU has been measured yet.")
    for device, results in devices.items():
        there = {result["benchmark"] for result in results}
        wanted = {"gpu"} if device in on_gpu else {*_ops_here()}
        wanted |= {"ppo", *TRAININGS, "rollout", "reference"}
        lacking = [name for name in BENCHMARKS if name in wanted - there]
        if lacking:
            lines.append(f"Not measured yet on {device}: {', '.join(lacking)}.")
    return " ".join(lines)


def _ops_here() -> list[str]:
    from benchmarks.before import cases

    return cases.available()


def brief(devices: dict[str, list[Result]]) -> str:
    """The README's tables: PPO, trainings, rollouts, references, kernels with a goal, what is
    missing."""
    parts = []
    for results in devices.values():
        for result in results:
            if result["benchmark"] == "ppo":
                parts.append(ppo_tables.short_table(result, processor(result)))
            if result["benchmark"] in TRAININGS:
                parts += _training(result)
            if result["benchmark"] == "rollout" and (rows := rollout_tables.short_table(result)):
                parts.append(
                    f"Rollouts on {processor(result)} (`python -m benchmarks rollout`):\n\n{rows}"
                )
            if result["benchmark"] == "reference" and (
                rows := reference_tables.short_table(result)
            ):
                parts.append(
                    f"References on {processor(result)} (`python -m benchmarks reference`):\n\n"
                    f"{rows}"
                )
        rows = tables.short_table(results)
        if rows:
            parts.append(
                f"Single ops on {processor(results[-1])} (`python -m benchmarks`):\n\n{rows}"
            )
    parts.append(missing(devices))
    return "\n\n".join(part for part in parts if part)


def section(device: str, results: list[Result], pictures: list[Path]) -> str:
    """All there is on a device."""
    parts = [f"## {device}: {processor(results[0])}"]
    parts += [f"![{path.stem}]({path})" for path in pictures]
    for result in results:
        if result["benchmark"] == "ppo":
            parts += ["### A PPO iteration", ppo_tables.full_tables(result, processor(result))]
            parts.append(_versions(result))
        elif result["benchmark"] in TRAININGS:
            parts.append(f"### {TRAININGS[result['benchmark']].heading}")
            parts += [*_training(result), _versions(result)]
        elif result["benchmark"] == "rollout":
            parts += ["### Rollouts", rollout_tables.versions_line(result)]
            parts.append(rollout_tables.full_table(result))
        elif result["benchmark"] == "reference":
            parts += ["### References", reference_tables.versions_line(result)]
            parts.append(reference_tables.full_table(result))
        elif result["benchmark"] == "gpu":
            parts += ["### Gates and goals", tables.roofline_line(result)]
            parts += [tables.gates_section(result), tables.full_table(result)]
            parts.append(tables.bytes_table(result))
        elif result["benchmark"] != "tune":  # which NOTES.md is about
            parts += [f"### {result['benchmark']}", tables.roofline_line(result)]
            parts.append(tables.full_table(result))
    return "\n\n".join(part.rstrip() for part in parts if part)


def _training(result: Result) -> list[str]:
    which = TRAININGS[result["benchmark"]]
    return [training.caption(which, result, processor(result)), training.table(which, result)]


def _versions(result: Result) -> str:
    return "\n".join(
        f"- {side}: " + ", ".join(f"{name} {version}" for name, version in found.items())
        for side, found in result["versions"].items()
    )


def processor(result: Result) -> str:
    """The accelerator, or the processor and the threads that were used."""
    machine = result["machine"]
    threads = result["shape"]["threads"] if "shape" in result else result["threads"]
    return machine.get("accelerator", f"{machine['cpu']}, threads: {threads}")
