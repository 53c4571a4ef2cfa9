"""Learning over the sets that tokens were drawn from, behind every surface that samples them."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor

from fastrl import (
    DistillationConfig,
    GenerateEngine,
    GRPOConfig,
    GRPOTrainer,
    PPOConfig,
    PPOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SamplingParams,
)
from fastrl.data.padding_free import PaddingFree
from fastrl.models import AutoModelForCausalLMWithValueHead
from fastrl.run.state import load_tree, save_tree
from fastrl.samples import Samples
from tests import tiny_models
from tests.golden import tiny
from tests.resuming import assert_resumes
from tests.trainers.conftest import ONE_STEP

CUT = {"top_p": 0.8, "top_k": 20}


def peaked() -> Any:
    """A model whose likeliest tokens have most of the probability."""
    model = tiny_models.language_model()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
    return model


def over_sets(
    model: Any, prompt: Tensor, samples: Samples, i: int, *, full: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of a response's tokens, over its sets or all tokens."""
    sequence = samples.sequences[i]
    ids = torch.cat([prompt, sequence])[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    if not full:
        assert samples.supports is not None
        logits = logits.masked_fill(~samples.supports[i].mask(), -torch.inf)
    logp = logits.log_softmax(-1)
    entropies = torch.special.entr(logp.exp()).sum(-1)
    return logp.gather(1, sequence[:, None])[:, 0], entropies


# PPO's step, and train().


def ppo(model: Any = None, **settings: Any) -> PPOTrainer:
    options = {"batch_size": 4, "mini_batch_size": 2, "ppo_epochs": 1, "learning_rate": 1e-3}
    config = PPOConfig(**{**options, "seed": 0, "policy_support": "sampled", **settings})
    torch.manual_seed(0)
    policy = AutoModelForCausalLMWithValueHead(peaked()) if model is None else model
    return PPOTrainer(config, policy.eval(), None, tiny.tokenizer())


def at(stats: dict[str, Any], name: str, i: int, prompt: Tensor, response: Tensor) -> Tensor:
    row = torch.as_tensor(stats[name][i])
    return row[len(prompt) - 1 : len(prompt) - 1 + len(response)]


PROMPTS = tiny_models.prompts(5, 3, 4, 6)
SCORES = [torch.tensor(float(i)) for i in range(4)]


@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
@pytest.mark.parametrize(
    ("settings", "adapts"),
    [
        ({"old_logprobs": "recompute"}, False),
        ({"old_logprobs": "rollout", "reference_support": "full"}, False),
        ({"micro_batch_tokens": 16, "padding_free": True, "entropy_coef": 0.1}, False),
        ({"padding_free": False, "mini_batch_size": 4}, True),
        ({"kl_penalty": "full", "reference_support": "full"}, False),
        ({"kl_penalty": "full"}, False),
        ({"temperature": 0.7}, False),
    ],
)
def test_ppo_scores_and_learns_over_the_sets_of_its_rollout(settings, adapts):
    model = None
    if adapts:
        lora = LoraConfig(
            r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True
        )
        model = AutoModelForCausalLMWithValueHead.from_pretrained(peaked(), peft_config=lora)
    trainer = ppo(model, **settings)
    rollout = trainer.rollouts.sample(PROMPTS, {"max_new_tokens": 6, **CUT})
    sizes = torch.cat([sets.sizes() for sets in rollout.supports])
    assert sizes.max() <= 20
    assert len(sizes.unique()) > 3
    before = copy.deepcopy(trainer.model.pretrained_model)
    stats = trainer.step(PROMPTS, rollout.sequences, SCORES, rollout=rollout)
    ratios = torch.as_tensor(stats["ppo/policy/ratio"])
    first = ratios[: max(1, len(ratios) // 4)]
    torch.testing.assert_close(first, torch.ones_like(first), rtol=0, atol=1e-5)
    if settings.get("old_logprobs") == "recompute":
        assert torch.equal(first, torch.ones_like(first))
    if "temperature" in settings:
        return
    with torch.no_grad():
        for i, (prompt, response) in enumerate(zip(PROMPTS, rollout.sequences, strict=True)):
            logprobs, entropies = over_sets(before, prompt, rollout, i)
            found = at(stats, "objective/logprobs", i, prompt, response)
            torch.testing.assert_close(found, logprobs, rtol=0, atol=1e-5)
            torch.testing.assert_close(rollout.logprobs[i], logprobs, rtol=0, atol=1e-5)
            torch.testing.assert_close(rollout.entropies[i], entropies, rtol=0, atol=1e-5)
            full = settings.get("reference_support") == "full"
            reference, _ = over_sets(before, prompt, rollout, i, full=full)
            found = at(stats, "objective/ref_logprobs", i, prompt, response)
            if "kl_penalty" not in settings:
                torch.testing.assert_close(found, reference, rtol=0, atol=1e-5)
            assert (logprobs > over_sets(before, prompt, rollout, i, full=True)[0]).any()


def test_ppo_knows_the_sets_of_what_it_generated_and_asks_for_others():
    trainer = ppo()
    responses = trainer.generate(
        PROMPTS, max_new_tokens=4, return_prompt=False, do_sample=True, **CUT
    )
    stats = trainer.step(PROMPTS, responses, SCORES)
    assert abs(torch.as_tensor(stats["ppo/policy/ratio"])[0] - 1) < 1e-5
    with pytest.raises(ValueError, match="not known what these responses were drawn from"):
        trainer.step(PROMPTS, responses, SCORES)


def test_a_set_of_one_token_is_not_learned():
    """Its log-prob is 0 whatever the weights are."""
    trainer = ppo(vf_coef=0.0, init_kl_coef=0.0, whiten_rewards=False)
    rollout = trainer.rollouts.sample(PROMPTS, {"max_new_tokens": 6, "top_k": 1})
    assert all((sets.sizes() == 1).all() for sets in rollout.supports)
    assert all((x == 0).all() for x in rollout.logprobs)
    before = copy.deepcopy(trainer.model.pretrained_model)
    trainer.step(PROMPTS, rollout.sequences, SCORES, rollout=rollout)
    for x, y in zip(trainer.model.pretrained_model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-8)


def test_what_leaves_out_nothing_changes_no_bit():
    found = []
    for support in ("full", "sampled"):
        trainer = ppo(policy_support=support)
        rollout = trainer.rollouts.sample(PROMPTS, {"max_new_tokens": 6}, seed=3)
        trainer.step(PROMPTS, rollout.sequences, SCORES, rollout=rollout)
        found.append(list(trainer.model.parameters()))
    assert all(map(torch.equal, *found))


# GRPO and RLOO.


def letters(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def group_trainer(
    folder: Path, made: Any = GRPOTrainer, config: Any = GRPOConfig, **settings: Any
) -> Any:
    names = ("rollout_func", "peft_config", "teacher_model")
    own = {name: settings.pop(name) for name in names if name in settings}
    options = {"num_generations": 4, "max_completion_length": 5, "logging_steps": 1, "max_steps": 2}
    options |= {"policy_support": "sampled", **CUT}
    args = config(output_dir=str(folder), **{**ONE_STEP, **options, **settings})
    data = Dataset.from_dict({"prompt": [f"w{3 + i} w4 w{5 + i}" for i in range(8)]})
    return made(peaked(), letters, args, data, processing_class=tiny.tokenizer(), **own)


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.1, "steps_per_generation": 1, "num_iterations": 2},
        {"beta": 0.1, "reference_support": "full", "padding_free": False},
        {"micro_batch_tokens": 12, "steps_per_generation": 1, "num_iterations": 2},
    ],
)
def test_grpo_learns_over_the_sets_of_its_rollouts(settings, tmp_path):
    trainer = group_trainer(tmp_path, **settings)
    begun = copy.deepcopy(trainer.model)
    trainer.train()
    packs = isinstance(trainer._scorer.padding(trainer.model), PaddingFree)
    assert packs == settings.get("padding_free", True)
    samples = trainer._generations.buffer[0]
    assert max(int(sets.sizes().max()) for sets in samples.supports) <= 20
    trainer.model.zero_grad()
    losses = []
    for each in trainer._passes(trainer.model, samples, "train"):
        loss = trainer.compute_loss(trainer.model, each)
        loss.backward()
        losses.append(loss.detach())
    found = {name: x.grad.clone() for name, x in trainer.model.named_parameters()}

    trainer.model.zero_grad()
    total = torch.zeros(())
    tokens = sum(map(len, samples.sequences))
    for i, prompt in enumerate(samples.prompt_ids):
        logprobs, _ = over_sets(trainer.model, prompt, samples, i)
        old = logprobs.detach() if samples.old_logprobs is None else samples.old_logprobs[i]
        ratio = (logprobs - old).exp()
        advantage = samples.advantages[i]
        each = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        if settings.get("beta"):
            full = settings.get("reference_support") == "full"
            with torch.no_grad():
                reference, _ = over_sets(begun, prompt, samples, i, full=full)
            torch.testing.assert_close(samples.ref_logprobs[i], reference, rtol=0, atol=1e-5)
            gap = reference - logprobs
            each = each + settings["beta"] * ratio * (gap.exp() - gap - 1)
        total = total + each.sum()
    (total / tokens).backward()
    torch.testing.assert_close(sum(losses), (total / tokens).detach(), rtol=1e-4, atol=1e-6)
    for name, x in trainer.model.named_parameters():
        torch.testing.assert_close(
            found[name], x.grad, rtol=1e-4, atol=1e-6, msg=lambda said, name=name: f"{name}: {said}"
        )


@pytest.mark.parametrize(("made", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_runs_are_resumed_bit_for_bit_also_between_a_generation_and_its_last_update(
    made, config, tmp_path
):
    settings = {
        "steps_per_generation": 2,
        "max_steps": 4,
        "save_steps": 1,
        "save_strategy": "steps",
    }

    def make(folder: Path) -> Any:
        return group_trainer(folder, made, config, **settings, beta=0.05)

    assert_resumes(make, tmp_path, (0, 1))


def test_sets_are_saved_with_the_samples(tmp_path):
    trainer = group_trainer(tmp_path, max_steps=1)
    trainer.train()
    samples = trainer._generations.buffer[0]
    save_tree(samples.state(), tmp_path / "state", trainer.processes)
    again = Samples.of_state(load_tree(tmp_path / "state"))
    for x, y in zip(again.supports, samples.supports, strict=True):
        assert x.vocabulary == y.vocabulary
        assert torch.equal(x.mask(), y.mask())


def test_a_plan_says_what_sets_take(tmp_path):
    """Words of 32 tokens, for each token of a generation, and of eight decode steps in slots."""
    trainer = group_trainer(tmp_path, rollout_slots=8)
    notes = " ".join(trainer.plan(6, 5).guesses)
    assert "at most 16 bytes of host memory for each token" in notes
    assert f"{16 * 8 * 8} on the device" in notes
    notes = " ".join(ppo(rollout_slots=8).plan(6, 5).guesses)
    assert f"{16 * 8 * 8} on the device" in notes


# Another engine.


class Drawn:
    """As vLLM's ``LLM.generate`` has it."""

    def __init__(self, token_ids: list[list[int]]):
        self.token_ids = token_ids


def flat(rows: list[list[int]]) -> dict[str, Any]:
    """As verifiers' traces have it."""
    return {"ids": [i for row in rows for i in row], "counts": list(map(len, rows))}


def elsewhere(prompts: list[Any], shape: Any, change: Any = None) -> dict[str, Any]:
    """What another engine drew: three tokens each, of sets of four, and one of a tool."""
    ids = [[5 + i, 9, 7, 12] for i in range(len(prompts))]
    sets = [[[x, 20, 3 + x % 2, 30][: 2 + k] for k, x in enumerate(row)] for row in ids]
    masks = [shape(rows[:3] + [[]]) for rows in sets]
    if change is not None:
        masks = change(masks)
    return {
        "prompt_ids": [[3, 4]] * len(prompts), "completion_ids": ids,
        "logprobs": [[-0.5] * 4] * len(prompts), "env_mask": [[1, 1, 1, 0]] * len(prompts),
        "sampling_mask": masks,
    }  # fmt: skip


@pytest.mark.parametrize("shape", [list, Drawn, flat])
def test_sets_of_another_engine_are_learned_over(shape, tmp_path):
    trainer = group_trainer(
        tmp_path, rollout_func=lambda prompts, trainer: elsewhere(prompts, shape), beta=0.1,
        max_steps=1, steps_per_generation=1, num_iterations=2,
    )  # fmt: skip
    begun = copy.deepcopy(trainer.model)
    trainer.train()
    samples = trainer._generations.buffer[0]
    with torch.no_grad():
        for i, prompt in enumerate(samples.prompt_ids):
            assert samples.supports[i].sizes().tolist() == [2, 3, 4, tiny.VOCABULARY]
            expected, _ = over_sets(begun, prompt, samples, i)
            mask = samples.learned[i]
            for name in ("old_logprobs", "ref_logprobs"):
                found = getattr(samples, name)[i][mask]
                torch.testing.assert_close(found, expected[mask], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda masks: masks[:-1], "has 3 entries for 4 completion_ids"),
        (lambda masks: [x[:-1] for x in masks], r"\[0\] has sets of 3 tokens for .* of 4"),
        (lambda masks: [[[1, 2], *x[1:]] for x in masks], r"\[0\]\[0\] does not have the token 5"),
        (lambda masks: [[*x[:1], [9, 99], *x[2:]] for x in masks], "was it made with another"),
        (lambda masks: [7] * len(masks), r"\[0\] is 7: return a list of token ids"),
    ],
)
def test_sets_that_do_not_fit_are_named(change, said, tmp_path):
    trainer = group_trainer(
        tmp_path, rollout_func=lambda prompts, trainer: elsewhere(prompts, list, change)
    )
    with pytest.raises(ValueError, match=said):
        trainer.train()


def test_sets_are_asked_for(tmp_path):
    def without(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return {k: x for k, x in elsewhere(prompts, list).items() if k != "sampling_mask"}

    with pytest.raises(ValueError, match=r"must return keys \['sampling_mask'\]"):
        group_trainer(tmp_path, rollout_func=without).train()


# What it does not go with.


class OwnLoss(GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        return super()._compute_loss(model, inputs)


def test_what_is_not_known_is_refused(tmp_path):
    with pytest.raises(ValueError, match="rollout_backend='engine'"):
        group_trainer(tmp_path, rollout_backend="generate")
    with pytest.raises(ValueError, match=r"repetition_penalty=1\.2 changes"):
        group_trainer(tmp_path, repetition_penalty=1.2)
    with pytest.raises(ValueError, match="not known to own_loss"):
        group_trainer(tmp_path, OwnLoss)
    with pytest.raises(ValueError, match="not supported by DistillationConfig"):
        DistillationConfig(output_dir=str(tmp_path), policy_support="sampled", **ONE_STEP)
    with pytest.raises(ValueError, match="not known to teachers"):
        group_trainer(tmp_path, teacher_model=tiny_models.language_model(), teacher_kl_coef=0.1)
    with pytest.raises(ValueError, match=r"typical_p=0\.5 changes .* by more than leaving"):
        ppo().train(
            letters, prompts=["w3 w4"] * 4, steps=1,
            generation_kwargs={"max_new_tokens": 3, "typical_p": 0.5},
        )  # fmt: skip
    rollout = ppo().rollouts.sample(PROMPTS, {"max_new_tokens": 6, **CUT})
    with pytest.raises(ValueError, match="log-probs are over the sets that tokens were drawn from"):
        ppo(policy_support="full").step(PROMPTS, rollout.sequences, SCORES, rollout=rollout)
    wrong = replace(rollout, supports=[rollout.supports[0]] * 4)
    with pytest.raises(ValueError, match=r"rollout.supports\[1\] has"):
        ppo().step(PROMPTS, rollout.sequences, SCORES, rollout=wrong)
    params = SamplingParams(policy_support="sampled")
    with pytest.raises(ValueError, match="policy_support='sampled' needs a RolloutEngine"):
        GenerateEngine(peaked(), tiny.tokenizer()).generate(PROMPTS, params)
    with pytest.raises(ValueError, match="unknown policy_support 'some': choose one of full"):
        PPOConfig(policy_support="some")


def test_cut_sampling_over_the_whole_vocabulary_is_told(tmp_path):
    with pytest.warns(UserWarning, match=r"top_k=20, top_p=0.8 changes .*policy_support='sampled'"):
        group_trainer(tmp_path, policy_support="full")


def test_settings_of_what_is_not_asked_for_are_named(tmp_path):
    unread = r"reference_support='full' \(policy_support is not 'sampled'\)"
    kind = r"teacher_model_kind='live' \(teacher_kl_coef is 0\), "
    with pytest.warns(UserWarning, match=f"nothing reads: {kind}{unread}"):
        GRPOConfig(str(tmp_path), teacher_model_kind="live", reference_support="full")
    with pytest.warns(UserWarning, match=r"nothing reads: reference_support='full' .policy_suppo"):
        PPOConfig(reference_support="full")
