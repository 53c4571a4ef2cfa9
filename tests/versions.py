"""`python -m tests.versions`: do demo and tests run with the newest and the lowest of everything?

That is of everything that `pyproject.toml` allows `make test` to install, this tree with it, in an
environment of its own: the newest for this Python; the lowest for the lowest Python that is allowed
where uv finds one, else for this one, for which TRL lifts some floors. ``newest`` or ``lowest``
asks for one of them; arguments behind it are pytest's, without which the tests are those of `make
test`. PART=WORD draws one, and a part of the tests.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.part import drawn

ROOT = Path(__file__).parents[1]
SETS = {"newest": "highest", "lowest": "lowest-direct"}  # and what uv calls them
_UV = (sys.executable, "-m", "uv")


def main(argv: Sequence[str] | None = None) -> int:
    """Install, say what, run demo and tests with each, and return 1 where something failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.versions",
        usage="%(prog)s [--folder FOLDER] [--python PYTHON] [newest|lowest] [pytest's arguments]",
        description="demo and tests with the newest and the lowest that pyproject.toml allows",
    )
    parser.add_argument("--folder", type=Path, help="keep environments there (some GB each)")
    parser.add_argument("--python", help="of the environments, as uv understands it")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    chosen, tests = args.arguments[:1], args.arguments[1:]
    if chosen and chosen[0] not in SETS:
        parser.error(f"{chosen[0]!r} is neither of {', '.join(SETS)}")
    failed = []
    for which in chosen or drawn(tuple(SETS), "versions"):
        with ExitStack() as stack:
            temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            python = install(which, (args.folder or temporary) / which, args.python)
            demo = [python.with_name("fastrl"), "demo", "--quick", "--output", temporary / "demo"]
            pytest = [python, "-m", "pytest", "-p", "no:cacheprovider", "--dist=worksteal"]
            pytest += [f"--numprocesses={(os.cpu_count() or 1) + 1}", *tests]
            for what, command in (("demo", demo), ("tests", pytest)):
                begin = time.monotonic()
                status = run(command)
                word = f"ended with {status}" if status else "passed"
                print(f"{which}: {what} {word}, {time.monotonic() - begin:.0f} s", flush=True)
                failed += [f"{which}: {what}"] * (status != 0)
    print(f"FAILED: {', '.join(failed)}" if failed else "passed")
    return int(bool(failed))


def install(which: str, venv: Path, base: str | None) -> Path:
    """The interpreter of an environment that has one set of versions.

    Args:
        base: the Python of which it is made, where it is not there yet; None takes the set's.

    Raises:
        subprocess.CalledProcessError: nothing satisfies all, or something cannot be installed.
    """
    begin = time.monotonic()
    python = venv / "bin" / "python"
    if not python.exists():
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        lowest = re.findall(r'requires-python = ">=([\d.]+)"', project)
        bases = [base] if base else [*(lowest if which == "lowest" else ()), sys.executable]
        made = (run([*_UV, "venv", "--quiet", f"--python={base}", venv]) == 0 for base in bases)
        if not any(made):
            raise RuntimeError(f"uv made no environment of {' or '.join(bases)}")
    to = f"--python={python}"
    command = [*_UV, "pip", "install", "--quiet", to, f"--resolution={SETS[which]}"]
    subprocess.run([*command, "--upgrade", "--exact", "--editable", f"{ROOT}[dev]"], check=True)
    freeze = [*_UV, "pip", "freeze", "--quiet", "--exclude-editable", to]
    found = subprocess.run(freeze, check=True, capture_output=True, text=True).stdout.splitlines()
    version = subprocess.run([python, "--version"], check=True, capture_output=True, text=True)
    installed = ", ".join([version.stdout.strip(), *found])
    print(f"{which}, installed in {time.monotonic() - begin:.0f} s: {installed}", flush=True)
    return python


def run(command: Sequence[str | Path]) -> int:
    """The status with which a command ends, run at the root on what is installed alone."""
    left_out = ("PYTHONPATH", "THOROUGH", "VIRTUAL_ENV")
    own = {name: value for name, value in os.environ.items() if name not in left_out}
    return subprocess.run(command, cwd=ROOT, env=own).returncode


if __name__ == "__main__":
    sys.exit(main())
