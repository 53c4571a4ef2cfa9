"""The base of DPOTrainer and KTOTrainer: models, reference, log-probs and metrics."""

from __future__ import annotations

import dataclasses
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from transformers import TrainingArguments

from fastrl.core import set_seed
from fastrl.data.preferences import PairCollator, completions_of
from fastrl.data.tables import is_stream, list_as_dataset
from fastrl.data.token_batch import TokenBatch
from fastrl.eras import eras_of
from fastrl.learn.ref_model import Follow, RefModel
from fastrl.learn.scorer import response_scores, scored_by
from fastrl.models import CausalLMPolicy
from fastrl.models.model_files import is_path
from fastrl.models.routing import follow_routers
from fastrl.models.scorer import ScoredPass, TokenScorer
from fastrl.models.scoring import ScoringRequest
from fastrl.models.utils import evaluating, without_dropout
from fastrl.overrides import check_overrides
from fastrl.settings import check_refused, kept_settings
from fastrl.trainers import rehearse
from fastrl.trainers.pairs.preference_config import PreferenceConfig
from fastrl.trainers.passes import fill
from fastrl.trainers.policy import adapted, loaded, padding_tokenizer, settle_tokens
from fastrl.trainers.reference import model_of, reference_of
from fastrl.trainers.router_loss import router_loss
from fastrl.trainers.supervised import (
    SupervisedTrainer,
    check_one_gpu,
    length_limit,
    prefix_of,
)

EXTRAS = ("mean_logit", "is_top1")


