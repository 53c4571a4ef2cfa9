"""What responses may be, behind every surface that samples them: the same is learned, and another
without it.

A policy that recites, one group of responses to each of two prompts, one step of plain gradient
descent: GRPO by ``PPOTrainer.train`` and by ``GRPOTrainer``, and RLOO likewise.
"""

from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from torch import Tensor

import fastrl
from fastrl.models import CausalLMPolicy
from tests import chat_tokenizer
from tests.trl.test_tools import call, model, multiply, small_tokens

TOKENIZER = chat_tokenizer.tokenizer()
RATE, GROUP, LONGEST = 0.05, 4, 200
SEED = 1  # draws the prompts in their order
Weights = dict[str, Tensor]


class Case(NamedTuple):
    """A capability.

    Attributes:
        turns: what the policy writes, turn by turn: of all responses, then of those that go on.
        arguments: of the trainer or of train().
        ours: settings of PPOConfig, and further arguments of train().
        theirs: the same of GRPOConfig and RLOOConfig.
        without: arguments, ours and reward of the same run without it.
    """

    turns: tuple[list[str], ...]
    arguments: dict[str, Any] = {}  # noqa: RUF012
    ours: dict[str, Any] = {}  # noqa: RUF012
    theirs: dict[str, Any] = {}  # noqa: RUF012
    reward: Callable[..., list[Any]] = small_tokens
    without: dict[str, Any] = {}  # noqa: RUF012


class Counter:
    """An environment that is told numbers."""

    def __init__(self) -> None:
        self.total = 0

    def reset(self, **columns: Any) -> str:
        self.total = 0
        return f" from {columns['start']}"

    def add(self, number: int) -> int:
        """Adds.

        Args:
            number: What is added.
        """
        self.total += number
        return self.total

    def get_reward(self) -> float:
        return float(self.total)


class Silent:
    """An environment without tools."""

    def reset(self, **columns: Any) -> str:
        return f" from {columns['start']}"


def ended(*texts: str) -> list[str]:
    return [f"{text}<|end|>" for text in texts]


