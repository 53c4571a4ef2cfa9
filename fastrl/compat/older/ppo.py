"""PPO under the names of TRL 0.12 to 1.9: policy, value, reward and reference models, and prompts
as token ids."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from transformers import (
    DataCollatorWithPadding,
    TrainerControl,
    TrainerState,
    enable_full_determinism,
    get_scheduler,
)
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from fastrl.compat.older.ppo_config import PPOv2Config
from fastrl.data import reads_eos
from fastrl.data.batch import pad
from fastrl.data.choose_padding import classifier_side
from fastrl.models import CausalLMPolicy
from fastrl.models.load import with_adapter
from fastrl.models.optimizers import learning_rate_of, set_learning_rate
from fastrl.models.reward_head import give_padding, padding_of, rewards_of_padded
from fastrl.run.callbacks import Evaluation, TrainCallback
from fastrl.run.folder import RunFolder
from fastrl.run.terminal import plain, run_console
from fastrl.settings import warn_of_idle
from fastrl.trainers.ppo.trainer import PPOTrainer

_IDS, _QUERY = "input_ids", "query_ids"  # a row's columns, for the policy and for the reward


class PPOv2Trainer:
    """PPO of a language model with a reward model and a value model of its own: the PPOTrainer of
    TRL 0.12 to 1.9 (PPOv2Trainer before). Attribute ``ppo``, a :class:`fastrl.PPOTrainer`, trains.

    Each batch of prompts is answered, scored by the reward model, and learned from in
    ``num_ppo_epochs`` epochs; a token's reward is -β·KL, plus the score for the last token.
    Responses end at EOS; TRL went on behind it where there was no ``stop_token``.

    Args:
        args: a :class:`PPOv2Config`.
        processing_class: the tokenizer.
        model: the policy, a causal language model.
        ref_model: the reference; None: the model as it is now, without its adapter if it has one.
        reward_model, value_model: sequence classifiers with one label.
        train_dataset: prompts, not padded, in a column ``input_ids``; no data_collator is called.
        eval_dataset: prompts, as in ``train_dataset``; responses to them are shown about
            ``num_sample_generations`` times.
        optimizers: an optimizer of the policy and its scheduler, or None for either; if there is an
            optimizer, the value model's is torch's Adam.
        callbacks: transformers' TrainerCallback objects.
        peft_config: an adapter for the policy, whose other weights stay.

    Raises:
        TypeError: arguments by unknown names; a model that is missing or has no use.
        ValueError: one model for values and rewards; a data set without ``input_ids``.
    """

    has_values: ClassVar[bool] = True
    old_keywords: ClassVar[dict[str, str]] = {
        "config": "args",
        "tokenizer": "processing_class",
        "policy": "model",
        "ref_policy": "ref_model",
    }

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
        passed = {"args": args, "processing_class": processing_class, "model": model}
        passed["ref_model"] = ref_model
        class_name = type(self).__name__
        for name, value in old.items():
            if name not in self.old_keywords:
                raise TypeError(f"{class_name} got an unexpected keyword argument {name!r}")
            passed[self.old_keywords[name]] = value
        self.args, self.processing_class = passed["args"], passed["processing_class"]
        model, ref_model = passed["model"], passed["ref_model"]
        needed = {"args": self.args, "a model": model, "a reward_model": reward_model}
        for name, value in needed.items():
            if value is None:
                raise TypeError(f"{class_name} needs {name}")
        if (value_model is None) is self.has_values:
            what = "needs a value_model" if self.has_values else "has no value_model"
            raise TypeError(f"{class_name} {what}: a sequence classifier of one label")
        if value_model is reward_model:
            raise ValueError(
                "value_model and reward_model are one object, and the value model is trained while "
                "the rewards stay: load it twice"
            )
        warn_of_idle(self.args, stacklevel=2)
        if data_collator is not None and not isinstance(data_collator, DataCollatorWithPadding):
            warnings.warn(
                f"{class_name} calls no data_collator, its rollouts pad prompts themselves: change "
                "the rows of train_dataset instead",
                stacklevel=2,
            )
        if self.args.full_determinism:
            enable_full_determinism(self.args.seed)
        prompts = _prompts(train_dataset, "train_dataset")
        self.eval_prompts = None if eval_dataset is None else _prompts(eval_dataset, "eval_dataset")
        self.reward_model = reward_model
        policy = CausalLMPolicy(with_adapter(model, peft_config))
        config = self.args.classic()
        optimizer, scheduler = optimizers
        if optimizer is not None:  # PPOTrainer refuses another optim, or arguments, beside it
            config = dataclasses.replace(config, optim="adam", optim_args=None)
        self.num_total_batches = self._batches(len(prompts))
        schedule = functools.partial(
            get_scheduler,
            self.args.lr_scheduler_type,
            num_warmup_steps=self.args.get_warmup_steps(self.num_total_batches),
            num_training_steps=self.num_total_batches,
            scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,
        )
        reference = None if ref_model is None else CausalLMPolicy(ref_model)
        self.ppo = PPOTrainer(
            config,
            policy,
            reference,
            self.processing_class,
            optimizer=optimizer,
            lr_scheduler=scheduler or schedule,
            critic=value_model,
        )
        give_padding(reward_model, self.processing_class)
        reward_model.requires_grad_(False).eval().to(self.ppo.current_device)
        self.train_dataset, self.eval_dataset, self.prompts = train_dataset, eval_dataset, prompts
        self.state, self.control = TrainerState(), TrainerControl()
        self.state.is_world_process_zero = self.ppo.processes.is_main
        self.state.is_local_process_zero = self.ppo.accelerator.is_local_main_process
        reporting = get_reporting_integration_callbacks(self.args.report_to)
        self.callback_handler = CallbackHandler(
            [DefaultFlowCallback(), *reporting, *(callbacks or ())],
            self.model,
            self.processing_class,
            self.ppo.optimizer,
            self.ppo.lr_scheduler,
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
        """The policy without wrappers, a model of transformers or PEFT."""
        return self.ppo.accelerator.unwrap_model(self.ppo.model).pretrained_model

    def add_callback(self, callback: Any) -> None:
        self.callback_handler.add_callback(callback)

    def train(self) -> Any:
        """Trains on ``total_episodes`` samples, or until a callback sets
        ``control.should_training_stop``; returns a :class:`fastrl.TrainResult`. Metrics and
        checkpoints are in ``output_dir``, see :class:`fastrl.run.folder.RunFolder`; if it has files
        already, they are in a new folder within it, ``run-1`` or a later one."""
        args = self.args
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
            output=RunFolder(self._free_folder(), self._described),
            save_every=args.save_every(self.num_total_batches),
            keep_last=args.save_total_limit or 0,
            ledger=False,
        )

    @property
    def _described(self) -> dict[str, Any]:
        return {"command": type(self).__name__, "settings": self.args.to_dict()}

    def _free_folder(self) -> Path:
        """``output_dir``, or a new folder within it if it has files."""
        folder = Path(self.args.output_dir)
        taken = folder.is_dir() and any(not x.name.startswith(".") for x in folder.iterdir())
        further = (folder / f"run-{number}" for number in itertools.count(1))
        chosen = next(x for x in further if not x.exists()) if taken else folder
        return self.ppo.processes.from_main(chosen)

    @property
    def _ends(self) -> dict[str, Any]:
        """The argument of ``generate`` for the token that ends responses beside EOS."""
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
        """Returns the reward model's score of each prompt with its response. Where it is recorded
        whether the model reads EOS, a response that ended gets or loses its EOS accordingly."""
        model, size = self.reward_model, self.args.local_rollout_forward_batch_size
        pairs = zip(query_ids, map(self._as_trained, completion_ids), strict=True)
        rows = [torch.tensor([*query, *response]) for query, response in pairs]
        side = classifier_side(model, model.device, model.dtype, stacklevel=4)
        rewards: list[float] = []
        for i in range(0, len(rows), size):
            batch = pad(rows[i : i + size], self.processing_class.pad_token_id, "right")
            inputs = {name: x.to(model.device) for name, x in batch.items()}
            rewards += rewards_of_padded(model, inputs, side, padding_of(model))[:, 0].tolist()
        return rewards

    def _as_trained(self, response: Sequence[int]) -> Sequence[int]:
        """A response's ids as the reward model reads them, see :mod:`fastrl.data.reads_eos`."""
        reads, eos = reads_eos.recorded(self.reward_model), self.processing_class.eos_token_id
        if reads is None or not response or response[-1] not in (eos, self.args.stop_token_id):
            return response
        text = response[:-1] if response[-1] == eos else response
        return [*text, eos] if reads else text

    def generate_completions(self, sampling: bool = False) -> None:
        """Answers the held-out prompts, with ``sampling`` the first batch alone, and shows five;
        raises ValueError without an eval_dataset."""
        if self.eval_prompts is None:
            raise ValueError("generate_completions needs an eval_dataset")
        ids = list(map(torch.tensor, self.eval_prompts[_IDS]))
        ids = ids[: self.args.per_device_eval_batch_size] if sampling else ids
        responses = self.ppo.generate(ids, max_new_tokens=self.args.response_length, **self._ends)
        responses = [row[len(prompt) :] for row, prompt in zip(responses, ids, strict=True)]
        decode = self.processing_class.batch_decode
        texts = decode(responses)
        scores = self.score([], texts, [x.tolist() for x in responses], [x.tolist() for x in ids])
        if self.ppo.processes.is_main:
            self._show(decode(ids, skip_special_tokens=True), texts, scores)

    def _show(self, prompts: Sequence[str], texts: Sequence[str], scores: Sequence[float]) -> None:
        from rich.table import Table

        table = Table("query", "model response", "score", show_lines=True)
        for prompt, text, score in list(zip(prompts, texts, scores, strict=True))[:5]:
            table.add_row(plain(prompt), plain(text), f"{score:.4g}")
        run_console().print(table)

    def save_model(self, output_dir: str | None = None) -> None:
        """Saves policy and tokenizer; if ``args.push_to_hub`` is set, uploads them."""
        self.ppo.save_pretrained(Path(output_dir or self.args.output_dir))
        if self.args.push_to_hub:
            self.push_to_hub()

    def push_to_hub(self, dataset_name: str | None = None, **options: Any) -> Any:
        """Does ``PPOTrainer.push_to_hub`` to ``hub_model_id``, else the name of ``output_dir``."""
        args = self.args
        name = args.hub_model_id or Path(args.output_dir).name
        hub_options = {"private": args.hub_private_repo, "revision": args.hub_revision}
        hub_options = {option: value for option, value in hub_options.items() if value is not None}
        return self.ppo.push_to_hub(name, token=args.hub_token, **{**hub_options, **options})


