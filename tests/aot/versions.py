"""Versions of Triton: those that the kernels are held to, and how to get one of them."""

import subprocess
import sys
import tempfile
from pathlib import Path

# What comes with torch 2.11 and with 2.13, the oldest and the newest that fastrl admits, and
# Triton's newest.
SUPPORTED = ("3.6.0", "3.7.1", "3.9.0")


class Unavailable(RuntimeError):
    """There is no wheel of a version for this Python."""


def installed() -> str:
    import triton

    return triton.__version__


def folder_of(version: str) -> Path | None:
    """Where a version can be imported from, before all else on the path; None: it is installed.

    The first time it is downloaded, by pip with the user's settings, and stays beside the installed
    packages of this environment.

    Raises:
        Unavailable: no wheel of it is for this Python.
        RuntimeError: pip could not get it.
    """
    if version == installed():
        return None
    folder = Path(sys.prefix) / f"triton-{version}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=sys.prefix) as partial:  # a cut download is none
            _download(version, Path(partial) / "triton")
            Path(partial, "triton").rename(folder)
    return folder


def _download(version: str, target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--target", str(target), f"triton=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        # Where pip has found versions, but not this one, this Python has none of it.
        told = done.stderr.partition("(from versions: ")[2].partition(")")[0]
        if told not in ("", "none"):
            python = ".".join(map(str, sys.version_info[:2]))
            raise Unavailable(f"triton {version} has no wheel for Python {python}; it has {told}")
        raise RuntimeError(f"triton {version}: {done.stderr.strip() or 'pip failed'}")
