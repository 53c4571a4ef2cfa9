"""The whole PPO loop: prompts, rollouts, rewards, steps, evaluations."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastrl.data.chat import TextOrMessages
from fastrl.data.prompts import Prompts, PromptStream
from fastrl.ppo.nonfinite import samples_left_out
from fastrl.ppo.stats import scalars
from fastrl.rewards.functions import RewardFunction, check_rewards
from fastrl.rollout import RolloutOutput
from fastrl.run.callbacks import (
    Evaluation,
    Samples,
    TrainCallback,
    TrainResult,
    closing_callbacks,
)

if TYPE_CHECKING:
    from fastrl.ppo.trainer import PPOTrainer


class Loop:
    """One run of :meth:`fastrl.PPOTrainer.train`."""

    def __init__(
        self,
        trainer: PPOTrainer,
        reward_fn: RewardFunction,
        prompts: Prompts,
        stream: PromptStream,
        eval_prompts: Prompts | None,
        generation_kwargs: dict[str, Any],
        missing_eos_penalty: float | None,
        callbacks: Sequence[TrainCallback],
        result: TrainResult,
    ):
        self.trainer = trainer
        self.reward_fn = reward_fn
        self.prompts, self.stream = prompts, stream
        self.eval_prompts = eval_prompts
        self.generation_kwargs = generation_kwargs
        self.missing_eos_penalty = missing_eos_penalty
        self.callbacks = callbacks
        self.result = result

    @closing_callbacks
    def run(self, steps: int, eval_every: int) -> TrainResult:
        self._tell("on_train_begin", steps)
        done = self.trainer.current_step  # steps are counted over all of the trainer's runs
        self._evaluate(done)
        last = done + steps
        for step in range(done + 1, last + 1):
            with self.stream.kept_on_error():
                chosen = self.stream.take(self.trainer.config.prompts_per_step)
                metrics, samples = self._step(self.prompts.take(chosen))
            self.result.history.append(metrics)
            self._tell("on_samples", step, samples)
            self._tell("on_step", step, metrics)
            if step == last or (eval_every and step % eval_every == 0):
                self._evaluate(step)
        self._tell("on_train_end", self.result)
        return self.result

    def _step(self, batch: Prompts) -> tuple[dict[str, float], Samples]:
        size = self.trainer.config.group_size
        rollout = self.trainer.rollout(batch.ids, self.generation_kwargs, size)
        batch = batch.repeated(size)
        begin = time.perf_counter()
        completions = self._decode(batch, rollout)
        rewards = self._rewards(batch, rollout, completions)
        reward_seconds = time.perf_counter() - begin
        scores = rewards
        if self.missing_eos_penalty is not None:
            missing = torch.tensor([r not in ("eos", "stop") for r in rollout.finish_reasons])
            scores = rewards - self.missing_eos_penalty * missing
        stats = self.trainer.step(batch.ids, rollout.sequences, list(scores), rollout=rollout)
        known = rewards[~rewards.isnan()]
        metrics = {
            **scalars(stats),
            **rollout.stats,
            "reward/mean": float(known.mean()),
            "reward/std": float(known.std()) if len(known) > 1 else 0.0,
            "time/reward": reward_seconds,
            "time/step": rollout.stats["time/rollout"] + reward_seconds + stats["time/ppo/total"],
        }
        return metrics, Samples(batch.texts, completions, rewards.tolist())

    def _evaluate(self, step: int) -> None:
        """The same seed every time, and the run's own random numbers are left alone."""
        if self.eval_prompts is None:
            return
        with torch.random.fork_rng():
            torch.manual_seed(self.trainer.config.seed)
            rollout = self.trainer.rollout(self.eval_prompts.ids, self.generation_kwargs)
            completions = self._decode(self.eval_prompts, rollout)
            rewards = self._rewards(self.eval_prompts, rollout, completions)
        sound = (~rewards.isnan()).nonzero()[:, 0].tolist()
        known, ids = rewards[sound], self.eval_prompts.ids
        evaluation = Evaluation(
            step=step,
            mean=float(known.mean()),
            sem=float(known.std()) / math.sqrt(len(known)) if len(known) > 1 else 0.0,
            kl=self.trainer.sequence_kl(
                [ids[i] for i in sound], [rollout.sequences[i] for i in sound]
            ),
            rewards=rewards.tolist(),
            prompts=self.eval_prompts.texts,
            completions=completions,
            nan_samples=len(rewards) - len(sound),
        )
        self.result.evaluations.append(evaluation)
        self._tell("on_eval", step, evaluation)

    def _rewards(self, batch: Prompts, rollout: RolloutOutput, completions: list[str]) -> Tensor:
        """Rewards [B] in fp32, checked; a chat's completion is a message too. The function is asked
        about samples that did not end in NaN logits; the others' are NaN."""
        nonfinite = self.trainer._update.nonfinite
        left_out = set(samples_left_out(rollout, nonfinite, lambda i: repr(batch.texts[i])))
        sound = [i for i in range(len(batch)) if i not in left_out]
        asked = batch.take(sound)
        extra: dict[str, Any] = {}
        if getattr(self.reward_fn, "wants_finished", False):
            extra = {"finished": [rollout.finish_reasons[i] != "length" for i in sound]}
        rewards = self.reward_fn(
            prompts=asked.said,
            completions=[_answer(batch.said[i], completions[i]) for i in sound],
            completion_ids=[rollout.sequences[i].tolist() for i in sound],
            **asked.columns,
            **extra,
        )
        told = torch.full((len(batch),), torch.nan)
        told[sound] = torch.tensor(check_rewards(rewards, len(asked)))
        return told

    def _decode(self, batch: Prompts, rollout: RolloutOutput) -> list[str]:
        """Completions; behind a prompt such that the two are the text, spaces included."""
        return [
            self.trainer.decode_response(prompt, response)
            for prompt, response in zip(batch.ids, rollout.sequences, strict=True)
        ]

    def _tell(self, event: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self.trainer, *args)


def _answer(prompt: TextOrMessages, completion: str) -> TextOrMessages:
    """A completion as a reward function gets it, by TRL 1.x's convention."""
    if isinstance(prompt, str):
        return completion
    return [{"role": "assistant", "content": completion}]
