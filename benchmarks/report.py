"""`python -m benchmarks report`: what the result files say, in tables and plots; or how the ratios
of two files differ.

`README.md` and `NOTES.md` of `benchmarks/` and the plots below `benchmarks/plots/` are written
whole; in the project's `README.md` only what lies between `<!-- figures:begin -->` and
`<!-- figures:end -->`. Nothing else writes figures there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    OURS,
    RESULTS,
    ROOT,
    Entry,
    Result,
    device_of,
    duration,
    durations,
    faster,
    phase_of,
    rooflines,
    size,
    spread,
    verdicts,
)

BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"
TITLES = {
    "ppo": "A PPO iteration",
    "grpo": "A GRPO step",
    "sft": "Supervised fine-tuning",
    "dpo": "Direct preference optimization",
    "rollout": "Rollouts",
    "ref_model": "PPO's reference, by the way it is kept",
    "ops": "Single ops",
}
HEADLINES = ("ppo", "grpo", "sft", "dpo", "rollout")  # in the project's README
INTRODUCTION = """# Benchmarks

Written by `python -m benchmarks report` from the newest files in `results/`; do not edit.

```
make bench                               # what this machine allows, and this report
pytest benchmarks --results              # every main case; saved in benchmarks/results
pytest benchmarks/test_ops.py -k gae     # one op; --full: more shapes than the main ones
pytest benchmarks/test_ppo.py --peer-python PATH   # with an interpreter that has TRL 0.11.4
python -m benchmarks gpu                 # on an NVIDIA GPU, unattended: tests, checks, all of these
python -m benchmarks report --compare OLD NEW      # how ratios differ between two result files
python -m tests.aot                      # registers, spills and load widths, without a GPU
```

