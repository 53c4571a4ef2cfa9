"""The tables to which users add rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastrl import registry
from fastrl.alignment.losses import LOSSES
from fastrl.learn import preferences
from fastrl_kernels.policy_losses import POLICY_LOSSES


@contextmanager
def kept() -> Iterator[None]:
    """Context behind which they have the rows that they had before."""
    tables: list[dict[str, Any]] = [LOSSES, preferences._ROWS, POLICY_LOSSES, registry._GROUPS]
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, rows in zip(tables, before, strict=True):
            table.clear()
            table.update(rows)
