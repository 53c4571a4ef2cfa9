"""Scaling, normalisation and clipping of scores, by the moments of all scores so far."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor


@dataclass
class RunningMoments:
    """Mean, variance and (Bessel-corrected) standard deviation of all scores so far."""

    mean: float = 0.0
    std: float = 1.0
    var: float = 1.0
    count: float = 1e-24

    def update(self, xs: Tensor) -> tuple[float, float]:
        """Adds scores [n]; returns their own mean and standard deviation."""
        n = xs.numel()
        batch_var, batch_mean = (float(x) for x in torch.var_mean(xs.double(), correction=0))
        delta, total = batch_mean - self.mean, self.count + n
        square_sum = batch_var * n + self.var * self.count + delta**2 * self.count * n / total
        self.mean += delta * n / total
        self.var = square_sum / total
        if total > 1:  # a single score has no deviation: the old one stays
            self.std = (square_sum / (total - 1)) ** 0.5
        self.count = total
        return batch_mean, (batch_var * n / (n - 1)) ** 0.5 if n > 1 else 0.0

    def become(self, other: RunningMoments) -> None:
        """Takes over another's state."""
        vars(self).update(vars(other))

    def save_to_json(self, json_path: str | Path) -> None:
        Path(json_path).write_text(json.dumps(asdict(self), indent=2, sort_keys=True) + "\n")

    @classmethod
    def load_from_json(cls, json_path: str | Path) -> RunningMoments:
        return cls(**json.loads(Path(json_path).read_text()))


class ScoreTransform:
    """Scales, normalises and clips scores; does not change ``running``.

    Args:
        scale: divide by the standard deviation of all scores so far.
        shift: with ``scale``, take off the mean of all scores so far first.
        clip: the bound ± of scores; None: there is none.
        running: the moments of all scores so far.
    """

    def __init__(self, scale: bool, shift: bool, clip: float | None, running: RunningMoments):
        self.scale, self.shift, self.clip = scale, shift, clip
        self.running = running

    def check(self, per_token: bool) -> None:
        """Raises ValueError for scores per token where whole scores are shifted or clipped."""
        if per_token and (self.shift or self.clip is not None):
            name = "score_clip" if self.clip is not None else "use_score_norm"
            raise ValueError(
                f"{name} changes the score of a whole response, and scores are per token: leave it "
                "out (use_score_scaling alone divides them by the deviation of their sums), or "
                "change the scores before step()"
            )

    def of_tokens(self, scores: Tensor, moments: RunningMoments) -> Tensor:
        """Returns scores of tokens, [...] fp32, scaled as :meth:`__call__` scaled their sums.

        Args:
            moments: the moments that :meth:`__call__` returned for the sums.
        """
        return scores / _divisor(moments) if self.scale else scores

    def __call__(self, scores: Tensor) -> tuple[Tensor, RunningMoments]:
        """Returns scores [B], fp32 on the CPU, transformed, and the moments of all scores so far,
        these included if ``scale``. NaN, for a missing score, stays."""
        moments = replace(self.running)
        if self.scale:
            moments.update(scores[~scores.isnan()])
            centre = moments.mean if self.shift else 0.0
            scores = (scores - centre) / _divisor(moments)
        scores = scores if self.clip is None else scores.clamp(-self.clip, self.clip)
        return scores, moments


def _divisor(moments: RunningMoments) -> float:
    """std + ε, ε = 1.2e-7 of fp32; 1 where scores have differed by no more than rounding does, so
    that their deviation says nothing."""
    eps = torch.finfo(torch.float32).eps
    return moments.std + eps if moments.std > eps * max(1.0, abs(moments.mean)) else 1.0