class PreferenceTrainer(SupervisedTrainer):
    """A trainer that compares a policy's log-probs of completions with a reference's.

    The reference is ``ref_model``, or the policy as training begins: a frozen copy, or for a policy
    with an adapter its base, with a frozen copy of the adapter if that was trained before. See
    :class:`fastrl.learn.ref_model.RefModel`.
    """

    _tag_names: ClassVar[list[str]]  # tags of the model on the Hub
    config_class: ClassVar[type[PreferenceConfig]]
    collator_class: ClassVar[type[PairCollator]]
    short_name: ClassVar[str]  # the method's name in plans and the default output_dir
    id_columns: ClassVar[tuple[str, ...]]  # columns of token ids: prompts', each completion's
    rehearsed_as = rehearse.PREFERENCES
    metric_differences = {"rewards/margins": ("rewards/chosen", "rewards/rejected")}  # noqa: RUF012

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: Any = None,
        data_collator: Callable | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tokenizer: Any = None,
        **settings: Any,
    ):
        check_overrides(type(self))
        processing_class = tokenizer if processing_class is None else processing_class
        args = self._settings_of(args, model, settings)
        if train_dataset is None:
            raise ValueError("train_dataset is required")
        train_dataset, eval_dataset = map(list_as_dataset, (train_dataset, eval_dataset))
        if ref_model is not None and ref_model is model:
            raise ValueError(
                "model and ref_model are the same object: leave out ref_model, and a copy is made"
            )
        self._peft_config = peft_config
        set_seed(args.seed)  # a new adapter's weights are drawn
        path = model
        model = loaded(model, args, quantization_config)
        tokenizer = padding_tokenizer(processing_class, path if is_path(path) else model, args)
        adapts = peft_config is not None or hasattr(model, "peft_config")
        settle_tokens(model, tokenizer, args, adapts)
        model = adapted(model, peft_config, args)
        self._policy = CausalLMPolicy(model)
        reference = None if ref_model is None else CausalLMPolicy(loaded(ref_model, args))
        if args.disable_dropout:
            for each in (model, reference):
                without_dropout(each)
        self._reference = self._choose_reference(args, reference)
        router = router_loss(model, args.router_aux_loss_coef)
        self.aux_loss_enabled, self.router_aux_loss_coef = router
        self._routes = self.aux_loss_enabled and follow_routers(model) > 0
        self._max_length = length_limit(args, model, tokenizer)
        self.scorer = TokenScorer()
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator or self._collator(args, tokenizer),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        check_one_gpu(self.args)
        self.model_accepts_loss_kwargs = False  # the loss is a mean over the batch
        if self._reference is not None:
            self._reference.place(self._policy, self.accelerator)
        if self.args.precompute_ref_log_probs:
            self.replace_data(self._with_ref_logprobs)
        self._follow = Follow.of(self._reference, self.args)
        self.add_first(self._follow)
        self.model.add_model_tags(self._tag_names)

    # What subclasses add.

    @abstractmethod
    def prepare_rows(self, dataset: Any) -> Any:
        """The data set as token ids."""

    @abstractmethod
    def ref_logprobs(self, batch: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """The reference's log-probs of a batch, a tensor [B] for each of ``computed_columns``."""

    @abstractmethod
    def losses(
        self, model: nn.Module, batch: Mapping[str, Any]
    ) -> tuple[Tensor, ScoredPass, dict[str, tuple[Tensor, Tensor]]]:
        """The loss of each example [B], the policy's forward pass, metrics as sums and counts."""

    # Settings and models.

    def _settings_of(self, args: Any, model: Any, settings: dict[str, Any]) -> Any:
        """The trainer's settings, by default those of ``config_class``.

        Args:
            settings: settings as keywords of the trainer, as in TRL until 0.9; ``args`` may then be
                transformers' TrainingArguments.

        Raises:
            TypeError: an unknown keyword, or ``args`` of another class.
            ValueError: settings that are refused.
        """
        if settings:
            args = self._with_keywords(args, settings)
        if args is None:
            name = str(model if is_path(model) else getattr(model, "name_or_path", "") or "model")
            args = self.config_class(f"{name.rstrip('/').rsplit('/', 1)[-1]}-{self.short_name}")
        if not isinstance(args, self.config_class):
            raise TypeError(
                f"args must be a fastrl.{self.config_class.__name__}, got {type(args).__name__}"
            )
        check_refused(args)  # again: scripts set attributes of parsed arguments
        return args

    def _with_keywords(self, args: Any, settings: dict[str, Any]) -> Any:
        """``args`` as a ``config_class``, changed by settings that are keywords of the trainer."""
        kind = self.config_class
        names = {field.name for field in dataclasses.fields(kind)} | set(eras_of(kind))
        for name in settings.keys() - names:
            raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {name!r}")
        if args is not None and not isinstance(args, TrainingArguments):
            raise TypeError(f"args must be a fastrl.{kind.__name__}, got {type(args).__name__}")
        warnings.warn(
            f"{', '.join(settings)} of {type(self).__name__} are settings of {kind.__name__} now",
            stacklevel=4,
        )
        present = {} if args is None else kept_settings(args)
        for field in () if args is None else dataclasses.fields(args):
            if field.init:
                present[field.name] = getattr(args, field.name)
        return kind(**{**present, **settings})

    def prepare_model(self, model: Any) -> Any:
        return adapted(model, self._peft_config, self.args)

    def _choose_reference(self, args: Any, reference: CausalLMPolicy | None) -> RefModel | None:
        """The reference; None where the untrained policy computes the reference's log-probs."""
        has_adapter = self._policy.is_peft_model
        if args.precompute_ref_log_probs and reference is None and not has_adapter:
            return None
        return reference_of(args, self._policy, reference, self._peft_config is not None)

    @property
    def ref_model(self) -> Any:
        """The reference as a separate model; None where it is the policy with its adapter off, or
        with another one, or where the policy has computed its log-probs before training."""
        return model_of(self._reference, self.accelerator)

    # Data.

    def prepare_data(self, dataset: Any, training: bool) -> Any:
        if self.args.precompute_ref_log_probs and is_stream(dataset):
            raise ValueError(
                "precompute_ref_log_probs=True is not supported with IterableDataset, which is "
                "read once: load it without streaming, or leave precompute_ref_log_probs out"
            )
        rows = self.prepare_rows(dataset)
        if hasattr(self, "products") and self.args.precompute_ref_log_probs:
            rows = self._with_ref_logprobs(rows, training)
        return rows

    @property
    def texts_of_an_example(self) -> int:
        return len(self.id_columns) - 1

    def sizes(self, dataset: Any) -> Iterable[int]:
        if is_stream(dataset):
            return ()
        most = self._max_length or 10**9
        rows = zip(*(dataset[name] for name in self.id_columns), strict=True)
        lengths = ([min(len(p) + len(c), most) for c in sides] for p, *sides in rows)
        if self.args.padding_free:
            return map(sum, lengths)
        return (len(sides) * self.padded(max(sides)) for sides in lengths)

    def examples_in(self, batch: Any) -> int | None:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        return None if mask is None else len(mask) // self.texts_of_an_example

    def micro_batches(self, inputs: Any, most: int) -> list[tuple[Any, float]]:
        mask, sides = inputs["attention_mask"], self.texts_of_an_example
        count, width = len(mask) // sides, mask.shape[1]
        lengths = mask.sum(-1).view(sides, count).sum(0).tolist()
        sizes = lengths if self.packing(self.model_wrapped) else [sides * width] * count
        parts = []
        for chosen in fill(sizes, most, self.example):
            rows = [i + k * count for k in range(sides) for i in chosen]
            part = {name: x[chosen if len(x) == count else rows] for name, x in inputs.items()}
            parts.append((part, len(chosen) / count))
        return parts

    @property
    def _longest_prompt(self) -> int | None:
        return None if self._max_length is None else self._max_length - 1

    def _collator(self, args: Any, tokenizer: Any) -> PairCollator:
        return self.collator_class(
            tokenizer.pad_token_id,
            self._max_length,
            getattr(args, "truncation_mode", "keep_start"),
            args.pad_to_multiple_of,
        )

    def _with_ref_logprobs(self, dataset: Any, training: bool) -> Any:
        """The data set with the reference's log-probs as columns."""
        if all(name in dataset.column_names for name in self.computed_columns):
            return dataset
        if self._reference is None and self.state.global_step > 0:
            raise ValueError(
                "Cannot compute reference log-probs for a dataset passed to evaluate() after "
                "training has begun: with precompute_ref_log_probs the policy was its own "
                "reference before. Pass the data as eval_dataset at construction, pass ref_model, "
                "or leave precompute_ref_log_probs out"
            )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(
                "precompute_ref_log_probs is for weights that are whole on each process: leave it "
                "out with FSDP and DeepSpeed"
            )
        args = self.args
        size = args.precompute_ref_batch_size or (
            args.per_device_train_batch_size if training else args.per_device_eval_batch_size
        )
        batches = [range(i, min(i + size, len(dataset))) for i in range(0, len(dataset), size)]
        share = self.processes.shares(batches)[self.processes.index]
        logprobs: dict[int, list[float]] = {}
        with (
            self.products.on(self._policy, self.ref_model),
            torch.no_grad(),
            evaluating(self._policy),
            self.accelerator.autocast(),
        ):
            for chosen in share:
                batch = self.data_collator([dataset[i] for i in chosen])
                columns = self.ref_logprobs(self.ready_batch(batch))
                rows = torch.stack([x.float() for x in columns], dim=1).tolist()
                logprobs |= dict(zip(chosen, rows, strict=True))
        of_all = {i: row for part in self.processes.objects(logprobs) for i, row in part.items()}
        table = [of_all[i] for i in range(len(dataset))]
        for k, name in enumerate(self.computed_columns):
            dataset = dataset.add_column(name, [row[k] for row in table])
        return dataset

    # Log-probs.

    def completions(self, batch: Mapping[str, Any], prefix: str = "") -> TokenBatch:
        """See :func:`fastrl.data.preferences.completions_of`."""
        completions = completions_of(batch, self.packing(self.model_wrapped), prefix)
        return completions.with_experts(None) if self._routes else completions

    def score(
        self, model: nn.Module, completions: TokenBatch, extras: tuple[str, ...] = ()
    ) -> tuple[Tensor, ScoredPass]:
        """The policy's log-probs [B, T-1], 0 outside of the completions, and its forward pass, with
        entropies and the statistics ``extras``, if any are named."""
        by_model = self.aux_loss_enabled and not self._routes and extras
        router = {"output_router_logits": True} if by_model else {}
        plain = self.accelerator.unwrap_model(model, keep_torch_compile=False)

        def forward(inputs: dict[str, Any], request: ScoringRequest) -> ScoredPass:
            return self.scorer(plain, {**inputs, **router}, request, model)

        return response_scores(forward, completions, entropy=bool(extras), extras=extras)

    @torch.no_grad()
    def ref_score(self, completions: TokenBatch) -> Tensor:
        """The reference's log-probs [B, T-1]; before training the policy may be the reference."""
        reference = self._reference
        score = scored_by(self._policy) if reference is None else reference.score
        return response_scores(score, dataclasses.replace(completions, experts=None))[0]

    def asks_to_pack(self) -> bool:
        by_model, packs = self.aux_loss_enabled and not self._routes, super().asks_to_pack()
        if packs and by_model:
            warnings.warn(
                "batches stay padded: the load-balancing loss counts the tokens of each "
                "completion; router_aux_loss_coef=0 leaves it out",
                stacklevel=3,
            )
        return packs and not by_model

    # Losses.

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The mean loss of a batch; with ``return_outputs`` also the model's output, with the
        logits of all tokens."""
        loss, _ = self._loss(model, inputs)
        return (loss, self._outputs(model, inputs)) if return_outputs else loss

    @torch.no_grad()
    def _outputs(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        names = ("input_ids", "attention_mask")
        return model(**{name: inputs[name] for name in names}, use_cache=False)

    def _loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The mean loss plus load-balancing loss, times the pass's factor :attr:`share`; the
        examples' losses, [B]."""
        training = self.model.training
        losses, scored, parts = self.losses(model, inputs)
        loss = losses.mean()
        if self.aux_loss_enabled:
            aux_loss, one = scored.aux_loss, torch.ones((), device=loss.device)
            loss = loss + self.router_aux_loss_coef * aux_loss
            parts = {**parts, "aux_loss": (aux_loss, one)}
        self._metrics["train" if training else "eval"].add(parts)
        if training and self.share:
            self._metrics["train"].count("num_tokens", inputs["attention_mask"].sum())
        return (loss if self.share == 1 else loss * self.share), losses

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, Any, Any]:
        """The loss; unless ``prediction_loss_only`` also all tokens' logits, and the tokens."""
        if "compute_loss" in self.overrides:
            return self.predicted_by_own_loss(model, inputs, prediction_loss_only)
        inputs = self.ready_batch(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, losses = self._loss(model, inputs)
            self.held_out(losses, torch.ones_like(losses))
            if prediction_loss_only:
                return loss.detach(), None, None
            return loss.detach(), self._outputs(model, inputs).logits, inputs["input_ids"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the metrics' means since the last log."""
        if self.model.training:
            logs |= self._taken("train", "")
        super().log(logs, start_time)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self.texts_of_an_example > 1 and "compute_loss" not in self.overrides:
            self.gather_function = self._gather_sides  # for this loop
        output = super().evaluation_loop(*args, **kwargs)
        output.metrics.update(self._taken("eval", f"{prefix_of(args, kwargs)}_"))
        return output

    def _gather_sides(self, outputs: Any) -> Any:
        """accelerate's ``gather_for_metrics`` of tensors whose rows are all chosen texts, then all
        rejected: of a last batch it keeps as many rows as there are examples left, one per pair."""
        sides, gather = self.texts_of_an_example, self.accelerator.gather_for_metrics

        def gathered(x: Tensor) -> Tensor:
            if x.ndim < 2:  # losses, one per pair
                return gather(x)
            by_pair = x.unflatten(0, (sides, -1)).transpose(0, 1).contiguous()
            return gather(by_pair).transpose(0, 1).flatten(0, 1)

        return recursively_apply(gathered, outputs)

    def _taken(self, mode: str, prefix: str) -> dict[str, float]:
        """The metrics since the last call, with a prefix to their names."""
        taken = self._metrics[mode].take(self.processes)
        return {f"{prefix}{name}": x for name, x in taken.items() if x is not None}

    def held_out_metrics(self, counts: Tensor, columns: Tensor) -> dict[str, float]:
        """Returns no metrics: :meth:`evaluation_loop` adds them."""
        return {}

    # Checkpoints.

    def own_state(self) -> dict[str, Any]:
        return {**super().own_state(), "preferences": {"reference": self._follow.state()}}

    def begin_training(self, resumed: Mapping[str, Any] | None) -> None:
        super().begin_training(resumed)
        if resumed is not None:
            self._follow.load(resumed["own"]["preferences"]["reference"])


def token_parts(
    scored: ScoredPass, completions: TokenBatch, sides: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Sums and counts of metrics: "entropy" over the tokens of all sides, "logits/SIDE", the mean
    logit, over one side's tokens. ``sides`` has a mask of completions, [B] bool, by side's name."""
    entropies, extras = scored.scores.entropies, scored.scores.extras
    assert entropies is not None
    assert extras is not None
    mean_logits: Any = extras.mean_logit
    at_sides = {name: at_tokens(which, completions) for name, which in sides.items()}
    at_any = torch.stack([*at_sides.values()]).any(0)
    parts = {"entropy": ((entropies.detach() * at_any).sum(), at_any.sum())}
    for name, of_side in at_sides.items():
        parts[f"logits/{name}"] = ((mean_logits * of_side).sum(), of_side.sum())
    return parts


def at_tokens(of_completions: Tensor, completions: TokenBatch) -> Tensor:
    """A value of each completion, [B], repeated for each of the completion's tokens, [N]."""
    return of_completions[completions.rows() // completions.input_ids.shape[1]]
