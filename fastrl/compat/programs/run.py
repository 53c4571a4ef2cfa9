"""Runs a program that was written for TRL."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from fastrl.compat.programs.importer import importing_fastrl
from fastrl.compat.programs.names import of_its_time, read_source
from fastrl.compat.programs.taken_away import served_as_then
from fastrl.eras import with_defaults_of_trl
from fastrl.trainers import RewardConfig, SFTConfig


def run_program(script: str, arguments: Sequence[str]) -> int:
    """Runs a script as ``python SCRIPT arguments`` would, with ``trl`` resolved to fastrl.

    Returns:
        the script's exit status: 1 after an exception, whose traceback is printed as by Python.

    Raises:
        FileNotFoundError: no such script.
    """
    path = Path(script)
    if not path.is_file():
        raise FileNotFoundError(f"there is no script {script}")
    before = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with ExitStack() as contexts:
            renamed = of_its_time(read_source(path))
            contexts.enter_context(importing_fastrl(renamed))
            contexts.enter_context(served_as_then())
            contexts.enter_context(with_defaults_of_trl([SFTConfig, RewardConfig]))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return int(end.code or 0)
    except Exception as error:
        _print(error, script)
        return 1
    finally:
        sys.argv, sys.path[:] = before
    return 0


def _print(error: BaseException, script: str) -> None:
    """Prints an error's traceback from where the script begins."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)
