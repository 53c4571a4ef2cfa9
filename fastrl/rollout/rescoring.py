"""Rescoring: log-probs, entropies and values of given responses, by forwards without padding."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.models.layout import Inputs, layout_of
from fastrl.models.scorer import TokenScorer
from fastrl.models.scoring import ScoringRequest, TokenScores
from fastrl.models.value_head import PreTrainedModelWrapper

SCORED_TOKENS = 2048  # of one forward, prompts included; a longer sample is scored alone


class Rescorer:
    """Scores every token of responses.

    Only samples of one shape share a forward: with padding the results of some models change.

    Args:
        model: a language model, or a value-head model around one.
    """

    def __init__(self, model: Any):
        self.model = model
        self._layout = layout_of(model)
        self._has_values = getattr(model, "has_values", False)
        self._scorer = TokenScorer()

    @torch.no_grad()
    def __call__(
        self, prompts: Sequence[Tensor], responses: Sequence[Tensor], temperature: float
    ) -> dict[str, list[Tensor]]:
        """Returns columns of :class:`Samples` by name, a tensor [T] per response, fp32 on the host:
        ``logprobs``, ``entropies`` at ``temperature``, ``logprobs_t1`` at 1, ``values`` if any."""
        names = ["logprobs", "logprobs_t1", "entropies", *["values"] * self._has_values]
        fields = {name: [torch.zeros(0)] * len(responses) for name in names}
        for part in self._parts(prompts, responses):
            scored = self._score([(prompts[i], responses[i]) for i in part], temperature)
            lengths = [len(responses[i]) for i in part]
            for name, column in fields.items():
                for i, row in zip(part, scored[name].float().cpu().split(lengths), strict=True):
                    column[i] = row
        return fields

    def _score(self, pairs: list[tuple[Tensor, Tensor]], temperature: float) -> dict[str, Any]:
        """Scores [N] of all tokens by column, one response after the other."""
        device = self.model.device
        on_host, rows = self._layout.inputs(pairs)
        labels = torch.cat([response for _, response in pairs]).to(device)
        request = ScoringRequest(
            rows.to(device),
            labels,
            temperature,
            entropy=True,
            values=self._has_values,
            logits=temperature != 1,
        )
        scores = self._forward(request, {name: x.to(device) for name, x in on_host.items()})
        scored = scores._asdict() | {"logprobs_t1": scores.logprobs}
        if scores.logits is not None:
            scored["logprobs_t1"] = fastrl_kernels.token_logprobs(scores.logits.float(), labels)
        return scored

    def _forward(self, request: ScoringRequest, inputs: Inputs) -> TokenScores:
        if isinstance(self.model, PreTrainedModelWrapper):
            return self.model(scoring=request, **inputs)
        return self._scorer(self.model, inputs, request).scores

    def _parts(self, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Iterator[list[int]]:
        """Indices of samples that share a forward; an empty response needs none."""
        by_shape: dict[Hashable, list[int]] = {}
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            if len(response):
                by_shape.setdefault(self._layout.shape(len(prompt), len(response)), []).append(i)
        for indices in by_shape.values():
            first = indices[0]
            size = max(1, SCORED_TOKENS // (len(prompts[first]) + len(responses[first])))
            for start in range(0, len(indices), size):
                yield indices[start : start + size]
