"""Scores and comparisons by judges: questions, answers, and models that judge."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastrl import SamplingParams
from fastrl.alignment.annotator import ask_preferences, ask_scores
from fastrl.rewards.judges import JudgeAnnotator, ModelJudge, parse_rating, parse_verdict
from tests import tiny_models
from tests.golden import tiny

PROMPTS = ["w5", "w6", "w7"]
SHORT, LONG = ["w3", "w3", "w3 w4"], ["w3 w4", "w3", "w3"]


class Recorder:
    """A judge that answers by a function of the question, and remembers what it was asked."""

    def __init__(self, answer: Callable[[str], Any]):
        self.answer, self.asked = answer, []

    def __call__(self, questions: list[str]) -> list[Any]:
        self.asked.append(questions)
        return [self.answer(question) for question in questions]


def prefers(word: str) -> Callable[[str], str]:
    """What a fair judge says who likes the response that has a word."""

    def answer(question: str) -> str:
        first, second = question.split("[Response A]")[1].split("[Response B]")
        if (word in first) == (word in second):
            return "[[C]]"
        return "Of the two, [[A]]" if word in first else "[[B]]"

    return answer


def test_a_judge_is_asked_in_both_orders() -> None:
    judge = Recorder(prefers("w4"))
    annotator = JudgeAnnotator(judge)
    assert ask_preferences(annotator, PROMPTS, SHORT, LONG) == [0.0, 0.5, 1.0]
    (questions,) = judge.asked
    assert len(questions) == 6
    assert "[Request]\nw5\n\n[Response A]\nw3\n\n[Response B]\nw3 w4\n" in questions[0]
    assert "[Request]\nw5\n\n[Response A]\nw3 w4\n\n[Response B]\nw3\n" in questions[3]
    counts = {"calls": 6, "unparsed": 0, "ties": 1, "swaps_disagree": 0}
    assert annotator.statistics() == {f"annotator/{k}": v for k, v in counts.items()}


def test_orders_that_disagree_are_a_tie() -> None:
    annotator = JudgeAnnotator(Recorder(lambda _: "A"))
    assert annotator.compare(PROMPTS, SHORT, LONG) == [0.5] * 3
    assert annotator.statistics()["annotator/swaps_disagree"] == 3
    # A verdict in one order and a tie in the other is none either.
    once = iter(["A", "C"])
    annotator = JudgeAnnotator(Recorder(lambda _: next(once)))
    assert annotator.compare(["w5"], ["w6"], ["w7"]) == [0.5]
    assert annotator.statistics()["annotator/swaps_disagree"] == 1


def test_without_swapping_a_judge_is_asked_once() -> None:
    judge = Recorder(prefers("w4"))
    annotator = JudgeAnnotator(judge, swap=False)
    assert annotator.compare(PROMPTS, SHORT, LONG) == [0.0, 0.5, 1.0]
    assert annotator.statistics()["annotator/calls"] == 3
    assert annotator.compare([], [], []) == []


def test_graded_verdicts_are_averaged_where_both_orders_agree() -> None:
    said = iter(["0.9", "0.6", "0.3", "0.9"])
    annotator = JudgeAnnotator(Recorder(lambda _: next(said)), parser=float)
    # Of the second pair, 0.6 and 1 - 0.9: they disagree.
    assert annotator.compare(["w5"] * 2, ["w6"] * 2, ["w7"] * 2) == [pytest.approx(0.8), 0.5]
    assert annotator.statistics()["annotator/swaps_disagree"] == 1
    with pytest.raises(ValueError, match=r"JudgeAnnotator\(Recorder\) returned 7\.0 for pair 0"):
        JudgeAnnotator(Recorder(lambda _: "7"), parser=float).compare(["w5"], ["w6"], ["w7"])


def test_answers_that_say_nothing() -> None:
    def answer(question: str) -> str:
        return "I would say {A}" if "w6" in question else prefers("w4")(question)

    with pytest.raises(ValueError, match=r"answer 1 cannot be read: 'I would say \{A\}'; mend"):
        JudgeAnnotator(Recorder(answer)).compare(PROMPTS, SHORT, LONG)
    for unparsed, outcome in (("skip", None), ("tie", 0.5)):
        annotator = JudgeAnnotator(Recorder(answer), unparsed=unparsed)
        assert ask_preferences(annotator, PROMPTS, SHORT, LONG) == [0.0, outcome, 1.0]
        counts = annotator.statistics()
        assert counts["annotator/unparsed"] == 2
        assert counts["annotator/swaps_disagree"] == 0
        assert counts["annotator/ties"] == (unparsed == "tie")


def test_a_judge_rates_single_responses() -> None:
    judge = Recorder(lambda question: f"[[{len(question.split('[Response]')[1].split())}]]")
    annotator = JudgeAnnotator(judge)
    scores = ask_scores(annotator, PROMPTS, SHORT)
    assert scores[2] == scores[0] + 1  # it has one word more
    assert "[Request]\nw7\n\n[Response]\nw3 w4\n" in judge.asked[0][2]

    refuses = Recorder(lambda _: "no idea")
    for options in ({}, {"unparsed": "skip"}):
        with pytest.raises(ValueError, match=r"answer 0 .* 'no idea'; .* with an unparsed_score"):
            JudgeAnnotator(refuses, **options).score(PROMPTS, SHORT)
    lenient = JudgeAnnotator(refuses, unparsed="skip", unparsed_score=-1.0)
    assert lenient.score(PROMPTS, SHORT) == [-1.0] * 3


def test_templates_name_columns_and_texts_may_hold_braces() -> None:
    judge = Recorder(lambda _: "A")
    template = "{{}} {hint}: {first} or {second}"
    annotator = JudgeAnnotator(judge, template, swap=False)
    annotator.compare(["w5"], ["{first}"], ["{0}"], hint=["w9"], other=[1])
    assert judge.asked == [["{} w9: {first} or {0}"]]
    with pytest.raises(ValueError, match=r"template names 'hint', which is neither .* \(other\)"):
        annotator.compare(["w5"], ["w6"], ["w7"], other=[1])
    with pytest.raises(ValueError, match=r"template has no \{second\}"):
        JudgeAnnotator(judge, "{first}")
    with pytest.raises(ValueError, match=r"score_template has no \{response\}"):
        JudgeAnnotator(judge, score_template="{prompt}")
    with pytest.raises(ValueError, match="one of refuse, skip, tie, got 'ignore'"):
        JudgeAnnotator(judge, unparsed="ignore")


def test_judges_that_do_not_answer_are_refused() -> None:
    for answers, said in (
        (["A"], "gave 1 answers to 2 questions"),
        ("AB", "gave 'AB' to 2 questions: it must give a list"),
        (None, "gave None to 2 questions"),
        ([None, "A"], "answer 0 is None: answers must be texts"),
    ):
        with pytest.raises(ValueError, match=said):
            JudgeAnnotator(lambda _, a=answers: a).compare(["w5"], ["w6"], ["w7"])


@pytest.mark.parametrize(("answer", "verdict"), [
    ("[[A]]", 1.0),
    ("[[A]] no, rather [[b]]", 0.0),
    (" **B**.\n", 0.0),
    ("tie", 0.5),
    ("[[C]]", 0.5),
    ("A good answer is B", None),
    ("", None),
    ("[[D]]", None),
])  # fmt: skip
def test_verdicts(answer: str, verdict: float | None) -> None:
    assert parse_verdict(answer) == verdict


@pytest.mark.parametrize(("answer", "rating"), [
    ("[[5]]", 5.0),
    ("From 1 to 10: [[3]], or rather [[7.5]]", 7.5),
    ("Rating: 7/10", 7.0),
    ("-2", -2.0),
    ("8 out of 10.", 8.0),
    ("3 or 4", None),
    ("none", None),
])  # fmt: skip
def test_ratings(answer: str, rating: float | None) -> None:
    assert parse_rating(answer) == rating


def test_a_model_answers_as_plain_generation_does() -> None:
    model, tokenizer = tiny_models.language_model(), tiny.tokenizer()
    params = SamplingParams(max_new_tokens=4, temperature=0)
    judge = ModelJudge(model, tokenizer, params)
    questions = ["w5 w6 w7", "w8"]

    def plain(text: str) -> str:
        ids = tokenizer(text, return_tensors="pt")
        made = model.generate(**ids, max_new_tokens=4, do_sample=False)[0]
        return tokenizer.decode(made[ids["input_ids"].shape[1] :], skip_special_tokens=True)

    assert [answer.strip() for answer in judge(questions)] == [plain(q) for q in questions]
    assert len(set(judge(questions))) == 2
    assert judge([]) == []
    tokenizer.chat_template = "{% for m in messages %}w10 {{ m.content }} w11 {% endfor %}"
    assert [a.strip() for a in judge(["w5"])] == [plain("w10 w5 w11")]
    with pytest.raises(ValueError, match=r"params\.n is 2: leave it 1"):
        ModelJudge(model, tokenizer, SamplingParams(n=2))


def test_a_model_judges(tmp_path: Path) -> None:
    tiny_models.language_model().save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    judge = ModelJudge.from_pretrained(str(tmp_path), SamplingParams(max_new_tokens=3, seed=0))
    assert not any(p.requires_grad for p in judge.model.parameters())
    annotator = JudgeAnnotator(
        judge, "{first} {second}", lambda answer: float(answer.count("w") >= 3), swap=False
    )
    assert set(annotator.compare(PROMPTS, SHORT, LONG)) <= {0.0, 1.0}
    assert annotator.statistics()["annotator/calls"] == 3
