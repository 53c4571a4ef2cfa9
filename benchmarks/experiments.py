"""What experiments that train share: options, and where their figures are written."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT, results
from benchmarks.markdown import filled

Drawn = Callable[[dict[str, Any]], str]


def add_places(parser: argparse.ArgumentParser, name: str, seeds: Sequence[int]) -> None:
    """The options of seeds, and of the folders of models, results and documents."""
    parser.add_argument("--folder", type=Path, default=Path("runs", name), help="for the models")
    parser.add_argument("--seeds", type=int, nargs="*", default=seeds)
    parser.add_argument("--results", type=Path, default=results.RESULTS, metavar="FOLDER")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")


def write_newest(
    folder: Path, docs: Path, name: str, page: str, curves: Drawn, figures: Drawn
) -> None:
    """Writes ``plots/NAME.svg``, and the figures of ``page`` where that is, by the newest result
    file, if there is one."""
    result = results.newest_of(folder, name)
    if result is None:
        return
    (docs / "plots" / f"{name}.svg").write_text(curves(result), encoding="utf-8")
    if (told := docs / page).exists():
        told.write_text(filled(told.read_text(encoding="utf-8"), figures(result)), encoding="utf-8")
