"""Rescoring: log-probs, entropies and values of responses that are there already, by forwards
without padding."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.models.layout import Inputs, layout_of
from fastrl.models.lm_head import Head, choose_head, corner_of
from fastrl.models.scoring import ScoringRequest, TokenScores
from fastrl.models.value_head import PreTrainedModelWrapper
from fastrl.rollout.decode_step import LogitsProcessors
from fastrl.rollout.kv_cache import FIELDS

SCORED_TOKENS = 2048  # in one forward, prompts included; a longer sample has one to itself

Figures = dict[str, Tensor | None]  # of one sample, [R] each, by the names in FIELDS

# A temperature below it is 0, as it is to sample_tokens.
_COLDEST = 1e-30


class Rescorer:
    """Scores every token of responses by forwards without padding.

    Samples of one shape share a forward, and no other: some models compute otherwise where there
    is padding.

    Args:
        model: a language model, or a value-head model around one.
    """

    def __init__(self, model: Any):
        self.model = model
        self._layout = layout_of(model)
        self._head: Head | None = None

    @torch.no_grad()
    def __call__(
        self, prompts: Sequence[Tensor], responses: Sequence[Tensor], processors: LogitsProcessors
    ) -> list[Figures]:
        """Figures on the host, of each response up to the first token that came from no
        distribution: there was a NaN among its logits."""
        figures: list[Figures] = [{} for _ in prompts]
        for part in self._parts(prompts, responses):
            pairs = [(prompts[i], responses[i]) for i in part]
            scored, sound = self._score(pairs, processors)
            start = 0
            for i in part:
                stop = start + len(responses[i])
                figures[i] = {k: None if x is None else x[start:stop] for k, x in scored.items()}
                if not sound[start:stop].all():
                    figures[i] = self._sound_part(prompts[i], responses[i], processors)
                start = stop
        return figures

    def _sound_part(
        self, prompt: Tensor, response: Tensor, processors: LogitsProcessors
    ) -> Figures:
        """By bisection: a NaN shows at earlier tokens too, as 0·NaN in attention."""
        figures, _ = self._score([(prompt, response[:1])], processors)
        figures = {k: None if x is None else x[:0] for k, x in figures.items()}
        least, most = 0, len(response) - 1
        while least < most:
            middle = (least + most + 1) // 2
            scored, sound = self._score([(prompt, response[:middle])], processors)
            if sound.all():
                least, figures = middle, scored
            else:
                most = middle - 1
        return figures

    def _score(
        self, pairs: list[tuple[Tensor, Tensor]], processors: LogitsProcessors
    ) -> tuple[dict[str, Tensor | None], Tensor]:
        """Figures of all responses, one after the other, and which tokens are sound."""
        device = self.model.device
        on_host, rows = self._layout.inputs(pairs)
        inputs = {name: x.to(device) for name, x in on_host.items()}
        labels = torch.cat([response for _, response in pairs]).to(device)
        temperature = processors.temperature if processors.temperature > 0 else 1.0
        request = ScoringRequest(
            rows.to(device),
            labels,
            temperature,
            entropy=True,
            values=getattr(self.model, "has_values", False),
            logits=True,
        )
        scores = self._forward(request, inputs)
        assert scores.logits is not None
        logits = scores.logits.float()
        at_one = scores.logprobs
        if temperature != 1:
            one: Any = fastrl_kernels.token_logprobs(logits, labels)
            at_one = one
        drawn_from = self._processed(logits, pairs, processors) if processors.processes else logits
        highest = drawn_from.amax(-1)
        by_name: dict[str, Tensor | None] = dict.fromkeys(FIELDS)
        by_name |= {
            "logprobs": scores.logprobs,
            "logprobs_t1": at_one,
            "entropies": scores.entropies,
            "values": scores.values,
        }
        if processors.processes or processors.truncates:
            by_name["truncated_logprobs"], by_name["cutoffs"] = truncated_logprobs(
                drawn_from,
                labels,
                temperature=processors.temperature,
                top_k=processors.top_k,
                top_p=processors.top_p,
                min_p=processors.min_p,
            )
        host = {name: None if x is None else x.float().cpu() for name, x in by_name.items()}
        return host, ((highest > -1e30) & (highest < torch.inf)).cpu()

    def _forward(self, request: ScoringRequest, inputs: Inputs) -> TokenScores:
        if isinstance(self.model, PreTrainedModelWrapper):
            return self.model(scoring=request, **inputs)
        if self._head is None:
            self._head = choose_head(self.model, {**corner_of(inputs), "use_cache": False})
        return self._head(self.model, request, {**inputs, "use_cache": False})[0]

    def _processed(
        self, logits: Tensor, pairs: list[tuple[Tensor, Tensor]], processors: LogitsProcessors
    ) -> Tensor:
        """Logits [N, V] after penalties and suppression, each row with what came before it."""
        parts = []
        lengths = [len(response) for _, response in pairs]
        for part, (prompt, response) in zip(logits.split(lengths), pairs, strict=True):
            count = torch.arange(len(response), device=logits.device)
            seen = None
            if processors.repetition_penalty != 1:
                new = torch.zeros(part.shape, dtype=torch.int32, device=logits.device)
                new[0, self._layout.seen(prompt).to(logits.device)] = 1
                new[count[1:], response[:-1].to(logits.device)] = 1
                seen = new.cumsum(0, dtype=torch.int32) > 0
            parts.append(processors.process(part, count, seen))
        return torch.cat(parts)

    def _parts(self, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Iterator[list[int]]:
        """Indices of samples that share a forward."""
        by_shape: dict[Hashable, list[int]] = {}
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            by_shape.setdefault(self._layout.shape(len(prompt), len(response)), []).append(i)
        for indices in by_shape.values():
            first = indices[0]
            size = max(1, SCORED_TOKENS // (len(prompts[first]) + len(responses[first])))
            for start in range(0, len(indices), size):
                yield indices[start : start + size]


def truncated_logprobs(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """What ``fastrl_kernels.sample_tokens`` reports of a token that it draws: log π(token), with π
    = softmax(z/T) cut by top-k, then top-p, then min-p and renormalised; and the lowest logit kept.

    A token at the very edge counts as kept, with all above it: whoever drew it rounds otherwise.

    Args:
        logits: [N, V], any floating dtype; arithmetic is fp32.
        tokens: [N] int64.
        temperature: 0 is greedy: at T = 1, and nothing is cut.

    Returns:
        log-probs [N] in nats, and cutoffs [N], as they stand in ``logits``, -inf where nothing was
        cut; fp32.
    """
    x = logits.float()
    if temperature < _COLDEST:
        temperature, top_k, top_p, min_p = 1.0, 0, 1.0, 0.0
    scaled = (x - x.amax(-1, keepdim=True)) / temperature
    weights = scaled.exp()
    possible = x > -torch.inf
    kept = possible
    if 0 < top_k < x.shape[-1]:
        kept = kept & (x >= x.topk(top_k).values[:, -1:])
    if top_p < 1:
        highest, order = x.sort(descending=True)
        mass = torch.where(kept, weights, 0.0).gather(-1, order).double().cumsum(-1)
        above = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=-1)
        last = (above < top_p * mass[:, -1:]).sum(-1, keepdim=True).clamp(min=1) - 1
        kept = kept & (x >= highest.gather(-1, last))
    if min_p > 0:
        kept = kept & (weights >= min_p)
    drawn = tokens.unsqueeze(-1)
    kept = kept | (possible & (x >= x.gather(-1, drawn)) & possible.gather(-1, drawn))
    cut = (possible & ~kept).any(-1)
    lowest = torch.where(kept, x, torch.inf).amin(-1)
    log_sum = torch.where(kept, weights, 0.0).sum(-1).log()
    return (
        scaled.gather(-1, drawn).squeeze(-1) - log_sum,
        torch.where(cut, lowest, -torch.inf),
    )
