"""Rewards of GRPOTrainer and RLOOTrainer: what functions are given, and what becomes of theirs."""

import copy
import math
import os
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from fastrl import GRPOConfig, GRPOTrainer
from fastrl.collect.respond import as_texts
from fastrl.models.layout import Layout
from fastrl.user_code import ExitCalled
from tests import tiny_models
from tests.golden import tiny
from tests.resuming import with_dropout
from tests.trl.test_online import KINDS, advantages, make, prompts, small_tokens


@pytest.mark.filterwarnings("ignore:after ExitCalled the state is saved in")
def test_an_async_reward_does_not_end_the_program(tmp_path: Path) -> None:
    answers = iter([[0.0, 1.0, 2.0, 3.0]])

    async def quits(**_: Any) -> list[float]:
        return next(answers, None) or sys.exit(0)

    saving = {"save_strategy": "steps", "save_steps": 10}
    trainer = make(tmp_path, rewards=quits, max_steps=3, **saving)
    with pytest.raises(ExitCalled, match=r"it called sys.exit\(0\)"):
        trainer.train()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_rewards_of_all_kinds_are_weighted(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    async def later(completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    def some(completions: list[str], index: list[int], **given: Any) -> list[float | None]:
        seen.update(given, index=index)
        given["log_extra"]("place", list(range(len(completions))))
        given["log_metric"]("answers", 4.0)
        return [None, *[2.0] * (len(completions) - 1)]

    trainer = make(
        tmp_path, rewards=[small_tokens, later, some], reward_weights=[0.0, 1.0, 3.0],
        shuffle_dataset=False, log_completions=True,
    )  # fmt: skip
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["reward"] == pytest.approx((1 + 3 * 7) / 4)
    assert logged["rewards/some/mean"] == 2.0
    assert logged["answers"] == 4.0
    assert seen["index"] == [0] * 4
    assert seen["trainer_state"] is trainer.state
    table = Dataset.from_parquet(str(tmp_path / "completions" / "completions_00001.parquet"))
    assert {"step", "prompt", "completion", "later", "some", "advantage", "place"} <= set(
        table.column_names
    )


def test_what_no_function_judges_is_not_learned(tmp_path: Path, caplog: Any) -> None:
    trainer = make(tmp_path, rewards=lambda completions, **_: [None] * len(completions))
    before = copy.deepcopy(trainer.model)
    trainer.train()
    assert "All reward functions returned None" in caplog.text
    for old, new in zip(before.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("wrong", [-math.inf, math.nan, 1e39], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_that_is_not_finite_leaves_out_its_response(
    kind: str, wrong: float, tmp_path: Path
) -> None:
    """The others of its group are learned from as if it were not there."""

    def sick(completions: list[str], **_: Any) -> list[float]:
        return [1.0, wrong, 2.0, 4.5]

    def ones(completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    trainer = make(tmp_path, kind, [sick, ones], max_steps=3, beta=0.0, shuffle_dataset=False)
    found: list[Tensor] = []
    compute = trainer.advantages_of

    def spy(*args: Any) -> Any:
        found.append(compute(*args)[0])
        return compute(*args)

    trainer.advantages_of = spy
    said = re.escape(f"function sick returned {wrong} for completion 1 (prompt 'w3 w4 w5'): ")
    with pytest.warns(UserWarning, match=f"{said}.*on_nonfinite='raise'") as warned:
        trainer.train()
    assert len(warned) == 1
    known = torch.tensor([1.0, 2.0, 4.5]) + 1
    for each in found:
        assert each[1] == 0
        torch.testing.assert_close(each[[0, 2, 3]], advantages(known, kind))
    strict = make(tmp_path, kind, [ones, sick], on_nonfinite="raise", shuffle_dataset=False)
    with pytest.raises(ValueError, match=f"{said}rewards must be finite"):
        strict.train()


def test_rewards_of_tokens_are_added_up(tmp_path: Path) -> None:
    def of_tokens(completion_ids: list[list[int]], **_: Any) -> list[list[float]]:
        return [[token % 7 / 7 for token in ids] for ids in completion_ids]

    both = [make(tmp_path / "a", rewards=of_tokens), make(tmp_path / "b")]
    for trainer in both:
        trainer.train()
    one, other = (
        [x["reward"] for x in trainer.state.log_history if "reward" in x] for trainer in both
    )
    assert one == pytest.approx(other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_model_is_that_of_the_highest_reward(kind: str, tmp_path: Path) -> None:
    """Which step's loss is lowest is rounding: advantages of a group sum to 0."""
    levels = [0.0, 0.0, 5.0, 1.0]

    def judge(**given: Any) -> list[float]:
        return [levels[trainer.state.global_step] + x for x in small_tokens(**given)]

    settings: dict[str, Any] = {
        "eval_dataset": prompts(1), "eval_strategy": "steps", "eval_steps": 1, "max_steps": 3,
        "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True,
    }  # fmt: skip
    trainer = make(tmp_path, kind, judge, **settings)
    trainer.train()
    assert Path(str(trainer.state.best_model_checkpoint)).name == "checkpoint-2"
    with pytest.warns(UserWarning, match="eval_loss .* is no measure.*eval_reward"):
        KINDS[kind][1](str(tmp_path), metric_for_best_model="loss", use_cpu=True)


@pytest.mark.parametrize("kind", KINDS)
def test_reward_functions_of_one_name_have_columns_of_their_own(kind: str, tmp_path: Path) -> None:
    def judging(value: float) -> Any:
        def judge(completions: list[Any], **_: Any) -> list[float]:
            return [value + i for i in range(len(completions))]

        return judge

    trainer = make(tmp_path, kind, rewards=[judging(1.0), judging(5.0)], log_completions=True)
    trainer.train()
    log = trainer.state.log_history[0]
    assert (log["rewards/judge/mean"], log["rewards/judge_2/mean"]) == (2.5, 6.5)
    assert {*trainer._logs["rewards"]} == {"judge", "judge_2"}
    assert log["reward"] == 9.0


def test_a_call_of_a_reward_is_repeated_and_limited(tmp_path: Path) -> None:
    sizes: list[int] = []

    def fails_once(completion_ids: list[list[int]], **_: Any) -> list[float]:
        sizes.append(len(completion_ids))
        if len(sizes) == 1:
            raise RuntimeError("the judge is away")
        return small_tokens(completion_ids)

    trainer = make(tmp_path, rewards=fails_once, reward_retries=1, reward_batch_size=2)
    with pytest.warns(UserWarning, match="raised RuntimeError: the judge is away: it is called"):
        trainer.train()
    assert set(sizes) == {2}
    late = make(tmp_path, rewards=lambda **_: time.sleep(60), reward_timeout=0.05)
    with pytest.raises(TimeoutError, match=r"did not return within reward_timeout=0\.05 s"):
        late.train()


def test_bad_rewards_and_prompts_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="returned 1 rewards for 4"):
        make(tmp_path, rewards=lambda **_: [1.0]).train()
    with pytest.raises(ValueError, match=r"rewards of shape \(2,\) .* one number for each of its"):
        make(tmp_path, rewards=lambda prompts, **_: [[1.0, 2.0]] * len(prompts)).train()
    with pytest.raises(ValueError, match="reward weights"):
        make(tmp_path, reward_weights=[1.0, 2.0])
    chats = Dataset.from_list([{"prompt": [{"content": "w3"}]}] * 2)
    with pytest.raises(ValueError, match="a role"):
        make(tmp_path, train_dataset=chats).train()
    with pytest.raises(ValueError, match="train_dataset"):
        GRPOTrainer(tiny_models.language_model(), small_tokens, GRPOConfig(str(tmp_path)))


def test_what_a_reward_function_does_to_its_lists_reaches_nobody_else(tmp_path: Path) -> None:
    def careless(prompts: Any, completions: Any, completion_ids: Any, index: Any, **_: Any) -> Any:
        for ids in completion_ids:
            ids.clear()
        for given in (prompts, completions, index):
            given[:] = ["w3"] * len(given)
        return [0.0] * len(prompts)

    found = []
    for rewards in ([small_tokens], [careless, small_tokens]):
        trainer = make(tmp_path, rewards=rewards, log_completions=True)
        trainer.train()
        logs = trainer.state.log_history[0]
        found.append((logs["reward"], logs["loss"], trainer._logs["completion"]))
    assert found[0] == found[1]


def test_a_reward_function_that_puts_the_policy_into_evaluation_mode_changes_no_loss(
    tmp_path: Path,
) -> None:
    trainers: list[Any] = []

    def judge(completion_ids: list[list[int]], **_: Any) -> list[float]:
        trainers[-1].model.eval()
        return small_tokens(completion_ids)

    for rewards in (small_tokens, judge):
        model = with_dropout(tiny_models.language_model())
        trainers.append(make(tmp_path, rewards=rewards, model=model, num_iterations=2))
        trainers[-1].train()
    one, other = (x.state.log_history[0] for x in trainers)
    assert other["loss"] == one["loss"]
    assert other["grad_norm"] == one["grad_norm"]


@pytest.mark.filterwarnings("ignore:output_dir .* holds checkpoints")
def test_a_run_that_resumes_with_other_rewards_says_so(tmp_path: Path) -> None:
    def lengths(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    saving = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make(tmp_path, **saving).train()
    again = make(tmp_path, rewards=lengths, **saving)
    said = r"settings differ .*reward_funcs: \['small_tokens'\] → \['lengths'\]"
    with pytest.warns(UserWarning, match=said):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_reward_that_leaves_the_working_directory_takes_no_checkpoint_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def leaving(completion_ids: list[list[int]], **_: Any) -> list[float]:
        os.chdir(tmp_path / "elsewhere")
        return small_tokens(completion_ids)

    trainer = make(Path("run"), rewards=leaving, save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model()
    assert not any((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "run" / "checkpoint-1").is_dir()
    assert (tmp_path / "run" / "model.safetensors").is_file()


def words_with_spaces() -> PreTrainedTokenizerFast:
    """Of SentencePiece's kind: it decodes a text without the space that it begins with."""
    special = ["<bos>", "<eos>", "<pad>"]
    words = {
        **dict(zip(special, range(3), strict=True)),
        **{f"\u2581w{i}": i for i in range(3, 97)},
    }
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    names = dict(zip(("bos_token", "eos_token", "pad_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


@pytest.mark.parametrize("door", ["sampled", "rollout_func"])
def test_a_completion_continues_its_prompts_text(door: str, tmp_path: Path) -> None:
    tokenizer, seen = words_with_spaces(), []

    def look(prompts: Any, completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        seen.append((prompts, completions, completion_ids))
        return small_tokens(completion_ids)

    def respond(asked: list[str], _: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [tokenizer(text)["input_ids"] for text in asked],
            "completion_ids": [[5, 6 + i] for i in range(len(asked))],
            "logprobs": None,
        }

    own = {"rollout_func": respond} if door == "rollout_func" else {}
    make(tmp_path, rewards=look, processing_class=tokenizer, **own).train()
    asked, said, ids = seen[0]
    for prompt, completion, tokens in zip(asked, said, ids, strict=True):
        kept = [i for i in tokens if i > tiny.PAD]
        assert tokenizer(prompt + completion)["input_ids"] == tokenizer(prompt)["input_ids"] + kept


def test_a_message_is_what_its_tokens_say_alone() -> None:
    decode = partial(Layout(tiny_models.language_model()).decode, words_with_spaces())
    ids = torch.tensor([3, 4]), torch.tensor([5, 6])
    said = [[{"role": "user", "content": "w3 w4"}], "w3 w4"]
    assert as_texts(decode, said, [ids[0]] * 2, [ids[1]] * 2) == ["w5 w6", " w5 w6"]
