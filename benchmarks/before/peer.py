"""A virtual environment of its own for the library that fastrl is measured against."""

import importlib.metadata
import subprocess
import sys
import venv
from pathlib import Path

import torch

from benchmarks.before.record import ROOT

VENVS = ROOT / ".benchmarks" / "venvs"

# What each peer is installed with: the newest versions that it works with.
PEERS = {
    "trl==0.11.4": ("transformers==4.45.2", "peft==0.13.2", "numpy<2.3", "rich"),
    "trl==1.16.0": (),
}


class Uninstallable(RuntimeError):
    """There is no environment for a peer, and none can be made."""


def peer_python(peer: str) -> Path:
    """The interpreter of the peer's environment, which is made at the first call; this one's where
    the peer is installed beside us.

    Raises:
        Uninstallable: it cannot be made here.
    """
    name, version = peer.split("==")
    try:
        if importlib.metadata.version(name) == version:
            return Path(sys.executable)
    except importlib.metadata.PackageNotFoundError:
        pass
    folder = VENVS / peer.replace("==", "-")
    python = folder / "bin" / "python"
    # Both sides run the same torch: what is measured is the library, not its torch.
    torch_version = torch.__version__.split("+")[0]
    wanted = [f"torch=={torch_version}", peer, *PEERS[peer]]
    stamp = folder / "installed.txt"
    if not stamp.exists() or stamp.read_text().split("\n") != wanted:
        print(f"installing {peer} into {folder.relative_to(ROOT)}")
        try:
            venv.create(folder, with_pip=True, clear=True)
            for packages in (wanted[:1], wanted[1:]):
                command = [python, "-m", "pip", "install", "--quiet", *packages]
                subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise Uninstallable(
                f"{peer} cannot be installed here ({_last_line(error)}): give an interpreter that "
                "has it by --peer-python PATH"
            ) from error
        stamp.write_text("\n".join(wanted))
    return python


def _last_line(error: OSError | subprocess.CalledProcessError) -> str:
    """What a command said last, or how it ended."""
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
    said = said.decode() if isinstance(said, bytes) else said
    return (said or str(error)).strip().splitlines()[-1][:200]
