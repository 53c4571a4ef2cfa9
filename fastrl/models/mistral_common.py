"""The tokenizers of the package mistral-common, under the interface of transformers' fast ones."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mistral_common.protocol.instruct.normalize import get_normalizer
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.validator import ValidationMode, get_validator
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from transformers.tokenization_mistral_common import MistralCommonBackend
from transformers.tokenization_utils_base import BatchEncoding

_INSTEAD = "load the tokenizer with AutoTokenizer.from_pretrained(…, mistral_format=False)"
_NO_TEMPLATE = "{{ raise_exception('mistral-common writes these chats by its own code') }}"
_PROBE = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "yes"},
]


class MistralCommonTokenizer(MistralCommonBackend):
    """A tokenizer of mistral-common that returns tokens' offsets, and writes prompts as well as
    chats that end with the assistant's turn. It shares all state with the tokenizer it is made of.

    Control tokens, such as ``[INST]``, are one token in texts without ``add_special_tokens``, which
    continue other texts or were written as chats. In other texts they are letters, as in
    mistral-common.

    Raises:
        ValueError: a tokenizer without a tekken.json, with a chat template that a user has set, or
            with one in its folder that writes other texts than mistral-common.
    """

    is_fast = True  # it knows the offsets of tokens
    cls_token = cls_token_id = sep_token = sep_token_id = None  # mistral-common has none

    def __init__(self, tokenizer: MistralCommonBackend):
        inner = tokenizer.tokenizer.instruct_tokenizer
        if not isinstance(inner.tokenizer, Tekkenizer):
            raise ValueError(
                f"{type(tokenizer).__name__} of a SentencePiece file does not tell where its "
                f"tokens lie: bring a tekken.json, or {_INSTEAD}"
            )
        self.__dict__ = tokenizer.__dict__
        if self.__dict__.get("chat_template") is not None:
            self._refuse("tokenizer.chat_template")
        folder = Path(inner.tokenizer.file_path).parent
        for name, template in _templates(folder):
            if template is not None and self._differs(template):
                self._refuse(f"the chat template in {folder / name}")

    @property
    def chat_template(self) -> str:
        """A template that raises: :meth:`apply_chat_template` reads none."""
        return _NO_TEMPLATE

    @chat_template.setter
    def chat_template(self, template: str | None) -> None:
        if template is not None:
            self._refuse("a chat template (tokenizer.chat_template, chat_template_path)")

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        return self.chat_template

    def apply_chat_template(  # type: ignore[override]
        self,
        conversation: Sequence[Any],
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        return_assistant_tokens_mask: bool = False,
        **options: Any,
    ) -> Any:
        """A conversation as mistral-common writes it: its token ids with ``tokenize``, in a
        BatchEncoding with ``return_dict``; else its text. ``add_generation_prompt`` is not read.

        Raises:
            ValueError: several conversations; options that mistral-common does not have; messages
                whose text does not give their tokens, such as one that quotes a control token.
        """
        if conversation and not isinstance(conversation[0], Mapping):
            raise ValueError("pass one conversation at a time")
        unknown = set(options) - set(ChatCompletionRequest.model_fields)
        if return_assistant_tokens_mask or unknown:
            what = ", ".join(sorted(unknown)) or "return_assistant_tokens_mask"
            raise ValueError(f"mistral-common's chats have no option {what}: leave it out")
        ids, text = self._written(
            conversation, continue_final_message, tools=tools or None, **options
        )
        if not tokenize:
            return text
        made = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        return BatchEncoding(made) if return_dict else ids

    def __call__(  # type: ignore[override]
        self,
        text: Any = None,
        *,
        add_special_tokens: bool = True,
        padding: Any = False,
        truncation: Any = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_attention_mask: bool | None = None,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        padding_side: str | None = None,
        pad_to_multiple_of: int | None = None,
        verbose: bool = True,
    ) -> BatchEncoding:
        rows = []
        for each in [text] if isinstance(text, str) else text:
            ids = self._ids(each, split=not add_special_tokens)
            spans = self._spans(ids) if return_offsets_mapping else []
            whole = self.build_inputs_with_special_tokens(ids) if add_special_tokens else ids
            front = int(add_special_tokens)
            behind = len(whole) - len(ids) - front
            added = [1] * front + [0] * len(ids) + [1] * behind
            spans = [(0, 0)] * front + spans + [(0, 0)] * behind
            kept = slice(None)
            if truncation and max_length is not None and len(whole) > max_length:
                cut = len(whole) - max_length
                kept = slice(cut, None) if self.truncation_side == "left" else slice(-cut)
            rows.append((whole[kept], added[kept], spans[kept]))
        made: dict[str, Any] = {"input_ids": [ids for ids, _, _ in rows]}
        if return_special_tokens_mask:
            made["special_tokens_mask"] = [added for _, added, _ in rows]
        made = dict(
            self.pad(
                made,
                padding=padding,
                max_length=max_length,
                padding_side=padding_side,
                pad_to_multiple_of=pad_to_multiple_of,
                return_attention_mask=return_attention_mask,
            )
        )
        if return_offsets_mapping:
            made["offset_mapping"] = [spans for _, _, spans in rows]
        if isinstance(text, str) and return_tensors is None:
            made = {name: rows[0] for name, rows in made.items()}
        return BatchEncoding(made, tensor_type=return_tensors)

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> Any:
        options["add_special_tokens"] = add_special_tokens
        return self(text, **options)["input_ids"]

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:  # type: ignore[override]
        """The control tokens by id."""
        return {i: token for token, i in self._control[0].items()}

    @property
    def backend_tokenizer(self) -> Any:
        """A stand-in for a fast tokenizer's backend: it has no steps that change a text, and its
        ``to_str`` returns a text that identifies the tokenizer."""
        version = self.tokenizer.instruct_tokenizer.tokenizer.version
        content = json.dumps([self.get_vocab(), version.value])
        steps = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor"))
        return SimpleNamespace(**steps, to_str=lambda: content)

    def _ids(self, text: str, split: bool) -> list[int]:
        tekken = self.tokenizer.instruct_tokenizer.tokenizer
        if not split:
            return tekken.encode(text, bos=False, eos=False)
        control, pattern = self._control
        ids: list[int] = []
        for part in pattern.split(text):
            token_id = control.get(part)
            ids += tekken.encode(part, bos=False, eos=False) if token_id is None else [token_id]
        return ids

    @cached_property
    def _control(self) -> tuple[dict[str, int], re.Pattern]:
        """The ids of the control tokens, and a pattern that finds them in a text."""
        control = {self.convert_ids_to_tokens(i): i for i in self.all_special_ids}
        longest_first = sorted(map(re.escape, control), key=len, reverse=True)
        return control, re.compile(f"({'|'.join(longest_first)})")

    def _spans(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """The index of each token's first character in the text, and of the one behind its last; a
        token with part of a character spans all of it."""
        tekken: Any = self.tokenizer.instruct_tokenizer.tokenizer
        pieces = [tekken.id_to_byte_piece(i, SpecialTokenPolicy.KEEP) for i in ids]
        # The number of each byte's character; a byte 0b10… is not the first of a character.
        numbers = list(accumulate(((x & 0xC0) != 0x80 for x in b"".join(pieces)), initial=-1))[1:]
        ends = accumulate(map(len, pieces), initial=0)
        return [(numbers[a], numbers[b - 1] + 1) for a, b in pairwise(ends)]

    def _written(
        self, conversation: Sequence[Any], continues: bool = False, **options: Any
    ) -> tuple[list[int], str]:
        """The token ids of a conversation, and its text."""
        request = ChatCompletionRequest.from_openai(
            messages=[dict(message) for message in conversation],
            continue_final_message=continues,
            **options,
        )
        last = conversation[-1] if conversation else {}
        answered = last.get("role") == "assistant" and not continues
        ids = self._chats(answered).encode_chat_completion(request).tokens
        text = self.tokenizer.decode(ids, special_token_policy=SpecialTokenPolicy.KEEP)
        if self._ids(text, split=True) != ids:
            raise ValueError(
                "mistral-common writes tokens for these messages that their text does not give: a "
                "message quotes a control token, such as [INST], or its content is split into "
                f"blocks; change it, or {_INSTEAD}: {text!r:.200}"
            )
        return ids, text

    def _chats(self, answered: bool) -> MistralTokenizer:
        """A tokenizer for chats that end with the assistant's turn, if ``answered``, or that ask
        for an answer: each of mistral-common's modes refuses the other kind."""
        inner = self.tokenizer.instruct_tokenizer
        version = inner.tokenizer.version
        mode = ValidationMode.finetuning if answered else ValidationMode.test
        return MistralTokenizer(
            inner,
            validator=get_validator(version, mode=mode),
            request_normalizer=get_normalizer(version, inner.tokenizer.model_settings_builder),
        )

    def _differs(self, template: str) -> bool:
        """Whether a chat template writes a plain chat otherwise than mistral-common."""
        from transformers.utils.chat_template_utils import render_jinja_template

        names = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        try:
            texts = render_jinja_template([_PROBE], chat_template=template, **names)[0]
        except Exception:  # a template's code may raise anything
            return True
        return list(texts) != [self._written(_PROBE)[1]]

    def _refuse(self, what: str) -> None:
        raise ValueError(
            f"{what} would be ignored: mistral-common writes chats by its own code; remove it, or "
            f"{_INSTEAD}, which reads it"
        )


def _templates(folder: Path) -> list[tuple[str, str | None]]:
    file, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    settings_read = json.loads(settings.read_text("utf-8")) if settings.is_file() else {}
    templates = [(settings.name, settings_read.get("chat_template"))]
    return [*templates, (file.name, file.read_text("utf-8"))] if file.is_file() else templates
