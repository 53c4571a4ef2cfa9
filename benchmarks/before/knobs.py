"""What the kernels could do otherwise on a GPU, and what that should change: said before measuring.

Predictions are arithmetic on an H100 (132 multiprocessors, 3.0 TB/s, 700 TFLOP/s of bf16 products);
`tune.py` measures them, and `tune_tables.py` writes both into NOTES.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

from benchmarks.before.cases import Case
from benchmarks.before.gpu import TELLING

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Knob:
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
    def cases(self) -> list[Case]:
        """The telling ones of its ops."""
        return [case for case in TELLING if case.op in self.ops]

    def told(self, value: int) -> str:
        """A value in its unit."""
        return f"{value // self.unit} MiB" if self.unit == MIB else str(value)


def _row_parts(module: str) -> tuple[str, str]:
    return (f"fastrl_kernels._triton.{module}", "PART_VECTORS")


KNOBS = (
    Knob(
        "workspace",
        "logits at a time of the ops with a head",
        (("fastrl_kernels.head_inputs", "DEFAULT_WORKSPACE_BYTES"),),
        tuple(n * MIB for n in (128, 256, 512, 1024)),
        ("linear_ppo_loss", "linear_logprobs"),
        "linear_ppo_loss walks 4096 rows in four chunks of 256 MiB and adds to the weight's "
        "gradient in fp32 after each: 2 GiB read and written, 5.7 ms in all if nothing hides "
        "it. 512 MiB should take off 1–3 ms, and 1024 MiB, one chunk, 2–5 ms and the buffer of "
        "2 GiB with it. linear_logprobs walks the vocabulary backward: under 2%.",
        unit=MIB,
    ),
    Knob(
        "columns",
        "of the vocabulary at a time, where logits are computed again",
        (("fastrl_kernels.head", "COLUMNS"),),
        (4096, 8192, 16384, 32768),
        ("linear_logprobs",),
        "The hidden states' gradient is read and written in fp32 once per chunk: 16 × 128 MiB, "
        "0.7 ms at 8192. A product of 4096 × 8192 is 512 tiles for 132 multiprocessors, 3.9 "
        "waves. 16384 should take off 2–3%, 32768 another 1%, 4096 add 3–5%.",
    ),
    Knob(
        "window",
        "threads that walk a row, a vector of 16 bytes each",
        (("fastrl_kernels._triton.rows", "VECTORS"),),
        (64, 128, 256, 512),
        ("token_logprobs", "full_kl"),
        "16 KiB in flight on each multiprocessor hide 0.7 µs at 3.0 TB/s; 2048 threads with a "
        "vector each hold 32 KiB, whatever the window. 64, 128 and 256 within 3%; 512 adds "
        "2–4%, for a program's last window is half empty more often and its reduction is "
        "longer.",
    ),
    Knob(
        "part",
        "vectors that a program of an elementwise kernel walks",
        (
            ("fastrl_kernels._triton.rows", "PART_VECTORS"),
            *(_row_parts(module) for module in ("logprob", "full_kl", "head_rows")),
        ),
        tuple(128 * n for n in (8, 16, 32, 64)),
        ("token_logprobs", "full_kl"),
        "A part's program reads some 20 bytes of its row's statistics for 32 KiB of logits: no "
        "change from 16 to 8 or 32. At 64 a row of 151936 is 2.3 parts, whose last one is a "
        "third full: within 2% still, since 8192 rows are many.",
    ),
    Knob(
        "sampling tile",
        "logits that a program of the sampling kernels holds",
        (("fastrl_kernels._triton.parts", "_TILE"),),
        (2048, 4096, 8192),
        ("sample_tokens",),
        "Each part writes 5 figures and is merged once more: 0.1% of the bytes at 4096. 8192 "
        "over 256 threads are 32 logits and their keys' noise in registers: half as many "
        "programs at a time, 5–10% slower. 2048: within 3%.",
    ),
    Knob(
        "sampling threads",
        "of such a program",
        (("fastrl_kernels._triton.parts", "_THREADS"),),
        (128, 256, 512),
        ("sample_tokens",),
        "512 vectors of 16 bytes to a tile: two per thread at 256, the load being one pass "
        "either way. Philox is what is computed, 10 rounds for 4 numbers: within 5%, 512 the "
        "best if any.",
    ),
    Knob(
        "split",
        "tokens of a cache that a program takes",
        (("fastrl_kernels._triton.decode_attention", "SPLIT"),),
        (128, 256, 512),
        ("decode_attention",),
        "Partial sums in fp32 are written and read again: 5% of the bytes of keys and values "
        "with 14 heads on 2 at 256, 11% at 128, none at 512 where 512 tokens are all. But 512 "
        "leaves 512 programs of Qwen's 256 slots, 3.9 for each multiprocessor: 256 best there "
        "by a few percent; a single slot of GPT-2 wants 128.",
    ),
    Knob(
        "attention tile",
        "elements of keys that a program holds, in half precision",
        (("fastrl_kernels._triton.decode_attention", "_TILE_ELEMENTS"),),
        (4096, 8192, 16384),
        ("decode_attention",),
        "64 tokens are the most whatever it is: for heads of 64, 8192 and 16384 are the same; "
        "for heads of 128, 8192 is 64 tokens already. 4096 halves the loads in flight: 10–20% "
        "slower.",
        key=2,
    ),
    Knob(
        "loss tile",
        "tokens of a program of the PPO loss",
        (("fastrl_kernels._triton.ppo_loss", "TILE"),),
        (512, 1024, 2048),
        ("ppo_loss",),
        "30 bytes per token and a dozen registers each: 512 has twice the partial statistics to "
        "add up, 2048 half: within 5%, the second launch's 2 µs deciding.",
    ),
)


def named(names: list[str] | None) -> list[Knob]:
    """Those of these names, or all.

    Raises:
        ValueError: a name that there is not.
    """
    known: dict[str, Any] = {knob.name: knob for knob in KNOBS}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"no knob {', '.join(unknown)}: choose of {', '.join(known)}")
    return [known[name] for name in names or known]


def present(knob: Knob) -> int:
    """The value that the kernels have."""
    module, attribute = knob.places[0]
    found = getattr(importlib.import_module(module), attribute)
    return found if knob.key is None else found[knob.key]


@contextlib.contextmanager
def turned(knob: Knob, value: int) -> Iterator[None]:
    """The kernels with another value meanwhile."""
    before = []
    for name, attribute in knob.places:
        module = importlib.import_module(name)
        found = getattr(module, attribute)
        before.append((module, attribute, found))
        setattr(module, attribute, value if knob.key is None else {**found, knob.key: value})
    try:
        yield
    finally:
        for module, attribute, found in before:
            setattr(module, attribute, found)
