"""Where TRL 0.11.4 was wrong: a test for each line of the list in docs/trl_classic.md."""

import collections
import math
import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from fastrl import PPOTrainer, create_reference_model
from fastrl.learn.gradient import GradientStep
from tests.golden import tiny
from tests.ppo.conftest import (
    BATCH,
    assert_learned_alike,
    make_batch,
    make_policy,
    make_trainer,
    parameters,
    perturbed,
)

pytestmark = pytest.mark.filterwarnings("ignore:the KL estimate is negative")


def changes(trainer: PPOTrainer, before: dict[str, Tensor]) -> float:
    return max(float((v - before[k]).abs().max()) for k, v in parameters(trainer).items())


def test_max_grad_norm_acts_on_every_optimizer_step(monkeypatch: Any) -> None:
    trainer = make_trainer(max_grad_norm=1e-3, ppo_epochs=3)
    norms = []
    take_step = torch.optim.Adam.step

    def spy(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        grads = [p.grad for g in optimizer.param_groups for p in g["params"]]
        norms.append(float(torch.stack([g.norm() for g in grads if g is not None]).norm()))
        return take_step(optimizer, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", spy)
    trainer.step(**make_batch())
    assert len(norms) == 3 * BATCH // 2
    assert max(norms) <= 1.001e-3
    norms.clear()
    make_trainer(ppo_epochs=1).step(**make_batch())
    assert min(norms) > 1e-3  # unclipped norms are far larger: the bound above means something


def test_score_scaling_and_normalisation_work() -> None:
    batch = make_batch()
    scores = torch.stack(batch["scores"])
    scaled = make_trainer(use_score_scaling=True).step(**batch)
    assert scaled["ppo/mean_scores"] == pytest.approx(float(scores.mean() / scores.std()), rel=1e-5)
    trainer = make_trainer(use_score_scaling=True, use_score_norm=True)
    assert trainer.step(**batch)["ppo/std_scores"] == pytest.approx(1, rel=1e-4)
    trainer.step(**make_batch(seed=1))
    assert trainer.running.count == pytest.approx(2 * BATCH)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("score", [0.1, -3e4])
def test_scores_without_a_deviation_are_not_divided_by_it(score: float, norm: bool) -> None:
    """TRL's formula divides them by 1.2e-7, whatever rounding leaves of the deviation."""
    trainer = make_trainer(use_score_scaling=True, use_score_norm=norm)
    batch = make_batch() | {"scores": [torch.tensor(score)] * BATCH}
    for _ in range(2):
        found = trainer.step(**batch)["ppo/mean_scores"]
        assert found == pytest.approx(0.0 if norm else score, rel=1e-6, abs=1e-6)
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0])
    later = trainer.step(**make_batch(seed=1) | {"scores": list(scores)})["ppo/mean_scores"]
    every = torch.cat([torch.full((2 * BATCH,), score), scores]).double()
    centre = float(every.mean()) if norm else 0.0
    assert later == pytest.approx((2.5 - centre) / float(every.std()), rel=1e-5)


def test_the_reference_answers_for_a_peft_policy() -> None:
    policy = make_policy()
    base = policy.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False)
    lora = LoraConfig(
        target_modules=["c_attn", "c_fc"], r=4, init_lora_weights=False, fan_in_fan_out=True
    )
    torch.manual_seed(0)
    adapted = type(policy).from_pretrained(policy.pretrained_model, peft_config=lora)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(20)
    trainer = make_trainer(adapted)
    response, ref_response = trainer.generate(
        torch.tensor([5, 6, 7]), generate_ref_response=True, max_new_tokens=8
    )
    assert torch.equal(ref_response[0].cpu(), base[0][: len(ref_response[0])])
    assert not torch.equal(response[0], ref_response[0])


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_padding_never_changes_a_logprob(architecture: str) -> None:
    batch = make_batch()
    scored = {}
    for side in ("right", "left"):
        trainer = make_trainer(make_policy(architecture), padding_side=side)
        inputs = trainer.prepare_model_inputs(batch["queries"], batch["responses"])
        assert (inputs["attention_mask"][:, 0 if side == "left" else -1] == 0).any()
        logprobs, _, values, mask = trainer.batched_forward_pass(
            trainer.model, batch["queries"], batch["responses"], inputs
        )
        scored[side] = logprobs[mask], values[mask]
        alone = []
        for query, response in zip(batch["queries"], batch["responses"], strict=True):
            with torch.no_grad():
                ids = torch.cat([query, response])[None].to(trainer.current_device)
                logits = trainer.model.pretrained_model(ids).logits.cpu()
            logp = logits[0].log_softmax(-1)[len(query) - 1 : -1]
            alone.append(logp.gather(1, response[:, None])[:, 0])
        torch.testing.assert_close(logprobs[mask].cpu(), torch.cat(alone), rtol=1e-5, atol=1e-5)
    for right, left in zip(*scored.values(), strict=True):
        torch.testing.assert_close(right, left, rtol=1e-5, atol=1e-5)


