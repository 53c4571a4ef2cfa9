"""The table of docs/commands.md: names of other libraries for settings, from
fastrl.tools.commands.aliases.

python docs/.api/aliases.py     writes it into the page (`make docs` does)
"""

from __future__ import annotations

import re
from pathlib import Path

from fastrl.tools.commands.aliases import Alias, aliases_of

PAGE = Path(__file__).parents[1] / "commands.md"
COMMANDS = ("sft", "reward", "align", "distill", "ppo", "grpo", "plan")
_BLOCK = re.compile(r"^(<!-- aliases -->\n)(?:(?!<!-- end -->).*\n)*(?=<!-- end -->)", re.MULTILINE)


def becomes(alias: Alias) -> str:
    """What a name becomes, for the table."""
    if not alias.setting:
        return f"refused: {alias.remedy}"
    now = f"`{alias.base}`" + (f", its `{alias.key}`" if alias.key else "")
    where = " or ".join(f"`{name}` is {value}" for name, value in alias.where.items())
    return f"{now}; where {where}, refused: {alias.remedy}" if where else now


def rows() -> list[tuple[str, str, str]]:
    """Names, commands, and what becomes of them."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    tables = {command: aliases_of(command) for command in COMMANDS}
    tables["plan"] = {  # of which it takes those of the method, too
        name: alias for name, alias in tables["plan"].items() if tables["ppo"].get(name) != alias
    }
    for name in dict.fromkeys(name for table in tables.values() for name in table):
        ends: dict[str, list[str]] = {}
        for command, table in tables.items():
            if name in table:
                ends.setdefault(becomes(table[name]), []).append(command)
        for end, commands in ends.items():
            found.setdefault((end, tuple(commands)), []).append(f"`{name}`")
    every = COMMANDS[:-1]
    return [
        (", ".join(names), "all" if of == every else ", ".join(of), end.replace("|", "\\|"))
        for (end, of), names in found.items()
    ]


def render(text: str) -> str:
    every = [("name", "commands", "becomes"), ("---",) * 3, *rows()]
    table = "".join(f"| {' | '.join(row)} |\n" for row in every)
    return _BLOCK.sub(lambda found: found[1] + table, text)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
