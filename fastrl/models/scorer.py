"""The one forward pass of a language model that scores tokens, whatever wraps the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from fastrl.models.attention import replaced
from fastrl.models.lm_head import Head, choose_head, corner_of
from fastrl.models.routing import Routing, computed_aux_loss, routed
from fastrl.models.scoring import ScoringRequest, TokenScores
from fastrl.models.utils import evaluating


class ScoredPass(NamedTuple):
    """The results of a forward pass at the requested rows."""

    scores: TokenScores  # without values
    hidden: Tensor  # [N, H], the last hidden states
    output: Any  # the model's output
    routing: Routing | None = None  # with the routers' results, where the inputs had one

    @property
    def aux_loss(self) -> Tensor:
        """The load-balancing loss of a mixture of experts, []; raises ValueError without one."""
        if self.routing is None:
            return computed_aux_loss(self.output)
        return self.routing.aux_loss()

    @property
    def logprobs(self) -> Tensor:
        return self.scores.logprobs


class TokenScorer:
    """Runs a model's forward, and its LM head on the requested rows alone if the model allows it.

    The way to run the head is chosen at the first use, on a few tokens of that batch: only then is
    the model on its device.

    Attributes:
        head: the way to run the head; None before the first use.
    """

    def __init__(self) -> None:
        self.head: Head | None = None

    def choose(self, model: Any, inputs: Mapping[str, Any]) -> Head:
        """The way to run the LM head of a model, which the first call chooses.

        Args:
            inputs: keyword arguments of the model's forward, for a batch.
        """
        if self.head is None:
            corner = {**corner_of(inputs), "use_cache": False}
            with evaluating(model):  # heads are compared, without dropout
                self.head = choose_head(model, corner)
        return self.head

    def __call__(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        request: ScoringRequest,
        wrapped: nn.Module | None = None,
    ) -> ScoredPass:
        """Runs the model's forward and scores the requested tokens.

        Args:
            model: a model of transformers, perhaps with an adapter.
            inputs: keyword arguments of its forward; ``attention`` is called in place of the
                model's, and ``routing`` gets the routers' results.
            wrapped: the model as accelerate has wrapped it, whose forward is called.
        """
        head, arguments = self.choose(model, inputs), {**inputs, "use_cache": False}
        attention, routing = arguments.pop("attention", None), arguments.pop("routing", None)
        forward = model if wrapped is None else wrapped
        with routed(routing), replaced(model, attention), head.scoring(model, request) as results:
            output = forward(**arguments, **head.options)
            return ScoredPass(*results(output), output, routing)
