"""A policy loss and an advantage of one's own: one entry each, behind every surface."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM

import fastrl
from fastrl.alignment import PairwiseLoss, make_loss
from fastrl.learn.baselines import compared
from fastrl.learn.preferences import PAIR_LOSSES, Side, loss_of_pairs
from fastrl.models import CausalLMPolicy
from fastrl_kernels import PolicyLoss, linear_ppo_loss, ppo_loss
from tests import tables, tiny_models
from tests.golden import tiny
from tests.kernels.test_ppo_loss import batch
from tests.surfaces import test_one_method as one

CODE = """
import torch

def leaky(log_ratio, advantages, cliprange):
    ratio, (low, high) = log_ratio.exp(), cliprange
    near = ratio.clamp(1 - low, 1 + high)
    return -advantages * (near + 0.1 * (ratio - near))

def above_median(rewards, counts):
    known = torch.where(counts, rewards, torch.nan)
    return rewards - known.nanmedian(-1, keepdim=True).values
"""
Weights = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _tables() -> Iterator[None]:
    with tables.kept():
        yield


def leaky(log_ratio: Tensor, advantages: Tensor, cliprange: tuple[float, float]) -> Tensor:
    ratio, (low, high) = log_ratio.exp(), cliprange
    near = ratio.clamp(1 - low, 1 + high)
    return -advantages * (near + 0.1 * (ratio - near))


def clipped(log_ratio: Tensor, advantages: Tensor, cliprange: tuple[float, float]) -> Tensor:
    """The table's own, in plain torch."""
    ratio, (low, high) = log_ratio.exp(), cliprange
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))


@pytest.mark.parametrize("level", ["token", "sequence", "product"])
def test_a_loss_in_plain_torch_is_the_tables(level: str) -> None:
    fastrl.register_policy_loss("plain")(clipped)
    tensors = batch()
    mask = tensors["mask"]
    found = []
    for kind in ("clip", "plain"):
        leaf = tensors["logprobs"].clone().requires_grad_()
        loss, stats = ppo_loss(
            leaf, tensors["old_logprobs"], tensors["advantages"], mask,
            objective=PolicyLoss(kind, level), cliprange=0.1,
        )  # fmt: skip
        loss.backward()
        found.append((loss.detach(), leaf.grad, stats.mean_ratio))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_bad_losses_and_names() -> None:
    with pytest.raises(ValueError, match="there is a policy loss 'clip' already"):
        fastrl.register_policy_loss("clip")(leaky)
    for taken in ("grpo", "gae", "reinforce++"):
        with pytest.raises(ValueError, match=f"there is an advantage '{re.escape(taken)}' already"):
            fastrl.group_advantage(taken)(lambda rewards, counts: rewards)
    for decorator in (fastrl.register_policy_loss, fastrl.group_advantage, loss_of_pairs):
        with pytest.raises(TypeError, match="write @"):
            decorator(leaky)
    for add, wanted in (
        (fastrl.register_policy_loss("few"), "log_ratio, advantages, cliprange"),
        (fastrl.group_advantage("few"), "rewards, counts"),
        (loss_of_pairs(name="few"), "chosen, rejected"),
    ):
        with pytest.raises(TypeError, match=f"must take {wanted}, in this order: too many"):
            add(lambda alone: alone)
    counts = torch.ones(1, 2).bool()
    with pytest.raises(ValueError, match=r"returned list for rewards \(1, 2\): return"):
        compared(lambda rewards, counts: [0.0], *torch.ones(2, 1, 2).bool().unbind())
    found = compared(lambda rewards, counts: rewards.double(), torch.ones(1, 2), counts)
    assert found.dtype == torch.float32
    side = Side(torch.zeros(3), torch.ones(3), torch.zeros(3))
    for returned, shown in ((None, "NoneType"), (torch.zeros(()), r"\(\)")):
        with tables.kept():
            row = loss_of_pairs(name="none")(lambda chosen, rejected, found=returned: found)
        with pytest.raises(ValueError, match=f"'none' returned {shown} for 3 pairs: return a"):
            row(side, side)
    fastrl.register_policy_loss("still")(lambda log_ratio, a, c: -a * log_ratio.detach())
    with pytest.raises(ValueError, match="'still' does not depend on log_ratio, and nothing would"):
        ppo_loss(*torch.zeros(3, 3).unbind(), torch.ones(3).bool(), objective=PolicyLoss("still"))
    fastrl.register_policy_loss("mean")(leaky)  # a cell of a notebook may run again
    fastrl.register_policy_loss("mean")(lambda log_ratio, a, c: log_ratio.mean())
    hidden, weight = torch.randn(3, 4), torch.randn(7, 4, requires_grad=True)
    ones = torch.ones(3)
    with pytest.raises(ValueError, match=r"'mean' returned \(\) for log-ratios \(3,\): return the"):
        linear_ppo_loss(
            hidden, weight, torch.tensor([1, 2, 3]), -ones, ones, ones > 0,
            objective=PolicyLoss("mean"),
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"unknown policy_loss 'leaky': .* clip, .*; or name a f"):
        fastrl.PPOConfig(policy_loss="leaky")
    with pytest.raises(FileNotFoundError, match=r"there is no file nowhere\.py"):
        fastrl.PPOConfig(policy_loss="nowhere.py:leaky")
    fastrl.register_policy_loss("dapo")(leaky)
    with pytest.raises(ValueError, match=r"'dapo' is TRL's .*: register yours by another"):
        fastrl.GRPOConfig("x", loss_type="dapo")


