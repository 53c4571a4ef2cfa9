"""The table of what is measured: shapes, options, the least work, and what is aimed for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import fastrl_kernels
from benchmarks.before.attention import (
    GEMMA2_2B,
    GPT2,
    LLAMA3_8B,
    MISTRAL_7B,
    QWEN25_05B,
    Attention,
    live_tokens,
)
from benchmarks.before.timing import DTYPES

# (hidden size, vocabulary) of GPT-2, Qwen2.5-0.5B, Gemma-2-2B, Llama-3-8B and Qwen3-8B.
HEADS = ((768, 50257), (896, 151936), (2304, 256000), (4096, 128256), (4096, 151936))
VOCABULARIES = tuple(dict.fromkeys(vocabulary for _, vocabulary in HEADS))
ROWS = (1024, 4096, 8192, 16384, 32768)
ACTIVE = (1.0, 0.5, 0.1)
ENTROPY = ("off", "metric", "gradient")
SEQUENCES = ((64, 256), (64, 1024), (512, 1024), (128, 8192), (512, 4096))  # up to 2M elements
# (layer, slots, tokens) of decode steps: many samples at a time, and one alone.
DECODES = (
    (LLAMA3_8B, 64, 2048),
    (QWEN25_05B, 256, 512),
    (QWEN25_05B, 16, 512),
    (GPT2, 1, 512),
    (GEMMA2_2B, 16, 2048),
    (MISTRAL_7B, 16, 8192),
)


HOPPER = "nvidia h"  # H100 and H200


@dataclasses.dataclass(frozen=True)
class Goal:
    """What a case shall reach; a field that is None asks for nothing."""

    seconds: float | None = None  # of device time
    speedup: float | None = None  # over the peer `against`
    against: str = "eager"
    memory_bytes: int | None = None  # above inputs and returned gradients
    memory_share: float | None = None  # of the peer's
    launches: tuple[int, int] | None = None  # at most, forward's and backward's
    device: str = "cpu"  # what the goal is for: how the device's name begins


@dataclasses.dataclass(frozen=True)
class Case:
    """One op at one shape; what an op does not have is left at its default."""

    op: str
    rows: int  # tokens N, sequences, or slots of a cache
    dtype: str = "fp32"
    steps: int = 0  # of a sequence, or tokens of a slot
    hidden: int = 0
    vocabulary: int = 0
    active: float = 1.0  # share of the tokens that count
    entropy: str = "off"  # "metric": no gradient through it
    head: str = "trained"
    backward: bool = True
    whiten: bool = False
    attention: Attention | None = None
    goal: Goal | None = None
    # Every peer takes part; elsewhere eager PyTorch alone.
    main: bool = False

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Case:
        """Of its fields but for the goal, as result files hold them."""
        heads = fields.get("attention")
        return cls(**{**fields, "attention": Attention(**heads) if heads else None})

    @property
    def label(self) -> str:
        """`N=1024 H=768 V=50257 fp32 entropy=metric`: what differs from the defaults."""
        shape = f"[{self.rows}, {self.steps}]" if self.steps else f"N={self.rows}"
        parts = [shape]
        parts += [self.attention.label] if self.attention else []
        parts += [f"H={self.hidden}"] if self.hidden else []
        parts += [f"V={self.vocabulary}"] if self.vocabulary else []
        parts.append(self.dtype)
        parts += [f"active={self.active:g}"] if self.active != 1 else []
        parts += [f"entropy={self.entropy}"] if self.entropy != "off" else []
        parts += ["frozen head"] if self.head == "frozen" else []
        parts += ["whitened"] if self.whiten else []
        parts += ["forward"] if not self.backward and self.op in DIFFERENTIABLE else []
        return " ".join(parts)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def tokens(self) -> int:
        return self.rows * max(self.steps, 1)

    @property
    def elements(self) -> int:
        """Of all rows, without a head's weight."""
        each = self.attention.token_elements if self.attention else 1
        return self.rows * max(self.vocabulary, self.steps) * each


DIFFERENTIABLE = ("token_logprobs", "linear_logprobs", "linear_ppo_loss", "full_kl", "ppo_loss")


@dataclasses.dataclass(frozen=True)
class Work:
    """The least bytes and flops of a case, and in words what is counted."""

    bytes: float
    flops: float
    what: str


def work(case: Case) -> Work:
    """What no implementation of the case's algorithm can do without."""
    return _WORK[case.op](case)


