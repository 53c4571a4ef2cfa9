"""The table of a trainer's latest responses."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm


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
            **({"advantage": list(self["advantages"])} if self["advantages"] else {}),
        }

    def add(
        self,
        prompts: Iterable[Any],
        completions: Iterable[Any],
        rewards: Mapping[str, Iterable[float]],
        advantages: Iterable[float] = (),
    ) -> None:
        """Adds responses.

        Args:
            rewards: of each function.
            advantages: where there are any.
        """
        self["prompt"].extend(prompts)
        self["completion"].extend(completions)
        for name, column in rewards.items():
            self["rewards"][name].extend(column)
        self["advantages"].extend(advantages)

    def log(self, args: Any, folder: Path, step: int) -> None:
        """Shows, saves and reports it, by a trainer's settings."""
        self.show(step, args.num_completions_to_print)
        self.save(folder, step)
        # Commands open some trackers themselves.
        trackers = [*args.report_to, *getattr(args, "trackers", ())]
        self.report(trackers, step, args.log_unique_prompts)

    def state(self) -> str:
        """As JSON; what functions noted beside numbers and texts becomes text."""
        return json.dumps(self, default=lambda x: [*x] if isinstance(x, deque) else str(x))

    def load(self, state: str) -> None:
        for name, kept in json.loads(state).items():
            for column, values in kept.items() if isinstance(kept, dict) else [(None, kept)]:
                (self[name] if column is None else self[name][column]).extend(values)

    def report(self, trackers: Sequence[str], step: int, unique: bool) -> None:
        """Sends the table to those of wandb and trackio that a run reports to.

        Args:
            unique: only the first response to each prompt.
        """
        columns = self.columns(step)
        if unique:
            first: dict[str, int] = {}
            for i, prompt in enumerate(columns["prompt"]):
                first.setdefault(str(prompt), i)
            columns = {name: [x[i] for i in first.values()] for name, x in columns.items()}
        for name in ("wandb", "trackio"):
            if name not in trackers or importlib.util.find_spec(name) is None:
                continue
            import pandas

            tracker = importlib.import_module(name)
            if name == "wandb" and tracker.run is None:
                continue
            tracker.log({"completions": tracker.Table(dataframe=pandas.DataFrame(columns))})

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