def test_an_eos_inside_the_prompt_does_not_cut_the_response() -> None:
    trainer = make_trainer()
    query = torch.tensor([5, tiny.EOS, 6])
    (response,) = trainer.generate([query], max_new_tokens=4, eos_token_id=tiny.EOS)
    assert torch.equal(response[:3].cpu(), query)
    assert len(response) > 3


@pytest.mark.filterwarnings("ignore:batch_size=1. advantages are whitened")
def test_a_single_sample_with_a_single_token_stays_finite() -> None:
    trainer = make_trainer(batch_size=1, mini_batch_size=1)
    stats = trainer.step([torch.tensor([5])], [torch.tensor([6])], [torch.tensor(1.0)])
    assert all(v.isfinite().all() for v in parameters(trainer).values())
    assert all(math.isfinite(v) for v in stats.values() if isinstance(v, float))
    assert stats["ppo/policy/advantages_mean"] == 0


def test_whitened_rewards_do_not_depend_on_padding() -> None:
    """A longer neighbour adds padding to the other rows, and must add nothing else to them."""
    batch = make_batch()
    trainer = make_trainer(reference=perturbed(make_policy()), whiten_rewards=True)
    narrow = _advantages(trainer, batch, width=0)
    wide = _advantages(trainer, batch, width=5)
    torch.testing.assert_close(narrow, wide, rtol=1e-6, atol=1e-6)


def _advantages(trainer: PPOTrainer, batch: dict[str, Any], width: int) -> Tensor:
    inputs = trainer.prepare_model_inputs(batch["queries"], batch["responses"])
    padding = torch.zeros(BATCH, width, dtype=torch.long, device=trainer.current_device)
    inputs = {k: torch.cat([v, padding], -1) for k, v in inputs.items()}
    logprobs, _, values, mask = trainer.batched_forward_pass(
        trainer.model, batch["queries"], batch["responses"], inputs
    )
    scores = torch.stack(batch["scores"])
    rewards, _, _ = trainer.compute_rewards(scores, logprobs, logprobs - 0.1, mask)
    return trainer.compute_advantages(values, rewards, mask)[1][mask]


def test_holes_in_response_masks_are_skipped_by_the_advantages() -> None:
    trainer = make_trainer()
    mask = torch.tensor([[True, True, False, True]])
    values = torch.tensor([[0.1, 0.2, 9.0, 0.4]])
    rewards = torch.tensor([[0.0, 0.0, 7.0, 1.0]])
    _, advantages, returns = trainer.compute_advantages(values, rewards, mask)
    _, dense_advantages, dense_returns = trainer.compute_advantages(
        values[:, [0, 1, 3]], rewards[:, [0, 1, 3]], mask[:, [0, 1, 3]]
    )
    torch.testing.assert_close(advantages[mask], dense_advantages[0])
    torch.testing.assert_close(returns[mask], dense_returns[0])
    assert not advantages[~mask].any()


