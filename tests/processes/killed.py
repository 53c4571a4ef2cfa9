"""A command on several processes, one of which is killed at a chosen instant:
``python -m tests.processes.killed INSTANT WORD...`` with INSTANT as PLACE:CALL:PROCESS, or "never".

No figures are drawn.
"""

import importlib
import os
import sys
from collections import Counter

from fastrl import cli
from fastrl.tools.reports import report
from tests.faults.zygote import FIT_PLACES, PLACES, _install


def run_killed(instant: str, *words: str) -> None:
    """
    Args:
        instant: the place where a process dies, see ``tests/faults/zygote.py``, the number of the
            call at whose beginning it does, and the number of that process.

    Raises:
        SystemExit: the command did not return 0.
    """
    report.write_report = lambda folder: folder.report  # type: ignore[assignment]
    if instant != "never":  # nor empty: accelerate launch takes no empty word
        place, call, process = instant.split(":")
        if process == os.environ["RANK"]:
            where = (FIT_PLACES if words[0] == "sft" else PLACES)[place]
            importlib.import_module(where.partition(":")[0])
            _install(place, where, Counter(), [place, int(call)])
    status = cli.main([*words])
    if status:
        sys.exit(f"{words[0]} returned {status}")


if __name__ == "__main__":
    run_killed(*sys.argv[1:])
