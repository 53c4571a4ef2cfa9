"""Tables in Markdown, and their places in pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Markdown, with the first columns and the last one to the left; empty without rows."""
    rows = [list(row) for row in rows]
    if not rows:
        return ""
    rule = ["---"] * left + ["--:"] * (len(head) - left - 1) + ["---"]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def filled(page: str, figures: str) -> str:
    """A page with figures between its marks, in place of those that were there."""
    before, rest = page.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{figures}\n{END}{rest.split(END, 1)[1]}"
