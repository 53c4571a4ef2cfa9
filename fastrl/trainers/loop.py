"""The whole PPO loop: prompts, rollouts, rewards, steps, evaluations."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fastrl.rewards import RewardFunction, check_rewards
from fastrl.rollout import RolloutOutput
from fastrl.trainers.callbacks import Evaluation, TrainCallback, TrainResult
from fastrl.trainers.nonfinite import samples_left_out
from fastrl.trainers.stats import scalars

if TYPE_CHECKING:
    from fastrl.trainers.ppo import PPOTrainer

_PROMPT_COLUMNS = ("prompt", "query")
_REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids")


class Prompts:
    """Prompts as text and token ids, with the columns that a reward function may want."""

    def __init__(self, texts: list[str], ids: list[Tensor], columns: dict[str, list[Any]]):
        self.texts = texts
        self.ids = ids
        self.columns = columns

    @classmethod
    def from_list(cls, prompts: Sequence[str | Tensor], tokenizer: Any) -> Prompts:
        """From texts or 1-D token ids.

        Raises:
            ValueError: a single text; a prompt without a token, named by its index.
        """
        if isinstance(prompts, str):
            raise ValueError(f"prompts must be a list of texts, got the text {prompts!r}")
        texts = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts]
        ids = [
            torch.as_tensor(tokenizer(p).input_ids if isinstance(p, str) else p, dtype=torch.long)
            for p in prompts
        ]
        for i, tokens in enumerate(ids):
            if len(tokens) == 0:
                raise ValueError(f"prompts[{i}] is empty: every prompt needs at least one token")
        return cls(texts, ids, {})

    @classmethod
    def from_dataset(cls, dataset: Any, column: str | None, tokenizer: Any) -> Prompts:
        """From a data set with a column of texts, or of token ids under ``input_ids``.

        Raises:
            ValueError: no columns at all; no such column, and the message lists those there are.
        """
        if not hasattr(dataset, "column_names"):
            raise ValueError(
                f"{type(dataset).__name__} has no columns: pass its prompts as a list, "
                "train(prompts=...), or a datasets.Dataset"
            )
        names = list(dataset.column_names)
        known = [c for c in (*_PROMPT_COLUMNS, "input_ids") if c in names]
        if column is None and known:
            column = known[0]
        if column not in names:
            wanted = repr(column) if column else "prompt, query or input_ids"
            raise ValueError(
                f"the dataset has no column {wanted}; its columns are {', '.join(names)}: name the "
                "prompts' column with prompt_column"
            )
        reserved = [c for c in _REWARD_ARGUMENTS if c in names and c != column]
        if reserved:
            raise ValueError(
                f"the dataset's column {reserved[0]!r} has the name of an argument of reward_fn: "
                "rename it with dataset.rename_column"
            )
        found = cls.from_list(list(dataset[column]), tokenizer)
        found.columns = {c: list(dataset[c]) for c in names if c not in (column, "input_ids")}
        return found

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, indices: Sequence[int]) -> Prompts:
        return Prompts(
            [self.texts[i] for i in indices],
            [self.ids[i] for i in indices],
            {name: [values[i] for i in indices] for name, values in self.columns.items()},
        )

    def repeated(self, times: int) -> Prompts:
        """Each prompt so many times in a row."""
        return self.take([i for i in range(len(self)) for _ in range(times)])

    def batches(self, size: int, seed: int) -> Iterator[Prompts]:
        """Whole batches without end, in a new seeded order at every pass."""
        shuffle = np.random.RandomState(seed)
        while True:
            order = shuffle.permutation(len(self))
            for start in range(0, len(order) - size + 1, size):
                yield self.take(order[start : start + size].tolist())


class Loop:
    """One run of :meth:`fastrl.PPOTrainer.train`."""

    def __init__(
        self,
        trainer: PPOTrainer,
        reward_fn: RewardFunction,
        prompts: Prompts,
        eval_prompts: Prompts | None,
        generation_kwargs: dict[str, Any],
        missing_eos_penalty: float | None,
        callbacks: Sequence[TrainCallback],
    ):
        self.trainer = trainer
        self.reward_fn = reward_fn
        self.prompts = prompts
        self.eval_prompts = eval_prompts
        self.generation_kwargs = generation_kwargs
        self.missing_eos_penalty = missing_eos_penalty
        self.callbacks = callbacks
        self.result = TrainResult()

    def run(self, steps: int, eval_every: int) -> TrainResult:
        self._tell("on_train_begin", steps)
        self._evaluate(0)
        config = self.trainer.config
        batches = self.prompts.batches(config.prompts_per_step, config.seed)
        for step in range(1, steps + 1):
            metrics = self._step(next(batches))
            self.result.history.append(metrics)
            self._tell("on_step", step, metrics)
            if step == steps or (eval_every and step % eval_every == 0):
                self._evaluate(step)
        self._tell("on_train_end", self.result)
        return self.result

    def _step(self, batch: Prompts) -> dict[str, float]:
        size = self.trainer.config.group_size
        rollout = self.trainer.rollout(batch.ids, self.generation_kwargs, size)
        batch = batch.repeated(size)
        begin = time.perf_counter()
        rewards = self._rewards(batch, rollout)
        reward_seconds = time.perf_counter() - begin
        scores = rewards
        if self.missing_eos_penalty is not None:
            missing = torch.tensor([r not in ("eos", "stop") for r in rollout.finish_reasons])
            scores = rewards - self.missing_eos_penalty * missing
        stats = self.trainer.step(batch.ids, rollout.sequences, list(scores), rollout=rollout)
        known = rewards[~rewards.isnan()]
        return {
            **scalars(stats),
            **rollout.stats,
            "reward/mean": float(known.mean()),
            "reward/std": float(known.std()) if len(known) > 1 else 0.0,
            "time/reward": reward_seconds,
            "time/step": rollout.stats["time/rollout"] + reward_seconds + stats["time/ppo/total"],
        }

    def _evaluate(self, step: int) -> None:
        """The same seed every time, and the run's own random numbers are left alone."""
        if self.eval_prompts is None:
            return
        with torch.random.fork_rng():
            torch.manual_seed(self.trainer.config.seed)
            rollout = self.trainer.rollout(self.eval_prompts.ids, self.generation_kwargs)
            rewards = self._rewards(self.eval_prompts, rollout)
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
            completions=self._decode(self.eval_prompts, rollout.sequences),
            nan_samples=len(rewards) - len(sound),
        )
        self.result.evaluations.append(evaluation)
        self._tell("on_eval", step, evaluation)

    def _rewards(self, batch: Prompts, rollout: RolloutOutput) -> Tensor:
        """Rewards [B] in fp32, checked. The function is asked about samples that did not end in NaN
        logits; the others' are NaN."""
        nonfinite = self.trainer._update.nonfinite
        left_out = set(samples_left_out(rollout, nonfinite, lambda i: repr(batch.texts[i])))
        sound = [i for i in range(len(batch)) if i not in left_out]
        asked, sequences = batch.take(sound), [rollout.sequences[i] for i in sound]
        rewards = self.reward_fn(
            prompts=asked.texts,
            completions=self._decode(asked, sequences),
            completion_ids=[s.tolist() for s in sequences],
            **asked.columns,
        )
        told = torch.full((len(batch),), torch.nan)
        told[sound] = torch.tensor(check_rewards(rewards, len(asked)))
        return told

    def _decode(self, batch: Prompts, sequences: Sequence[Tensor]) -> list[str]:
        """Completions; behind a prompt such that the two are the text, spaces included."""
        return [
            self.trainer.decode_response(prompt, response)
            for prompt, response in zip(batch.ids, sequences, strict=True)
        ]

    def _tell(self, event: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self.trainer, *args)
