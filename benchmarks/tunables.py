"""What could make the kernels faster: numbers of theirs, with what other values should change.

Predictions are written before `python -m benchmarks gpu --only tune` measures them;
`python -m benchmarks report` puts both into `NOTES.md`. Run as a module, this measures.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks import memory, ops, timing
from benchmarks.cases import Case
from benchmarks.gate import DRAWS, Problem, wrong_numbers
from benchmarks.harness import Measurement, Red, Run
from benchmarks.ops import Shape
from benchmarks.peers import why_absent
from benchmarks.results import RESULTS, why_not_recorded
from benchmarks.timing import Side
from fastrl_kernels import workspace

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Tunable:
    """A number in a module of the kernels, and other values to try.

    `places`: "module.attribute" of each copy of it; `key`, where the attribute is a dict.
    """

    name: str
    what: str
    places: tuple[str, ...]
    values: tuple[int, ...]
    ops: tuple[str, ...]
    predicted: str
    key: int | str | None = None
    unit: int = 1  # that values are shown in

    @property
    def shapes(self) -> list[Shape]:
        """The main shapes of its ops."""
        return [case.of for op in self.ops for case in ops.cases(op, "cuda")]

    @property
    def present(self) -> int:
        """The value that the kernels have now."""
        found = self.found[0][-1]
        return found if self.key is None else found[self.key]

    @property
    def found(self) -> list[tuple[object, str, object]]:
        """(module, attribute, its value) of each place."""
        places = [place.rpartition(".") for place in self.places]
        modules = [importlib.import_module(f"fastrl_kernels.{module}") for module, *_ in places]
        names = [name for *_, name in places]
        return [(m, name, getattr(m, name)) for m, name in zip(modules, names, strict=True)]

    def shown(self, value: int) -> str:
        """A value in its unit."""
        return f"{value // self.unit} MiB" if self.unit == MIB else str(value)

    @contextlib.contextmanager
    def set_to(self, value: int) -> Iterator[None]:
        """Inside, the kernels have another value."""
        before = self.found
        for module, name, found in before:
            setattr(module, name, value if self.key is None else {**found, self.key: value})
        try:
            yield
        finally:
            for module, name, found in before:
                setattr(module, name, found)


# Predictions are arithmetic on an H100: 132 multiprocessors, 3.0 TB/s, 700 TFLOP/s in bf16.
TUNABLES = (
    Tunable(
        "workspace",
        "logits at a time of the ops with a head",
        ("lm_head.DEFAULT_WORKSPACE_BYTES",),
        tuple(n * MIB for n in (128, 256, 512, 1024)),
        ("linear_ppo_loss", "linear_logprobs"),
        "linear_ppo_loss has all 4096 rows in one chunk from 256 MiB on, where a sum in fp32 would "
        "take more; 128 MiB changes nothing. linear_logprobs has 4 chunks of 32768 columns at 256 "
        "MiB, and reads and writes the hidden states' gradient in fp32 once for each, 0.45 GiB in "
        "all: 128 MiB adds 0.2 ms for twice as many, and 0.8 ms for the chunk that is not computed "
        "again, now an eighth. 512 MiB takes 1.7 ms off, 1024 MiB, one chunk, 5 ms.",
        unit=MIB,
    ),
    Tunable(
        "window",
        "threads that walk a row, a vector of 16 bytes each",
        ("_triton.rows.VECTORS",),
        (64, 128, 256, 512),
        ("token_logprobs", "full_kl"),
        "7 programs of 128 threads with four vectors each hold 56 KiB in flight on a "
        "multiprocessor, of which 18 hide 0.8 µs at 3.0 TB/s. 64, 128 and 256 within 3%; 512 adds "
        "2–4%, for a row has fewer whole steps of four windows and its reduction is longer.",
    ),
    Tunable(
        "part",
        "vectors that a program of an elementwise kernel walks",
        tuple(f"_triton.{m}.PART_VECTORS" for m in ("rows", "logprob", "full_kl", "lm_head")),
        tuple(128 * n for n in (8, 16, 32, 64)),
        ("token_logprobs", "full_kl"),
        "A part's program reads some 20 bytes of its row's statistics for 32 KiB of logits: no "
        "change from 16 to 8 or 32. At 64 a row of 151936 is 2.3 parts, whose last one is a "
        "third full: within 2% still, since 8192 rows are many.",
    ),
    Tunable(
        "sampling tile",
        "logits that a program of the sampling kernels holds",
        ("_triton.vocab_tiles._TILE",),
        (2048, 4096, 8192),
        ("sample_tokens",),
        "Each group writes 3 figures, 1.2% of the bytes of 512 columns in bf16, whatever the tile. "
        "In bf16 a thread holds 32 logits at 4096 and takes 14.3 instructions for each, 12.6 at "
        "8192 (with 128 registers, 16 warps to a multiprocessor), 17.6 at 2048. 256 rows of 151936 "
        "are read in 27 µs at 3.0 TB/s, in which an H100 issues 20: all within 10%.",
    ),
    Tunable(
        "sampling threads",
        "of such a program",
        ("_triton.vocab_tiles._THREADS",),
        (128, 256, 512),
        ("sample_tokens",),
        "A program takes 60 instructions to find its place, and each of 3 reductions of a group 5 "
        "shuffles: 14.3 per logit in bf16 at 128, 17.6 at 256, 41 at 512, which issue in 19, 24 "
        "and 56 µs for 256 rows of 151936 that are read in 27: 256 within 10%, 512 twice as slow.",
    ),
    Tunable(
        "head's tile threads",
        "of a program that draws from the head",
        ("_triton.linear_sample._THREADS",),
        (128, 256),
        ("linear_sample",),
        "Of 32 rows in bf16 with a temperature of each, triton 3.6 gives a thread 252 to 255 "
        "registers at 128, and two programs run at a time where three do without temperatures. "
        "The weight's bytes take the time: 256 up to 3% faster there, within 2% elsewhere.",
        key="cuda",
    ),
    Tunable(
        "split",
        "tokens of a cache that a program takes",
        ("_triton.decode_attention.SPLIT",),
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
        ("_triton.decode_attention._TILE_ELEMENTS",),
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
        ("_triton.ppo_loss.TILE",),
        (512, 1024, 2048),
        ("ppo_loss",),
        "30 bytes per token and a dozen registers each: 512 has twice the partial statistics to "
        "add up, 2048 half: within 5%, the second launch's 2 µs deciding.",
    ),
)


def tune(run: Run, tunables: Iterable[Tunable] = TUNABLES) -> None:
    """Measures each tunable on each shape of its ops, while there is time."""
    for tunable in tunables:
        for shape in tunable.shapes:
            case = Case("tune", shape.op, f"{tunable.name}: {shape.label}", of=shape, seconds=20.0)
            if why := run.obstacle(case):
                print(f"left: {case}: {why}", flush=True)
                continue
            try:
                values_in_turns(Measurement(run, case), tunable)
            except Red as error:
                print(f"{case}: {error}", flush=True)
            memory.free(run.device)


def values_in_turns(
    measurement: Measurement, tunable: Tunable, backend: str = "auto", rounds: int = 15
) -> None:
    """Turns of all values of a tunable on a shape; one whose results fail the gate is absent."""
    run, shape = measurement.run, measurement.case.of
    measurement.entry["tunable"] = tunable.name
    make = partial(ops.problem, shape, run.device, backend=backend)
    problem = make()
    now = tunable.shown(tunable.present) + ", now"
    sides: dict[str, Side] = {}
    for value in tunable.values:
        name = now if value == tunable.present else tunable.shown(value)
        workspace.clear()
        try:
            with tunable.set_to(value):
                wrong = wrong_numbers(problem, (make(seed=seed) for seed in range(1, DRAWS)))
        except Exception as error:  # too much shared memory or too few registers, say
            wrong = why_absent(error)
        if wrong:
            measurement.absent(name, wrong)
        else:
            sides[name] = timing.timed(partial(_with, tunable, value, problem), run.device)
    if now not in sides:
        measurement.refuse(measurement.entry["absent"][now])
    limit = timing.timed(ops.least(shape, run.device)[0], run.device)
    measurement.measure(sides, rounds, limit, within=3.0, baseline=now)


def _with(tunable: Tunable, value: int, problem: Problem) -> object:
    with tunable.set_to(value):
        return problem.results(problem.ours)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tunables")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if why := why_not_recorded():
        parser.error(why)
    tune(Run(torch.device("cuda"), minutes=args.minutes, results=args.results))
