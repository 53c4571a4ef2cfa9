"""A critic: a model of its own that estimates values."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastrl.models.attention import Attention, replaced
from fastrl.models.load import check_causal, load_reward_model
from fastrl.models.reward_head import score_head
from fastrl.models.scoring import ScoringRequest, TokenScores
from fastrl.models.sharding import layers_to_spread
from fastrl.models.utils import check_trainable, context_length

_HOW = "AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)"


class Critic(nn.Module):
    """A critic: a model without a language-model head, whose last hidden states h_t give values
    V(h_t) = w·h_t, computed in the dtype of w and returned in fp32.

    The model is a sequence classifier with one label, as reward models are: a trained one, whose
    rewards of unfinished responses are then the first values, or a language model with a new head.

    Args:
        pretrained_model: the classifier, or a PEFT model around one.

    Raises:
        TypeError: another kind of model.
        ValueError: more labels than one, a head that does not score each token, an encoder whose
            attention is bidirectional, no trainable weight.
    """

    is_encoder_decoder = False

    def __init__(self, pretrained_model: Any):
        super().__init__()
        name = type(pretrained_model).__name__
        if not isinstance(pretrained_model, PreTrainedModel) and not hasattr(
            pretrained_model, "peft_config"
        ):
            raise TypeError(
                f"critic must be a path, or a sequence classifier of {_HOW}, got {name}"
            )
        check_causal(pretrained_model)
        if score_head(pretrained_model) is None or pretrained_model.config.num_labels != 1:
            raise ValueError(
                f"critic: {name} has no head that gives each token one number: pass a reward model "
                f"or a language model as {_HOW}"
            )
        check_trainable(pretrained_model)
        self.pretrained_model: Any = pretrained_model
        self.config = pretrained_model.config
        self.is_peft_model = hasattr(pretrained_model, "peft_config")

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike, **options: Any) -> Critic:
        """Loads a reward model, a saved critic, or a language model, which gets a new head. An
        adapter of a reward model or critic is loaded on its base.

        Args:
            options: options of transformers' ``from_pretrained``; weights are fp32 unless ``dtype``
                is given.

        Raises:
            FileNotFoundError, ValueError: see :func:`fastrl.models.load.load_reward_model`.
        """
        return cls(load_reward_model(path, **options))

    def forward(
        self,
        scoring: ScoringRequest,
        attention: Attention | None = None,
        routing: Any = None,
        boundary: Tensor | None = None,
        **inputs: Any,
    ) -> TokenScores:
        """The values of the requested tokens, [N] fp32, with log-probs of 0.

        Args:
            attention: the attention to use in place of the model's own, such as a packed row's.
            routing, boundary: a policy's, as :class:`PreTrainedModelWrapper` takes them; not read.
        """
        hidden: list[Tensor] = []
        head: Any = score_head(self.pretrained_model)
        hook = head.register_forward_pre_hook(lambda _head, args: hidden.append(args[0]))
        with hook, replaced(self.pretrained_model, attention):
            self.pretrained_model(**inputs, use_cache=False)
        rows = hidden[0].flatten(0, -2)[scoring.rows]
        with torch.autocast(rows.device.type, enabled=False):
            weight = next(head.parameters())
            values = head(rows.to(weight.dtype)).squeeze(-1).float()
        return TokenScores(torch.zeros_like(values), None, values, None)

    def check_lengths(self, lengths: list[int]) -> None:
        """Raises ValueError for a sample of more tokens than the model's context has."""
        limit, longest = context_length(self.pretrained_model), max(lengths)
        if limit is not None and longest > limit:
            raise ValueError(
                f"queries[{lengths.index(longest)}] and its response have {longest} tokens, beyond "
                f"the critic's context of {limit}: shorten them, or choose a critic of a longer one"
            )

    def save_pretrained(self, folder: str | os.PathLike, **options: Any) -> None:
        """Saves the classifier, which :meth:`from_pretrained` and transformers load."""
        self.pretrained_model.save_pretrained(folder, **options)

    @property
    def _no_split_modules(self) -> Any:
        return layers_to_spread(self.pretrained_model)
