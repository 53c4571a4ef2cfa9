"""The memory of PPO and GRPO, from a rehearsal of the trainer."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from fastrl.config import PPOConfig, json_object
from fastrl.learn.scorer import Scorer
from fastrl.learn.update import Update
from fastrl.models import AutoModelForCausalLMWithValueHead, CausalLMPolicy
from fastrl.plan.memory import ACTIVATIONS
from fastrl.plan.passes import PassSize
from fastrl.plan.rehearsal import CHOICES_LEFT_OUT, LOADING, Rehearsal, rehearsal
from fastrl.plan.report import Plan
from fastrl.plan.skeleton import Skeleton, blank_tokenizer, tokens
from fastrl.ppo.critic import CriticLearner
from fastrl.rollout import SamplingParams
from fastrl.rollout.backends import EngineBackend
from fastrl.rollout.rehearsed_engine import RehearsedEngine
from fastrl.rollout.self_check import UnsupportedModel

# Token ids, masks, and what is learned from, of each position of a sample that is not rehearsed.
_BYTES_PER_POSITION = 60
PASSES = 2  # of a rehearsed mini-batch: gradients and the next pass's activations are there at once
# What would act outside of this process, or is for several.
_NOT_REHEARSED: dict[str, Any] = {
    "log_with": None,
    "push_to_hub_if_best_kwargs": {},
    "optimize_device_cache": False,
    "old_logprobs": "recompute",
    "sampler_correction": "off",
    "critic": None,  # is built, not read
    "critic_warmup_steps": 0,
}


class MemoryPlanning:
    """The methods of a ``PPOTrainer`` that say what it will need of memory, and bound it."""

    config: PPOConfig
    current_device: Any
    critic: CriticLearner | None
    scorer: Scorer
    update: Update
    _unwrapped: Any

    def plan(
        self,
        prompt_tokens: int,
        response_tokens: int,
        passes: PassSize | None = None,
        device: str | None = None,
    ) -> Plan:
        """What a step with such prompts and responses needs of memory, rollouts included, phase by
        phase: from a rehearsal without memory, in which nothing of this trainer is run or changed.

        Args:
            prompt_tokens, response_tokens: of the longest, at least 2.
            passes: plans with these; by default as the settings say.
            device: "cpu" or "cuda", for which the memory is counted; by default the trainer's.

        Returns:
            a :class:`fastrl.plan.report.Plan`, whose ``peak`` is in bytes.
        """
        kind = device or torch.device(self.current_device).type
        skeleton = Skeleton.of(self._unwrapped)
        lengths = prompt_tokens, response_tokens
        critic = None if self.critic is None else Skeleton.of(self.critic.unwrapped)
        config = self.config if passes is None else passes.of(self.config)
        return plan_ppo(type(self), skeleton, config, *lengths, kind, critic=critic)

    def tokens_of(self, prompt_tokens: int, response_tokens: int) -> tuple[int, int]:
        """Tokens of a mini-batch of such samples, and of a sample, which a pass does not split."""
        sample = prompt_tokens + response_tokens
        return self.config.mini_batch_size * sample, sample

    def limit_passes(self, passes: PassSize) -> None:
        """Limits how much is computed at a time, as ``micro_batch_tokens`` and
        ``gradient_checkpointing`` do; but a sample that has more tokens gets a pass of its own."""
        self.scorer.limit = self.scorer.limit._replace(tokens=passes.tokens)
        for learner in self.update.learners:
            gradient = learner.gradient
            gradient.rules = gradient.rules._replace(micro_batch_tokens=passes.tokens)
        self.update.activations.recomputed |= passes.recomputed


def plan_ppo(
    trainer_class: Callable[..., Any],
    skeleton: Skeleton,
    config: PPOConfig,
    prompt_tokens: int,
    response_tokens: int,
    device: str = "cpu",
    rollouts: bool = True,
    critic: Skeleton | None = None,
) -> Plan:
    """The memory of a PPOTrainer, whose prompts and responses all have their greatest length.

    An optimizer step is rehearsed, of as many samples as it takes; with a trunk all samples of a
    batch, whose boundaries are kept.

    Args:
        trainer_class: is rehearsed.
        rollouts: whether the trainer generates its responses itself.
        critic: of a trainer that has a critic of its own; None: as the configuration says.

    Raises:
        ValueError: settings that the trainer refuses; lengths beyond the model's context.
        FileNotFoundError: a critic without a configuration.
    """
    skeleton.check_tokens(prompt_tokens=prompt_tokens, response_tokens=response_tokens)
    if critic is None and config.critic is not None:
        critic = Skeleton.read(config.critic, str(skeleton.dtype))
    shortened = _shortened(config, prompt_tokens, response_tokens)
    rehearsed = dataclasses.replace(shortened, critic=None, replay_routing=False)
    with rehearsal(device) as found:
        if config.replay_routing:
            found.notes.append(CHOICES_LEFT_OUT)
        base = skeleton.build()
        own_values = config.needs_values and critic is None
        kind = AutoModelForCausalLMWithValueHead if own_values else CausalLMPolicy
        policy = kind.from_pretrained(base)
        values = None if critic is None else _critic(critic)
        trainer = trainer_class(rehearsed, policy, tokenizer=blank_tokenizer(), critic=values)
        found.notes += skeleton.guesses
        found.follow(trainer._unwrapped, trainer.optimizer)
        if trainer.critic is not None:
            found.notes += [] if critic is None else critic.guesses
            found.follow(trainer.critic.unwrapped, trainer.critic.optimizer)
        found.loaded(trainer.reference, trainer._unwrapped)
        lengths = prompt_tokens, response_tokens
        generate = _rollouts(trainer, found, config, *lengths) if rollouts else None
        for learner in (trainer, trainer.critic):
            if learner is not None:
                found.give_state(learner.optimizer)
        if generate is not None:
            generate()  # beside that state
        _steps(trainer, rehearsed, prompt_tokens, response_tokens)
        length = prompt_tokens + response_tokens
        left = (config.batch_size - rehearsed.batch_size) * length * _BYTES_PER_POSITION
        for name, phase in found.log.peaks.items():
            if name != LOADING:
                phase.total += left
                phase.by_kind[ACTIVATIONS] += left
        return Plan.of(
            f"{skeleton.name}: {config.method}",
            device,
            found,
            {
                "prompt_tokens": prompt_tokens,
                "response_tokens": response_tokens,
                "batch_size": config.batch_size,
                "mini_batch_size": config.mini_batch_size,
                "reference": trainer.reference.mode,
            },
        )


def _critic(skeleton: Skeleton) -> Any:
    """The classifier with one label that a critic is."""
    skeleton = dataclasses.replace(skeleton, config=copy.deepcopy(skeleton.config))
    skeleton.config.num_labels, skeleton.config.get_text_config().pad_token_id = 1, 0
    return skeleton.build(AutoModelForSequenceClassification)


def _shortened(config: PPOConfig, prompt: int, response: int) -> PPOConfig:
    """The settings of a rehearsal: an optimizer step of whole groups, whose mini-batches have no
    more samples than some full passes."""
    mini, steps = config.mini_batch_size, config.gradient_accumulation_steps
    if config.micro_batch_tokens is not None:
        least = prompt // config.group_size + response  # a group may have its prompt once
        enough = -(-PASSES * config.micro_batch_tokens // least)
        fewer = -(-enough // config.group_size) * config.group_size
        mini = min(mini, fewer)
    unit = math.lcm(mini * steps, config.group_size)
    size = min(config.batch_size, unit)
    if config.num_shared_layers is not None:
        size, mini = config.batch_size, config.mini_batch_size
    settings = {
        "cpu": True,
        **{k: v for k, v in json_object(config.accelerator_kwargs).items() if k != "cpu"},
    }
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.init}
    fields |= {
        **_NOT_REHEARSED,
        "batch_size": size,
        "mini_batch_size": mini,
        "accelerator_kwargs": settings,
    }
    fields |= {"ppo_epochs": min(config.ppo_epochs, 1), "forward_batch_size": None}
    fields |= {"optimize_cuda_cache": None}
    return PPOConfig(**fields)


def _rollouts(
    trainer: Any, found: Rehearsal, config: PPOConfig, prompt: int, response: int
) -> Callable[[], None] | None:
    """Fills the rollout engine's slots, whose memory stays unless ``rollout_sleep`` frees it; what
    does so again, None where that is not known."""
    backend = trainer.rollouts.backend
    model: Any = trainer._unwrapped
    vocabulary = model.config.get_text_config().vocab_size
    if not isinstance(backend, EngineBackend):
        found.notes.append("the KV cache of model.generate (rollout_backend 'generate'): left out")
        return None
    count = config.batch_size // config.group_size
    count = max(1, min(count, -(-config.rollout_slots // config.group_size)))
    prompts = [tokens(prompt, vocabulary, start=i) for i in range(count)]
    params = SamplingParams(max_new_tokens=response, n=config.group_size)
    try:
        with trainer.computing():
            engine = RehearsedEngine(model, trainer.tokenizer, **backend.options)
            engine.rehearse(prompts, params)
    except UnsupportedModel as error:
        found.notes.append(f"the KV cache, left out: {error.cause}")
        return None
    found.keeps(*engine.memory())
    backend._engines[id(model), False] = engine  # slept before an update, where that is set

    def again() -> None:
        with trainer.computing():
            engine.rehearse(prompts, params)

    return again


def _steps(trainer: Any, config: PPOConfig, prompt: int, response: int) -> None:
    """A step."""
    vocabulary = trainer._unwrapped.config.get_text_config().vocab_size
    size, group = config.batch_size, config.group_size
    queries = [tokens(prompt, vocabulary, start=i // group) for i in range(size)]
    responses = [tokens(response, vocabulary, start=3 + i) for i in range(size)]
    scores = [torch.tensor(float(i % max(group, 2))) for i in range(size)]
    trainer.step(queries, responses, scores)
