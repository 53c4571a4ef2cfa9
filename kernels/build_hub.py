"""Lays ``fastrl_kernels`` out as the Kernel Hub wants it: ``build/torch-<backend>/``, one of each.

Nothing is compiled: a variant is a copy of the package with a ``metadata.json`` of its own, as
kernel-builder makes it from a ``[torch-noarch]`` section.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent


def sources(package: Path) -> list[Path]:
    """The package's files in a fixed order, without bytecode."""
    files = sorted(path for path in package.rglob("*") if path.is_file())
    return [path for path in files if "__pycache__" not in path.parts and path.suffix != ".pyc"]


def fingerprint(package: Path) -> str:
    """Seven digits that change with the sources: two versions may be loaded in one process."""
    digest = hashlib.sha256()
    for path in sources(package):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:7]


def digest(variant: Path) -> dict[str, Any]:
    """The SHA-256 of each of a variant's files but its metadata, which say what they are."""
    files = {
        path.relative_to(variant).as_posix(): base64.b64encode(
            hashlib.sha256(path.read_bytes()).digest()
        ).decode()
        for path in sources(variant)
        if path.name != "metadata.json"
    }
    return {"algorithm": "sha256", "files": files}


def build(output: Path) -> list[Path]:
    """Writes every variant below ``output``, in place of what was there, and returns them."""
    general: dict[str, Any] = tomllib.loads((HERE / "build.toml").read_text())["general"]
    module = general["name"].replace("-", "_")
    package = HERE / "torch-ext" / module
    unique = fingerprint(package)
    variants = []
    for backend in general["backends"]:
        variant = output / f"torch-{backend}"
        shutil.rmtree(variant, ignore_errors=True)
        for path in sources(package):
            copy = variant / path.relative_to(package)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        metadata = {
            "name": general["name"],
            "id": f"_{module}_{backend}_{unique}",
            "version": general["version"],
            "license": general["license"],
            "python-depends": [],
            "backend": {"type": backend},
            "digest": digest(variant),
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        variants.append(variant)
    return variants


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE / "build")
    for variant in build(parser.parse_args().output):
        print(variant)
