"""``fastrl run-trl``: runs a program that was written for TRL, as it is."""

from __future__ import annotations

from collections.abc import Sequence

from fastrl.compat.programs.run import run_program
from fastrl.tools.commands.flags import UsageError

HELP = """\
usage: fastrl run-trl SCRIPT.py [arguments of the script]

Runs a program that was written for TRL as it is: `import trl` and its submodules are
fastrl's there, and settings and calls that TRL, transformers and PEFT have renamed
since are taken, each with one warning. TRL need not be installed. On several
processes: accelerate launch -m fastrl.run_trl SCRIPT.py [arguments]
"""


def run_trl(arguments: Sequence[str]) -> int:
    """Runs a script; returns its exit status."""
    if not arguments:
        raise UsageError("name a script: fastrl run-trl SCRIPT.py [arguments]")
    script, *rest = arguments
    if script in ("-h", "--help"):
        print(HELP, end="")
        return 0
    return run_program(script, rest)
