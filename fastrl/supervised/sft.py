"""SFTTrainer: a language model from texts, without logits of the vocabulary's size."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from fastrl.models.heads import Head, choose_head
from fastrl.models.modes import evaluating
from fastrl.models.scoring import ScoringRequest, score_logits
from fastrl.supervised.adapters import with_adapter
from fastrl.supervised.arguments import SupervisedArguments, setting, tokenizer_of
from fastrl.supervised.packing import choose_packing, pack_dataset
from fastrl.supervised.texts import (
    DataCollatorForCompletionOnlyLM,
    TextCollator,
    prepare_texts,
    targets_of,
)

_OF_OLD = ("infinite", "num_of_sequences", "chars_per_token", "dataset_batch_size")
_TARGETS = ("rows", "targets", "labels")


@dataclass
class SFTConfig(SupervisedArguments):
    """Settings of :class:`SFTTrainer`, beside those of ``transformers.TrainingArguments``."""

    max_length: int | None = setting("Longest text, in tokens; longer ones are cut.", 1024)
    max_seq_length: int | None = setting("An older name of max_length.", None)
    dataset_text_field: str = setting("Column of the texts.", "text")
    packing: bool = setting(
        "Put several texts into a row of max_length tokens; none sees another.", False
    )
    append_eos: bool = setting("End every text with EOS.", True)
    model_init_kwargs: dict | str | None = setting(
        "Keyword arguments of from_pretrained (JSON), where the model is a path.", None
    )

    _VALID_DICT_FIELDS = [*SupervisedArguments._VALID_DICT_FIELDS, "model_init_kwargs"]

    def __post_init__(self) -> None:
        if self.max_seq_length is not None:
            self.max_length, self.max_seq_length = self.max_seq_length, None
        super().__post_init__()
        if self.packing and self.max_length is None:
            raise ValueError("packing needs max_length: how many tokens a row holds")


class SFTTrainer(Trainer):
    """Trains a causal language model on texts.

    loss = -Σ log p(token) / tokens, over the tokens that count: all of a text, or its completion.
    The LM head is fused with the loss (``fastrl_kernels.linear_logprobs``).

    Args:
        model: a causal LM, or its path.
        args: an :class:`SFTConfig`.
        data_collator: a :class:`DataCollatorForCompletionOnlyLM`, or one of your own, which gets
            ``input_ids`` and ``labels``.
        train_dataset, eval_dataset: with a column of texts (``dataset_text_field``), with ``prompt``
            and ``completion``, ``messages``, or ``input_ids``.
        tokenizer, processing_class: the same under its old and its new name.
        peft_config: puts an adapter on the model.
        dataset_text_field, packing, max_seq_length: in place of the configuration's.
        formatting_func: of a row, returns its text; or of a batch of rows, a list of texts.

    Raises:
        ValueError: no pad token, data that cannot be used, a model that cannot pack.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Callable | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        tokenizer: Any = None,
        model_init: Callable | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        preprocess_logits_for_metrics: Callable | None = None,
        peft_config: Any = None,
        dataset_text_field: str | None = None,
        packing: bool | None = None,
        formatting_func: Callable | None = None,
        max_seq_length: int | None = None,
        *,
        processing_class: Any = None,
        **of_old: Any,
    ):
        _refuse_unknown(of_old)
        args = _with_keywords(
            args or SFTConfig(),
            dataset_text_field=dataset_text_field,
            packing=packing,
            max_length=max_seq_length,
        )
        tokenizer = tokenizer_of(tokenizer, processing_class)
        if isinstance(model, str):
            model = _load(model, args.model_init_kwargs)
        if model is not None:
            model = with_adapter(model, peft_config, args)
        completions = None
        if isinstance(data_collator, DataCollatorForCompletionOnlyLM):
            completions, data_collator = data_collator, None
        self._prepare = lambda dataset: prepare_texts(
            dataset,
            tokenizer,
            text_field=args.dataset_text_field,
            max_length=args.max_length,
            formatting_func=formatting_func,
            completions=completions,
            append_eos=args.append_eos,
            num_proc=args.dataset_num_proc,
        )
        train_dataset, eval_dataset = (self._texts(x, args) for x in (train_dataset, eval_dataset))
        if data_collator is None:
            data_collator = TextCollator(tokenizer)
            if args.packing:
                data_collator = choose_packing(model if model is not None else model_init(), tokenizer)
        args.remove_unused_columns = False
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            model_init=model_init,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        # Batches say how many tokens count: the loss is divided by those of a whole step.
        self.model_accepts_loss_kwargs = True
        self._head: Head | None = None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Mean negative log-likelihood; with ``return_outputs`` also the logits of all tokens."""
        if "rows" not in inputs:  # a collator of the user's
            inputs = {**inputs, **targets_of(inputs["labels"])}
        request = ScoringRequest(inputs["rows"], inputs["targets"], values=False)
        given = {k: v for k, v in inputs.items() if k not in _TARGETS} | {"use_cache": False}
        outputs = None
        if return_outputs:
            outputs = model(**given)
            scores = score_logits(outputs.logits.flatten(0, 1)[request.rows], request)
        else:
            scores, _ = self._scoring_head(given)(_Called(model, self._plain(model)), request, given)
        tokens = max(len(request.rows), 1) if num_items_in_batch is None else num_items_in_batch
        loss = -scores.logprobs.sum() / tokens
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over them
        return (loss, outputs) if return_outputs else loss

    def _scoring_head(self, inputs: dict[str, Any]) -> Head:
        """Chosen at the first use, on a few tokens: only then is the model in place."""
        if self._head is None:
            model = self._plain(self.model)
            corner = {"input_ids": inputs["input_ids"][:1, :8], "use_cache": False}
            with evaluating(model):
                self._head = choose_head(model, corner)
        return self._head

    def _plain(self, model: nn.Module) -> Any:
        return self.accelerator.unwrap_model(model, keep_torch_compile=False)

    def _texts(self, dataset: Any, args: Any) -> Any:
        if dataset is None:
            return None
        if isinstance(dataset, dict):
            return {name: self._texts(x, args) for name, x in dataset.items()}
        texts = self._prepare(dataset)
        return pack_dataset(texts, args.max_length) if args.packing else texts


class _Called:
    """Runs a model through what it is wrapped in (DDP, say), and is itself in all else."""

    def __init__(self, wrapped: nn.Module, model: Any):
        self._wrapped, self._model = wrapped, model

    def __call__(self, **inputs: Any) -> Any:
        return self._wrapped(**inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _with_keywords(args: Any, **keywords: Any) -> Any:
    """The configuration with the classic keywords that were given."""
    for name, value in keywords.items():
        if value is not None:
            setattr(args, name, value)
    for name in ("dataset_text_field", "packing", "max_length", "append_eos", "dataset_num_proc"):
        if not hasattr(args, name):  # transformers' own TrainingArguments
            setattr(args, name, getattr(SFTConfig, name))
    args.model_init_kwargs = getattr(args, "model_init_kwargs", None)
    return args


def _refuse_unknown(keywords: dict[str, Any]) -> None:
    for name in keywords:
        if name not in _OF_OLD:
            raise TypeError(f"SFTTrainer has no argument {name!r}")
        warnings.warn(f"{name} has no effect any more: leave it out", FutureWarning, stacklevel=3)


def _load(path: str, kwargs: dict | str | None) -> Any:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": torch.float32, "use_safetensors": True}
    return AutoModelForCausalLM.from_pretrained(path, **(options | dict(kwargs or {})))
