"""Generation of responses by the policy."""

from fastrl.rollout.choose_engine import choose_engine
from fastrl.rollout.engine import RolloutEngine
from fastrl.rollout.generate_engine import GenerateEngine
from fastrl.rollout.generation_kwargs import sampling_params
from fastrl.rollout.sampling_params import SamplingParams, draw_seed
from fastrl.samples import Samples as RolloutOutput

__all__ = [
    "GenerateEngine",
    "RolloutEngine",
    "RolloutOutput",
    "SamplingParams",
    "choose_engine",
    "draw_seed",
    "sampling_params",
]
