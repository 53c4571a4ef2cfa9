"""`python -m benchmarks gpu`: all that a GPU has to say, unattended: right first, then how fast.

Stages, each a command of its own with a limit of time, a log and a result file: the kernels' tests,
compiled; the tests of all that trains and generates; then ops, tunables and whole workloads. One
that fails or runs out of its time costs the others nothing. On a machine that is lent for minutes,
`--only` makes several calls of it.

Beside the stages: what the kernels could do otherwise, said before it is measured (`TUNABLES`); the
bytes that Nsight Compute counts; and a pass of every kernel under compute-sanitizer.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks import harness, ops
from benchmarks.harness import RESULTS, ROOT, Case, Measurement, Problem, Run, Side, wrong_numbers
from benchmarks.ops import Shape, Sizes
from fastrl_kernels import workspace

LEAST = 1.0  # minutes: with less, a stage is not begun
GRACE = 30.0  # seconds for a stage to save what it has, beyond its limit
TAIL = 12  # lines of a failed stage's log that are shown


# --- stages --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stage:
    """A command of this Python: `{minutes}`, `{results}`, `{jobs}` and `{peer}` are filled in."""

    name: str
    what: str
    minutes: float
    command: tuple[str, ...]


# What a driver or another version warns of is no failure, and a package that is not there costs its
# own tests alone.
_PYTEST = ("-m", "pytest", "--quiet", "-W", "default")
_TESTS = (*_PYTEST, "--numprocesses", "{jobs}", "--maxfail", "40",
          "--continue-on-collection-errors")  # fmt: skip
_MEASURE = (*_PYTEST, "--device", "cuda", "--minutes", "{minutes}", "--results", "{results}")


def _folders(*names: str) -> tuple[str, ...]:
    """Those of the tests that there are."""
    return tuple(f"tests/{name}" for name in names if (ROOT / "tests" / name).is_dir())


STAGES = (
    Stage("kernels", "the kernels' tests, compiled", 9, (*_TESTS, "tests/kernels")),
    Stage(
        "trainers",
        "the tests of rollouts, references and trainers, TRL's golden figures too",
        7,
        (*_TESTS, *_folders("rollout", "ref_model", "references", "models", "ppo", "trainers",
                            "supervised", "alignment")),
    ),
    Stage("ops", "checks of the kernels, single ops", 9, (*_MEASURE, "benchmarks/test_ops.py")),
    Stage(
        "tune",
        "what could be faster",
        8,
        ("-m", "benchmarks.gpu", "tune", "--minutes", "{minutes}", "--results", "{results}"),
    ),
    Stage("rollout", "generation", 9, (*_MEASURE, "--rounds", "3", "benchmarks/test_rollout.py")),
    Stage(
        "ppo",
        "a whole PPO iteration",
        9,
        (*_MEASURE, "--rounds", "3", "{peer}", "benchmarks/test_ppo.py"),
    ),
    Stage(
        "ref_model",
        "PPO's reference, by the way it is kept",
        6,
        (*_MEASURE, "--rounds", "3", "benchmarks/test_ref_model.py"),
    ),
    Stage(
        "training",
        "SFT, DPO and GRPO beside TRL, where it is installed",
        6,
        (*_MEASURE, "--rounds", "3", "benchmarks/test_training.py", "benchmarks/test_grpo.py"),
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a stage ended: its exit code, or why it was not run; None: it was killed."""

    code: int | str | None
    seconds: float = 0.0
    log: Path | None = None

    @property
    def fine(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        if isinstance(self.code, str):
            return f"not run: {self.code}"
        how = "ended" if self.fine else "killed" if self.code is None else f"FAILED ({self.code})"
        return f"{how} after {self.seconds:.0f} s, {self.log}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks gpu`."""
    names = tuple(stage.name for stage in STAGES)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        default=names,
        metavar="STAGE",
        help="; ".join(f"{stage.name}: {stage.what}" for stage in STAGES),
    )
    total = sum(stage.minutes for stage in STAGES)
    parser.add_argument("--minutes", type=float, default=total, help=f"in all; default {total:g}")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="default: RESULTS/logs")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument(
        "--peer-python", metavar="PATH", help="an interpreter that has TRL 0.11.4; else eager"
    )


