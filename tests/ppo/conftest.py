"""A tiny policy, its tokenizer, and a trainer around them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from tests.golden import tiny
from tests.ppo.test_golden import without_key_bias

BATCH = 4


def make_policy(architecture: str = "gpt2", **kwargs: Any) -> AutoModelForCausalLMWithValueHead:
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(
        tiny.language_model(architecture), **kwargs
    )
    tiny.fill_by_rule(policy)
    return policy


def descending(
    rate: float, policy: Any = None, reference: Any = None, **settings: Any
) -> PPOTrainer:
    """A trainer whose weights move by this part of their gradients, beside another reference."""
    policy = policy or make_policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=rate)
    reference = reference or perturbed(make_policy())
    return PPOTrainer(
        PPOConfig(**settings), policy, reference, tiny.tokenizer(), optimizer=optimizer
    )


def perturbed(
    policy: AutoModelForCausalLMWithValueHead, size: float = 0.05
) -> AutoModelForCausalLMWithValueHead:
    """Another policy a little away from this rule's: a reference with a KL that is not 0."""
    tiny.fill_by_rule(policy, size)
    return policy


def make_trainer(
    policy: AutoModelForCausalLMWithValueHead | None = None,
    reference: AutoModelForCausalLMWithValueHead | None = None,
    padding_side: str = "right",
    dataset: Any = None,
    **settings: Any,
) -> PPOTrainer:
    settings = {"batch_size": BATCH, "mini_batch_size": 2, "learning_rate": 1e-3, **settings}
    return PPOTrainer(
        PPOConfig(**settings),
        policy or make_policy(),
        reference,
        tiny.tokenizer(padding_side),
        dataset=dataset,
    )


def make_batch(n: int = BATCH, seed: int = 0) -> dict[str, list[Tensor]]:
    """Ragged queries and responses, and scores."""
    g = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> Tensor:
        length = int(torch.randint(low, high, (1,), generator=g))
        return torch.randint(tiny.FIRST_WORD, tiny.VOCABULARY, (length,), generator=g)

    return {
        "queries": [ids(2, 8) for _ in range(n)],
        "responses": [ids(3, 10) for _ in range(n)],
        "scores": list(torch.randn(n, generator=g)),
    }


def parameters(trainer: PPOTrainer) -> dict[str, Tensor]:
    return {k: v.detach().clone().cpu() for k, v in tiny.named_parameters(trainer.model).items()}


def assert_learned_alike(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5
) -> None:
    """Key biases aside: their true gradient is 0, and Adam makes whole steps of its rounding."""
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        one, other = (without_key_bias(name, y) for y in (found[name], x))
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=name)


@pytest.fixture
def trainer() -> PPOTrainer:
    return make_trainer(reference=perturbed(make_policy()))


@pytest.fixture
def unchanged() -> Callable[[PPOTrainer], Any]:
    """A context in which a trainer's parameters and state must not change."""
    import contextlib

    @contextlib.contextmanager
    def check(trainer: PPOTrainer) -> Any:
        before, moments, coef = parameters(trainer), trainer.running.count, trainer.kl_ctl.value
        yield
        assert all(torch.equal(before[k], v) for k, v in parameters(trainer).items())
        assert (trainer.running.count, trainer.kl_ctl.value) == (moments, coef)

    return check
