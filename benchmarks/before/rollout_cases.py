"""What `python -m benchmarks rollout` generates: models by their shape, prompts, and lengths.

No sample ends by itself, so that every side makes the same tokens: a length is a limit, and there
is no end-of-sequence token.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, PretrainedConfig, Qwen2Config

from benchmarks.before.timing import DTYPES


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's sizes; the weights are random."""

    name: str
    family: str  # gpt2 or qwen2
    layers: int
    width: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    context: int
    dtype: str = "bf16"
    tied: bool = True  # the head is the embeddings' table


@dataclasses.dataclass(frozen=True)
class Goal:
    """What is to be reached where the device's name begins with one of these; None: no demand."""

    devices: tuple[str, ...]
    speedup: float | None = None  # over `generate`, in useful tokens per second
    step_seconds: float | None = None
    floor_share: float | None = None
    utilisation: float | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """A job: prompts with a length for each response, and the slots they share.

    Lengths of responses are log-normal (σ of the logarithm, median, at most), or all `median` where
    σ is 0. Lengths of prompts are uniform.
    """

    name: str
    shape: Shape
    prompts: int
    slots: int
    prompt: tuple[int, int]  # tokens, from and to
    median: int
    most: int
    sigma: float = 0.0
    main: bool = False  # in the README
    all_peers: bool = True  # or `generate` alone
    goal: Goal | None = None

    @property
    def label(self) -> str:
        """Names the case."""
        return (
            f"{self.name}: {self.shape.name}, {self.prompts} prompts on {self.slots} slots, "
            f"{self.shape.dtype}"
        )

    @property
    def lengths(self) -> str:
        """How long prompts and responses are, in words."""
        low, high = self.prompt
        prompt = f"{low}" if low == high else f"{low} to {high}"
        if not self.sigma:
            return f"prompts of {prompt} tokens, responses of {self.median}"
        return (
            f"prompts of {prompt} tokens, responses log-normal (σ {self.sigma:g}, median "
            f"{self.median}, at most {self.most})"
        )


class Workload(NamedTuple):
    """Prompts, on the host, and how many tokens are wanted after each."""

    prompts: list[Tensor]
    limits: list[int]

    @property
    def useful(self) -> int:
        """Tokens wanted."""
        return sum(self.limits)


SMALL = Shape("GPT-2 4×256", "gpt2", 4, 256, 4, 4, 1024, 50257, 256, "fp32")
GPT2 = Shape("GPT-2 124M", "gpt2", 12, 768, 12, 12, 3072, 50257, 1024)
QWEN = Shape("Qwen2.5 0.5B", "qwen2", 24, 896, 14, 2, 4864, 151936, 1024)

_H = ("nvidia h100", "nvidia h200")
_ON_CPU = (
    Case(
        "log-normal", SMALL, 16, 16, (4, 32), 40, 200, sigma=1.0, main=True,
        goal=Goal(("cpu",), speedup=1.5),
    ),
    Case("refilled", SMALL, 64, 16, (4, 32), 40, 200, sigma=1.0, main=True),
    Case("equal lengths", SMALL, 16, 16, (4, 32), 48, 48),
)  # fmt: skip
_ON_CUDA = (
    Case("alone", GPT2, 1, 1, (16, 16), 256, 256, main=True, goal=Goal(_H, step_seconds=0.6e-3)),
    # The middle of a response is at a context of 512.
    Case(
        "wide", QWEN, 256, 256, (448, 448), 128, 128,
        goal=Goal(("nvidia h100",), floor_share=0.5),
    ),
    Case(
        "log-normal", GPT2, 256, 16, (4, 64), 128, 640, sigma=1.0, main=True,
        goal=Goal(("nvidia", "amd"), utilisation=0.95),
    ),
    *(
        Case(f"batch of {n}", shape, n, n, (448, 448), 128, 128, all_peers=False)
        for n in (1, 16, 64, 256)
        for shape in (GPT2, QWEN)
        if (n, shape) != (256, QWEN)  # that is the wide one
    ),
)  # fmt: skip


def cases(device_type: str, slots: int | None = None) -> list[Case]:
    """Those of a kind of device, with another number of slots where one is given."""
    chosen = _ON_CUDA if device_type == "cuda" else _ON_CPU
    return [dataclasses.replace(case, slots=slots or case.slots) for case in chosen]


def workload(case: Case) -> Workload:
    """The case's prompts and lengths: the same every time."""
    rng = np.random.RandomState(0)
    low, high = case.prompt
    prompts = [
        torch.from_numpy(rng.randint(0, case.shape.vocabulary, rng.randint(low, high + 1)))
        for _ in range(case.prompts)
    ]
    lengths = rng.lognormal(math.log(case.median), case.sigma, case.prompts)
    return Workload(prompts, np.clip(np.rint(lengths), 1, case.most).astype(int).tolist())


def build(shape: Shape, device: torch.device) -> Any:
    """The model, with random weights, without dropout and without an end-of-sequence token."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(_config(shape))
    return model.to(DTYPES[shape.dtype]).eval()


def _config(shape: Shape) -> PretrainedConfig:
    no_ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if shape.family == "gpt2":
        return GPT2Config(
            vocab_size=shape.vocabulary,
            n_layer=shape.layers,
            n_embd=shape.width,
            n_head=shape.heads,
            n_inner=shape.intermediate,
            n_positions=shape.context,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=shape.tied,
            **no_ends,
        )
    return Qwen2Config(
        vocab_size=shape.vocabulary,
        num_hidden_layers=shape.layers,
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=shape.context,
        tie_word_embeddings=shape.tied,
        **no_ends,
    )


def kv_bytes(case: Case, work: Workload) -> int:
    """Of keys and values that live tokens have, summed over all steps of all samples.

    Before its t-th token, t = 0, 1, …, a sample with a prompt of p tokens reads those of p + t.
    """
    shape = case.shape
    itemsize = DTYPES[shape.dtype].itemsize
    per_token = 2 * shape.layers * shape.kv_heads * (shape.width // shape.heads) * itemsize
    tokens = sum(
        n * len(prompt) + n * (n - 1) // 2
        for prompt, n in zip(work.prompts, work.limits, strict=True)
    )
    return per_token * tokens
