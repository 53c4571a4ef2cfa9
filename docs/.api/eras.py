"""The tables of docs/trl_programs.md: settings of other versions, from fastrl.eras, and methods of
TRL's trainers, from fastrl.overrides; trainers that fastrl has not, from
fastrl.compat.programs.names.

python docs/.api/eras.py        writes them into the page (`make docs` does)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from fastrl.compat.programs.names import INSTEAD
from fastrl.eras import ERAS, IDLE, KEPT, REFUSED, RENAMED, Era
from fastrl.overrides import CALLED, NOT_CALLED

PAGE = Path(__file__).parents[1] / "trl_programs.md"
_BLOCK = re.compile(
    r"^(<!-- (eras|overrides|instead) -->\n)(?:(?!<!-- end -->).*\n)*(?=<!-- end -->)", re.MULTILINE
)
_WHAT = {
    RENAMED: "`{}`",
    KEPT: "honoured; today: {}",
    IDLE: "no effect: {}",
    REFUSED: "refused: {}",
}
_ALL = "all of transformers' `TrainingArguments`"


def rows() -> list[tuple[str, str, str]]:
    """Setting, configurations, and what becomes of it."""
    found: dict[tuple[str, Era], list[str]] = {}
    common = ERAS["TrainingArguments"]
    for config, eras in ERAS.items():
        for name, era in eras.items():
            if era.today == name:  # another value of today's own setting
                continue
            if config == "TrainingArguments" or common.get(name) != era:
                found.setdefault((name, era), []).append(config)
    return [
        (
            f"`{name}`",
            _ALL if configs == ["TrainingArguments"] else ", ".join(f"`{x}`" for x in configs),
            _WHAT[era.kind].format(era.today),
        )
        for (name, era), configs in found.items()
    ]


def methods() -> list[tuple[str, str, str]]:
    """Method, trainers, and what becomes of it in a subclass."""
    found: dict[tuple[str, str], list[str]] = {}
    for trainer, names in CALLED.items():
        for name in names:
            found.setdefault((name, "called"), []).append(trainer)
    for trainer, instead in NOT_CALLED.items():
        for name, text in instead.items():
            found.setdefault((name, f"refused: {text}"), []).append(trainer)
    shown = {"OnlineTrainer": ("GRPOTrainer", "RLOOTrainer")}
    return [
        (
            f"`{name}`",
            ", ".join(f"`{x}`" for trainer in of for x in shown.get(trainer, (trainer,))),
            text,
        )
        for (name, text), of in found.items()
    ]


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    every = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in every)


def render(text: str) -> str:
    tables = {
        "eras": table(("setting", "of", "becomes"), rows()),
        "overrides": table(("method", "of", "becomes"), methods()),
        "instead": table(("trainer", "use"), [(f"`{x}Trainer`", y) for x, y in INSTEAD.items()]),
    }
    return _BLOCK.sub(lambda found: found[1] + tables[found[2]], text)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
