"""``python -m fastrl.run_trl SCRIPT``: as ``fastrl run-trl``, for ``accelerate launch -m``."""

import sys

from fastrl.cli import main

if __name__ == "__main__":
    sys.exit(main(["run-trl", *sys.argv[1:]]))
