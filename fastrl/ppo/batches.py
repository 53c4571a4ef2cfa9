"""What a trainer makes of queries and responses: checked, padded batches for its kind of model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastrl.data import batch as data
from fastrl.data.batch import TokenBatch, need_pad_token
from fastrl.models.layout import EncoderDecoder, Layout, layout_of

if TYPE_CHECKING:
    from typing import Self

Collator = Callable[[list[dict[str, Tensor]]], dict[str, Tensor]]


class JoinedBatches:
    """For a causal model: responses behind their queries, padded where the tokenizer says.

    Args:
        layout: of the model.
        vocab_size: of the model.
        tokenizer: gives the pad token and the padding side.
        collator: pads in place of that; gets dicts of ``input_ids`` and ``attention_mask``.
    """

    def __init__(
        self, layout: Layout, vocab_size: int, tokenizer: Any, collator: Collator | None = None
    ):
        self.layout, self.vocab_size = layout, vocab_size
        self.tokenizer, self.collator = tokenizer, collator
        self._warned = False

    def __call__(self, queries: Any, responses: Any, response_masks: Any = None) -> TokenBatch:
        """One batch on the CPU.

        Raises:
            ValueError: names the list and the element that is wrong, and says how.
        """
        queries, responses, response_masks = data.check_token_lists(
            queries, responses, response_masks, vocab_size=self.vocab_size
        )
        responses, response_masks = self.own(responses, response_masks)
        for i, (query, response) in enumerate(zip(queries, responses, strict=True)):
            limit = self.layout.exceeded(len(query), len(response))
            if limit is not None:
                raise ValueError(
                    f"queries[{i}] and responses[{i}] have {len(query)} + {len(response)} tokens, "
                    f"beyond the {limit}: shorten the prompt or generate fewer tokens"
                )
        inputs = self.model_inputs(queries, responses)
        self._look(queries, responses)
        return self.from_inputs(inputs, queries, responses, response_masks)

    def model_inputs(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """What the model's forward takes, padded, on the CPU."""
        return self._pad([torch.cat(pair).cpu() for pair in zip(queries, responses, strict=True)])

    def from_inputs(
        self,
        inputs: dict[str, Tensor],
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        response_masks: Sequence[Tensor] | None = None,
    ) -> TokenBatch:
        """One batch on the CPU, from what :meth:`model_inputs` made of these queries."""
        return TokenBatch.from_padded(
            inputs["input_ids"].cpu(),
            inputs["attention_mask"].cpu(),
            [len(q) for q in queries],
            [len(r) for r in responses],
            None if response_masks is None else [m.cpu() for m in response_masks],
        )

    def own(
        self, responses: Sequence[Tensor], response_masks: Sequence[Tensor] | None = None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor] | None]:
        """Responses and masks without what is not the response's."""
        return responses, response_masks

    def _look(self, queries: Sequence[Tensor], responses: Sequence[Tensor]) -> None:
        """Warns, once, of what may not be meant."""
        for i, (q, r) in enumerate(zip(queries, responses, strict=True)):
            if len(r) > len(q) > 1 and torch.equal(r[: len(q)], q):
                self._warn(
                    f"responses[{i}] begins with its query: the prompt is trained on as part of "
                    "the response. generate(..., return_prompt=False) leaves it out"
                )
                return

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(what, stacklevel=6)

    def _pad(self, sequences: Sequence[Tensor], side: str | None = None) -> dict[str, Tensor]:
        need_pad_token(map(len, sequences), self.tokenizer.pad_token_id, self.tokenizer)
        if self.collator is not None:
            examples = [{"input_ids": s, "attention_mask": torch.ones_like(s)} for s in sequences]
            collated = self.collator(examples)
            return {name: collated[name] for name in ("input_ids", "attention_mask")}
        return data.pad(sequences, self.tokenizer.pad_token_id, side or self.tokenizer.padding_side)


