"""Recipes: settings of whole runs, each a YAML file of this folder that its command reads.

The comments that a file begins with are its header, and are YAML, too::

    # what: a line on what it is for
    # command: grpo
    # device: 24 GB, or CPU
    # plan: {prompt_tokens: 512, response_tokens: 1024}, the lengths that its memory is planned for
    # columns: {prompt: chat, solution: text}, what its data set's columns hold
    # source: where its numbers are from
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
PLANS = FOLDER / "plans.json"  # written by `python -m benchmarks recipes`


@dataclass(frozen=True)
class Recipe:
    """A recipe's file and its header.

    Attributes:
        command: the command that runs the recipe.
        device: the memory of the GPU that it needs, such as "24 GB", or "CPU".
        plan: further arguments of ``fastrl plan``; empty for a CPU's recipe.
        columns: the kind of each column of its data set: text, chat (messages), number or bool.
        planned: bytes of "peak", the most that ``fastrl plan`` finds, and of "judge", 0 or
            those of the model that judges responses; empty for a CPU's recipe.
    """

    name: str
    path: Path
    what: str
    command: str
    device: str
    columns: Mapping[str, str]
    source: str
    plan: Mapping[str, Any]
    planned: Mapping[str, int]

    @property
    def gpu_gib(self) -> float | None:
        """The memory of the recipe's GPU in GiB; None for a CPU."""
        return None if self.device == "CPU" else float(self.device.removesuffix(" GB"))

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")


@cache
def recipes() -> dict[str, Recipe]:
    """All recipes by name."""
    plans = json.loads(PLANS.read_text(encoding="utf-8"))
    by_name = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        comments = takewhile(lambda line: line.startswith("# "), lines)
        header = yaml.safe_load("\n".join(line[2:] for line in comments))
        name = path.stem
        by_name[name] = Recipe(
            name, path, plan=header.pop("plan", {}), planned=plans.get(name, {}), **header
        )
    return by_name
