"""``fastrl samples``: prints or exports the samples that a run was trained on."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastrl.run.export import KINDS, write_rows
from fastrl.run.folder import RunFolder
from fastrl.run.ledger import no_step, read_ledger
from fastrl.run.terminal import plain, run_console
from fastrl.tools.commands.flags import UsageError, own_parser
from fastrl.tools.reports.trainer_folder import open_run

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.table import Table

LENGTH = "length"  # a column that is not in the ledger: the completion's number of tokens
_DRAW_NOTHING = ("sft", "reward", "SFTTrainer", "RewardTrainer", "DPOTrainer", "KTOTrainer")
_ORDERS = {"step": "step", "reward": "reward", "length": LENGTH}
_SHOWN = ("step", "sample", "reward", LENGTH, "finish_reason", "prompt", "completion")
_LONGEST = 12  # elements of a list that are shown
_TEXTS = {"prompt": 2, "completion": 4}  # columns of texts, and their shares of the width


def run_samples(arguments: Sequence[str]) -> None:
    """Prints a table of samples, or writes them to a file."""
    flags = parse_flags(arguments)
    folder = ledger_of(flags.run)
    exported = None if flags.export is None else Path(flags.export)
    columns = flags.columns.split(",") if flags.columns else None
    top = flags.top or (10 if exported is None else None)
    is_single = flags.step is not None and flags.sample is not None
    if columns is None and not is_single and exported is None:
        columns = list(_SHOWN)
    in_order = exported is not None and flags.sort is None
    rows, count = choose(
        folder,
        columns,
        flags.step,
        flags.sample,
        flags.sort or "step",
        flags.reverse != in_order,
        top,
    )
    console = run_console()
    if exported is not None:
        write_rows(rows, exported)
        console.print(f"{rows.num_rows} samples: {exported}")
        return
    console.print(record_table(rows) if is_single and flags.columns is None else _table(rows))
    if rows.num_rows < count:
        console.print(f"{rows.num_rows} of {count} samples; --top shows more")


def make_parser() -> argparse.ArgumentParser:
    parser = own_parser("samples", __doc__)
    parser.add_argument(
        "run", metavar="RUN", help="A command's --output, or a trainer's output_dir."
    )
    parser.add_argument("--step", type=int, metavar="N", help="Samples of this step only.")
    parser.add_argument(
        "--sample", type=int, metavar="I", help="This sample of the step, or of each, from 0."
    )
    parser.add_argument(
        "--sort",
        choices=tuple(_ORDERS),
        help="Latest step, highest reward or longest completion first [step; as they were drawn in "
        "an exported file].",
    )
    parser.add_argument("--reverse", action="store_true", help="Sort the other way round.")
    parser.add_argument(
        "--top", type=int, metavar="K", help="How many samples [10; all in an exported file]."
    )
    parser.add_argument(
        "--columns", metavar="A,B", help="Columns to show: the ledger's, or length."
    )
    parser.add_argument(
        "--export", metavar="FILE", help="Write the samples to a .jsonl, .csv or .parquet file."
    )
    return parser


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    flags = make_parser().parse_args(list(arguments))
    if flags.top is not None and flags.top < 1:
        raise UsageError(f"--top must be at least 1, got {flags.top}")
    if flags.export is not None and Path(flags.export).suffix not in KINDS:
        kinds = ", ".join(KINDS)
        raise UsageError(f"--export {flags.export}: the file's name must end in one of {kinds}")
    if flags.export is not None and not Path(flags.export).parent.is_dir():
        raise UsageError(
            f"--export {flags.export}: there is no folder {Path(flags.export).parent}: make it, or "
            "name a file in another one"
        )
    return flags


def ledger_of(run: str) -> Path:
    """The folder of a run's ledger; raises FileNotFoundError where the run has none."""
    folder = RunFolder(run)
    if folder.ledger.is_dir():
        return folder.ledger
    command = None
    with contextlib.suppress(FileNotFoundError):
        command = open_run(run).config.get("command")
    if command in _DRAW_NOTHING:
        raise FileNotFoundError(f"{run} has no ledger: {command} learns from data alone")
    latest = folder.path / "completions"
    kept = f"; {latest} has the latest ones of each log, as Parquet" if latest.is_dir() else ""
    raise FileNotFoundError(
        f"{run} has no ledger: there is no folder {folder.ledger}; name the --output of fastrl ppo "
        "or grpo, which keep one unless --no-ledger is given, of fastrl align --ledger, or the "
        f"output_dir of a trainer with ledger=True{kept}"
    )


