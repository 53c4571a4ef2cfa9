"""The whole PPO loop: prompts, rollouts, rewards, steps, evaluations."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastrl.data.chat import TextOrMessages
from fastrl.data.prompts import Prompts, PromptStream, read_eval_prompts
from fastrl.data.tables import LONG_PROMPTS
from fastrl.models.layout import EncoderDecoder
from fastrl.ppo.nonfinite import samples_left_out
from fastrl.rewards.functions import RewardFunction, check_rewards
from fastrl.rollout import RolloutOutput
from fastrl.run.callbacks import Evaluation, Samples, TrainCallback, TrainResult, closing_callbacks
from fastrl.run.metrics import TrackerCallback, scalars
from fastrl.run.processes import check_one_process
from fastrl.run.progress import ProgressCallback

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
        rollout = self.trainer.rollouts.sample(batch.ids, self.generation_kwargs, size)
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
            rollout = self.trainer.rollouts.sample(self.eval_prompts.ids, self.generation_kwargs)
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
        nonfinite = self.trainer.nonfinite
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
            self.trainer.rollouts.decode(prompt, response)
            for prompt, response in zip(batch.ids, rollout.sequences, strict=True)
        ]

    def _tell(self, event: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self.trainer, *args)


def make_loop(
    trainer: PPOTrainer,
    reward_fn: RewardFunction,
    steps: int,
    *,
    prompts: Any,
    dataset: Any,
    prompt_column: str | None,
    generation_kwargs: dict[str, Any],
    eval_prompts: Any,
    missing_eos_penalty: float | None,
    long_prompts: str,
    callbacks: Iterable[TrainCallback],
    progress: bool,
) -> Loop:
    """From the arguments of :meth:`fastrl.PPOTrainer.train`.

    Raises:
        ValueError: as it does.
    """
    check_one_process("PPOTrainer.train()", trainer.accelerator.num_processes)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if prompts is not None and dataset is not None:
        raise ValueError("pass prompts or dataset, not both")
    if long_prompts not in LONG_PROMPTS:
        raise ValueError(
            f"unknown long_prompts {long_prompts!r}: choose one of {', '.join(LONG_PROMPTS)}"
        )
    source = trainer.dataset if dataset is None else dataset
    if prompts is None and source is None:
        raise ValueError("nothing to train on: pass prompts or dataset")
    kwargs = trainer.rollouts.arguments.of_training(generation_kwargs)
    # max_length in its place counts the prompt.
    layout = trainer.rollouts.layout
    room = (layout, kwargs.get("max_new_tokens") or 1, long_prompts)
    closed = isinstance(layout, EncoderDecoder)
    given = (
        Prompts.from_dataset(source, prompt_column, trainer.tokenizer, closed=closed)
        if prompts is None
        else Prompts.from_list(prompts, trainer.tokenizer, closed=closed)
    )
    found = given.fitting(*room)
    if len(found) < trainer.config.prompts_per_step:
        wanted, size = f"batch_size={trainer.config.batch_size}", trainer.config.group_size
        wanted += "" if size == 1 else f" / group_size={size}"
        raise ValueError(
            f"{len(found)} prompts are fewer than {wanted}: lower batch_size or bring more prompts"
        )
    result, held_out = TrainResult(dropped_prompts=len(given) - len(found)), None
    if eval_prompts is not None:
        given = read_eval_prompts(eval_prompts, prompt_column, trainer.tokenizer, closed=closed)
        held_out = given.fitting(*room)
        result.dropped_eval_prompts = len(given) - len(held_out)
    new = PromptStream(len(found), trainer.config.seed)
    return Loop(
        trainer,
        reward_fn,
        prompts=found,
        stream=trainer._streams.setdefault(found.fingerprint(), new),
        eval_prompts=held_out,
        generation_kwargs=kwargs,
        missing_eos_penalty=missing_eos_penalty,
        callbacks=[
            *([ProgressCallback(trainer.config.method)] if progress else []),
            *([] if trainer.config.log_with is None else [TrackerCallback()]),
            *callbacks,
        ],
        result=result,
    )


def _answer(prompt: TextOrMessages, completion: str) -> TextOrMessages:
    """A completion as a reward function gets it, by TRL 1.x's convention."""
    if isinstance(prompt, str):
        return completion
    return [{"role": "assistant", "content": completion}]
