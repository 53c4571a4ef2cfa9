"""Input of a rollout: sampling parameters, and a checked request."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastrl.config import FULL, SAMPLED, SUPPORTS
from fastrl.data.prompt_ids import Prompt, check_prompts, token_ids
from fastrl.models.layout import EncoderDecoder, layout_of
from fastrl.rollout.grammars import ResponseFormat, checked_format
from fastrl.settings import check_types

# Fields that make tokens come from another distribution than softmax(logits / T), by their names in
# ``model.generate``, with the values that do not. Greedy decoding ignores truncations.
TRUNCATIONS: dict[str, Any] = {"top_k": 0, "top_p": 1, "min_p": 0}
PROCESSORS: dict[str, Any] = {"repetition_penalty": 1, "min_new_tokens": 0, "suppress_tokens": []}


@dataclass(frozen=True)
class SamplingParams:
    """How to sample.

    Args:
        max_new_tokens: most tokens per response; a list has one number per prompt.
        temperature: 0 is greedy.
        top_k, top_p, min_p: truncations, in this order; 0, 1 and 0 switch them off.
        n: samples per prompt.
        seed: seeds the draws, in [0, 2⁶⁴); None takes a seed from torch's own generator.
        min_new_tokens: tokens before any end token is drawn; ``stop`` may end a response earlier.
        repetition_penalty: logits of tokens that occurred, in the prompt too (but not in what an
            encoder reads), are divided by it where positive and multiplied where negative.
        suppress_tokens: ids that are never drawn.
        eos_token_ids: tokens that end a response, besides the tokenizer's EOS, which always does;
            None: those of the model's generation_config.
        stop: token sequences that end a response, which keeps them.
        policy_support: "full": log-probs and entropies are over the whole vocabulary. "sampled":
            they are over the set that a token was drawn from, what truncations, suppress_tokens and
            min_new_tokens leave of the vocabulary, and samples have these sets, too.
        response_format: the form that responses have: a JSON schema, a regular expression, choices
            or a grammar, see :func:`fastrl.rollout.grammars.checked_format`; or a list with one for
            each prompt, None for any text. EOS is drawn where the text is complete, and only there.

    Raises:
        ValueError: a value out of range.
        TypeError: a value of another type.
    """

    max_new_tokens: int | Sequence[int] = 32
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    suppress_tokens: Sequence[int] = ()
    eos_token_ids: Sequence[int] | None = None
    stop: Sequence[Sequence[int]] = ()
    policy_support: str = FULL
    response_format: Mapping[str, Any] | str | Sequence[Any] | None = None

    def __post_init__(self) -> None:
        check_types(self, SamplingParams)
        for i, most in enumerate(self._limits()):
            place = "max_new_tokens" + (f"[{i}]" if self._per_prompt else "")
            if isinstance(most, bool) or not isinstance(most, numbers.Integral):
                raise TypeError(f"{place} must be a whole number, got {most!r}")
            if most < 1:
                raise ValueError(f"{place} must be at least 1, got {most}")
        at_least = {"n": 1, "top_k": 0, "temperature": 0, "min_new_tokens": 0}
        for name, least in at_least.items():
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1], got {self.min_p}")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty must be positive, got {self.repetition_penalty}: 1 is none"
            )
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must be in [0, 2**64), got {self.seed}")
        _check_ids("suppress_tokens", self.suppress_tokens)
        if self.eos_token_ids is not None:  # transformers also takes one number; -1: none
            several = isinstance(self.eos_token_ids, Sequence)
            ids = self.eos_token_ids if several else [self.eos_token_ids]
            _check_ids("eos_token_ids", ids, least=-1)
            object.__setattr__(self, "eos_token_ids", ids)
        check_stop(self.stop)
        if self.policy_support not in SUPPORTS:
            raise ValueError(
                f"policy_support must be one of {', '.join(SUPPORTS)}, got {self.policy_support!r}"
            )
        if self.policy_support == SAMPLED and self.repetition_penalty != 1:
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty} changes the odds of tokens, which "
                "policy_support='sampled' has no part in: leave one of the two out"
            )
        if self.response_format is not None and self.min_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} bars the end of texts that response_format "
                "(or tool_choice='required') says are complete: leave one of the two out"
            )
        for i, given in enumerate(self._formats()):
            checked_format(given, "response_format" + (f"[{i}]" if self._formats_differ else ""))

    @property
    def _per_prompt(self) -> bool:
        return hasattr(self.max_new_tokens, "__len__") and not isinstance(self.max_new_tokens, str)

    def _limits(self) -> Sequence[int]:
        most = self.max_new_tokens
        return most if self._per_prompt else [most]  # type: ignore[list-item,return-value]

    @property
    def longest(self) -> int:
        """The most tokens that any response may have."""
        return max(self._limits())

    def limits(self, prompts: int) -> list[int]:
        """Returns max_new_tokens for each of a number of prompts.

        Raises:
            ValueError: max_new_tokens is a list of another length.
        """
        most = self._limits()
        if not self._per_prompt:
            return [int(most[0])] * prompts
        if len(most) != prompts:
            raise ValueError(
                f"max_new_tokens has {len(most)} numbers for {prompts} prompts: "
                "pass one each, or one for all"
            )
        return list(most)

    @property
    def _formats_differ(self) -> bool:
        return isinstance(self.response_format, Sequence) and not isinstance(
            self.response_format, str
        )

    def _formats(self) -> Sequence[Any]:
        return self.response_format if self._formats_differ else [self.response_format]  # type: ignore[return-value]

    def formats(self, prompts: int) -> list[ResponseFormat | None]:
        """Returns the response format of each of a number of prompts.

        Raises:
            ValueError: response_format is a list of another length.
        """
        found = [checked_format(given) for given in self._formats()]
        if not self._formats_differ:
            return found * prompts
        if len(found) != prompts:
            raise ValueError(
                f"response_format has {len(found)} entries for {prompts} prompts: pass one each, "
                "or one for all"
            )
        return found

    def changes_of_the_draw(self) -> dict[str, Any]:
        """Fields, with values, that change a draw from softmax(logits / temperature)."""
        fields = {name: getattr(self, name) for name in TRUNCATIONS | PROCESSORS}
        fields["suppress_tokens"] = list(self.suppress_tokens)
        neutral = TRUNCATIONS | PROCESSORS
        return {name: value for name, value in fields.items() if value != neutral[name]}

    def generation_kwargs(self) -> dict[str, Any]:
        """Arguments of ``model.generate``, without ``stop``; of several limits the longest."""
        kwargs: dict[str, Any] = {"max_new_tokens": self.longest, "do_sample": False}
        if self.temperature > 0:
            kwargs |= {
                "do_sample": True,
                "temperature": self.temperature,
                "top_k": self.top_k,
                "top_p": self.top_p,
            }
            kwargs |= {"min_p": self.min_p} if self.min_p else {}
        if self.min_new_tokens:
            kwargs["min_new_tokens"] = self.min_new_tokens
        if self.repetition_penalty != 1:
            kwargs["repetition_penalty"] = self.repetition_penalty
        if self.suppress_tokens:
            kwargs["suppress_tokens"] = list(self.suppress_tokens)
        if self.eos_token_ids is not None:
            kwargs["eos_token_id"] = list(self.eos_token_ids)
        return kwargs


def draw_seed() -> int:
    """A seed for draws, from torch's own generator."""
    return int(torch.randint(1 << 62, ()))


