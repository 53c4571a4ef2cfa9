"""Language models and services that judge responses: questions in words, and parsing of answers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from string import Formatter
from typing import Any

import torch

from fastrl.data.chat import TextOrMessages, as_messages, as_text
from fastrl.data.encode import encode_prompt
from fastrl.models.fast_tokenizer import as_fast
from fastrl.models.layout import EncoderDecoder, layout_of
from fastrl.models.load import load_language_model, load_tokenizer
from fastrl.rewards.functions import check_preferences, check_rewards
from fastrl.rollout import SamplingParams, choose_engine

Judge = Callable[[list[str]], Sequence[str]]

PAIRWISE = """\
Which of two responses answers the request better? Their order and their length do not count.

[Request]
{prompt}

[Response A]
{first}

[Response B]
{second}

Answer with nothing but [[A]] if response A is better, [[B]] if response B is, or [[C]] if neither
is.
"""
POINTWISE = """\
How well does the response answer the request, from 1 (not at all) to 10 (it could not be better)?

[Request]
{prompt}

[Response]
{response}

Answer with nothing but your rating in double brackets, such as [[5]].
"""

_VERDICTS = {"A": 1.0, "B": 0.0, "C": 0.5, "TIE": 0.5}
_NUMBER = r"[-+]?\d+(?:\.\d+)?"
_UNPARSED = ("refuse", "skip", "tie")


def parse_verdict(answer: str) -> float | None:
    """A verdict as a number, 1.0 for A, 0.0 for B, 0.5 for C or tie: the last one in double
    brackets, or else the whole answer. None for anything else."""
    marked = re.findall(r"\[\[(A|B|C|tie)\]\]", answer, re.IGNORECASE)
    verdict = marked[-1] if marked else answer.strip(" \t\r\n.*\"'`[]()")
    return _VERDICTS.get(verdict.upper())


def parse_rating(answer: str) -> float | None:
    """The last number in double brackets, or else the answer's only number, "out of 10" aside.
    None where there is no such number."""
    numbers = re.findall(rf"\[\[({_NUMBER})\]\]", answer)
    if not numbers:
        numbers = re.findall(_NUMBER, re.sub(r"\s*(/|out of)\s*10\b", "", answer))
        if len(numbers) != 1:
            return None
    return float(numbers[-1])


class Counts(Counter[str]):
    """Counts of an annotator since they were last read."""

    def read(self) -> dict[str, float]:
        """Returns the counts and resets them to 0; their names stay."""
        counted = {f"annotator/{name}": float(count) for name, count in self.items()}
        for name in self:
            self[name] = 0
        return counted


class JudgeAnnotator:
    """Asks a judge in words, and parses its answers.

    Args:
        judge: answers questions, list[str] -> list[str]: a :class:`ModelJudge`, or a function that
            asks a service.
        template: the template of a question about a pair, with {prompt}, {first} and {second};
            columns of the data may be named too. Double all other braces.
        parser: reads the answer: 1.0 where the first is better, 0.0 where the second is, 0.5 for a
            tie, None where the answer cannot be parsed.
        score_template: the template of a question about a response, with {prompt} and {response}.
        score_parser: reads the answer: a number, or None.
        swap: ask about each pair in both orders; where the answers disagree the pair is a tie
            (judges favour positions, arXiv:2306.05685).
        unparsed: what becomes of pairs with an unreadable answer: "refuse" raises, "skip" leaves
            them out, "tie" counts them as ties.
        unparsed_score: the score of a response whose answer cannot be parsed, unless ``unparsed``
            is "refuse"; None: such an answer is an error.

    Raises:
        ValueError: a template without a field for each response; an unknown ``unparsed``.
    """

    def __init__(
        self,
        judge: Judge,
        template: str = PAIRWISE,
        parser: Callable[[str], float | None] = parse_verdict,
        *,
        score_template: str = POINTWISE,
        score_parser: Callable[[str], float | None] = parse_rating,
        swap: bool = True,
        unparsed: str = "refuse",
        unparsed_score: float | None = None,
    ):
        if unparsed not in _UNPARSED:
            raise ValueError(f"unparsed must be one of {', '.join(_UNPARSED)}, got {unparsed!r}")
        _check_template("template", template, ("first", "second"))
        _check_template("score_template", score_template, ("response",))
        self.judge, self.swap = judge, swap
        self.template, self.parser = template, parser
        self.score_template, self.score_parser = score_template, score_parser
        self.unparsed, self.unparsed_score = unparsed, unparsed_score
        self.name = f"JudgeAnnotator({getattr(judge, '__name__', type(judge).__name__)})"
        self._counts = Counts(calls=0, unparsed=0, ties=0, swaps_disagree=0)

    def score(
        self, prompts: list[TextOrMessages], responses: list[TextOrMessages], **columns: Any
    ) -> list[float]:
        """The judge's scores. An answer without one raises ValueError, or gives ``unparsed_score``
        where that is set and ``unparsed`` is not "refuse"."""
        questions = _filled(self.score_template, columns, prompt=prompts, response=responses)
        refused = self.unparsed == "refuse" or self.unparsed_score is None
        hint = "set unparsed='skip' with an unparsed_score" if refused else ""
        scores = self._asked(questions, self.score_parser, hint)
        return check_rewards(
            [self.unparsed_score if score is None else score for score in scores],
            len(prompts),
            self.name,
        )

    def compare(
        self,
        prompts: list[TextOrMessages],
        firsts: list[TextOrMessages],
        seconds: list[TextOrMessages],
        **columns: Any,
    ) -> list[float | None]:
        """The judge's preferences in [0, 1], 1 for the first; None for a skipped pair. Raises
        ValueError for an answer without one where ``unparsed`` is "refuse"."""
        questions = _filled(self.template, columns, prompt=prompts, first=firsts, second=seconds)
        if self.swap:
            questions += _filled(
                self.template, columns, prompt=prompts, first=seconds, second=firsts
            )
        hint = "set unparsed='skip' or 'tie'" if self.unparsed == "refuse" else ""
        answers = self._asked(questions, self.parser, hint)
        answers = check_preferences(answers, len(questions), self.name)
        firsts_first = answers[: len(prompts)]
        other_order = [None if x is None else 1 - x for x in answers[len(prompts) :]]
        preferences = list(map(self._joined, firsts_first, other_order or firsts_first))
        self._counts["ties"] += preferences.count(0.5)
        return preferences

    def statistics(self) -> dict[str, float]:
        """Counts since the last call: questions ("annotator/calls"), answers that cannot be parsed
        ("annotator/unparsed"), pairs whose two orders disagree ("annotator/swaps_disagree"), and
        ties for any reason ("annotator/ties"), without pairs that are skipped."""
        return self._counts.read()

    def _joined(self, one: float | None, other: float | None) -> float | None:
        """The preference of a pair, from those of both orders for the first response."""
        if one is None or other is None:
            return 0.5 if self.unparsed == "tie" else None
        sides = [(preference > 0.5) - (preference < 0.5) for preference in (one, other)]
        if sides[0] == sides[1]:
            return (one + other) / 2
        self._counts["swaps_disagree"] += 1
        return 0.5

    def _asked(
        self, questions: list[str], parser: Callable[[str], float | None], hint: str
    ) -> list[float | None]:
        """The judge's answers as numbers. One that cannot be parsed is None, or with a ``hint`` a
        ValueError that ends with it."""
        answers = self.judge(questions)
        self._counts["calls"] += len(questions)
        single = isinstance(answers, str) or not hasattr(answers, "__len__")
        if single or len(answers) != len(questions):
            got = repr(answers) if single else f"{len(answers)} answers"
            raise ValueError(
                f"{self.name}: the judge gave {got} to {len(questions)} questions: it must give a "
                "list with one text each"
            )
        read = []
        for i, answer in enumerate(answers):
            if not isinstance(answer, str):
                raise ValueError(f"{self.name}: answer {i} is {answer!r}: answers must be texts")
            read.append(parser(answer))
            if read[i] is None:
                self._counts["unparsed"] += 1
                if hint:
                    raise ValueError(
                        f"{self.name}: answer {i} cannot be read: {answer!r}; mend the template or "
                        f"the parser, or {hint}"
                    )
        return read


class ModelJudge:
    """A language model that answers questions, through its chat template if it has one.

    Args:
        model: is frozen and put into evaluation mode.
        tokenizer: the model's tokenizer.
        params: how it answers; by default greedily, in 64 tokens at most.
        engine: keyword arguments of :func:`fastrl.rollout.choose_engine`, such as ``max_slots``.

    Raises:
        ValueError: ``params.n`` is not 1.
    """

    def __init__(
        self, model: Any, tokenizer: Any, params: SamplingParams | None = None, **engine: Any
    ):
        self.model = model.requires_grad_(False).eval()
        self.tokenizer = tokenizer = as_fast(tokenizer)
        self.params = params or SamplingParams(max_new_tokens=64, temperature=0)
        if self.params.n != 1:
            raise ValueError(f"a judge gives one answer, params.n is {self.params.n}: leave it 1")
        self.engine = choose_engine(self.model, tokenizer, **engine)
        self._layout = layout_of(model)
        self._closed = isinstance(self._layout, EncoderDecoder)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        params: SamplingParams | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str = "auto",
        **engine: Any,
    ) -> ModelJudge:
        """Loads a judge from a directory, a run's folder or the Hub, from safetensors only."""
        model = load_language_model(name_or_path, dtype=dtype, whole=True)
        tokenizer = load_tokenizer(name_or_path)
        return cls(model.to(device), tokenizer, params, **engine)

    def __call__(self, questions: list[str]) -> list[str]:
        if not questions:
            return []
        prompts = [torch.tensor(self._ids(question)) for question in questions]
        output = self.engine.generate(prompts, self.params)
        return [
            self._layout.decode(self.tokenizer, prompt, sequence)
            for prompt, sequence in zip(prompts, output.sequences, strict=True)
        ]

    def _ids(self, question: str) -> list[int]:
        chat = self.tokenizer.chat_template is not None
        prompt = as_messages(question) if chat else question
        return encode_prompt(prompt, self.tokenizer, closed=self._closed)[1]


def _check_template(name: str, template: str, places: Sequence[str]) -> None:
    fields = {field for _, field, _, _ in Formatter().parse(template)}
    for place in places:
        if place not in fields:
            raise ValueError(f"{name} has no {{{place}}}: put it where that text belongs")


def _filled(template: str, columns: dict[str, Any], **texts: list[TextOrMessages]) -> list[str]:
    """The template, filled with the texts and columns of each row; messages are made texts."""
    rows = zip(*(map(as_text, column) for column in texts.values()), strict=True)
    filled = []
    for i, row in enumerate(rows):
        others = {name: values[i] for name, values in columns.items()}
        try:
            filled.append(template.format(**{**others, **dict(zip(texts, row, strict=True))}))
        except (KeyError, IndexError) as error:
            raise ValueError(
                f"the judge's template names {error}, which is neither one of "
                f"{', '.join(texts)} nor a column ({', '.join(others) or 'there is none'})"
            ) from None
    return filled
