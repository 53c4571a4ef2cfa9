"""The base of the trainers for SFT, reward models and pairs: settings, models and data sets."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import sys
import types
import typing
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.training_args import trainer_log_levels

from fastrl.config import PPOConfig, parse_json
from fastrl.data.choose_padding import Packing, Scores, logprobs_of_labels
from fastrl.data.tables import errors_name, is_stream
from fastrl.data.vocabulary import check_table
from fastrl.eras import OfEveryEra, of_another_era, other_defaults
from fastrl.models.fast_tokenizer import as_fast
from fastrl.models.load import load_tokenizer
from fastrl.models.model_files import is_path
from fastrl.models.optimizers import check_optimizer, optimizer_name
from fastrl.models.sharding import spread
from fastrl.models.utils import NO_LIMIT, check_trainable, context_length, model_identity
from fastrl.run.checkpoints import describe_weights
from fastrl.run.deepspeed import refuse_zero3
from fastrl.run.launcher import wait_at_most
from fastrl.settings import (
    check_ranges,
    check_refused,
    check_types,
    kept_settings,
    refusals,
    setting,
    setting_like,
)
from fastrl.trainers.base import BaseTrainer
from fastrl.trainers.finite_steps import ON_NONFINITE
from fastrl.trainers.low_memory import warn_of_lost_steps
from fastrl.trainers.passes import check_sizes, on_all_processes, with_synchronised_last
from fastrl.trainers.sharing import SharedBatches, share_batches, weights_of
from fastrl.trainers.special_tokens import settle_tokenizer

# The intervals of transformers' settings.
_RANGES = {
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), "[1, inf)"),
    **dict.fromkeys(("gradient_accumulation_steps", "eval_accumulation_steps"), "[1, inf)"),
    **dict.fromkeys(("torch_empty_cache_steps", "ddp_bucket_cap_mb"), "[1, inf)"),
    **dict.fromkeys(("num_train_epochs", "learning_rate", "weight_decay"), "[0, inf)"),
    **dict.fromkeys(("adam_epsilon", "neftune_noise_alpha", "eval_delay"), "[0, inf)"),
    **dict.fromkeys(("warmup_steps", "eval_steps", "save_steps"), "[0, inf)"),
    "logging_steps": "(0, inf)",
    "ddp_timeout": "(0, 1000000000]",  # 64-bit nanoseconds hold 9.2 times as much
    **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor"), "[0, 1)"),
    **dict.fromkeys(("seed", "data_seed"), "[0, 4294967295]"),  # NumPy's range
    "max_grad_norm": "[0, inf]",
    "max_steps": "[-1, inf)",
    "dataloader_prefetch_factor": "[1, inf)",
    "dataloader_num_workers": "[0, 4096]",  # more processes than machines have
}
# Orders of the data; transformers takes any other name for "random".
_STRATEGIES = ("random", "sequential", "group_by_length", "batch_rebalance")
_THEIRS = typing.get_type_hints(TrainingArguments)
# Settings that are an object or a text.
_OBJECTS = ("fsdp", "dataloader_multiprocessing_context", "resume_from_checkpoint")
_FILES = {"accelerator_config", "fsdp_config", "deepspeed"}  # dicts, JSON, or paths of such


@dataclass
class SupervisedArguments(TrainingArguments, metaclass=OfEveryEra):
    """transformers' TrainingArguments; ``report_to=None`` reports to no tracker, and settings of
    other versions are taken, see :mod:`fastrl.eras`."""

    max_length: int | None = setting(
        "Longest sequence, in tokens; None: the model's limit.", 512, within="[1, inf)"
    )
    padding_free: bool = setting(
        "Compute without padding, and only once the beginning that both texts of a pair share, "
        "where the model's attention allows it.",
        True,
    )
    micro_batch_tokens: int | None = setting_like(PPOConfig, "micro_batch_tokens")
    pad_to_multiple_of: int | str | None = setting(
        "Pad batches to a multiple of so many tokens; None or auto: to their longest text.", None
    )
    trust_remote_code: bool = setting(
        "Run the Python code that a model or tokenizer brings.", False
    )
    chat_template_path: str | None = setting(
        "Take the chat template of a .jinja file, or of another tokenizer, with its EOS.", None
    )
    eos_token: str | None = setting("The token that ends texts; None: the tokenizer's.", None)
    pad_token: str | None = setting("The token that pads; None: the tokenizer's.", None)
    dataset_num_proc: int | None = setting(
        "Processes for preparing the data set.", None, within="[1, inf)"
    )
    model_init_kwargs: dict | str | None = setting(
        "Keyword arguments of from_pretrained (JSON), where the model is a path.", None
    )
    on_nonfinite: str = setting(
        "How to treat optimizer steps whose loss or gradient is NaN or infinite, and responses "
        "with such rewards: skip (they are left out, with a warning), raise (an error).",
        "skip",
        choices=ON_NONFINITE,
    )
    master_weights: bool = setting_like(PPOConfig, "master_weights")
    offload_optimizer: bool = setting_like(PPOConfig, "offload_optimizer")
    activation_offloading: bool = setting_like(PPOConfig, "activation_offloading")
    bf16: bool | None = setting(  # type: ignore[assignment]
        "Compute in bfloat16 by autocast, by default on GPUs that can. Weights keep their dtype; "
        "the default is for float32 weights, where accelerate was told no precision.",
        None,
        bare=True,
    )
    gradient_checkpointing: bool | None = setting(  # type: ignore[assignment]
        "Compute layers again in the backward pass, in place of keeping their activations.",
        None,
        bare=True,
    )
    gradient_checkpointing_kwargs: dict | str | None = setting(  # type: ignore[assignment]
        "Options of gradient_checkpointing (JSON), see transformers.", None
    )
    activation_checkpointing: bool | None = setting(
        "The same as gradient_checkpointing, by its newer name in transformers.", None, bare=True
    )
    activation_checkpointing_kwargs: dict | str | None = setting(
        "The same as gradient_checkpointing_kwargs, by its newer name.", None
    )
    remove_unused_columns: bool = setting(
        "transformers'; it changes nothing, as these trainers choose columns themselves.", True
    )

    _VALID_DICT_FIELDS = [  # noqa: RUF012 - not a field, there and here
        *TrainingArguments._VALID_DICT_FIELDS,
        "activation_checkpointing_kwargs",
        "model_init_kwargs",
    ]

    def __post_init__(self) -> None:
        if self.report_to is None:
            self.report_to = "none"
        self._settle_checkpointing()
        check_numbers(self, type(self))
        _check_choices(self)
        refuse_zero3(self.deepspeed, "bf16" if self.bf16 else "fp16" if self.fp16 else "no")
        super().__post_init__()
        self._settle_checkpointing()  # what was JSON has been parsed
        if isinstance(self.pad_to_multiple_of, str):
            self.pad_to_multiple_of = _multiple(self.pad_to_multiple_of)
        if isinstance(self.pad_to_multiple_of, int) and self.pad_to_multiple_of < 1:
            raise ValueError(
                f"pad_to_multiple_of must be positive or None, got {self.pad_to_multiple_of}"
            )
        _check_optimizer(self)

    def __getattr__(self, name: str) -> Any:
        return of_another_era(self, name)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), **kept_settings(self)}

    def _settle_checkpointing(self) -> None:
        """Gives both names of gradient checkpointing one value, the newer name's where it is set:
        versions of transformers read one or the other, and newer ones warn of the older name."""
        if self.activation_checkpointing is None:
            self.activation_checkpointing = bool(self.gradient_checkpointing)
        if self.activation_checkpointing_kwargs is None:
            self.activation_checkpointing_kwargs = self.gradient_checkpointing_kwargs
        self.gradient_checkpointing = self.activation_checkpointing
        self.gradient_checkpointing_kwargs = self.activation_checkpointing_kwargs


class SupervisedTrainer(BaseTrainer, ABC):
    """transformers' Trainer, which prepares all models and data sets that it gets: at construction,
    from ``model_init``, in ``evaluate`` and in ``predict``.

    Subclasses do so in :meth:`prepare_model`, which they call for the constructor's model, and in
    :meth:`prepare_data`. Before ``super().__init__`` they set what these need, but for the settings
    and the tokenizer that ``prepare_data`` needs, which ``super().__init__`` sets.
    """

    args: Any
    model: Any
    processing_class: Any
    share_of_batch: float  # of the pass that is computed
    example: ClassVar[str]  # what errors call an example
    padding_scores: ClassVar[Scores] = logprobs_of_labels  # compared with and without padding
    # Keywords of TRL's that are refused, and what to use.
    refused_keywords: ClassVar[Mapping[str, str]] = {
        "compute_loss_func": "the loss is computed with the LM head; override compute_loss",
        "optimizer_cls_and_kwargs": "pass optimizers=(optimizer, None), or name it by optim",
    }

    def __init__(self, *, train_dataset: Any, eval_dataset: Any, args: Any, **rest: Any):
        if args.label_smoothing_factor:
            raise ValueError(
                f"{type(self).__name__} does not smooth labels: leave label_smoothing_factor at 0"
            )
        self._trains = train_dataset is not None
        if self._trains and rest.get("model") is not None:
            check_trainable(rest["model"])
        args.remove_unused_columns = False
        # Without a GPU torch warns of pinned memory.
        args.dataloader_pin_memory = args.dataloader_pin_memory and args.device.type != "cpu"
        self.args, self.processing_class = args, rest["processing_class"]
        self._prepared: weakref.WeakSet = weakref.WeakSet()
        self._losses_so_far: list[Tensor] | None = None  # losses of an evaluation under way
        self._shared: SharedBatches | None = None  # in runs of several processes
        self._parts: list[float] = []  # this process's parts of the fetched batches
        self._part: float | None = None  # this process's part of the batch that is learned from
        self.share_of_batch = 1.0
        self._last: dict[str, float] = {}  # metrics of the last log
        if is_stream(train_dataset) and args.max_steps <= 0:
            raise ValueError("train_dataset is a stream, which has no length: set max_steps")
        _keep_batches_whole(args)
        wait_at_most(args)  # processes wait for the one that prepares the data
        with args.main_process_first(desc="preparing the data"):
            train = None if train_dataset is None else self._prepared_rows(train_dataset, True)
            evaluation: Any = None
            if isinstance(eval_dataset, dict):
                evaluation = {}
                for name, x in eval_dataset.items():
                    with errors_name(f"eval_dataset[{name!r}]"):
                        evaluation[name] = self.prepare_eval_data(x)
            elif eval_dataset is not None:
                with errors_name("eval_dataset"):
                    evaluation = self.prepare_eval_data(eval_dataset)
        if train is not None and not is_stream(train):
            self._check_lengths(train)
            if args.micro_batch_tokens is not None:
                check_sizes(self.sizes(train), args.micro_batch_tokens, self.example)
        super().__init__(args=args, train_dataset=train, eval_dataset=evaluation, **rest)
        several = evaluation.values() if isinstance(evaluation, dict) else (evaluation,)
        for each in (train, *several):
            self._check_vocabulary(each)
        if self._trains:
            warn_of_lost_steps(self.args, self.model, stacklevel=3)

    def _check_lengths(self, rows: Any) -> None:
        """Raises ValueError where transformers' samplers would order rows by lengths that they do
        not find."""
        strategy = self.args.train_sampling_strategy
        if strategy not in ("group_by_length", "batch_rebalance") or not len(rows):
            return
        input_name = getattr(self.processing_class, "model_input_names", ["input_ids"])[0]
        columns = getattr(rows, "column_names", ())
        if self.args.length_column_name not in columns and input_name not in rows[0]:
            remedy = "packed batches have no padding" if self.args.padding_free else "the default"
            raise ValueError(
                f"train_sampling_strategy={strategy!r} reads {input_name}, which a {self.example} "
                f"does not have: take 'random' ({remedy})"
            )

    def _check_vocabulary(self, dataset: Any) -> None:
        # A stream is not read ahead: torch refuses ids that have no embedding.
        if dataset is not None and self.processing_class is not None and not is_stream(dataset):
            texts = getattr(dataset, "texts", dataset)  # packed rows have their texts there
            check_table(self.accelerator.unwrap_model(self.model), self.processing_class, texts)

    def check_keywords(self, **keywords: Any) -> None:
        """Raises TypeError for a keyword of ``refused_keywords`` that is not None."""
        for name, value in keywords.items():
            if value is not None:
                class_name = type(self).__name__
                raise TypeError(f"{class_name} does not take {name}: {self.refused_keywords[name]}")

    @abstractmethod
    def prepare_model(self, model: Any) -> Any:
        """Readies a model for training, and returns it or a model that wraps it."""

    @abstractmethod
    def prepare_data(self, dataset: Any, training: bool) -> Any:
        """The data set as the collator reads it; ``training``: whether it is learned from."""

    def _prepared_rows(self, dataset: Any, training: bool) -> Any:
        if "_prepare_dataset" in self.overrides:
            name = "train" if training else "eval"
            settings = self.processing_class, self.args, *self._preparing(training)
            dataset = self._prepare_dataset(dataset, *settings, name)
        return self.prepare_data(dataset, training)

    def _preparing(self, training: bool) -> tuple[Any, ...]:
        """The arguments of TRL's ``_prepare_dataset`` between the settings and the data set's
        name."""
        return ()

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, *positional: Any, **named: Any
    ) -> Any:
        """Calls :meth:`prepare_data` under TRL's name, for subclasses that override this. An
        override may return rows that are prepared, or not yet.

        Args:
            positional, named: see :meth:`_preparing`; and ``dataset_name``, "train" or another.

        Raises:
            ValueError: another tokenizer, or other arguments, than the trainer's.
        """
        *others, name = [*positional, *named.values()]
        training = name == "train"
        options = self._preparing(training)
        if processing_class is not self.processing_class or (*others,) != options:
            raise ValueError(
                "super()._prepare_dataset prepares by the trainer's own tokenizer and settings: "
                "hand on what was given, or prepare the rows without it"
            )
        return self.prepare_data(dataset, training)

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), **trained_identity(self)}

    def call_model_init(self, trial: Any = None) -> nn.Module:
        model = self.prepare_model(super().call_model_init(trial))
        if self._trains:
            check_trainable(model)
        return model

    def get_train_dataloader(self) -> DataLoader:
        """The loader of training, as in ``Trainer``; processes share the batches that one would
        draw.

        Raises:
            ValueError: the examples make no batch, so that no step would be taken.
        """
        loader = super().get_train_dataloader()
        data: Any = self.train_dataset
        if not is_stream(data) and not len(loader):
            count, size = len(data), self.args.train_batch_size * self.processes.count
            raise ValueError(
                f"{count} examples make no batch of {size}, and dataloader_drop_last leaves out "
                "what makes none: turn it off, lower per_device_train_batch_size, or bring more"
            )
        if self.processes.count > 1:
            stream = is_stream(self.train_dataset)
            sizes = [] if stream else list(self.sizes(self.train_dataset))
            self._shared = share_batches(loader, self.processes, sizes)
        return loader

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The batches of the next optimizer step, and the number of its tokens or None. Where a
        process cannot make its batches, all processes raise."""
        if self.processes.count == 1:
            batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
            self._parts = weights_of([self.examples_in(batch) for batch in batches])
            return batches, items
        with self.agreed():
            batches = list(itertools.islice(epoch_iterator, num_batches))
        begin, shared = self.run_place().minibatch, self._shared
        numbers = range(begin, begin + len(batches))
        if shared is None:
            self._parts = [1 / self.processes.count] * len(batches)
        else:
            self._parts = [shared.part(i) for i in numbers]
            weights = weights_of([shared.size(i) for i in numbers])
            if weights and self.examples_in(batches[0]) is not None:
                self._parts = [x * w for x, w in zip(self._parts, weights, strict=True)]
        counting = batches
        if 0.0 in self._parts and "labels" in batches[0]:
            counting = [
                batch if part else {**batch, "labels": torch.full_like(batch["labels"], -100)}
                for batch, part in zip(batches, self._parts, strict=True)
            ]
        _, items = super().get_batch_samples(iter(counting), num_batches, device)
        return batches, items

    def examples_in(self, batch: Any) -> int | None:
        """The number of a batch's examples on this process, if the loss is their mean: all examples
        of an optimizer step weigh the same, also in a short last batch. None: its batches weigh the
        same."""
        return None

    def begin_training(self, resumed: Mapping[str, Any] | None) -> None:
        super().begin_training(resumed)
        changes = other_defaults(self.args)
        if changes and self.processes.is_main and not self.of_a_command:
            tqdm.write(changes, file=sys.stderr)
        self._last = {} if resumed is None else dict(resumed["own"].get("last", {}))

    def own_state(self) -> dict[str, Any]:
        return {**super().own_state(), "last": self._last}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs ``logs``, and with a loss of training the latest value of each training metric."""
        if "loss" in logs or "train_loss" in logs:
            metrics: Any = self._metrics["train"]
            self._last |= metrics.take(self.processes)
            logs.update(self._last, **metrics.totals(self.processes))
        super().log(logs, start_time)

    @property
    def ref_model(self) -> Any:
        """The model that steps and evaluations run beside the trained one; None for methods without
        a reference."""
        return None

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Adds a batch's gradient in passes of at most ``micro_batch_tokens``; returns the loss."""
        self._part = self._parts.pop(0) if self._parts else None
        try:
            with self.products.on(model, self.ref_model):
                losses = []
                passes = self._passes(inputs)
                contexts = with_synchronised_last(len(passes), model, self.accelerator)
                for (part, self.share_of_batch), context in zip(passes, contexts, strict=True):
                    with context:
                        losses.append(super().training_step(model, part, *args, **kwargs))
                return torch.stack(losses).sum() if len(losses) > 1 else losses[0]
        finally:
            self._part, self.share_of_batch = None, 1.0

    def _passes(self, inputs: Any) -> list[tuple[Any, float]]:
        """The parts of a batch, each with its share of the batch. All processes get as many, some
        with a share of 0, because the processes wait for each other in each."""
        if self.args.micro_batch_tokens is None:
            return [(inputs, 1.0)]
        parts = self.micro_batches(inputs, self.args.micro_batch_tokens)
        passes = on_all_processes(parts, self.processes)
        return [(part, share * counts) for (part, share), counts in passes]

    @abstractmethod
    def sizes(self, dataset: Any) -> Iterable[int]:
        """Tokens of each example of prepared data; none where they are not known."""

    def padded(self, length: int) -> int:
        """A row's width for so many tokens, by ``pad_to_multiple_of`` unless ``padding_free``."""
        multiple = 1 if self.args.padding_free else self.args.pad_to_multiple_of or 1
        return -(-length // multiple) * multiple

    @abstractmethod
    def micro_batches(self, inputs: Any, most: int) -> list[tuple[Any, float]]:
        """Parts of a batch of at most ``most`` tokens, each with its share of the batch's loss.

        Raises:
            ValueError: an example has more tokens.
        """

    @cached_property
    def packing(self) -> Packing:
        """Tests whether a model runs batches without padding."""
        where = self.args.device, self.lowest_precision, self.accelerator.autocast
        asks = self.processes.any, self.asks_to_pack
        return Packing(*where, *asks, type(self).padding_scores)

    def asks_to_pack(self) -> bool:
        """Whether batches without padding are asked for, and nothing else needs padded ones."""
        return bool(self.args.padding_free)

    @property
    def lowest_precision(self) -> torch.dtype:
        """The precision of forwards with float32 weights: bfloat16 under autocast, also to fp16."""
        return torch.bfloat16 if self.args.bf16 or self.args.fp16 else torch.float32

    @property
    def share(self) -> float:
        """The factor of a pass's mean loss. With it, the sum over passes, averaged over processes
        and an optimizer step's batches, is the mean over all examples. It is 1 for a batch in one
        pass, except in the last optimizer step of an epoch."""
        of_all = 1.0 if self._part is None else self._part * self.processes.count
        return of_all * self.share_of_batch

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        is_prepared = eval_dataset is None or isinstance(eval_dataset, str)
        return super().get_eval_dataloader(
            eval_dataset if is_prepared else self.prepare_eval_data(eval_dataset)
        )

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        return super().get_test_dataloader(self.prepare_eval_data(test_dataset))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates as ``Trainer`` does, but ``eval_loss`` is the mean over all losses passed to
        :meth:`held_out`, and does not depend on batches and processes."""
        losses: list[Tensor] = []
        self._losses_so_far = losses
        prefix = prefix_of(args, kwargs)
        try:
            with self.products.on(self.model, self.ref_model):
                output = super().evaluation_loop(*args, **kwargs)
        finally:
            self._losses_so_far = None
        metrics: dict[str, float] = output.metrics or {}
        if not losses:
            return output
        table = torch.cat(losses).double()
        for name in [name for name in metrics if name.endswith("_loss")]:
            total, count = table[:, :2].sum(0).tolist()
            metrics[name] = total / max(count, 1)
        if table.shape[1] > 2:
            for name, value in self.held_out_metrics(table[:, 1], table[:, 2:]).items():
                metrics.setdefault(f"{prefix}_{name}", value)
        return output

    def predicted_by_own_loss(
        self, model: nn.Module, inputs: Any, loss_alone: bool
    ) -> tuple[Tensor, Any, Any]:
        """The ``prediction_step`` where a subclass computes the loss: each example of a batch has
        the batch's loss."""
        inputs = self.ready_batch(inputs)
        count = max(len(x) for x in inputs.values() if isinstance(x, Tensor) and x.dim())
        labels = inputs.get("labels")
        with torch.no_grad(), self.compute_loss_context_manager():
            batch = copy.copy(inputs)  # programs may take entries out of the batch
            if loss_alone:
                result: Any = self.compute_loss(model, batch), None
            else:
                result = self.compute_loss(model, batch, return_outputs=True)
        loss, outputs = result[0].detach(), result[1]
        self.held_out(loss.expand(count), torch.ones(count, device=loss.device))
        return loss, getattr(outputs, "logits", outputs), None if loss_alone else labels

    @abstractmethod
    def held_out_metrics(self, counts: Tensor, columns: Tensor) -> dict[str, float]:
        """Metrics of an evaluation of N examples, from all that :meth:`held_out` got of them:
        ``counts`` [N], and ``columns`` [N, K]."""

    def held_out(self, sums: Tensor, counts: Tensor, *columns: Tensor) -> None:
        """Adds the losses of a batch's examples to those of the evaluation.

        Args:
            sums: sums of each example's losses, [B].
            counts: how many losses each example has, [B].
            columns: columns for :meth:`held_out_metrics`, [B] each.
        """
        if self._losses_so_far is None:
            return
        numbers = torch.stack([x.float() for x in (sums, counts, *columns)], dim=-1)
        # Leaves out examples that were repeated so that all processes have as many.
        self._losses_so_far.append(self.accelerator.gather_for_metrics(numbers).cpu())

    def counting(self, count: int) -> Tensor:
        """Which of a batch's examples count, [count] bool: where several processes share the last
        batch of an epoch or of an evaluation, some have examples that others have, too."""
        numbers = self.processes.index * count + torch.arange(count, device=self.args.device)
        if self.model.training:
            return torch.full_like(numbers, bool(self.share), dtype=torch.bool)
        if self._losses_so_far is None or self.processes.count == 1:
            return torch.ones_like(numbers, dtype=torch.bool)
        return torch.isin(numbers, self.accelerator.gather_for_metrics(numbers))

    def replace_data(self, by: Callable[[Any, bool], Any]) -> None:
        """Replaces the prepared data sets by what a function returns, which gets each, and whether
        it is for training."""
        self.train_dataset = by(self.train_dataset, True)
        held_out = self.eval_dataset
        if isinstance(held_out, dict):
            held_out = {name: by(x, False) for name, x in held_out.items()}
            self._prepared.update(held_out.values())
        elif held_out is not None:
            held_out = by(held_out, False)
            self._prepared.add(held_out)
        self.eval_dataset = held_out

    def prepare_eval_data(self, dataset: Any) -> Any:
        """A data set for evaluation, prepared unless it is already."""
        if any(dataset is prepared for prepared in self._prepared):
            return dataset
        ready = self._prepared_rows(dataset, False)
        if hasattr(self, "products"):  # before it is set, the constructor checks
            self._check_vocabulary(ready)
        if ready is not dataset:
            self._prepared.add(ready)
        return ready


def trained_identity(trainer: Any) -> dict[str, Any]:
    """Facts of a trainer's model and tokenizer that must be the same where a run resumes."""
    if trainer.is_deepspeed_enabled:  # weights are spread over processes
        return {"weights": {}}
    model = trainer.accelerator.unwrap_model(trainer.model)
    spread(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {**model_identity(model, trainer.processing_class), "weights": describe_weights(trained)}


def _multiple(text: str) -> int | None:
    if text.lower() in ("auto", "none", "null"):
        return None
    if not text.isdigit():
        raise ValueError(f"pad_to_multiple_of must be a number, None or 'auto', got {text!r}")
    return int(text)


def _keep_batches_whole(args: Any) -> None:
    """Has each process read its share of a stream by itself: batches number tokens by their
    positions, which are wrong in a part that accelerate cuts out of a batch.

    Raises:
        ValueError: accelerate is to cut batches.
    """
    if args.accelerator_config.dispatch_batches:
        raise ValueError(
            "accelerator_config: leave dispatch_batches out, because batches cannot be cut"
        )
    args.accelerator_config = copy.copy(args.accelerator_config)  # the caller's stays as it is
    args.accelerator_config.dispatch_batches = False


def check_one_gpu(args: TrainingArguments) -> None:
    """Raises ValueError where transformers would split batches over several GPUs."""
    if args.n_gpu > 1:
        raise ValueError(
            f"one process with {args.n_gpu} GPUs would split batches without the loss's "
            "knowledge: start one process per GPU (accelerate launch, torchrun)"
        )


def _check_optimizer(args: TrainingArguments) -> None:
    check_optimizer(optimizer_name(args), arguments=args.optim_args, decay_is_a_setting=True)


def _check_choices(args: TrainingArguments) -> None:
    """Raises ValueError for a setting of transformers' that must be one of several values and is
    none."""
    levels = [*trainer_log_levels]
    choices = {"log_level": levels, "log_level_replica": levels}
    for name, hint in _THEIRS.items():
        for kind in typing.get_args(hint):
            if isinstance(kind, type) and issubclass(kind, Enum):
                choices[name] = [x.value for x in kind]
    for name, allowed in choices.items():
        value = getattr(args, name)
        if getattr(value, "value", value) not in allowed:
            raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(allowed)}")


def check_numbers(args: Any, kind: type) -> None:
    """Checks settings: numbers, truth values, lists and dicts of transformers', and all of ours.

    Raises:
        TypeError, ValueError: see :func:`fastrl.settings.check_types` and ``check_ranges``.
    """
    kinds = {name: {hint, *typing.get_args(hint)} for name, hint in _THEIRS.items()}
    texts = [x for x in kinds if str in kinds[x] and len(kinds[x] - {types.NoneType}) > 2]
    check_types(args, kind, but=[*texts, *_OBJECTS])
    check_ranges(args, kind, _RANGES)
    parallelism = getattr(args, "parallelism_config", None)
    if parallelism is not None and not hasattr(parallelism, "get_device_mesh"):
        name_given = type(parallelism).__name__
        raise TypeError(f"parallelism_config must be accelerate's or None, got {name_given}")
    for name in ("adam_beta1", "adam_beta2"):  # torch takes floats alone
        setattr(args, name, float(getattr(args, name)))
    for name in kind._VALID_DICT_FIELDS:  # type: ignore[attr-defined]
        if name not in _FILES:
            parse_json(name, getattr(args, name))
    order = args.train_sampling_strategy
    if order not in _STRATEGIES and "train_sampling_strategy" not in refusals(kind):
        raise ValueError(
            f"unknown train_sampling_strategy {order!r}: choose one of {', '.join(_STRATEGIES)}"
        )


def prefix_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The prefix of an evaluation's metrics, from the arguments of ``evaluation_loop``: "eval", or
    "eval_NAME" where there are several sets."""
    return kwargs.get("metric_key_prefix", args[4] if len(args) > 4 else "eval")


def settings_of(args: Any, kind: type, **keywords: Any) -> Any:
    """A copy of the arguments, with the keywords that are not None; settings that transformers' own
    arguments lack get their defaults."""
    args = kind() if args is None else copy.copy(args)
    for field in dataclasses.fields(kind):
        if not hasattr(args, field.name):
            setattr(args, field.name, field.default)
    _check_optimizer(args)  # transformers' own arguments were not checked at construction
    check_refused(args)  # again: scripts set attributes of parsed arguments
    for name, value in keywords.items():
        if value is not None:
            setattr(args, name, value)
    check_numbers(args, kind)
    return args


def load_if_path(model: Any, load: Callable[..., Any], args: Any, **options: Any) -> Any:
    """A model loaded from its path by ``load``; a model as it is."""
    if not is_path(model):
        return model
    if args.trust_remote_code:
        options["trust_remote_code"] = True
    return load(model, **(options | (args.model_init_kwargs or {})))


def with_quantization(args: Any, model: Any, config: Any) -> None:
    """Adds a ``quantization_config`` to the arguments that the model is loaded with.

    Raises:
        ValueError: a model that is loaded already, or a second configuration.
    """
    if config is None:
        return
    if not is_path(model):
        raise ValueError(
            "quantization_config is for a model that is loaded by its path: pass it to "
            "from_pretrained"
        )
    arguments = args.model_init_kwargs or {}
    if arguments.get("quantization_config") is not None:
        raise ValueError("quantization_config is given twice: leave it out of model_init_kwargs")
    args.model_init_kwargs = {**arguments, "quantization_config": config}


def length_limit(args: Any, model: Any, tokenizer: Any) -> int | None:
    """``max_length``, but at most the limits of model and tokenizer; None: there is no limit."""
    limits = [args.max_length, getattr(tokenizer, "model_max_length", None)]
    if getattr(model, "config", None) is not None:
        limits.append(context_length(model))
    finite = [limit for limit in limits if limit is not None and 0 < limit < NO_LIMIT]
    return min(finite, default=None)


def refuse_processor(processing_class: Any) -> None:
    """Raises TypeError for a processor of more than texts."""
    inner = getattr(processing_class, "tokenizer", None)
    if inner is not None and not isinstance(processing_class, PreTrainedTokenizerBase):
        raise TypeError(
            f"processing_class is a {type(processing_class).__name__}, and only texts are learned "
            "from: pass its tokenizer"
        )


def tokenizer_of(tokenizer: Any, processing_class: Any, model: Any = None, args: Any = None) -> Any:
    """The tokenizer under its old or new name, or else the one saved with the model, whose EOS pads
    if it has no pad token; with the chat template and tokens that the settings name, see
    :mod:`fastrl.trainers.special_tokens`.

    Raises:
        TypeError: a processor of more than texts.
        ValueError: no tokenizer and no path of one, two tokenizers, or one without a pad token.
    """
    if tokenizer is not None and processing_class is not None:
        raise ValueError("pass the tokenizer as processing_class, or as tokenizer, not both")
    chosen = tokenizer if processing_class is None else processing_class
    refuse_processor(chosen)
    chosen = as_fast(chosen)
    if chosen is None:
        path = model if is_path(model) else getattr(model, "name_or_path", "")
        if not path:
            raise ValueError("pass the tokenizer as processing_class")
        trust = getattr(args, "trust_remote_code", False)
        # The model's revision is the tokenizer's, too.
        options = (getattr(args, "model_init_kwargs", None) or {}) if is_path(model) else {}
        revision = options.get("revision")
        chosen = load_tokenizer(path, trust_remote_code=trust, revision=revision)
    if args is not None:
        settle_tokenizer(chosen, args)
    if chosen.pad_token_id is None:
        raise ValueError(
            f"{type(chosen).__name__} has no pad token: set tokenizer.pad_token = "
            "tokenizer.eos_token, say, before making the trainer"
        )
    return chosen
