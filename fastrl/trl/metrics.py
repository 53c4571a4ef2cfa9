"""What a trainer logs between two logs, and the table of its latest responses."""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm


class MetricLists:
    """Numbers by name, of training and of evaluation, which a log averages."""

    def __init__(self) -> None:
        self.lists: dict[str, defaultdict[str, list[float]]] = {
            "train": defaultdict(list),
            "eval": defaultdict(list),
        }

    def __getitem__(self, mode: str) -> defaultdict[str, list[float]]:
        return self.lists[mode]

    def taken(self, mode: str) -> dict[str, float | None]:
        """Means without NaN, None where nothing else is there; forgets them."""
        found = {}
        for name, values in self.lists[mode].items():
            known = [x for x in values if not math.isnan(x)]
            found[name] = sum(known) / len(known) if known else None
        self.lists[mode].clear()
        return found

    def state(self) -> dict[str, Any]:
        return {name: list(values) for name, values in self.lists["train"].items()}

    def resume(self, state: Mapping[str, Any]) -> None:
        self.lists["train"] = defaultdict(list, {name: list(x) for name, x in state.items()})


def _as_column(completions: Iterable[Any]) -> list[Any]:
    """Completions of one type: as JSON where some call tools, whose arguments have none in
    common."""
    column = list(completions)
    if any("tool_calls" in m for said in column if not isinstance(said, str) for m in said):
        return [json.dumps(said, default=str, ensure_ascii=False) for said in column]
    return column


class CompletionsTable(dict):
    """The latest ``size`` prompts with their responses, rewards and advantages."""

    def __init__(self, size: int):
        super().__init__(
            prompt=deque(maxlen=size),
            completion=deque(maxlen=size),
            rewards=defaultdict(lambda: deque(maxlen=size)),
            advantages=deque(maxlen=size),
            extra=defaultdict(lambda: deque(maxlen=size)),
        )

    def columns(self, step: int) -> dict[str, list[Any]]:
        count = len(self["prompt"])
        return {
            "step": [step] * count,
            "prompt": list(self["prompt"]),
            "completion": _as_column(self["completion"]),
            **{name: list(values) for name, values in self["rewards"].items()},
            **{name: list(x) for name, x in self["extra"].items() if len(x) == count},
            "advantage": list(self["advantages"]),
        }

    def save(self, folder: Path, step: int) -> None:
        """Writes ``completions/completions_STEP.parquet``."""
        from datasets import Dataset

        path = folder / "completions" / f"completions_{step:05d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        Dataset.from_dict(self.columns(step)).to_parquet(str(path))

    def show(self, step: int, most: int | None) -> None:
        columns = self.columns(step)
        for i in range(len(columns["step"]) if most is None else min(most, len(columns["step"]))):
            row = ", ".join(f"{name}: {values[i]!r}" for name, values in columns.items())
            tqdm.write(row)
