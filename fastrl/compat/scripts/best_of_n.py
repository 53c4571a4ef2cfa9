"""BestOfNSampler: the responses with the highest scores among several, under TRL 0.11's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl.core import set_seed
from fastrl.models.utils import evaluating
from fastrl.rollout.generation_check import together


class BestOfNSampler:
    """Draws ``sample_size`` responses to each query and keeps the ``n_candidates`` best.

    Args:
        model: a value-head model of fastrl, or a model of transformers, with ``generate``.
        queries_to_scores: returns a score for each text, a response as :meth:`generate` returns it.
        length_sampler: draws max_new_tokens, once for each query.
        seed: the seed of torch, Python and NumPy; None: generators stay as they are.

    Raises:
        ValueError: ``n_candidates`` is below 1, or above ``sample_size``.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        queries_to_scores: Callable[[list[str]], Sequence[float]],
        length_sampler: Callable[[], int],
        sample_size: int = 4,
        seed: int | None = None,
        n_candidates: int = 1,
        generation_config: Any = None,
    ):
        if not 1 <= n_candidates <= sample_size:
            raise ValueError(
                f"n_candidates must be 1 to sample_size ({sample_size}), got {n_candidates}"
            )
        if seed is not None:
            set_seed(seed)
        self.model, self.tokenizer = model, tokenizer
        self.queries_to_scores, self.length_sampler = queries_to_scores, length_sampler
        self.sample_size, self.n_candidates = sample_size, n_candidates
        self.gen_config = generation_config

    @torch.no_grad()
    def generate(
        self,
        tokenized_query: Any,
        skip_special_tokens: bool = True,
        device: Any = None,
        **generation_kwargs: Any,
    ) -> list[list[str]]:
        """Returns each query's best responses, the best one first, as texts, which begin with the
        query unless the model is an encoder–decoder.

        Args:
            tokenized_query: the token ids of a query, a list or a 1-D tensor, or of several.
            device: the model's device; None: that of its weights.
        """
        one = not isinstance(tokenized_query[0], list | Tensor) or (
            isinstance(tokenized_query, Tensor) and tokenized_query.dim() == 1
        )
        queries = [tokenized_query] if one else tokenized_query
        device = device or next(self.model.parameters()).device
        best_texts = []
        for query in queries:
            ids = torch.as_tensor(query, device=device).expand(self.sample_size, -1)
            length, texts = self.length_sampler(), []
            with evaluating(self.model):
                for part in ids.split(together(self.model, list(ids), self.sample_size)):
                    sequences = self.model.generate(
                        part,
                        attention_mask=torch.ones_like(part),
                        max_new_tokens=length,
                        generation_config=self.gen_config,
                        **generation_kwargs,
                    )
                    texts += self.tokenizer.batch_decode(
                        sequences, skip_special_tokens=skip_special_tokens
                    )
            scores = torch.as_tensor(self.queries_to_scores(texts), dtype=torch.float64)
            best = scores.topk(self.n_candidates).indices.tolist()
            best_texts.append([texts[i] for i in best])
        return best_texts
