"""The losses of GRPO and its kin, by both ways, against their formulas in float64 and TRL's own."""

import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import fastrl_kernels
from fastrl import GRPOConfig
from fastrl.data.token_batch import Padded
from fastrl.learn.experience import Experience
from fastrl.learn.objective import Pass, TokenLoss
from fastrl.learn.samples import minibatch_of
from fastrl.samples import Samples
from fastrl.trainers.groups.policy_loss import GRPO_LOSSES, LEVELS, LossTypes, loss_of_grpo
from fastrl_kernels.policy_losses import POLICY_LOSSES

COUNTS = [3, 0, 2, 6]
# How the policy is to the responses: one that has moved since it sampled them, the one that sampled
# them, or one whose responses another engine sampled.
POLICIES = ("moved", "same", "corrected")
LONGEST, GENERATED, VOCABULARY, WIDTH = 8, 9.0, 13, 6
# Of this TRL multiplies the KL of each token by the mean ratio of its response.
_KL_BESIDE_SEQUENCES = "KL times ratio, sequence"
KL_TIMES_RATIO = ("KL times ratio", _KL_BESIDE_SEQUENCES, "KL, vespo", "top entropy")
CASES: dict[str, dict[str, Any]] = {
    **{
        f"{name}, {level}": {"loss_type": name, "importance_sampling_level": level}
        for name in GRPO_LOSSES
        for level in LEVELS
    },
    "delta": {"loss_type": "grpo", "delta": 1.1},
    "KL, vespo": {"loss_type": "vespo", "beta": 0.3},
    "top entropy, vespo": {"loss_type": "vespo", "top_entropy_quantile": 0.55},
    "KL": {"beta": 0.3, "use_bias_correction_kl": False},
    "KL, grpo": {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
    "KL times ratio": {"beta": 0.3},
    _KL_BESIDE_SEQUENCES: {"beta": 0.3, "importance_sampling_level": "sequence"},
    "top entropy": {"loss_type": "bnpo", "top_entropy_quantile": 0.55, "beta": 0.3},
    "entropy": {"entropy_coef": 0.2},
    "entropy, grpo": {"loss_type": "grpo", "entropy_coef": 0.2},
}


class Batch:
    """Hidden states and a head, on log-probs of which the losses are."""

    def __init__(self, policy: str):
        torch.manual_seed(3)
        self.counts, n = torch.tensor(COUNTS), sum(COUNTS)
        self.hidden = torch.randn(n, WIDTH)
        self.weight = 0.7 * torch.randn(VOCABULARY, WIDTH)
        self.labels = torch.randint(VOCABULARY, (n,))
        self.advantages = torch.tensor([0.7, -1.0, -0.4, 0.9])
        self.of = torch.arange(len(COUNTS)).repeat_interleave(self.counts)
        own = self.exact()[0].detach().float()
        self.old = None if policy == "same" else own + 0.3 * torch.randn(n)
        self.ref = own + 0.3 * torch.randn(n)
        self.weights = None
        if policy == "corrected":
            self.weights = (0.3 * torch.randn(n)).exp()
            self.weights[1] = 0.0  # beyond a bound

    def exact(self, *leaves: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies in float64."""
        hidden, weight = leaves or (self.hidden.double(), self.weight.double())
        every = (hidden @ weight.t()).log_softmax(-1)
        return every.gather(1, self.labels[:, None])[:, 0], -(every.exp() * every).sum(-1)

    def part(self, args: GRPOConfig) -> Experience:
        def each(x: Tensor | None) -> Any:
            return None if x is None else list(x.split(COUNTS))

        one, n = [torch.tensor([0])] * len(COUNTS), sum(COUNTS)
        masks = each(torch.ones(n, dtype=torch.bool))
        samples = Samples(
            prompt_ids=one,
            sequences=each(self.labels),
            learned=masks,
            advantages=self.advantages,
            generated=GENERATED,
            old_logprobs=each(self.old),
            ref_logprobs=each(self.ref if args.beta else None),
            sampler_weights=each(self.weights),
        )
        aggregate = loss_of_grpo(args).aggregate
        return minibatch_of(samples, 0, Padded(), torch.device("cpu"), args.beta, aggregate)

    def leaves(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        hidden, weight = self.hidden.to(dtype), self.weight.to(dtype)
        return hidden.requires_grad_(), weight.requires_grad_()


def settings(folder: Path, **own: Any) -> GRPOConfig:
    given = {"epsilon": 0.15, "epsilon_high": 0.25, "sapo_temperature_neg": 1.5, "vespo_k_neg": 2.5}
    given |= {"max_completion_length": LONGEST, **own}
    return GRPOConfig(str(folder), use_cpu=True, report_to=None, **given)


def formula(batch: Batch, args: GRPOConfig, leaves: tuple[Tensor, Tensor]) -> Tensor:
    """As the papers have it, one response after the other, in float64."""
    logprobs, entropies = batch.exact(*leaves)
    old = logprobs.detach() if batch.old is None else batch.old.double()
    low, high, name = args.epsilon, args.epsilon_high, args.loss_type
    least = torch.quantile(entropies, 1 - args.top_entropy_quantile)
    chosen = (entropies >= least).double()
    weights = logprobs.new_ones(len(logprobs))
    if batch.weights is not None:
        weights = batch.weights.double()
    losses = []
    for i, a in enumerate(batch.advantages.double()):
        at = batch.of == i
        new, of_tokens, u = logprobs[at], (logprobs[at] - old[at]).exp(), weights[at]
        ratio = of_tokens
        if args.importance_sampling_level == "sequence" and at.any():
            ratio = (logprobs[at] - old[at]).mean().exp().expand_as(new)
        if name == "cispo":
            each = -ratio.detach().clamp(max=high) * a * new
        elif name == "vespo":
            k, decay = (2.0, 3.0) if a >= 0 else (args.vespo_k_neg, 2.0)
            w = ((new - old[at]).exp() * u.clamp(min=1e-8)).prod().clamp(min=1e-8)
            each, u = -(w**k * (decay * (1 - w)).exp()).detach() * a * new, torch.ones_like(u)
        elif name == "sapo":
            tau = 1.0 if a > 0 else args.sapo_temperature_neg
            each = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * a
        else:
            first = ratio if args.delta is None else ratio.clamp(max=args.delta)
            each = -torch.minimum(first * a, ratio.clamp(1 - low, 1 + high) * a)
        r = batch.ref[at].double() - new
        kl = (r.exp() - r - 1) * (of_tokens if args.use_bias_correction_kl else 1)
        losses.append(each * u * chosen[at] + args.beta * kl)
    every, size = torch.cat(losses), len(COUNTS)
    loss = {
        "grpo": sum(x.sum() / max(len(x), 1) for x in losses) / size,
        "bnpo": every.mean(), "dr_grpo": every.sum() / (size * LONGEST),
        "dapo": every.sum() / GENERATED, "luspo": every.sum() / size,
    }  # fmt: skip
    loss |= {"sapo": loss["grpo"], "cispo": loss["dapo"], "vespo": loss["dapo"]}
    return loss[name] - args.entropy_coef * entropies.mean()


def in_one_pass(batch: Batch, args: GRPOConfig, loss: TokenLoss, leaves: Any) -> Tensor | None:
    """The head's."""
    objective = objective_of(batch, args, loss)
    if objective is None:
        return None
    every = torch.ones_like(batch.labels, dtype=torch.bool)
    found, _ = fastrl_kernels.linear_ppo_loss(
        *leaves, batch.labels, *objective[:2], every, **objective.linear_options
    )
    return found


def objective_of(batch: Batch, args: GRPOConfig, loss: TokenLoss, processes: int = 1) -> Any:
    part = batch.part(args)
    denominator = loss.denominator(part, GENERATED)
    return loss.in_one_pass(Pass(part, part, denominator), args.entropy_coef, processes)


def from_logprobs(batch: Batch, args: GRPOConfig, loss: TokenLoss, leaves: Any) -> Tensor:
    scored: Any = fastrl_kernels.linear_logprobs(*leaves, batch.labels, entropy=True)
    weights, entropies = None, scored[1]
    if args.top_entropy_quantile < 1:
        least = torch.quantile(entropies.detach(), 1 - args.top_entropy_quantile)
        weights = (entropies >= least).float()
    part = batch.part(args)
    denominator = loss.denominator(part, GENERATED)
    found = loss.of_logprobs(part, scored[0], weights, denominator)
    return found - args.entropy_coef * entropies.mean()


def assert_as_exact(found: Tensor, leaves: Any, exact: Tensor, exact_leaves: Any) -> None:
    """To the rounding of float32 in sums of a few tens of terms of size 1."""
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad(found, leaves)
    for mine, theirs in zip(gradients, torch.autograd.grad(exact, exact_leaves), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_losses_follow_their_formulas(name: str, policy: str, tmp_path: Path) -> None:
    args, batch = settings(tmp_path, **CASES[name]), Batch(policy)
    exact_leaves = batch.leaves(torch.float64)
    exact, loss = formula(batch, args, exact_leaves), loss_of_grpo(args)
    for way in (
        lambda x: in_one_pass(batch, args, loss, x),
        lambda x: from_logprobs(batch, args, loss, x),
    ):
        leaves = batch.leaves(torch.float32)
        found = way(leaves)
        if found is not None:
            assert_as_exact(found, leaves, exact.clone(), exact_leaves)
            exact = formula(batch, args, exact_leaves)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_most_losses_come_out_of_the_head(name: str, policy: str, tmp_path: Path) -> None:
    args = settings(tmp_path, **CASES[name])
    found = objective_of(Batch(policy), args, loss_of_grpo(args))
    needs_more = {"entropy, grpo", *(() if policy == "same" else KL_TIMES_RATIO)}
    assert (found is None) == (name in needs_more)


@pytest.mark.parametrize(("own", "processes"), [
    ({"fp16": True}, 1),
    ({"off_policy_mask_threshold": 0.1}, 1),
    ({"top_entropy_quantile": 0.5}, 2),
    ({"top_entropy_quantile": 0.5, "entropy_coef": 0.1}, 1),
])  # fmt: skip
def test_what_is_known_behind_all_logprobs_is_left_to_them(
    own: dict, processes: int, tmp_path: Path
) -> None:
    args = settings(tmp_path, **{k: x for k, x in own.items() if k != "fp16"})
    args.fp16 = own.get("fp16", False)
    assert objective_of(Batch("moved"), args, loss_of_grpo(args), processes) is None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [x for x in CASES if x != _KL_BESIDE_SEQUENCES])
def test_losses_are_trls(name: str, policy: str, tmp_path: Path) -> None:
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    if not hasattr(grpo_trainer.GRPOTrainer, "get_gamma_weights"):
        pytest.skip("another version of TRL")
    args, batch = settings(tmp_path, **CASES[name]), Batch(policy)
    leaves = batch.leaves(torch.float64)
    theirs = _trl_loss(grpo_trainer.GRPOTrainer, batch, args, leaves)
    mine = formula(batch, args, leaves)
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    pairs = zip(*(torch.autograd.grad(x, leaves) for x in (mine, theirs)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def _trl_loss(trainer: Any, batch: Batch, args: GRPOConfig, leaves: Any) -> Tensor:
    """Of TRL's own method, with log-probs in place of a model."""

    def padded(x: Tensor) -> Tensor:
        return pad_sequence(list(x.split(COUNTS)), batch_first=True)

    mask = padded(torch.ones(sum(COUNTS), dtype=torch.long))
    logprobs, entropies = map(padded, batch.exact(*leaves))
    accelerator = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=lambda x: x,
        reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, **_: x,
    )
    host = SimpleNamespace(
        args=args,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        use_vllm=batch.weights is not None,
        vllm_importance_sampling_correction=True,
        get_gamma_weights=trainer.get_gamma_weights,
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        epsilon_low=args.epsilon,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=args.entropy_coef != 0,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
        **{
            name: getattr(args, name)
            for name in (
                *("beta", "loss_type", "importance_sampling_level", "top_entropy_quantile"),
                *("epsilon_high", "entropy_coef", "off_policy_mask_threshold"),
            )
        },
    )
    host.get_high_entropy_mask = lambda *given: trainer.get_high_entropy_mask(host, *given)
    args.steps_per_generation = 1
    inputs = {
        "prompt_ids": mask[:, :1], "prompt_mask": mask[:, :1], "completion_ids": mask,
        "completion_mask": mask, "advantages": batch.advantages.double(),
        "num_items_in_batch": torch.tensor(GENERATED),
        "ref_per_token_logps": padded(batch.ref.double()),
    }  # fmt: skip
    if batch.old is not None:
        inputs["old_per_token_logps"] = padded(batch.old.double())
    if batch.weights is not None:
        each = list(batch.weights.double().split(COUNTS))
        inputs["importance_sampling_ratio"] = pad_sequence(each, True, padding_value=1.0)
    return trainer._compute_loss(host, None, inputs)


def test_cispo_has_no_lower_bound(tmp_path: Path) -> None:
    assert math.isinf(loss_of_grpo(settings(tmp_path, loss_type="cispo")).objective.cliprange[0])


def test_a_row_of_the_kernels_is_a_loss_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those that a name of TRL's is of, such as clip."""
    monkeypatch.setitem(POLICY_LOSSES, "another", POLICY_LOSSES["clip"])
    row = LossTypes()["another"]
    assert (row.kind, row.aggregate, row.of_step) == ("another", "token-mean", True)
    assert "another" in list(LossTypes())
    assert "clip" not in LossTypes()
