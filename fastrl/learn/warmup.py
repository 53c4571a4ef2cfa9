"""The critic's warm-up: first steps, in which the value function alone learns (Yuan et al.,
"What's behind PPO's collapse in long-CoT?", 2025: VC-PPO)."""

from __future__ import annotations

from typing import Any, Protocol


class Learning(Protocol):
    """What learns in a step."""

    policy_coef: float  # factor of the policy's part of the loss
    policy_learns: bool

    def keep(self, model: Any) -> None:
        """Drops the gradients of what does not learn.

        Args:
            model: the policy, not wrapped, in whose weights the gradient of the loss lies.
        """


class AllLearns:
    """Policy and value function learn."""

    policy_coef, policy_learns = 1.0, True

    def keep(self, model: Any) -> None:
        """Keeps all gradients."""


class ValuesLearn:
    """Only the value function learns: a separate critic, or the value head of the policy.

    An optimizer leaves weights without a gradient as they are, and their moments too; a gradient of
    0 would not do for that, because of moments and weight decay.
    """

    policy_coef, policy_learns = 0.0, False

    def keep(self, model: Any) -> None:
        head = {id(p) for p in model.v_head.parameters()}
        for parameter in model.parameters():
            if id(parameter) not in head:
                parameter.grad = None


ALL_LEARNS = AllLearns()


class CriticWarmup:
    """Says in which steps the value function alone learns: the first ``steps`` of a trainer."""

    def __init__(self, steps: int):
        self.steps = steps

    def learning(self, done: int) -> Learning:
        """What learns in the step after ``done`` steps."""
        return ValuesLearn() if done < self.steps else ALL_LEARNS

    def statistics(self, learning: Learning) -> dict[str, float]:
        """Returns the statistics of a step with this ``learning``; none without a warm-up."""
        return {"ppo/critic_warmup": float(not learning.policy_learns)} if self.steps else {}
