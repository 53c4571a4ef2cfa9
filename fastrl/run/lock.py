"""A lock on a folder, so that two processes do not write one run."""

from __future__ import annotations

import functools
import json
import os
import platform
import warnings
from pathlib import Path

from filelock import lock_descriptor

from fastrl.run.files import lacks_function


class FolderInUse(OSError):
    """Another run writes to the folder, in this process or in another one."""


class FolderLock:
    """A lock that one object of one process can hold; the system frees it as the process and those
    that it has forked end. Where the file system has no locks, a warning says that none is held.

    Args:
        folder: must exist; its file ``.lock`` says who holds the lock.
    """

    def __init__(self, folder: Path):
        self.path = folder / ".lock"
        self._file: int | None = None

    @property
    def held(self) -> bool:
        return self._file is not None

    def acquire(self) -> None:
        """Takes the lock; raises FolderInUse, naming the process, where another object has it."""
        while not self.held:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                free = lock_descriptor(file, blocking=False)
            except OSError as error:
                if not lacks_function(error):
                    os.close(file)
                    raise OSError(error.errno, error.strerror, str(self.path)) from None
                _warn_of_no_locks()
                free = True
            if not free:
                holder = _holder(file)
                os.close(file)
                raise FolderInUse(
                    f"output {self.path.parent} is being written by another run{holder}: wait for "
                    "it, or name another folder"
                )
            if self._is_there(file):
                self._file = file
            else:  # the file was removed by its holder after it was opened here
                os.close(file)
        assert self._file is not None
        os.ftruncate(self._file, 0)
        this = {"process": os.getpid(), "host": platform.node()}
        os.write(self._file, json.dumps(this).encode())

    def release(self) -> None:
        """Frees the lock and removes its file."""
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def _is_there(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(self.path))
        except FileNotFoundError:
            return False


@functools.cache
def _warn_of_no_locks() -> None:
    """Warns, once for all folders, that nothing keeps a second run out."""
    warnings.warn(
        "the output's file system has no locks: nothing keeps a second run from writing to the "
        "same folder, so start only one",
        stacklevel=3,
    )


def _holder(file: int) -> str:
    """The process that holds the lock, in words for a message."""
    try:
        holder = json.loads(os.read(file, 4096))
        return f" (process {holder['process']} on {holder['host']})"
    except (ValueError, KeyError, TypeError):
        return ""
