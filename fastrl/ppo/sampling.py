"""Arguments of ``generate`` as a trainer takes them; a warning names those that change the draw."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from fastrl.rollout.generation_kwargs import (
    Change,
    changes_of_the_draw,
    is_sampled,
    policy_kwargs,
    unpacked,
)


class SamplingArguments:
    """What keyword arguments of ``model.generate`` become, for a policy softmax(logits / T).

    Args:
        model: the policy, with its generation_config.
        temperature: T.
    """

    def __init__(self, model: Any, temperature: float):
        self.model, self.temperature = model, temperature
        self._warned: set[str] = set()

    def of_the_policy(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """For responses that an update learns from: sampled from the policy, but for what is given.

        Raises:
            ValueError: another temperature.
        """
        kwargs = policy_kwargs(given, self.model, self.temperature)
        self._warn("generation_kwargs", changes_of_the_draw(kwargs, self.model, self.temperature))
        return kwargs

    def of_training(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The same for a whole run, in which greedy responses are hardly meant."""
        kwargs = self.of_the_policy(given)
        if not kwargs["do_sample"]:
            self._warn("generation_kwargs", [Change("do_sample", False, True, "")])
        return kwargs

    def of_generate(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """For the classic ``generate()``, which keeps the rule of ``model.generate``: the model's
        generation_config stands in for what is not given. A temperature of the policy that is not 1
        has been asked for, and comes before that."""
        kwargs = unpacked(given)
        if self.temperature != 1 and is_sampled(kwargs, self.model):
            kwargs.setdefault("temperature", self.temperature)
        self._warn("generate", changes_of_the_draw(kwargs, self.model, self.temperature))
        return kwargs

    def _warn(self, where: str, changes: Sequence[Change]) -> None:
        """Once for each field."""
        new = [change for change in changes if change.name not in self._warned]
        if not new:
            return
        self._warned |= {change.name for change in new}
        told = ", ".join(map(_told, new))
        remedy = ", ".join(f"{change.name}={change.neutral!r}" for change in new)
        if any(change.name == "temperature" for change in new):
            remedy += " (or set PPOConfig.temperature)"
        warnings.warn(
            f"{where}: {told} changes what tokens are drawn from. Log-probs, and with them the "
            f"ratio, the clip range and the KL, are those of softmax(logits / "
            f"{self.temperature:g}) without that, and only approximate for such responses: pass "
            f"{remedy} for those that step() learns from",
            stacklevel=4,
        )


_LONGEST = 40


def _told(change: Change) -> str:
    value = repr(change.value)
    value = value if len(value) <= _LONGEST else value[: _LONGEST - 1] + "…"
    return f"{change.name}={value}" + (f" ({change.origin})" if change.origin else "")
