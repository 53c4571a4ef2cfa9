"""Environments for peers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.before import peer
from benchmarks.before.peer import Uninstallable, peer_python


@pytest.mark.parametrize("broken", ["venv", "pip"])
def test_where_nothing_can_be_installed_one_line_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str
) -> None:
    def create(folder: Path, **_: bool) -> None:
        if broken == "venv":
            raise OSError("no space")
        (folder / "bin").mkdir(parents=True)
        python = folder / "bin" / "python"
        python.write_text(
            "#!/bin/sh\necho retrying >&2\necho 'No distribution for torch' >&2\nexit 1\n"
        )
        python.chmod(0o755)

    monkeypatch.setattr(peer, "ROOT", tmp_path)
    monkeypatch.setattr(peer, "VENVS", tmp_path / "venvs")
    monkeypatch.setattr(peer.venv, "create", create)
    with pytest.raises(Uninstallable) as found:
        peer_python("trl==0.11.4")
    why = {"venv": "no space", "pip": "No distribution for torch"}[broken]
    assert str(found.value) == (
        f"trl==0.11.4 cannot be installed here ({why}): give an interpreter that has it by "
        "--peer-python PATH"
    )
    assert isinstance(found.value.__cause__, OSError | subprocess.CalledProcessError)
