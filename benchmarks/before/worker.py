"""One side of a comparison, in a process and an environment of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.before import record

OURS = ("fastrl", "eager", "float64")  # implementations in this source tree


class WorkerError(RuntimeError):
    """A worker ended instead of answering."""


class Absent(RuntimeError):
    """A side cannot have in its environment what it was asked for."""


class Worker:
    """A trainer in a process of its own; idle, it waits on its input and costs nothing.

    Args:
        python: the interpreter.
        implementation: what the script is to drive.
        shape: a dataclass of sizes.
        arguments: further ones of the script.
        script: what it runs; see there for the commands that it knows.
        device: ``cpu`` hides GPUs from it.
    """

    def __init__(
        self,
        python: Path,
        implementation: str,
        shape: Any,
        *arguments: str,
        script: Path,
        device: str = "auto",
    ) -> None:
        self.implementation = implementation
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        self.process = subprocess.Popen(
            [python, script, "--impl", implementation, "--shape", json.dumps(vars(shape))]
            + list(arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment(implementation, device),
        )

    def ready(self) -> dict[str, str]:
        """Waits for the trainer; the versions it runs on.

        Raises:
            Absent: its environment lacks something.
        """
        answer = self._answer()
        if "absent" in answer:
            raise Absent(f"{self.implementation}: {answer['absent']}")
        return answer["ready"]

    def ask(self, command: str) -> dict[str, Any]:
        """Sends a command and waits for its answer."""
        with contextlib.suppress(BrokenPipeError):  # it ended: _answer says how
            print(json.dumps({"command": command}), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.process.wait()
        self.log.seek(0)
        raise WorkerError(f"the {self.implementation} worker ended:\n{self.log.read()[-4000:]}")

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.stdin.close()
        if error is not None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()


def environment(implementation: str, device: str = "auto") -> dict[str, str]:
    """A worker's environment: ours find this source tree, a peer's finds nothing of it."""
    found = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    found |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found["PYTHONSAFEPATH"] = "1"  # else the worker's folder hides packages of equal names
    if implementation in OURS:
        sources = (record.ROOT, record.ROOT / "kernels" / "torch-ext")
        found["PYTHONPATH"] = os.pathsep.join(map(str, sources))
    if device == "cpu":
        found["CUDA_VISIBLE_DEVICES"] = ""  # accelerate takes a GPU where it sees one
    return found
