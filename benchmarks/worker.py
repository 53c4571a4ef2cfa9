"""Sides of a comparison in processes of their own, each with its own environment.

A worker runs `sides/__main__.py` with fastrl's interpreter or with the peer's. Both speak JSON, one
object a line: {"ready": versions} or {"absent": reason} first, then an answer to each
{"command": name}; the methods of a side are its commands.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.environments import source_tree
from benchmarks.harness import Measurement
from benchmarks.models import Model
from benchmarks.timing import Seconds, Side

PATIENCE = 20  # seconds for a worker to end, once it is told to
# Implementations that are in this source tree, or need it.
OURS = ("fastrl", "trl+fastrl", "eager", "float64")


class WorkerError(RuntimeError):
    """A worker ended instead of answering."""


class Absent(RuntimeError):
    """A side's environment lacks what it was asked for."""


class WorkerShape:
    """Base of a workload's sizes: what workers are told of them."""

    model: Model

    @property
    def shape(self) -> dict[str, Any]:
        """The fields of the model and of the workload, and the number of threads."""
        own = {name: value for name, value in vars(self).items() if name != "model"}
        return vars(self.model) | own | {"threads": torch.get_num_threads()}


class Worker:
    """A side in a process of its own; while it waits for commands it costs nothing.

    Args:
        python: the interpreter.
        implementation: the library that it drives: one of `LIBRARIES` in `sides/__main__.py`.
        kind: of the side: one of `SIDES` there.
        shape: sizes of the model and the data.
        device: ``cpu`` hides GPUs from it.
        options: further arguments of the side.
    """

    def __init__(
        self,
        python: Path,
        implementation: str,
        kind: str,
        shape: dict[str, Any],
        device: str = "auto",
        **options: str,
    ) -> None:
        self.implementation = implementation
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        words = [implementation, kind, json.dumps(shape), json.dumps(options)]
        self.process = subprocess.Popen(
            [python, ROOT / "benchmarks" / "sides" / "__main__.py", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment(implementation, device),
        )

    def ready(self) -> dict[str, str]:
        """Waits for the side; the versions it runs on.

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
        trace: types.TracebackType | None,
    ) -> None:
        self.process.stdin.close()
        if error is not None:
            self.process.kill()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:  # a thread of another library goes on
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.close()


def environment(implementation: str, device: str = "auto") -> dict[str, str]:
    """A worker's environment variables: only ours find this source tree."""
    found = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    found |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found["PYTHONSAFEPATH"] = "1"  # else the script's folder hides packages of equal names
    if implementation in OURS:
        found["PYTHONPATH"] = source_tree()
    if implementation == "vllm":
        threads = torch.get_num_threads()
        found |= {
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in the worker itself
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; by default a share of all memory
        }
    if device == "cpu":
        found["CUDA_VISIBLE_DEVICES"] = ""  # accelerate takes a GPU where it sees one
    return found


@contextlib.contextmanager
def pair(
    measurement: Measurement,
    peer: str,
    python: Path,
    kind: str,
    shape: dict[str, Any],
    **options: str,
) -> Iterator[dict[str, Worker]]:
    """Fastrl's worker and the peer's, once both are ready; the result notes their versions."""
    names = {"fastrl": (Path(sys.executable), "fastrl"), peer: (python, peer.split("==")[0])}
    with together(measurement, names, kind, shape, **options) as workers:
        yield workers


@contextlib.contextmanager
def together(
    measurement: Measurement,
    names: dict[str, tuple[Path, str]],
    kind: str,
    shape: dict[str, Any],
    **options: str,
) -> Iterator[dict[str, Worker]]:
    """Workers by the names of their sides, once all are ready; the result notes their versions.

    Args:
        names: the interpreter and the implementation of each.
    """
    device = measurement.run.device.type
    measurement.entry["shape"] = shape
    with contextlib.ExitStack() as stack:
        workers = {
            name: stack.enter_context(Worker(path, library, kind, shape, device, **options))
            for name, (path, library) in names.items()
        }
        ready = {name: worker.ready() for name, worker in workers.items()}
        measurement.run.result(measurement.case.benchmark)["versions"] |= ready
        yield workers


def asking(worker: Worker) -> Side:
    """A worker as a side: its turn is an answer, of whose peaks of memory the highest is kept."""

    def turn() -> Seconds:
        answer = worker.ask("turn")
        if answer.get("peak") is not None:
            side.memory["peak"] = max(answer["peak"], side.memory.get("peak", 0))
        return answer["seconds"]

    side = Side(turn)
    return side


def turns_with_memory(measurement: Measurement, workers: dict[str, Worker]) -> None:
    """Asks for the memory of a step on each side; then they take turns."""
    sides = {name: asking(worker) for name, worker in workers.items()}
    for name, side in sides.items():
        side.memory = workers[name].ask("memory")
    measurement.measure(sides, 7)
