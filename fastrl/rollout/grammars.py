"""Responses of a given form: grammars, and which tokens they allow next.

llguidance reads a grammar and says, after each token, which tokens may follow. It does so on the
host, in threads of its own, while the decode step's forward runs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.data.lark import lark_literal
from fastrl.models.host_memory import to_device

ResponseFormat = Mapping[str, Any]
LONGEST = 1 << 19  # characters of a grammar
_NAMED = {"name", "description", "schema", "strict"}  # of a schema in OpenAI's API
_FORMS = ("json_schema", "regex", "choices", "lark")
_PROBE = '{"a": [1, "b c"]}'  # what a tokenizer's tokens are tried on


def checked_format(given: Any, name: str = "response_format") -> ResponseFormat | None:
    """A response format as a mapping, None where any text will do.

    Args:
        given: a mapping with one of ``json_schema`` (a schema, or its text; beside it
            ``whitespace=False`` where no white space is to stand between JSON's tokens), ``regex``,
            ``choices`` (texts) and ``lark`` (a grammar); JSON of one; or what OpenAI's API takes,
            ``{"type": "json_schema", "json_schema": {"schema": ...}}``, ``{"type":
            "json_object"}`` or ``{"type": "text"}``.

    Raises:
        ValueError: anything else, choices that are none, or a grammar that is too long.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name} is no JSON: {error}") from None
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{name} must be a mapping, such as {{'regex': 'yes|no'}}, got {given!r:.80}"
        )
    found = _of_openai(dict(given), name)
    if found is None:
        return None
    forms = [form for form in _FORMS if found.get(form) is not None]
    unknown = sorted(found.keys() - {*_FORMS, "whitespace"})
    if len(forms) != 1 or unknown:
        raise ValueError(
            f"{name} must have one of {', '.join(_FORMS)}, got {', '.join(sorted(found)) or 'none'}"
        )
    form = forms[0]
    spaced = found.get("whitespace", True)
    if not isinstance(spaced, bool) or ("whitespace" in found and form != "json_schema"):
        raise ValueError(f"{name}: whitespace is True or False, beside a json_schema")
    if form == "choices":
        choices = found["choices"]
        texts = isinstance(choices, Sequence) and not isinstance(choices, str)
        if not texts or not choices or not all(isinstance(x, str) and x for x in choices):
            raise ValueError(f"{name}: choices must be texts, got {choices!r:.80}")
    elif form == "json_schema":
        found["json_schema"] = _schema(found["json_schema"], name)
    elif not isinstance(found[form], str):
        raise ValueError(f"{name}: {form} must be a text, got {found[form]!r:.80}")
    length = len(json.dumps(found))
    if length > LONGEST:
        raise ValueError(
            f"{name} has {length} characters, more than {LONGEST}: shorten it, such as by $ref"
        )
    return found


def _of_openai(given: dict[str, Any], name: str) -> dict[str, Any] | None:
    """A format without the type that OpenAI's API has; None for text."""
    inner, kind = given.get("json_schema"), given.get("type")
    named = isinstance(inner, Mapping) and "schema" in inner and not inner.keys() - _NAMED
    if "type" not in given and not named:
        return given
    if named and kind in (None, "json_schema"):
        found: Any = {"json_schema": inner["schema"]}  # type: ignore[index]
    elif kind in ("json_object", "text"):
        found = {"json_schema": {"type": "object"}} if kind == "json_object" else None
    else:
        raise ValueError(
            f"{name} has the type {kind!r}: it may be json_schema (with its schema), json_object "
            "or text; a schema itself is passed as {'json_schema': schema}"
        )
    if others := sorted(given.keys() - {"type", *(["json_schema"] if named else [])}):
        raise ValueError(f"{name} has {', '.join(others)} beside its type: leave one of both out")
    return found


def _schema(given: Any, name: str) -> Any:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}: json_schema is no JSON: {error}") from None
    if not isinstance(given, Mapping | bool):
        raise ValueError(f"{name}: json_schema must be a schema, got {given!r:.80}")
    return given