def run(args: argparse.Namespace) -> int:
    """0 where every stage ended well, 1 otherwise, 2 without a GPU."""
    if not torch.cuda.is_available():
        print(
            "no GPU here: torch.cuda.is_available() is False. On a machine without one, `pytest "
            "benchmarks` measures the CPU paths and `python -m tests.aot` compiles the kernels.",
            file=sys.stderr,
        )
        return 2
    logs = args.logs or args.results / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    ended = carry_out([stage for stage in STAGES if stage.name in args.only], args, logs)
    print("\n" + "\n".join(f"{name}: {how}" for name, how in ended.items()))
    return 0 if all(how.fine for how in ended.values()) else 1


def carry_out(stages: Sequence[Stage], args: argparse.Namespace, logs: Path) -> dict[str, Ended]:
    """The stages in their order, each within its minutes and what is left of all."""
    stop = time.monotonic() + 60 * args.minutes
    ended = {}
    for stage in stages:
        minutes = min(stage.minutes, (stop - time.monotonic()) / 60)
        if minutes < LEAST:
            ended[stage.name] = Ended(f"{max(minutes, 0):.1f} minutes were left")
            continue
        command = [sys.executable, *filled(stage, args, minutes)]
        print(f"{stage.name}: {' '.join(command[1:])}", flush=True)
        log = logs / f"{stage.name}.log"
        ended[stage.name] = run_stage(command, log, 60 * minutes + GRACE)
        print(f"{stage.name}: {ended[stage.name]}", flush=True)
        if not ended[stage.name].fine:
            print(*log.read_text().splitlines()[-TAIL:], sep="\n", flush=True)
    return ended


def filled(stage: Stage, args: argparse.Namespace, minutes: float) -> list[str]:
    """The command's words; `{peer}` may be several, or none."""
    peer = ["--peer-python", args.peer_python] if args.peer_python else []
    values = {"minutes": f"{minutes:.1f}", "results": str(args.results), "jobs": str(args.jobs)}
    words: list[str] = []
    for word in stage.command:
        words += peer if word == "{peer}" else [word.format(**values)]
    return words


