"""A teacher that is a user's function, such as one that asks a server: it says of K tokens at each
place of a response how likely they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fastrl.data.token_batch import TokenBatch
from fastrl.learn.ref_model import RefModel
from fastrl.models.host_memory import to_device
from fastrl.models.scoring import ScoringRequest
from fastrl_kernels import TeacherTokens

_MOST = 1.05  # a sum of probabilities, as in the kernels: log-probs may be rounded to bf16


class AskedTeacher(RefModel):
    """The function, which is asked once for each generation, as reward functions are.

    Args:
        name: names it in errors.
        function: called as ``function(prompt_ids, completion_ids, **columns)`` with lists of token
            ids, the prompts' those that the teacher reads; returns a pair for each completion of L
            tokens: token ids [L, K], distinct in each row, and their log-probs [L, K] at the
            trainer's temperature, -inf where a row has fewer than K.
        rest: what becomes of the other tokens, see :class:`fastrl_kernels.TeacherTokens`.
        vocabulary: the number of tokens.
    """

    mode = "function"

    def __init__(self, name: str, function: Callable[..., Any], rest: str, vocabulary: int):
        self.name, self.function, self.rest = name, function, rest
        self._vocabulary = vocabulary

    def ask(
        self,
        prompts: Sequence[Tensor],
        responses: Sequence[Tensor],
        learned: Sequence[Tensor],
        columns: Mapping[str, Sequence[Any]],
    ) -> list[tuple[Tensor, Tensor]]:
        """Token ids and log-probs [L, K] for each response, on the host.

        Args:
            learned: which tokens of each response are learned: at others nothing is checked.

        Raises:
            TypeError, ValueError: something else than a pair for each response; other shapes; at a
                token that is learned, NaN, an id out of range or twice, or no distribution.
        """
        ids = ([x.tolist() for x in some] for some in (prompts, responses))
        said = self.function(*ids, **columns)
        if not isinstance(said, list | tuple) or len(said) != len(responses):
            count = f" of {len(said)}" if isinstance(said, list | tuple) else ""
            self._refuse(
                f"returned a {type(said).__name__}{count} for {len(responses)} completions: return "
                "a list with a pair (ids, log-probs) for each",
                TypeError,
            )
        return [
            self._checked(pair, len(response), mask, f"completion {i}")
            for i, (pair, response, mask) in enumerate(zip(said, responses, learned, strict=True))
        ]

    def _checked(
        self, pair: Any, length: int, learned: Tensor, where: str
    ) -> tuple[Tensor, Tensor]:
        if not length:  # an empty list has no shape to check
            return torch.zeros(0, 1, dtype=torch.long), torch.zeros(0, 1)
        try:
            ids, logprobs = (torch.as_tensor(x).detach().cpu() for x in pair)
        except (TypeError, ValueError) as error:
            self._refuse(f"returned {pair!r:.80} for {where}: a pair (ids, log-probs)", cause=error)
        if ids.is_floating_point() or ids.dtype == torch.bool:
            self._refuse(f"returned ids of {ids.dtype} for {where}: they must be integers")
        if ids.shape != logprobs.shape or ids.dim() != 2 or len(ids) != length or not ids.shape[1]:
            shapes = tuple(ids.shape), tuple(logprobs.shape)
            self._refuse(
                f"returned ids {shapes[0]} and log-probs {shapes[1]} for {where}: both must be "
                f"({length}, K), K tokens for each of its {length}"
            )
        ids, logprobs = ids.long(), logprobs.float()
        there = logprobs != -torch.inf
        ids = torch.where(there, ids, 0)
        ordered = torch.where(there, ids, -1).sort(-1).values
        faults = {
            "NaN": logprobs.isnan(),
            f"a token outside of [0, {self._vocabulary})": (ids < 0) | (ids >= self._vocabulary),
            "a token twice": (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0),
            "a log-prob above 0": logprobs > math.log(_MOST),
            "probabilities with a sum above 1": logprobs.exp().sum(-1, keepdim=True) > _MOST,
        }
        if self.rest == "renormalised":
            faults["no token, so that nothing can be renormalised"] = ~there.any(-1, keepdim=True)
        for fault, places in faults.items():
            broken = (places.any(-1) & learned).nonzero()
            if len(broken):
                self._refuse(f"says {fault} at token {int(broken[0])} of {where}")
        return ids, logprobs

    def _refuse(
        self, what: str, kind: type[Exception] = ValueError, cause: Exception | None = None
    ) -> NoReturn:
        raise kind(f"teacher {self.name!r} {what}") from cause

    def tokens(self, batch: TokenBatch, samples: Sequence[int]) -> TeacherTokens:
        """What was said at the learned tokens of some samples, sample after sample, on the batch's
        device. Raises ValueError where nobody was asked."""
        if batch.likely is None:
            self._refuse(
                "is a function, which is asked as responses are sampled, and not of batches that "
                "are passed to compute_loss: use a model"
            )
        pairs = [batch.likely[i] for i in samples]
        most = max(ids.shape[1] for ids, _ in pairs)
        ids, logprobs = (
            torch.cat([pad(x, (0, most - x.shape[1]), value=value) for x in of_samples])
            for of_samples, value in zip(zip(*pairs, strict=True), (0, -torch.inf), strict=True)
        )
        device = batch.input_ids.device
        return TeacherTokens(to_device(ids, device), to_device(logprobs, device), self.rest)

    def score(self, inputs: dict[str, Any], request: ScoringRequest) -> NoReturn:
        self._refuse("is a function, and scores no tokens of a request")

    def as_policy(self) -> AbstractContextManager[nn.Module]:
        self._refuse("is a function, and generates nothing")
