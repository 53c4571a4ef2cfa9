"""RewardTrainer: a reward model from pairs of a preferred and another text."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_pt_utils import nested_detach

import fastrl_kernels
from fastrl.supervised.adapters import with_adapter
from fastrl.supervised.arguments import SupervisedArguments, setting, tokenizer_of
from fastrl.supervised.pairs import (
    RewardDataCollatorWithPadding,
    both_sides,
    prepare_pairs,
)


@dataclass
class RewardConfig(SupervisedArguments):
    """Settings of :class:`RewardTrainer`, beside those of ``transformers.TrainingArguments``."""

    center_rewards_coefficient: float | None = setting(
        "Weight of mean((r_chosen + r_rejected)²), which keeps rewards around 0.", None
    )


def compute_accuracy(eval_pred: Any) -> dict[str, float]:
    """Share of pairs whose chosen side has the higher probability, [N, 2]; ties are wrong."""
    predictions, _ = eval_pred
    ties = int(np.sum(predictions[:, 0] == predictions[:, 1]))
    if ties:
        warnings.warn(
            f"{ties} of {len(predictions)} pairs have equal rewards: they count as wrong",
            stacklevel=2,
        )
    return {"accuracy": float(np.mean(predictions[:, 0] > predictions[:, 1]))}


class RewardTrainer(Trainer):
    """Trains a model with one label to score the chosen side of each pair above the rejected one.

    loss = -log σ(r_c - r_r - margin) + c·(r_c + r_r)², mean over pairs (Bradley–Terry; the margin as
    in Llama 2, arXiv:2307.09288; c is ``center_rewards_coefficient``). Both sides go through the
    model in one forward.

    Args:
        model: an ``AutoModelForSequenceClassification`` with ``num_labels=1``, or its path.
        args: a :class:`RewardConfig`, or transformers' TrainingArguments.
        data_collator: by default :class:`RewardDataCollatorWithPadding`.
        train_dataset, eval_dataset: see :func:`fastrl.supervised.pairs.prepare_pairs`.
        tokenizer, processing_class: the same under its old and its new name.
        compute_metrics: by default :func:`compute_accuracy`.
        max_length: deprecated, in place of the configuration's.
        peft_config: puts an adapter on the model; one that is quantised is prepared for it.

    Raises:
        ValueError: more than one label, no pad token, data that cannot be used.
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
        max_length: int | None = None,
        peft_config: Any = None,
        *,
        processing_class: Any = None,
    ):
        args = args or RewardConfig()
        self.center_coef = getattr(args, "center_rewards_coefficient", None) or 0.0
        tokenizer = tokenizer_of(tokenizer, processing_class)
        if isinstance(model, str):
            model = _load(model)
        if model is not None:
            model = with_adapter(self._checked(model, tokenizer), peft_config, args)
        if max_length is None:
            max_length = getattr(args, "max_length", 512)
        if data_collator is None:
            data_collator = RewardDataCollatorWithPadding(tokenizer)
            train_dataset, eval_dataset = (
                self._prepared(x, tokenizer, max_length, args)
                for x in (train_dataset, eval_dataset)
            )
        args.remove_unused_columns = False
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            model_init=model_init and (lambda *x: self._checked(model_init(*x), tokenizer)),
            compute_metrics=compute_metrics or compute_accuracy,
            callbacks=callbacks,
            optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self.can_return_loss = True  # of pairs, for evaluation
        self.model_accepts_loss_kwargs = False  # the loss is a mean over the batch

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The mean loss of a batch; with ``return_outputs`` also both sides' rewards [B, 1]."""
        rewards = model(**both_sides(inputs), return_dict=True)["logits"]
        chosen, rejected = rewards.chunk(2)
        loss = fastrl_kernels.reward_loss(
            chosen.squeeze(-1),
            rejected.squeeze(-1),
            inputs.get("margin"),
            center_coef=self.center_coef,
        ).mean()
        if return_outputs:
            return loss, {"rewards_chosen": chosen, "rewards_rejected": rejected}
        return loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Loss, P(chosen) and P(rejected) [B, 2] by a softmax over the two rewards, labels 0."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, rewards = self.compute_loss(model, inputs, return_outputs=True)
        if prediction_loss_only:
            return loss.detach(), None, None
        probabilities = torch.cat(list(nested_detach(rewards).values()), dim=-1).float().softmax(-1)
        return loss.detach(), probabilities, probabilities.new_zeros(len(probabilities))

    def evaluate(self, *args: Any, num_print_samples: int = 4, **kwargs: Any) -> dict[str, float]:
        """As in ``Trainer``; prints some pairs first (``num_print_samples``; -1 is all)."""
        self.visualize_samples(num_print_samples)
        return super().evaluate(*args, **kwargs)

    def visualize_samples(self, num_print_samples: int) -> None:
        """A table of evaluation pairs and the model's probabilities; -1 shows all of them."""
        from rich.table import Table

        from fastrl.report import run_console

        if num_print_samples == 0 or self.eval_dataset is None:
            return
        table = Table("chosen", "rejected", "P(chosen)", "P(rejected)", show_lines=True)
        self.model.eval()
        for inputs in self.get_eval_dataloader():
            _, probabilities, _ = self.prediction_step(self.model, inputs, False)
            assert probabilities is not None
            texts = [
                self.processing_class.batch_decode(
                    inputs[f"input_ids_{side}"], skip_special_tokens=True
                )
                for side in ("chosen", "rejected")
            ]
            for chosen, rejected, pair in zip(*texts, probabilities.tolist(), strict=True):
                if table.row_count == num_print_samples:
                    break
                table.add_row(chosen, rejected, *(f"{p:.4f}" for p in pair))
            if table.row_count == num_print_samples:
                break
        if self.accelerator.is_main_process:
            run_console().print(table)

    def _prepared(self, dataset: Any, tokenizer: Any, max_length: int | None, args: Any) -> Any:
        if dataset is None:
            return None
        num_proc = getattr(args, "dataset_num_proc", None)
        if isinstance(dataset, dict):
            return {
                name: prepare_pairs(x, tokenizer, max_length, num_proc)
                for name, x in dataset.items()
            }
        return prepare_pairs(dataset, tokenizer, max_length, num_proc)

    @staticmethod
    def _checked(model: Any, tokenizer: Any) -> Any:
        labels = getattr(model.config, "num_labels", 1)
        if labels != 1:
            raise ValueError(
                f"the model has {labels} labels, a reward model has one: load it with "
                "AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)"
            )
        if model.config.pad_token_id is None:
            # By it a decoder's classifier finds each sequence's last token.
            model.config.pad_token_id = tokenizer.pad_token_id
        return model


def _load(path: str) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=1, use_safetensors=True
    )
