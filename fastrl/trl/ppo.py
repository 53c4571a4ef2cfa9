"""PPO under the names of TRL 0.12 to 1.9: policy, value, reward and reference models, and prompts
as token ids."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from transformers import TrainerControl, TrainerState, get_scheduler
from transformers.trainer_callback import CallbackHandler

from fastrl.data.batch import pad
from fastrl.data.choose_padding import classifier_side
from fastrl.models import CausalLMPolicy
from fastrl.models.load import with_adapter
from fastrl.models.optimizers import learning_rate_of, make_optimizer, set_learning_rate
from fastrl.models.reward_head import padding_of, rewards_of_padded
from fastrl.models.utils import text_config
from fastrl.ppo.trainer import PPOTrainer
from fastrl.run.callbacks import Evaluation, TrainCallback
from fastrl.run.folder import RunFolder
from fastrl.run.terminal import plain, run_console
from fastrl.trl.ppo_config import PPOv2Config

_IDS, _QUERY = "input_ids", "query_ids"  # of a row; the same for the reward
_OLD = {
    "config": "args",
    "tokenizer": "processing_class",
    "policy": "model",
    "ref_policy": "ref_model",
}


class PPOv2Trainer:
    """PPO of a language model with a reward model and a value model of its own: the PPOTrainer of
    TRL 0.12 to 1.9 (PPOv2Trainer before), run by :class:`fastrl.PPOTrainer` in its attribute
    ``ppo``.

    Each batch of prompts is answered, scored by the reward model, and learned from in
    ``num_ppo_epochs`` passes; rewards are -β·KL of each token, and the score at the last one.
    Responses end at EOS; TRL went on behind it where there was no ``stop_token``.

    Args:
        args: a :class:`PPOv2Config`.
        processing_class: the tokenizer.
        model: the policy, a causal language model.
        ref_model: what the KL is measured against; None: the model as it is now, of an adapter the
            model without it.
        reward_model, value_model: sequence classifiers with one label.
        train_dataset: with a column ``input_ids`` of prompts, not padded.
        eval_dataset: the same; responses to its prompts are shown ``num_sample_generations``
            times.
        optimizers: an optimizer of the policy and its scheduler, each or None.
        callbacks: transformers' TrainerCallback objects.
        peft_config: an adapter, which alone is trained.

    Raises:
        TypeError: arguments by unknown names; models that cannot be what they are for.
        ValueError: a column that is missing; sizes that do not divide.
    """

    has_values: ClassVar[bool] = True

    def __init__(
        self,
        args: PPOv2Config | None = None,
        processing_class: Any = None,
        model: Any = None,
        ref_model: Any = None,
        reward_model: Any = None,
        train_dataset: Any = None,
        value_model: Any = None,
        data_collator: Any = None,
        eval_dataset: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        callbacks: Sequence[Any] | None = None,
        peft_config: Any = None,
        **old: Any,
    ):
        given = {"args": args, "processing_class": processing_class, "model": model}
        given["ref_model"] = ref_model
        own = type(self).__name__
        for name, value in old.items():
            if name not in _OLD:
                raise TypeError(f"{own} got an unexpected keyword argument {name!r}")
            given[_OLD[name]] = value
        self.args, self.processing_class = given["args"], given["processing_class"]
        model, ref_model = given["model"], given["ref_model"]
        for name, value in (("model", model), ("reward_model", reward_model)):
            if value is None:
                raise TypeError(f"{own} needs a {name}")
        if (value_model is None) is self.has_values:
            what = "needs a value_model" if self.has_values else "has no value_model"
            raise TypeError(f"{own} {what}: a sequence classifier of one label")
        prompts = _prompts(train_dataset, "train_dataset")
        self.eval_prompts = None if eval_dataset is None else _prompts(eval_dataset, "eval_dataset")
        self.reward_model = reward_model
        policy = CausalLMPolicy(with_adapter(model, peft_config))
        config = self.args.classic()
        optimizer, scheduler = optimizers
        optimizer = optimizer or make_optimizer(
            policy, config.optim, config.learning_rate, config.optim_args
        )
        self.num_total_batches = self._batches(len(prompts))
        scheduler = scheduler or get_scheduler(
            self.args.lr_scheduler_type,
            optimizer,
            self.args.get_warmup_steps(self.num_total_batches),
            self.num_total_batches,
            self.args.lr_scheduler_kwargs,
        )
        # The optimizer is made, for its schedule.
        config = dataclasses.replace(config, optim="adam", optim_args=None)
        reference = None if ref_model is None else CausalLMPolicy(ref_model)
        self.ppo = PPOTrainer(
            config,
            policy,
            reference,
            self.processing_class,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            critic=value_model,
        )
        if padding_of(reward_model) is None:
            text_config(reward_model).pad_token_id = self.processing_class.pad_token_id
        reward_model.requires_grad_(False).eval().to(self.ppo.current_device)
        self.train_dataset, self.eval_dataset, self.prompts = train_dataset, eval_dataset, prompts
        self.state, self.control = TrainerState(), TrainerControl()
        self.state.is_world_process_zero = self.ppo.processes.is_main
        self.callback_handler = CallbackHandler(
            list(callbacks or ()), model, self.processing_class, optimizer, scheduler
        )

    def _batches(self, prompts: int) -> int:
        episodes = self.args.total_episodes
        if episodes is None:
            episodes = int(self.args.num_train_epochs * prompts)
        return max(1, math.ceil(episodes / (self.args.batch_size * self.args.world_size)))

    @property
    def accelerator(self) -> Any:
        return self.ppo.accelerator

    @property
    def model(self) -> Any:
        """The policy, as transformers knows it."""
        return self.ppo.accelerator.unwrap_model(self.ppo.model).pretrained_model

    def add_callback(self, callback: Any) -> None:
        self.callback_handler.add_callback(callback)

    def train(self) -> Any:
        """Trains on ``total_episodes`` samples; metrics, checkpoints and the ledger are in
        ``output_dir``, see :class:`fastrl.run.folder.RunFolder`."""
        args = self.args
        saves = str(getattr(args.save_strategy, "value", args.save_strategy)) != "no"
        held_out = self.eval_prompts
        shown = args.num_sample_generations if held_out is not None else 0
        return self.ppo.train(
            self.score,
            steps=self.num_total_batches,
            dataset=self.prompts,
            prompt_column=_IDS,
            generation_kwargs={**self._ends, "max_new_tokens": args.response_length},
            eval_prompts=held_out if shown else None,
            eval_every=max(1, self.num_total_batches // shown) if shown else 0,
            missing_eos_penalty=args.missing_eos_penalty,
            callbacks=[_Transformers(self)],
            progress=not args.disable_tqdm,
            output=RunFolder(args.output_dir, {"command": "ppo", "settings": args.to_dict()}),
            save_every=int(args.save_steps) if saves and args.save_steps >= 1 else 0,
            keep_last=args.save_total_limit or 0,
            overwrite=True,
            ledger=False,
        )

    @property
    def _ends(self) -> dict[str, Any]:
        """What ends responses beside EOS."""
        stop = self.args.stop_token_id
        return {} if stop is None else {"eos_token_id": stop}

    @torch.inference_mode()
    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        query_ids: Sequence[Sequence[int]],
        **_: Any,
    ) -> list[float]:
        """The reward model's score of prompts and responses, by their token ids."""
        model, size = self.reward_model, self.args.local_rollout_forward_batch_size
        rows = [
            torch.tensor([*query, *said])
            for query, said in zip(query_ids, completion_ids, strict=True)
        ]
        side = classifier_side(model, model.device, model.dtype, stacklevel=4)
        found: list[float] = []
        for i in range(0, len(rows), size):
            batch = pad(rows[i : i + size], self.processing_class.pad_token_id, "right")
            inputs = {name: x.to(model.device) for name, x in batch.items()}
            found += rewards_of_padded(model, inputs, side, padding_of(model))[:, 0].tolist()
        return found

    def generate_completions(self, sampling: bool = False) -> None:
        """Shows responses to held-out prompts, of the first batch alone with ``sampling``."""
        if self.eval_prompts is None:
            raise ValueError("generate_completions needs an eval_dataset")
        ids = list(map(torch.tensor, self.eval_prompts[_IDS]))
        ids = ids[: self.args.per_device_eval_batch_size] if sampling else ids
        said = self.ppo.generate(ids, max_new_tokens=self.args.response_length, **self._ends)
        said = [row[len(prompt) :] for row, prompt in zip(said, ids, strict=True)]
        decode = self.processing_class.batch_decode
        texts = decode(said)
        scores = self.score([], texts, [x.tolist() for x in said], [x.tolist() for x in ids])
        self._show(decode(ids, skip_special_tokens=True), texts, scores)

    def _show(self, prompts: Sequence[str], texts: Sequence[str], scores: Sequence[float]) -> None:
        from rich.table import Table

        table = Table("query", "model response", "score", show_lines=True)
        for prompt, text, score in list(zip(prompts, texts, scores, strict=True))[:5]:
            table.add_row(plain(prompt), plain(text), f"{score:.4g}")
        run_console().print(table)

    def save_model(self, output_dir: str | None = None) -> None:
        """Saves policy and tokenizer, as transformers does."""
        folder = Path(output_dir or self.args.output_dir)
        self.ppo.save_pretrained(folder)

    def push_to_hub(self, dataset_name: str | None = None, **options: Any) -> Any:
        """Uploads the policy to ``hub_model_id``, by default the name of ``output_dir``."""
        name = self.args.hub_model_id or Path(self.args.output_dir).name
        return self.ppo.push_to_hub(name, token=self.args.hub_token, **options)


