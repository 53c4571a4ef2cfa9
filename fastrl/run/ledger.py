"""The ledger of a run: a row for each sample that it was trained on, in Parquet files."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastrl.run.files import sync_file, write_file
from fastrl.run.machine import machine, versions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

FORMAT = 1
PER_FUNCTION = "reward/"  # begins the names of columns, one per reward function
_NAME = re.compile(r"steps-(\d+)-(\d+)\.parquet")
_FACTS = b"fastrl"  # key of the files' metadata
_NOT_REPEATED = (
    *("prompt_ids", "completion", "completion_ids", "logprobs", "values", "advantages"),
    *("token_scores", "written", "teacher_prompt_ids", "teacher_logprobs"),
)


@functools.cache
def fields() -> dict[str, pa.DataType]:
    """The columns that every ledger has, and their types; log-probs in nats."""
    import pyarrow as pa

    tokens, numbers = pa.list_(pa.int32()), pa.list_(pa.float32())
    return {
        "step": pa.int32(),  # PPO's step, or another trainer's generation, from 1
        "sample": pa.int32(),  # index in the step's batch
        "prompt_row": pa.int64(),  # the prompt's row in the data set
        "prompt": pa.string(),
        "prompt_ids": tokens,
        "completion": pa.string(),
        "completion_ids": tokens,
        "written": pa.list_(pa.bool_()),  # which completion tokens the policy wrote; null: all
        "finish_reason": pa.string(),
        "seed": pa.int64(),  # with the next two the key of the draws
        "sample_id": pa.int64(),
        "number": pa.int32(),  # among the samples of its prompt
        "slots": pa.int32(),  # the engine's slots, and tokens of each: see fastrl.rollout.kv_cache
        "slot_length": pa.int32(),
        "weights_version": pa.int64(),  # optimizer steps before the sample was drawn
        "logprobs": numbers,  # the rollout's, at the policy's temperature
        "values": numbers,  # the rollout's
        "advantages": numbers,  # empty for a sample that was left out of the step
        "reward": pa.float32(),
        "score": pa.float32(),  # the reward less penalties
        "token_scores": numbers,  # one per completion token; null where only their sum is known
    }


@functools.cache
def teacher_fields() -> dict[str, pa.DataType]:
    """The columns that the ledger of a run with teachers has beside :func:`fields`."""
    import pyarrow as pa

    return {
        "teacher": pa.string(),  # its name; null where there is one
        "teacher_prompt_ids": pa.list_(pa.int32()),  # null where teachers read the prompts
        # At the policy's temperature, of the tokens that advantages are of; null where the teacher
        # is a function.
        "teacher_logprobs": pa.list_(pa.float32()),
    }


@functools.cache
def support_fields() -> dict[str, pa.DataType]:
    """The column that the ledger of a run over the sets that tokens were drawn from has, too."""
    import pyarrow as pa

    return {"support": pa.string()}  # a hash of the sample's sets


class Lists(NamedTuple):
    """A column of lists of numbers, one after the other."""

    values: np.ndarray  # [sum of lengths]
    lengths: Sequence[int] | np.ndarray


class Ledger:
    """Writes the ledger of a run, a file for ``every`` steps.

    A file holds whole steps, the first and the last in its name:
    ``steps-000001-000020.parquet``. Its metadata, as JSON, are the versions of libraries, the
    machine and ``facts``, which hold for all rows of the file.

    Args:
        folder: the files' folder, which is made with the first file.
        every: a file is written at each multiple of this; until then steps are in memory.

    Raises:
        ValueError: ``every`` below 1.
    """

    def __init__(self, folder: str | Path, every: int = 20) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.folder, self.every = Path(folder), every
        self.facts: dict[str, Any] = {}
        self._rows: list[pa.Table] = []  # rows of steps that are not written yet
        self._unsynced: list[Path] = []
        self._versions = versions()

    @property
    def last_step(self) -> int:
        """The last step in the ledger; 0 if it is empty."""
        if self._rows:
            return self._rows[-1]["step"][0].as_py()
        return max((file.last for file in _files(self.folder)), default=0)

    def check(self, step: int) -> None:
        """Raises ValueError where the ledger has this step, or a later one."""
        if step <= self.last_step:
            raise ValueError(
                f"the ledger {self.folder} has step {self.last_step} already, and is to get step "
                f"{step}: name another folder, or supersede the steps after {step - 1}"
            )

    def add(self, step: int, columns: Mapping[str, Sequence[Any] | np.ndarray | Lists]) -> None:
        """Adds the samples of a step.

        Args:
            columns: the columns of :func:`fields` other than the first two, those of reward
                functions, :func:`teacher_fields` and :func:`support_fields`; columns that are left
                out are null, or not there where they are not in every ledger.

        Raises:
            ValueError: the ledger has this step, or a later one.
            KeyError: another column.
        """
        self.check(step)
        self._rows.append(_table(step, columns))
        if step % self.every == 0:
            self.flush()

    def flush(self, *, sync: bool = False) -> None:
        """Writes the steps that are in memory.

        Args:
            sync: also wait until the disk has all files.
        """
        import pyarrow as pa

        if self._rows:
            self.folder.mkdir(parents=True, exist_ok=True)
            table = pa.concat_tables(self._rows, promote_options="default")
            first, last = (self._rows[i]["step"][0].as_py() for i in (0, -1))
            facts = {"versions": self._versions, "machine": machine(), **self.facts}
            self._write(first, last, table, {"format": FORMAT, **facts})
            self._rows = []
        if sync and self._unsynced:
            for path in (*self._unsynced, self.folder, self.folder.parent):
                sync_file(path)
            self._unsynced = []

    def supersede(self, after_step: int) -> None:
        """Moves files with steps after ``after_step`` to a folder ``superseded-N``, N the first
        free number. Earlier steps in such a file stay, in a new file."""
        self.flush()
        for unfinished in self.folder.glob(".steps-*"):  # left by a process that was killed
            unfinished.unlink()
        later = [file for file in _files(self.folder) if file.last > after_step]
        if not later:
            return
        # Earlier steps first: after an interruption they are in two files, and not missing.
        for file in (file for file in later if file.first <= after_step):
            facts, table = _read(file.path)
            kept = _of_steps(table, file.first, after_step)
            self._write(file.first, after_step, kept, facts)
        self.flush(sync=True)
        number = 1
        while (target := self.folder / f"superseded-{number}").exists():
            number += 1
        target.mkdir()
        for file in later:
            file.path.rename(target / file.path.name)

    def _write(self, first: int, last: int, table: pa.Table, facts: Mapping[str, Any]) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        metadata = {_FACTS: json.dumps(facts, default=str)}
        buffer = pa.BufferOutputStream()
        parquet.write_table(
            table.replace_schema_metadata(metadata),
            buffer,
            compression="zstd",
            use_dictionary=[name for name in table.column_names if name not in _NOT_REPEATED],
            write_page_checksum=True,
        )
        path = self.folder / f"steps-{first:06d}-{last:06d}.parquet"
        write_file(path, buffer.getvalue().to_pybytes())
        self._unsynced.append(path)


def read_ledger(
    folder: str | Path,
    columns: Iterable[str] | None = None,
    first: int = 1,
    last: int | None = None,
) -> pa.Table:
    """Reads a ledger's rows, in order of step and sample; no rows where there is no ledger.

    Only the files that have some of these steps are read.

    Args:
        folder: the ledger's folder.
        columns: the columns' names; None: all.
        first, last: steps, both included; None: up to the ledger's last.

    Raises:
        ValueError: a column that no file has; a file that is damaged, or of a newer fastrl.
    """
    import pyarrow as pa

    names = None if columns is None else list(dict.fromkeys(columns))
    files = _files(Path(folder))
    chosen = [f for f in files if f.last >= first and (last is None or f.first <= last)]
    _check_columns(folder, names, files)
    tables = [_no_rows(names)]
    for file in chosen:
        _, table = _read(file.path, names)
        tables.append(_of_steps(table, first, file.last if last is None else last))
    rows = pa.concat_tables(tables, promote_options="default")
    return rows if names is None else rows.select(names)


def read_facts(folder: str | Path, first: int, last: int) -> list[dict[str, Any]]:
    """The facts that hold for the samples of some steps, "versions", "machine" and others: a dict
    for each file that has some of these steps.

    Raises:
        ValueError: a file that is damaged, or of a newer fastrl.
    """
    by_file = []
    for file in _files(Path(folder)):
        if file.last >= first and file.first <= last:
            with _open(file.path) as (_, facts):
                by_file.append(facts)
    return by_file


def no_step(folder: str | Path, step: int) -> str:
    """The message that a step is not in a ledger."""
    files = _files(Path(folder))
    contents = f"has the steps {files[0].first} to {files[-1].last}" if files else "is empty"
    return f"the ledger {folder} does not have step {step}: it {contents}"


class _File(NamedTuple):
    path: Path
    first: int
    last: int


def _files(folder: Path) -> list[_File]:
    """A ledger's files in the order of steps. A file whose steps are in another one, too, as after
    an interruption, is left out."""
    if not folder.is_dir():
        return []
    named = [(path, match) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    files = [_File(path, int(match[1]), int(match[2])) for path, match in named]
    kept: list[_File] = []
    for file in sorted(files, key=lambda file: (file.first, -file.last)):
        if not kept or file.last > kept[-1].last:
            kept.append(file)
    return kept


def _read(path: Path, names: Iterable[str] | None = None) -> tuple[dict[str, Any], pa.Table]:
    """A file's metadata, and its columns of these names, to which the column of steps is added."""
    import pyarrow as pa

    with _open(path) as (file, facts):
        columns = file.schema_arrow.names
        wanted = columns if names is None else {"step", *names}
        table = file.read(columns=[name for name in columns if name in wanted])
        expected = pa.schema([(name, _type_of(name)) for name in table.column_names])
        return facts, table.cast(expected).replace_schema_metadata(None)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[ParquetFile, dict[str, Any]]]:
    """Context with a file and its metadata; raises ValueError if damaged, or of a newer fastrl."""
    import pyarrow as pa
    from pyarrow import parquet

    newer = None
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            facts = json.loads(file.schema_arrow.metadata[_FACTS])
            if facts["format"] > FORMAT:
                newer = facts["format"]
            else:
                yield file, facts
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # an error of the file system
            raise
        raise ValueError(
            f"{path} is damaged ({error}): put a copy in its place, or move it elsewhere to go on "
            "without its steps"
        ) from error
    if newer is not None:
        raise ValueError(
            f"{path} was written by a newer fastrl (format {newer}, this one reads {FORMAT}): "
            "update fastrl"
        )