class EncoderDecoderBatches(JoinedBatches):
    """For an encoder–decoder: queries go to the encoder, responses to the decoder.

    Both are padded at their ends, whatever the tokenizer's side: there no position depends on it.
    """

    layout: EncoderDecoder

    def model_inputs(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        started = [self.layout.started(r.cpu()) for r in responses]
        read, written = self._pad([q.cpu() for q in queries], "right"), self._pad(started, "right")
        return {**read, **{f"decoder_{name}": tensor for name, tensor in written.items()}}

    def from_inputs(
        self,
        inputs: dict[str, Tensor],
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        response_masks: Sequence[Tensor] | None = None,
    ) -> TokenBatch:
        # a collator may have padded them on the other side
        read = _to_the_front(inputs["input_ids"].cpu(), inputs["attention_mask"].cpu())
        written = _to_the_front(
            inputs["decoder_input_ids"].cpu(), inputs["decoder_attention_mask"].cpu()
        )
        of_decoder = super().from_inputs(
            dict(zip(("input_ids", "attention_mask"), written, strict=True)),
            [r[:1] for r in responses],  # the start token stands for the query
            responses,
            response_masks,
        )
        lengths = [len(q) for q in queries]
        return EncodedBatch(
            **vars(of_decoder), encoder_ids=read[0], encoder_mask=read[1], encoder_lengths=lengths
        )

    def own(
        self, responses: Sequence[Tensor], response_masks: Sequence[Tensor] | None = None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor] | None]:
        # A response that is the start token alone is one: BART's ends a response too.
        if not all(len(r) > 1 and int(r[0]) == self.layout.start for r in responses):
            return responses, response_masks
        self._warn(
            f"all responses begin with the decoder's start token ({self.layout.start}), as "
            "model.generate returns them: it is left out, being no part of a response. "
            "PPOTrainer.generate does so too"
        )
        masks = None if response_masks is None else [mask[1:] for mask in response_masks]
        return [r[1:] for r in responses], masks

    def _look(self, queries: Sequence[Tensor], responses: Sequence[Tensor]) -> None:
        """A response that repeats its query may well be the task."""


@dataclass(frozen=True)
class EncodedBatch(TokenBatch):
    """[B, T] is what the decoder reads, its start token in the query's place; queries lie apart."""

    encoder_ids: Tensor = field(kw_only=True)  # [B, S] int64
    encoder_mask: Tensor = field(kw_only=True)  # [B, S] int64
    encoder_lengths: list[int] = field(kw_only=True)

    @property
    def model_inputs(self) -> dict[str, Tensor]:
        return {
            "input_ids": self.encoder_ids,
            "attention_mask": self.encoder_mask,
            "decoder_input_ids": self.input_ids,
            "decoder_attention_mask": self.attention_mask,
        }

    @property
    def prompt_lengths(self) -> list[int]:
        return self.encoder_lengths

    def to(self, device: torch.device) -> Self:
        return replace(
            super().to(device),
            encoder_ids=self.encoder_ids.to(device, non_blocking=True),
            encoder_mask=self.encoder_mask.to(device, non_blocking=True),
        )

    def select(self, indices: Sequence[int]) -> Self:
        lengths = [self.encoder_lengths[i] for i in indices]
        there = torch.as_tensor(list(indices)).to(self.encoder_ids.device, non_blocking=True)
        return replace(
            super().select(indices),
            encoder_ids=self.encoder_ids[there, : max(lengths)],
            encoder_mask=self.encoder_mask[there, : max(lengths)],
            encoder_lengths=lengths,
        )


def make_batches(model: Any, tokenizer: Any, collator: Collator | None) -> JoinedBatches:
    """By the kind of model."""
    layout, vocab_size = layout_of(model), model.config.get_text_config().vocab_size
    kind = EncoderDecoderBatches if isinstance(layout, EncoderDecoder) else JoinedBatches
    return kind(layout, vocab_size, tokenizer, collator)


def _to_the_front(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows whose padding comes last; their tokens keep their order."""
    order = mask.argsort(dim=1, descending=True, stable=True)
    return ids.gather(1, order), mask.gather(1, order)
