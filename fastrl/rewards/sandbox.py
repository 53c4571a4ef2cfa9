"""Programs that nobody has read: run in processes that are shut in, for a limited time."""

from __future__ import annotations

import functools
import json
import os
import selectors
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

from fastrl.rewards import sandbox_child

_GRACE = 5.0  # seconds for a child that should end by itself
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")


class CannotIsolate(RuntimeError):
    """This machine does not let a process shut another one in."""


@dataclass(frozen=True)
class Sandbox:
    """Runs Python programs with the standard library, each in an empty folder of its own that is
    gone afterwards; see docs/ready_rewards.md for what it keeps out.

    It needs Linux, and where programs are isolated what :func:`check_isolation` looks for.

    Attributes:
        seconds: the processor time that each process may take; by the clock a program may take
            twice as long.
        memory: bytes of address space, of each process.
        disk: bytes of a program's folder, and of each file.
        processes: the number of processes, threads among them, that a program may have at once.
        output: the bytes that are read of a program's stdout; one that writes more is ended.
        isolated: False gives programs this process's rights, without its environment; there are
            then no limits of processes, nor of the folder.
    """

    seconds: float
    memory: int
    disk: int
    processes: int
    output: int = 1 << 20
    isolated: bool = True

    @property
    def wall_seconds(self) -> float:
        return 2 * self.seconds

    def run(
        self, source: str, *arguments: str, files: Sequence[int] = (), stdin: bytes = b""
    ) -> tuple[bytes, bool]:
        """What a program wrote to stdout, and whether it ended in time by itself with status 0.

        Raises:
            RuntimeError: it could not be started.
        """
        with (
            in_memory(stdin) as stdin_file,
            self.started(source, *arguments, files=files, stdin=stdin_file) as child,
        ):
            return self.output_of(child)

    @contextmanager
    def started(
        self,
        source: str,
        *arguments: str,
        files: Sequence[int] = (),
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A program that runs within the block, and is ended behind it.

        Args:
            source: Python, as ``python -c`` takes it.
            arguments: of the program.
            files: descriptors of open files that it inherits, beside its standard streams.
        """
        with nullcontext("/") if self.isolated else tempfile.TemporaryDirectory() as folder:
            child = self._start(source, arguments, files, stdin, stdout, folder)
            try:
                yield child
            finally:
                _end(child)
                for pipe in (child.stdout, child.stderr):
                    if pipe is not None:
                        pipe.close()

    def output_of(self, child: subprocess.Popen[bytes]) -> tuple[bytes, bool]:
        """What a program that was started writes to stdout, see :meth:`run`."""
        end = time.monotonic() + self.wall_seconds + _GRACE
        output, whole = _read(child, self.output, end)
        if whole:  # all processes that could write have ended, or closed stdout
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, end - time.monotonic()))
        return output, self.end(child)

    def end(self, child: subprocess.Popen[bytes]) -> bool:
        """Ends a program if it still runs; returns whether it had ended by itself with status 0.

        Raises:
            RuntimeError: it could not be started.
        """
        _end(child)
        assert child.stderr is not None
        report = child.stderr.read().decode()
        if report.startswith("failed"):
            raise RuntimeError(f"a program could not be started in the sandbox ({report})")
        return report == "ended: 0"

    def _start(
        self,
        source: str,
        arguments: Sequence[str],
        files: Sequence[int],
        stdin: int,
        stdout: int,
        folder: str,
    ) -> subprocess.Popen[bytes]:
        paths, links = _visible()
        python = os.path.realpath(sys.executable)
        home = "/tmp" if self.isolated else folder
        job = {
            "parent": os.getpid(),
            "isolated": self.isolated,
            "paths": paths,
            "links": links,
            "seconds": self.seconds,
            "wall_seconds": self.wall_seconds,
            "memory": self.memory,
            "disk": self.disk,
            "processes": self.processes,
            "command": [python, "-s", "-S", "-B", "-c", source, *arguments],
        }
        return subprocess.Popen(
            [python, "-s", "-S", "-B", sandbox_child.__file__, json.dumps(job)],
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            pass_fds=files,
            cwd=folder,
            start_new_session=True,
            env={
                **{"HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "PYTHONUTF8": "1"},
                "PYTHONHASHSEED": "0",  # the same score each time
                "PYTHONHOME": f"{sys.base_prefix}:{sys.base_exec_prefix}",
            },
        )


@contextmanager
def in_memory(content: bytes) -> Iterator[int]:
    """The descriptor of a nameless file that holds ``content``, to be read from its start."""
    with os.fdopen(os.memfd_create("fastrl"), "wb") as file:
        file.write(content)
        file.flush()
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        yield file.fileno()


def check_isolation() -> None:
    """Raises CannotIsolate where this machine does not let a process shut another one in, and
    OSError where it is not Linux."""
    if sys.platform != "linux":
        raise OSError(f"programs of others are run on Linux alone, and this is {sys.platform}")
    if why := _why_not():
        raise CannotIsolate(why)


@functools.cache
def _why_not() -> str:
    try:
        output, well = Sandbox(10, 1 << 29, 1 << 20, 1).run("print('in')")
    except RuntimeError as error:
        return str(error)
    return "" if well and output == b"in\n" else "a program in the sandbox does not run"


@functools.cache
def _visible() -> tuple[list[str], list[tuple[str, str]]]:
    """What programs can read: files and folders that do not hold each other, and links to them."""
    stdlib = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    asked = [
        *_LIBRARIES,
        *(os.path.join(x, "lib") for x in (sys.base_prefix, sys.base_exec_prefix)),
        sysconfig.get_config_var("LIBDIR") or "",
        *(sysconfig.get_path(kind, vars=stdlib) for kind in ("stdlib", "platstdlib")),
        os.path.realpath(sys.executable),
    ]
    real_paths = {path: os.path.realpath(path) for path in asked if os.path.exists(path)}
    paths = list[str]()
    for real in sorted(set(real_paths.values()), key=len):
        if not any(real.startswith(f"{other}/") for other in paths):
            paths.append(real)
    links = [(path, real) for path, real in real_paths.items() if path != real]
    return paths, [x for x in links if not any(x[0].startswith(f"{path}/") for path in paths)]


def _read(child: subprocess.Popen[bytes], most: int, end: float) -> tuple[bytes, bool]:
    """What a child writes until no process can write more, it has written ``most``, or it is
    ``end`` by the monotonic clock; and whether that is all."""
    assert child.stdout is not None
    output = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while len(output) <= most and selector.select(max(0.0, end - time.monotonic())):
            part = os.read(child.stdout.fileno(), 1 << 16)
            if not part:
                return bytes(output), True
            output += part
    return bytes(output), False


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_GRACE)
        except subprocess.TimeoutExpired:  # a program that is not isolated can suspend the child
            child.kill()
            child.wait()
