"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Markdown, with the first columns and the last one to the left; empty without rows."""
    rows = [list(row) for row in rows]
    if not rows:
        return ""
    rule = ["---"] * left + ["--:"] * (len(head) - left - 1) + ["---"]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))