def _vocabulary_work(case: Case) -> Work:
    each = case.rows * case.vocabulary * case.itemsize
    read, written = case.active * each, each
    if not case.backward:
        return Work(read, 0, "active logits read")
    return Work(2 * read + written, 0, "active logits read twice, their gradient written")


def _full_kl_work(case: Case) -> Work:
    each = case.rows * case.vocabulary * case.itemsize
    if not case.backward:
        return Work(2 * each, 0, "both logits read")
    return Work(5 * each, 0, "both logits read twice, one gradient written")


def _linear_work(products: int, what: str) -> Callable[[Case], Work]:
    def of(case: Case) -> Work:
        trained = case.head == "trained"
        count = products - (not trained) if case.backward else 1
        tokens = case.active * case.rows
        flops = 2.0 * count * tokens * case.vocabulary * case.hidden
        weights = case.vocabulary * case.hidden * case.itemsize
        reads = count - (trained and case.backward)  # dW is written, not read
        nbytes = (reads + (trained and case.backward)) * weights
        return Work(nbytes, flops, f"{count} GEMMs of N·V·H" + (what if case.backward else ""))

    return of


def _per_token(nbytes: int, what: str) -> Callable[[Case], Work]:
    return lambda case: Work(nbytes * case.tokens, 0, f"{nbytes} bytes per token: {what}")


def _gae_work(case: Case) -> Work:
    each = 17 + 4 * case.whiten
    again = ", advantages once more" if case.whiten else ""
    what = f"{each} bytes per step: rewards, values, mask, advantages, returns{again}"
    return Work(each * case.tokens, 0, what)


def _attention_work(case: Case) -> Work:
    layer = case.attention
    assert layer is not None
    live = live_tokens(case.rows, case.steps, case.active, layer.window)
    return Work(live * layer.token_elements * case.itemsize, 0, "live keys and values read")


_WORK: dict[str, Callable[[Case], Work]] = {
    "token_logprobs": _vocabulary_work,
    "linear_logprobs": _linear_work(4, ", the logits' one twice"),
    "linear_ppo_loss": _linear_work(3, ""),
    "full_kl": _full_kl_work,
    "kl_rewards": _per_token(17, "two log-probabilities, mask, rewards, KL"),
    "gae": _gae_work,
    "ppo_loss": _per_token(33, "six inputs and a mask, two gradients"),
    "whiten": _per_token(9, "values, mask, results"),
    "sample_tokens": lambda case: _vocabulary_work(dataclasses.replace(case, backward=False)),
    "decode_attention": _attention_work,
}
EXPORTS = {name: name for name in _WORK} | {"whiten": "masked_whiten"}


def available() -> list[str]:
    """The ops of the table that `fastrl_kernels` exports."""
    return [name for name, export in EXPORTS.items() if hasattr(fastrl_kernels, export)]


def grid(op: str, device: str, full: bool = False) -> list[Case]:
    """An op's cases for "cpu" or "cuda": around each main case, one property changed at a time.

    With `full`, every combination.
    """
    cases = _GRIDS[op](device, full)
    return list(dict.fromkeys(sorted(cases, key=lambda case: not case.main)))


def _around(base: Case, full: bool, **axes: tuple[Any, ...]) -> Iterator[Case]:
    """`base`, and either one axis at a time or their product. An axis named a_b sets a and b."""
    yield base
    if full:
        combined = [base]
        for axis, values in axes.items():
            combined = [_with(case, axis, value) for case in combined for value in values]
        yield from (_plain(case) for case in combined)
        return
    for axis, values in axes.items():
        yield from (_plain(_with(base, axis, value)) for value in values)


def _with(case: Case, axis: str, value: Any) -> Case:
    if axis == "hidden_vocabulary":
        return dataclasses.replace(case, hidden=value[0], vocabulary=value[1])
    if axis == "attention_rows_steps":
        return dataclasses.replace(case, attention=value[0], rows=value[1], steps=value[2])
    if axis == "rows_steps":
        return dataclasses.replace(case, rows=value[0], steps=value[1])
    return dataclasses.replace(case, **{axis: value})


def _plain(case: Case) -> Case:
    return dataclasses.replace(case, goal=None, main=False)


def _drop_repeated(cases: Iterator[Case]) -> list[Case]:
    """Without those that differ from an earlier one in goal and peers alone."""
    seen: dict[Case, Case] = {}
    for case in cases:
        seen.setdefault(_plain(case), case)
    return list(seen.values())


