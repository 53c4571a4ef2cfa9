"""``python -m fastrl``: the command line."""

import sys

from fastrl.cli import program

sys.exit(program())