def test_masked_tokens_get_no_loss() -> None:
    batch = make_batch()
    masks = [torch.ones(len(r), dtype=torch.long) for r in batch["responses"]]
    masks[1][1] = 0
    stats = make_trainer().step(**batch, response_masks=masks)
    tokens = sum(int(m.sum()) for m in masks)
    assert len(stats["ppo/policy/ratio"]) == 4 * tokens  # once per epoch
    full = make_trainer().step(**batch)
    assert stats["ppo/loss/value"] != full["ppo/loss/value"]


def test_sampling_is_without_dropout_after_a_step() -> None:
    policy = make_policy()
    for module in policy.pretrained_model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    policy.train()
    trainer = make_trainer(policy)
    trainer.step(**make_batch())
    assert trainer.model.training  # the user's mode is put back
    query = torch.tensor([5, 6, 7])
    first, second = (trainer.generate(query, max_new_tokens=12) for _ in range(2))
    assert torch.equal(first, second)


def test_a_mini_batch_with_a_large_ratio_takes_no_step() -> None:
    trainer = make_trainer(ratio_threshold=1e-9)
    before = parameters(trainer)
    with pytest.warns(UserWarning, match="ratio_threshold"):
        stats = trainer.step(**make_batch())
    assert changes(trainer, before) == 0
    assert not trainer.optimizer.optimizer.state  # Adam's moments have not moved either
    assert stats["ppo/skipped_minibatches"] == 4 * BATCH // 2
    assert stats["ppo/optimizer_steps"] == 0
    assert math.isfinite(stats["ppo/loss/total"])


def test_early_stopping_acts_before_the_offending_update(monkeypatch: Any) -> None:
    settings = {"learning_rate": 0.05, "mini_batch_size": BATCH, "ppo_epochs": 8}
    batch = make_batch()
    free = make_trainer(**settings)
    free_stats = free.step(**batch)
    assert free_stats["ppo/early_stopped"] == 0
    assert free_stats["ppo/optimizer_steps"] == 8

    # The policy KL of the first update is 0 (nothing moved yet), that of a later one is not.
    stopped = make_trainer(early_stopping=True, target_kl=1e-3, **settings)
    outcomes = []
    call = GradientStep.__call__
    monkeypatch.setattr(GradientStep, "__call__", lambda *a: outcomes.append(r := call(*a)) or r)
    stats = stopped.step(**batch)
    taken = int(stats["ppo/optimizer_steps"])
    assert stats["ppo/early_stopped"] == 1
    assert taken < 8
    assert len(outcomes) == taken + 1  # the last one was looked at and not applied
    kls = [float(outcome.minibatches[0].stats["ppo/policy/policykl"]) for outcome in outcomes]
    assert kls[-1] > 1.5e-3
    assert all(kl <= 1.5e-3 for kl in kls[:-1])
    same = make_trainer(**{**settings, "ppo_epochs": taken})
    same.step(**batch)
    assert_learned_alike(parameters(stopped), parameters(same), tolerance=1e-4)  # a step is 0.05


@pytest.mark.filterwarnings("ignore:batch_size=1. advantages are whitened")
def test_integer_scores_are_accepted_and_one_score_has_no_deviation() -> None:
    batch = make_batch()
    batch["scores"] = [torch.tensor(i) for i in range(BATCH)]
    assert make_trainer().step(**batch)["ppo/mean_scores"] == pytest.approx(1.5)
    single = make_trainer(batch_size=1, mini_batch_size=1).step(
        **{k: v[:1] for k, v in make_batch().items()}
    )
    assert single["ppo/std_scores"] == 0.0


def test_full_kl_equals_its_definition_and_keeps_no_vocabulary_tensor() -> None:
    reference = perturbed(make_policy())
    trainer = make_trainer(reference=reference, kl_penalty="full")
    batch = make_batch()
    logits = []
    for model in (trainer.model, trainer.ref_model):
        inputs = trainer.prepare_model_inputs(batch["queries"], batch["responses"])
        found = trainer.batched_forward_pass(
            model, batch["queries"], batch["responses"], inputs, return_logits=True
        )
        logits.append(found[1].double().log_softmax(-1))
    mask = found[3]
    expected = (logits[0].exp() * (logits[0] - logits[1])).sum(-1)[mask].sum() / BATCH
    stats = trainer.step(**batch)
    assert stats["objective/kl"] == pytest.approx(float(expected), rel=1e-5)