def _prompts(dataset: Any, name: str) -> Dataset:
    """The prompts of a data set, twice: the second for the reward."""
    columns = getattr(dataset, "column_names", None) or ()
    if _IDS not in columns:
        raise ValueError(
            f"{name} needs a column {_IDS} of prompts, it has {', '.join(columns) or 'no columns'}"
        )
    ids = [list(map(int, row)) for row in dataset.with_format(None)[_IDS]]
    return Dataset.from_dict({_IDS: ids, _QUERY: ids})


class _Transformers(TrainCallback):
    """Calls transformers' callbacks, and has the value model follow the schedule."""

    def __init__(self, trainer: PPOv2Trainer):
        self.of = trainer

    def on_train_begin(self, trainer: Any, total_steps: int) -> None:
        self.of.state.max_steps = total_steps
        self._call("on_train_begin")

    def on_step(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        if trainer.critic is not None:
            set_learning_rate(trainer.critic.optimizer, learning_rate_of(trainer.optimizer))
        state, args = self.of.state, self.of.args
        state.global_step = step
        state.epoch = step * args.batch_size * args.world_size / len(self.of.prompts)
        self._call("on_step_end")
        every = max(1, int(args.logging_steps))
        if step % every == 0:
            logs = {**metrics, "episode": step * args.batch_size * args.world_size, "step": step}
            state.log_history.append(logs)
            self._call("on_log", logs=logs)

    def on_eval(self, trainer: Any, step: int, evaluation: Evaluation) -> None:
        if trainer.processes.is_main:
            self.of._show(evaluation.prompts, evaluation.completions, evaluation.rewards)

    def on_train_end(self, trainer: Any, result: Any) -> None:
        self._call("on_train_end")

    def _call(self, event: str, **given: Any) -> None:
        of = self.of
        of.callback_handler.call_event(event, of.args, of.state, of.control, **given)
