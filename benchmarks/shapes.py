"""Sizes and options of the calls that are measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.timing import DTYPES

DIFFERENTIABLE = (
    *("token_logprobs", "linear_logprobs", "linear_ppo_loss", "linear_kl_loss", "full_kl"),
    "ppo_loss",
)


@dataclasses.dataclass(frozen=True)
class Attention:
    """A layer's heads, and what it does to its scores."""

    heads: int
    kv_heads: int
    width: int
    window: int | None = None
    softcap: float | None = None

    @property
    def label(self) -> str:
        """`32/8 heads D=128 window=4096`: heads of queries over those of keys."""
        parts = [f"{self.heads}/{self.kv_heads} heads D={self.width}"]
        parts += [f"window={self.window}"] if self.window is not None else []
        parts += [f"softcap={self.softcap:g}"] if self.softcap is not None else []
        return " ".join(parts)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the op."""
        return {"window": self.window, "softcap": self.softcap}

    @property
    def token_elements(self) -> int:
        """Numbers in one token's keys and values."""
        return 2 * self.kv_heads * self.width


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes and options of one call; an op leaves what it does not have at the default."""

    op: str
    rows: int  # tokens N, sequences, or slots of a cache
    dtype: str = "fp32"
    steps: int = 0  # of a sequence, or tokens of a slot
    hidden: int = 0
    vocabulary: int = 0
    active: float = 1.0  # share of the tokens that count
    entropy: str = "off"  # "gradient", or "metric": no gradient through it
    head: str = "trained"  # or "frozen"
    backward: bool = True
    whiten: bool = False
    attention: Attention | None = None
    sampling: str = ""  # what cuts a draw, by its name in `benchmarks.ops.logits.CUTS`
    teacher: int = 0  # the width of a teacher's hidden states
    beta: float = 1.0  # of the divergence from it
    threads: int = 0  # 0: those of the session

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Shape:
        """A shape from its fields as JSON holds them."""
        heads = fields.get("attention")
        return cls(**{**fields, "attention": Attention(**heads) if heads else None})

    @property
    def label(self) -> str:
        """`N=1024 H=768 V=50257 fp32 entropy=metric`: what differs from the defaults."""
        parts = [f"[{self.rows}, {self.steps}]" if self.steps else f"N={self.rows}"]
        parts += [self.attention.label] if self.attention else []
        parts += [f"H={self.hidden}"] if self.hidden else []
        parts += [f"H'={self.teacher} β={self.beta:g}"] if self.teacher else []
        parts += [f"V={self.vocabulary}"] if self.vocabulary else []
        parts.append(self.dtype)
        parts += [f"active={self.active:g}"] if self.active != 1 else []
        parts += [f"entropy={self.entropy}"] if self.entropy != "off" else []
        parts += ["frozen head"] if self.head == "frozen" else []
        parts += ["whitened"] if self.whiten else []
        parts += ["forward"] if not self.backward and self.op in DIFFERENTIABLE else []
        parts += [self.sampling] if self.sampling else []
        parts += [f"threads={self.threads}"] if self.threads else []
        return " ".join(parts)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def needed_bytes(self) -> int:
        """What eager PyTorch takes, roughly: fp32 logits, log-softmax, softmax, product and two
        gradients, and the inputs."""
        each = self.attention.token_elements if self.attention else 1
        elements = self.rows * max(self.vocabulary, self.steps) * each
        weights = self.vocabulary * self.hidden
        return elements * (24 + 4 * self.itemsize) + weights * (4 * self.itemsize + 8)
