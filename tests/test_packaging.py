"""What is installed is what is there, and nothing beside it."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
HOMES = {"fastrl": "fastrl", "fastrl_kernels": "kernels/torch-ext/fastrl_kernels"}
# Each distribution's folder, and its packages.
DISTRIBUTIONS = {".": ("fastrl", "fastrl_kernels"), "kernels": ("fastrl_kernels",)}


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """What distributions are made of, in a folder named as one of its packages."""
    clone = tmp_path_factory.mktemp("above") / "fastrl"
    for path in ("fastrl", "kernels"):
        shutil.copytree(ROOT / path, clone / path)
    for path in ("pyproject.toml", "editable.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / path, clone)
    for package, name in (("fastrl", "new"), ("fastrl", "build"), ("fastrl_kernels", "new")):
        (clone / HOMES[package] / name).mkdir()
        (clone / HOMES[package] / name / "__init__.py").touch()
        (clone / HOMES[package] / "__pycache__").mkdir(exist_ok=True)
        (clone / HOMES[package] / "__pycache__" / "new.cpython-311.pyc").touch()
    return clone


def build(builder, root, to, version="standard"):
    (built,) = builder(str(root)).build(directory=str(to), versions=[version])
    return built


def names(wheel):
    with zipfile.ZipFile(wheel) as file:
        return {name for name in file.namelist() if ".dist-info/" not in name}


@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_a_wheel_has_all_files_of_its_packages_and_so_has_that_of_its_source_archive(
    folder, clone, tmp_path
):
    there = {
        f"{package}/{path.relative_to(clone / HOMES[package]).as_posix()}"
        for package in DISTRIBUTIONS[folder]
        for path in (clone / HOMES[package]).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert names(build(WheelBuilder, clone / folder, tmp_path)) == there
    with tarfile.open(build(SdistBuilder, clone / folder, tmp_path)) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # since Python 3.11.4
        archive.extractall(tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert names(build(WheelBuilder, unpacked, tmp_path)) == there


# Without a site of its own, so that an installed fastrl is none.
FIND = """
import site, sys
from importlib.util import find_spec
site.addsitedir(sys.argv[1])
for name in sys.argv[2:]:
    found = find_spec(name)
    print(found and (found.origin or "a folder"))
"""


@pytest.mark.parametrize("place", [".", "fastrl/tests"])
def test_an_editable_install_brings_its_packages_alone_also_to_the_folder_above(
    place, clone, tmp_path
):
    """There the clone's folder has the package's name."""
    for folder in DISTRIBUTIONS:
        shutil.unpack_archive(
            build(WheelBuilder, clone / folder, tmp_path, "editable"), tmp_path / "site", "zip"
        )
    (clone / "tests").mkdir(exist_ok=True)
    asked = [*HOMES, "benchmarks", "kernels", "tests"]
    found = subprocess.run(
        [sys.executable, "-S", "-c", FIND, str(tmp_path / "site"), *asked],
        cwd=clone.parent / place,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    homes = [clone / home / "__init__.py" for home in HOMES.values()]
    assert [Path(path).resolve() for path in found[:2]] == homes
    assert found[2:] == ["None"] * 3


def test_both_distributions_of_the_kernels_are_one_version_under_one_license():
    versions = {WheelBuilder(str(ROOT / folder)).metadata.version for folder in DISTRIBUTIONS}
    assert len(versions) == 1
    assert (ROOT / "kernels/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_what_messages_say_to_install_is_what_the_extras_need():
    # Packages by name: an extra's name would need the index, or the checkout, that fastrl is from.
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for path in (ROOT / "fastrl").rglob("*.py"):
        for line in re.findall(r"pip install (.*)", path.read_text(encoding="utf-8")):
            assert "fastrl" not in line, path
            for needed in re.findall(r"'([\w-]+>=[\d.]+)'", line):
                assert f'"{needed}"' in extras, f"{path}: {needed}"


# What a later patch release of a Python that requires-python allows brought: names, and arguments
# of functions and methods.
LATER_NAMES = {
    *("data_filter", "fully_trusted_filter", "tar_filter"),  # tarfile, 3.10.12, 3.11.4
    *("get_int_max_str_digits", "set_int_max_str_digits"),  # sys, 3.10.7
    *("GetReparseDeferralEnabled", "SetReparseDeferralEnabled"),  # xml, 3.10.14, 3.11.9
}
LATER_ARGUMENTS = {
    *(("extract", "filter"), ("extractall", "filter"), ("unpack_archive", "filter")),  # 3.11.4
    *(("getaddresses", "strict"), ("parseaddr", "strict")),  # email.utils, 3.10.15, 3.11.10
}


def later_than_the_first_patch_release(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in LATER_NAMES:
            found.append(f"line {node.lineno}: {node.attr}")
        if isinstance(node, ast.ImportFrom):
            found += [f"line {node.lineno}: {x.name}" for x in node.names if x.name in LATER_NAMES]
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            given = [x.arg for x in node.keywords if (name, x.arg) in LATER_ARGUMENTS]
            found += [f"line {node.lineno}: {name}({x}=)" for x in given]
    return found


def test_nothing_needs_a_later_patch_release_of_python():
    """Debian 12 has Python 3.11.2."""
    planted = (
        "import tarfile\ntarfile.open('x').extractall('y', filter='data')\ntarfile.data_filter"
    )
    assert len(later_than_the_first_patch_release(planted)) == 2
    folders = ("fastrl", "kernels", "tests", "benchmarks", "docs", "examples")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {str(path): later_than_the_first_patch_release(path.read_text()) for path in sources}
    assert len(found) > 500
    assert not {path: lines for path, lines in found.items() if lines}
