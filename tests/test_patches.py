"""Changes of kinds that are often made, as patches: how many files each touches, and that it works.

A patch that no longer applies is to be made anew on the tree as it is, in as few files.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT

PATCHES = ROOT / "tests" / "house" / "patches"
MOST_FILES = {"new_column": 3, "new_policy_loss": 2, "new_setting": 2}


@pytest.mark.parametrize("name", MOST_FILES)
def test_a_change_touches_few_files(name: str, tmp_path: Path) -> None:
    patch, tree = PATCHES / f"{name}.patch", tmp_path / "tree"
    touched = re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(encoding="utf-8"), re.MULTILINE)
    assert 0 < len(touched) <= MOST_FILES[name]
    kernels = "kernels/torch-ext"
    for folder in ("fastrl", kernels):
        shutil.copytree(ROOT / folder, tree / folder)
    subprocess.run(["git", "apply", "-C1", str(patch)], cwd=tree, check=True)
    places = tree, tree / kernels, ROOT
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    shown = [sys.executable, str(patch.with_suffix(".py")), str(tmp_path / "output")]
    subprocess.run(shown, cwd=tree, env=environment, check=True)
