"""`python -m tests.oracles FILE`: does a change of the code change what is learned?

Each surface trains a tiny model with settings that are drawn at random, and each door gives random
rows their token ids. Where FILE does not exist, weights, logs and ids are written to it, with the
settings; where it does, the same is done again and compared. So a tree says whether it does what
another one did, on one machine.
"""

import argparse
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.oracles.doors import ids_of_all
from tests.oracles.draws import CHOICES, drawn
from tests.oracles.surfaces import Figures, run, untimed

TOLERANCE = 1e-6  # of a difference that is one of rounding
_ATTEMPTS = 40
_DOORS = "doors.json"
_SAME, _ROUNDED, _OTHER = "same", "rounded", "other"


def main(argv: Sequence[str] | None = None) -> int:
    """Records or compares, and returns 1 where something is learned otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.oracles", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="a folder of figures")
    parser.add_argument("--count", type=int, default=70, help="runs of each surface")
    parser.add_argument("--surface", action="append", choices=CHOICES, help="one; by default all")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    surfaces = args.surface or list(CHOICES)
    if not args.file.exists():
        for surface in surfaces:
            record(args.file, surface, args.count)
        (args.file / _DOORS).write_text(json.dumps(_doors()))
        return 0
    found = {surface: compare(args.file, surface, args.count) for surface in surfaces}
    if not args.surface:
        found["doors"] = _compare_doors(json.loads((args.file / _DOORS).read_text()))
    for surface, counts in found.items():
        print(f"{surface}: {', '.join(f'{n} {what}' for what, n in sorted(counts.items()))}")
    return int(any(counts[_OTHER] for counts in found.values()))


def record(folder: Path, surface: str, count: int) -> None:
    for number in range(count):
        settings, figures = _first_that_runs(surface, number)
        place = _place(folder, surface, number)
        place.mkdir(parents=True)
        save_file(figures.pop("weights"), place / "weights.safetensors")
        (place / "figures.json").write_text(json.dumps({"settings": settings, **figures}))
    print(f"{surface}: {count} runs recorded", flush=True)


def compare(folder: Path, surface: str, count: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for number in range(count):
        place = _place(folder, surface, number)
        if not place.is_dir():
            break
        before = json.loads((place / "figures.json").read_text())
        settings = before.pop("settings")
        weights = load_file(place / "weights.safetensors")
        try:
            now = _run(surface, settings)
        except Exception as error:
            found[_OTHER] += 1
            print(f"{surface} {number} {settings}: {type(error).__name__}: {error}", flush=True)
            continue
        off = dict(_differences({"weights": weights, **before}, now))
        worst = max(off.values(), default=0.0)
        kind = _SAME if worst == 0 else _ROUNDED if worst <= TOLERANCE else _OTHER
        found[kind] += 1
        if kind == _OTHER:
            names = sorted(off, key=off.__getitem__, reverse=True)[:4]
            said = ", ".join(f"{name} {off[name]:.1e}" for name in names)
            print(f"{surface} {number} {settings}: {said}", flush=True)
    return found


def _doors() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return json.loads(json.dumps(ids_of_all(Path(folder))))


def _compare_doors(before: dict[str, Any]) -> Counter[str]:
    now, found = _doors(), Counter[str]()
    for name in before.keys() | now.keys():
        same = name in before and name in now and before[name] == now[name]
        found[_SAME if same else _OTHER] += 1
        if not same:
            print(f"{name}:\n  {before.get(name)!s:.300}\n  {now.get(name)!s:.300}", flush=True)
    return found


def _first_that_runs(surface: str, number: int) -> tuple[dict[str, Any], Figures]:
    """Settings that fit together: of others there is an error."""
    for attempt in range(_ATTEMPTS):
        settings = drawn(surface, number, attempt)
        try:
            return settings, _run(surface, settings)
        except (ValueError, TypeError):
            continue
    raise RuntimeError(f"{surface} {number}: no settings of {_ATTEMPTS} fit together")


def _run(surface: str, settings: dict[str, Any]) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        figures = run(surface, settings, Path(folder) / "out")
    figures["steps"] = [untimed(row) for row in figures["steps"]]
    return figures


def _place(folder: Path, surface: str, number: int) -> Path:
    return folder / surface.replace(" ", "-") / str(number)


def _differences(before: Any, now: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Of numbers and tensors, relative to the larger of the one before and 1; infinite where
    something is missing or new."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before.keys() | now.keys():
            if key in before and key in now:
                yield from _differences(before[key], now[key], f"{name}/{key}")
            else:
                yield f"{name}/{key}", math.inf
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for i, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from _differences(one, other, f"{name}/{i}")
    elif isinstance(before, torch.Tensor):
        if not torch.equal(before, now):
            yield name, float(((before - now).abs() / before.abs().clamp(min=1)).max())
    elif before != now and not (before != before and now != now):
        numbers = all(isinstance(x, int | float) for x in (before, now))
        off = abs(before - now) / max(1.0, abs(before)) if numbers else math.inf
        yield name, off if off == off else math.inf


if __name__ == "__main__":
    sys.exit(main())
