"""Progress bars that are left before their end."""

from __future__ import annotations

import sys
from typing import Any


def drop_bar(bar: Any) -> None:
    """Takes a bar away that does not reach its end, and says in a line how far it came."""
    bar.leave = False
    bar.close()
    if bar.total:
        unit = bar.unit.strip()
        line = f"{bar.desc or 'progress'}: stopped after {bar.n} of {bar.total} {unit}s"
        type(bar).write(line, file=sys.stderr)


def drop_bars() -> None:
    """All bars that are open, whatever library made them; nothing without tqdm."""
    tqdm = sys.modules.get("tqdm")
    if tqdm is None:
        return
    # tqdm keeps its open bars here, and has no public name for them.
    for bar in list(getattr(tqdm.tqdm, "_instances", ())):
        bar.leave = False
        bar.close()