def _table(step: int, columns: Mapping[str, Any]) -> pa.Table:
    """The rows of a step. A column that is given as None is null."""
    import pyarrow as pa

    count = max(
        len(x.lengths if isinstance(x, Lists) else x) for x in columns.values() if x is not None
    )
    numbered = {"step": np.full(count, step), "sample": np.arange(count), **columns}
    arrays = {}
    for name in dict.fromkeys([*fields(), *columns]):
        kind, column = _type_of(name), numbered.get(name)
        if column is None:
            arrays[name] = pa.nulls(count, kind)
        elif isinstance(column, Lists):
            offsets = np.concatenate([[0], np.cumsum(column.lengths)]).astype(np.int32)
            values = pa.array(column.values, kind.value_type)
            arrays[name] = pa.ListArray.from_arrays(pa.array(offsets), values)
        else:
            arrays[name] = pa.array(column, kind)
    return pa.table({name: array.cast(_type_of(name)) for name, array in arrays.items()})


def _of_steps(table: pa.Table, first: int, last: int) -> pa.Table:
    steps = table["step"].to_numpy()
    return table.filter((steps >= first) & (steps <= last))


def _type_of(name: str) -> pa.DataType:
    """The type of a column of that name; raises KeyError for another name."""
    import pyarrow as pa

    if name.startswith(PER_FUNCTION):
        return pa.float32()
    return {**fields(), **teacher_fields(), **support_fields()}[name]


def _no_rows(names: Iterable[str] | None) -> pa.Table:
    import pyarrow as pa

    names = fields() if names is None else names
    return pa.schema([(name, _type_of(name)) for name in names]).empty_table()


def _check_columns(folder: str | Path, names: Sequence[str] | None, files: Sequence[_File]) -> None:
    """Raises ValueError for a column that no file has."""
    unknown = [name for name in names or () if name not in fields()]
    if not unknown or (not files and all(name.startswith(PER_FUNCTION) for name in unknown)):
        return
    columns = dict.fromkeys(fields())
    for file in files:
        with _open(file.path) as (opened, _):
            columns |= dict.fromkeys(opened.schema_arrow.names)
    for name in unknown:
        if name not in columns:
            raise ValueError(
                f"the ledger {folder} has no column {name!r}: its columns are {', '.join(columns)}"
            )
