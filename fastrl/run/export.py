"""Tables as files that other programs read."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


def write_rows(rows: pa.Table, path: Path) -> None:
    """Writes rows to a file, as its ending says: .jsonl (NaN becomes null), .csv (lists as JSON,
    NaN becomes empty) or .parquet (NaN stays); raises KeyError for another ending."""
    KINDS[path.suffix](rows, path)


def _write_jsonl(rows: pa.Table, path: Path) -> None:
    lines = (json.dumps(_plain(row), ensure_ascii=False) + "\n" for row in rows.to_pylist())
    path.write_text("".join(lines), encoding="utf-8")


def _write_csv(rows: pa.Table, path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows.column_names)
        writer.writeheader()
        for row in rows.to_pylist():
            plain = _plain(row)
            lists = {name: json.dumps(x) for name, x in plain.items() if isinstance(x, list)}
            writer.writerow({**plain, **lists})


def _write_parquet(rows: pa.Table, path: Path) -> None:
    from pyarrow import parquet

    parquet.write_table(rows, path)


KINDS = {".jsonl": _write_jsonl, ".csv": _write_csv, ".parquet": _write_parquet}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, list):
        return [_plain(x) for x in value]
    return None if isinstance(value, float) and math.isnan(value) else value
