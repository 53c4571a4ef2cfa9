"""TRL 0.11.4's PPOTrainer computes the same, patched and not.

Not collected with the other tests: it needs TRL's own environment. `make trl-parity` runs it there.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, core
from trl.trainer import ppo_trainer

import fastrl
from fastrl.compat.patch import Calls
from fastrl.compat.patch.trl_0_11 import REPLACEMENTS
from tests.golden import tiny
from tests.trl_parity.originals import counted_originals

BATCH = 8
STEPS = 2
# Of the largest change of any weight. A weight of 0.5 is stored to 3e-8, and changes by some 1e-2.
TOLERANCE = 2e-5
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "minibatches": {"mini_batch_size": 2, "gradient_accumulation_steps": 2},
    "whitened rewards, discounted": {"whiten_rewards": True, "gamma": 0.97, "lam": 0.9},
    "full KL": {"kl_penalty": "full", "adap_kl_ctrl": False, "init_kl_coef": 0.1},
}


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    yield
    fastrl.unpatch_trl()


def batch(seed: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Ragged queries and responses, and scores."""
    g = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> Tensor:
        length = int(torch.randint(low, high, (1,), generator=g))
        return torch.randint(tiny.FIRST_WORD, tiny.VOCABULARY, (length,), generator=g)

    scores = torch.randn(BATCH, generator=g)
    return [ids(2, 8) for _ in range(BATCH)], [ids(3, 12) for _ in range(BATCH)], list(scores)


def policy(perturbation: float = 0.0) -> AutoModelForCausalLMWithValueHead:
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        tiny.language_model("gpt2"), summary_dropout_prob=0.0
    )
    tiny.fill_by_rule(model, perturbation)
    return model


def train(settings: dict[str, Any]) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Scalar statistics of two steps of plain gradient descent, and the weights after them."""
    np.random.seed(0)
    model = policy()
    trainer = PPOTrainer(
        PPOConfig(**{"batch_size": BATCH, "mini_batch_size": BATCH, "seed": 0, **settings}),
        model,
        policy(0.05),
        tiny.tokenizer(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
    )
    statistics = {}
    for step in range(STEPS):
        found = trainer.step(*batch(step))
        statistics |= {
            f"{step} {name}": float(value)
            for name, value in found.items()
            if np.ndim(value) == 0 and name.startswith(("objective/", "ppo/"))
        }
    return statistics, {k: p.detach().clone() for k, p in tiny.named_parameters(model).items()}


@pytest.mark.filterwarnings("ignore")  # of versions that belong together, all of them old
@pytest.mark.parametrize("case", CASES)
def test_steps_compute_the_same_patched_and_not(case):
    their_statistics, theirs = train(CASES[case])
    with counted_originals(REPLACEMENTS) as originals, fastrl.patch_trl() as patch:
        originals.clear()  # what the patch's own check ran
        our_statistics, ours = train(CASES[case])
        counts = patch.call_counts()

    # The whole log-softmax, for the KL over the vocabulary, is TRL's own.
    delegated = {"logprobs_from_logits": 2 * STEPS} if case == "full KL" else {}
    assert originals == delegated
    assert {name: calls.delegated for name, calls in counts.items() if calls.delegated} == delegated
    # Whitening is part of our compute_advantages; its name is for the other trainers.
    idle = {name for name, calls in counts.items() if not calls.ours}
    assert idle == {"masked_whiten"}
    before = {k: p.detach() for k, p in tiny.named_parameters(policy()).items()}
    largest = max((w - before[k]).abs().max().item() for k, w in theirs.items())
    assert largest > 1e-3
    for name, weight in ours.items():
        assert (weight - theirs[name]).abs().max().item() <= TOLERANCE * largest, name
    assert our_statistics == pytest.approx(their_statistics, rel=2e-5, abs=1e-6)


def values(dtype: torch.dtype, requires_grad: bool) -> tuple[Tensor, Tensor]:
    """[4, 9] far from 0, as returns are, and a mask with holes."""
    g = torch.Generator().manual_seed(1)
    x = (3 + torch.randn(4, 9, generator=g)).to(dtype)
    return x.requires_grad_(requires_grad), torch.rand(4, 9, generator=g) < 0.6


@pytest.mark.parametrize("name", ["masked_mean", "masked_var", "masked_whiten"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64])
def test_masked_statistics_are_trls(name, dtype, mask_dtype):
    requires_grad = name != "masked_whiten"
    x, mask = values(dtype, requires_grad)
    # The same numbers in float64, which TRL's own formula works on: its bf16 sums are coarse.
    wide = x.detach().double().requires_grad_(requires_grad)
    expected = getattr(core, name)(wide, mask)
    with fastrl.patch_trl() as patch:
        found = getattr(ppo_trainer, name)(x, mask.to(mask_dtype))
        assert patch.call_counts()[name] == Calls(ours=1)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    if requires_grad:
        found.backward()
        expected.backward()
        torch.testing.assert_close(x.grad.double(), wide.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_and_entropies_are_trls(dtype):
    g = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(2, 5, 33, generator=g)).to(dtype).requires_grad_()
    labels = torch.randint(33, (2, 5), generator=g)
    wide = logits.detach().double().requires_grad_()
    expected = core.logprobs_from_logits(wide, labels) - core.entropy_from_logits(wide)
    expected.sum().backward()
    with fastrl.patch_trl():
        logprobs = ppo_trainer.logprobs_from_logits(logits, labels)
        entropies = ppo_trainer.entropy_from_logits(logits)
    (logprobs - entropies).sum().backward()
    assert logprobs.dtype == entropies.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        (logprobs - entropies).double(), expected, rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=tolerance, atol=tolerance)


LOGITS = torch.arange(42.0).sin().reshape(2, 3, 7)
NOT_COVERED: dict[str, tuple[str, Any]] = {
    "an axis": ("masked_mean", lambda f, x, mask: f(x, mask, axis=0)),
    "weights": ("masked_mean", lambda f, x, mask: f(x, mask.float())),
    "broadcasting": ("masked_mean", lambda f, x, mask: f(x, mask[:1])),
    "float64": ("masked_mean", lambda f, x, mask: f(x.double(), mask)),
    "variance, weights": ("masked_var", lambda f, x, mask: f(x, mask.float())),
    "whitening with gradients": ("masked_whiten", lambda f, x, mask: f(x, mask)),
    "entropy in float64": ("entropy_from_logits", lambda f, *_: f(LOGITS.double())),
    "no labels": ("logprobs_from_logits", lambda f, *_: f(LOGITS, None, gather=False)),
}


@pytest.mark.parametrize("case", NOT_COVERED)
def test_what_the_ops_do_not_cover_is_handed_on(case):
    name, call = NOT_COVERED[case]
    arguments = values(torch.float32, requires_grad=True)
    expected = call(getattr(core, name), *arguments)
    with fastrl.patch_trl() as patch:
        found = call(getattr(core, name), *arguments)
        counts = patch.call_counts()[name]
    assert counts == Calls(delegated=1)
    torch.testing.assert_close(found, expected, equal_nan=True)  # a column without any
    assert found.requires_grad == expected.requires_grad


def test_undone_trl_is_as_before():
    def state() -> list[list[tuple[str, int]]]:
        owners = (core, ppo_trainer, PPOTrainer)
        return [[(k, id(v)) for k, v in vars(owner).items()] for owner in owners]

    before = state()
    patch = fastrl.patch_trl()
    assert state() != before
    assert patch.version == "0.11.4"
    fastrl.unpatch_trl()
    assert state() == before
