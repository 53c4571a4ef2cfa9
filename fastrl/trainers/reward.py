"""RewardTrainer: a reward model from pairs of a chosen and a rejected text."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import TrainingArguments

import fastrl_kernels
from fastrl.core import set_seed
from fastrl.data import reads_eos
from fastrl.data.choose_padding import classifier_side, rewards_of_samples
from fastrl.data.collators import ID_COLUMNS, SIDES, RewardDataCollatorWithPadding, both_sides
from fastrl.data.encode import closes_texts, end_token
from fastrl.data.padding_free import join_sides, unpadded
from fastrl.data.prepare import missing_token_columns, prepare_pairs, token_columns, with_new_names
from fastrl.data.tables import is_stream
from fastrl.models.load import load_reward_model, with_adapter
from fastrl.models.model_files import is_path
from fastrl.models.reward_head import (
    give_padding,
    padding_of,
    rewards_at,
    rewards_of_padded,
    score_head,
)
from fastrl.models.utils import evaluating, need_peft, without_dropout
from fastrl.overrides import check_overrides
from fastrl.run.metric_means import mean_of
from fastrl.run.model_card import REWARD
from fastrl.trainers import rehearse
from fastrl.trainers.passes import fill
from fastrl.trainers.plan.passes import PassSize
from fastrl.trainers.plan.report import Plan
from fastrl.trainers.special_tokens import settle_model
from fastrl.trainers.supervised import (
    SupervisedArguments,
    SupervisedTrainer,
    length_limit,
    load_if_path,
    setting,
    settings_of,
    tokenizer_of,
    with_quantization,
)

_SHOWN = ("chosen_text", "rejected_text", "logits")  # columns of shown pairs


@dataclass
class RewardConfig(SupervisedArguments):
    """Settings of :class:`RewardTrainer`, beside those of ``transformers.TrainingArguments``."""

    max_length: int | None = setting(
        "Longest side, in tokens; pairs of texts with a longer one are dropped. None: the model's "
        "limit.",
        512,
        within="[1, inf)",
    )
    center_rewards_coefficient: float | None = setting(
        "Weight of mean((r_chosen + r_rejected)²), which keeps rewards around 0.",
        None,
        within="[0, inf)",
    )
    append_eos: bool | None = setting(
        "End every side with EOS; saved with the model, which then reads texts in the same way. "
        "None: as the model was trained before, or else as its tokenizer ends texts.",
        None,
    )
    disable_dropout: bool = setting("Train without dropout.", False)
    num_print_samples: int = setting(
        "Pairs to show at each evaluation; -1 is all of them.", 4, within="[-1, inf)"
    )


def compute_accuracy(eval_pred: Any) -> dict[str, float]:
    """Share of pairs whose preferred side has the higher probability; ties are wrong.

    Args:
        eval_pred: an ``EvalPrediction``, or a tuple, of arrays or tensors: P(chosen) and
            P(rejected) or the two rewards, [N, 2]; and the index of the preferred side, [N], by
            default 0 (the chosen).
    """
    predictions, labels = (_as_array(x) for x in (*eval_pred,)[:2])
    if labels is None:
        labels = np.zeros(len(predictions))
    ties = int(np.sum(predictions[:, 0] == predictions[:, 1]))
    if ties:
        warnings.warn(
            f"{ties} of {len(predictions)} pairs have equal rewards: they count as wrong",
            stacklevel=2,
        )
    lead = predictions[:, 0] - predictions[:, 1]
    return {"accuracy": float(np.mean(np.where(labels.astype(bool), -lead, lead) > 0))}


def _as_array(x: Any) -> Any:
    return x.detach().float().cpu().numpy() if isinstance(x, Tensor) else x


class RewardTrainer(SupervisedTrainer):
    """Trains a model with one label to give the chosen side of a pair more reward than the other.

    loss = -log σ(r_c - r_r - margin) + c·(r_c + r_r)², mean over pairs (Bradley–Terry; the margin
    as in Llama 2, arXiv:2307.09288; c is ``center_rewards_coefficient``). Both sides go through the
    model in one forward. If the model has several labels, each is trained with this loss, and
    evaluation compares their means, as in TRL 0.11, with a warning.

    Prompts and answers are tokenised apart. Whether answers end with EOS is saved with the model
    (:mod:`fastrl.data.reads_eos`), which then reads them in the same way.

    Args:
        model: an ``AutoModelForSequenceClassification`` with ``num_labels=1``, or its path; a saved
            adapter of one, by its path, is trained further.
        args: a :class:`RewardConfig`, or transformers' TrainingArguments.
        data_collator: by default :class:`RewardDataCollatorWithPadding`; another one gets the rows
            of the data sets as they are, and must make the same kind of batches.
        train_dataset, eval_dataset: see :func:`fastrl.data.prepare.prepare_pairs`.
        tokenizer, processing_class: the tokenizer, under its old or new name; by default the one
            saved with the model, or none beside a data collator of another class.
        compute_metrics: by default :func:`compute_accuracy`.
        max_length: deprecated; set it in ``args``.
        peft_config: adds an adapter to the model, which is prepared for it if it is quantised.
        quantization_config: for loading the model by its path.

    Logs ``accuracy``, ``margin`` (r_c - r_r), ``mean_reward`` and the means of batches'
    ``min_reward`` and ``max_reward`` since the last log, and ``num_tokens`` of the run so far; an
    evaluation has the means, and the extremes, of all pairs.

    Raises:
        FileNotFoundError: a path without a model.
        TypeError: an argument that is refused.
        ValueError: no weight to train, no pad token, ``append_eos`` of an EOS that pads a decoder's
            texts, data that cannot be used; from :meth:`train`, token columns that the data
            collator cannot read.
    """

    _tag_names: ClassVar[list[str]] = ["fastrl", "trl", "reward-trainer"]  # the model's, on the Hub
    args_class: ClassVar[type] = RewardConfig
    rehearsed_as = rehearse.REWARD
    padding_scores = rewards_of_samples
    example: ClassVar[str] = "pair"
    method = REWARD

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
        quantization_config: Any = None,
        optimizer_cls_and_kwargs: Any = None,
    ):
        check_overrides(type(self))
        self.check_keywords(optimizer_cls_and_kwargs=optimizer_cls_and_kwargs)
        self.use_reward_data_collator = data_collator is None
        _check_classic(args, max_length, self.use_reward_data_collator)
        if peft_config is not None:
            try:
                need_peft("peft_config")
            except ImportError as error:
                raise ValueError(str(error)) from None
        args = settings_of(args, RewardConfig, max_length=max_length)
        with_quantization(args, model, quantization_config)
        self._own_collator = not isinstance(
            data_collator, RewardDataCollatorWithPadding | type(None)
        )
        if not (self._own_collator and tokenizer is processing_class is None):
            processing_class = tokenizer_of(tokenizer, processing_class, model, args)
        self.args, self.processing_class = args, processing_class  # for prepare_model
        self._peft_config = peft_config
        self._said_own_collator = False
        self._append_eos = args.append_eos
        self._padded_on: str | None = "right"  # the side where texts that need padding get it
        self._reads_eos: bool | None = None
        self._scores_at_eos = False  # whether the model reads a text's reward at its EOS
        set_seed(args.seed)  # new weights are drawn: a head's, an adapter's
        if model is not None:
            path, model = model, load_if_path(model, load_reward_model, args)
            if is_path(path):
                reads_eos.load_from_adapter(model, path)
            model = self.prepare_model(model)
            config = getattr(model, "config", None)
            self._scores_at_eos = bool(getattr(config, "is_encoder_decoder", False))
            if self._append_eos is None:
                self._append_eos = reads_eos.recorded(model)
        if self._append_eos is None:
            self._append_eos = processing_class is not None and closes_texts(processing_class)
        self._max_length = length_limit(args, model, processing_class)
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator
            or RewardDataCollatorWithPadding(
                processing_class, pad_to_multiple_of=args.pad_to_multiple_of
            ),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            compute_metrics=compute_metrics or compute_accuracy,
            callbacks=callbacks,
            optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        if train_dataset is not None:
            reads_eos.record(self.model, self._reads_eos)
        self.can_return_loss = True  # evaluation of pairs has a loss
        self.model_accepts_loss_kwargs = False  # the loss is a mean over the batch

    def plan(  # type: ignore[override]
        self, tokens: int, passes: PassSize | None = None, device: str | None = None
    ) -> Plan:
        """The plan of the memory of training on texts of at most ``tokens`` tokens, two in a pair,
        see :meth:`fastrl.trainers.base.BaseTrainer.plan`."""
        return rehearse.plan_of(self, (tokens,), passes, device)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        model = super().call_model_init(trial)
        reads_eos.record(model, self._reads_eos)
        return model

    @property
    def tokenizer(self) -> Any:
        """``processing_class``, by its older name."""
        return self.processing_class

    def prepare_model(self, model: Any) -> Any:
        """Checks a model; returns it, with an adapter if there is a ``peft_config``."""
        config = getattr(model, "config", None)
        labels = getattr(config, "num_labels", 1)
        if labels != 1:
            warnings.warn(
                f"the model has {labels} labels, a reward model has one: each label is trained as "
                "a reward, and their mean is what evaluation compares; load the model with "
                "AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)",
                stacklevel=3,
            )
        if config is not None and self.processing_class is not None:
            give_padding(model, self.processing_class)
            adapts = self._peft_config is not None or hasattr(model, "peft_config")
            settle_model(model, self.processing_class, self.args, adapts)
            self._check_end(model)
        model = with_adapter(model, self._peft_config, self.args)
        if self.args.disable_dropout:
            without_dropout(model)
        if hasattr(model, "add_model_tags"):
            model.add_model_tags([*self._tag_names])
        return model

    def _check_end(self, model: Any) -> None:
        """Raises ValueError where ``append_eos`` is on, and the model takes EOS for padding."""
        skipped = None if score_head(model) is None else padding_of(model)
        if self.args.append_eos and skipped == end_token(self.processing_class):
            raise ValueError(
                "append_eos=True changes nothing: EOS is the pad token, and a decoder's reward is "
                "read at its last token that is no padding; name a pad token that texts lack, "
                "pad_token='<pad>', say, or leave append_eos out"
            )

    def prepare_data(self, dataset: Any, training: bool) -> Any:
        """A data set with token columns, see :func:`fastrl.data.prepare.prepare_pairs`; ``dataset``
        itself for a collator of a user's, or, with a warning, if it has only some such columns."""
        if self._own_collator:
            return dataset
        dataset = with_new_names(dataset)
        missing = missing_token_columns(dataset)
        if missing:
            warnings.warn(
                f"the data set has token columns, but lacks {', '.join(missing)}: training on it "
                "fails unless trainer.data_collator is replaced; rename them with "
                "dataset.rename_column",
                stacklevel=5,
            )
            return dataset
        pairs = prepare_pairs(
            dataset,
            self.processing_class,
            self._max_length,
            self.args.dataset_num_proc,
            add_eos=self._append_eos,
        )
        if training and not token_columns(dataset):
            end = end_token(self.processing_class)  # a chat template may write it, too
            first = islice(pairs, 20)
            self._reads_eos = all(row[ID_COLUMNS[0]][-1] == end for row in first)
            if self._scores_at_eos and not self._reads_eos:
                raise ValueError(
                    "an encoder–decoder scores a text at its EOS, and these have none: pass "
                    "append_eos=True (commands: --append-eos true)"
                )
        return pairs

    def write_model(self, folder: Path) -> None:
        super().write_model(folder)
        if self.args.should_save:
            reads_eos.save_beside_adapter(self.accelerator.unwrap_model(self.model), folder)

    def sizes(self, dataset: Any) -> Iterable[int]:
        if self._own_collator or is_stream(dataset):
            return ()
        names = token_columns(dataset)
        sides = (dataset[name] for name in names if "mask" not in name)
        pairs = zip(*(map(len, side) for side in sides), strict=True)
        if not self.args.padding_free:
            return (2 * self.padded(max(pair)) for pair in pairs)
        return map(sum, pairs)

    def examples_in(self, batch: Any) -> int | None:
        mask = batch.get("attention_mask_chosen") if isinstance(batch, Mapping) else None
        return None if mask is None else len(mask)

    def micro_batches(self, inputs: Any, most: int) -> list[tuple[Any, float]]:
        masks = [inputs.get(f"attention_mask_{side}") for side in SIDES]
        count = None if masks[0] is None else len(masks[0])
        tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
        if count is None or any(len(x) != count for x in tensors.values()):
            raise ValueError(
                "micro_batch_tokens splits batches of tensors with a row for each pair, and the "
                f"data collator makes {', '.join(inputs)}: leave it out"
            )
        chosen, rejected = masks
        if self._is_padding_free:
            sizes = (chosen.sum(-1) + rejected.sum(-1)).tolist()
        else:
            sizes = [2 * max(chosen.shape[1], rejected.shape[1])] * count
        return [
            ({**inputs, **{name: x[part] for name, x in tensors.items()}}, len(part) / count)
            for part in fill(sizes, most, self.example)
        ]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The mean loss of a batch times :attr:`share`; with ``return_outputs`` the mean loss, and
        both sides' rewards, [B, labels] each."""
        if not (self.use_reward_data_collator or self._said_own_collator):
            self._said_own_collator = True
            warnings.warn(
                "the loss is of batches that a data_collator of your own makes: it reads those of "
                "RewardDataCollatorWithPadding, so make the same, or override compute_loss",
                stacklevel=2,
            )
        rewards = self._rewards(model, inputs)
        chosen, rejected = rewards.reshape(len(rewards), -1).chunk(2)
        losses = self._losses(chosen, rejected, inputs.get("margin"))
        if self.model.training:
            self._note(inputs, chosen.detach(), rejected.detach())
        if return_outputs:
            return losses.mean(), {"rewards_chosen": chosen, "rewards_rejected": rejected}
        return losses.mean() if self.share == 1 else losses.mean() * self.share

    def _note(self, inputs: dict[str, Any], chosen: Tensor, rejected: Tensor) -> None:
        """Adds a batch to the metrics of training."""
        if not self.share:  # the batch does not count
            return
        metrics = self._metrics["train"]
        for side in SIDES:
            mask = inputs.get(f"attention_mask_{side}")
            if isinstance(mask, Tensor):
                metrics.count("num_tokens", mask.sum())
        sides = torch.stack([chosen.float().mean(-1), rejected.float().mean(-1)])  # [2, B]
        lead = sides[0] - sides[1]
        means = {"accuracy": lead > 0, "margin": lead, "mean_reward": sides}
        metrics.pool({name: mean_of(x.flatten()) for name, x in means.items()}, of_none=0.0)
        metrics.pool_extremes("min_reward", "max_reward", sides)

    def held_out_metrics(self, counts: Tensor, columns: Tensor) -> dict[str, float]:
        chosen, rejected = columns.T
        metrics = {
            "accuracy": (chosen > rejected).double().mean(),
            "margin": (chosen - rejected).mean(),
            "mean_reward": columns.mean(),
            "min_reward": columns.min(),
            "max_reward": columns.max(),
        }
        return dict(zip(metrics, torch.stack([*metrics.values()]).tolist(), strict=True))

    def _rewards(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Rewards [2B, labels] of all chosen sides, then of all rejected ones."""
        chosen, rejected = (
            unpadded(inputs[f"input_ids_{side}"], inputs[f"attention_mask_{side}"])
            for side in SIDES
        )
        whole = all(len(side) for side in (*chosen, *rejected))
        plain = self.accelerator.unwrap_model(model)
        padding = padding_of(plain)
        if self._is_padding_free and whole:
            model_pass = join_sides([chosen, rejected], self.args.device, padding)
            return rewards_at(model, plain, model_pass.rows, **model_pass.inputs)
        return rewards_of_padded(model, both_sides(inputs, padding), self._padded_on, padding)

    @cached_property
    def _is_padding_free(self) -> bool:
        """Whether the model runs pairs without padding; tested at the first use, when the model is
        on its device."""
        has_score_head = score_head(self.accelerator.unwrap_model(self.model)) is not None
        packs = has_score_head and self.packing(self.model_wrapped)
        if not packs:
            with self.accelerator.autocast():
                self._padded_on = classifier_side(
                    self.model_wrapped,
                    self.args.device,
                    self.lowest_precision,
                    anywhere=self.processes.any if self.processes.count > 1 else None,
                )
        return packs

    def _losses(self, chosen: Tensor, rejected: Tensor, margin: Tensor | None) -> Tensor:
        """The loss of each pair, [B, labels]."""
        if margin is not None:  # [B] or [B, 1]: all labels of a pair have one margin
            margin = margin.reshape(len(margin), -1).expand_as(chosen).flatten()
        return fastrl_kernels.reward_loss(
            chosen.flatten(),
            rejected.flatten(),
            margin,
            center_coef=self.args.center_rewards_coefficient or 0.0,
        ).view_as(chosen)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Loss, P(chosen) and P(rejected) [B, 2] by a softmax over the two rewards (means over the
        model's labels), and zeros [B], the index of the chosen side; the last two are None with
        ``prediction_loss_only``."""
        inputs = self.ready_batch(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, rewards = self.compute_loss(model, inputs, return_outputs=True)
            chosen, rejected = rewards.values()
            losses = self._losses(chosen, rejected, inputs.get("margin"))
            if "compute_loss" in self.overrides:
                losses = loss.expand_as(losses)
        sides = [reward.float().mean(-1) for reward in rewards.values()]
        self.held_out(losses.mean(-1), torch.ones(len(losses), device=losses.device), *sides)
        if prediction_loss_only:
            return loss.detach(), None, None
        probabilities = torch.stack(sides, dim=-1).softmax(-1)
        return loss.detach(), probabilities, probabilities.new_zeros(len(probabilities))

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        *,
        num_print_samples: int | None = None,
    ) -> dict[str, float]:
        """Evaluates as ``Trainer`` does, after printing some pairs, by default as ``args`` say."""
        if num_print_samples is None:
            num_print_samples = getattr(self.args, "num_print_samples", 4)
        datasets = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(datasets, dict):
            metrics: dict[str, float] = {}
            for name, part in datasets.items():
                metrics |= self.evaluate(
                    name if eval_dataset is None else part,
                    ignore_keys,
                    f"{metric_key_prefix}_{name}",
                    num_print_samples=num_print_samples,
                )
            return metrics
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self.prepare_eval_data(eval_dataset)
        self.visualize_samples(num_print_samples, eval_dataset)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def visualize_samples(self, num_print_samples: int, eval_dataset: Any = None) -> None:
        """Prints a table of evaluation pairs, with P(chosen) and P(rejected) as ``logits``; -1: all
        pairs. Where the run reports to wandb, all pairs of the batches that were run go there."""
        if num_print_samples == 0 or self.processing_class is None:
            return
        rows: list[tuple[str, str, list[float]]] = []
        loader = self.get_eval_dataloader(eval_dataset)
        with evaluating(self.model):
            for inputs in loader:
                _, probabilities, _ = self.prediction_step(self.model, inputs, False)
                assert probabilities is not None
                texts = (
                    self.processing_class.batch_decode(
                        inputs[f"input_ids_{side}"], skip_special_tokens=True
                    )
                    for side in SIDES
                )
                rounded = [[round(p, 4) for p in pair] for pair in probabilities.tolist()]
                rows += gather_object(list(zip(*texts, rounded, strict=True)))
                if 0 <= num_print_samples <= len(rows):
                    break
        shown: Any = loader.dataset
        if not is_stream(shown):
            rows = rows[: len(shown)]  # without the rows that fill up the last batch
        if self.accelerator.is_main_process:
            _print_pairs(rows if num_print_samples < 0 else rows[:num_print_samples])
            if "wandb" in self.args.report_to:
                import wandb

                if wandb.run is not None:
                    table = wandb.Table(columns=[*_SHOWN], data=[[*row] for row in rows])
                    wandb.log({"completions": table})


def _check_classic(args: Any, max_length: int | None, collates: bool) -> None:
    """Gives the warnings and errors of TRL's classic trainer about these arguments.

    Args:
        collates: whether the data collator is the trainer's own.

    Raises:
        ValueError: ``max_length`` is given twice.
    """
    plain = type(args) is TrainingArguments
    limit = None if plain else getattr(args, "max_length", None)
    if max_length is not None and limit not in (None, RewardConfig.max_length):
        raise ValueError(
            f"max_length is given twice, {max_length} and {limit} in args: set it in RewardConfig "
            "alone"
        )
    if plain:
        warnings.warn(
            "TrainingArguments as args is deprecated: pass a fastrl.RewardConfig",
            FutureWarning,
            stacklevel=3,
        )
    if max_length is not None:
        warnings.warn(
            "max_length as an argument is deprecated: set it in RewardConfig",
            FutureWarning,
            stacklevel=3,
        )
    if plain and collates and max_length is None:
        warnings.warn(
            f"max_length is not given: {RewardConfig.max_length} is taken; set it in RewardConfig",
            stacklevel=3,
        )
    if plain and collates and args.remove_unused_columns:
        warnings.warn(
            "remove_unused_columns=True would remove the columns of the pairs: it is set to False; "
            "do so in RewardConfig",
            stacklevel=3,
        )


def _print_pairs(rows: list[tuple[str, str, list[float]]]) -> None:
    from rich.table import Table

    from fastrl.run.terminal import plain, run_console

    table = Table(*_SHOWN, show_lines=True)
    for chosen, rejected, probabilities in rows:
        table.add_row(plain(chosen), plain(rejected), plain(str(probabilities)))
    run_console().print(table)
