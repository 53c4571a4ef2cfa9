"""Makes checked batches of queries and responses, for causal models and encoder–decoders."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastrl.data.token_batch import EncodedBatch, Padded, Padding, TokenBatch
from fastrl.models.host_memory import to_device
from fastrl.models.layout import EncoderDecoder, layout_of

Collator = Callable[[list[dict[str, Tensor]]], dict[str, Tensor]]


class BatchMaker(ABC):
    """Makes checked, padded batches of queries and responses for one kind of model.

    Args:
        layout: how the model reads a sample, see :func:`fastrl.models.layout.layout_of`.
        vocab_size: the model's vocabulary, in tokens.
        tokenizer: has the pad token and the padding side.
        collator: pads in place of the tokenizer's settings; gets dicts of ``input_ids`` and
            ``attention_mask``.
        padding: how batches lie in the model's input; by default a padded row per sample.
    """

    def __init__(
        self,
        layout: Any,
        vocab_size: int,
        tokenizer: Any,
        collator: Collator | None = None,
        padding: Padding | None = None,
    ):
        self.layout, self.vocab_size = layout, vocab_size
        self.tokenizer, self.collator = tokenizer, collator
        self.padding = padding or Padded()
        self._warned = False

    def __call__(self, queries: Any, responses: Any, response_masks: Any = None) -> TokenBatch:
        """Makes one batch on the CPU, from lists of 1-D token ids, and of the responses' masks.

        Raises:
            ValueError: a wrong element, or a sample that is too long; names its list and index.
        """
        queries, responses, response_masks = check_token_lists(
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
        self._warn_of_prompts(queries, responses)
        return self.from_inputs(inputs, queries, responses, response_masks)

    @abstractmethod
    def model_inputs(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Padded arguments of the model's forward, on the CPU."""

    @abstractmethod
    def padded(
        self,
        inputs: dict[str, Tensor],
        query_lengths: list[int],
        response_lengths: list[int],
        response_masks: list[Tensor] | None,
    ) -> TokenBatch:
        """Makes a batch from padded arguments of the model's forward, all on the CPU."""

    def from_inputs(
        self,
        inputs: dict[str, Tensor],
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        response_masks: Sequence[Tensor] | None = None,
    ) -> TokenBatch:
        """Makes a batch on the CPU from the result of :meth:`model_inputs` for these samples."""
        batch = self.padded(
            {name: tensor.cpu() for name, tensor in inputs.items()},
            [len(q) for q in queries],
            [len(r) for r in responses],
            None if response_masks is None else [m.cpu() for m in response_masks],
        )
        return replace(batch, padding=self.padding)

    def own(
        self, responses: Sequence[Tensor], response_masks: Sequence[Tensor] | None = None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor] | None]:
        """Responses and masks without the start token of a decoder, if all responses have it."""
        return responses, response_masks

    def starts(self, responses: Sequence[Tensor]) -> int:
        """The number of tokens in front of each response that :meth:`own` removes: 0, or 1."""
        return 0

    def _warn_of_prompts(self, queries: Sequence[Tensor], responses: Sequence[Tensor]) -> None:  # noqa: B027
        """Warns of responses that begin with their query, for models that read both as one
        sequence."""

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(what, stacklevel=7)

    def _pad(self, sequences: Sequence[Tensor], side: str | None = None) -> dict[str, Tensor]:
        if self.collator is not None:
            examples = [{"input_ids": s, "attention_mask": torch.ones_like(s)} for s in sequences]
            collated = self.collator(examples)
            return {name: collated[name] for name in ("input_ids", "attention_mask")}
        padding = padding_token(map(len, sequences), self.tokenizer, self.vocab_size)
        return pad(sequences, padding, side or self.tokenizer.padding_side)


