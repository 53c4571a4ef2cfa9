"""Asks questions of a child process, which is ended where an answer takes too long."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from typing import Any

from fastrl.rewards import timed_worker


class TimedChild:
    """A process that judges, started at the first question; any thread may ask.

    A regular expression or a product of long integers holds the interpreter: neither a thread nor a
    signal's handler could end it.

    Args:
        worker: a Python file whose ``make_judge()`` returns a function that maps a question's
            fields to a dict for JSON.
        what: the judge's name, for messages.
    """

    def __init__(self, worker: str, what: str) -> None:
        self.worker, self.what = worker, what
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._parent = 0  # the id of the process that started the child: a fork has no child
        atexit.register(self._end)

    def ask(self, seconds: float, **question: Any) -> dict[str, Any] | None:
        """The child's answer; None where it took longer than ``seconds``, or, with a warning, where
        a signal ended the child for another reason, such as no memory or stack left.

        Raises:
            ImportError: the child does not start.
            RuntimeError: the child ended by itself.
        """
        with self._lock:
            child = self._started()
            assert child.stdin is not None
            try:
                child.stdin.write(json.dumps({"seconds": seconds, **question}) + "\n")
                child.stdin.flush()
                answer = self._read(child)
            except BaseException:  # Ctrl-C: the next question would get this answer
                self._end()
                raise
            if answer is not None:
                return answer
            exit_code = child.wait()
            self._end()
        reason = f"the process in which {self.what} judges ended"
        at = f"at {json.dumps(question)[:200]}"
        if exit_code >= 0:
            raise RuntimeError(f"{reason} by itself (exit code {exit_code}) {at}")
        if exit_code != -signal.SIGALRM:
            warnings.warn(
                f"{reason} by signal {-exit_code}, as if it had taken too long, {at}", stacklevel=2
            )
        return None

    def _started(self) -> subprocess.Popen[str]:
        if self._child is not None and self._parent == os.getpid():
            return self._child
        child = subprocess.Popen(
            [sys.executable, timed_worker.__file__, self.worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        )
        self._child, self._parent = child, os.getpid()
        ready = self._read(child)
        if ready is None or "failed" in ready:
            self._end()
            reason = f": {ready['failed']}" if ready else ""
            raise ImportError(f"{self.what} does not run in a process of its own{reason}")
        return child

    @staticmethod
    def _read(child: subprocess.Popen[str]) -> dict[str, Any] | None:
        assert child.stdout is not None
        line = child.stdout.readline()
        return json.loads(line) if line else None

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None and self._parent == os.getpid():
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                with contextlib.suppress(OSError):  # close() flushes to a child that has ended
                    pipe.close()  # type: ignore[union-attr]