def _prompts(dataset: Any, name: str) -> Dataset:
    """Returns a data set of the prompts' ids in two columns, for the policy and for the reward."""
    columns = getattr(dataset, "column_names", None) or ()
    if _IDS not in columns:
        raise ValueError(
            f"{name} needs a column {_IDS} of prompts, it has {', '.join(columns) or 'no columns'}"
        )
    ids = [list(map(int, row)) for row in dataset.with_format(None)[_IDS]]
    return Dataset.from_dict({_IDS: ids, _QUERY: ids})


class _Transformers(TrainCallback):
    """Calls transformers' callbacks, and gives the value model the policy's learning rate."""

    def __init__(self, trainer: PPOv2Trainer):
        self.older = trainer

    def on_train_begin(self, trainer: Any, total_steps: int) -> None:
        self.older.state.max_steps = total_steps
        self.older.state.compute_steps(self.older.args, total_steps)
        self._call("on_train_begin")

    def on_step(self, trainer: Any, step: int, metrics: dict[str, float]) -> bool:
        if trainer.critic is not None:
            set_learning_rate(trainer.critic.optimizer, learning_rate_of(trainer.optimizer))
        state, args = self.older.state, self.older.args
        state.global_step = step
        state.epoch = step * args.batch_size * args.world_size / len(self.older.prompts)
        self._call("on_step_end")
        if self.older.control.should_log:
            self.older.control.should_log = False
            logs = {**metrics, "episode": step * args.batch_size * args.world_size, "step": step}
            state.log_history.append(logs)
            self._call("on_log", logs=logs)
        return self.older.control.should_training_stop

    def on_eval(self, trainer: Any, step: int, evaluation: Evaluation) -> None:
        if trainer.processes.is_main:
            self.older._show(evaluation.prompts, evaluation.completions, evaluation.rewards)

    def on_train_end(self, trainer: Any, result: Any) -> None:
        self._call("on_train_end")

    def _call(self, event: str, **arguments: Any) -> None:
        older = self.older
        hooks = older.callback_handler
        older.control = hooks.call_event(event, older.args, older.state, older.control, **arguments)
