"""Batches by task: what is in them, in which order, and how an online factory goes on."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from fastrl.alignment import TASKS, Batch, BatchFactory
from fastrl.alignment.responses import compare_responses
from fastrl.alignment.tasks import find_task
from fastrl.data.columns import PAIRS, PROMPTS
from fastrl.rollout import RolloutEngine, SamplingParams
from tests import tiny_models
from tests.alignment.conftest import Examples, LikesHigh, examples, make_factory, worth
from tests.golden import tiny

OF_PROMPT = {"prompt", "prompt_token_ids", "prompt_attention_mask"}
PARTS = ("", "_response_only", "_token_ids", "_attention_mask", "_reward", "_weight")
OF_1, OF_2 = ({f"generation{i}{part}" for part in PARTS} for i in (1, 2))
# By task: its keys, whether the policy writes the responses, and the rewards of the generations.
TABLE: dict[str, tuple[set[str], bool, Any]] = {
    "sft": (OF_PROMPT | OF_1, False, [None]),
    "reward-modelling": (OF_PROMPT | OF_1 | OF_2, False, [None, None]),
    "reinforcement-learning": (OF_PROMPT | OF_1, True, "the annotator's scores"),
    "offline-pointwise": (OF_PROMPT | OF_1, False, [[1.0, 0.0, 1.0, 0.0]]),
    "online-pointwise": (OF_PROMPT | OF_1, True, "the annotator's scores"),
    "offline-pairwise": (OF_PROMPT | OF_1 | OF_2, False, [[1.0] * 4, [0.0] * 4]),
    "online-pairwise": (OF_PROMPT | OF_1 | OF_2, True, "the annotator's comparisons"),
}


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    return RolloutEngine(tiny_models.language_model(), tiny.tokenizer())


class InTurns(LikesHigh):
    """Prefers the first response to every second prompt, whatever the responses are."""

    def compare(
        self, prompts: list[str], firsts: list[str], seconds: list[str], **columns: Any
    ) -> list[float | None]:
        order = [row.prompt for row in examples(PROMPTS)]
        return [float(order.index(prompt) % 2 == 0) for prompt in prompts]


def first(task: str, engine: Any, **given: Any) -> Batch:
    if find_task(task).online:
        given["engine"] = engine
    return next(iter(make_factory(task, **given)))


def test_the_table_is_of_all_tasks() -> None:
    assert set(TABLE) == set(TASKS)


@pytest.mark.parametrize("task", TABLE)
def test_a_batch_has_what_the_table_says(task: str, engine: Any) -> None:
    keys, by_policy, rewards = TABLE[task]
    given: dict[str, Any] = {}
    if rewards == "the annotator's comparisons":
        # Of full length, no two responses to a prompt are equal.
        params = SamplingParams(max_new_tokens=5, min_new_tokens=5, seed=0)
        given = {"annotator": InTurns(), "params": params}
    batch = first(task, engine, **given)
    rows = examples(find_task(task).data)
    assert set(batch) == keys
    generations = [i for i in (1, 2) if f"generation{i}" in keys]
    prompt_ids, mask = batch["prompt_token_ids"], batch["prompt_attention_mask"]
    assert batch["prompt"] == [row.prompt for row in rows]
    assert prompt_ids.dtype == mask.dtype == torch.int64
    assert [tuple(x[m.bool()].tolist()) for x, m in zip(prompt_ids, mask, strict=True)] == [
        row.prompt_ids for row in rows
    ]
    assert mask[:, -1].all()  # padded on the left
    for i in generations:
        texts, responses = batch[f"generation{i}"], batch[f"generation{i}_response_only"]
        ids, mask = batch[f"generation{i}_token_ids"], batch[f"generation{i}_attention_mask"]
        assert ids.dtype == mask.dtype == torch.int64
        assert ids.shape == mask.shape
        assert mask[:, 0].all()  # padded on the right
        for j, row in enumerate(rows):
            assert texts[j] == row.prompt + responses[j]
            whole = tuple(ids[j][mask[j].bool()].tolist())
            assert whole[: len(row.prompt_ids)] == row.prompt_ids
            if not by_policy:
                assert whole[len(row.prompt_ids) :] == row.responses[i - 1].ids
                assert responses[j] == row.responses[i - 1].text
            else:
                assert 1 <= len(whole) - len(row.prompt_ids) <= 5
        weight = batch[f"generation{i}_weight"]
        assert weight.dtype == torch.float32
        assert weight.tolist() == [1.0] * 4
        reward = batch[f"generation{i}_reward"]
        if rewards == "the annotator's scores":
            assert reward.dtype == torch.float32
            assert reward.tolist() == [worth(response) for response in responses]
        elif isinstance(rewards, list):
            wanted = rewards[i - 1]
            assert reward is None if wanted is None else reward.tolist() == wanted
            assert reward is None or reward.dtype == torch.float32
    if rewards == "the annotator's comparisons":
        assert batch["generation1_reward"].tolist() == [1.0, 0.0, 1.0, 0.0]
        assert batch["generation2_reward"].tolist() == [0.0, 1.0, 0.0, 1.0]


def numbers(batches: Any) -> list[list[int]]:
    return [batch.columns["number"] for batch in batches]


def test_every_pass_has_an_order_of_its_own_by_the_seed() -> None:
    rows = examples(PAIRS, 10)

    def of(seed: int, **given: Any) -> list[list[int]]:
        return numbers(
            make_factory("offline-pairwise", rows, shuffle=True, seed=seed, epochs=2, **given)
        )

    one, again, other = of(0), of(0), of(1)
    assert one == again != other
    assert [len(batch) for batch in one] == [4, 4, 2, 4, 4, 2]
    passes = [[*itertools.chain(*part)] for part in (one[:3], one[3:])]
    assert passes[0] != passes[1]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(10))


def test_a_number_of_examples_is_kept_to_the_last_one() -> None:
    factory = make_factory("offline-pairwise", examples(PAIRS, 3), examples=10)
    assert len(factory) == 3
    assert numbers(factory) == [[0, 1, 2, 0], [1, 2, 0, 1], [2, 0]]
    assert numbers(factory) == [[0, 1, 2, 0], [1, 2, 0, 1], [2, 0]]  # offline, it begins anew


def test_an_online_factory_goes_on_through_its_prompts(engine: Any) -> None:
    rows = examples("prompts", 6)
    factory = make_factory(
        "online-pointwise", rows, batch_size=4, examples=8, engine=engine, shuffle=True
    )
    first, second = numbers(factory), numbers(factory)
    assert [len(x) for x in first + second] == [4, 4, 4, 4]
    drawn = [*itertools.chain(*first, *second)]
    assert all(sorted(drawn[i : i + 6]) == list(range(6)) for i in (0, 6))


def test_processes_share_every_batch() -> None:
    rows = examples(PAIRS, 11)
    whole = numbers(make_factory("offline-pairwise", rows, batch_size=4, shuffle=True))
    shares = []
    for rank in range(2):
        factory = make_factory("offline-pairwise", rows, batch_size=2, shuffle=True)
        factory.share(rank, 2)
        shares.append(numbers(factory))
    assert [[len(batch) for batch in share] for share in shares] == [[2, 2, 2], [2, 2, 1]]
    for one, two, both in zip(*shares, whole, strict=True):
        assert sorted(one + two) == sorted(both)


def test_a_process_without_a_share_of_the_last_batch_takes_part_for_nothing() -> None:
    factory = make_factory("offline-pairwise", examples(PAIRS, 5), batch_size=2)
    factory.share(1, 2)
    last = list(factory)[-1]
    assert (last.size, last.fraction, last.weights().tolist()) == (1, 0.0, [0.0])


def test_a_run_goes_on_where_it_was_interrupted() -> None:
    rows = examples(PAIRS, 10)
    settings: dict[str, Any] = {"shuffle": True, "epochs": 2}
    whole = numbers(make_factory("offline-pairwise", rows, **settings))
    factory = make_factory("offline-pairwise", rows, **settings)
    factory.skip(2)
    assert numbers(factory.take(4)) == whole[2:]


def test_equal_responses_are_a_tie_that_nobody_is_asked_about(engine: Any) -> None:
    annotator = LikesHigh()
    greedy = SamplingParams(max_new_tokens=5, temperature=0.0)
    batch = first("online-pairwise", engine, annotator=annotator, params=greedy)
    assert batch["generation1"] == batch["generation2"]
    assert batch["generation1_reward"].tolist() == [0.5] * 4
    assert batch["generation1_weight"].tolist() == [1.0] * 4
    assert annotator.asked == []
    assert (batch.scores, batch.given_scores().tolist()) == ([[0.0] * 4] * 2, [])
    one, other = examples(PAIRS, 2)
    equal = replace(other, responses=other.responses[:1] * 2)
    judged, scores = compare_responses(annotator, [one, equal])
    batch = Batch(judged, tiny.tokenizer().pad_token_id)
    batch.scores = scores
    assert batch.given_scores().tolist() == [worth(r.text) for r in one.responses]


def test_a_pair_that_the_annotator_skips_weighs_nothing(engine: Any) -> None:
    class Undecided(LikesHigh):
        def compare(self, prompts: Any, firsts: Any, seconds: Any, **columns: Any) -> Any:
            return [None, *[1.0] * (len(prompts) - 1)]

    batch = first("online-pairwise", engine, annotator=Undecided())
    assert batch["generation1_weight"].tolist() == [0.0, 1.0, 1.0, 1.0]
    assert batch["generation2_weight"].tolist() == [0.0, 1.0, 1.0, 1.0]
    assert batch.weights().tolist() == [0.0, 1.0, 1.0, 1.0]


def test_what_the_policy_said_of_its_tokens_comes_along(engine: Any) -> None:
    batch = first("online-pairwise", engine)
    for i in (1, 2):
        lengths = [len(x) for x in batch.rollout_logprobs[i - 1]]
        assert lengths == [len(x) for x in batch.responses(i)]


def test_some_samples_keep_their_rewards_and_weights(engine: Any) -> None:
    batch = first("online-pairwise", engine)
    batch.weigh(1, [1.0, 2.0, 3.0, 4.0])
    part = batch.select([3, 1])
    assert part["generation1_weight"].tolist() == [4.0, 2.0]
    assert part["generation2_reward"].tolist() == batch["generation2_reward"][[3, 1]].tolist()
    assert part["generation1"] == [batch["generation1"][3], batch["generation1"][1]]
    assert torch.equal(part.rollout_logprobs[1][0], batch.rollout_logprobs[1][3])


def test_mismatched_pairs_are_each_prompt_with_the_next_ones_response() -> None:
    batch = first("offline-pointwise", None)
    other = batch.mismatched()
    for i, sample in enumerate(other.examples):
        assert sample.prompt_ids == batch.examples[i].prompt_ids
        assert sample.responses[0] == batch.examples[(i + 1) % 4].responses[0]


@pytest.mark.parametrize(("weights", "says"), [
    ([1.0, -0.5, 1.0, 1.0], r"weights\[1\] is -0.5"),
    ([1.0, 1.0, float("nan"), 1.0], r"weights\[2\] is nan"),
    ([float("inf"), 1.0, 1.0, 1.0], r"weights\[0\] is inf"),
    ([1.0, None, 1.0, 1.0], "weights must be numbers, one per sample"),
    (None, "weights is None"),
    ([1.0, 1.0], r"weights has shape \(2,\): pass one number per sample, \[4\]"),
])  # fmt: skip
def test_a_weight_that_is_none_is_refused(weights: list[float], says: str) -> None:
    batch = first("offline-pairwise", None)
    with pytest.raises(ValueError, match=says):
        batch.weigh(2, weights)
    assert batch["generation2_weight"].tolist() == [1.0] * 4


def make(task: str, **given: Any) -> BatchFactory:
    return BatchFactory(task, Examples(examples(PAIRS)), **given)


@pytest.mark.parametrize(("given", "says"), [
    ({"task": "dpo"}, "unknown task 'dpo': choose one of sft, reward-modelling"),
    ({"task": "online-pairwise"}, "needs an annotator"),
    ({"task": "offline-pairwise", "annotator": LikesHigh()}, "leave out annotator"),
    ({"task": "sft", "batch_size": 0}, "batch_size must be at least 1, got 0"),
    ({"task": "sft", "epochs": 0}, "epochs must be at least 1, got 0"),
    ({"task": "sft", "examples": -1}, "examples must be at least 1, got -1"),
])  # fmt: skip
def test_a_factory_that_makes_no_sense_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make(**given)


def test_an_online_factory_needs_somebody_who_writes() -> None:
    factory = make("online-pairwise", annotator=LikesHigh())
    with pytest.raises(ValueError, match="no engine generates the responses of online-pairwise"):
        list(itertools.islice(factory, 1))


def test_a_batch_without_rewards_says_so() -> None:
    with pytest.raises(ValueError, match="has no rewards"):
        first("sft", None).rewards(1)


def test_a_column_of_prompts_that_replaced_what_rewards_get_is_refused() -> None:
    rows = [replace(e, columns={"completions": "w5"}) for e in examples(PROMPTS)]
    with pytest.raises(ValueError, match="column 'completions' of the data has the name of what"):
        make_factory("reinforcement-learning", rows)
    make_factory("sft", [replace(e, columns={"completions": "w5"}) for e in examples(PAIRS)])


@pytest.mark.parametrize(("given", "said"), [
    ({"shuffle": "False"}, "shuffle must be True or False, got 'False'"),
    ({"batch_size": True}, "batch_size must be a whole number, got True"),
    ({"epochs": 1.5}, "epochs must be a whole number, got 1.5"),
    ({"seed": None}, "seed must be a whole number, got None"),
    ({"seed": -1}, "seed must lie between 0 and 4294967295, got -1"),
])  # fmt: skip
def test_arguments_of_another_type_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        make_factory("sft", **given)


def test_whole_floats_are_sizes() -> None:
    factory = make_factory("sft", batch_size=2.0, examples=1e1)
    assert (factory.batch_size, factory.examples, len(factory)) == (2, 10, 5)
