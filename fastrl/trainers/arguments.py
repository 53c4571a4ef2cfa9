"""Training arguments that also take what older documentation passes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from fastrl.config import setting
from fastrl.models.load import load_tokenizer


@dataclass
class SupervisedArguments(TrainingArguments):
    """transformers' TrainingArguments; ``evaluation_strategy`` is the old name of
    ``eval_strategy``, and ``report_to=None`` reports to no tracker."""

    evaluation_strategy: str | None = setting("Deprecated: use eval_strategy.", None)
    max_length: int | None = setting("Longest sequence, in tokens; None: the model's limit.", 512)
    dataset_num_proc: int | None = setting("Processes for preparing the data set.", None)
    model_init_kwargs: dict | str | None = setting(
        "Keyword arguments of from_pretrained (JSON), where the model is a path.", None
    )
    # The data sets' columns are these trainers' own, not arguments of the model.
    remove_unused_columns: bool = setting("Drop columns that the model does not take.", False)

    _VALID_DICT_FIELDS = [  # noqa: RUF012 - not a field, there and here
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
    ]

    def __post_init__(self) -> None:
        if self.evaluation_strategy is not None:
            warnings.warn(
                "evaluation_strategy is deprecated: use eval_strategy", FutureWarning, stacklevel=3
            )
            self.eval_strategy = self.evaluation_strategy
            self.evaluation_strategy = None  # one place says it from here on
        if self.report_to is None:
            self.report_to = "none"
        super().__post_init__()
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length must be at least 1 or None, got {self.max_length}")


def tokenizer_of(tokenizer: Any, processing_class: Any, model: Any = None) -> Any:
    """Whichever of the two names was used, or else the tokenizer beside the model's weights, whose
    EOS then pads where it has no pad token.

    Raises:
        ValueError: none or two, or one without a pad token.
    """
    if tokenizer is not None and processing_class is not None:
        raise ValueError("pass the tokenizer as processing_class, or as tokenizer, not both")
    found = tokenizer if processing_class is None else processing_class
    if found is None:
        path = model if is_path(model) else getattr(model, "name_or_path", "")
        if not path:
            raise ValueError("pass the tokenizer as processing_class")
        found = load_tokenizer(path)
    if found.pad_token_id is None:
        raise ValueError(
            f"{type(found).__name__} has no pad token: set tokenizer.pad_token = "
            "tokenizer.eos_token, say, before making the trainer"
        )
    return found


def is_path(model: Any) -> bool:
    """Whether a model is given by its name or folder."""
    return isinstance(model, str) or hasattr(model, "__fspath__")