def test_a_response_that_begins_with_its_query_warns_once() -> None:
    trainer = make_trainer()
    batch = make_batch()
    batch["responses"] = [
        torch.cat(pair) for pair in zip(batch["queries"], batch["responses"], strict=True)
    ]
    with pytest.warns(UserWarning, match=r"responses\[\d\] begins with its query"):
        trainer.step(**batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="the KL estimate")
        trainer.step(**batch)


def test_the_lm_head_sees_response_tokens_only(monkeypatch: Any) -> None:
    import fastrl_kernels

    trainer = make_trainer(ppo_epochs=1)
    rows: dict[str, int] = {}
    for name in ("linear_logprobs", "linear_ppo_loss"):
        op = getattr(fastrl_kernels, name)

        def counting(hidden: Any, *args: Any, name: str = name, op: Any = op, **kwargs: Any) -> Any:
            rows[name] = rows.get(name, 0) + len(hidden)
            return op(hidden, *args, **kwargs)

        monkeypatch.setattr(fastrl_kernels, name, counting)
    logits = []
    trainer.model.get_output_embeddings().register_forward_hook(
        lambda _module, _args, out: logits.append(out.numel())
    )
    batch = make_batch(seed=1)
    trainer.step(**batch)
    tokens = sum(len(r) for r in batch["responses"])
    # Old policy and reference; the update.
    assert rows == {"linear_logprobs": 2 * tokens, "linear_ppo_loss": tokens}
    assert sum(logits) == 0, "no logits are kept"


def test_an_unusual_head_is_told_at_construction_and_gives_the_same_step() -> None:
    usual, unusual = make_policy(), make_policy()
    unusual.get_output_embeddings().register_forward_hook(lambda _module, _args, out: out.clone())
    expected = make_trainer(usual)
    with pytest.warns(UserWarning, match="GPT2LMHeadModel: logits of the response tokens") as seen:
        trainer = make_trainer(unusual)
    assert len(seen) == 2  # the policy's and the reference's
    batch = make_batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stats, wanted = trainer.step(**batch), expected.step(**batch)
    for name in ("ppo/loss/total", "ppo/policy/entropy", "ppo/policy/policykl"):
        # fp32 figures of two orders of summation.
        assert stats[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6)
    assert_learned_alike(parameters(trainer), parameters(expected), tolerance=2e-5)


def test_statistics_leave_the_device_once(monkeypatch: Any) -> None:
    from fastrl.trainers.ppo import stats

    calls = []
    fetch = stats.fetch
    monkeypatch.setattr(stats, "fetch", lambda tensors: calls.append(1) or fetch(tensors))
    found = make_trainer().step(**make_batch())
    assert len(calls) == 1
    classic = {
        *(f"objective/{k}" for k in ("kl", "kl_dist", "logprobs", "ref_logprobs", "kl_coef")),
        *("objective/entropy", "ppo/mean_non_score_reward", "ppo/mean_scores", "ppo/std_scores"),
        *("ppo/learning_rate", "ppo/loss/policy", "ppo/loss/value", "ppo/loss/total"),
        *(f"ppo/policy/{k}" for k in ("entropy", "approxkl", "policykl", "clipfrac", "ratio")),
        *("ppo/policy/advantages", "ppo/policy/advantages_mean", "ppo/returns/mean"),
        *("ppo/returns/var", "ppo/val/vpred", "ppo/val/error", "ppo/val/clipfrac"),
        *("ppo/val/mean", "ppo/val/var", "ppo/val/var_explained"),
        *(
            f"tokens/{w}_{k}"
            for w in ("queries", "responses")
            for k in ("len_mean", "len_std", "dist")
        ),
        *(f"time/ppo/{k}" for k in ("forward_pass", "compute_rewards", "compute_advantages")),
        *(f"time/ppo/{k}" for k in ("optimize_step", "calc_stats", "total")),
    }
    assert len(classic) == 40
    assert classic <= found.keys()


