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


def test_every_file_that_is_not_python_is_listed():
    tomllib = pytest.importorskip("tomllib", reason="part of Python from 3.11 on")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = settings["tool"]["setuptools"]["package-data"]
    for name, home in HOMES.items():
        there = {
            path.relative_to(home).as_posix()
            for path in home.rglob("*")
            if path.is_file() and path.suffix not in (".py", ".pyc")
        }
        assert there == set(listed[name])