class Grammars:
    """Grammars over a tokenizer's tokens.

    Args:
        tokenizer: a fast tokenizer.
        vocabulary: the number of the model's logits.
        ends: ids of the tokens that end a response; they are allowed where a text is complete.

    Raises:
        ValueError: llguidance is not installed, no token ends a response, or the bytes of the
            tokenizer's tokens are not known to it.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Sequence[int]):
        self.library = _library()
        if not ends:
            raise ValueError(
                "response_format: no token ends a response, so that none could end where its text "
                "is complete: pass eos_token_ids"
            )
        self.vocabulary, self.ends, self.tokenizer = vocabulary, ends, tokenizer
        self.tokens = self._tokens_of(tokenizer, list(ends))
        self._prototypes: dict[str, Any] = {}

    def _tokens_of(self, tokenizer: Any, ends: list[int]) -> Any:
        kind = type(tokenizer).__name__
        try:
            tokens = self.library.hf.from_tokenizer(
                tokenizer, n_vocab=max(self.vocabulary, len(tokenizer)), eos_token=ends
            )
        except Exception as error:
            raise ValueError(
                f"response_format: llguidance does not know the bytes of the tokens of this {kind} "
                f"({error}): leave response_format out"
            ) from None
        written = tokenizer.decode(tokens.tokenize_str(_PROBE))
        if written.strip() != _PROBE:
            raise ValueError(
                f"response_format: what llguidance takes for {_PROBE!r} is {written!r} by this "
                f"{kind}: leave response_format out"
            )
        return tokens

    def matcher(self, given: ResponseFormat) -> Any:
        """A matcher at the beginning of a text.

        Raises:
            ValueError: a grammar that llguidance cannot read, or that allows no text.
        """
        key = json.dumps(given, sort_keys=True)
        if key not in self._prototypes:
            self._prototypes[key] = self._compiled(given)
        return self._prototypes[key].deep_copy()

    def _compiled(self, given: ResponseFormat) -> Any:
        shown = f"response_format {_in_short(given)!r:.120}"
        matcher = self.library.LLMatcher
        try:
            if "json_schema" in given:
                options = None if given.get("whitespace", True) else {"whitespace_flexible": False}
                schema = json.dumps(given["json_schema"])
                grammar = matcher.grammar_from_json_schema(schema, overrides=options)
            elif "choices" in given:
                choices = " | ".join(lark_literal(x, self.tokenizer) for x in given["choices"])
                grammar = matcher.grammar_from_lark(f"start: {choices}")
            elif "regex" in given:
                grammar = matcher.grammar_from_regex(given["regex"])
            else:
                grammar = matcher.grammar_from_lark(given["lark"])
            made = matcher(self.tokens, grammar, log_level=0)
        except Exception as error:
            raise ValueError(f"{shown} cannot be read: {error}") from None
        if not made.is_error():
            made.compute_bitmask()  # a grammar that allows nothing is found by its first set
        if made.is_error():
            first = made.get_error().partition("<state>")[0].strip()
            raise ValueError(f"{shown} allows no text, or cannot be read: {first[:300]}")
        return made


def _in_short(given: ResponseFormat) -> str:
    """A format as a short text, for messages."""
    (form,) = (form for form in _FORMS if form in given)
    return f"{form}: {json.dumps(given[form])}"


def check_format(given: Any, tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> None:
    """Raises ValueError for a response format that cannot be honoured, see :class:`Grammars`."""
    found = checked_format(given)
    if found is not None:
        Grammars(tokenizer, vocabulary, ends).matcher(found)


def _library() -> Any:
    try:
        import llguidance
        import llguidance.hf
        import llguidance.torch
    except ImportError:
        raise ValueError(
            "response_format needs llguidance: pip install 'llguidance>=1.9'"
        ) from None
    return llguidance


class Drawing(NamedTuple):
    """A sample whose next token is drawn."""

    slot: int
    sample: int  # its index
    token: int | None  # the token drawn before; None: none was


class GrammarMasks:
    """The sets of tokens that the grammars of running samples allow, step by step.

    Args:
        formats: each sample's response format; None: any text.
        slots: the engine's slots.
        device: where the model runs.

    Attributes:
        seconds: the time that the host took for sets, and that it was waited for.
    """

    def __init__(
        self,
        grammars: Grammars,
        formats: Sequence[ResponseFormat | None],
        slots: int,
        device: torch.device,
    ):
        self._matchers = {
            i: grammars.matcher(given) for i, given in enumerate(formats) if given is not None
        }
        self.library, self.device = grammars.library, device
        words = -(-grammars.vocabulary // 32)
        # llguidance writes sets of all of its tokens, of which the tokenizer may have more.
        room = -(-grammars.tokens.vocab_size // 32)
        self._words = torch.full((slots, room), -1, dtype=torch.int32)
        self._needed = words
        self._no_ends = torch.full((room,), -1, dtype=torch.int32)
        for i in grammars.ends:
            bit = 1 << i % 32
            self._no_ends[i // 32] &= ~(bit - (1 << 32) if bit == 1 << 31 else bit)
        threads = max(1, min(torch.get_num_threads(), os.cpu_count() or 1))
        self._executor = self.library.LLExecutor(threads)
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        self.seconds = {"made": 0.0, "waited": 0.0}

    def begin(self, drawing: Sequence[Drawing]) -> None:
        """Begins to make the sets from which the next tokens of samples are drawn."""
        self._pending = self._thread.submit(self._make, list(drawing))

    def _make(self, drawing: list[Drawing]) -> None:
        begin = time.perf_counter()
        self._words.fill_(-1)
        going = []
        for slot, sample, token in drawing:
            matcher = self._matchers.get(sample)
            if matcher is None:
                continue
            if token is not None:
                matcher.consume_token(token)
            going.append((matcher, slot))
        if going:
            self.library.torch.fill_next_token_bitmask_par(self._executor, going, self._words)
        for matcher, slot in going:
            # Of a matcher that has failed the set would be that of a complete text; and an end
            # token may be a part of texts, too.
            if matcher.is_error():
                self._words[slot] = 0
            elif not matcher.is_accepting():
                self._words[slot] &= self._no_ends
        self.seconds["made"] += time.perf_counter() - begin

    def allowed(self, rows: int) -> Tensor:
        """Which tokens the first slots' samples may have next, as bits, [rows, ⌈V/32⌉]; waits for
        it."""
        assert self._pending is not None
        begin = time.perf_counter()
        self._pending.result()
        self.seconds["waited"] += time.perf_counter() - begin
        return to_device(self._words[:rows, : self._needed].contiguous(), self.device)

    def statistics(self, steps: int) -> dict[str, float]:
        """Seconds of the host for each decode step: that it took, and that it was waited for."""
        return {
            f"perf/grammar_{name}_seconds": x / max(steps, 1) for name, x in self.seconds.items()
        }
