"""Generation of responses by the policy."""

from fastrl.rollout.engine import GenerateEngine, RolloutOutput, SamplingParams

__all__ = ["GenerateEngine", "RolloutOutput", "SamplingParams"]