def test_bf16_autocast_is_finite_and_close() -> None:
    from accelerate.state import AcceleratorState

    batch = make_batch()
    plain = make_trainer().step(**batch)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        trainer = make_trainer(accelerator_kwargs={"mixed_precision": "bf16"})
        stats = trainer.step(**batch)
        assert trainer.model.v_head.summary.weight.dtype == torch.float32
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert stats["objective/logprobs"].dtype == plain["objective/logprobs"].dtype
    assert stats["ppo/policy/entropy"] == pytest.approx(plain["ppo/policy/entropy"], rel=2e-2)
    assert stats["ppo/policy/entropy"] != plain["ppo/policy/entropy"]  # it did run in bf16
    assert stats["ppo/loss/value"] == pytest.approx(plain["ppo/loss/value"], rel=5e-2)


def test_loss_and_train_minibatch_agree_with_step() -> None:
    batch = make_batch()
    settings = {"mini_batch_size": BATCH, "ppo_epochs": 1}
    by_step = make_trainer(reference=perturbed(make_policy()), **settings)
    stats = by_step.step(**batch)

    trainer = make_trainer(reference=perturbed(make_policy()), **settings)
    inputs = trainer.prepare_model_inputs(batch["queries"], batch["responses"])
    arguments = (batch["queries"], batch["responses"], inputs)
    old, _, values, mask = trainer.batched_forward_pass(trainer.model, *arguments)
    ref, _, _, _ = trainer.batched_forward_pass(trainer.ref_model, *arguments)
    rewards, _, _ = trainer.compute_rewards(torch.stack(batch["scores"]), old, ref, mask)
    values, advantages, returns = trainer.compute_advantages(values, rewards, mask)
    trainer.model.eval()
    logits, _, vpreds = trainer.model(
        **{k: v for k, v in inputs.items() if k == "input_ids" or k == "attention_mask"}
    )
    logp = logits[:, :-1].log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
    found = trainer.train_minibatch(
        old, values, logp, logits[:, :-1], vpreds[:, :-1], mask, advantages, returns
    )
    assert float(found["loss/total"]) == pytest.approx(stats["ppo/loss/total"], rel=1e-4, abs=1e-6)
    for name, value in parameters(by_step).items():
        if "c_attn.bias" not in name:  # a key bias has no gradient but rounding
            torch.testing.assert_close(parameters(trainer)[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:the LM head shares its weight with the embeddings")
def test_shared_layers_share_memory_and_compute() -> None:
    policy = make_policy()
    trainer = make_trainer(policy, create_reference_model(policy, num_shared_layers=1))
    blocks = [m.pretrained_model.transformer.h for m in (trainer.model, trainer.ref_model)]
    places = [{p.data_ptr() for p in block[0].parameters()} for block in blocks]
    assert places[0] == places[1]
    ran = []
    for name, block in zip(("policy", "reference"), blocks, strict=True):
        for i, layer in enumerate(block):
            layer.register_forward_pre_hook(
                lambda _m, args, who=(name, i): ran.extend([who] * args[0].shape[:2].numel())
            )
    batch = make_batch()
    trainer.step(**batch)
    epochs = trainer.config.ppo_epochs
    tokens = sum(map(len, batch["queries"] + batch["responses"]))
    assert collections.Counter(ran) == {
        ("policy", 0): tokens,
        ("policy", 1): tokens * (1 + epochs),
        ("reference", 1): tokens,
    }


def test_gradient_checkpointing_saves_activations_and_leaves_dropout_off() -> None:
    saved, learned = [], []
    for on in (False, True):
        policy = make_policy()
        for module in policy.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.5
        trainer = make_trainer(policy, gradient_checkpointing=on)
        count = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, count=count: (count.append(x.numel()), x)[1], lambda x: x
        ):
            trainer.step(**make_batch())
        saved.append(sum(count))
        learned.append(parameters(trainer))
    assert saved[1] < 0.8 * saved[0]
    assert_learned_alike(learned[1], learned[0])