def choose(
    folder: Path,
    columns: Sequence[str] | None = None,
    step: int | None = None,
    sample: int | None = None,
    sort: str = "step",
    reverse: bool = False,
    top: int | None = None,
) -> tuple[pa.Table, int]:
    """Samples of a ledger, in order, and how many there are without ``top``.

    Args:
        columns: names of the ledger's columns, or "length"; None: all of the ledger's.
        step, sample: the samples' step, from 1, and their number in a step, from 0; None: all.
        sort: "step": latest first; "reward": highest first; "length": longest first.

    Raises:
        ValueError: a step, sample or column that is not there.
    """
    key = _ORDERS[sort]
    in_steps = _with_length(folder, ["step", "sample", key], step or 1, step)
    if in_steps.num_rows == 0:
        raise ValueError(no_step(folder, 1 if step is None else step))
    if sample is not None:
        in_steps = in_steps.filter(in_steps["sample"].to_numpy() == sample)
        if in_steps.num_rows == 0:
            where = "no step" if step is None else f"step {step}"
            raise ValueError(f"--sample {sample}: {where} has no such sample; the first is 0")
    order = "ascending" if reverse else "descending"
    # Equal samples stand with the latest step first, in the step's order; NaN is last either way.
    ties = [] if key == "step" else [("step", "descending")]
    chosen = in_steps.sort_by([(key, order), *ties, ("sample", "ascending")]).slice(0, top)
    wanted = list(zip(chosen["step"].to_pylist(), chosen["sample"].to_pylist(), strict=True))
    steps = [step for step, _ in wanted]
    names = None if columns is None else [*columns, "step", "sample"]
    rows = _with_length(folder, names, min(steps), max(steps))
    places = zip(rows["step"].to_pylist(), rows["sample"].to_pylist(), strict=True)
    index = {place: i for i, place in enumerate(places)}
    rows = rows.take([index[place] for place in wanted])
    return rows if columns is None else rows.select(columns), in_steps.num_rows


def _with_length(
    folder: Path, names: Sequence[str] | None, first: int, last: int | None
) -> pa.Table:
    """Reads a ledger's rows as :func:`read_ledger` does, with lengths if ``names`` has "length"."""
    import pyarrow.compute as pc

    if names is None or LENGTH not in names:
        return read_ledger(folder, names, first, last)
    read = [name for name in names if name != LENGTH]
    table = read_ledger(folder, [*read, "completion_ids"], first, last)
    lengths = pc.list_value_length(table["completion_ids"])
    return table.append_column(LENGTH, lengths).select(list(dict.fromkeys(names)))


def _table(rows: pa.Table) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_lines=True)
    for name in rows.column_names:
        is_text = name in _TEXTS or name == "finish_reason"
        table.add_column(
            plain(name),
            ratio=_TEXTS.get(name),
            justify="left" if is_text else "right",
            overflow="fold",
        )
    for row in rows.to_pylist():
        table.add_row(*(plain(_shown(x)) for x in row.values()))
    return table


def record_table(rows: pa.Table) -> Table:
    """A table of a single sample, with a line per column."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.to_pylist()[0].items():
        table.add_row(plain(name), plain(_shown(value)))
    return table


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        length = f" … ({len(value)})" if len(value) > _LONGEST else ""
        return " ".join(map(_shown, value[:_LONGEST])) + length
    return f"{value:.4g}" if isinstance(value, float) else str(value).strip()
