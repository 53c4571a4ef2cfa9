"""Generation of responses by the policy."""

from fastrl.rollout.engine import RolloutEngine
from fastrl.rollout.fallback import GenerateEngine
from fastrl.rollout.gate import choose_engine
from fastrl.rollout.keywords import sampling_params
from fastrl.rollout.params import RolloutOutput, SamplingParams

__all__ = [
    "GenerateEngine",
    "RolloutEngine",
    "RolloutOutput",
    "SamplingParams",
    "choose_engine",
    "sampling_params",
]
