"""`python -m tests.installs`: is what is installed found, with its types, wherever a program is?

A copy of this tree, in a folder named fastrl, is installed from its wheel, from its source archive
and editable, by pip and by uv, into environments of their own; the kernels alone, too. In the
folder above the copy, in the copy and in another one, the packages are imported, mypy finds a wrong
argument, and the program says its help. Other packages are this environment's; with ``--whole``
they are installed as well, torch first, as another version's ``--python`` needs: the demo runs,
and it is told how long they took to install, and how much there is. PART=WORD draws one way.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from tests.part import drawn

ROOT = Path(__file__).parents[1]
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "runs", "site")
_NOT_FOUND = ("benchmarks", "docs", "examples", "kernels", "tests")  # in the clone, from elsewhere
# Types of other packages are not what is asked, and take most of the time.
_MYPY = """
[mypy]
follow_imports = silent
[mypy-accelerate.*,datasets.*,numpy.*,torch.*,transformers.*]
follow_imports = skip
"""


class Way(NamedTuple):
    what: str
    by: str


class Program(NamedTuple):
    """Imports what a user imports; and gives a function an argument that its types exclude."""

    imports: str
    wrong: str
    said: str
    command: tuple[str, ...] = ()


_WHOLE = Program(
    "import fastrl, fastrl_kernels; fastrl.PPOTrainer, fastrl_kernels.ppo_loss",
    "import fastrl\n\nconfig = fastrl.PPOConfig(\n    batch_size='four',\n)\n",
    'user.py:4: error: Argument "batch_size" to "PPOConfig" has incompatible type "str"',
    ("fastrl", "demo", "--help"),
)
_ALONE = Program(
    "import fastrl_kernels; fastrl_kernels.ppo_loss",
    "import fastrl_kernels\n\nloss = fastrl_kernels.PolicyLoss(\n    kind=4,\n)\n",
    'user.py:4: error: Argument "kind" to "PolicyLoss" has incompatible type "int"',
)
WAYS = [Way(*way) for way in product(("wheel", "sdist", "editable", "kernels"), ("pip", "uv"))]


class Failed(RuntimeError):
    """A command did something else than it should."""


def main(argv: Sequence[str] | None = None) -> int:
    """Install in each way, print a line for it, and return 1 where one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.installs",
        description="install in every way, and find packages and types from everywhere",
    )
    parser.add_argument("--what", action="append", choices=sorted({way.what for way in WAYS}))
    parser.add_argument("--by", action="append", choices=("pip", "uv"))
    parser.add_argument("--whole", action="store_true", help="other packages, too (a GB each)")
    parser.add_argument("--python", default=sys.executable, help="of the environments [this one]")
    args = parser.parse_args(argv)
    asked = [x for x in WAYS if x.what in (args.what or x.what) and x.by in (args.by or x.by)]
    failed, ways = 0, asked if args.what or args.by else drawn(asked, "installs")
    for way in ways:
        with tempfile.TemporaryDirectory() as folder:
            try:
                said = f"found from everywhere{check(way, Path(folder), args.python, args.whole)}"
            except Failed as error:
                failed, said = failed + 1, str(error)
        print(f"{way.what} by {way.by}: {said}", flush=True)
    print(f"{'FAILED' if failed else 'passed'}: {len(ways) - failed} of {len(ways)} ways install")
    return int(failed > 0)


def check(way: Way, folder: Path, base: str, whole: bool) -> str:
    """What a whole environment took; "" of one without other packages.

    Args:
        base: the Python of which the environment is made.

    Raises:
        Failed: says what, and where.
    """
    clone, other = folder / "fastrl", folder / "other"
    shutil.copytree(ROOT, clone, ignore=_LEFT_OUT)
    other.mkdir()
    begin = time.monotonic()
    python = install(way, clone, folder / "venv", base, whole)
    seconds = time.monotonic() - begin
    program = _ALONE if way.what == "kernels" else _WHOLE
    (folder / "mypy.ini").write_text(_MYPY, encoding="utf-8")
    for place in (folder, clone, other):
        run([python, "-c", program.imports], place)
        (place / "user.py").write_text(program.wrong, encoding="utf-8")
        mypy = [sys.executable, "-m", "mypy", f"--config-file={folder / 'mypy.ini'}"]
        mypy += [f"--cache-dir={folder / 'types'}", f"--python-executable={python}", "user.py"]
        if program.said not in (said := run(mypy, place, status=1)):
            raise Failed(f"mypy in {place} found no wrong argument:\n{said}")
        if program.command:
            run([python.with_name(program.command[0]), *program.command[1:]], place)
    find = f"from importlib.util import find_spec; print(*map(find_spec, {_NOT_FOUND}))"
    if str(clone) in (said := run([python, "-c", find], other)):
        raise Failed(f"more than the packages can be imported: {said}")
    if not whole:
        return ""
    if program.command:
        run([python.with_name("fastrl"), "demo", "--quick", "--output", other / "demo"], other)
    size = sum(x.lstat().st_size for x in (folder / "venv").rglob("*")) / 1e6
    versions = "import platform, torch; print(platform.python_version(), torch.__version__)"
    found = run([python, "-c", versions], other).strip()
    return f"; {seconds:.0f} s, {size:,.0f} MB, Python and torch {found}"


def install(way: Way, clone: Path, venv: Path, base: str, whole: bool) -> Path:
    """The interpreter of a new environment that has what is there."""
    run([base, "-m", "venv", venv], clone)
    python = venv / "bin" / "python"
    if way.by == "pip":
        command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    else:
        command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", f"--python={python}"]
    if whole:
        command += ["--constraint", clone / "constraints.txt"]
        run([*command, "torch"], clone)
    else:
        here = "\n".join(path for path in sys.path if path.endswith("site-packages"))
        there = sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)})
        Path(there, "others.pth").write_text(here, encoding="utf-8")
        command += ["--no-deps", "--no-build-isolation"]
    if way.what in ("wheel", "sdist"):
        run([sys.executable, "-m", "hatchling", "build", "--target", way.what], clone)
        (built,) = (clone / "dist").iterdir()
        run([*command, built], clone)
    else:
        run([*command, "--editable", clone / ("kernels" if way.what == "kernels" else "")], clone)
    return python


def run(command: Sequence[str | Path], folder: Path, status: int = 0) -> str:
    """What a command says.

    Raises:
        Failed: it ends with another status.
    """
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True)
    if done.returncode != status:
        words = " ".join(map(str, command))
        raise Failed(f"{words}, in {folder}, ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
