"""Responses of a given form, behind every surface that samples them, and calls of tools."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from fastrl import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer, RLOOConfig, RLOOTrainer
from fastrl.models import CausalLMPolicy
from tests import chat_tokenizer, tiny_models
from tests.golden import tiny
from tests.resuming import assert_resumes
from tests.rollout.test_grammars import PERSON, model
from tests.trainers.conftest import ONE_STEP
from tests.trl.test_tools import multiply

TOKENIZER = chat_tokenizer.tokenizer()
CHATS = [[{"role": "user", "content": f"{i} or {i + 1}?"}] for i in range(8)]


def vowels(completions: list[Any], **_: Any) -> list[float]:
    return [float(sum(x in "aeiou" for x in str(text))) for text in completions]


def trained(
    folder: Path, made: Any = GRPOTrainer, config: Any = GRPOConfig, **settings: Any
) -> tuple[Any, list[str]]:
    """A trainer, and the texts of all of its responses."""
    seen: list[str] = []

    def judge(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        seen.extend(TOKENIZER.decode(ids, skip_special_tokens=True) for ids in completion_ids)
        return vowels(seen[-len(completion_ids) :])

    trainer = make(folder, judge, made, config, **settings)
    trainer.train()
    return trainer, seen


def make(
    folder: Path, reward: Any = vowels, made: Any = GRPOTrainer, config: Any = GRPOConfig,
    tools: Any = None, **settings: Any,
) -> Any:  # fmt: skip
    options = {"num_generations": 4, "max_completion_length": 90, "logging_steps": 1}
    options |= {"max_steps": 2, "policy_support": "sampled"}
    args = config(output_dir=str(folder), **{**ONE_STEP, **options, **settings})
    data = Dataset.from_dict({"prompt": CHATS})
    given = {} if tools is None else {"tools": tools}
    return made(model(), reward, args, data, processing_class=TOKENIZER, **given)


@pytest.mark.parametrize(("made", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_groups_have_the_form_of_the_settings(made, config, tmp_path):
    form = json.dumps({"json_schema": PERSON, "whitespace": False})
    trainer, texts = trained(tmp_path, made, config, response_format=form, beta=0.05)
    assert len(texts) == 8
    for text in texts:
        assert json.loads(text).keys() == PERSON["properties"].keys()
    samples = trainer._generations.buffer[0]
    assert all((sets.sizes() < 300).all() for sets in samples.supports)
    assert trainer.state.log_history[0]["completions/clipped_ratio"] == 0


def test_a_regular_expression_by_trls_name(tmp_path):
    _, texts = trained(tmp_path, vllm_structured_outputs_regex="[aeiou]{3}[0-9]+")
    assert all(re.fullmatch("[aeiou]{3}[0-9]+", text) for text in texts)
    with pytest.raises(ValueError, match="set one of the two"):
        make(tmp_path, vllm_structured_outputs_regex="a", response_format={"regex": "a"})


def test_ppo_has_the_form_of_its_configuration_or_of_a_call(tmp_path):
    config = PPOConfig(
        batch_size=4, mini_batch_size=2, group_size=2, advantage="grpo", kl_in="loss",
        policy_support="sampled", response_format={"regex": "[ab]{5}"},
    )  # fmt: skip
    trainer = PPOTrainer(config, CausalLMPolicy(model()), None, TOKENIZER)
    prompts = [torch.arange(3, 9)] * 4
    (first, *_) = trainer.generate(prompts, max_new_tokens=9, return_prompt=False, do_sample=True)
    assert re.fullmatch("[ab]{5}", TOKENIZER.decode(first, skip_special_tokens=True))
    seen: list[str] = []

    def judge(completions: list[str], **_: Any) -> list[float]:
        seen.extend(completions)
        return vowels(completions)

    texts = ["one", "two", "three", "four"]
    settings = {"max_new_tokens": 9, "response_format": {"choices": ["yes", "no"]}}
    trainer.train(
        judge, prompts=texts, steps=2, generation_kwargs=settings, progress=False,
        output=tmp_path,
    )  # fmt: skip
    assert {*seen} == {"yes", "no"}


@pytest.mark.filterwarnings("ignore:response_format=")
def test_without_sets_the_form_is_told_to_change_the_draw(tmp_path):
    with pytest.warns(UserWarning, match=r"response_format=.* changes what tokens are drawn from"):
        make(tmp_path, response_format={"regex": "a"}, policy_support="full")


def test_runs_are_resumed(tmp_path):
    settings = {
        "steps_per_generation": 2,
        "max_steps": 4,
        "save_steps": 1,
        "save_strategy": "steps",
    }

    def again(folder: Path) -> Any:
        return make(folder, response_format={"regex": "[a-f]{4,9}"}, **settings)

    assert_resumes(again, tmp_path, (0, 1))


@pytest.mark.filterwarnings("ignore:response_format=")
def test_what_cannot_be_honoured_is_named_before_training(tmp_path):
    with pytest.raises(ValueError, match="Unsatisfiable"):
        make(tmp_path, response_format={"json_schema": {"enum": []}})
    with pytest.raises(ValueError, match="response_format is no JSON"):
        make(tmp_path, response_format="{")
    with pytest.raises(ValueError, match="response_format needs the rollout engine"):
        make(
            tmp_path, response_format={"regex": "a"}, rollout_backend="generate",
            policy_support="full", generation_kwargs={},
        ).train()  # fmt: skip
    config = PPOConfig(batch_size=2, response_format={"regex": "a"})
    with pytest.raises(ValueError, match="does not know the bytes"):
        PPOTrainer(config, tiny_models.policy(), None, tiny.tokenizer())
    with pytest.raises(ValueError, match="tool_choice='required' needs tools"):
        make(tmp_path, tool_choice="required")


def test_a_plan_needs_neither_the_form_nor_the_tools(tmp_path):
    """A rehearsal has a tokenizer of its own."""
    form = {"regex": "[ab]{5}"}
    settings = {"response_format": form, "tool_choice": "required", "tools": [multiply]}
    assert make(tmp_path, **settings).plan(6, 5).peak > 0
    by_name = make(tmp_path, vllm_structured_outputs_regex="a")
    assert by_name.plan(6, 5).peak > 0
    groups = {"advantage": "grpo", "group_size": 2, "kl_in": "loss"}
    config = PPOConfig(batch_size=2, response_format=form, policy_support="sampled", **groups)
    assert PPOTrainer(config, CausalLMPolicy(model()), None, TOKENIZER).plan(6, 5).peak > 0


def test_responses_without_a_first_token_are_left_out_by_their_reason(tmp_path):
    barred = TOKENIZER.encode("a", add_special_tokens=False)
    trainer = make(
        tmp_path, response_format={"regex": "a|bc"}, max_steps=1, generation_kwargs={
            "suppress_tokens": [*barred, *TOKENIZER.encode("c", add_special_tokens=False)],
        },
    )  # fmt: skip
    trainer.train()  # each ends behind its first token
    assert [len(x) for x in trainer._generations.buffer[0].sequences] == [1] * 4
    lost = make(
        tmp_path, response_format={"regex": "a"}, max_steps=1,
        generation_kwargs={"suppress_tokens": barred},
    )  # fmt: skip
    with pytest.raises(FloatingPointError, match="no first token"):
        lost.train()


# Calls of tools.


def test_a_required_call_is_valid_from_the_first_step(tmp_path):
    """Of a model that was trained on nothing."""
    asked: list[tuple[str, bool]] = []

    def paint(colour: str, thick: bool) -> str:
        """Paints.

        Args:
            colour: The paint. (choices: ["red", "blue"])
            thick: How.
        """
        asked.append((colour, thick))
        return "done"

    settings = {"max_completion_length": 200, "max_tool_calling_iterations": 1}
    settings |= {"generation_kwargs": {"max_new_tokens": 80}}
    trainer, _ = trained(tmp_path, tools=[paint], tool_choice="required", **settings)
    for log in trainer.state.log_history[:2]:
        assert log["tools/call_frequency"] >= 1  # the turn behind the result is free
    assert len(asked) == 8
    assert {*asked} <= {(colour, thick) for colour in ("red", "blue") for thick in (True, False)}
    samples = trainer._generations.buffer[0]
    for mask, sets in zip(samples.learned, samples.supports, strict=True):
        sizes = sets.sizes()
        assert (sizes[~mask] == 300).all()
        assert (sizes[: int(mask.int().cumprod(0).sum())] < 300).all()


def test_calls_over_the_whole_vocabulary_are_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="tool_choice='required' changes what tokens are drawn"):
        make(tmp_path, tools=[multiply], tool_choice="required", policy_support="full")


def test_without_the_choice_an_untrained_model_calls_nothing(tmp_path):
    trainer, _ = trained(tmp_path, tools=[multiply], max_completion_length=90)
    assert trainer.state.log_history[0]["tools/call_frequency"] == 0