PAIRS = """
import torch
from fastrl.alignment import loss_of_pairs

def plain(chosen, rejected, beta=0.1):
    return -torch.nn.functional.logsigmoid(beta * (chosen.ratio - rejected.ratio))

@loss_of_pairs(reads="p")
def alone(chosen, rejected):
    return -chosen.means

def mean(chosen, rejected):
    return plain(chosen, rejected).mean()
"""


def test_a_loss_of_pairs_is_named_by_its_file_everywhere(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PAIRS)
    mine = f"{tmp_path / 'mine.py'}:"
    chosen, rejected = (Side(torch.randn(3), torch.ones(3), torch.randn(3)) for _ in "wl")
    config = fastrl.DPOConfig("x", loss_type=f"{mine}plain", beta=0.3)
    row, options = config.objective(config.loss_type[0])
    trainers = make_loss(f"{mine}plain", beta=0.3)
    assert isinstance(trainers, PairwiseLoss)
    wanted = PAIR_LOSSES["dpo"](chosen, rejected, beta=0.3)
    for found in (row(chosen, rejected, **options), trainers.losses(chosen, rejected)):
        torch.testing.assert_close(found, wanted)
    assert not make_loss(f"{mine}alone").compares
    with pytest.raises(ValueError, match=r"alone' reads no reference, .* fastrl align --loss"):
        fastrl.DPOConfig("x", loss_type=f"{mine}alone")
    for make in (make_loss, lambda name: fastrl.DPOConfig("x", loss_type=name)):
        with pytest.raises(ValueError, match=r"mean' returned \(\) for 4 pairs: return a"):
            make(f"{mine}mean")


@pytest.mark.filterwarnings("ignore:the KL estimate is negative")
@pytest.mark.filterwarnings("ignore:settings that nothing reads")
@pytest.mark.usefixtures("plays", "_no_figures")
def test_an_entry_works_behind_every_surface(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    mine = f"{tmp_path / 'mine.py'}:"
    start = tiny_models.language_model()
    grpo: dict[str, Any] = {
        "group_size": 4, "loss_aggregate": "token-mean", "init_kl_coef": 0.0,
        "advantage": f"{mine}above_median", "policy_loss": f"{mine}leaky",
    }  # fmt: skip

    def step(**settings: Any) -> Weights:
        policy = CausalLMPolicy(tiny_models.language_model())
        return one.by_step(policy, **{**grpo, **settings})

    def trainer() -> Weights:
        def respond(prompts: list[str], trainer: Any) -> dict[str, Any]:
            known = {text: iter(one.RESPONSES[i]) for i, text in enumerate(one.PROMPTS)}
            return {
                "prompt_ids": [one.PROMPT_IDS[one.PROMPTS.index(text)] for text in prompts],
                "completion_ids": [next(known[text]) for text in prompts],
                "logprobs": None,
            }

        args = fastrl.GRPOConfig(
            str(tmp_path / "trainer"), num_generations=4, num_iterations=one.EPOCHS,
            epsilon=one.CLIP, steps_per_generation=1, max_completion_length=6,
            advantage=f"{mine}above_median", loss_type=f"{mine}leaky", **one.FITTED,
        )  # fmt: skip
        made = fastrl.GRPOTrainer(
            tiny_models.language_model(), one.scored, args,
            Dataset.from_list([{"prompt": text} for text in one.PROMPTS]),
            processing_class=tiny.tokenizer(), rollout_func=respond,
        )  # fmt: skip
        made.train()
        return one.weights(made.model)

    def command() -> Weights:
        folder = one.saved(tiny_models.language_model(), tmp_path)
        flags = {**one.FLAGS, **{k.replace("_", "-"): v for k, v in grpo.items()}}
        rows = [{"prompt": text} for text in one.PROMPTS]
        reward = f"{tmp_path / 'reward.py'}:score"
        model = one.run("grpo", tmp_path, rows, model=folder, reward=reward, **flags)
        return one.weights(AutoModelForCausalLM.from_pretrained(model))

    without = {"the loss": step(policy_loss="clip"), "the advantage": step(advantage="grpo")}
    found = {"step()": step(), "GRPOTrainer": trainer(), "fastrl grpo": command()}
    one.assert_one(found, one.weights(start), without)


plays, _no_figures = one.plays, one._no_figures
