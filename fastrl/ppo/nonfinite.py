"""Numbers that are not finite: samples, losses and gradients that must not reach a weight."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Protocol

from fastrl.config import PPOConfig
from fastrl.rollout import RolloutOutput


class NonFinite(Protocol):
    """What happens where numbers are not finite. None of them is learned from in any case."""

    def samples(self, which: Sequence[int], name: Callable[[int], str]) -> None:
        """Told of the samples of a rollout that ended in NaN logits; ``name`` names a prompt."""

    def losses(self, count: int) -> None:
        """Told of as many mini-batches of one optimizer step, before it is taken."""

    def gradients(self) -> None:
        """Told of an optimizer step whose gradient is not finite, before it is left out."""


class SkipNonFinite:
    """Goes on without them. Samples are named once; losses and gradients are in the record of
    their update, which warns of them."""

    def __init__(self) -> None:
        self._warned = False

    def samples(self, which: Sequence[int], name: Callable[[int], str]) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{_samples(which, name)}: left out of the step (weight 0, in no baseline or "
                "mean), as any later ones will be; ppo/nan_samples counts them",
                stacklevel=4,
            )

    def losses(self, count: int) -> None: ...

    def gradients(self) -> None: ...


class RaiseNonFinite:
    """Stops at the first."""

    def samples(self, which: Sequence[int], name: Callable[[int], str]) -> None:
        raise FloatingPointError(f"{_samples(which, name)}: nothing has changed")

    def losses(self, count: int) -> None:
        raise FloatingPointError(
            f"non-finite loss in {count} mini-batch(es): this optimizer step is not taken"
        )

    def gradients(self) -> None:
        raise FloatingPointError("non-finite gradient norm: this optimizer step is not taken")


def make_nonfinite(config: PPOConfig) -> NonFinite:
    """By ``PPOConfig.on_nonfinite``."""
    return SkipNonFinite() if config.on_nonfinite == "skip" else RaiseNonFinite()


def samples_left_out(
    rollout: RolloutOutput, nonfinite: NonFinite, name: Callable[[int], str]
) -> list[int]:
    """Those that ended in NaN logits: what they would have gone on with is not known.

    Raises:
        FloatingPointError: all of them; or one, where ``nonfinite`` says so.
    """
    which = [i for i, reason in enumerate(rollout.finish_reasons) if reason == "nan"]
    if which and len(which) == len(rollout.finish_reasons):
        raise FloatingPointError(
            f"all {len(which)} samples of a rollout ended in NaN logits: the model is broken. Load "
            "a sound checkpoint; where training broke it, lower learning_rate or set max_grad_norm"
        )
    if which:
        nonfinite.samples(which, name)
    return which


def _samples(which: Sequence[int], name: Callable[[int], str]) -> str:
    shown = ", ".join(f"{i} (prompt {name(i)})" for i in which[:3])
    more = f" and {len(which) - 3} more" if len(which) > 3 else ""
    return f"NaN logits in {len(which)} sample(s) of the rollout: {shown}{more}"
