"""``python -m fastrl``: the command line."""

import sys

from fastrl.cli import main

sys.exit(main())