def run_stage(command: Sequence[str], log: Path, seconds: float) -> Ended:
    """The command in a process group of its own, with all that it says in a file."""
    began = time.monotonic()
    code: int | None = None
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment() | {"PYTHONUNBUFFERED": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # its workers too, whatever ended it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Ended(code, time.monotonic() - began, log)


def environment() -> dict[str, str]:
    """This one, where a bare checkout finds its packages."""
    paths = [str(ROOT), str(ROOT / "kernels" / "torch-ext")]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


# --- tunables ------------------------------------------------------------------------------------

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Tunable:
    """A number of a module's, others that it could be, and what they should change.

    `places`: (module, attribute) of each copy of it; `key`, where the attribute is a dict.
    """

    name: str
    what: str
    places: tuple[tuple[str, str], ...]
    values: tuple[int, ...]
    ops: tuple[str, ...]
    predicted: str
    key: int | None = None
    unit: int = 1  # values are told in it

    @property
    def shapes(self) -> list[Shape]:
        """The main ones of its ops."""
        return [case.of for op in self.ops for case in ops.cases(op, "cuda")]

    @property
    def present(self) -> int:
        """The value that the kernels have."""
        module, attribute = self.places[0]
        found = getattr(importlib.import_module(module), attribute)
        return found if self.key is None else found[self.key]

    def told(self, value: int) -> str:
        """A value in its unit."""
        return f"{value // self.unit} MiB" if self.unit == MIB else str(value)

    @contextlib.contextmanager
    def set_to(self, value: int) -> Iterator[None]:
        """The kernels with another value meanwhile."""
        before = []
        for name, attribute in self.places:
            module = importlib.import_module(name)
            found = getattr(module, attribute)
            before.append((module, attribute, found))
            setattr(module, attribute, value if self.key is None else {**found, self.key: value})
        try:
            yield
        finally:
            for module, attribute, found in before:
                setattr(module, attribute, found)


def _kernels(*places: str) -> tuple[tuple[str, str], ...]:
    found = (place.rpartition(".") for place in places)
    return tuple((f"fastrl_kernels.{module}", attribute) for module, _, attribute in found)


# Predictions are arithmetic on an H100: 132 multiprocessors, 3.0 TB/s, 700 TFLOP/s in bf16.
TUNABLES = (
    Tunable(
        "workspace",
        "logits at a time of the ops with a head",
        _kernels("lm_head.DEFAULT_WORKSPACE_BYTES"),
        tuple(n * MIB for n in (128, 256, 512, 1024)),
        ("linear_ppo_loss", "linear_logprobs"),
        "linear_ppo_loss walks 4096 rows in four chunks of 256 MiB and adds to the weight's "
        "gradient in fp32 after each: 2 GiB read and written, 5.7 ms in all if nothing hides "
        "it. 512 MiB should take off 1–3 ms, and 1024 MiB, one chunk, 2–5 ms and the buffer of "
        "2 GiB with it. linear_logprobs walks the vocabulary backward: under 2%.",
        unit=MIB,
    ),
    Tunable(
        "columns",
        "of the vocabulary at a time, where logits are computed again",
        _kernels("lm_head.COLUMNS"),
        (4096, 8192, 16384, 32768),
        ("linear_logprobs",),
        "The hidden states' gradient is read and written in fp32 once per chunk: 16 × 128 MiB, "
        "0.7 ms at 8192. A product of 4096 × 8192 is 512 tiles for 132 multiprocessors, 3.9 "
        "waves. 16384 should take off 2–3%, 32768 another 1%, 4096 add 3–5%.",
    ),
    Tunable(
        "window",
        "threads that walk a row, a vector of 16 bytes each",
        _kernels("_triton.rows.VECTORS"),
        (64, 128, 256, 512),
        ("token_logprobs", "full_kl"),
        "16 KiB in flight on each multiprocessor hide 0.7 µs at 3.0 TB/s; 2048 threads with a "
        "vector each hold 32 KiB, whatever the window. 64, 128 and 256 within 3%; 512 adds "
        "2–4%, for a program's last window is half empty more often and its reduction is "
        "longer.",
    ),
    Tunable(
        "part",
        "vectors that a program of an elementwise kernel walks",
        _kernels(*(f"_triton.{m}.PART_VECTORS" for m in ("rows", "logprob", "full_kl",
                                                        "lm_head"))),
        tuple(128 * n for n in (8, 16, 32, 64)),
        ("token_logprobs", "full_kl"),
        "A part's program reads some 20 bytes of its row's statistics for 32 KiB of logits: no "
        "change from 16 to 8 or 32. At 64 a row of 151936 is 2.3 parts, whose last one is a "
        "third full: within 2% still, since 8192 rows are many.",
    ),
    Tunable(
        "sampling tile",
        "logits that a program of the sampling kernels holds",
        _kernels("_triton.vocab_tiles._TILE"),
        (2048, 4096, 8192),
        ("sample_tokens",),
        "Each part writes 5 figures and is merged once more: 0.1% of the bytes at 4096. 8192 "
        "over 256 threads are 32 logits and their keys' noise in registers: half as many "
        "programs at a time, 5–10% slower. 2048: within 3%.",
    ),
    Tunable(
        "sampling threads",
        "of such a program",
        _kernels("_triton.vocab_tiles._THREADS"),
        (128, 256, 512),
        ("sample_tokens",),
        "512 vectors of 16 bytes to a tile: two per thread at 256, the load being one pass "
        "either way. Philox is what is computed, 10 rounds for 4 numbers: within 5%, 512 the "
        "best if any.",
    ),
    Tunable(
        "split",
        "tokens of a cache that a program takes",
        _kernels("_triton.decode_attention.SPLIT"),
        (128, 256, 512),
        ("decode_attention",),
        "Partial sums in fp32 are written and read again: 5% of the bytes of keys and values "
        "with 14 heads on 2 at 256, 11% at 128, none at 512 where 512 tokens are all. But 512 "
        "leaves 512 programs of Qwen's 256 slots, 3.9 for each multiprocessor: 256 best there "
        "by a few percent; a single slot of GPT-2 wants 128.",
    ),
    Tunable(
        "attention tile",
        "elements of keys that a program holds, in half precision",
        _kernels("_triton.decode_attention._TILE_ELEMENTS"),
        (4096, 8192, 16384),
        ("decode_attention",),
        "64 tokens are the most whatever it is: for heads of 64, 8192 and 16384 are the same; "
        "for heads of 128, 8192 is 64 tokens already. 4096 halves the loads in flight: 10–20% "
        "slower.",
        key=2,
    ),
    Tunable(
        "loss tile",
        "tokens of a program of the PPO loss",
        _kernels("_triton.ppo_loss.TILE"),
        (512, 1024, 2048),
        ("ppo_loss",),
        "30 bytes per token and a dozen registers each: 512 has twice the partial statistics to "
        "add up, 2048 half: within 5%, the second launch's 2 µs deciding.",
    ),
)  # fmt: skip


def tune(run: Run, tunables: Iterable[Tunable] = TUNABLES) -> None:
    """Each tunable with each shape of its ops, while there is time."""
    for tunable in tunables:
        for shape in tunable.shapes:
            case = Case("tune", shape.op, f"{tunable.name}: {shape.label}", of=shape, seconds=20.0)
            if why := run.obstacle(case):
                print(f"left: {case}: {why}", flush=True)
                continue
            try:
                values_in_turns(Measurement(run, case), tunable)
            except harness.Red as error:
                print(f"{case}: {error}", flush=True)
            harness.free(run.device)


def values_in_turns(
    measurement: Measurement, tunable: Tunable, backend: str = "auto", rounds: int = 15
) -> None:
    """All values of a tunable on a shape, round by round. One whose results are off, by the measure
    of all gates, has no time."""
    run, shape = measurement.run, measurement.case.of
    measurement.entry["tunable"] = tunable.name
    problem = ops.problem(shape, run.device, backend=backend)
    now = tunable.told(tunable.present) + ", now"
    sides: dict[str, Side] = {}
    for value in tunable.values:
        name = now if value == tunable.present else tunable.told(value)
        workspace.clear()
        with tunable.set_to(value):
            wrong = _wrong(problem)
        if wrong:
            measurement.absent(name, wrong)
        else:
            sides[name] = harness.timed(partial(_with, tunable, value, problem), run.device)
    if now not in sides:
        measurement.refuse(measurement.entry["absent"][now])
    least = ops.least(shape, run.device)
    least = least or harness.copying(ops.work(shape).bytes, run.device)
    limit = harness.timed(least, run.device)
    measurement.measure(sides, rounds, limit, within=3.0, baseline=now)


def _with(tunable: Tunable, value: int, problem: Problem) -> object:
    with tunable.set_to(value):
        return problem.results(problem.ours)


def _wrong(problem: Problem) -> str | None:
    """What is wrong with a value: results that are off, or none at all."""
    try:
        return wrong_numbers(problem)
    except Exception as error:  # too much shared memory or too few registers, say
        return harness.described(error)


# --- Nsight Compute and compute-sanitizer --------------------------------------------------------

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
TOOLS = {
    "memcheck": "accesses outside of an allocation or misaligned",
    "racecheck": "races in shared memory",
}
# The kernels read whole vectors of 16 bytes, in which an allocation of PyTorch's ends: numbers of
# rows are multiples of 16, or their whole loads would be reported as reading past it.
SANITIZED = Sizes(
    rows=16, vocabulary=(5003, 8192), steps=(507, 512), hidden=64, tokens=(1023, 1024), width=64
)
EXIT_CODE = 86  # of errors that were found


class Refused(RuntimeError):
    """A tool ran, and cannot do its work here; the message says why."""


def available(tool: str) -> bool:
    """True where it is on the path."""
    return shutil.which(tool) is not None


def count_bytes(shape: Shape, timeout: float = 90.0) -> dict[str, int]:
    """{"read", "written", "kernels"} of one call, from and to a GPU's memory."""
    command = ["ncu", "--csv", "--print-units", "base", "--profile-from-start", "off"]
    command += ["--metrics", ",".join(METRICS), sys.executable, "-m", "benchmarks.gpu", "profiled"]
    described = json.dumps(dataclasses.asdict(shape))
    done = subprocess.run(
        [*command, described],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return parse_ncu(done.stdout.splitlines())


def parse_ncu(lines: list[str]) -> dict[str, int]:
    """The sums over all kernels of ncu's CSV, which begins after lines of `==PROF== …`."""
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        notes = [line for line in lines if "ERROR" in line or "ERR_" in line]
        raise Refused((notes or lines or ["ncu printed nothing"])[0][:300])
    sums, kernels = dict.fromkeys(METRICS, 0.0), set()
    for row in csv.DictReader(lines[start:]):
        if row["Metric Name"] in sums:
            sums[row["Metric Name"]] += float(row["Metric Value"].replace(",", ""))
            kernels.add(row["ID"])
    read, written = (int(sums[metric]) for metric in METRICS)
    return {"read": read, "written": written, "kernels": len(kernels)}


def profiled(described: str) -> None:
    """What ncu looks at: a shape's call, once to compile and once between start and stop."""
    problem = ops.problem(Shape.read(json.loads(described)), "cuda")
    problem.results(problem.ours)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    problem.results(problem.ours)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def sanitize(tool: str, timeout: float = 180.0) -> dict[str, object]:
    """{"tool", "errors": how many, "first": lines on the first of them}, of one pass of every op's
    kernels. Every tensor has an allocation of its own meanwhile, so that a kernel which goes beyond
    one is seen.

    Raises:
        Refused: it ended without a summary.
        subprocess.TimeoutExpired: it did not end in time.
    """
    done = subprocess.run(
        [
            *("compute-sanitizer", "--tool", tool, "--error-exitcode", str(EXIT_CODE)),
            *(sys.executable, "-m", "benchmarks.gpu", "sanitized"),
        ],
        cwd=ROOT,
        env=environment() | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    return {"tool": tool} | parse_sanitizer(done.stdout, done.returncode)


def parse_sanitizer(text: str, code: int) -> dict[str, object]:
    """Errors and the first lines on them, of the tool's output and exit code."""
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    own = [line for line in text.splitlines() if line.startswith("=========")]
    if not found or code not in (0, EXIT_CODE):
        lines = [line for line in own if "rror" in line] or text.strip().splitlines()[-1:]
        raise Refused((lines or ["it printed nothing"])[0][:300])
    errors = int(found[-1])
    return {"errors": errors, "first": own[1:9] if errors else []}


def sanitized(device: str = "cuda", sizes: Sizes = SANITIZED, backend: str = "auto") -> None:
    """What compute-sanitizer looks at: every op, in every dtype."""
    for op in ops.available():
        for shape in ops.OPS[op].checked(sizes):
            problem = ops.problem(shape, device, backend=backend, pick_rows=False)
            problem.results(problem.ours)
    if device == "cuda":
        torch.cuda.synchronize()


def main(argv: Sequence[str]) -> None:
    """The processes of their own: tunables, and what profilers look at."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    commands = parser.add_subparsers(dest="command", required=True)
    tuning = commands.add_parser("tune", help="values of the kernels' tunables, in turns")
    tuning.add_argument("--minutes", type=float, default=8.0)
    tuning.add_argument("--results", type=Path, default=RESULTS)
    commands.add_parser("profiled").add_argument("shape")
    commands.add_parser("sanitized")
    args = parser.parse_args(argv)
    does: dict[str, Callable[[], None]] = {
        "tune": lambda: tune(Run(torch.device("cuda"), minutes=args.minutes, results=args.results)),
        "profiled": lambda: profiled(args.shape),
        "sanitized": sanitized,
    }
    does[args.command]()


if __name__ == "__main__":
    main(sys.argv[1:])
