"""Training arguments that also take what older documentation passes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments


def setting(text: str, default: Any) -> Any:
    """A field whose sentence shows up in ``--help``."""
    return field(default=default, metadata={"help": text})


@dataclass
class SupervisedArguments(TrainingArguments):
    """transformers' TrainingArguments; ``evaluation_strategy`` is the old name of
    ``eval_strategy``, and ``report_to=None`` reports to no tracker."""

    evaluation_strategy: str | None = setting("Deprecated: use eval_strategy.", None)
    max_length: int | None = setting("Longest sequence, in tokens; None sets no limit.", 512)
    dataset_num_proc: int | None = setting("Processes for preparing the data set.", None)
    # The data sets' columns are these trainers' own, not arguments of the model.
    remove_unused_columns: bool = setting("Drop columns that the model does not take.", False)

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


def tokenizer_of(tokenizer: Any, processing_class: Any) -> Any:
    """Whichever of the two names was used.

    Raises:
        ValueError: neither or both, or a tokenizer without a pad token.
    """
    if (tokenizer is None) == (processing_class is None):
        raise ValueError(
            "pass the tokenizer as processing_class"
            + ("" if tokenizer is None else ", or as tokenizer, not both")
        )
    found = tokenizer if processing_class is None else processing_class
    if found.pad_token_id is None:
        raise ValueError(
            f"{type(found).__name__} has no pad token: set tokenizer.pad_token = "
            "tokenizer.eos_token, say, before making the trainer"
        )
    return found
