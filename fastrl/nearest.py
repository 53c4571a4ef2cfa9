"""Suggestions for misspelt names, as the ends of error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def did_you_mean(name: str, names: Iterable[str], likeness: float = 0.6) -> str:
    """``: did you mean 'that'?`` with the most similar name; "" where none has the ``likeness``."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=likeness)
    return f": did you mean {near[0]!r}?" if near else ""


def did_you_mean_path(path: Path) -> str:
    """``: did you mean 'that'?`` with a path that exists and has a similar name in place of a
    missing path's first name that does not exist; "" where there is no such path."""
    missing = next((x for x in (*path.parents[::-1], path) if not x.exists()), path)
    if not missing.parent.is_dir():
        return ""
    paths = {x.name: x for x in missing.parent.iterdir()}
    rest = path.relative_to(missing)
    near = [x for x in difflib.get_close_matches(missing.name, paths) if (paths[x] / rest).exists()]
    return f": did you mean {str(paths[near[0]] / rest)!r}?" if near else ""
