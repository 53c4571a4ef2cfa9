"""What losses and reweighters see of the models: log-probs of responses, or rewards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastrl.alignment.batch import Batch
from fastrl.data.batch import BatchMaker, TokenBatch
from fastrl.models.scoring import ScoringRequest, TokenScores
from fastrl.ppo.experience import scoring_request
from fastrl.ref_model import RefModel

Score = Callable[[dict[str, Any], ScoringRequest], TokenScores]


class ResponseLogprobs(NamedTuple):
    """Of one response per sample, in nats."""

    sums: Tensor  # [B] fp32, Σ log π over the response's tokens
    tokens: Tensor  # [B] int64, how many they are

    @property
    def means(self) -> Tensor:
        return self.sums / self.tokens

    def where(self, condition: Tensor, other: ResponseLogprobs) -> ResponseLogprobs:
        """These where [B] ``condition`` holds, the other's elsewhere."""
        pairs = zip(self, other, strict=True)
        return ResponseLogprobs(*(torch.where(condition, x, y) for x, y in pairs))


class Tokens:
    """Makes what a causal model reads of a batch, once per batch: all its responses, each behind
    its prompt, generation 1 first.

    Args:
        batches: for the model and its tokenizer.
        device: where the models are.
        reference: whose layers may be shared with the policy.
    """

    def __init__(self, batches: BatchMaker, device: torch.device, reference: RefModel):
        self.batches, self.device, self.reference = batches, device, reference

    def __call__(self, batch: Batch) -> TokenBatch:
        if batch.tokens is None:
            which = range(1, batch.generations + 1)
            responses = [response for i in which for response in batch.responses(i)]
            tokens = self.batches(batch.prompts() * batch.generations, responses)
            tokens = tokens.to(self.device)
            batch.tokens = tokens.on(self.reference.trunk_cache(tokens.sequences()))
        return batch.tokens


class TrainedPolicy:
    """The language model that is trained. One forward serves all responses of a batch.

    Attributes:
        model: as it is trained, wrapped for several processes say.
        tokens: what it reads.
        mean: a 0-d tensor's mean over all processes.
    """

    def __init__(self, model: nn.Module, tokens: Tokens, mean: Callable[[Tensor], Tensor]):
        self.model, self.tokens, self.mean = model, tokens, mean

    def logprobs(self, batch: Batch) -> tuple[ResponseLogprobs, ...]:
        """One per generation; prompts are not scored."""
        return response_logprobs(self._score, self.tokens(batch), batch.generations)

    def _score(self, inputs: dict[str, Any], request: ScoringRequest) -> TokenScores:
        return self.model(**inputs, scoring=request)


class ReferencePolicy:
    """What the policy is compared with; never with gradients."""

    def __init__(self, reference: RefModel, tokens: Tokens):
        self.reference, self.tokens = reference, tokens

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> tuple[ResponseLogprobs, ...]:
        """One per generation."""
        return response_logprobs(self.reference.score, self.tokens(batch), batch.generations)


class CachedReference:
    """Log-probs that were computed once, before training began: no reference has to be kept.

    Args:
        compute: what computes them.
        tokens: of the models.
    """

    def __init__(self, compute: Score, tokens: Tokens):
        self.tokens = tokens
        self._compute: Score | None = compute
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    def __len__(self) -> int:
        """Responses that are known."""
        return len(self._known)

    @torch.no_grad()
    def learn(self, batch: Batch) -> None:
        """Computes those that are not known yet."""
        assert self._compute is not None
        new = [
            i for i in range(batch.size) if not all(key in self._known for key in _keys(batch, i))
        ]
        if not new:
            return
        part = batch.select(new)
        found = response_logprobs(self._compute, self.tokens(part), part.generations)
        sums = torch.stack([each.sums for each in found], dim=1).tolist()
        for i, row in enumerate(sums):
            self._known |= dict(zip(_keys(part, i), row, strict=True))

    @property
    def closed(self) -> bool:
        return self._compute is None

    def close(self) -> None:
        """No more is learned, and what computed it is let go."""
        self._compute = None

    def logprobs(self, batch: Batch) -> tuple[ResponseLogprobs, ...]:
        """One per generation.

        Raises:
            ValueError: a response that was not seen before training.
        """
        try:
            rows = [[self._known[key] for key in _keys(batch, i)] for i in range(batch.size)]
        except KeyError:
            raise ValueError(
                "the batch holds a response whose reference log-prob was not computed before "
                "training: pass such data when the trainer is made, or choose reference='copy'"
            ) from None
        device = self.tokens.device
        sums = torch.tensor(rows, device=device)
        counts = [
            torch.tensor([len(e.responses[i].ids) for e in batch.examples], device=device)
            for i in range(batch.generations)
        ]
        return tuple(map(ResponseLogprobs, sums.unbind(1), counts))


class RewardModel:
    """A sequence classifier with one label: a reward for every response of a batch.

    Attributes:
        model: as it is trained.
        device: where it is.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self.model, self.device = model, device

    def rewards(self, batch: Batch) -> tuple[Tensor, ...]:
        """[B] fp32 per generation, of prompt and response; one forward for all."""
        which = range(1, batch.generations + 1)
        inputs = {}
        for name, filler in (("token_ids", batch.pad_token_id or 0), ("attention_mask", 0)):
            sides = [batch[f"generation{i}_{name}"] for i in which]
            width = max(side.shape[1] for side in sides)
            inputs[name] = torch.cat(
                [nn.functional.pad(x, (0, width - x.shape[1]), value=filler) for x in sides]
            ).to(self.device)
        out = self.model(input_ids=inputs["token_ids"], attention_mask=inputs["attention_mask"])
        return out.logits.float().squeeze(-1).chunk(batch.generations)


def response_logprobs(
    score: Score, tokens: TokenBatch, generations: int
) -> tuple[ResponseLogprobs, ...]:
    """Sums over the counted tokens of each response, in a fixed order."""
    request = scoring_request(tokens, values=False)
    scores = score(tokens.model_inputs, request)
    sums = tokens.scatter(scores.logprobs, request.rows).sum(-1)
    counts = tokens.mask.sum(-1)
    pairs = zip(sums.chunk(generations), counts.chunk(generations), strict=True)
    return tuple(ResponseLogprobs(*pair) for pair in pairs)


def _keys(batch: Batch, i: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    example = batch.examples[i]
    return [(example.prompt_ids, response.ids) for response in example.responses]