def rollout_func(masks: bool = False, logprobs: bool = False) -> Callable[..., dict[str, Any]]:
    def respond(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        said = [f"{i % 3} is it, {i}<|end|>" for i in range(len(prompts))]
        ids = [TOKENIZER(text=text)["input_ids"] for text in said]
        found: dict[str, Any] = {
            "prompt_ids": [[5 + i // GROUP, 7, 9] for i in range(len(prompts))],
            "completion_ids": ids,
            "logprobs": None,
            "noted": [float(i % GROUP) for i in range(len(prompts))],
        }
        if logprobs:  # every other response is one that the policy would hardly write
            found["logprobs"] = [[-5.5 + 4 * (i % 2)] * len(x) for i, x in enumerate(ids)]
        if masks:
            found["env_mask"] = [[int(i > 2) for i in range(len(x))] for x in ids]
        return found

    return respond


def by_length(completion_ids: list[list[int]], start: list[int], **_: Any) -> list[float]:
    """Nothing to compare in one of the groups."""
    pairs = zip(completion_ids, start, strict=True)
    return [float(len(ids) % 3) if begun == 3 else 1.0 for ids, begun in pairs]


def failing(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Fails every other time."""
    CALLED.append(1)
    if len(CALLED) % 2:
        raise OSError("busy")
    return small_tokens(completion_ids)


CALLED: list[int] = []


def noted(completions: list[Any], noted: list[float], **_: Any) -> list[float]:
    return noted


PLAIN = ended("12", "14 or so", "9", "no", "1", "22 it is", "333", "yes")
CALLS = [call(a=3, b=4), call(a=3, c=4), "Twelve", call(a=5, b=4)] * 2
ADDS = [call("add", number=i) for i in range(7)] + ["none"]
TALK = (ended(*CALLS), ended("It is 12", "eh", "20", "twelve", "so", "20!"))
BOUNDED = {
    "vllm_importance_sampling_correction": True, "vllm_importance_sampling_clip_max": 2.0,
    "vllm_importance_sampling_mode": "sequence_truncate",
}  # fmt: skip
CASES = {
    "tools": Case(TALK, {"tools": [multiply]}, without={"arguments": {}}),
    "most turns of tools": Case(
        TALK, {"tools": [multiply]}, {"max_tool_calling_iterations": 0},
        {"max_tool_calling_iterations": 0}, without={"ours": {}},
    ),
    "environments": Case(
        (ended(*ADDS), ended("0", "it is 1", "2", "3", "four", "5.", "6")),
        {"environment_factory": Counter}, without={"arguments": {}},
    ),
    "environments without tools": Case(
        (PLAIN,), {"environment_factory": Silent}, without={"arguments": {}}
    ),
    "rollout_func": Case(
        (PLAIN,), {"rollout_func": rollout_func()}, reward=noted,
        without={"arguments": {}, "reward": small_tokens},
    ),
    "masks of a rollout_func": Case(
        (PLAIN,), {"rollout_func": rollout_func(masks=True)}, reward=noted,
        without={"arguments": {"rollout_func": rollout_func()}},
    ),
    "correction of a sampler": Case(
        (PLAIN,), {"rollout_func": rollout_func(logprobs=True)},
        {"sampler_correction": "sequence-truncate", "sampler_correction_max": 2.0}, BOUNDED,
        noted, {"ours": {}},
    ),
    "off-policy masks": Case(
        (PLAIN,), {"rollout_func": rollout_func(logprobs=True)},
        {"off_policy_mask_threshold": 1.0},
        {"off_policy_mask_threshold": 1.0, "vllm_importance_sampling_correction": False},
        noted, {"ours": {}},
    ),
    "dynamic sampling": Case(
        (PLAIN,), {}, {"dynamic_sampling_rounds": 2}, {"dynamic_sampling_rounds": 2}, by_length,
        {"ours": {}},
    ),
    "a penalty without EOS": Case(
        ([*ended("12", "9"), "the longest, cut", *ended("1", "22", "33", "yes", "or not")],), {},
        {"missing_eos_penalty": 0.7}, {"missing_eos_penalty": 0.7}, without={"ours": {}},
    ),
    "a penalty of length": Case(
        (PLAIN,), {}, {"overlong_buffer": LONGEST - 2, "overlong_penalty": 9.0},
        {"overlong_buffer": LONGEST - 2, "overlong_penalty": 9.0}, without={"ours": {}},
    ),
    "repeated calls of rewards": Case(
        (PLAIN,), {}, {"reward_retries": 2}, {"reward_retries": 2}, failing,
        {"ours": {}, "reward": small_tokens},
    ),
    "passes of few tokens": Case(
        (PLAIN,), {}, {"micro_batch_tokens": 400}, {"micro_batch_tokens": 400},
        without={"reward": by_length},
    ),
}  # fmt: skip


def says(model: Any, turns: tuple[list[str], ...]) -> None:
    asked: list[int] = []

    def generate(self: Any, input_ids: Tensor, **_: Any) -> Tensor:
        texts = turns[len(asked) % len(turns)][: len(input_ids)]
        asked.append(len(input_ids))
        own = TOKENIZER(text=texts, padding=True, padding_side="right", return_tensors="pt")
        return torch.cat([input_ids, own["input_ids"]], 1)

    model.generate = MethodType(generate, model)


def rows() -> Dataset:
    asked = ([{"role": "user", "content": text}] for text in ("3*4?", "what is 5?"))
    return Dataset.from_list([{"prompt": x, "start": i + 2} for i, x in enumerate(asked)])


def reciting(case: Case) -> Any:
    made = model()
    says(made, case.turns)
    return made


def weights(model: Any) -> Weights:
    named = {name.removeprefix("pretrained_model."): p for name, p in model.named_parameters()}
    return {name: p.detach().clone() for name, p in named.items()}


OF_TRAIN = ("max_tool_calling_iterations", "missing_eos_penalty", "reward_retries")


def by_train(method: str, case: Case, folder: Path) -> Weights:
    aggregate = {"grpo": "seq-mean-token-mean", "rloo": "seq-mean-token-sum"}[method]
    config = fastrl.PPOConfig(
        advantage=method, group_size=GROUP, batch_size=2 * GROUP, mini_batch_size=2 * GROUP,
        ppo_epochs=1, optim="sgd", learning_rate=RATE, init_kl_coef=0.0, max_grad_norm=1e9,
        loss_aggregate=aggregate, seed=SEED,
        **{k: v for k, v in case.ours.items() if k not in OF_TRAIN},
    )  # fmt: skip
    policy = CausalLMPolicy(reciting(case))
    trainer = fastrl.PPOTrainer(config, policy, tokenizer=TOKENIZER)
    trainer.train(
        case.reward, steps=1, dataset=rows(), generation_kwargs={"max_new_tokens": LONGEST},
        progress=False, **case.arguments,
        **{k: v for k, v in case.ours.items() if k in OF_TRAIN},
    )  # fmt: skip
    return weights(trainer.model)


def by_trainer(method: str, case: Case, folder: Path) -> Weights:
    kind, config, own = {
        "grpo": (fastrl.GRPOTrainer, fastrl.GRPOConfig, {"loss_type": "grpo"}),
        "rloo": (fastrl.RLOOTrainer, fastrl.RLOOConfig, {"beta": 0.0}),
    }[method]
    args = config(
        str(folder), per_device_train_batch_size=2 * GROUP, num_generations=GROUP, max_steps=1,
        learning_rate=RATE, optim="sgd", lr_scheduler_type="constant", max_grad_norm=1e9,
        save_strategy="no", use_cpu=True, report_to="none", disable_tqdm=True,
        max_completion_length=LONGEST, shuffle_dataset=False, gradient_checkpointing=False,
        **own, **case.theirs,
    )  # fmt: skip
    trainer = kind(
        reciting(case), case.reward, args, rows(), processing_class=TOKENIZER, **case.arguments
    )
    trainer.train()
    return weights(trainer.model)


def apart(one: Weights, other: Weights) -> float:
    return max(float((one[name] - x).abs().max()) for name, x in other.items())


@pytest.mark.filterwarnings("ignore:the reward function failing raised OSError")
@pytest.mark.parametrize("method", ["grpo", "rloo"])
@pytest.mark.parametrize("name", CASES)
def test_both_surfaces_learn_the_same(name: str, method: str, tmp_path: Path) -> None:
    case = CASES[name]
    start = weights(model())
    one, other = by_train(method, case, tmp_path), by_trainer(method, case, tmp_path)
    assert apart(one, start) > 1e-3
    assert apart(one, other) < 1e-6
    plain = by_train(method, case._replace(**case.without), tmp_path)
    if name == "repeated calls of rewards":
        assert apart(one, plain) < 1e-6  # without it there is an error
        with pytest.raises(OSError, match="busy"):
            by_train(method, case._replace(ours={}), tmp_path)
    else:
        assert apart(one, plain) > 1e-5
