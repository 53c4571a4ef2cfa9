"""Runs classic.py in an environment that has TRL 0.11.4: `python -m tests.trl_parity`.

The environment is the benchmarks' one, and is made at the first run.
"""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks import ROOT
from benchmarks.environments import peer_python

PEER = "trl==0.11.4"


def main() -> int:
    python = peer_python(PEER)
    if subprocess.run([python, "-c", "import pytest"], capture_output=True).returncode:
        install = ["-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
        subprocess.run([python, *install, "pytest"], check=True)
    path = os.pathsep.join(str(p) for p in (ROOT, ROOT / "kernels" / "torch-ext"))
    # The project's settings are for the versions of its own environment.
    settings = ["-c", os.devnull, "--rootdir", ROOT, "-p", "no:cacheprovider"]
    tests = Path(__file__).with_name("classic.py")
    command = [python, "-m", "pytest", *settings, tests]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}).returncode


if __name__ == "__main__":
    sys.exit(main())
