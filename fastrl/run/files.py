"""Files and folders that are written as a whole: nobody sees half of one, even after a kill."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastrl.run.stopping import uninterrupted

NO_PICKLE = (
    "no pickle is read, as it may run code: convert it once, where it is trusted, by transformers' "
    "from_pretrained(folder).save_pretrained(other), which writes safetensors"
)
_HERE, _EXCHANGE = -100, 2  # Linux: AT_FDCWD, RENAME_EXCHANGE


def write_file(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """Writes a file under another name, and renames it.

    Args:
        sync: also wait until the disk has file and name, so that they survive a power failure.
    """
    part = path.with_name(f".{path.name}")
    if isinstance(content, bytes):
        part.write_bytes(content)
    else:
        part.write_text(content, encoding="utf-8")
    if sync:
        sync_file(part)
    part.replace(path)
    if sync:
        sync_file(path.parent)


def write_files(folder: Path, contents: Mapping[str, str]) -> None:
    """Writes files by their paths in a folder; folders in the paths are made."""
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)


def cache_file(path: Path, content: bytes) -> None:
    """Writes a file that only saves time, and its folder; where that fails there is no file.
    Several processes may write the same file."""
    unfinished = path.with_name(f"{path.stem}-{os.getpid()}{path.suffix}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(unfinished, content)
        unfinished.replace(path)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Context with an empty folder elsewhere, which takes the place of ``path`` at the end; by then
    the disk has all of it. After an exception it is removed. Ctrl-C and SIGTERM wait for the end of
    the block."""
    new = part_of(path)
    holder = new.parent
    with uninterrupted():
        shutil.rmtree(holder, ignore_errors=True)
        new.mkdir(parents=True)
        try:
            yield new
            for each in sorted(new.rglob("*")):
                sync_file(each)
            sync_file(new)
            if path.exists():
                _exchange(new, path)
            else:
                new.rename(path)
            sync_file(path.parent)
        finally:
            shutil.rmtree(holder, ignore_errors=True)


def part_of(path: Path) -> Path:
    """Where :func:`new_folder` writes the folder before it becomes ``path``."""
    return path.with_name(f".saving-{path.name}") / path.name


def _exchange(new: Path, old: Path) -> None:
    """Exchanges two folders' names, at one go where the system can."""
    with contextlib.suppress(OSError, AttributeError):
        rename: Any = ctypes.CDLL(None, use_errno=True).renameat2
        if rename(_HERE, os.fsencode(new), _HERE, os.fsencode(old), _EXCHANGE) == 0:
            return
    aside = new.with_name("old")
    old.rename(aside)
    new.rename(old)


def remove_folder(path: Path) -> None:
    """Removes a folder; an interruption leaves all or nothing of it under its name."""
    gone = path.with_name(f".removed-{path.name}")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def sync_file(path: Path) -> None:
    """Waits until the disk has a file or a folder's names; warns if the system syncs no folders."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if not (path.is_dir() and (lacks_function(error) or error.errno == errno.EINVAL)):
            raise OSError(error.errno, error.strerror, str(path)) from None
        _warn_of_folders()
    finally:
        os.close(handle)


def lacks_function(error: OSError) -> bool:
    """Whether an error says that the file system lacks a function, as Lustre, NFS and FUSE may."""
    return error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)


@functools.cache
def _warn_of_folders() -> None:
    warnings.warn(
        "the output's file system does not sync folders: after a power failure the newest "
        "checkpoint may be missing",
        stacklevel=3,
    )


def free_name(path: Path, kind: str) -> Path:
    """``name.kind-N.ext`` beside ``name.ext``, with the first N from 1 that is not taken."""
    number = 1
    while (candidate := path.with_name(f"{path.stem}.{kind}-{number}{path.suffix}")).exists():
        number += 1
    return candidate
