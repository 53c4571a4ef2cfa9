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
from benchmarks.gate import Problem, wrong_numbers
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
    key: int | None = None
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
        "linear_ppo_loss walks 4096 rows in four chunks of 256 MiB and adds to the weight's "
        "gradient in fp32 after each: 2 GiB read and written, 5.7 ms in all if nothing hides "
        "it. 512 MiB should take off 1–3 ms, and 1024 MiB, one chunk, 2–5 ms and the buffer of "
        "2 GiB with it. linear_logprobs walks the vocabulary backward: under 2%.",
        unit=MIB,
    ),
    Tunable(
        "columns",
        "of the vocabulary at a time, where logits are computed again",
        ("lm_head.COLUMNS",),
        (4096, 8192, 16384, 32768),
        ("linear_logprobs",),
        "The hidden states' gradient is read and written in fp32 once per chunk: 16 × 128 MiB, "
        "0.7 ms at 8192. A product of 4096 × 8192 is 512 tiles for 132 multiprocessors, 3.9 "
        "waves. 16384 should take off 2–3%, 32768 another 1%, 4096 add 3–5%.",
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
        "Each part writes 4 figures and the sums of its groups, 0.3% of the bytes at 4096, and is "
        "merged once more. 8192 over 256 threads are 32 logits in registers: fewer programs at a "
        "time, up to 5% slower. 2048: within 3%.",
    ),
    Tunable(
        "sampling threads",
        "of such a program",
        ("_triton.vocab_tiles._THREADS",),
        (128, 256, 512),
        ("sample_tokens",),
        "512 vectors of 16 bytes to a tile: two per thread at 256, the load being one pass "
        "either way. Little is computed: within 5%, 512 the best if any.",
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
    problem = ops.problem(shape, run.device, backend=backend)
    now = tunable.shown(tunable.present) + ", now"
    sides: dict[str, Side] = {}
    for value in tunable.values:
        name = now if value == tunable.present else tunable.shown(value)
        workspace.clear()
        try:
            with tunable.set_to(value):
                wrong = wrong_numbers(problem)
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
