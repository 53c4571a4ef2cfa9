"""Data sets from files, the Hub and lists; their prompts, and rows held out for evaluation."""

from __future__ import annotations

import codecs
import contextlib
import glob
import json
import os
import random
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fastrl.data.chat import as_written, check_unicode, content_text, is_chat
from fastrl.nearest import did_you_mean_path

if TYPE_CHECKING:
    from datasets import Dataset

    from fastrl.data.chat import TextOrMessages

PROMPT = "prompt"
_NEW = "__new__"  # a column until it is renamed
ROW = "__row__"  # a column with the number of a row in its file, for errors and warnings
LONG_PROMPTS = ("refuse", "drop")  # how to treat prompts longer than a model's context
USUAL_COLUMNS = (PROMPT, "query", "text")
MOST_HELD_OUT = 256  # examples, by default
_FORMATS = {
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
}
_HELD_OUT_OF = 10  # by default one example of so many is held out
_CHUNK = 1 << 22  # bytes
_AT_A_TIME = 1 << 12  # texts


def load_table(source: str, split: str = "train") -> Dataset:
    """Loads a local file, a folder of files of one format, or a data set of the Hub.

    Args:
        source: a .jsonl, .json, .parquet, .csv, .tsv or .txt file, a folder of them, a folder that
            ``Dataset.save_to_disk`` wrote, or a Hub id.
        split: the split of a Hub data set, or of a saved one that has several.

    Raises:
        FileNotFoundError: a path that does not exist, or a folder without data files.
        ValueError: no name; a file of another format, an empty or broken one, text that is not
            UTF-8 (the error names the file, and the line if it is known); a folder of several
            formats; an unknown split; a JSON integer that would be read as another number.
    """
    import datasets

    if not source.strip():
        raise ValueError("the data set's name is empty: name a file, a folder or a Hub id")
    path = Path(source)
    if path.is_file():
        return _read_files([path])
    if path.is_dir():
        if any((path / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
            saved = datasets.load_from_disk(str(path))
            if not hasattr(saved, "keys"):
                return saved
            if split not in saved:
                splits = ", ".join(saved)
                raise ValueError(f"{source} has no split {split!r}: choose one of {splits}")
            return saved[split]
        files = sorted(f for f in path.iterdir() if f.suffix in _FORMATS)
        if not files:
            raise FileNotFoundError(f"{source} holds no {', '.join(_FORMATS)} file")
        return _read_files(files)
    if path.suffix in _FORMATS or path.is_absolute() or source.startswith("."):
        raise FileNotFoundError(f"there is no data set at {source}{did_you_mean_path(path)}")
    return datasets.load_dataset(source, split=split)


@contextlib.contextmanager
def errors_name(which: str) -> Iterator[None]:
    """Context in which ValueErrors and TypeErrors begin with ``which``, the name of a data set."""
    try:
        yield
    except (ValueError, TypeError) as error:
        error.args = (f"{which}: {error}",)
        raise


def as_dataset(dataset: Any) -> Dataset:
    """A data set whose rows are Python values.

    Args:
        dataset: a ``datasets.Dataset``, a list of rows, or an object whose rows are read by index.

    Raises:
        TypeError: anything else, such as a path, a stream or a dict of data sets; a row that is no
            dict.
        ValueError: an empty data set, one with a transform, or half of a surrogate pair in a text.
    """
    import datasets

    from fastrl.data.written import column_of, with_written

    _refuse_path(dataset)
    if isinstance(dataset, datasets.IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{type(dataset).__name__} cannot be read by index: load it without streaming"
        )
    if isinstance(dataset, dict):
        raise TypeError(f"several data sets were passed: choose one of {', '.join(dataset)}")
    if len(dataset) == 0:
        raise ValueError("the data set is empty")
    if getattr(dataset, "format", {"type": None})["type"] == "custom":
        raise ValueError(
            "the data set has a transform that runs as rows are read (Dataset.with_transform() or "
            "set_transform()), which preparing it once would lose: leave out one that removes keys "
            "that are None, because trainers remove these before they apply a chat template; apply "
            "another one with dataset.map; or, for SFT, pass "
            "dataset_kwargs={'skip_prepare_dataset': True} and have the transform return "
            "trainer-ready rows (input_ids and labels)"
        )
    if not isinstance(dataset, datasets.Dataset):
        rows = [dataset[i] for i in range(len(dataset))]
        _check_rows(rows)
        try:
            # Dataset.from_list would have the first row's columns alone.
            names = dict.fromkeys(name for row in rows for name in row)
            dataset = datasets.Dataset.from_dict(
                {name: column_of([row.get(name) for row in rows]) for name in names}
            )
        except UnicodeEncodeError:
            for i, row in enumerate(rows):
                for name, value in row.items():
                    if isinstance(value, str):
                        check_unicode(value, f"column {name!r} of row {i} holds")
            raise
    return with_written(dataset.with_format(None))


def list_as_dataset(dataset: Any) -> Any:
    """A list of rows as a data set with all of their columns, also in a dict of several sets;
    anything else by :func:`fastrl.data.written.with_written`. Raises what :func:`as_dataset` raises
    for a path or a list.
    """
    from fastrl.data.written import with_written

    _refuse_path(dataset)
    if isinstance(dataset, list | tuple):
        return as_dataset(open_rows(dataset, ""))
    if isinstance(dataset, dict) and any(isinstance(x, list | tuple) for x in dataset.values()):
        return {name: list_as_dataset(rows) for name, rows in dataset.items()}
    return with_written(dataset)


def _refuse_path(dataset: Any) -> None:
    """Raises TypeError for a path, which commands take, and trainers do not."""
    if isinstance(dataset, str | os.PathLike):
        raise TypeError(
            f"{os.fspath(dataset)!r:.200} is the name of a data set, where the data set itself was "
            "expected: pass what datasets.load_dataset makes of it, with a split, or a list of rows"
        )


def is_stream(dataset: Any) -> bool:
    """Whether rows are a data set that is read in order, without a length."""
    import datasets

    return isinstance(dataset, datasets.IterableDataset)


def map_options(dataset: Any, num_proc: int | None, desc: str | None = None) -> dict[str, Any]:
    """Arguments of a data set's ``map`` and ``filter``; none for a stream's, which lack them."""
    options = {"num_proc": num_proc, **({} if desc is None else {"desc": desc})}
    return {} if is_stream(dataset) else options


def stream_columns(stream: Any) -> list[str]:
    """The names of a stream's columns; where it does not know them, of its first row's, and then
    raises ValueError for a stream without rows."""
    if stream.column_names is not None:
        return list(stream.column_names)
    return list(first_row(stream))


def first_row(stream: Any) -> dict[str, Any]:
    """The first row of a stream; raises ValueError for an empty one."""
    row = next(iter(stream), None)
    if row is None:
        raise ValueError("the data set is empty")
    return row


def open_rows(source: Any, split: str) -> Any:
    """The rows of a file, a Hub id, a data set, a list, or a dict of data sets or lists by split;
    they can be read by index. Lists are not converted, so that errors can name their rows. Raises
    what :func:`load_table` and :func:`as_dataset` raise.

    Args:
        split: the split of a data set that has several.
    """
    if isinstance(source, str | os.PathLike):
        return as_dataset(load_table(os.fspath(source), split))
    if isinstance(source, dict) and split in source:
        source = source[split]
    if isinstance(source, list | tuple) and source:
        _check_rows(source)
        return as_written(source)
    return as_dataset(source)


def _check_rows(rows: Iterable[Any]) -> None:
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise TypeError(f"row {i} is a {type(row).__name__}: rows are dicts by column")


def columns_of(rows: Any) -> list[str]:
    """The names of the columns, without the one that :func:`numbered` adds."""
    if hasattr(rows, "column_names"):
        names = list(rows.column_names)
    else:
        names = list(dict.fromkeys(name for row in rows for name in row))
    return [name for name in names if name != ROW]


def numbered(table: Dataset) -> Dataset:
    """The table with each row's number in its file, which errors name once rows are shuffled or
    split; a table that has these numbers stays as it is."""
    if ROW in table.column_names:
        return table
    return table.add_column(ROW, list(range(len(table))))


def row_number(row: Mapping[str, Any], i: int) -> int:
    """The number of a row in its file, if it is :func:`numbered`; else ``i``."""
    return row.get(ROW, i)


def each_row(rows: Any) -> Iterator[Mapping[str, Any]]:
    """All rows, read from a data set in batches, which is many times faster than one by one."""
    if not hasattr(rows, "column_names"):
        yield from rows
        return
    for batch in rows.iter(1000):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def take_prompts(
    table: Dataset,
    column: str | None = None,
    *,
    words: int | None = None,
    max_tokens: int | None = None,
    tokenizer: Any = None,
) -> Dataset:
    """The table with a column "prompt", without the rows whose prompt is empty.

    Args:
        column: the column of texts or of chat messages; by default the first of "prompt", "query"
            and "text".
        words: keep each text's first words only.
        max_tokens: keep each text's first tokens only, after ``words``, by ``tokenizer``.

    Raises:
        ValueError: no such column (the error lists the columns), no prompt left, texts beside
            chats, or a limit for chats, which cannot be cut.
        TypeError: a column of something other than text or chats.
    """
    column = find_prompt_column(table, column)
    prompts = table[column][:]
    for row, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not is_chat(prompt) and prompt != []:
            raise TypeError(
                f"column {column!r} must hold text or chat messages, but row {row} holds "
                f"{'nothing (null)' if prompt is None else type(prompt).__name__}"
            )
    texts = [isinstance(prompt, str) for prompt in prompts]
    if len({*texts}) > 1:
        raise ValueError(
            f"column {column!r} holds a text in row {texts.index(True)} and chat messages in row "
            f"{texts.index(False)}: write all as one of the two"
        )
    for name, limit in (("prompt_words", words), ("max_prompt_tokens", max_tokens)):
        if limit is not None and not isinstance(prompts[0], str):
            raise ValueError(
                f"{name} cuts texts, and column {column!r} holds chat messages, which cannot be "
                "cut: leave it out"
            )
    if words is not None:
        prompts = [" ".join(text.split()[:words]) for text in prompts]
    if max_tokens is not None:
        for begin in range(0, len(prompts), _AT_A_TIME):
            chunk = prompts[begin : begin + _AT_A_TIME]
            encoded = tokenizer(chunk, add_special_tokens=False)["input_ids"]
            for row, ids in enumerate(encoded, start=begin):
                if len(ids) > max_tokens:
                    prompts[row] = tokenizer.decode(ids[:max_tokens])
    kept = [row for row, prompt in enumerate(prompts) if _has_text(prompt)]
    if not kept:
        raise ValueError(f"column {column!r} holds no text: every prompt is empty")
    dropped = sorted({*range(len(prompts))} - {*kept}) if len(kept) < len(prompts) else []
    if dropped:
        warnings.warn(
            f"{len(dropped)} of {len(prompts)} prompts dropped: column {column!r} is empty there, "
            f"such as in row {row_number(table[dropped[0]], dropped[0])}",
            stacklevel=3,
        )
    if words is max_tokens is None and column == PROMPT:
        return table.select(kept)
    return _with_column(table, PROMPT, prompts).select(kept)


def _with_column(table: Dataset, name: str, values: list[Any]) -> Dataset:
    """The table with these values as its last column; another one of that name is dropped."""
    from fastrl.data.written import column_of

    # The column is added before others go: a table without columns has no rows.
    table = table.add_column(_NEW, column_of(values))
    others = [x for x in table.column_names if x != name]
    return table.select_columns(others).rename_column(_NEW, name)


def sample_rows(table: Dataset, count: int, seed: int) -> Dataset:
    """``count`` random rows of distinct prompts, or all if there are fewer."""
    row_of = {_key(prompt): row for row, prompt in enumerate(table[PROMPT][:])}
    rows = sorted(row_of.values())
    return table.select(random.Random(seed).sample(rows, min(count, len(rows))))


def drop_prompts(table: Dataset, prompts: Collection[TextOrMessages]) -> Dataset:
    """The rows whose prompt is not in ``prompts``; raises ValueError if none is left."""
    unwanted = {_key(prompt) for prompt in prompts}
    kept = [row for row, prompt in enumerate(table[PROMPT][:]) if _key(prompt) not in unwanted]
    if not kept:
        raise ValueError(
            f"the {len(unwanted)} evaluation prompts leave none to train on: take fewer of them"
        )
    return table.select(kept)


def _key(prompt: TextOrMessages) -> str:
    """A text that identifies the prompt."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


def _has_text(prompt: TextOrMessages) -> bool:
    if isinstance(prompt, str):
        return bool(prompt.strip())
    return any(message and content_text(message).strip() for message in prompt)


def count_prompts(table: Dataset) -> int:
    """The number of distinct prompts."""
    return len({_key(prompt) for prompt in table[PROMPT][:]})


def held_out_count(asked: int | None, available: int) -> int:
    """How many examples to hold out: ``asked``, or by default a tenth of all, but at most 256."""
    return min(MOST_HELD_OUT, available // _HELD_OUT_OF) if asked is None else asked


def _read_files(files: list[Path]) -> Dataset:
    import datasets

    formats = {_FORMATS.get(file.suffix) for file in files}
    if None in formats:
        raise ValueError(f"cannot read {files[0].name}: data files end in {', '.join(_FORMATS)}")
    if len(formats) > 1:
        raise ValueError(f"{files[0].parent} mixes file formats: name one file instead")
    for file in files:
        _check_bytes(file)
    options = {"delimiter": "\t"} if files[0].suffix == ".tsv" else {}
    kind = formats.pop()
    try:
        with quiet():
            table = datasets.load_dataset(
                kind,
                data_files=[glob.escape(str(file)) for file in files],  # names, not patterns
                split="train",
                **options,
            )
    except (
        datasets.exceptions.DatasetGenerationError,
        ValueError,
        TypeError,  # before datasets 5, for rows that are no objects
        StopIteration,
    ) as error:
        _raise_read_error(files, error)
    if kind != "json":
        return table
    _check_integers(table, files)
    return _as_in_files(table, files)


def _rows_of_json(files: list[Path]) -> list[Any]:
    rows: list[Any] = []
    for file in files:
        text = file.read_text("utf-8-sig")
        try:
            rows += json.loads(text) if text.lstrip().startswith("[") else [json.loads(text)]
        except json.JSONDecodeError:  # a row in each line
            rows += [json.loads(line) for line in text.split("\n") if line.strip()]
    return rows


_LONG = re.compile(r"\d{16}")  # a float may lose the last of so many digits


def _check_integers(table: Dataset, files: list[Path]) -> None:
    """Raises ValueError for an integer that ``datasets`` has loaded as another number: it does so
    in columns with an integer of more than 64 bits."""
    if not any(_LONG.search(file.read_text("utf-8-sig")) for file in files):
        return
    for i, (written, read) in enumerate(zip(_rows_of_json(files), table, strict=False)):
        for name, value in written.items():
            for number, other in _integers(value, read.get(name)):
                if number != other:
                    raise ValueError(
                        f"{files[0] if len(files) == 1 else files[0].parent}, row {i}: the integer "
                        f"{number} in column {name!r} would be read as {other!r}, as integers that "
                        "need more than 64 bits are, and others beside them: write the column as "
                        "text, in quotes"
                    )


def _integers(written: Any, read: Any) -> Iterator[tuple[int, int | float]]:
    """The integers in a value of JSON, each with the number that was read in its place."""
    if isinstance(written, dict) and isinstance(read, dict):
        for name, value in written.items():
            yield from _integers(value, read.get(name))
    elif isinstance(written, list) and isinstance(read, list):
        for pair in zip(written, read, strict=False):
            yield from _integers(*pair)
    elif isinstance(written, int) and isinstance(read, int | float):
        yield written, read


def _as_in_files(table: Dataset, files: list[Path]) -> Dataset:
    """The table of JSON files, in which three kinds of columns are read again from the files: texts
    such as "2024-01-01", which ``datasets`` turns into dates; mappings in which a key is null,
    perhaps because it occurs in other rows alone; and columns that ``datasets`` keeps as JSON, with
    rounded numbers."""
    from fastrl.data.chat import without_nulls

    names = [
        name
        for name, kind in table.features.items()
        if any(sign in str(kind) for sign in ("timestamp", "Json("))
        or ("{" in str(kind) and any(without_nulls(x) != x for x in table[name]))
    ]
    rows, order = _rows_of_json(files) if names else [], table.column_names
    if len(rows) != len(table):  # no column to read again, or a file of one object
        return table
    for name in names:
        table = _with_column(table, name, [row.get(name) for row in rows])
    return table.select_columns(order)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides the progress bar and logs of ``datasets``, which would stand above our error."""
    import datasets
    from datasets.utils import logging

    level, shown = logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    logging.set_verbosity(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            datasets.enable_progress_bars()


def _check_bytes(file: Path) -> None:
    """Raises ValueError for an empty file, a broken Parquet file, or text that is not UTF-8."""
    if file.stat().st_size == 0:
        raise ValueError(f"{file} is empty")
    if file.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            pyarrow.parquet.read_schema(file)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{file} cannot be read as Parquet: {error}") from error
        return
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with file.open("rb") as stream:
        while True:
            chunk = stream.read(_CHUNK)
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                raise ValueError(
                    f"{file}, line {line} is not UTF-8 (byte 0x{error.object[error.start]:02x}): "
                    "save the file as UTF-8, or convert it with iconv -f LATIN1 -t UTF-8"
                ) from error
            if not chunk:
                return
            line += text.count("\n")


def _raise_read_error(files: list[Path], error: Exception) -> NoReturn:
    """Raises ValueError with the file that could not be read, and why; errors of the operating
    system are raised as they are."""
    cause = error.__cause__ or error
    if isinstance(cause, OSError):
        raise cause
    reason = " ".join(str(cause).split())
    if len(files) > 1:
        for file in files:
            _read_files([file])  # raises for the first that is broken
        raise ValueError(
            f"the files in {files[0].parent} do not fit together, their columns differ: {reason}"
        ) from error
    (file,) = files
    if "corresponds to no data" in reason:
        raise ValueError(f"{file} holds no rows") from error
    if _FORMATS[file.suffix] == "json":
        _check_json(file)
    raise ValueError(f"{file} cannot be read as {file.suffix[1:].upper()}: {reason}") from error


def _check_json(file: Path) -> None:
    """Raises ValueError for no rows, the first line that is not JSON, or row that is no object."""
    text = file.read_text(encoding="utf-8-sig")
    if not text.strip():
        raise ValueError(f"{file} holds no rows")
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            if file.suffix == ".json":
                raise ValueError(
                    f"{file}, line {error.lineno} is not valid JSON: {error.msg}"
                ) from error
            rows = None
        if rows is not None:
            for number, row in enumerate(rows):
                _check_object(row, f"{file}, row {number}")
            return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{file}, line {number} is not valid JSON: {error.msg} (column {error.colno})"
            ) from error
        _check_object(row, f"{file}, line {number}")


def _check_object(row: Any, place: str) -> None:
    if not isinstance(row, dict):
        raise ValueError(
            f"{place} is not an object with named columns but {json.dumps(row)[:40]}: write "
            '{"text": "..."}, say'
        )


def find_prompt_column(table: Dataset, column: str | None) -> str:
    """Returns ``column``, or where it is None the first of "prompt", "query" and "text"; raises
    ValueError if the table lacks it."""
    columns = ", ".join(columns_of(table))
    if column is None:
        column = next((name for name in USUAL_COLUMNS if name in table.column_names), None)
        if column is None:
            raise ValueError(
                f"the data set has none of the columns {', '.join(USUAL_COLUMNS)}: "
                f"choose a prompt column among {columns} (prompt_column)"
            )
    elif column not in table.column_names:
        raise ValueError(f"the data set has no column {column!r}: its columns are {columns}")
    return column
