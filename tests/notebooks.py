"""`python -m tests.notebooks`: do the notebooks of examples/ run, each in a new kernel?

Each runs in an empty folder; a cell that raises, or writes to stderr, is an error. With ``--write``
the notebooks keep their outputs, without times and versions. PART=WORD draws one notebook; names as
arguments choose some.
"""

import argparse
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.part import drawn

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
SECONDS = 1800  # for a cell: none hangs for ever
_QUIET = {"PYTHONWARNINGS": "ignore:IProgress not found"}  # tqdm's, where there are no widgets


def main(argv: Sequence[str] | None = None) -> int:
    """Execute, print a line for each notebook, and return 1 where one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.notebooks", description="run the notebooks, each in a new kernel"
    )
    names = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    parser.add_argument("name", nargs="*", help=f"only these of {', '.join(names)}")
    parser.add_argument("--write", action="store_true", help="keep the outputs in the notebooks")
    args = parser.parse_args(argv)
    if unknown := set(args.name) - set(names):
        parser.error(f"no such notebook: {', '.join(sorted(unknown))}")
    failed = 0
    for name in args.name or drawn(names, "notebooks"):
        begin = time.perf_counter()
        wrong = execute(FOLDER / f"{name}.ipynb", args.write)
        print(f"{name}: {wrong or 'passed'}, {time.perf_counter() - begin:.0f} s", flush=True)
        failed += bool(wrong)
    return int(failed > 0)


def execute(path: Path, write: bool) -> str:
    """Runs a notebook, and says what is wrong with it; writes it where nothing is, and if asked."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            timeout=SECONDS,
            record_timing=False,
            extra_arguments=["--IPKernelApp.log_level=40"],
        )
        try:
            client.execute(cwd=folder, env={**os.environ, **_QUIET})
        except CellExecutionError as error:
            return f"FAILED: {re.sub(chr(27) + '[[][0-9;]*m', '', str(error))}"
    for output in outputs(notebook):
        if output.get("name") == "stderr":
            return f"FAILED: something is written to stderr: {output['text']}"
    notebook.metadata["language_info"] = {"name": "python"}
    if write:
        nbformat.write(notebook, path)
    return ""


def outputs(notebook: Any) -> Iterator[Any]:
    for cell in notebook["cells"]:
        yield from cell.get("outputs", ())


def texts(output: Any) -> Iterator[str]:
    """What a reader sees of an output, its pictures left out."""
    if output["output_type"] == "stream":
        yield "".join(output["text"])
    for kind, data in output.get("data", {}).items():
        if kind.startswith("text/"):
            yield "".join(data)


if __name__ == "__main__":
    raise SystemExit(main())
