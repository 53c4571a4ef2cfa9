"""Generation of responses by the policy."""

from fastrl.rollout.engine import RolloutEngine
from fastrl.rollout.fallback import GenerateEngine
from fastrl.rollout.params import RolloutOutput, SamplingParams

__all__ = ["GenerateEngine", "RolloutEngine", "RolloutOutput", "SamplingParams"]
