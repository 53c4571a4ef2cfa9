"""SFTTrainer: supervised fine-tuning of a language model, with the loss fused with its head."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import BatchEncoding, DataCollatorForLanguageModeling
from transformers.trainer_utils import IntervalStrategy

from fastrl.config import parse_json
from fastrl.core import set_seed
from fastrl.data.collators import DataCollatorForCompletionOnlyLM, TextCollator, targets_of
from fastrl.data.padding_free import join_texts, right_padded
from fastrl.data.prepare import KEEP_END, KEEP_START, check_ready, prepare_texts, tokenised_rows
from fastrl.data.sft_packing import (
    BFD,
    BFD_SPLIT,
    PACKINGS,
    JoinedCollator,
    PackedCollator,
    PackedTexts,
    are_packed,
    choose_collator,
    packed,
)
from fastrl.data.tables import is_stream
from fastrl.data.trl_rows import ConstantLengthDataset
from fastrl.eras import todays
from fastrl.models.adapters import virtual_tokens
from fastrl.models.attention import Attention, replaced
from fastrl.models.load import load_language_model, with_adapter
from fastrl.models.routing import computed_aux_loss
from fastrl.models.scorer import TokenScorer
from fastrl.models.scoring import ScoringRequest, TokenNLL, TokenScores, score_logits
from fastrl.overrides import check_overrides
from fastrl.run.metric_means import mean_of
from fastrl.run.model_card import SFT
from fastrl.trainers import rehearse
from fastrl.trainers.passes import fill
from fastrl.trainers.plan.passes import PassSize
from fastrl.trainers.plan.report import Plan
from fastrl.trainers.router_loss import router_loss
from fastrl.trainers.special_tokens import settle_model
from fastrl.trainers.supervised import (
    SupervisedArguments,
    SupervisedTrainer,
    check_one_gpu,
    length_limit,
    load_if_path,
    setting,
    settings_of,
    tokenizer_of,
    with_quantization,
)

_PREPARING = {
    "skip_prepare_dataset": False,
    "add_special_tokens": True,
    "append_concat_token": True,
}
_TARGETS = ("rows", "targets", "labels")
_OF_LOSS = ("rows", "targets", "lengths")  # parts of a batch that are not for the model
_PREDICTIONS: dict[str, Any] = {"entropy": True, "extras": ("is_top1",)}
_PLAIN = {"input_ids", "attention_mask", "use_cache"}


class TextLoss(NamedTuple):
    """A loss of the tokens to learn."""

    of_tokens: Callable[[Tensor], Tensor]  # log p of each token to its loss, [N]
    in_head: bool = False  # whether the LM head computes the loss with its gradient


SFT_LOSSES = {
    "nll": TextLoss(torch.neg, in_head=True),
    "dft": TextLoss(lambda logprobs: -logprobs * logprobs.detach().exp()),
}


@dataclass
class SFTConfig(SupervisedArguments):
    """Settings of :class:`SFTTrainer`, beside those of ``transformers.TrainingArguments``."""

    max_length: int | None = setting(
        "Longest text, in tokens; longer ones are cut. None: the model's limit.",
        1024,
        within="[1, inf)",
    )
    dataset_text_field: str = setting("Column of the texts.", "text")
    packing: bool = setting(
        "Put several texts in a row of max_length tokens; they see each other only with "
        "packing_strategy wrapped.",
        False,
    )
    eval_packing: bool | None = setting("Pack the evaluation sets; None: as packing.", None)
    packing_strategy: str = setting(
        "How to pack: bfd (best fit, the longest text first), bfd_split (longer texts in pieces), "
        "wrapped (texts one after the other, cut where a row is full; they see each other).",
        BFD,
        choices=PACKINGS,
    )
    truncation_mode: str = setting(
        "What longer texts keep: keep_start (but a prompt with a completion loses the prompt's "
        "beginning first), keep_end.",
        KEEP_START,
        choices=(KEEP_START, KEEP_END),
    )
    shuffle_dataset: bool = setting("Shuffle the data set before it is packed.", False)
    dataset_kwargs: dict | str | None = setting(
        "JSON; skip_prepare_dataset: true takes rows of input_ids and labels as they are; "
        "add_special_tokens: false adds no BOS to texts; append_concat_token: false packs them "
        "without an EOS between.",
        None,
    )
    append_eos: bool = setting("End every text with EOS.", True)
    completion_only_loss: bool | None = setting(
        "Learn completions, not their prompts; None is true.", True
    )
    assistant_only_loss: bool = setting("Learn the assistant's turns in messages.", False)
    loss_type: str = setting(
        "nll, or dft: -p log p with p held fixed (Dynamic Fine-Tuning, arXiv:2508.05629).",
        "nll",
        choices=SFT_LOSSES,
    )
    router_aux_loss_coef: float | None = setting(
        "Weight of the loss that balances the experts of a mixture; None: the model's own, if its "
        "configuration has output_router_logits, else none.",
        None,
        within="[0, inf)",
    )

    _VALID_DICT_FIELDS = [*SupervisedArguments._VALID_DICT_FIELDS, "dataset_kwargs"]  # noqa: RUF012

    def __post_init__(self) -> None:
        # TRL's older names of these values.
        if self.loss_type == "chunked_nll":
            self.loss_type = "nll"
        if self.packing_strategy == "bfd-requeue":
            self.packing_strategy = BFD_SPLIT
        super().__post_init__()
        _preparing(self)


def _preparing(args: Any) -> dict[str, bool]:
    """The truth values of ``dataset_kwargs``, with defaults; raises ValueError for anything
    else."""
    settings = {**_PREPARING, **(parse_json("dataset_kwargs", args.dataset_kwargs) or {})}
    for name, value in settings.items():
        if name not in _PREPARING or not isinstance(value, bool):
            raise ValueError(
                f"dataset_kwargs has {name}={value!r}: it may hold {', '.join(_PREPARING)}, each "
                "true or false; prepare the data set otherwise by dataset.map before"
            )
    return settings


class SFTTrainer(SupervisedTrainer):
    """Trains a causal language model on texts.

    loss = -Σ log p(token) / tokens, over the tokens to learn: all of a text but its first token, or
    its completion; ``tokens`` is their number in a whole optimizer step. With ``loss_type="dft"``
    each -log p is multiplied by p, held fixed (arXiv:2508.05629). The LM head runs on these tokens
    only; "nll" is fused with it, but for fp16 (``fastrl_kernels.linear_nll_loss``).

    Args:
        model: a causal LM, or its path; or the path of a saved adapter, which is trained further.
        args: an :class:`SFTConfig`, or transformers' TrainingArguments.
        data_collator: a :class:`DataCollatorForCompletionOnlyLM`, or your own, which gets rows of
            ``input_ids`` and ``labels``; by default these are padded, or packed.
        train_dataset, eval_dataset: with a column of texts (``dataset_text_field``), with
            ``prompt`` and ``completion``, ``messages``, or ``input_ids``, see
            :func:`fastrl.data.prepare.prepare_texts`; packed rows, with ``seq_lengths``, whose
            texts are kept apart; or a stream, with ``max_steps``.
        tokenizer, processing_class: the tokenizer, under its old or new name; by default the one
            saved with the model.
        peft_config: adds an adapter to the model, which is prepared for it if it is quantised.
        dataset_text_field, packing, max_seq_length, dataset_num_proc, eval_packing,
            neftune_noise_alpha, model_init_kwargs, dataset_kwargs: in place of the configuration's.
        formatting_func: returns a row's text, or a list of texts for a batch of rows.
        quantization_config: for loading the model by its path.

    Logs ``mean_token_accuracy`` and ``entropy`` (nats) of the tokens to learn: in training those of
    the step that is logged, in evaluation of all; ``num_tokens`` of the run so far, prompts
    included; and ``aux_loss`` where the routers' loss is on.

    Raises:
        FileNotFoundError: a path without a model.
        TypeError: an argument that is refused.
        ValueError: no pad token, data that cannot be used, a model that cannot pack, has no weight
            to train or is no causal language model; arguments that do not go together.
    """

    args_class: ClassVar[type] = SFTConfig
    rehearsed_as = rehearse.SFT
    _tag_names: ClassVar[list[str]] = ["fastrl", "trl", "sft"]  # tags of the model on the Hub
    example: ClassVar[str] = "text"
    method = SFT

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
        dataset_num_proc: int | None = None,
        eval_packing: bool | None = None,
        neftune_noise_alpha: float | None = None,
        model_init_kwargs: dict | None = None,
        dataset_kwargs: dict | None = None,
        quantization_config: Any = None,
        infinite: bool | None = None,
        num_of_sequences: int | None = None,
        chars_per_token: float | None = None,
        dataset_batch_size: int | None = None,
        compute_loss_func: Callable | None = None,
        optimizer_cls_and_kwargs: Any = None,
    ):
        check_overrides(type(self))
        self.check_keywords(
            compute_loss_func=compute_loss_func, optimizer_cls_and_kwargs=optimizer_cls_and_kwargs
        )
        arguments: dict[str, Any] = {"infinite": infinite, "num_of_sequences": num_of_sequences}
        arguments |= {"chars_per_token": chars_per_token, "dataset_batch_size": dataset_batch_size}
        todays(SFTConfig, arguments)
        args = settings_of(
            args,
            SFTConfig,
            dataset_text_field=dataset_text_field,
            packing=packing,
            max_length=max_seq_length,
            dataset_num_proc=dataset_num_proc,
            eval_packing=eval_packing,
            neftune_noise_alpha=neftune_noise_alpha,
            model_init_kwargs=model_init_kwargs,
            dataset_kwargs=dataset_kwargs,
        )
        completions, data_collator = _split_collator(data_collator, args)
        self._encoding = _encoding(args, formatting_func, completions)
        with_quantization(args, model, quantization_config)
        tokenizer = tokenizer_of(tokenizer, processing_class, model, args)
        self.args, self.processing_class = args, tokenizer  # for prepare_model
        self._peft_config = peft_config
        self._virtual: int | None = None
        self.aux_loss_enabled, self.router_aux_loss_coef = False, 0.0
        set_seed(args.seed)  # a new adapter's weights are drawn
        if model is not None:
            model = self.prepare_model(
                load_if_path(model, load_language_model, args, trainable=True)
            )
        self._max_length = length_limit(args, model, tokenizer)
        packs = args.packing or bool(args.eval_packing)
        joins = completions is not None and completions.padding_free
        brought = _come_packed(train_dataset, eval_dataset, formatting_func, completions)
        packs_rows = packs or joins or (brought and data_collator is None)
        self._keeps_apart = packs_rows or data_collator is not None
        if packs and data_collator is not None:
            raise ValueError("packing makes its own batches: leave out data_collator")
        if packs_rows and self._virtual is not None:
            raise ValueError(
                "prompt tuning puts its tokens in front of rows, not of the texts in them: leave "
                "packing out, or use LoRA"
            )
        if packs and self._max_length is None:
            raise ValueError("packing needs max_length: how many tokens a row holds")
        self._said_padded = False
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator or TextCollator(tokenizer, args.pad_to_multiple_of),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            model_init=model_init,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        check_one_gpu(self.args)
        if packs_rows:
            rows = self._packing_collator()
            self.data_collator = JoinedCollator(rows) if joins else rows
        self.count_learned_tokens()  # by which the loss is divided
        self.scorer = TokenScorer()

    def _packing_collator(self) -> Any:
        self.prepare_weights()
        rows: Any = PackedCollator(self.processing_class)
        # packing() may warn of padded batches: that is said only if choose_collator does not raise.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            padding_free = self.packing(self.model_wrapped)
        if not padding_free:
            rows = choose_collator(self.model, self.processing_class, self.accelerator.autocast())
        rows.pad_to_multiple_of = self.args.pad_to_multiple_of
        for each in caught:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        return rows

    def plan(  # type: ignore[override]
        self, tokens: int, passes: PassSize | None = None, device: str | None = None
    ) -> Plan:
        """What training on texts of at most ``tokens`` tokens needs of memory, see
        :meth:`fastrl.trainers.base.BaseTrainer.plan`."""
        return rehearse.plan_of(self, (tokens,), passes, device)

    def prepare_model(self, model: Any) -> Any:
        """The model, with an adapter if there is a peft_config; refuses all but causal LMs."""
        config = getattr(model, "config", None)
        if getattr(config, "is_encoder_decoder", False) or not model.get_output_embeddings():
            raise ValueError(
                f"{type(model).__name__} is no causal language model: load it with "
                "AutoModelForCausalLM"
            )
        adapts = self._peft_config is not None or hasattr(model, "peft_config")
        settle_model(model, self.processing_class, self.args, adapts)
        model = with_adapter(model, self._peft_config, self.args)
        self._virtual = virtual_tokens(model)
        router = router_loss(model, self.args.router_aux_loss_coef, as_configured=True)
        self.aux_loss_enabled, self.router_aux_loss_coef = router
        if hasattr(model, "add_model_tags"):
            model.add_model_tags([*self._tag_names])
        return model

    def prepare_data(self, dataset: Any, training: bool) -> Any:
        """Token ids and labels, see :func:`fastrl.data.prepare.prepare_texts`; packed if
        the settings say so."""
        if self._encoding["formatting_func"] is None and are_packed(dataset):
            if not self._keeps_apart:
                raise ValueError(
                    "the rows are packed (seq_lengths), and the trainer's batches are not: make it "
                    "with packing=True"
                )
            if isinstance(dataset, PackedTexts):
                return dataset
            return tokenised_rows(dataset, num_proc=self.args.dataset_num_proc)
        args, encoding = self.args, self._encoding
        if isinstance(dataset, ConstantLengthDataset):  # which has formatted texts itself
            dataset, encoding = dataset.rows(), {**encoding, "formatting_func": None}
        if _preparing(args)["skip_prepare_dataset"]:
            check_ready(dataset)
            return dataset
        packs = self._packs(training)
        whole = packs and args.packing_strategy != BFD
        texts = prepare_texts(
            dataset,
            self.processing_class,
            None if whole else self._max_length,
            args.dataset_num_proc,
            **encoding,
        )
        if training and args.shuffle_dataset:
            texts = texts.shuffle(seed=args.seed)
        if packs and self._max_length:
            return packed(texts, self._max_length, args.packing_strategy)
        return texts

    def _preparing(self, training: bool) -> tuple[Any, ...]:
        return self._packs(training), self._encoding["formatting_func"]

    def _packs(self, training: bool) -> bool:
        args = self.args
        return args.packing if training or args.eval_packing is None else args.eval_packing

    def ready_batch(self, batch: Any) -> Any:
        ready = super().ready_batch(batch)
        if "compute_loss" in self.overrides and isinstance(ready, Mapping):
            # A program's compute_loss may pass all of the batch to the model, and read
            # inputs.labels.
            return BatchEncoding({name: x for name, x in ready.items() if name not in _OF_LOSS})
        return ready

    def sizes(self, dataset: Any) -> Iterable[int]:
        if isinstance(dataset, PackedTexts):
            return map(self.padded, dataset.sizes())
        return () if is_stream(dataset) else (self.padded(len(x)) for x in dataset["input_ids"])

    def micro_batches(self, inputs: Any, most: int) -> list[tuple[Any, float]]:
        labels = inputs["labels"]
        if "rows" not in inputs:  # from a collator of the user
            inputs = {**inputs, **targets_of(labels)}
        whole = {name: x for name, x in inputs.items() if name not in ("rows", "targets")}
        if any(not isinstance(x, Tensor) or len(x) != len(labels) for x in whole.values()):
            raise ValueError(
                "micro_batch_tokens splits batches of tensors with a row for each example, and the "
                f"data collator makes {', '.join(whole)}: leave it out"
            )
        batch = {name: x for name, x in whole.items() if name != "labels"} | {"use_cache": False}
        lengths = self._lengths(batch, batch.pop("lengths", None), inputs["rows"])
        sizes = [labels.shape[1]] * len(labels) if lengths is None else list(map(sum, lengths))
        parts = []
        for chosen in fill(sizes, most, self.example):
            part = {name: x[chosen] for name, x in whole.items()}
            part |= targets_of(part["labels"])
            parts.append((part, len(part["rows"]) / max(len(inputs["rows"]), 1)))
        return parts

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The sum of a batch's losses, divided by ``num_items_in_batch`` or its tokens to learn,
        plus the routers' loss, scaled so that passes are added and processes averaged; with
        ``return_outputs`` also the model's output. Raises ValueError for a batch without labels."""
        if "labels" not in inputs:
            raise ValueError(f"batches need labels, the data collator makes {', '.join(inputs)}")
        if "rows" not in inputs:  # from a collator of the user
            inputs = {**inputs, **targets_of(inputs["labels"])}
        whole_step = num_items_in_batch is not None
        tokens = torch.as_tensor(num_items_in_batch if whole_step else len(inputs["rows"]))
        # In fp16 the loss must be scaled before its gradient is computed.
        in_head = not self.args.fp16 and self._text_loss.in_head
        objective = TokenNLL(tokens.clamp(min=1)) if in_head else None
        training = self.model.training
        request = ScoringRequest(
            inputs["rows"], inputs["targets"], values=False, objective=objective
        )
        if training and self._logs_this_step():
            request = request._replace(**_PREDICTIONS)
        if return_outputs:
            outputs = self._outputs(model, inputs)
            scores = score_logits(outputs.logits.flatten(0, 1)[request.rows], request)
        else:
            scores, outputs = self._scores(model, inputs, request)
        loss = scores.loss
        if loss is None:
            loss = self._text_loss.of_tokens(scores.logprobs).sum() / tokens.clamp(min=1)
        if training and self.share:  # a pass of share 0 does not count
            self._note(inputs, scores)
        if self.aux_loss_enabled:
            aux = computed_aux_loss(outputs)
            steps = self.current_gradient_accumulation_steps if whole_step else 1
            if training:
                part = torch.full_like(aux, self.share_of_batch)
                self._metrics["train"].pool({"aux_loss": (aux * part, part)}, of_none=0.0)
            router_part = self.router_aux_loss_coef * aux * self.share_of_batch / steps
            # What follows multiplies the loss by the number of processes, or by the pass's share.
            if whole_step and self.args.average_tokens_across_devices:
                router_part = router_part / self.accelerator.num_processes
            elif not whole_step:
                router_part = router_part / self.share_of_batch
            loss = loss + router_part
        if whole_step and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over them
        if not self.share:
            loss = loss * 0
        elif not whole_step:
            loss = loss * self.share_of_batch  # a mean over the tokens of this pass
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """A batch's loss, logits and labels; the last two None with ``prediction_loss_only``."""
        if "compute_loss" in self.overrides:
            return self.predicted_by_own_loss(model, inputs, prediction_loss_only)
        inputs = self.ready_batch(inputs)
        if "labels" not in inputs:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if "rows" not in inputs:  # from a collator of the user
            inputs = {**inputs, **targets_of(inputs["labels"])}
        request = ScoringRequest(inputs["rows"], inputs["targets"], values=False, **_PREDICTIONS)
        if not prediction_loss_only:
            loss, logits, labels = super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys
            )
            assert isinstance(logits, Tensor)
            scores = score_logits(logits.flatten(0, 1)[request.rows], request)
            self._hold_out(inputs, self._text_loss.of_tokens(scores.logprobs), scores)
            return loss, logits, labels
        with torch.no_grad(), self.compute_loss_context_manager():
            scores, _ = self._scores(model, inputs, request)
        losses = self._text_loss.of_tokens(scores.logprobs)
        self._hold_out(inputs, losses, scores)
        return losses.sum() / max(len(losses), 1), None, None

    @property
    def _text_loss(self) -> TextLoss:
        return SFT_LOSSES[self.args.loss_type]

    def _logs_this_step(self) -> bool:
        """Whether what is computed now belongs to an optimizer step that is logged."""
        args, step = self.args, self.state.global_step + 1
        if args.logging_strategy == IntervalStrategy.NO:
            return False
        if step == self.state.max_steps or (step == 1 and args.logging_first_step):
            return True
        stepwise = args.logging_strategy == IntervalStrategy.STEPS
        return stepwise and step % max(int(self.state.logging_steps), 1) == 0

    def _note(self, inputs: dict[str, Any], scores: TokenScores) -> None:
        """Adds a batch to the metrics of training."""
        mask, lengths = inputs.get("attention_mask"), inputs.get("lengths")
        metrics = self._metrics["train"]
        if isinstance(lengths, Tensor):
            metrics.count("num_tokens", lengths.sum())
        elif isinstance(mask, Tensor) and mask.dim() == 2:
            metrics.count("num_tokens", mask.sum())
        else:
            metrics.count("num_tokens", inputs["labels"].numel())
        if scores.extras is not None:
            entropies, correct = _predictions(scores)
            means = {"entropy": mean_of(entropies), "mean_token_accuracy": mean_of(correct)}
            metrics.pool(means, of_none=0.0)

    def _scores(
        self, model: nn.Module, inputs: dict[str, Any], request: ScoringRequest
    ) -> tuple[TokenScores, Any]:
        """Scores of the requested tokens of a batch, and the model's output."""
        model_inputs, attention, rows, _ = self._without_padding(inputs, request.rows)
        if self._virtual:  # virtual tokens stand in front of each row
            rows = rows + self._virtual * (rows // inputs["labels"].shape[1] + 1)
        model_inputs = {**model_inputs, "attention": attention}
        scored = self.scorer(self._plain(model), model_inputs, request._replace(rows=rows), model)
        return scored.scores, scored.output

    def _outputs(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """The model's output for a batch, with logits [B, T, V]; those of padding may be 0."""
        model_inputs, attention, _, places = self._without_padding(inputs, inputs["rows"])
        with replaced(self._plain(model), attention):
            outputs = model(**model_inputs)
        if self._virtual:
            outputs["logits"] = outputs.logits[:, self._virtual :]
        if places is not None:
            packed, shape = outputs.logits.squeeze(0), inputs["input_ids"].shape
            logits = packed.new_zeros(shape.numel(), packed.shape[-1]).index_copy(0, places, packed)
            outputs["logits"] = logits.view(*shape, -1)
        return outputs

    def _without_padding(
        self, inputs: dict[str, Any], rows: Tensor
    ) -> tuple[dict[str, Any], Attention | None, Tensor, Tensor | None]:
        """Arguments of the model's forward on a batch; the attention that replaces the model's, or
        None; ``rows`` [N] in that forward; the packed tokens' positions in the batch, or None."""
        model_inputs = {k: v for k, v in inputs.items() if k not in _TARGETS} | {"use_cache": False}
        lengths = self._lengths(model_inputs, model_inputs.pop("lengths", None), rows)
        if self.aux_loss_enabled:
            model_inputs["output_router_logits"] = True
        if lengths is None:
            return model_inputs, None, rows, None
        model_pass, places = join_texts(model_inputs["input_ids"], rows, lengths)
        model_inputs |= model_pass.inputs
        return model_inputs, model_inputs.pop("attention"), model_pass.rows, places

    def _lengths(
        self, batch: dict[str, Any], packed: Tensor | None, rows: Tensor
    ) -> list[list[int]] | None:
        """The lengths of the texts in each row of a batch; None where it is run with padding.

        Args:
            batch: arguments of the model's forward.
            packed: the texts' lengths, [B, texts] with zeros, where a collator of fastrl has packed
                rows.
            rows: positions of the learned tokens in the flattened batch, [N].
        """
        mask = batch.get("attention_mask")
        plain = batch.keys() == _PLAIN and isinstance(mask, Tensor) and mask.dim() == 2
        if (packed is None and not plain) or not self.packing(self.model_wrapped):
            return None
        if packed is not None:
            return [[n for n in row if n] for row in packed.tolist()]
        assert isinstance(mask, Tensor)
        ends, width = right_padded(mask), mask.shape[1]
        # Only collators of the user pad otherwise, or have labels on padding.
        if ends is None:
            self._say_padded("with padding that is not on the right: pad there")
            return None
        if bool((rows % width >= mask.sum(-1)[rows // width]).any()):
            self._say_padded("with labels on padding: label it -100")
            return None
        return [[n] for n in ends]

    def _say_padded(self, what: str) -> None:
        """Warns once that a collator's batches are padded."""
        if not self._said_padded:
            self._said_padded = True
            warnings.warn(
                f"batches stay padded, because the data collator makes them {what}; or set "
                "padding_free=False, where that is meant",
                stacklevel=2,
            )

    def asks_to_pack(self) -> bool:
        # The noise of NEFTune depends on the length of the row.
        noise = bool(self.args.neftune_noise_alpha)
        return super().asks_to_pack() and not noise and self._virtual is None

    def _hold_out(self, inputs: dict[str, Any], losses: Tensor, scores: TokenScores) -> None:
        """Adds a batch to the evaluation, from the losses of its labels, [N]."""
        examples, width = inputs["labels"].shape
        which = inputs["rows"] // width
        columns = (losses, torch.ones_like(losses), *_predictions(scores))
        self.held_out(*(x.new_zeros(examples).index_add(0, which, x) for x in columns))

    def held_out_metrics(self, counts: Tensor, columns: Tensor) -> dict[str, float]:
        entropy, accuracy = (columns.sum(0) / counts.sum().clamp(min=1)).tolist()
        return {"entropy": entropy, "mean_token_accuracy": accuracy}

    def _plain(self, model: nn.Module) -> Any:
        return self.accelerator.unwrap_model(model, keep_torch_compile=False)


def _come_packed(train: Any, evaluation: Any, formatting_func: Any, completions: Any) -> bool:
    """Whether rows come packed, in which padded batches would let texts see each other."""
    of_eval = evaluation.values() if isinstance(evaluation, dict) else (evaluation,)
    brought = formatting_func is None and any(map(are_packed, (train, *of_eval)))
    if brought and completions is not None:
        raise ValueError(
            "the rows are packed, and a response template is looked for in one text: make labels "
            "with -100 for what is not learned, and pack the rows then"
        )
    return brought


def _encoding(args: Any, formatting_func: Callable | None, completions: Any) -> dict[str, Any]:
    """Keywords of :func:`fastrl.data.prepare.prepare_texts`."""
    preparing = _preparing(args)
    appends = args.append_eos and (preparing["append_concat_token"] or not args.packing)
    return {
        "text_field": args.dataset_text_field,
        "formatting_func": formatting_func,
        "completions": completions,
        "append_eos": appends,
        "add_special": preparing["add_special_tokens"],
        "completion_only": args.completion_only_loss in (None, True),
        "assistant_only": args.assistant_only_loss,
        "truncation": args.truncation_mode,
    }


def _predictions(scores: TokenScores) -> tuple[Tensor, Tensor]:
    """Entropies, and 1 where the label is the likeliest token, [N] fp32 without gradients."""
    entropies, extras = scores.entropies, scores.extras
    assert entropies is not None
    assert extras is not None
    assert extras.is_top1 is not None
    return entropies.detach(), extras.is_top1.float()


def _split_collator(collator: Any, args: Any) -> tuple[DataCollatorForCompletionOnlyLM | None, Any]:
    """A user's collator as (one that marks completions, None), or as (None, another one), which is
    None where the default does the same. Raises ValueError for one that cannot be used."""
    if isinstance(collator, DataCollatorForCompletionOnlyLM):
        if collator.padding_free and args.micro_batch_tokens is not None:
            raise ValueError(
                "micro_batch_tokens splits batches that this data_collator joins: leave its "
                "padding_free out (batches are run without padding all the same), or "
                "micro_batch_tokens"
            )
        return collator, None
    if type(collator) is DataCollatorForLanguageModeling:
        if collator.mlm:
            raise ValueError("the data collator masks tokens: pass mlm=False, or leave it out")
        return None, None  # the default does the same
    return None, collator
