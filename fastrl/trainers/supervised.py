"""What the trainers on pairs and on texts share."""

from __future__ import annotations

import copy
import dataclasses
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from datasets import Dataset, IterableDataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer

from fastrl.models.utils import check_trainable, context_length, warn_of_lost_updates
from fastrl.run.model_card import OwnModelCard
from fastrl.trainers.arguments import SupervisedArguments, is_path

MIXED_PRECISION = "set bf16=True (commands: --dtype float32 --bf16 true)"


class SupervisedTrainer(OwnModelCard, Trainer):
    """transformers' Trainer, whose models and data sets are made ready wherever they come in: at
    construction, from ``model_init``, in ``evaluate`` and in ``predict``.

    Subclasses say how, in :meth:`ready_model` and :meth:`ready_data`, and set what these need
    before ``super().__init__``.
    """

    args: Any
    model: Any
    processing_class: Any

    def __init__(self, *, train_dataset: Any, eval_dataset: Any, args: Any, **rest: Any):
        if args.label_smoothing_factor:
            raise ValueError(
                f"{type(self).__name__} does not smooth labels: leave label_smoothing_factor at 0"
            )
        if args.remove_unused_columns and isinstance(args, SupervisedArguments):
            warnings.warn(
                "remove_unused_columns=True is ignored: the data sets' columns are this trainer's "
                "own, not arguments of the model; leave it out",
                stacklevel=3,
            )
        self._trains = train_dataset is not None
        if self._trains and rest.get("model") is not None:
            check_trainable(rest["model"])
        args.remove_unused_columns = False
        # Without a GPU torch would warn of it.
        args.dataloader_pin_memory = args.dataloader_pin_memory and args.device.type != "cpu"
        self._prepared: weakref.WeakSet = weakref.WeakSet()
        with args.main_process_first(desc="preparing the data"):
            train = None if train_dataset is None else self.ready_data(train_dataset, True)
            if isinstance(eval_dataset, dict):
                evaluation: Any = {name: self.once_ready(x) for name, x in eval_dataset.items()}
            else:
                evaluation = None if eval_dataset is None else self.once_ready(eval_dataset)
        super().__init__(args=args, train_dataset=train, eval_dataset=evaluation, **rest)
        if self._trains:
            warn_of_lost_updates(self.model, MIXED_PRECISION, stacklevel=3)

    def ready_model(self, model: Any) -> Any:
        """The model as it is trained."""
        raise NotImplementedError

    def ready_data(self, dataset: Any, training: bool) -> Any:
        """The data set as the collator reads it."""
        raise NotImplementedError

    def call_model_init(self, trial: Any = None) -> nn.Module:
        model = self.ready_model(super().call_model_init(trial))
        if self._trains:
            check_trainable(model)
        return model

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        known = eval_dataset is None or isinstance(eval_dataset, str)
        return super().get_eval_dataloader(eval_dataset if known else self.once_ready(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        return super().get_test_dataloader(self.once_ready(test_dataset))

    def once_ready(self, dataset: Any) -> Any:
        """A data set for evaluation, made ready unless it is."""
        if any(dataset is known for known in self._prepared):
            return dataset
        ready = self.ready_data(dataset, False)
        if ready is not dataset:
            self._prepared.add(ready)
        return ready


def settings_of(args: Any, kind: type, **keywords: Any) -> Any:
    """A copy of the arguments with the keywords that were given; transformers' own arguments get
    the other settings' defaults."""
    args = kind() if args is None else copy.copy(args)
    for field in dataclasses.fields(kind):
        if not hasattr(args, field.name):
            setattr(args, field.name, field.default)
    for name, value in keywords.items():
        if value is not None:
            setattr(args, name, value)
    return args


def loaded(model: Any, load: Callable[..., Any], args: Any, **options: Any) -> Any:
    """A model from its path, by a function of :mod:`fastrl.models.load`; others as they are."""
    if not is_path(model):
        return model
    return load(model, **(options | (args.model_init_kwargs or {})))


def longest(args: Any, model: Any, tokenizer: Any) -> int | None:
    """``max_length``, as far as model and tokenizer go; None where nothing limits it."""
    limits = (args.max_length, getattr(tokenizer, "model_max_length", None), positions_of(model))
    # A tokenizer that knows no limit says 10^30.
    return min((limit for limit in limits if limit is not None and limit < 10**9), default=None)


def positions_of(model: Any) -> int | None:
    config = getattr(model, "config", None)
    return None if config is None else context_length(model)


def as_dataset(dataset: Any) -> Dataset:
    """A data set whose rows are Python values.

    Args:
        dataset: a ``datasets.Dataset``, a list of rows, or another data set of rows by index.

    Raises:
        TypeError: something else.
        ValueError: an empty one.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{type(dataset).__name__} cannot be read by index: load it without streaming"
        )
    if isinstance(dataset, dict):
        raise TypeError(f"several data sets were passed: choose one of {', '.join(dataset)}")
    if len(dataset) == 0:
        raise ValueError("the data set is empty")
    if not isinstance(dataset, Dataset):
        dataset = Dataset.from_list([dataset[i] for i in range(len(dataset))])
    return dataset.with_format(None)