def check_stop(stop: Any) -> None:
    """Checks stop sequences.

    Raises:
        ValueError: not a list of sequences of one token id or more.
    """
    lists = (list, tuple)
    if not isinstance(stop, lists) or not all(isinstance(x, (*lists, Tensor)) for x in stop):
        raise ValueError(
            f"stop must be a list of token sequences, such as [[13, 198]], got {stop!r}: encode "
            "texts, or pass them to model.generate as stop_strings"
        )
    if any(len(sequence) == 0 for sequence in stop):
        raise ValueError("stop holds an empty sequence: each needs at least one token")
    for i, sequence in enumerate(stop):
        _check_ids(f"stop[{i}]", sequence)


def _check_ids(name: str, ids: Any, least: int = 0) -> None:
    """Raises ValueError for anything but a list of token ids."""
    listed = ids.tolist() if hasattr(ids, "tolist") else ids
    if (
        isinstance(listed, str | Mapping)
        or not isinstance(listed, Collection)
        or any(isinstance(i, bool) or not isinstance(i, numbers.Integral) for i in listed)
        or any(i < least for i in listed)
    ):
        raise ValueError(f"{name} must hold token ids, whole numbers of 0 or more, got {ids!r}")


def end_tokens(model: Any, tokenizer: Any, asked: Any = None) -> Tensor:
    """Ids that end a response, [n] int64: the tokenizer's EOS, and ``asked`` or else the model's.

    Raises:
        ValueError: there is no tokenizer, and nothing else names end tokens.
    """
    if asked is None:
        asked = getattr(model, "pretrained_model", model).generation_config.eos_token_id
    if tokenizer is None and asked is None:
        raise ValueError(
            "nothing says which tokens end a response: the engine has no tokenizer, and the "
            "model's generation_config no eos_token_id: pass the engine a tokenizer, or "
            "SamplingParams(eos_token_ids=[...]), [] where each runs to its limit"
        )
    eos = getattr(tokenizer, "eos_token_id", None)
    ids = [*(asked if isinstance(asked, Sequence) else [asked]), eos]
    return torch.tensor(sorted({int(i) for i in ids if i is not None and i >= 0}), dtype=torch.long)


