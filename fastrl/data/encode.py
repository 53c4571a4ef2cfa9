"""Token ids of prompts and responses: the encoder of SFT, pairs, prompts and reward scoring."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fastrl.data.chat import (
    TextOrMessages,
    as_messages,
    assistant_spans,
    chat_ids,
    check_spans,
    check_unicode,
    is_blank,
    marked_spans,
    marks_answers,
    prompt_text,
    render,
    shared_length,
)
from fastrl.data.examples import Example, Response
from fastrl.settings import check_types

TRUNCATIONS = ("keep_end", "keep_start")

Spans = Sequence[tuple[int, int]] | None  # begin and end of each token in a text; None: not known


@dataclass(frozen=True)
class Encoder:
    """Tokenises prompts and responses apart, as in generation: a prompt's tokens are the same in
    front of any response, and no token spans both.

    A response is tokenised as the continuation of a text: without the space that SentencePiece puts
    in front of a text.

    Args:
        tokenizer: adds its special tokens in front of prompts, and at both ends of whole texts.
        max_length: the most tokens of prompt and response; the response's end is cut, and with it
            EOS.
        max_prompt_length: the most tokens of a prompt; None: what an example's longest response
            leaves of ``max_length``, but at least half of it.
        truncation: "keep_end" or "keep_start" of prompts that are too long.
        add_eos: put EOS behind texts that are responses or have no prompt. Chat templates write
            their own EOS; blanks behind that are left out, because no policy generates them.
        add_special: whether a call, and :meth:`alone`, add the tokenizer's special tokens to texts.
        template: further arguments of the chat template, such as ``tools``.

    Raises:
        ValueError: limits that leave no room, another truncation.
        TypeError: an argument of another type.
    """

    tokenizer: Any
    max_length: int | None = None
    max_prompt_length: int | None = None
    truncation: str = "keep_end"
    add_eos: bool = True
    add_special: bool = True
    template: Mapping[str, Any] = field(default_factory=dict, hash=False)
    _base: Encoder | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_types(self, Encoder)
        if self.truncation not in TRUNCATIONS:
            raise ValueError(
                f"truncation must be one of {', '.join(TRUNCATIONS)}, got {self.truncation!r}"
            )
        for name, least in (("max_length", 2), ("max_prompt_length", 1)):
            limit = getattr(self, name)
            if limit is not None and limit < least:
                raise ValueError(f"{name} must be at least {least}, got {limit}")
        both = self.max_length is not None and self.max_prompt_length is not None
        if both and self.max_prompt_length >= self.max_length:  # type: ignore[operator]
            raise ValueError(
                f"max_prompt_length={self.max_prompt_length} leaves nothing of max_length="
                f"{self.max_length} for responses: lower it"
            )

    def __call__(
        self,
        prompt: TextOrMessages,
        answers: Sequence[TextOrMessages] = (),
        *,
        finished: bool = True,
        **others: Any,
    ) -> Example:
        """Encodes a prompt with its responses.

        Args:
            finished: False for responses that a length limit cut: they get no EOS, and lose that of
                a chat template.
            others: further fields of the example.

        Raises:
            ValueError: a chat template that does not put the prompt in front of the response; a
                prompt without tokens.
        """
        text = prompt if isinstance(prompt, str) else self._rendered(prompt, answered=False)
        encoded = [self._response(prompt, text, answer, finished) for answer in answers]
        front, ids, spans = self._prompt(text, not (self.add_special and isinstance(prompt, str)))
        if not front and not ids:
            raise ValueError(f"the tokenizer makes no token of the prompt {text!r}")
        limit = self._prompt_limit(max((len(response) for _, response, _ in encoded), default=0))
        if limit is not None and len(front) + len(ids) > limit:
            front = front[:limit]
            room = limit - len(front)
            begin = len(ids) - room if self.truncation == "keep_end" else 0
            text, ids = self._cut(text, ids, spans, begin, begin + room)
        prompt_ids = (*front, *ids)
        responses = []
        for answer, tokens, answer_spans in encoded:
            room = len(tokens)
            if self.max_length is not None:
                room = min(room, max(self.max_length - len(prompt_ids), 0))
            cut, kept = self._cut(answer, tokens, answer_spans, 0, room)
            responses.append(Response(cut, tuple(kept), finished and room == len(tokens)))
        messages = None if isinstance(prompt, str) else list(prompt)
        return Example(text, prompt_ids, tuple(responses), messages=messages, **others)

    def with_template(self, template: Mapping[str, Any]) -> Encoder:
        """The same encoder with these arguments of the chat template, too."""
        if not template:
            return self
        other = copy.copy(self)
        object.__setattr__(other, "template", {**self.template, **template})
        object.__setattr__(other, "_base", self)  # caches what depends on the tokenizer alone
        return other

    def joined(
        self, prompt: TextOrMessages, answer: TextOrMessages, *, finished: bool = True
    ) -> tuple[list[int], int]:
        """The token ids of a prompt and its answer, and how many of them are the prompt's: none
        of a blank prompt, with which :meth:`alone` reads prompt and answer as one text, or the
        answer only, if one of the two is messages."""
        if not prompt or (isinstance(prompt, str) and is_blank(prompt)):
            both = isinstance(prompt, str) and isinstance(answer, str)
            ids, _ = self.alone(prompt + answer if both else answer)  # type: ignore[operator]
            return ids if finished else _without_end(ids, self.tokenizer), 0
        example = self(prompt, (answer,), finished=finished)
        return [*example.prompt_ids, *example.responses[0].ids], len(example.prompt_ids)

    def alone(
        self, text_or_chat: TextOrMessages, assistant_only: bool = False
    ) -> tuple[list[int], list[bool]]:
        """The token ids of a text or chat without a prompt; and which of them to learn: all, or
        the assistant's turns. Raises ValueError where these cannot be found in the tokens."""
        if isinstance(text_or_chat, str):
            ids = self.text(text_or_chat, not self.add_special) if text_or_chat else []
            if self.add_eos and ids:
                ids = _with_end(ids, self.tokenizer)
            learned = [True] * len(ids)
        else:
            ids = chat_ids(text_or_chat, self.tokenizer, template=self.template)
            ids, learned = ids[: self._end(ids)], [True] * len(ids)
            if assistant_only:
                marks = marks_answers(self.tokenizer)
                find = marked_spans if marks else assistant_spans
                spans = check_spans(find, text_or_chat, self.tokenizer, self.template)
                learned = self._within(text_or_chat, spans)
            learned = learned[: len(ids)]
        return ids[: self.max_length], learned[: self.max_length]

    def behind(self, prompt: list[dict[str, Any]], whole: list[dict[str, Any]]) -> list[bool]:
        """Says of each token of a whole conversation whether it lies behind the prompt in front."""
        begin = len(self._rendered(prompt, answered=False))
        return self._within(whole, [(begin, len(self._rendered(whole)))])

    def _within(
        self, conversation: list[dict[str, Any]], parts: Sequence[tuple[int, int]]
    ) -> list[bool]:
        """Says of each token of a conversation whether it begins within ``parts`` of its text."""
        _, _, spans = _tokens(self._exact_tokenizer, self._rendered(conversation))
        if spans is None:
            raise ValueError(
                f"{type(self.tokenizer).__name__} does not tell where its tokens lie, by which the "
                "assistant's turns are found: use a fast tokenizer"
            )
        return [any(a <= begin < b for a, b in parts) for begin, _ in spans]

    def _rendered(self, messages: list[dict[str, Any]], *, answered: bool = True) -> str:
        return render(messages, self.tokenizer, answered=answered, template=self.template)

    def _prompt_limit(self, longest: int) -> int | None:
        if self.max_prompt_length is not None or self.max_length is None:
            return self.max_prompt_length
        return max(self.max_length - longest, (self.max_length + 1) // 2)

    def _prompt(self, text: str, chat: bool) -> tuple[list[int], list[int], Spans]:
        """The special tokens in front of a text, the text's tokens, and their spans."""
        special = not _is_complete(text, self.tokenizer, chat)
        ids, added, spans = _tokens(self.tokenizer, text, special)
        begin, end = self._between(ids, added)
        return ids[:begin], ids[begin:end], spans and spans[begin:end]

    def _between(self, ids: Sequence[int], added: Sequence[int]) -> tuple[int, int]:
        """The positions at which a text's tokens begin and end, between the special tokens that
        were added or that the text begins with."""
        begin = next((i for i, special in enumerate(added) if not special), len(added))
        if begin == len(ids):  # an empty text
            begin -= begin > 0 and ids[-1] == end_token(self.tokenizer)
        elif begin == 0:
            begin = self._opening(ids)
        return begin, next((i for i in range(begin, len(added)) if added[i]), len(added))

    def _opening(self, ids: Sequence[int]) -> int:
        """Counts special tokens that ``ids`` begin with: those in front of all texts, or BOS."""
        front = self._front
        if front and list(ids[: len(front)]) == front:
            return len(front)
        return int(list(ids[:1]) in ([self.tokenizer.bos_token_id], [self.tokenizer.cls_token_id]))

    @cached_property
    def _front(self) -> list[int]:
        """The special tokens that the tokenizer puts in front of a text."""
        if self._base is not None:
            return self._base._front
        ids, added, _ = _tokens(self.tokenizer, "a", True)
        return ids[: next((i for i, special in enumerate(added) if not special), 0)]

    def text(self, text: str, chat: bool = False) -> list[int]:
        """The token ids of a whole text, with the tokenizer's special tokens at both ends; a chat
        template's text has its own, and none stands twice."""
        ids, added, _ = _tokens(self.tokenizer, text, not _is_complete(text, self.tokenizer, chat))
        _, end = self._between(ids, added)
        closing = ids[end:]
        return ids[:end] if closing and ids[:end][-len(closing) :] == closing else ids

    def prompts(
        self,
        prompts: Sequence[TextOrMessages],
        name_of: Callable[[int], str],
        templates: Sequence[Mapping[str, Any]] = (),
        *,
        closed: bool = False,
        plain: bool = True,
    ) -> tuple[list[str], list[list[int]]]:
        """Many prompts as texts, and their token ids, cut by :meth:`cut_prompt`. Texts get the
        special tokens that the tokenizer puts in front, unless they begin with BOS; chats are as
        the template writes them.

        Args:
            name_of: the name of a prompt by its index, for errors.
            templates: each prompt's arguments of the chat template; by default the encoder's.
            closed: add the special tokens at the end, too, for models whose encoder reads prompts.
            plain: see :func:`fastrl.data.chat.prompt_text`, whose errors are raised.
        """
        texts = [
            prompt_text(
                prompt,
                self.tokenizer,
                name_of(i),
                templates[i] if templates else self.template,
                plain=plain,
            )
            for i, prompt in enumerate(prompts)
        ]
        complete = [
            _is_complete(text, self.tokenizer, not isinstance(prompt, str))
            for text, prompt in zip(texts, prompts, strict=True)
        ]
        ids_by_prompt: dict[int, list[int]] = {}
        for special in (True, False):
            indices = [i for i, done in enumerate(complete) if done != special]
            if not indices:
                continue
            encoded = self.tokenizer(
                [texts[i] for i in indices],
                add_special_tokens=special,
                return_special_tokens_mask=True,
                return_attention_mask=False,
            )
            rows = zip(indices, encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
            for i, ids, added in rows:
                ids_by_prompt[i] = list(ids) if closed else ids[: self._between(ids, added)[1]]
        return texts, [self.cut_prompt(ids_by_prompt[i]) for i in range(len(texts))]

    def cut_prompt(self, ids: list[int]) -> list[int]:
        """A prompt's tokens, of which at most ``max_prompt_length`` stay: the special tokens that
        it begins with, and behind them the end or the beginning, see ``truncation``."""
        limit = self.max_prompt_length
        if limit is None or len(ids) <= limit:
            return ids
        front = min(self._opening(ids), limit)
        room = limit - front
        begin = len(ids) - room if self.truncation == "keep_end" else front
        return [*ids[:front], *ids[begin : begin + room]]

    def together(
        self, prompt: TextOrMessages, answers: Sequence[TextOrMessages]
    ) -> tuple[list[int], list[list[int]]]:
        """The token ids of a prompt, and of each answer behind it, both tokenised as one text, by
        TRL's rule: the prompt's tokens are those that it has in front of the answers. No limit cuts
        them. Warns where the prompt has other tokens alone."""
        if isinstance(prompt, str):
            alone = self._opened(prompt)
            whole = [self._opened(prompt + answer) for answer in answers]  # type: ignore[operator]
            if self.add_eos:
                whole = [_with_end(ids, self.tokenizer) for ids in whole]
        else:
            options = {"tokenizer": self.tokenizer, "template": self.template}
            alone = chat_ids(prompt, answered=False, **options)
            whole = [chat_ids([*prompt, *answer], **options) for answer in answers]
        shared = min(shared_length(alone, ids) for ids in whole)
        if shared < len(alone):
            warnings.warn(
                "the end of a prompt has other tokens in front of its completion than alone "
                f"({self.tokenizer.decode(alone[shared:])!r}): the completion begins where they "
                "part, so that the model is trained on another context than it generates from; end "
                "prompts where a token ends, or use a chat template that writes them alike in both "
                "cases",
                stacklevel=2,
            )
        return alone[:shared], [ids[shared:] for ids in whole]

    def _opened(self, text: str) -> list[int]:
        """The tokens of a text with the special tokens in front, and none behind."""
        front, ids, _ = self._prompt(text, False)
        return [*front, *ids]

    def _response(
        self, prompt: TextOrMessages, prompt_text: str, answer: TextOrMessages, finished: bool
    ) -> tuple[str, list[int], Spans]:
        if isinstance(answer, str):
            ids, spans = self._encode_continuation(answer)
            if not finished:
                return answer, _without_end(ids, self.tokenizer), spans
            return answer, _with_end(ids, self.tokenizer) if self.add_eos else ids, spans
        whole = self._rendered([*as_messages(prompt), *answer])
        if not whole.startswith(prompt_text):
            raise ValueError(
                f"the chat template writes {prompt_text!r} for the prompt, and something else in "
                f"front of its response ({whole!r:.200}): mend the template, or bring texts"
            )
        text = whole[len(prompt_text) :]
        if not finished:  # the policy did not write what the template puts behind the message
            content = answer[-1].get("content")
            if isinstance(content, str):
                text = text[: text.rfind(content.strip()) + len(content.strip())]
        ids, spans = self._encode_continuation(text)
        if finished:
            text, ids = self._cut(text, ids, spans, 0, self._end(ids))
        return text, ids, spans

    def _end(self, ids: list[int]) -> int:
        """The number of tokens up to the last EOS, if only blanks follow it; else of all tokens."""
        eos = self.tokenizer.eos_token_id
        if eos not in ids:
            return len(ids)
        end = len(ids) - ids[::-1].index(eos)
        return len(ids) if self.tokenizer.decode(ids[end:]).strip() else end

    def _cut(
        self, text: str, ids: list[int], spans: Spans, begin: int, end: int
    ) -> tuple[str, list[int]]:
        """Tokens ``begin`` to ``end``, and their part of the text."""
        if begin <= 0 and end >= len(ids):
            return text, ids
        if spans is None:  # slow tokenizers
            return self.tokenizer.decode(ids[begin:end]), ids[begin:end]
        # A token's span may leave out the space in front of it, which belongs to its text.
        start, stop = (spans[i - 1][1] if i else 0 for i in (begin, min(end, len(spans))))
        return text[start:stop], ids[begin:end]

    def _encode_continuation(self, text: str) -> tuple[list[int], Spans]:
        """The tokens of a text that continues another, and their spans: up to its first special
        token without the space that SentencePiece adds in front, then as the tokenizer has it."""
        ids, _, spans = _tokens(self.tokenizer, text)
        if self._continuation_tokenizer is self.tokenizer:
            return ids, spans
        special = self.tokenizer.added_tokens_decoder
        front, _, front_spans = _tokens(self._continuation_tokenizer, text)
        begin, end = (
            next((i for i, token in enumerate(row) if token in special), len(row))
            for row in (ids, front)
        )
        return [*front[:end], *ids[begin:]], [*(front_spans or ())[:end], *(spans or ())[begin:]]

    @cached_property
    def _exact_tokenizer(self) -> Any:
        """The tokenizer without its post-processor: texts get no special tokens, and spans include
        the blanks in front of words, which ``trim_offsets`` would leave out."""
        if self._base is not None:
            return self._base._exact_tokenizer
        if not self.tokenizer.is_fast or self.tokenizer.backend_tokenizer.post_processor is None:
            return self.tokenizer
        exact = copy.copy(self.tokenizer)
        exact._tokenizer = copy.deepcopy(self.tokenizer.backend_tokenizer)
        exact._tokenizer.post_processor = None
        return exact

    @cached_property
    def _continuation_tokenizer(self) -> Any:
        """The tokenizer without the space that SentencePiece puts in front of a text. (Other kinds
        that add a space are left as they are: some know words only with it.)"""
        if self._base is not None:
            return self._base._continuation_tokenizer
        if not self.tokenizer.is_fast:
            return self.tokenizer
        backend = copy.deepcopy(self.tokenizer.backend_tokenizer)
        changed = False
        for name in ("normalizer", "pre_tokenizer"):
            step = getattr(backend, name)
            if step is None:
                continue
            state = json.loads(step.__getstate__())
            without = _without_prefix(state)
            if without != state:
                setattr(backend, name, _from_state(name, without))
                changed = True
        if not changed:
            return self.tokenizer
        continuing = copy.copy(self.tokenizer)
        continuing._tokenizer = backend
        return continuing


def encode_prompt(
    prompt: TextOrMessages, tokenizer: Any, name: str = "prompt", *, closed: bool = False
) -> tuple[str, list[int]]:
    """A prompt as one text and its token ids, up to where the answer begins. A text gets the
    special tokens that the tokenizer puts in front; a chat is as its template writes it.

    Args:
        name: the prompt's name, for errors.
        closed: add the special tokens at the end, too, for models whose encoder reads prompts.
    """
    (text,), (ids,) = Encoder(tokenizer).prompts([prompt], lambda _: name, closed=closed)
    return text, ids


def encode_text(text: str, tokenizer: Any) -> list[int]:
    """The token ids of a whole text, see :meth:`Encoder.text`."""
    return Encoder(tokenizer).text(text)


def encode_responses(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """The token ids of texts that continue prompts, without EOS."""
    encoder = Encoder(tokenizer)
    return [encoder._encode_continuation(text)[0] for text in texts]


def encode_jointly(
    texts: Sequence[str], tokenizer: Any, *, chat: bool, max_length: int | None
) -> Any:
    """Whole texts as a padded batch, encoded and cut by the tokenizer; with ``chat`` they have
    their special tokens already."""
    return tokenizer(
        list(texts),
        padding=True,
        add_special_tokens=not chat,
        truncation=max_length is not None,
        max_length=max_length,
        return_tensors="pt",
    )


def end_token(tokenizer: Any) -> int | None:
    """EOS, or else SEP (BERT's tokenizer has no EOS)."""
    eos = tokenizer.eos_token_id
    return getattr(tokenizer, "sep_token_id", None) if eos is None else eos


def closes_texts(tokenizer: Any) -> bool:
    """Whether the tokenizer itself puts the end token behind a text."""
    end = end_token(tokenizer)
    return end is not None and encode_text("a", tokenizer)[-1:] == [end]


def _with_end(ids: list[int], tokenizer: Any) -> list[int]:
    """The ids, and the end token once behind them, if the tokenizer has one."""
    end = end_token(tokenizer)
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def _without_end(ids: list[int], tokenizer: Any) -> list[int]:
    return ids[:-1] if ids and ids[-1] == end_token(tokenizer) else ids


def _is_complete(text: str, tokenizer: Any, chat: bool) -> bool:
    """Whether a text has its special tokens: by a chat template, or as BOS (CLS) begins it."""
    start = tokenizer.bos_token or tokenizer.cls_token
    return chat or bool(start and text.startswith(start))


def _tokens(
    tokenizer: Any, text: str, special: bool = False
) -> tuple[list[int], Sequence[int], Spans]:
    """A text's token ids, which of them the tokenizer added, and their spans."""
    fast = tokenizer.is_fast
    encoded = tokenizer(
        check_unicode(text),
        add_special_tokens=special,
        return_special_tokens_mask=True,
        return_offsets_mapping=fast,
        return_attention_mask=False,
    )
    spans = encoded["offset_mapping"] if fast else None
    return list(encoded["input_ids"]), encoded["special_tokens_mask"], spans


def _without_prefix(state: Any) -> Any:
    """A normalizer or pre-tokenizer, as JSON, that puts no space in front of a text."""
    if isinstance(state, list):
        return [_without_prefix(x) for x in state]
    if not isinstance(state, dict):
        return state
    if state.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    never = {"prepend_scheme": "never"}
    return {key: never.get(key, _without_prefix(value)) for key, value in state.items()}


def _from_state(name: str, state: dict[str, Any]) -> Any:
    from tokenizers import normalizers, pre_tokenizers

    empty: Any = normalizers.Sequence([]) if name == "normalizer" else pre_tokenizers.Sequence([])
    if state["type"] == "Sequence":
        step = empty
    else:
        kind = getattr(normalizers if name == "normalizer" else pre_tokenizers, state["type"])
        step = kind()
    step.__setstate__(json.dumps(state).encode())
    return step
