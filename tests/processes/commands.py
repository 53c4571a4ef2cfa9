"""Commands, one after another in one process: ``python -m tests.processes.commands FILE``.

FILE is a JSON list of commands, each a list of words. No figures are drawn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import PartialState

from fastrl import cli
from fastrl.run import report


def main() -> None:
    report.write_report = lambda folder: folder.report  # type: ignore[assignment]
    # Commands disconnect the processes at their end, and torchrun's connect once only.
    PartialState.destroy_process_group = lambda self, group=None: None  # type: ignore[assignment]
    for words in json.loads(Path(sys.argv[1]).read_text()):
        status = cli.main(words)
        if status:
            sys.exit(f"{words[0]} returned {status}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
