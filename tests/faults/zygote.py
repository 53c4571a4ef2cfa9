"""Runs commands in forked processes that can be killed at a chosen instant.

One process imports all of fastrl once and computes nothing; each command runs in a fork of it,
which costs milliseconds. :class:`Zygote` talks to it in JSON lines.
"""

import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Places where a process is killed, as it is about to call a function: of every trainer, of PPO, and
# of those on transformers' Trainer.
SAVING = {
    "save": "fastrl.run.checkpoints:write_manifest",
    "sync": "fastrl.run.files:sync_file",
    "metrics": "fastrl.run.metrics:MetricsFile.append",
    "drop": "fastrl.run.checkpoints:remove_folder",
}
PLACES = {
    "rollout": "fastrl.rollout.decode_step:DecodeStep.__call__",
    "reward": "fastrl.collect.collector:Collector._judged",
    "forward": "fastrl.learn.loss:UpdateLoss.__call__",
    "update": "fastrl.learn.engine:Engine.step", "tree": "fastrl.run.state:_plain",
    "ledger": "fastrl.run.ledger:write_file", **SAVING,
}  # fmt: skip
FIT_PLACES = {
    "forward": "transformers.trainer:Trainer.compute_loss",
    "update": "torch.optim.adamw:AdamW.step",
    "files": "transformers.trainer:Trainer._save_rng_state",
    **SAVING,
}


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int  # exit status; minus the signal that killed it
    output: str
    calls: dict[str, int]  # of each place; empty after a kill


class Zygote:
    """The process that forks."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._number = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Its users' path: on a CPU the tests of kernels run Triton's interpreter.
            env={name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"},
        )

    def run(self, arguments: list[str], **how: Any) -> Outcome:
        """Runs ``fastrl`` with these arguments.

        Args:
            how: ``places``: functions to count, by name; ``kill``: the name of one and the number
                of the call at whose beginning the process dies; ``file_size``: most bytes of a file
                that it may write.
        """
        self._number += 1
        log = self.folder / f"{self._number}.log"
        request = {"arguments": arguments, "log": str(log), **how}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        calls = Path(f"{log}.calls")
        counted = json.loads(calls.read_text()) if calls.exists() else {}
        return Outcome(status, log.read_text(), counted)

    def close(self) -> None:
        with self._process:  # closes its pipes, and waits
            pass


def _install(name: str, place: str, calls: Counter, kill: Any) -> None:
    """Counts the calls of a function, and dies at one of them."""
    module, _, path = place.partition(":")
    owner: Any = __import__(module, fromlist=["_"])
    *parents, attribute = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    function: Callable[..., Any] = getattr(owner, attribute)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        if kill == [name, calls[name]]:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    setattr(owner, attribute, counted)


def _child(request: dict[str, Any]) -> int:
    from fastrl import cli
    from fastrl.tools.reports import report

    # Half of a tiny run's time, and nothing that is compared.
    report.write_report = lambda folder: folder.report
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if request.get("file_size"):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_size"],) * 2)
    calls: Counter = Counter()
    for name, place in request.get("places", {}).items():
        _install(name, place, calls, request.get("kill"))
    status = 1
    try:
        status = cli.main(request["arguments"])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError):  # beyond its file_size
        Path(f"{request['log']}.calls").write_text(json.dumps(calls))
        Path(f"{request['log']}.modules").write_text("\n".join(sys.modules))
    return status


def _import_all(names: Path) -> None:
    """Imports what a run has imported late, so that the next forks have it already."""
    for name in names.read_text().split() if names.exists() else ():
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def main() -> None:
    for place in [*PLACES.values(), *FIT_PLACES.values()]:
        importlib.import_module(place.partition(":")[0])
    gc.freeze()  # runs collect garbage at their ends: not among what the imports made
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if process == 0:
            os._exit(_child(request))
        _, how = os.waitpid(process, 0)
        _import_all(Path(f"{request['log']}.modules"))
        gc.freeze()
        print(os.waitstatus_to_exitcode(how), flush=True)


if __name__ == "__main__":
    main()
