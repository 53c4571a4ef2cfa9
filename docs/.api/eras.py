"""The table of docs/trl_programs.md: settings of other versions, from fastrl.eras.

python docs/.api/eras.py        writes it into the page (`make docs` does)
"""

from __future__ import annotations

import re
from pathlib import Path

from fastrl.eras import ERAS, IDLE, KEPT, REFUSED, RENAMED, Era

PAGE = Path(__file__).parents[1] / "trl_programs.md"
_BLOCK = re.compile(r"^(<!-- eras -->\n)(?:(?!<!-- end -->).*\n)*(?=<!-- end -->)", re.MULTILINE)
_WHAT = {
    RENAMED: "`{}`",
    KEPT: "honoured; today: {}",
    IDLE: "changes nothing: {}",
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


def table() -> str:
    every = [("setting", "of", "becomes"), ("---", "---", "---"), *rows()]
    return "".join(f"| {' | '.join(row)} |\n" for row in every)


def render(text: str) -> str:
    return _BLOCK.sub(lambda found: found[1] + table(), text)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