def _vocabulary_grid(op: str) -> Callable[[str, bool], list[Case]]:
    def cases(device: str, full: bool) -> list[Case]:
        axes: dict[str, tuple[Any, ...]] = {
            "vocabulary": VOCABULARIES,
            "rows": ROWS,
            "dtype": tuple(DTYPES),
        }
        if op == "token_logprobs":
            axes |= {"active": ACTIVE, "entropy": ENTROPY}
        if op in DIFFERENTIABLE:
            axes["backward"] = (False, True)
        backward = op in DIFFERENTIABLE
        if device == "cpu":
            base = Case(op, 1024, vocabulary=50257, backward=backward, main=True)
        else:
            vocabulary = 128256 if op == "full_kl" else 151936
            base = Case(op, 8192, "bf16", vocabulary=vocabulary, backward=backward, main=True)
        if op == "token_logprobs":
            base = dataclasses.replace(base, entropy="metric")
        if op == "full_kl" and device != "cpu":
            base = dataclasses.replace(base, goal=Goal(seconds=3.7e-3, device=HOPPER))
        return _drop_repeated(_around(base, full, **axes))

    return cases


def _linear_grid(op: str, speedup: float, seconds: float) -> Callable[[str, bool], list[Case]]:
    def cases(device: str, full: bool) -> list[Case]:
        metric = ENTROPY if op == "linear_logprobs" else ENTROPY[:2]
        on_cpu = Case(
            op,
            1024,
            hidden=768,
            vocabulary=50257,
            # The one has a gradient for it; in the other it is a statistic, as in classic PPO.
            entropy=metric[-1],
            goal=Goal(speedup=speedup, memory_share=1 / 8),
            main=True,
        )
        on_gpu = Case(
            op,
            4096,
            "bf16",
            hidden=4096,
            vocabulary=131072,
            entropy="metric",
            goal=Goal(seconds=seconds, memory_bytes=600 * 2**20, device=HOPPER),
            main=True,
        )
        base = on_cpu if device == "cpu" else on_gpu
        return _drop_repeated(
            _around(
                base,
                full,
                hidden_vocabulary=HEADS,
                rows=ROWS,
                dtype=tuple(DTYPES),
                active=ACTIVE,
                entropy=metric,
                head=("trained", "frozen"),
                backward=(True, False) if op == "linear_logprobs" else (True,),
            )
        )

    return cases


def _sequence_grid(op: str) -> Callable[[str, bool], list[Case]]:
    def cases(device: str, full: bool) -> list[Case]:
        backward = op in DIFFERENTIABLE
        large = (1024, 1024) if op == "ppo_loss" else (512, 4096)
        rows, steps = (64, 1024) if device == "cpu" else large
        base = Case(op, rows, steps=steps, active=0.7, backward=backward, main=True)
        axes: dict[str, tuple[Any, ...]] = {"rows_steps": (*SEQUENCES, large)}
        if op == "gae":
            goal = Goal(speedup=30) if device == "cpu" else Goal(seconds=25e-6, device=HOPPER)
            base = dataclasses.replace(base, goal=goal, whiten=device != "cpu")
            axes["whiten"] = (False, True)
        return _drop_repeated(_around(base, full, **axes))

    return cases


def _attention_grid(device: str, full: bool) -> list[Case]:
    dtype, (layer, slots, tokens) = (
        ("fp32", DECODES[2]) if device == "cpu" else ("bf16", DECODES[0])
    )
    base = Case(
        "decode_attention",
        slots,
        dtype,
        steps=tokens,
        active=0.5,  # lengths from 1 to all
        backward=False,
        attention=layer,
        main=True,
    )
    axes: dict[str, tuple[Any, ...]] = {
        "attention_rows_steps": DECODES,
        "dtype": tuple(DTYPES),
        "active": (1.0, 0.5),
    }
    return _drop_repeated(_around(base, full, **axes))


_GRIDS: dict[str, Callable[[str, bool], list[Case]]] = {
    "token_logprobs": _vocabulary_grid("token_logprobs"),
    "linear_logprobs": _linear_grid("linear_logprobs", speedup=1.6, seconds=26e-3),
    "linear_ppo_loss": _linear_grid("linear_ppo_loss", speedup=2.2, seconds=19.5e-3),
    "full_kl": _vocabulary_grid("full_kl"),
    "sample_tokens": _vocabulary_grid("sample_tokens"),
    "kl_rewards": _sequence_grid("kl_rewards"),
    "gae": _sequence_grid("gae"),
    "ppo_loss": _sequence_grid("ppo_loss"),
    "whiten": _sequence_grid("whiten"),
    "decode_attention": _attention_grid,
}
