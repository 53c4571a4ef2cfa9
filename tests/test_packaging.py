"""What is installed is what is there."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOMES = {"fastrl": ROOT / "fastrl", "fastrl_kernels": ROOT / "kernels/torch-ext/fastrl_kernels"}


def test_every_package_is_listed():
    tomllib = pytest.importorskip("tomllib", reason="part of Python from 3.11 on")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    there = {
        ".".join((name, *path.parent.relative_to(home).parts))
        for name, home in HOMES.items()
        for path in home.rglob("__init__.py")
    }
    assert set(settings["tool"]["setuptools"]["packages"]) == there
