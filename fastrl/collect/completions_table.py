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

from fastrl.run.terminal import plain, run_console

_TEXTS = {"prompt": 2, "completion": 4}  # the columns of texts, and their shares of a line
_LINES = 6  # a text in the table is cut to about so many lines
_NAME, _LONGEST = 9, 20  # widths of columns of numbers: the least for a long name, and the most


def _as_column(values: Iterable[Any]) -> list[Any]:
    """A column whose values have one type: all but texts become JSON where some hold calls of
    tools, whose arguments differ in type, or an empty mapping, for which Parquet has no type."""
    column = list(values)
    if any(_is_open(value) for value in column):
        return [
            x if isinstance(x, str) else json.dumps(x, default=str, ensure_ascii=False)
            for x in column
        ]
    return column


def _is_open(value: Any) -> bool:
    """Whether a value holds calls of tools or an empty mapping, at any depth."""
    if isinstance(value, Mapping):
        return not value or "tool_calls" in value or any(map(_is_open, value.values()))
    return isinstance(value, list | tuple) and any(map(_is_open, value))


class CompletionsTable(dict):
    """The latest ``size`` prompts with their responses, rewards, advantages and extra columns."""

    def __init__(self, size: int):
        super().__init__(
            prompt=deque(maxlen=size),
            completion=deque(maxlen=size),
            rewards=defaultdict(lambda: deque(maxlen=size)),
            advantages=deque(maxlen=size),
            extra=defaultdict(lambda: deque(maxlen=size)),
        )
        self._shown: dict[str, list[Any]] = {}

    def columns(self, step: int) -> dict[str, list[Any]]:
        """The table's columns by name, with ``step``; rewards and extra ones only if no row lacks
        them."""
        count = len(self["prompt"])
        return {
            "step": [step] * count,
            "prompt": _as_column(self["prompt"]),
            "completion": _as_column(self["completion"]),
            **{name: list(x) for name, x in self["rewards"].items() if len(x) == count},
            **{name: _as_column(x) for name, x in self["extra"].items() if len(x) == count},
            **({"advantage": list(self["advantages"])} if self["advantages"] else {}),
        }

    def add(
        self,
        prompts: Iterable[Any],
        completions: Iterable[Any],
        rewards: Mapping[str, Iterable[float]],
        advantages: Iterable[float] = (),
    ) -> None:
        """Adds responses, each with its prompt.

        Args:
            rewards: each function's rewards, by its name.
        """
        self["prompt"].extend(prompts)
        self["completion"].extend(completions)
        for name, column in rewards.items():
            self["rewards"][name].extend(column)
        self["advantages"].extend(advantages)

    def log(self, args: Any, folder: Path, step: int) -> None:
        """Shows the table, saves it below ``folder`` and reports it, by a trainer's settings."""
        self.show(step, args.num_completions_to_print)
        self.save(folder, step)
        # Trackers that a command opens itself stand in ``trackers``, not in ``report_to``.
        trackers = [*args.report_to, *getattr(args, "trackers", ())]
        self.report(trackers, step, args.log_unique_prompts)

    def state(self) -> str:
        """Returns the table as JSON, for :meth:`load`; values that JSON lacks become texts."""
        return json.dumps(self, default=lambda x: [*x] if isinstance(x, deque) else str(x))

    def load(self, state: str) -> None:
        for name, kept in json.loads(state).items():
            for column, values in kept.items() if isinstance(kept, dict) else [(None, kept)]:
                (self[name] if column is None else self[name][column]).extend(values)

    def report(self, trackers: Sequence[str], step: int, unique: bool) -> None:
        """Sends the table to wandb and trackio, where ``trackers`` names them and they are
        installed, and wandb has a run; if ``unique``, only the first response to each prompt."""
        columns = self.columns(step)
        if unique:
            first = [i for i, turn in enumerate(_turns(columns["prompt"])) if not turn]
            columns = {name: [x[i] for i in first] for name, x in columns.items()}
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
        """Prints ``most`` responses, spread evenly over prompts, or all, in a table as wide as the
        terminal, texts in a few lines; an unchanged table is not printed."""
        from rich import box
        from rich.table import Table

        columns = self.columns(step)
        if columns == self._shown:  # the last log of training has nothing new
            return
        self._shown = columns.copy()
        del columns["step"]
        console = run_console()
        numbers = {
            name: min(max([min(len(name), _NAME), *(len(_number(x)) for x in values)]), _LONGEST)
            for name, values in columns.items()
            if name not in _TEXTS
        }
        room = console.width - sum(width + 3 for width in numbers.values()) - 6
        table = Table(title=f"Step {step}", box=box.SIMPLE_HEAD, show_lines=True, expand=True)
        for name in columns:
            if name in _TEXTS:
                table.add_column(name, ratio=_TEXTS[name], overflow="fold")
            else:  # long names are folded, numbers are not
                wide = numbers[name]
                table.add_column(plain(name), justify="right", width=wide, overflow="fold")
        turns, rows = _turns(columns["prompt"]), list(zip(*columns.values(), strict=True))
        for i in sorted(sorted(range(len(rows)), key=lambda i: turns[i])[:most]):
            cells = zip(columns, rows[i], strict=True)
            table.add_row(
                *(plain(_text(n, x, room) if n in _TEXTS else _number(x)) for n, x in cells)
            )
        with console.capture() as shown:
            console.print(table)
        tqdm.write(shown.get().rstrip("\n"))


def _turns(prompts: Iterable[Any]) -> list[int]:
    """The number of equal prompts before each prompt."""
    seen: defaultdict[str, int] = defaultdict(int)
    turns = []
    for prompt in map(str, prompts):
        turns.append(seen[prompt])
        seen[prompt] += 1
    return turns


def _number(value: Any) -> str:
    """A float in three digits, "–" for None, other values as text."""
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _text(name: str, value: Any, room: int) -> str:
    """Cuts a long prompt to its end, and a long completion to its beginning.

    Args:
        room: characters of a line, for all texts together.
    """
    text = value if isinstance(value, str) else _as_text(value)
    most = max(_LINES * room * _TEXTS[name] // sum(_TEXTS.values()), _LINES * 8)
    if len(text) <= most:
        return text
    return f"… {text[-most:]}" if name == "prompt" else f"{text[:most]} …"


def _as_text(value: Any) -> str:
    """A chat as a line for each message, other values as they are."""
    if not (isinstance(value, list) and all(isinstance(x, dict) for x in value)):
        return str(value)
    return "\n".join(f"{x.get('role')}: {x.get('content') or x.get('tool_calls')}" for x in value)
