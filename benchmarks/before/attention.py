"""What cases of attention over a cache have beside other ops': a layer's heads, ragged lengths."""

from __future__ import annotations

import dataclasses
import random
from typing import Any


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
        """`32/8 heads D=128 window=4096`: of queries over those of keys."""
        parts = [f"{self.heads}/{self.kv_heads} heads D={self.width}"]
        parts += [f"window={self.window}"] if self.window is not None else []
        parts += [f"softcap={self.softcap:g}"] if self.softcap is not None else []
        return " ".join(parts)

    @property
    def options(self) -> dict[str, Any]:
        """As arguments of the op."""
        return {"window": self.window, "softcap": self.softcap}

    @property
    def token_elements(self) -> int:
        """Of one token's keys and values."""
        return 2 * self.kv_heads * self.width


GPT2 = Attention(12, 12, 64)
QWEN25_05B = Attention(14, 2, 64)
LLAMA3_8B = Attention(32, 8, 128)
MISTRAL_7B = Attention(32, 8, 128, window=4096)
GEMMA2_2B = Attention(8, 4, 256, window=4096, softcap=50.0)  # every other layer of it


def ragged_lengths(slots: int, tokens: int, active: float) -> list[int]:
    """Live tokens of each slot, the same for every call: evenly spread between 2·active - 1 and all
    of the tokens, both ends and at least 1 among them, in no order."""
    least = max(1, round((2 * active - 1) * tokens))
    lengths = [tokens - (tokens - least) * i // max(slots - 1, 1) for i in range(slots)]
    random.Random(0).shuffle(lengths)
    return lengths


def live_tokens(slots: int, tokens: int, active: float, window: int | None) -> int:
    """Those that count, of all slots together."""
    return sum(min(n, window or n) for n in ragged_lengths(slots, tokens, active))
