"""How tokens are drawn and when a response ends, as tensors on the model's device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.rollout.sampling_params import SamplingParams


class Rules(NamedTuple):
    """Numbers are part of a captured step; tensors are buffers whose addresses it holds."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    min_new_tokens: int
    repetition_penalty: float
    suppressed: Tensor | None  # [n] ids
    ends: Tensor  # [n] ids of tokens that end a response
    stops: Tensor | None  # [n, W] ids, -1 in front of shorter sequences

    @classmethod
    def of(
        cls, params: SamplingParams, ends: Tensor, vocabulary: int, device: torch.device
    ) -> Rules:
        """Those that parameters ask for. Ends outside the vocabulary never match."""
        suppressed = stops = None
        if params.suppress_tokens:
            suppressed = torch.tensor(sorted(set(params.suppress_tokens))).to(device)
        if params.stop:
            width = max(map(len, params.stop))
            padded = [[-1] * (width - len(s)) + [int(t) for t in s] for s in params.stop]
            stops = torch.tensor(padded).to(device)
        return cls(
            temperature=float(params.temperature),
            top_k=params.top_k,
            top_p=float(params.top_p),
            min_p=float(params.min_p),
            min_new_tokens=params.min_new_tokens,
            repetition_penalty=float(params.repetition_penalty),
            suppressed=suppressed,
            ends=ends[ends < vocabulary].to(device),
            stops=stops,
        )

    def numbers(self) -> tuple[float, ...]:
        return self[:6]

    def same(self, other: Rules) -> bool:
        """Whether both say the same, wherever their tensors lie."""
        if self.numbers() != other.numbers():
            return False
        pairs = zip(self[6:], other[6:], strict=True)
        return all(
            a is b if a is None or b is None else torch.equal(a, b)
            for a, b in pairs  # type: ignore[arg-type]
        )

    @property
    def cuts(self) -> bool:
        """Whether draws come from less than all tokens."""
        cut = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return cut and self.temperature > 0

    @property
    def bends(self) -> bool:
        """Whether logits are changed before they are cut."""
        return bool(
            self.min_new_tokens or self.repetition_penalty != 1 or self.suppressed is not None
        )

    def bend(self, logits: Tensor, made: Tensor, seen: Tensor | None) -> Tensor:
        """Logits [b, V] after penalties and suppression, in the order of ``model.generate``.

        ``made`` [b]: tokens generated so far; ``seen`` [b, V]: which tokens occurred.
        """
        if seen is not None:
            penalty = self.repetition_penalty
            penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(seen, penalised, logits)
        if self.min_new_tokens:
            early = (made < self.min_new_tokens).unsqueeze(1)
            barred = logits.index_fill(1, self.ends, -torch.inf)
            logits = torch.where(early, barred, logits)
        if self.suppressed is not None:
            logits = logits.index_fill(1, self.suppressed, -torch.inf)
        return logits

    def stopped(self, tail: Tensor) -> Tensor:
        """Which rows [b] end with one of the stop sequences; tail [b, W]."""
        assert self.stops is not None
        same = (tail.unsqueeze(1) == self.stops) | (self.stops < 0)
        return same.all(-1).any(-1)
