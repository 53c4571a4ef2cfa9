"""Scores and comparisons by rewards, and checks of what any annotator says."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fastrl.alignment.annotator import (
    Annotator,
    RewardAnnotator,
    ask_preferences,
    ask_scores,
    load_annotator,
)
from fastrl.rewards.classifier import ClassifierReward
from fastrl.rewards.weighted import Rewards
from tests.golden import tiny
from tests.patience import PATIENCE
from tests.trainers.conftest import reward_model

PROMPTS = ["w5", "w6", "w7"]
SHORT, LONG = ["w3", "w3", "w3 w4"], ["w3 w4", "w3", "w3"]


def length(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    assert len(prompts) == len(completions)
    return [float(len(text)) for text in completions]


def test_rewards_score_and_compare() -> None:
    annotator = RewardAnnotator(length)
    assert isinstance(annotator, Annotator)
    assert ask_scores(annotator, PROMPTS, SHORT) == [2.0, 2.0, 5.0]
    assert ask_preferences(annotator, PROMPTS, SHORT, LONG) == [0.0, 0.5, 1.0]
    assert annotator.last_scores == ([2.0, 2.0, 5.0], [5.0, 2.0, 2.0])
    assert annotator.statistics() == {"annotator/calls": 9, "annotator/ties": 1}
    assert annotator.statistics() == {"annotator/calls": 0, "annotator/ties": 0}


def test_several_rewards_may_judge_with_weights_a_time_limit_and_async() -> None:
    async def shouts(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        return [0.1 * len(text) for text in completions]

    annotator = RewardAnnotator(Rewards([length, shouts], [1.0, 10.0], reward_timeout=PATIENCE))
    assert annotator.name == "RewardAnnotator(length, shouts)"
    assert ask_scores(annotator, PROMPTS, SHORT) == [4.0, 4.0, 10.0]
    assert ask_scores(RewardAnnotator(shouts), PROMPTS, SHORT) == [0.1 * 2, 0.1 * 2, 0.1 * 5]


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
    ask_preferences(annotator, PROMPTS, SHORT, LONG, columns)
    short, long = [[3], [3], [3, 4]], [[3, 4], [3], [3]]
    assert seen == [(ids, [1, 2, 3]) for ids in (short, short, long)]
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


@pytest.mark.parametrize(("returned", "said"), [
    ([1.0, math.nan, 1.0], "returned nan for completion 1"),
    ([1.0, 1.0, math.inf], "returned inf for completion 2"),
    (["good", 1.0, 1.0], "returned 'good' for completion 0"),
    ([1.0], "returned 1 rewards for 3 completions"),
    (None, "returned None"),
])  # fmt: skip
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
        with pytest.raises(ValueError, match=rf"the reward function mine {said}"):
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
    with pytest.raises(ValueError, match="column 'responses' of the data has the name"):
        ask_scores(RewardAnnotator(length), PROMPTS, SHORT, {"responses": SHORT})
    with pytest.raises(ValueError, match="column 'firsts'"):
        ask_preferences(RewardAnnotator(length), PROMPTS, SHORT, LONG, {"firsts": SHORT})


def test_an_annotator_that_changes_what_it_is_given_changes_no_data() -> None:
    class Careless(Says):
        def score(self, prompts: Any, responses: Any, **columns: Any) -> Any:
            prompts[0][0]["content"] = "w9"
            columns["answer"][0].clear()
            return self.preferences

        def compare(self, prompts: Any, firsts: Any, seconds: Any, **columns: Any) -> Any:
            firsts[0].clear()
            return self.score(prompts, firsts, **columns)

    chats = [[{"role": "user", "content": "w5"}]]
    columns = {"answer": [[1]]}
    ask_scores(Careless([1.0]), chats, chats, columns)
    ask_preferences(Careless([1.0]), chats, chats, chats, columns)
    assert chats == [[{"role": "user", "content": "w5"}]]
    assert columns == {"answer": [[1]]}
