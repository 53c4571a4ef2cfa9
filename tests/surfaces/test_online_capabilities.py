"""What responses may be, behind every surface that samples them: the same is learned, and another
without it.

A policy that recites, one group of responses to each of two prompts, one step of plain gradient
descent: GRPO by ``PPOTrainer.train`` and by ``GRPOTrainer``, and RLOO likewise.
"""

from __future__ import annotations

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
        arguments: of the trainer or of train(); None: those of a trainer's settings.
        without: the same run without it.
    """

    turns: tuple[list[str], ...]
    arguments: dict[str, Any] = {}  # noqa: RUF012
    settings: dict[str, Any] = {}  # noqa: RUF012
    without: dict[str, Any] | None = None
    reward: Callable[..., list[Any]] = small_tokens


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


def rollout_func(masks: bool) -> Callable[..., dict[str, Any]]:
    def respond(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        said = [f"{i % 3} is it, {i}<|end|>" for i in range(len(prompts))]
        ids = [TOKENIZER(text=text)["input_ids"] for text in said]
        found: dict[str, Any] = {
            "prompt_ids": [[5 + i // GROUP, 7, 9] for i in range(len(prompts))],
            "completion_ids": ids,
            "logprobs": None,
            "noted": [float(i % GROUP) for i in range(len(prompts))],
        }
        if masks:
            found["env_mask"] = [[int(i > 2) for i in range(len(x))] for x in ids]
        return found

    return respond


def noted(completions: list[Any], noted: list[float], **_: Any) -> list[float]:
    return noted


PLAIN = ended("12", "14 or so", "9", "no", "1", "22 it is", "333", "yes")
CALLS = [call(a=3, b=4), call(a=3, c=4), "Twelve", call(a=5, b=4)] * 2
ADDS = [call("add", number=i) for i in range(7)] + ["none"]
CASES = {
    "tools": Case(
        (ended(*CALLS), ended("It is 12", "eh", "20", "twelve", "so", "20!")),
        {"tools": [multiply]},
        without={},
    ),
    "most turns of tools": Case(
        (ended(*CALLS), ended("It is 12", "eh", "20", "twelve", "so", "20!")),
        {"tools": [multiply]},
        {"max_tool_calling_iterations": 0},
        without={"max_tool_calling_iterations": None},
    ),
    "environments": Case(
        (ended(*ADDS), ended("0", "it is 1", "2", "3", "four", "5.", "6")),
        {"environment_factory": Counter},
        without={},
    ),
    "environments without tools": Case(
        (PLAIN,), {"environment_factory": Silent}, without={}
    ),
    "rollout_func": Case(
        (PLAIN,), {"rollout_func": rollout_func(False)}, without={}, reward=noted
    ),
    "masks of a rollout_func": Case(
        (PLAIN,),
        {"rollout_func": rollout_func(True)},
        without={"rollout_func": rollout_func(False)},
        reward=noted,
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


def by_train(method: str, case: Case, folder: Path) -> Weights:
    aggregate = {"grpo": "seq-mean-token-mean", "rloo": "seq-mean-token-sum"}[method]
    of_train = ("max_tool_calling_iterations",)
    config = fastrl.PPOConfig(
        advantage=method, group_size=GROUP, batch_size=2 * GROUP, mini_batch_size=2 * GROUP,
        ppo_epochs=1, optim="sgd", learning_rate=RATE, init_kl_coef=0.0, max_grad_norm=1e9,
        loss_aggregate=aggregate, seed=SEED,
        **{k: v for k, v in case.settings.items() if k not in of_train},
    )  # fmt: skip
    policy = CausalLMPolicy(reciting(case))
    trainer = fastrl.PPOTrainer(config, policy, tokenizer=TOKENIZER)
    trainer.train(
        case.reward, steps=1, dataset=rows(), generation_kwargs={"max_new_tokens": LONGEST},
        progress=False, **case.arguments,
        **{k: v for k, v in case.settings.items() if k in of_train},
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
        **own, **case.settings,
    )  # fmt: skip
    trainer = kind(
        reciting(case), case.reward, args, rows(), processing_class=TOKENIZER, **case.arguments
    )
    trainer.train()
    return weights(trainer.model)


def apart(one: Weights, other: Weights) -> float:
    return max(float((one[name] - x).abs().max()) for name, x in other.items())


@pytest.mark.parametrize("method", ["grpo", "rloo"])
@pytest.mark.parametrize("name", CASES)
def test_both_surfaces_learn_the_same(name: str, method: str, tmp_path: Path) -> None:
    case = CASES[name]
    start = weights(model())
    one, other = by_train(method, case, tmp_path), by_trainer(method, case, tmp_path)
    assert apart(one, start) > 1e-3
    assert apart(one, other) < 1e-6
    given = case.without or {}
    changes = {k: v for k, v in given.items() if k in case.settings}
    arguments = {k: v for k, v in given.items() if k not in case.settings}
    if changes:
        plain = case._replace(settings={**case.settings, **changes})
    else:
        reward = case.reward if arguments else small_tokens
        plain = case._replace(arguments=arguments, reward=reward)
    assert apart(one, by_train(method, plain, tmp_path)) > 1e-5
