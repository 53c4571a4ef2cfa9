"""What is trained: a policy beside its reference, or a reward model.

:func:`make_learner` chooses by the loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.alignment.arguments import AlignmentConfig, reference_settings
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
from fastrl.data.encode import end_token
from fastrl.models import (
    AutoModelForCausalLMWithValueHead,
    CausalLMPolicy,
    PreTrainedModelWrapper,
)
from fastrl.models.adapters import adapter_dropout
from fastrl.models.load import (
    load_language_model,
    load_reward_model,
    load_weights,
    with_adapter,
)
from fastrl.models.scoring import ScoringRequest, TokenScores
from fastrl.models.utils import check_trainable, evaluating
from fastrl.ref_model import RefModel, choose_ref_model
from fastrl.trainers.supervised import loaded


class Learner:
    """A model as a trainer handles it.

    Args:
        args: the trainer's.
        loss: what it learns by.
        task: what its batches are of.
        tokenizer: of the model.
    """

    def __init__(self, args: AlignmentConfig, loss: Loss, task: Task, tokenizer: Any):
        self.args, self.loss, self.task, self.tokenizer = args, loss, task, tokenizer
        self.accelerator: Any = None

    def ready(self, model: Any, ref_model: Any, peft_config: Any) -> nn.Module:
        """The model as it is trained, from a model or its path; before there is an optimizer."""
        raise NotImplementedError

    def _dropout(self, model: nn.Module) -> None:
        """Switched off where the arguments say so; an adapter that has some is told of."""
        if not self.args.disable_dropout:
            return
        p = adapter_dropout(language_model(model))
        if p:
            warnings.warn(
                f"the adapter's lora_dropout={p:g} does not act, because disable_dropout is True: "
                "set that to False to train with dropout",
                stacklevel=5,
            )
        switch_off_dropout(model)

    def place(self, model: nn.Module, accelerator: Any) -> None:
        """Once the device is known."""
        self.accelerator = accelerator

    def views(self, model: nn.Module) -> tuple[Any, Any]:
        """What a loss is called with: the policy and the reference."""
        raise NotImplementedError

    def before_training(self, batches: Iterable[Batch], *, last: bool) -> None:
        """Looks at batches while the model is still the one that training begins with; ``last``
        says that there will be no others."""

    def save(self, model: Any, folder: str, state_dict: dict[str, Tensor] | None) -> None:
        """What ``from_pretrained`` loads."""
        raise NotImplementedError

    def load(self, model: Any, folder: str) -> None:
        """Puts the weights of a checkpoint into the model."""
        raise NotImplementedError


class RewardLearner(Learner):
    """A sequence classifier with one label, which nothing is compared with."""

    def ready(self, model: Any, ref_model: Any, peft_config: Any) -> nn.Module:
        if ref_model is not None:
            raise ValueError(f"the loss {self.loss.name} has no reference: leave out ref_model")
        model = loaded(model, load_reward_model, self.args)
        labels = getattr(model.config, "num_labels", None)
        if labels != 1 or not hasattr(model.config, "num_labels"):
            raise ValueError(
                f"{type(model).__name__} has {labels} labels, a reward model has one: load it with "
                "AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)"
            )
        if model.config.pad_token_id is None:
            # By it a decoder's classifier finds each sequence's last token.
            model.config.pad_token_id = self.tokenizer.pad_token_id
        model = with_adapter(model, peft_config, self.args)
        self._dropout(model)
        check_trainable(model)
        self.model = model
        return model

    def views(self, model: nn.Module) -> tuple[Any, Any]:
        return RewardModel(model, self.accelerator.device), None

    def before_training(self, batches: Iterable[Batch], *, last: bool) -> None:
        """Says in the model whether it reads EOS, see :mod:`fastrl.data.reads_eos`."""
        first = next(iter(batches), None)
        if last and first is not None:
            end = end_token(self.tokenizer)
            responses = [r for example in first.examples for r in example.responses]
            reads_eos.record(self.model, all(r.ids[-1:] == (end,) for r in responses))

    def save(self, model: Any, folder: str, state_dict: dict[str, Tensor] | None) -> None:
        model.save_pretrained(folder, state_dict=state_dict)
        reads_eos.save_beside_adapter(model, folder)

    def load(self, model: Any, folder: str) -> None:
        load_weights(model, folder)


class PolicyLearner(Learner):
    """A causal language model without values, and a reference where the loss compares."""

    wrapper: type[PreTrainedModelWrapper] = CausalLMPolicy

    def __init__(self, args: AlignmentConfig, loss: Loss, task: Task, tokenizer: Any):
        super().__init__(args, loss, task, tokenizer)
        self.reference: RefModel
        self._tokens: Tokens
        self._compared: ReferencePolicy | CachedReference

    def ready(self, model: Any, ref_model: Any, peft_config: Any) -> nn.Module:
        model = loaded(model, load_language_model, self.args, trainable=True)
        if not isinstance(model, PreTrainedModelWrapper):
            model = self.wrapper.from_pretrained(with_adapter(model, peft_config, self.args))
        elif peft_config is not None:
            raise ValueError("peft_config is for a plain model: this one is wrapped already")
        self._dropout(model)
        check_trainable(model.pretrained_model)
        mode = self._mode(model, ref_model)
        self._cached = mode == "cached"
        settings = reference_settings(
            self.args, ("adapter" if model.is_peft_model else "none") if self._cached else mode
        )
        self.reference = choose_ref_model(settings, model, ref_model)
        return model

    def _mode(self, model: PreTrainedModelWrapper, ref_model: Any) -> str:
        mode, compares = self.args.reference, self.loss.compares
        if not compares:
            if ref_model is not None or mode != "auto":
                raise ValueError(
                    f"the loss {self.loss.name} compares the policy with nothing: leave out "
                    "ref_model, and reference at 'auto'"
                )
            return "none"
        if mode == "cached" and self.task.online:
            raise ValueError(
                "reference='cached' is for responses that are there before training, which those "
                f"of {self.task.name} are not: choose 'copy', 'adapter', 'trunk' or 'offload'"
            )
        if mode == "cached" and ref_model is not None:
            raise ValueError(
                "reference='cached' takes the model as training begins for its reference: leave "
                "out ref_model, or choose reference='copy'"
            )
        chosen_for = self.args.num_shared_layers is not None or ref_model is not None
        if mode != "auto" or model.is_peft_model or chosen_for or self.task.online:
            return mode
        return "cached"

    def place(self, model: nn.Module, accelerator: Any) -> None:
        super().place(model, accelerator)
        self.reference.place(model, accelerator)
        unwrapped: Any = accelerator.unwrap_model(model)
        batches = make_batches(unwrapped, self.tokenizer, None)
        self._tokens = Tokens(batches, accelerator.device, self.reference)
        self._compared = ReferencePolicy(self.reference, self._tokens)
        if self._cached:
            as_it_is = self.reference.score if unwrapped.is_peft_model else _scored_by(model)
            self._compared = CachedReference(as_it_is, self._tokens)

    def views(self, model: nn.Module) -> tuple[Any, Any]:
        policy = TrainedPolicy(model, self._tokens, self._mean)
        return policy, self._compared if self.loss.compares else None

    def before_training(self, batches: Iterable[Batch], *, last: bool) -> None:
        if not isinstance(self._compared, CachedReference) or self._compared.closed:
            return
        for batch in batches:
            for each in self.loss.compared(batch):
                self._compared.learn(each)
        if last:
            self._compared.close()

    def _mean(self, x: Tensor) -> Tensor:
        return self.accelerator.reduce(x, reduction="mean")

    def save(self, model: Any, folder: str, state_dict: dict[str, Tensor] | None) -> None:
        self.reference.verify()
        model.save_pretrained(folder, state_dict=state_dict)

    def load(self, model: Any, folder: str) -> None:
        model.load_weights(folder)


class ActorCriticLearner(PolicyLearner):
    """A causal language model with a value head."""

    wrapper = AutoModelForCausalLMWithValueHead


LEARNERS: dict[str, type[Learner]] = {
    "policy": PolicyLearner,
    "policy with values": ActorCriticLearner,
    "reward model": RewardLearner,
}


def make_learner(args: AlignmentConfig, loss: Loss, task: Task, tokenizer: Any) -> Learner:
    """By what the loss learns."""
    return LEARNERS[loss.learns](args, loss, task, tokenizer)


def language_model(model: Any) -> Any:
    """A model of transformers or PEFT, out of its wrapper."""
    return model.pretrained_model if isinstance(model, PreTrainedModelWrapper) else model


def switch_off_dropout(model: nn.Module) -> None:
    """For good: policy and reference, and the two responses of a pair, then see the same model."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):  # probabilities that layers hold themselves
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _scored_by(model: nn.Module) -> Any:
    """The model's log-probs in evaluation mode, without gradients."""

    @torch.no_grad()
    def score(inputs: dict[str, Any], request: ScoringRequest) -> TokenScores:
        with evaluating(model):
            return model(**inputs, scoring=request)

    return score
