"""From a prompt and answers to what a model reads: chat templates, tokens, and their limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastrl.data.chat import Said, ended, is_complete, join
from fastrl.data.columns import Parts
from fastrl.data.examples import Example, Response

TRUNCATIONS = ("keep_end", "keep_start")


@dataclass(frozen=True)
class Encoder:
    """Prompt and responses are tokenised apart, so that the prompt's tokens are the same in front
    of any response.

    Args:
        tokenizer: its special tokens stand in front of prompts as it puts them there, and nowhere
            else.
        max_length: of prompt and response; the response's end is cut.
        max_prompt_length: of prompts. None leaves them what the longest response of an example
            does not need of ``max_length``, and half of it in any case.
        truncation: "keep_end" or "keep_start" of prompts that are too long.
        add_eos: end responses that are texts with EOS. Chat templates end theirs by themselves;
            blanks that they put behind EOS are left out, as no policy writes them.

    Raises:
        ValueError: limits that leave no room, another truncation.
    """

    tokenizer: Any
    max_length: int | None = None
    max_prompt_length: int | None = None
    truncation: str = "keep_end"
    add_eos: bool = True

    def __post_init__(self) -> None:
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

    def __call__(self, parts: Parts, desired: bool | None, columns: Mapping[str, Any]) -> Example:
        """
        Raises:
            ValueError: a chat template that does not put the prompt in front of the response; a
                prompt without tokens.
        """
        text = join(parts.prompt, "", self.tokenizer)
        answers = [self._answer(parts.prompt, text, answer) for answer in parts.answers]
        front, prompt = self._prompt(text, chat=not isinstance(parts.prompt, str))
        if not front and not prompt.ids:
            raise ValueError(f"the tokenizer makes no token of the prompt {text!r}")
        limit = self._prompt_limit(max((len(answer.ids) for answer in answers), default=0))
        if limit is not None and len(front) + len(prompt.ids) > limit:
            room = max(limit - len(front), 0)
            begin = len(prompt.ids) - room if self.truncation == "keep_end" else 0
            prompt = self._cut(prompt, begin, begin + room)
        ids = (*front, *prompt.ids)
        if self.max_length is not None:
            answers = [self._cut(answer, 0, self.max_length - len(ids)) for answer in answers]
        responses = tuple(Response(answer.text, tuple(answer.ids)) for answer in answers)
        return Example(prompt.text, ids, responses, desired, columns)

    def _prompt_limit(self, longest: int) -> int | None:
        if self.max_prompt_length is not None or self.max_length is None:
            return self.max_prompt_length
        return max(self.max_length - longest, (self.max_length + 1) // 2)

    def _prompt(self, text: str, chat: bool) -> tuple[list[int], _Tokens]:
        """What the tokenizer puts in front of a text, and the text; without what it puts behind."""
        tokens = self._tokens(text, special=not is_complete(text, self.tokenizer, chat))
        added = tokens.added
        begin = next((i for i, special in enumerate(added) if not special), len(added))
        if begin == 0 and tokens.ids[:1] in (
            [self.tokenizer.bos_token_id],
            [self.tokenizer.cls_token_id],
        ):
            begin = 1  # written in the text
        end = next((i for i in range(begin, len(added)) if added[i]), len(added))
        whole = _Tokens(
            text, tokens.ids[begin:end], added[begin:end], tokens.spans and tokens.spans[begin:end]
        )
        return tokens.ids[:begin], whole

    def _answer(self, prompt: Said, prompt_text: str, answer: Said) -> _Tokens:
        if isinstance(answer, str):
            tokens = self._tokens(answer)
            if not self.add_eos:
                return tokens
            return tokens._replace(ids=ended(tokens.ids, self.tokenizer))
        whole = join(prompt, answer, self.tokenizer)
        if not whole.startswith(prompt_text):
            raise ValueError(
                f"the chat template writes {prompt_text!r} for the prompt, and something else in "
                f"front of its response ({whole!r:.200}): mend the template, or bring texts"
            )
        tokens = self._tokens(whole[len(prompt_text) :])
        eos = self.tokenizer.eos_token_id
        if eos in tokens.ids:
            end = len(tokens.ids) - tokens.ids[::-1].index(eos)
            if not self.tokenizer.decode(tokens.ids[end:]).strip():
                tokens = self._cut(tokens, 0, end)
        return tokens

    def _tokens(self, text: str, special: bool = False) -> _Tokens:
        fast = self.tokenizer.is_fast
        made = self.tokenizer(
            text,
            add_special_tokens=special,
            return_special_tokens_mask=True,
            return_offsets_mapping=fast,
            return_attention_mask=False,
        )
        ids, added = list(made["input_ids"]), made["special_tokens_mask"]
        return _Tokens(text, ids, added, made["offset_mapping"] if fast else None)

    def _cut(self, tokens: _Tokens, begin: int, end: int) -> _Tokens:
        """Tokens ``begin`` to ``end``, and their part of the text."""
        if begin <= 0 and end >= len(tokens.ids):
            return tokens
        ids, spans = tokens.ids[begin:end], tokens.spans
        if spans is None:  # only tokenizers in Rust know
            return _Tokens(self.tokenizer.decode(ids), ids, tokens.added[begin:end], None)
        # A token's span may leave out the space in front of it, which belongs to its text.
        start, stop = (spans[i - 1][1] if i else 0 for i in (begin, min(end, len(spans))))
        return _Tokens(tokens.text[start:stop], ids, tokens.added[begin:end], spans[begin:end])


class _Tokens(NamedTuple):
    """A text and its tokens.

    Attributes:
        added: of each, whether the tokenizer has put it around the text.
        spans: where each stands in the text.
    """

    text: str
    ids: list[int]
    added: list[int]
    spans: list[tuple[int, int]] | None
