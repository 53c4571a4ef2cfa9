"""Commands, one after another in one process: ``python -m tests.processes.commands FILE``.

FILE is a JSON list of commands, each a list of words. No figures are drawn.
"""

import gc
import json
import sys
from pathlib import Path

import torch
from accelerate import PartialState

from fastrl import cli
from fastrl.tools.reports import report


def run_commands(file: str | Path) -> None:
    """
    Raises:
        SystemExit: one of them did not return 0.
    """
    report.write_report = lambda folder: folder.report  # type: ignore[assignment]
    # Commands disconnect the processes at their end, which can be connected once only.
    PartialState.destroy_process_group = lambda self, group=None: None  # type: ignore[assignment]
    for words in json.loads(Path(file).read_text()):
        status = cli.main(words)
        if status:
            sys.exit(f"{words[0]} returned {status}")


if __name__ == "__main__":
    gc.freeze()  # as forked processes do
    run_commands(sys.argv[1])
    torch.distributed.destroy_process_group()
