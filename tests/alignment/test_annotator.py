"""Scores and comparisons by rewards and by judges, and annotators that say what cannot be."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastrl import SamplingParams
from fastrl.alignment.annotator import (
    Annotator,
    RewardAnnotator,
    ask_preferences,
    ask_scores,
    load_annotator,
)
from fastrl.rewards.functions import ClassifierReward
from fastrl.rewards.judges import JudgeAnnotator, ModelJudge, parse_rating, parse_verdict
from tests import tiny_models
from tests.golden import tiny
from tests.trainers.conftest import reward_model

PROMPTS = ["w5", "w6", "w7"]
SHORT, LONG = ["w3", "w3", "w3 w4"], ["w3 w4", "w3", "w3"]


def length(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    assert len(prompts) == len(completions)
    return [float(len(text)) for text in completions]


class Recorder:
    """A judge that answers by a function of the question, and remembers what it was asked."""

    def __init__(self, answer: Callable[[str], Any]):
        self.answer, self.asked = answer, []

    def __call__(self, questions: list[str]) -> list[Any]:
        self.asked.append(questions)
        return [self.answer(question) for question in questions]


def test_rewards_score_and_compare() -> None:
    annotator = RewardAnnotator(length)
    assert isinstance(annotator, Annotator)
    assert ask_scores(annotator, PROMPTS, SHORT) == [2.0, 2.0, 5.0]
    assert ask_preferences(annotator, PROMPTS, SHORT, LONG) == [0.0, 0.5, 1.0]
    assert annotator.last_scores == ([2.0, 2.0, 5.0], [5.0, 2.0, 2.0])
    assert annotator.statistics() == {"annotator/calls": 9, "annotator/ties": 1}
    assert annotator.statistics() == {"annotator/calls": 0, "annotator/ties": 0}


def test_a_classifier_scores_prompt_and_response() -> None:
    reward = ClassifierReward(reward_model(), tiny.tokenizer())
    scores = RewardAnnotator(reward).score(PROMPTS, [" w8", " w9", " w3"], other=[1, 2, 3])
    assert scores == pytest.approx(reward.score(["w5 w8", "w6 w9", "w7 w3"]), abs=1e-6)
    assert len(set(scores)) == 3


def test_columns_and_token_ids_reach_the_reward() -> None:
    seen = []

    def reward(prompts: Any, completions: Any, completion_ids: Any, answer: Any) -> list[float]:
        seen.append((completion_ids, answer))
        return [0.0] * len(prompts)

    columns = {"answer": [1, 2, 3]}
    annotator = RewardAnnotator(reward, tiny.tokenizer())
    ask_scores(annotator, PROMPTS, SHORT, columns)
    ask_scores(annotator, PROMPTS, SHORT, {"completion_ids": [[9]] * 3, **columns})
    ask_preferences(annotator, PROMPTS, SHORT, LONG, columns)
    short, long = [[3], [3], [3, 4]], [[3, 4], [3], [3]]
    assert seen == [(ids, [1, 2, 3]) for ids in (short, [[9]] * 3, short, long)]
    with pytest.raises(ValueError, match=r"RewardAnnotator\(reward\) takes completion_ids: make"):
        RewardAnnotator(reward).score(PROMPTS, SHORT, **columns)


def test_an_annotator_from_a_name(tmp_path: Path) -> None:
    code = "def shouts(prompts, completions, completion_ids, **columns):\n"
    code += "    return [float(len(ids)) for ids in completion_ids]\n"
    (tmp_path / "mine.py").write_text(code)
    annotator = load_annotator(f"{tmp_path}/mine.py:shouts", tokenizer=tiny.tokenizer())
    assert annotator.compare(PROMPTS, SHORT, LONG) == [0.0, 0.5, 1.0]
    with pytest.raises(ValueError, match=r"as mine\.py:function"):
        load_annotator("mine.py")


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ([1.0, math.nan, 1.0], "returned nan for completion 1"),
        ([1.0, 1.0, math.inf], "returned inf for completion 2"),
        ([None, 1.0, 1.0], "returned None for completion 0"),
        ([1.0], "returned 1 rewards for 3 completions"),
        (None, "returned None"),
    ],
)
def test_scores_that_are_no_numbers_are_refused(returned: Any, said: str) -> None:
    def mine(**_: Any) -> Any:
        return returned

    class Own(RewardAnnotator):
        name = "Own"

        def __init__(self) -> None:
            pass

        def score(self, *_: Any, **__: Any) -> Any:
            return returned

    for ask in (ask_scores, lambda *given: ask_preferences(*given, SHORT)):
        with pytest.raises(ValueError, match=rf"RewardAnnotator\(mine\) {said}"):
            ask(RewardAnnotator(mine), PROMPTS, SHORT)
    with pytest.raises(ValueError, match=rf"Own\.score {said}"):
        ask_scores(Own(), PROMPTS, SHORT)


class Says:
    """An annotator of a user's."""

    def __init__(self, preferences: Any):
        self.preferences = preferences

    def compare(self, *_: Any, **__: Any) -> Any:
        return self.preferences


def test_preferences_of_any_annotator_are_checked() -> None:
    good = [None, torch.tensor(0.25), 1]
    assert ask_preferences(Says(good), PROMPTS, SHORT, LONG) == [None, 0.25, 1.0]
    for returned, said in (
        ([1.0, 1.5, 0.0], r"returned 1\.5 for pair 1: it must be 1\.0 where the first"),
        ([1.0, 0.0, -0.1], r"returned -0\.1 for pair 2"),
        ([math.nan, 0.0, 1.0], "returned nan for pair 0"),
        (["A", 0.0, 1.0], "returned 'A' for pair 0"),
        ([1.0, 0.0], "returned 2 numbers for 3 pairs"),
        (None, "returned None for 3 pairs"),
    ):
        with pytest.raises(ValueError, match=rf"Says\.compare {said}"):
            ask_preferences(Says(returned), PROMPTS, SHORT, LONG)


def test_columns_named_as_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="column 'responses' has the name of an annotator's arg"):
        ask_scores(RewardAnnotator(length), PROMPTS, SHORT, {"responses": SHORT})
    with pytest.raises(ValueError, match="column 'firsts'"):
        ask_preferences(RewardAnnotator(length), PROMPTS, SHORT, LONG, {"firsts": SHORT})


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


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("[[A]]", 1.0),
        ("[[A]] no, rather [[b]]", 0.0),
        (" **B**.\n", 0.0),
        ("tie", 0.5),
        ("[[C]]", 0.5),
        ("A good answer is B", None),
        ("", None),
        ("[[D]]", None),
    ],
)
def test_verdicts(answer: str, verdict: float | None) -> None:
    assert parse_verdict(answer) == verdict


@pytest.mark.parametrize(
    ("answer", "rating"),
    [
        ("[[5]]", 5.0),
        ("From 1 to 10: [[3]], or rather [[7.5]]", 7.5),
        ("Rating: 7/10", 7.0),
        ("-2", -2.0),
        ("8 out of 10.", 8.0),
        ("3 or 4", None),
        ("none", None),
    ],
)
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
