"""What `python -m benchmarks reference` compares: ways to keep a reference, models, and a batch."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.before.rollout_cases import GPT2, QWEN, Shape

COPY, HALF = "copy", "trunk 1/2"
CHECKPOINTING = ", checkpointing"  # ends the names of sides that compute activations again
FIRST_TOKEN = 2  # after padding and end of sequence


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a trainer keeps its reference."""

    reference: str  # PPOConfig's
    share: Fraction | None = None  # of the layers, in a trunk

    def shared_layers(self, layers: int) -> int | None:
        """How many of a model's layers policy and reference share; None: it is no trunk."""
        return None if self.share is None else round(self.share * layers)


MODES = {
    COPY: Mode("copy"),
    "trunk 1/4": Mode("trunk", Fraction(1, 4)),
    HALF: Mode("trunk", Fraction(1, 2)),
    "trunk 3/4": Mode("trunk", Fraction(3, 4)),
    "adapter": Mode("adapter"),
    "offload": Mode("offload"),
    "none": Mode("none"),
}
CHECKPOINTED = (COPY, HALF)  # these are also measured with gradient checkpointing


@dataclasses.dataclass(frozen=True)
class Goal:
    """An update at least this much faster than the copy's, on devices whose name begins so."""

    devices: tuple[str, ...]
    side: str
    speedup: float


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and the batch that each trainer steps on.

    Lengths of prompts and responses are uniform. Weights are fp32; `precision` is that of forwards.
    """

    shape: Shape
    precision: str = "fp32"  # or bf16, by autocast
    samples: int = 16
    mini_batch: int = 4
    prompt: tuple[int, int] = (8, 32)  # tokens, from and to
    response: tuple[int, int] = (16, 64)
    main: bool = False  # in the README
    goal: Goal | None = None

    @property
    def label(self) -> str:
        """Names the case."""
        head = "tied head" if self.shape.tied else "untied head"
        return f"{self.shape.name}, vocabulary {self.shape.vocabulary}, {head}, {self.precision}"

    @property
    def work(self) -> str:
        """What a step is made of, in words."""
        prompt, response = (f"{low} to {high}" for low, high in (self.prompt, self.response))
        return (
            f"{self.samples} samples with prompts of {prompt} tokens and responses of {response}, "
            f"one epoch in mini-batches of {self.mini_batch}"
        )


class Samples(NamedTuple):
    """A batch for `PPOTrainer.step`, on the host."""

    queries: list[Tensor]
    responses: list[Tensor]
    scores: list[Tensor]


DEEP = Shape("GPT-2 12×256", "gpt2", 12, 256, 4, 4, 1024, 8192, 128, "fp32", tied=False)
WIDE_HEAD = Shape("GPT-2 8×384", "gpt2", 8, 384, 6, 6, 1536, 50257, 128, "fp32")
_UNTIED_GPT2 = dataclasses.replace(GPT2, dtype="fp32", tied=False)
_QWEN = dataclasses.replace(QWEN, dtype="fp32")

_ON_CPU = (
    Case(DEEP, main=True, goal=Goal(("cpu",), HALF, 1.3)),
    Case(WIDE_HEAD, main=True),
)
_ON_CUDA = tuple(
    # Short batches would measure how fast kernels are launched.
    Case(shape, "bf16", 64, 8, (32, 128), (64, 256), main=True)
    for shape in (_UNTIED_GPT2, _QWEN)
)


def cases(device_type: str) -> tuple[Case, ...]:
    """Those of a kind of device."""
    return _ON_CUDA if device_type == "cuda" else _ON_CPU


def samples(case: Case) -> Samples:
    """The case's batch: the same every time."""
    rng = np.random.RandomState(0)

    def tokens(low: int, high: int) -> Tensor:
        length = rng.randint(low, high + 1)
        return torch.from_numpy(rng.randint(FIRST_TOKEN, case.shape.vocabulary, length))

    queries = [tokens(*case.prompt) for _ in range(case.samples)]
    responses = [tokens(*case.response) for _ in range(case.samples)]
    scores = list(torch.from_numpy(rng.standard_normal(case.samples)).float())
    return Samples(queries, responses, scores)
