"""What users of TRL's PPOTrainer reach into: schedule, loss, penalty, checks, warnings."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR

from fastrl import PPOConfig, PPOTrainer
from fastrl_kernels import reference
from tests.golden import tiny
from tests.ppo.conftest import BATCH, make_batch, make_policy, make_trainer, perturbed


def scheduled(**settings: Any) -> tuple[PPOTrainer, ExponentialLR]:
    policy = make_policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-2)
    schedule = ExponentialLR(optimizer, gamma=0.5)
    config = PPOConfig(batch_size=BATCH, **settings)
    trainer = PPOTrainer(
        config, policy, None, tiny.tokenizer(), optimizer=optimizer, lr_scheduler=schedule
    )
    return trainer, schedule


@pytest.mark.parametrize("settings", [
    {"mini_batch_size": 2, "ppo_epochs": 3},
    {"mini_batch_size": 1, "gradient_accumulation_steps": 2, "ppo_epochs": 1},
])  # fmt: skip
def test_a_schedule_advances_once_a_step_however_many_updates_it_takes(settings: Any) -> None:
    trainer, schedule = scheduled(**settings)
    assert trainer.lr_scheduler.scheduler is schedule
    rates = [trainer.step(**make_batch(seed=i))["ppo/learning_rate"] for i in range(3)]
    assert rates == pytest.approx([1e-2, 5e-3, 2.5e-3])
    assert trainer.lr_scheduler.get_last_lr() == pytest.approx([1.25e-3])


def test_a_schedule_is_part_of_accelerates_checkpoint(tmp_path: Any) -> None:
    trainer, _ = scheduled(mini_batch_size=2, ppo_epochs=1)
    trainer.step(**make_batch())
    trainer.accelerator.save_state(str(tmp_path))
    trainer.step(**make_batch())
    trainer.accelerator.load_state(str(tmp_path))
    assert trainer.lr_scheduler.get_last_lr() == pytest.approx([5e-3])


def of_one_sample(length: int = 6, vocabulary: int = 9) -> dict[str, Tensor]:
    """Arguments of PPOTrainer.loss, [T], with logits [T, V]."""
    g = torch.Generator().manual_seed(0)
    names = ("old_logprobs", "values", "vpreds", "logprobs", "advantages", "returns")
    arguments = {name: torch.randn(length, generator=g) for name in names}
    arguments["mask"] = torch.tensor([False, True, True, False, True, True])
    return arguments | {"logits": torch.randn(length, vocabulary, generator=g)}


@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean"])
def test_the_loss_is_that_of_the_specification_in_float64(aggregate: str) -> None:
    """Policy and value loss, clipped and not, their gradients, and the statistics of the values."""
    trainer = make_trainer(loss_aggregate=aggregate, cliprange_value=0.3, vf_coef=0.7)
    g = torch.Generator().manual_seed(0)
    old, values, advantages, returns, moved, moved_values = torch.randn(6, 4, 9, generator=g)
    mask = torch.rand(4, 9, generator=g) > 0.3
    new = (old + 0.3 * moved).requires_grad_()
    vpreds = (values + 0.4 * moved_values).requires_grad_()
    policy_loss, value_loss, found = trainer.loss(
        old, values, None, vpreds, new, mask, advantages, returns
    )
    exact = [x.detach().double().requires_grad_() for x in (new, vpreds)]
    given = (old.double(), advantages.double(), mask)
    term = (exact[1], values.double(), returns.double(), 0.3, 0.7)
    loss, stats = reference.ppo_loss(exact[0], *given, value=term, aggregate=aggregate)
    tolerance = {"rtol": 1e-5, "atol": 1e-7}  # fp32 sums of 36 terms
    torch.testing.assert_close((policy_loss + value_loss).double(), loss, **tolerance)
    assert value_loss.item() == pytest.approx(0.7 * stats["value_loss"].item(), rel=1e-5)
    gradients = torch.autograd.grad(policy_loss + value_loss, (new, vpreds))
    for got, expected in zip(gradients, torch.autograd.grad(loss, exact), strict=True):
        torch.testing.assert_close(got.double(), expected, **tolerance)
    names = {
        "val/clipfrac": "value_clipfrac", "val/vpred": "value_mean", "val/error": "value_error",
    }  # fmt: skip
    names |= {"policy/clipfrac": "clipfrac", "policy/approxkl": "approx_kl"}
    for name, field in names.items():
        assert float(found[name]) == pytest.approx(stats[field].item(), rel=1e-5), name
    assert 0 < found["val/clipfrac"] < 1
    counted = returns[mask].double()
    assert float(found["returns/var"]) == pytest.approx(float(counted.var()), rel=1e-5)
    assert float(found["val/var"]) == pytest.approx(float(values[mask].double().var()), rel=1e-5)


def test_the_loss_of_one_dimensional_arguments_is_that_of_one_sample(trainer: PPOTrainer) -> None:
    arguments = of_one_sample()
    alone = trainer.loss(**arguments)
    batched = trainer.loss(**{name: x.unsqueeze(0) for name, x in arguments.items()})
    for one, other in zip(alone[:2], batched[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert alone[2].keys() == batched[2].keys()
    for name, value in alone[2].items():
        torch.testing.assert_close(value, batched[2][name], rtol=0, atol=0, equal_nan=True)
    # The entropy is a mean over the tokens that count.
    p = arguments["logits"].double().softmax(-1)
    entropies = -(p * p.log()).sum(-1)[arguments["mask"]]
    # fp32 sums of 9 terms
    assert float(alone[2]["policy/entropy"]) == pytest.approx(float(entropies.mean()), rel=1e-5)


def test_one_entropy_a_sample_is_taken_for_all_its_tokens(trainer: PPOTrainer) -> None:
    arguments = {name: x.unsqueeze(0) for name, x in of_one_sample().items()}
    arguments["logits"] = arguments["logits"][:, 0]  # [B, V]
    entropy = trainer.loss(**arguments)[2]["policy/entropy"]
    log_p = arguments["logits"].double().log_softmax(-1)
    assert float(entropy) == pytest.approx(float(-(log_p.exp() * log_p).sum()), rel=1e-5)


def test_the_entropy_is_at_the_temperature() -> None:
    arguments = of_one_sample()
    entropy = make_trainer(temperature=0.5).loss(**arguments)[2]["policy/entropy"]
    p = (arguments["logits"].double() / 0.5).softmax(-1)
    entropies = -(p * p.log()).sum(-1)[arguments["mask"]]
    # fp32 sums of 9 terms
    assert float(entropy) == pytest.approx(float(entropies.mean()), rel=1e-5)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_classic_optimizer_step_is_on_the_whole_loss(accumulated: int) -> None:
    """However many mini-batches step() would accumulate: by SGD at a rate of 1."""
    policy = make_policy()
    config = PPOConfig(batch_size=4, mini_batch_size=2, gradient_accumulation_steps=accumulated)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    trainer = PPOTrainer(config, policy, None, tiny.tokenizer(), optimizer=optimizer)
    zeros = torch.zeros(2, 3, device=trainer.current_device)
    mask = torch.ones_like(zeros, dtype=torch.bool)
    bias = policy.v_head.summary.bias
    before = bias.item()
    trainer.train_minibatch(zeros, zeros, zeros, None, bias + zeros, mask, zeros, zeros + 1)
    # d/db ½·vf_coef·(b - 1)²; b is within the clip range of 0.2
    assert bias.item() - before == pytest.approx(0.1 * (1 - before), rel=1e-5)


LOGPROBS = torch.tensor([[-0.5, -0.2, -3.0], [-0.6, -4.0, -0.1]])
DIFFERENCE = torch.tensor([[0.25, -0.5, 0.0], [-1.0, 2.0, -0.125]])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("kl", DIFFERENCE), ("abs", DIFFERENCE.abs()), ("mse", DIFFERENCE.square() / 2)],
)
def test_the_penalty_of_each_token_can_be_asked_for(kind: str, expected: Tensor) -> None:
    penalty = make_trainer(kl_penalty=kind)._kl_penalty
    # Differences of numbers up to 6 in fp32.
    torch.testing.assert_close(penalty(LOGPROBS, LOGPROBS - DIFFERENCE), expected)


def test_the_full_penalty_is_the_kl_of_the_two_distributions() -> None:
    g = torch.Generator().manual_seed(0)
    ours, theirs = (
        torch.randn(2, 3, 7, generator=g, dtype=torch.float64).log_softmax(-1) for _ in range(2)
    )
    kl = make_trainer(kl_penalty="full")._kl_penalty(ours.float(), theirs.float())
    expected = torch.nn.functional.kl_div(theirs, ours, log_target=True, reduction="none").sum(-1)
    assert kl.shape == (2, 3)
    torch.testing.assert_close(kl.double(), expected, rtol=1e-5, atol=1e-6)


def test_without_a_reference_the_penalty_is_not_known() -> None:
    penalty = make_trainer(init_kl_coef=0.0, reference=None)._kl_penalty
    assert penalty(LOGPROBS, LOGPROBS).isnan().all()


def test_the_checks_of_a_step_can_be_asked_for(trainer: PPOTrainer) -> None:
    batch = make_batch()
    columns = [score.reshape(1) for score in batch["scores"]]
    queries, responses, scores, masks = trainer._step_safety_checker(
        BATCH, batch["queries"], batch["responses"], columns
    )
    assert [q.tolist() for q in queries] == [q.tolist() for q in batch["queries"]]
    assert [r.tolist() for r in responses] == [r.tolist() for r in batch["responses"]]
    assert [s.shape for s in scores] == [()] * BATCH
    assert masks is None
    with pytest.raises(ValueError, match="queries has 3 elements, batch_size is 4"):
        trainer._step_safety_checker(BATCH, batch["queries"][1:], batch["responses"], columns)
    nested = [score.reshape(1, 1) for score in columns]
    with pytest.raises(ValueError, match=r"scores\[0\] must be one number"):
        trainer._step_safety_checker(BATCH, batch["queries"], batch["responses"], nested)


def test_a_batch_of_one_response_is_warned_of_where_it_is_whitened() -> None:
    with pytest.warns(UserWarning, match="batch_size=1: advantages are whitened") as warned:
        trainer = make_trainer(batch_size=1, mini_batch_size=1, ppo_epochs=1)
    assert len(warned) == 1
    batch = {name: x[:1] for name, x in make_batch().items()}
    for score in (-3.0, 3.0):
        advantages = trainer.step(**batch | {"scores": [torch.tensor(score)]})[
            "ppo/policy/advantages"
        ]
        assert abs(advantages.sum()) < 1e-4  # of some numbers around 1


def test_shared_layers_beside_a_reference_model_are_ignored_with_a_warning() -> None:
    policy, reference = make_policy(), perturbed(make_policy())
    expected = copy.deepcopy(reference)
    config = PPOConfig(batch_size=BATCH, mini_batch_size=2)
    # More layers than there are: they are not looked for.
    with pytest.warns(UserWarning, match=r"num_shared_layers=6 is ignored: ref_model") as warned:
        trainer = PPOTrainer(config, policy, reference, tiny.tokenizer(), num_shared_layers=6)
    assert [w.filename for w in warned] == [__file__]
    assert trainer.reference.mode == "copy"
    assert trainer.ref_model is reference
    assert all(p.requires_grad for p in policy.parameters())
    theirs = dict(expected.named_parameters())
    assert all(torch.equal(p.cpu(), theirs[name]) for name, p in reference.named_parameters())


def test_an_optimizer_that_keeps_gradients_keeps_them():
    """As scripts do that look at them after a step."""
    trainer = make_trainer()
    zero = trainer.optimizer.zero_grad
    trainer.optimizer.zero_grad = lambda: zero(set_to_none=False)
    trainer.step(**make_batch())
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    assert trained
    assert all(p.grad is not None for p in trained)


@pytest.mark.parametrize("side", ["left", "right"])
def test_eos_pads_where_a_tokenizer_has_no_pad_token(side: str) -> None:
    """GPT-2's own has none."""
    found = []
    for pad_token in (None, "<pad>"):
        tokenizer = tiny.tokenizer(side)
        tokenizer.pad_token = pad_token
        config = PPOConfig(batch_size=BATCH, padding_free=False)
        trainer = PPOTrainer(config, make_policy(), None, tokenizer)
        found.append(trainer.step(**make_batch()))
    for name in ("objective/logprobs", "ppo/loss/total", "ppo/val/vpred", "ppo/returns/mean"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-6), name


def test_the_reference_is_the_policy_in_optional_peft_ctx() -> None:
    from peft import LoraConfig

    plain, ids = make_policy(), make_batch()["queries"][0][None]
    lora = LoraConfig(target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    adapted = type(plain).from_pretrained(make_policy().pretrained_model, peft_config=lora)
    for policy, switched in ((adapted, True), (make_policy(), False)):
        trainer = make_trainer(policy)
        with torch.no_grad():
            before = trainer.model(ids)[0]
            with trainer.optional_peft_ctx():
                found = trainer.model(ids)[0]
            after, base = trainer.model(ids)[0], plain(ids)[0]
        assert torch.equal(after, before)
        torch.testing.assert_close(found, base if switched else before)
        assert torch.equal(found, before) is not switched