@dataclass(frozen=True)
class RolloutRequest:
    """A checked call of an engine's ``generate``: lists with an entry per prompt."""

    prompts: list[Tensor]  # token ids on the host
    limits: list[int]  # max_new_tokens
    sample_ids: list[int]

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        sample_ids: Sequence[int] | None,
        model: Any,
        tokenizer: Any,
    ) -> RolloutRequest:
        """The request for some prompts; raises ValueError as :func:`check_prompts` and
        :func:`token_ids` do, for lists of another length and for unknown suppressed tokens."""
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Mapping)):
            raise ValueError("prompts must be a list, got a single one: pass [prompt]")
        closed = isinstance(layout_of(model), EncoderDecoder)
        tokens = [
            token_ids(p, tokenizer, f"prompts[{i}]", closed=closed) for i, p in enumerate(prompts)
        ]
        limits = params.limits(len(tokens))
        check_prompts(tokens, model, limits)
        vocabulary = model.config.get_text_config().vocab_size
        unknown = max(params.suppress_tokens, default=0)
        if unknown >= vocabulary:
            raise ValueError(
                f"suppress_tokens has {unknown}, outside the vocabulary of {vocabulary}: was it "
                "made by another tokenizer?"
            )
        ids = list(range(len(tokens))) if sample_ids is None else list(sample_ids)
        if len(ids) != len(tokens):
            raise ValueError(f"sample_ids has {len(ids)} entries for {len(tokens)} prompts")
        return cls(tokens, limits, ids)

    def select(self, indices: Sequence[int]) -> RolloutRequest:
        fields = (self.prompts, self.limits, self.sample_ids)
        return RolloutRequest(*([field[i] for i in indices] for field in fields))  # type: ignore[arg-type]

    def repeated(self, n: int) -> RolloutRequest:
        """Each prompt ``n`` times: an entry per sample."""
        return self.select([i for i in range(len(self.prompts)) for _ in range(n)])
