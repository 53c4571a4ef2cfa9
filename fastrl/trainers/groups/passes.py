"""The passes in which a batch of responses is learned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.learn.experience import Minibatch
from fastrl.models.routing import Routing
from fastrl.models.scoring import TokenScores


@dataclass
class Pass:
    """A part of a batch that a forward and backward pass runs.

    Attributes:
        denominator: of the whole batch's loss.
        counts: False where it is run for other processes, which wait for it.
        scores: of its tokens that are learned, once the forward has run.
        loss: of the policy, without what is added to it.
        aux_loss: of experts.
        routing: of the forward, of a mixture of experts.
    """

    part: Minibatch
    whole: Minibatch
    denominator: float
    counts: bool = True
    scores: TokenScores | None = None
    loss: Tensor | None = None
    aux_loss: Tensor | None = None
    routing: Routing | None = None

    def __len__(self) -> int:
        return self.part.size

    @staticmethod
    def joined(passes: Sequence[Pass]) -> BatchScores:
        """What the passes of a batch found, in the batch's order."""
        logprobs, entropies, losses = [], [], []
        for each in passes:
            assert each.scores is not None
            assert each.scores.entropies is not None
            assert each.loss is not None
            logprobs.append(each.scores.logprobs.detach())
            entropies.append(each.scores.entropies.detach())
            losses.append(each.loss.detach())
        whole, chosen = passes[0].whole, [each.part.old.chosen for each in passes]
        if len(passes) == 1:
            return BatchScores(whole, logprobs[0], entropies[0], losses[0], chosen[0])
        order = _order([each.part for each in passes]).to(logprobs[0].device)
        known = [x for x in chosen if x is not None]
        return BatchScores(
            whole,
            torch.cat(logprobs)[order],
            torch.cat(entropies)[order],
            torch.stack(losses).sum(),
            torch.cat(known)[order] if len(known) == len(chosen) else None,
        )


class BatchScores(NamedTuple):
    """What was found of a batch's tokens that are learned, [N] each."""

    whole: Minibatch
    logprobs: Tensor
    entropies: Tensor
    loss: Tensor  # of the policy
    chosen: Tensor | None  # 1 or 0: which of them the policy learns from


def _order(parts: Sequence[Minibatch]) -> Tensor:
    """The order in which the tokens of all parts are those of the batch, as indices."""
    places = [i for part in parts for i in part.samples]
    counts = [n for part in parts for n in part.tokens.response_mask.sum(-1).tolist()]
    starts = torch.tensor([0, *counts]).cumsum(0).tolist()
    in_order = sorted(range(len(places)), key=places.__getitem__)
    return torch.cat([torch.arange(starts[k], starts[k + 1]) for k in in_order])