class DecoderOnlyBatches(BatchMaker):
    """Batches for a causal model: responses behind their queries, padded on the tokenizer's
    side."""

    def model_inputs(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        return self._pad([torch.cat(pair).cpu() for pair in zip(queries, responses, strict=True)])

    def padded(
        self,
        inputs: dict[str, Tensor],
        query_lengths: list[int],
        response_lengths: list[int],
        response_masks: list[Tensor] | None,
    ) -> TokenBatch:
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        return TokenBatch.from_padded(ids, mask, query_lengths, response_lengths, response_masks)

    def _warn_of_prompts(self, queries: Sequence[Tensor], responses: Sequence[Tensor]) -> None:
        for i, (q, r) in enumerate(zip(queries, responses, strict=True)):
            if len(r) > len(q) > 1 and torch.equal(r[: len(q)], q):
                self._warn(
                    f"responses[{i}] begins with its query: the prompt is trained on as part of "
                    "the response. generate(..., return_prompt=False) leaves it out"
                )
                return


class EncoderDecoderBatches(BatchMaker):
    """Batches for an encoder–decoder: queries for the encoder, responses for the decoder.

    Both are padded on the right, whatever the tokenizer's side, so that padding moves no token.
    """

    def model_inputs(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        started = [self.layout.started(r.cpu()) for r in responses]
        read, written = self._pad([q.cpu() for q in queries], "right"), self._pad(started, "right")
        return {**read, **{f"decoder_{name}": tensor for name, tensor in written.items()}}

    def padded(
        self,
        inputs: dict[str, Tensor],
        query_lengths: list[int],
        response_lengths: list[int],
        response_masks: list[Tensor] | None,
    ) -> TokenBatch:
        # A collator may have padded on the left.
        ids, mask = _padded_right(inputs["input_ids"], inputs["attention_mask"])
        written = _padded_right(inputs["decoder_input_ids"], inputs["decoder_attention_mask"])
        starts = [1] * len(response_lengths)  # the start token takes the place of the query
        decoded = TokenBatch.from_padded(*written, starts, response_lengths, response_masks)
        return EncodedBatch(
            **vars(decoded), encoder_ids=ids, encoder_mask=mask, encoder_lengths=query_lengths
        )

    def own(
        self, responses: Sequence[Tensor], response_masks: Sequence[Tensor] | None = None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor] | None]:
        if not self.starts(responses):
            return responses, response_masks
        self._warn(
            f"all responses begin with the decoder's start token ({self.layout.start}), as "
            "model.generate returns them: it is left out, because it is not part of a response. "
            "PPOTrainer.generate leaves it out, too"
        )
        masks = None if response_masks is None else [mask[1:] for mask in response_masks]
        return [r[1:] for r in responses], masks

    def starts(self, responses: Sequence[Tensor]) -> int:
        # The start token alone is a response: BART's is also its EOS.
        return int(
            all(r.dim() == 1 and len(r) > 1 and int(r[0]) == self.layout.start for r in responses)
        )


def make_batches(
    model: Any, tokenizer: Any, collator: Collator | None, padding: Padding | None = None
) -> BatchMaker:
    """The maker of batches for the model's kind."""
    layout, vocab_size = layout_of(model), model.config.get_text_config().vocab_size
    kind = EncoderDecoderBatches if isinstance(layout, EncoderDecoder) else DecoderOnlyBatches
    return kind(layout, vocab_size, tokenizer, collator, padding)


def _padded_right(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids and mask with all padding moved to the right."""
    order = mask.argsort(dim=1, descending=True, stable=True)
    return ids.gather(1, order), mask.gather(1, order)


def pad(
    sequences: Sequence[Tensor], pad_token_id: int | None, side: str, multiple: int | None = None
) -> dict[str, Tensor]:
    """1-D sequences on the CPU as ``input_ids`` and ``attention_mask`` [B, T], padded with
    ``pad_token_id``, or 0 without one, on a ``side``, "left" or "right"; T is a multiple of
    ``multiple``, if there is one."""
    lengths = torch.tensor([len(s) for s in sequences])
    width = int(lengths.max())
    width += -width % (multiple or 1)
    columns = torch.arange(width)
    first = (width - lengths if side == "left" else torch.zeros_like(lengths))[:, None]
    real = (columns >= first) & (columns < first + lengths[:, None])
    input_ids = torch.full(real.shape, pad_token_id or 0, dtype=torch.long)
    input_ids[real] = torch.cat(list(sequences))
    return {"input_ids": input_ids, "attention_mask": real.long()}


def padding_token(
    lengths: Iterable[int], tokenizer: Any, vocab_size: int | None = None
) -> int | None:
    """The id that pads samples of these lengths: that of the tokenizer's pad token, or of its EOS
    without one, as for GPT-2. None where it has neither and no padding is needed.

    Args:
        vocab_size: the model's vocabulary; token 0 replaces a pad token that was added behind it.

    Raises:
        ValueError: lengths differ, and the tokenizer has neither token.
    """
    token = tokenizer.pad_token_id
    if token is None:
        token = tokenizer.eos_token_id
    if token is None and len(set(lengths)) > 1:
        raise ValueError(
            f"{type(tokenizer).__name__} has no pad token and no EOS, and the samples differ in "
            "length: set tokenizer.pad_token to a token of its own before making the trainer"
        )
    return 0 if token is not None and vocab_size is not None and token >= vocab_size else token


def check_token_lists(
    queries: Any,
    responses: Any,
    response_masks: Any = None,
    *,
    vocab_size: int,
    name: str = "queries",
) -> tuple[list[Tensor], list[Tensor], list[Tensor] | None]:
    """Queries, responses and masks as int64 tensors on the CPU; warns if no token counts. Raises
    ValueError for a wrong element, named by its list and index; ``name`` is that of the queries."""
    of_queries = name
    names = {name: queries, "responses": responses}
    if response_masks is not None:
        names["response_masks"] = response_masks
    for name, tensors in names.items():
        _check_list_of_tensors(name, tensors)
        if len(tensors) != len(queries):
            raise ValueError(f"{name} has {len(tensors)} elements, {of_queries} {len(queries)}")
    for name in (of_queries, "responses"):
        for i, ids in enumerate(names[name]):
            if ids.dim() != 1:
                raise ValueError(f"{name}[{i}] must be 1-D token ids, got shape {tuple(ids.shape)}")
            if ids.dtype.is_floating_point or ids.dtype == torch.bool:
                raise ValueError(f"{name}[{i}] must hold integer token ids, got {ids.dtype}")
            if len(ids) == 0:
                raise ValueError(f"{name}[{i}] is empty: every sample needs at least one token")
    for i, mask in enumerate(response_masks or ()):
        if mask.shape != responses[i].shape:
            raise ValueError(
                f"response_masks[{i}] has shape {tuple(mask.shape)}, responses[{i}] "
                f"{tuple(responses[i].shape)}: they must be equal"
            )
        other = mask[(mask != 0) & (mask != 1)] if mask.dtype != torch.bool else mask[:0]
        if len(other):
            raise ValueError(
                f"response_masks[{i}] holds {other[0].item()}: a token counts (1 or True) or "
                "does not (0 or False)"
            )
    host_queries, host_responses = to_host(queries), to_host(responses)
    for name, tensors in ((of_queries, host_queries), ("responses", host_responses)):
        ids = torch.cat(tensors)
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            for i, tensor in enumerate(tensors):
                wrong = tensor[(tensor < 0) | (tensor >= vocab_size)]
                if len(wrong):
                    raise ValueError(
                        f"{name}[{i}] holds token id {int(wrong[0])}, outside the vocabulary of "
                        f"{vocab_size}: was it made by another tokenizer?"
                    )
    host_masks = to_host(response_masks) if response_masks else None
    if host_masks is not None and not any(bool(mask.any()) for mask in host_masks):
        warnings.warn(
            "response_masks leave out every token of all responses: nothing is learned from them",
            stacklevel=2,
        )
    return host_queries, host_responses, host_masks


def check_batch_size(queries: Any, responses: Any, batch_size: int) -> None:
    """Raises ValueError for anything but lists of ``batch_size`` tensors."""
    for name, tensors in (("queries", queries), ("responses", responses)):
        _check_list_of_tensors(name, tensors)
        if len(tensors) != batch_size:
            raise ValueError(f"{name} has {len(tensors)} elements, batch_size is {batch_size}")


def check_scores(
    scores: Any,
    batch_size: int,
    responses: Sequence[Tensor],
    masks: Sequence[Tensor] | None = None,
    starts: int = 0,
) -> tuple[Tensor, list[Tensor] | None]:
    """The responses' scores, and those of their tokens where scores are per token; they may be NaN
    or infinite.

    Args:
        scores: tensors of one number each; or one 1-D tensor for each response, with a number for
            each of its tokens.
        masks: which tokens of the responses count.
        starts: how many start tokens, which have no score, each response and its mask begin with.

    Returns:
        scores, or sums of the tokens' scores, [batch_size] fp32 on the CPU; and None, or for each
        response its L tokens' scores, [L] fp32 on the CPU.

    Raises:
        ValueError: not ``batch_size`` tensors of one number each, nor of one number for each token;
            some of both; a score other than 0 of a token that does not count; names the element.
    """
    _check_list_of_tensors("scores", scores)
    if len(scores) != batch_size:
        raise ValueError(f"scores has {len(scores)} elements, batch_size is {batch_size}")
    for i, score in enumerate(scores):
        if score.dim() > 1:
            raise ValueError(
                f"scores[{i}] must be one number (0-D), or a number for each token of its response "
                f"(1-D), got shape {tuple(score.shape)}"
            )
        if score.is_complex():
            raise ValueError(f"scores[{i}] must be real, got {score.dtype}")
    if all(score.numel() == 1 for score in scores):
        return torch.stack([s.detach().reshape(()).float() for s in scores]).cpu(), None
    flat = torch.cat([score.detach().reshape(-1).float() for score in scores]).cpu()
    of_tokens = list(flat.split([score.numel() for score in scores]))
    first = next(i for i, score in enumerate(scores) if score.numel() != 1)
    for i, (numbers, response) in enumerate(zip(of_tokens, responses, strict=True)):
        if scores[i].dim() == 0:
            raise ValueError(
                f"scores[{i}] is one number, and scores[{first}] has shape "
                f"{tuple(scores[first].shape)}: pass one number for each response, or one for each "
                "token of each response"
            )
        length = response.numel() - starts
        if len(numbers) != length:
            without = " without its start token" if starts else ""
            raise ValueError(
                f"scores[{i}] has {len(numbers)} numbers, responses[{i}] has {length} tokens"
                f"{without}: pass one number for each token, or one for the whole response"
            )
    for i, (numbers, mask) in enumerate(zip(of_tokens, masks or (), strict=False)):
        if not isinstance(mask, Tensor) or mask[starts:].shape != numbers.shape:
            continue  # the checks of the batch refuse it
        lost = (~mask[starts:].cpu().bool() & (numbers != 0)).nonzero()[:, 0].tolist()
        if lost:
            raise ValueError(
                f"scores[{i}][{lost[0]}] is {float(numbers[lost[0]])}, but response_masks[{i}]"
                " leaves that token out: set it to 0, or add it to a token that counts"
            )
    return torch.stack([numbers.double().sum().float() for numbers in of_tokens]), of_tokens


def without_tokens(
    queries: Any, responses: Any, response_masks: Any, left_out: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Responses and masks in which no token of the samples ``left_out`` counts. An empty response
    of theirs becomes its query's last token, because no response of a batch may be empty."""
    responses = list(responses)
    masks = [torch.ones_like(r) for r in responses] if response_masks is None else response_masks
    masks = list(masks)
    if len(masks) != len(responses):
        return responses, masks  # the checks of the batch refuse it
    for i in left_out:
        responses[i] = responses[i] if len(responses[i]) else queries[i][-1:]
        masks[i] = torch.zeros_like(responses[i])
    return responses, masks


def check_weights(
    weights: Any, batch_size: int, device: torch.device | str = "cpu"
) -> Tensor | None:
    """Samples' weights as one fp32 tensor [batch_size]; None stays None.

    Raises:
        ValueError: not ``batch_size`` finite numbers of 0 or more; names the element.
    """
    if weights is None:
        return None
    try:
        values = torch.as_tensor(weights, dtype=torch.float32).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"weights must be numbers, one per sample: {error}") from error
    if values.shape != (batch_size,):
        raise ValueError(
            f"weights has shape {tuple(values.shape)}: pass one number per sample, [{batch_size}]"
        )
    wrong = (~torch.isfinite(values) | (values < 0)).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(f"weights[{i}] is {float(values[i])}: weights must be finite, 0 or more")
    return to_device(values, device)


def collate(examples: Sequence[Any]) -> Any:
    """A batch of examples, in the form that loops of the classic PPO API read.

    Dicts become a dict of lists, with ``input_ids`` as 1-D LongTensors. Tuples become a list, or a
    named tuple, of their fields' batches; tensors of one shape are stacked, others become a list;
    the rest is as in torch's ``default_collate``.
    """
    first = examples[0]
    if isinstance(first, Mapping):
        batch = {key: [example[key] for example in examples] for key in first}
        if "input_ids" in batch:
            batch["input_ids"] = [torch.as_tensor(x, dtype=torch.long) for x in batch["input_ids"]]
        return batch
    if isinstance(first, tuple):
        fields = [collate(field) for field in zip(*examples, strict=True)]
        return type(first)(*fields) if hasattr(first, "_fields") else fields
    if isinstance(first, Tensor) and len({example.shape for example in examples}) > 1:
        return list(examples)
    return torch.utils.data.default_collate(list(examples))


def make_dataloader(
    dataset: Any, batch_size: int, collator: Callable | None, keep_columns: Iterable[str] | None
) -> torch.utils.data.DataLoader:
    """A shuffled loader of whole batches; warns if there is not one batch.

    Args:
        collator: makes a batch of examples; by default :func:`collate`.
        keep_columns: other columns of a ``datasets.Dataset`` are dropped; None keeps all.
    """
    if len(dataset) < batch_size:
        warnings.warn(
            f"the dataset has {len(dataset)} samples, fewer than batch_size={batch_size}: the "
            "dataloader has no batch; lower batch_size or bring more data",
            stacklevel=4,
        )
    if keep_columns is not None and hasattr(dataset, "remove_columns"):
        unused = [c for c in dataset.column_names if c not in set(keep_columns)]
        dataset = dataset.remove_columns(unused)
    return torch.utils.data.DataLoader(
        dataset, batch_size=batch_size, collate_fn=collator or collate, shuffle=True, drop_last=True
    )


def _check_list_of_tensors(name: str, tensors: Any) -> None:
    if not isinstance(tensors, (list, tuple)):
        raise ValueError(f"{name} must be a list of tensors, got {type(tensors).__name__}")
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name}[{i}] must be a tensor, got {type(tensor).__name__}")


def on_host(*lists: Any) -> Sequence[Any]:
    """Lists of token ids and masks, moved to the host's memory in one transfer if they were not
    there. Anything else stays as it is: checks come later."""
    elsewhere = [
        x
        for rows in lists
        for x in rows or ()
        if isinstance(x, Tensor)
        and x.device.type != "cpu"
        and x.dim() == 1
        and not x.is_floating_point()
    ]
    if not elsewhere:
        return lists
    joined = torch.cat([x.long() for x in elsewhere]).cpu().split([len(x) for x in elsewhere])
    moved = {id(x): on_cpu.to(x.dtype) for x, on_cpu in zip(elsewhere, joined, strict=True)}
    return [None if rows is None else [moved.get(id(x), x) for x in rows] for rows in lists]


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the tensors as int64 on the CPU, by one transfer if all are on one device."""
    if len({tensor.device for tensor in tensors}) > 1:
        return [to_host([tensor])[0] for tensor in tensors]
    joined = torch.cat(list(tensors)).long().cpu()
    return list(joined.split([len(t) for t in tensors]))