How to read it. A ratio is the median over rounds in which the sides took turns, its range in
brackets; above 1, fastrl is the faster (or the side, where there is a baseline in place of fastrl).
*Device* is the time between two events on a GPU, with a cold cache; *call* is by the caller's
clock. *Of the roofline*: the time of the least work alone, a copy of as many bytes or the library's
matrix products of the same shapes, which takes its turns with the others, over the time taken; in
rollouts, of the bytes that decode steps cannot but read. *Memory* is the peak above inputs and
returned gradients; of training steps, above weights, the reference's too, and AdamW's state; of PPO
iterations, all that is allocated. *Error* is against float64, in units of eager PyTorch's own in
the same dtype (with a floor of 5e-8 of the result's norm); above 2 there are no figures at all.
"""


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
    readme = args.root / "README.md"
    text = readme.read_text()
    if BEGIN not in text or END not in text:
        print(f"{readme} lacks {BEGIN} … {END}", file=sys.stderr)
        return 1
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    readme.write_text(f"{before}{BEGIN}\n{brief(devices)}\n{END}{after}")
    folder = args.root / "benchmarks"
    sections = []
    for device, results in devices.items():
        made = plots(folder / "plots" / device, results)
        sections.append(section(device, results, [path.relative_to(folder) for path in made]))
    parts = [INTRODUCTION.rstrip(), missing(devices), *sections]
    (folder / "README.md").write_text("\n\n".join(part for part in parts if part) + "\n")
    (folder / "NOTES.md").write_text(notes_on_tunables(devices))
    return 0


# --- result files --------------------------------------------------------------------------------


def newest(folder: Path) -> dict[str, list[Result]]:
    """Of each device, by name, the newest result of each benchmark, and of each op."""
    latest: dict[tuple[str, str, str], tuple[tuple[str, str], Result]] = {}
    for path in sorted(folder.glob("*/*.json")):
        result = read(path)
        if result is None:
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
    """A result file, those of older forms too; None where it is of no benchmark."""
    result = json.loads(path.read_text())
    name = result.get("benchmark")
    if "entries" in result or name == "tune":
        return result if name in (*TITLES, "tune") else None
    form = _OLD_FORMS.get(name) or (_old_op if "roofline" in result else None)
    if form is None or name == "gpu":
        return None
    names = {"reference": "ref_model", "sft": "sft", "dpo": "dpo", "ppo": "ppo",
             "rollout": "rollout"}  # fmt: skip
    found = {**result, "benchmark": names.get(name, "ops"), "left": result.get("left", {})}
    found.setdefault("threads", result.get("shape", {}).get("threads"))
    return {**found, "entries": [_completed(entry, found) for entry in form(result)]}


def _completed(entry: Entry, result: Result) -> Entry:
    blank = {
        "benchmark": result["benchmark"], "what": "", "main": True, "goals": [], "baseline": None,
        "red": None, "absent": {}, "work": None, "units": None, "remarks": [], "sides": {},
    }  # fmt: skip
    side = {"note": "", "calls": 1, "limit": None, "limited": None, "memory": {}, "facts": {}}
    sides = {name: {**side, **found} for name, found in entry.get("sides", {}).items()}
    return {**blank, **entry, "sides": sides}


def _goal(figure: str, bound: float, old: dict[str, Any], **more: Any) -> dict[str, Any]:
    devices = old.get("devices") or [old.get("device", "cpu")]
    blank = {"side": OURS, "against": "eager", "phase": None}
    return {"figure": figure, "bound": bound, "devices": devices, **blank, **more}


def _old_op(result: Result) -> Iterator[Entry]:
    phase = "device" if "accelerator" in result["machine"] else "call"
    figures = {
        "seconds": "seconds",
        "speedup": "speedup",
        "memory_bytes": "memory",
        "memory_share": "memory share",
    }
    for case in result["cases"]:
        goal = case["goal"] or {}
        yield {
            "name": case["op"],
            "label": case["label"],
            "what": case["work"]["what"],
            "main": case["case"]["main"],
            "goals": [
                _goal(figure, goal[key], goal, against=goal["against"])
                for key, figure in figures.items()
                if goal.get(key) is not None
            ],
            "red": case["red"],
            "absent": case["absent"],
            "work": case["work"],
            "sides": {
                name: {
                    "note": taken["note"],
                    "seconds": {phase: taken["seconds"]},
                    "limit": case["limit"],
                    "memory": {"peak": taken["memory"]["peak"]},
                    "facts": {"error": taken["error"]},
                }
                for name, taken in case["implementations"].items()
            },
        }


_OLD_PHASES = {
    "iteration": "iteration",
    "generate": "generate",
    "step": "step()",
    "forward_pass": "old and reference scores",
    "rewards_advantages": "rewards, advantages",
    "optimize_step": "update",
    "calc_stats": "statistics",
}


def _old_ppo(result: Result) -> Iterator[Entry]:
    """The oldest have one shape, and from before there were several references they mean a copy."""
    copied = {"reference": "copy", "absent": None, "red": None, "phases": result.get("phases")}
    one = {"shape": result.get("shape"), "goal": None}
    one["references"] = result.get("references", [copied])
    peer = result["peer"]
    for case in result.get("cases", [one]):
        shape, goal = case["shape"], case["goal"]
        name = shape.get("name", f"GPT-2 {shape['layers']}×{shape['width']}")
        for found in case["references"]:
            phases, memory = found["phases"] or {}, found.get("memory") or {}
            sides = {}
            for side, side_name in ((OURS, OURS), ("peer", peer)) if phases else ():
                seconds = {new: phases[old][side] for old, new in _OLD_PHASES.items()}
                kinds = {"peak": "peak", "at_rest": "at rest"}
                bytes_ = {new: max(memory[old][side]) for old, new in kinds.items() if memory}
                sides[side_name] = {"seconds": seconds, "memory": bytes_}
            wanted = goal and goal["reference"] == found["reference"]
            yield {
                "name": name,
                "label": f"reference {found['reference']}",
                "what": f"{shape['batch']} samples of {shape['query']} + {shape['response']} "
                f"tokens, mini-batches of {shape['mini_batch']}, {shape['epochs']} epochs",
                "goals": [_goal("speedup", goal["speedup"], goal, against=peer)] if wanted else [],
                "red": found["red"] or (None if sides else "no figures"),
                "absent": {peer: found["absent"]} if found["absent"] else {},
                "sides": sides,
            }


def _old_training(result: Result) -> Iterator[Entry]:
    peer, name = result["peer"], result["benchmark"]
    unit = "tokens" if name == "sft" else "pairs"
    goals = [("speedup", 1.3), ("memory share", 0.5)]
    for i, found in enumerate(result.get("references", [result])):
        reference = found.get("reference")
        yield {
            "name": name.upper(),
            "label": f"reference {reference}" if reference else "texts",
            "units": [unit, result[unit]],
            "goals": [_goal(*goal, {}, against=peer) for goal in goals] if i == 0 else [],
            "remarks": [f"losses differ by {found['difference']:.0e} at most"],
            "sides": {
                peer if side == "peer" else side: {
                    "seconds": {"epoch": taken["seconds"]},
                    "memory": {
                        "peak": taken["peak"],
                        "beyond gradients": taken["beyond_gradients"],
                    },
                }
                for side, taken in found["sides"].items()
            },
        }


def _old_rollout(result: Result) -> Iterator[Entry]:
    figures = {"speedup": "speedup", "step_seconds": "seconds", "floor_share": "roofline",
               "utilisation": "slots used"}  # fmt: skip
    for found in result["rollouts"]:
        goal, sides = found["goal"] or {}, {}
        for name, taken in found["sides"].items():
            side = sides[name] = {"note": taken["note"], "seconds": {"rollout": taken["seconds"]}}
            if "steps" in taken:
                nbytes = found["weight_bytes"] * taken["steps"] + found["kv_bytes"]
                side["seconds"] |= {name: taken[name] for name in ("prefill", "decode")}
                side["seconds"]["decode step"] = [x / taken["steps"] for x in taken["decode"]]
                side |= {"limit": [nbytes / copy for copy in found["copy"]], "limited": "decode"}
                side["facts"] = {"slots used": taken["utilisation"]}
                side["facts"]["largest |Δ log-prob|"] = taken["audit"]["largest"]
        name, label = found["label"].split(": ", 1)
        yield {
            "name": name,
            "label": label,
            "what": found["lengths"],
            "main": found["case"]["main"],
            "goals": [
                _goal(figure, goal[key], goal, against="generate",
                      phase="decode step" if figure == "seconds" else None)
                for key, figure in figures.items() if goal.get(key) is not None
            ],
            "red": found["red"],
            "absent": found["absent"],
            "units": ["tokens", found["useful"]],
            "sides": sides,
        }  # fmt: skip


def _old_reference(result: Result) -> Iterator[Entry]:
    kinds = {
        "weights": "weights",
        "weights_on_host": "weights on the host",
        "optimizer": "Adam's state",
        "boundaries": "trunk activations",
        "peak": "peak",
    }
    for found in result["references"]:
        goal = found["goal"]
        name, label = found["label"].split(", ", 1)
        yield {
            "name": name,
            "label": label,
            "what": found["work"],
            "main": found["case"]["main"],
            "baseline": "copy",
            "goals": [
                _goal("speedup", goal["speedup"], goal, side=goal["side"], against="copy",
                      phase="update")
            ] if goal else [],
            "red": found["red"],
            "absent": found["absent"],
            "sides": {
                side: {
                    "note": taken["note"],
                    "seconds": {"update": taken["update"], "scores": taken["scores"]},
                    "memory": {new: taken[old] for old, new in kinds.items() if taken[old]},
                    "facts": {} if taken["difference"] is None
                    else {"largest |Δ|": taken["difference"]},
                }
                for side, taken in found["sides"].items()
            },
        }  # fmt: skip


_OLD_FORMS: dict[str, Callable[[Result], Iterator[Entry]]] = {
    "ppo": _old_ppo,
    "sft": _old_training,
    "dpo": _old_training,
    "rollout": _old_rollout,
    "reference": _old_reference,
}


# --- for a terminal ------------------------------------------------------------------------------


def render(entry: Entry, device: str) -> str:
    """A case's lines: a block for each phase, medians and their range."""
    head = f"{entry['name']}: {entry['label']}"
    if entry["red"]:
        return f"{head}\n  RED, no figures: {entry['red']}"
    lines = [head, f"  {entry['what']}"] if entry["what"] else [head]
    own = entry["baseline"] or OURS
    than = f"faster than {own} by" if entry["baseline"] else "fastrl faster by"
    for phase in entry["sides"][own]["seconds"]:
        lines.append(f"  {phase:<34}{'seconds':>26}{than:>24}")
        for name, side in entry["sides"].items():
            if phase in side["seconds"]:
                ratio = "" if name == own else spread(faster(entry, name, phase), ".2f")
                taken = durations(phase_of(side, phase))
                lines.append(f"    {name:<32}{taken:>26}{ratio:>24}")
    lines += [f"  {line}" for line in details(entry)]
    for goal, reached in verdicts(entry, device):
        lines.append(f"  goal {goal}: {'reached' if reached else 'MISSED'}")
    return "\n".join(lines)


def details(entry: Entry) -> list[str]:
    """Lines on what each side needs, on remarks, and on who is absent."""
    lines = []
    for name, side in entry["sides"].items():
        parts = [side["note"]] if side["note"] else []
        parts += [f"memory, {kind} {size(nbytes)}" for kind, nbytes in side["memory"].items()]
        parts += [f"{fact} {value:.3g}" for fact, value in side["facts"].items()]
        if side["limit"]:
            parts.append(f"{statistics.median(rooflines(entry, name)):.0%} of the roofline")
        lines += [f"{name}: {'; '.join(parts)}"] if parts else []
    least = entry["sides"][entry["baseline"] or OURS]["limit"]
    lines += [f"the roofline: {duration(statistics.median(least))}"] if least else []
    lines += entry["remarks"]
    return [*lines, *(f"absent, {name}: {why}" for name, why in entry["absent"].items())]


def compared(old: Result, new: Result) -> Iterator[str]:
    """How the ratios of two results differ, case by case. Times are no gate: a machine has slow
    minutes, which a ratio of neighbours does not see."""
    before = {(e["name"], e["label"]): e for e in old["entries"] if not e["red"]}
    for entry in new["entries"]:
        was = before.get((entry["name"], entry["label"]))
        if was is None or entry["red"]:
            continue
        for name in entry["sides"].keys() & was["sides"].keys() - {entry["baseline"] or OURS}:
            ratios = faster(was, name), faster(entry, name)
            middle = [statistics.median(found) for found in ratios]
            yield (
                f"{entry['name']} {entry['label']}, {name}: {spread(ratios[0], '.2f')} → "
                f"{spread(ratios[1], '.2f')}, {middle[1] / middle[0]:.3f}×"
            )


# --- tables --------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Markdown, with the first columns and the last one to the left; empty without rows."""
    rows = [list(row) for row in rows]
    if not rows:
        return ""
    rule = ["---"] * left + ["--:"] * (len(head) - left - 1) + ["---"]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def brief(devices: dict[str, list[Result]]) -> str:
    """The project's README: a figure of each benchmark that has a headline."""
    parts = []
    for results in devices.values():
        rows = []
        for result in results:
            timed = [e for e in result["entries"] if len(e["sides"]) > 1 and not e["red"]]
            if result["benchmark"] in HEADLINES and timed:
                rows.append(_headline(result, timed[0]))
        head = ("measured", "fastrl", "beside", "", "faster by", "memory, of the peer's")
        if rows:
            where = f"On {processor(results[0])}, medians of rounds in turns (range):"
            parts.append(f"{where}\n\n{table(head, rows)}")
    return "\n\n".join([*parts, missing(devices)]).rstrip()


def _headline(result: Result, entry: Entry) -> list[str]:
    peer = next(name for name in entry["sides"] if name != OURS)
    ours, theirs = entry["sides"][OURS], entry["sides"][peer]
    share = "–"
    if "peak" in ours["memory"] and "peak" in theirs["memory"]:
        share = f"{ours['memory']['peak'] / theirs['memory']['peak']:.2f}"
    title = f"{TITLES[result['benchmark']]}: {entry['name']}, {entry['label']}"
    taken = [duration(statistics.median(phase_of(side))) for side in (ours, theirs)]
    return [title, taken[0], peer, taken[1], spread(faster(entry, peer), ".2f"), share]


def section(device: str, results: list[Result], pictures: list[Path]) -> str:
    """All there is on a device."""
    parts = [f"## {device}: {processor(results[0])}"]
    parts += [f"![{path.stem}]({path})" for path in pictures]
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
    said = [f"{result['date']}, commit {result['commit']}, {result['threads']} threads"]
    if roof := result.get("roofline"):
        gemm = ", ".join(f"{x / 1e12:.3g} in {dtype}" for dtype, x in roof["gemm"].items())
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
    head = ["case", "side"]
    head += phases
    head += [f"{unit}/s" for unit in sorted(rates)]
    head += [f"memory, {kind}" for kind in kinds] + ["of the roofline"] * limited + facts + ["goal"]
    rows = []
    for result, entry in shown:
        own = entry["baseline"] or OURS
        for i, (name, side) in enumerate(entry["sides"].items()):
            cells = [f"`{entry['name']}` {entry['label']}" if i == 0 else "", name]
            for phase in phases:
                cells.append(durations(side["seconds"][phase]) if phase in side["seconds"] else "")
                if cells[-1] and name != own and phase in entry["sides"][own]["seconds"]:
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
            said += [f"- Absent, {name}: {why}." for name, why in entry["absent"].items()]
        said += [f"- Left, {name}: {why}." for name, why in result["left"].items()]
    yield from dict.fromkeys(said)


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
    """The accelerator, or the processor and the threads that were used."""
    machine = result["machine"]
    return machine.get("accelerator", f"{machine['cpu']}, threads: {result['threads']}")


def notes_on_tunables(devices: dict[str, list[Result]]) -> str:
    """`NOTES.md`: every prediction, and beside it what was measured on each device."""
    from benchmarks.gpu import TUNABLES

    parts = [
        "# What should make the kernels faster, and what did",
        "Written by `python -m benchmarks report`; predictions are made in `gpu.py`, before "
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


# --- plots ---------------------------------------------------------------------------------------

COLOURS = ("#999999", "#cc7722", "#669944", "#aa4466", "#8866bb", "#33aaaa", "#555555", "#ccaa33")
OUR_COLOUR = "#2266aa"


def plots(folder: Path, results: list[Result]) -> list[Path]:
    """An SVG of each benchmark that comes out the same from the same figures: by how much fastrl is
    the faster, and the peak memory; files that are there and no longer made go."""
    import matplotlib

    made = []
    # Ids from the content and text as text: nothing depends on the run.
    style = {"svg.hashsalt": "fastrl", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(style | {"axes.axisbelow": True}):
        for benchmark in TITLES:
            found = [
                entry
                for result in results
                if result["benchmark"] == benchmark
                for entry in result["entries"]
                if entry["main"] and not entry["red"] and len(entry["sides"]) > 1
            ]
            if found:
                made.append(_plot(folder / f"{benchmark}.svg", found))
    for path in folder.glob("*.svg"):
        if path not in made:
            path.unlink()
    return made


def _plot(path: Path, entries: list[Entry]) -> Path:
    from matplotlib.figure import Figure  # no pyplot: nothing is shown, nothing stays open

    own = entries[0]["baseline"] or OURS
    names = list(dict.fromkeys(name for e in entries for name in e["sides"] if name != own))
    colours = dict(zip(names, COLOURS * len(names), strict=False)) | {own: OUR_COLOUR}
    speed, memory = [], []
    for entry in entries:
        title = f"{entry['name']}\n{entry['label']}"
        others = [name for name in entry["sides"] if name != own]
        speed.append((title, {n: statistics.median(faster(entry, n)) for n in others}))
        peaks = {n: s["memory"].get("peak", 0) / 2**20 for n, s in entry["sides"].items()}
        memory.append((title, {n: max(peak, 1e-3) for n, peak in peaks.items() if peak}))
    panels = [(speed, f"faster than {own} by" if entries[0]["baseline"] else "fastrl faster by")]
    panels += [(memory, "peak memory [MiB]")] if any(bars for _, bars in memory) else []
    heights = [0.8 + sum(0.3 * len(bars) + 0.2 for _, bars in groups) for groups, _ in panels]
    figure = Figure(figsize=(8, sum(heights) + 0.4 * len(panels)))
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    figure.subplots_adjust(hspace=0.5 / statistics.fmean(heights) + 0.2)
    for axis, (groups, label) in zip(axes, panels, strict=True):
        _bars(axis, groups, colours)
        axis.set_xlabel(label)
    axes[0].axvline(1.0, color=OUR_COLOUR)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(
        path, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": "fastrl"}
    )
    text = path.read_text()
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
    return path


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
    values = [value for _, bars in groups for value in bars.values()]
    axes.set_xscale("log")
    axes.set_xlim(min(*values, 1.0) / 1.5, max(*values, 1.0) * 2)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
