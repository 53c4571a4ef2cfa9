"""The models of a trainer: a policy with its reference model, or a reward model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from fastrl.alignment.arguments import AlignmentConfig
from fastrl.alignment.batch import Batch
from fastrl.alignment.logprobs import (
    CachedReference,
    ReferencePolicy,
    RewardModel,
    Tokens,
    TrainedPolicy,
)
from fastrl.alignment.losses import Loss
from fastrl.alignment.tasks import Task
from fastrl.data import reads_eos
from fastrl.data.batch import make_batches
from fastrl.data.choose_padding import (
    choose_padding,
    classifier_side,
    rewards_of_samples,
    runs_packed,
)
from fastrl.data.encode import end_token
from fastrl.learn.ref_model import RefModel, choose_ref_model
from fastrl.learn.scorer import scored_by
from fastrl.models import AutoModelForCausalLMWithValueHead, CausalLMPolicy, PreTrainedModelWrapper
from fastrl.models.adapters import adapter_dropout
from fastrl.models.load import load_language_model, load_reward_model, load_weights, with_adapter
from fastrl.models.quantised import save_beside_adapter
from fastrl.models.reward_head import give_padding, score_head
from fastrl.models.utils import check_trainable, checksum, without_dropout
from fastrl.run.processes import processes_of
from fastrl.trainers.passes import DeferredGradients
from fastrl.trainers.ppo.setup import precision_of, share_new_weights
from fastrl.trainers.supervised import load_if_path


class RewardLearner:
    """Prepares, saves and loads a sequence classifier with one label, and shows it to the loss, as
    :class:`PolicyLearner` does; there is no reference model."""

    def __init__(self, args: AlignmentConfig, loss: Loss, tokenizer: Any):
        self.args, self.loss, self.tokenizer = args, loss, tokenizer
        self.reference: RefModel | None = None

    def ready(self, model: Any, ref_model: Any, peft_config: Any) -> nn.Module:
        self.args.refuse_reference(f"the loss {self.loss.name}")
        if ref_model is not None:
            raise ValueError(f"the loss {self.loss.name} has no reference: leave out ref_model")
        model = load_if_path(model, load_reward_model, self.args)
        labels = getattr(model.config, "num_labels", None)
        if labels != 1 or not hasattr(model.config, "num_labels"):
            raise ValueError(
                f"{type(model).__name__} has {labels} labels, a reward model has one: load it with "
                "AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)"
            )
        give_padding(model, self.tokenizer)
        model = with_adapter(model, peft_config, self.args)
        _switch_off_dropout(model, self.args)
        check_trainable(model)
        self.model = model
        return model

    def place(self, model: nn.Module, accelerator: Any) -> None:
        self.accelerator = accelerator
        unwrapped, processes = accelerator.unwrap_model(model), processes_of(accelerator)
        has_score_head = score_head(unwrapped) is not None
        precision = precision_of(unwrapped, accelerator)
        self._padding_free = (
            self.args.padding_free
            and has_score_head
            and runs_packed(
                [model], accelerator.device, precision, rewards_of_samples, anywhere=processes.any
            )
        )
        self._padded_on: str | None = "right"
        if not self._padding_free:
            anywhere = processes.any if processes.count > 1 else None
            self._padded_on = classifier_side(
                model, accelerator.device, precision, anywhere=anywhere
            )

    def modules(self) -> tuple[nn.Module | None, ...]:
        return (self.model,)

    def views(self, model: nn.Module) -> tuple[Any, Any]:
        most = self.args.micro_batch_tokens
        passes = DeferredGradients(model, self.accelerator, most is not None)
        device = self.accelerator.device
        return RewardModel(model, device, self._padding_free, self._padded_on, passes, most), None

    def limit_passes(self, most: int | None) -> None:
        """Does nothing: each call of :meth:`views` reads ``micro_batch_tokens``."""

    def before_training(self, batches: Iterable[Batch], *, last: bool) -> None:
        """Records in the model whether it reads EOS, see :mod:`fastrl.data.reads_eos`."""
        first = next(iter(batches), None)
        if last and first is not None:
            end = end_token(self.tokenizer)
            responses = [r for example in first.examples for r in example.responses]
            reads_eos.record(self.model, all(r.ids[-1:] == (end,) for r in responses))

    def reference_identity(self) -> str:
        return "none"

    def save(self, model: Any, folder: str, state_dict: dict[str, Tensor] | None) -> None:
        model.save_pretrained(folder, state_dict=state_dict)
        reads_eos.save_beside_adapter(model, folder)
        save_beside_adapter(model, folder)

    def load(self, model: Any, folder: str) -> None:
        load_weights(model, folder)


class PolicyLearner:
    """Prepares, saves and loads a causal language model, with a value head if the loss trains one,
    and shows it and its reference model to the loss."""

    def __init__(self, args: AlignmentConfig, loss: Loss, task: Task, tokenizer: Any):
        self.args, self.loss, self.task, self.tokenizer = args, loss, task, tokenizer
        self.reference: RefModel
        self._model: Any = None
        self._identity: str | None = None  # computed once: training changes the policy
        self._scored_reference: ReferencePolicy | CachedReference

    def ready(self, model: Any, ref_model: Any, peft_config: Any) -> nn.Module:
        """Returns the wrapped model to train, and chooses the reference; ``model`` and
        ``ref_model`` may be paths. Called before there is an optimizer."""
        model = load_if_path(model, load_language_model, self.args, trainable=True)
        if not isinstance(model, PreTrainedModelWrapper):
            values = self.loss.learns == "policy with values"
            wrapper = AutoModelForCausalLMWithValueHead if values else CausalLMPolicy
            model = wrapper.from_pretrained(with_adapter(model, peft_config, self.args))
        elif peft_config is not None:
            raise ValueError("peft_config is for a plain model: this one is wrapped already")
        _switch_off_dropout(model, self.args)
        check_trainable(model.pretrained_model)
        mode = self._mode(model, ref_model)
        self._cached = mode == "cached"
        if self._cached:
            if self.args.reference_dtype != "auto":
                raise ValueError(
                    f"reference_dtype={self.args.reference_dtype!r}, but the reference is cached: "
                    "its log-probs are the policy's own as training begins; leave it at 'auto', or "
                    "choose reference='copy' or 'offload'"
                )
            mode = "adapter" if model.is_peft_model else "none"
        settings = self.args.reference_settings(
            reference=mode,
            reference_adapter=self.args.reference_adapter,
            init_kl_coef=0.0 if mode == "none" else 1.0,
            micro_batch_tokens=self.args.micro_batch_tokens,
        )
        reference = self._wrapped(ref_model, model)
        share_new_weights(processes_of(self.args.distributed_state), model, reference)
        self.reference = choose_ref_model(settings, model, reference)
        return model

    def _wrapped(self, ref_model: Any, policy: PreTrainedModelWrapper) -> Any:
        """The reference model as a policy without values, from a plain model or its path; None and
        wrapped models as they are.

        Raises:
            ValueError: the reference is the policy itself, which would be frozen.
        """
        if ref_model is None:
            return None
        ref_model = load_if_path(ref_model, load_language_model, self.args)
        if ref_model is policy or ref_model is policy.pretrained_model:
            raise ValueError(
                "ref_model is model itself, which is trained: leave it out to compare with the "
                "model as training begins, or load another one"
            )
        if isinstance(ref_model, PreTrainedModelWrapper):
            return ref_model
        return CausalLMPolicy.from_pretrained(ref_model)

    def _mode(self, model: PreTrainedModelWrapper, ref_model: Any) -> str:
        mode, compares = self.args.reference, self.loss.compares
        if not compares:
            self.args.refuse_reference(f"the loss {self.loss.name}")
            if ref_model is not None:
                raise ValueError(f"the loss {self.loss.name} has no reference: leave out ref_model")
            return "none"
        if mode == "cached" and self.task.online:
            raise ValueError(
                "reference='cached' is for responses that exist before training, unlike those of "
                f"{self.task.name}: choose 'copy', 'adapter', 'trunk' or 'offload'"
            )
        if mode == "cached" and ref_model is not None:
            raise ValueError(
                "reference='cached' uses the model as training begins as its reference: leave "
                "out ref_model, or choose reference='copy'"
            )
        if mode == "cached" and self.args.sync_ref_model:
            raise ValueError(
                "reference='cached' keeps log-probs of a reference that sync_ref_model changes: "
                "choose reference='copy', or leave sync_ref_model out"
            )
        needs_model = self.args.num_shared_layers is not None or ref_model is not None
        needs_model = needs_model or self.args.sync_ref_model
        if mode != "auto" or model.is_peft_model or needs_model or self.task.online:
            return mode
        return "cached"

    def place(self, model: nn.Module, accelerator: Any) -> None:
        """Makes what computes the models' log-probs, once the policy is on its device."""
        self.accelerator = accelerator
        self.reference.place(model, accelerator)
        self._model = unwrapped = accelerator.unwrap_model(model)
        padding = choose_padding(
            self.args.padding_free,
            accelerator.device,
            precision_of(unwrapped, accelerator),
            model,
            self.reference.model,
            anywhere=processes_of(accelerator).any,
        )
        batches = make_batches(unwrapped, self.tokenizer, None, padding)
        most = self.args.micro_batch_tokens
        self._tokens = Tokens(batches, accelerator.device, self.reference, most)
        self._scored_reference = ReferencePolicy(self.reference, self._tokens)
        if self._cached:
            score = self.reference.score if unwrapped.is_peft_model else scored_by(model)
            self._scored_reference = CachedReference(score, self._tokens)

    def modules(self) -> tuple[nn.Module | None, ...]:
        """The models that training runs."""
        return self._model, self.reference.model

    def views(self, model: nn.Module) -> tuple[Any, Any]:
        """The policy and the reference that a loss is called with."""
        most = self.args.micro_batch_tokens
        passes = DeferredGradients(model, self.accelerator, most is not None)
        policy = TrainedPolicy(model, self._tokens, passes)
        return policy, self._scored_reference if self.loss.compares else None

    def limit_passes(self, most: int | None) -> None:
        """Limits passes to ``most`` tokens, where that has changed since :meth:`place`."""
        self._tokens.most = most

    def before_training(self, batches: Iterable[Batch], *, last: bool) -> None:
        """Computes the log-probs of a cached reference for ``batches``, before training changes the
        model; ``last`` says that no more batches will come."""
        if not isinstance(self._scored_reference, CachedReference) or self._scored_reference.closed:
            return
        for batch in batches:
            for each in self.loss.reference_batches(batch):
                self._scored_reference.learn(each)
        if last:
            self._scored_reference.close()

    def reference_identity(self) -> str:
        """The reference's mode and checksum of weights before training; "none" without one."""
        if self._identity is None:
            # Without an adapter, cached log-probs are those of the policy as training begins.
            start = self._cached and not self._model.is_peft_model
            weights = dict(self._model.named_parameters()) if start else {}
            weights = {**weights, **self.reference.own_weights()}
            mode = "cached" if self._cached else self.reference.mode
            self._identity = f"{mode} {checksum(weights)}" if self.loss.compares else "none"
        return self._identity

    def save(self, model: Any, folder: str, state_dict: dict[str, Tensor] | None) -> None:
        self.reference.verify()
        model.save_pretrained(folder, state_dict=state_dict)

    def load(self, model: Any, folder: str) -> None:
        model.load_weights(folder)


Learner = RewardLearner | PolicyLearner


def make_learner(args: AlignmentConfig, loss: Loss, task: Task, tokenizer: Any) -> Learner:
    """Makes the learner of the kind of model that the loss trains."""
    if loss.learns == "reward model":
        return RewardLearner(args, loss, tokenizer)
    return PolicyLearner(args, loss, task, tokenizer)


def _switch_off_dropout(model: Any, args: AlignmentConfig) -> None:
    """Sets dropout to 0 for good if the arguments say so: policy and reference, and the two
    responses of a pair, then go through the same model."""
    if not args.disable_dropout:
        return
    p = adapter_dropout(getattr(model, "pretrained_model", model))
    if p:
        warnings.warn(
            f"the adapter's lora_dropout={p:g} does not act, because disable_dropout is True: set "
            "that to False to train with dropout",
            stacklevel=5,
        )
    without_dropout(model)
