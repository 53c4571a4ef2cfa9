"""Teachers beside rewards in PPOTrainer: their term in the loss and their part of rewards against
formulas in float64, resumed runs, replays, the ledger, plans, and what is refused."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from torch import Tensor

from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from fastrl.models import CausalLMPolicy
from fastrl.run.checkpoints import BadCheckpoint
from fastrl.run.ledger import read_ledger
from fastrl.trainers.ppo.method import old_logprobs_of
from fastrl.trainers.ppo.replay import replay
from fastrl.trainers.ppo.teaching import checked_teachers
from fastrl_kernels import reference
from tests import seq2seq_models, tiny_models
from tests.bits import bits, differing
from tests.golden import tiny
from tests.ppo.conftest import assert_learned_alike, make_batch, make_policy, parameters, perturbed
from tests.taught import LORA, another, exact, log_probs, swapped

RATE = 0.1
pytestmark = [
    pytest.mark.filterwarnings("ignore:the KL estimate is negative"),
    pytest.mark.filterwarnings("ignore:the LM head shares its weight with the embeddings"),
    pytest.mark.filterwarnings(tiny_models.PEFT_WARNING),
]


def make(teacher: Any = None, policy: Any = None, **settings: Any) -> PPOTrainer:
    """Its weights move by ``RATE`` times their gradients."""
    given = {"batch_size": 4, "mini_batch_size": 4, "ppo_epochs": 1, **settings}
    policy = policy or make_policy()
    weights = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=RATE)
    reference_model = None if policy.is_peft_model else perturbed(make_policy())
    if not PPOConfig(**given).init_kl_coef or "num_shared_layers" in given:
        reference_model = None
    return PPOTrainer(
        PPOConfig(**given), policy, reference_model, tiny.tokenizer(), optimizer=optimizer,
        teacher_model=teacher,
    )  # fmt: skip


def divergences(
    policy: Any, teacher: Any, batch: dict[str, Any], beta: float, temperature: float = 1.0
) -> list[Tensor]:
    """Of each token that counts of each response, in float64."""
    found = []
    for i, response in enumerate(batch["responses"]):
        behind = batch.get("teacher_queries", batch["queries"])[i]
        logp = log_probs(policy, batch["queries"][i], response, temperature)
        with torch.no_grad():
            logq = log_probs(teacher, behind, response, temperature)
        of_tokens = reference.divergence(logp, logq, beta)
        masks = batch.get("response_masks")
        found.append(of_tokens if masks is None else of_tokens[masks[i].bool()])
    return found


def hinted(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        **batch,
        "teacher_queries": [torch.cat([torch.tensor([9, 7]), q]) for q in batch["queries"]],
    }


def grouped() -> dict[str, Any]:
    batch = make_batch()
    batch["queries"] = [batch["queries"][i // 2 * 2] for i in range(4)]
    return hinted(batch)


def masked() -> dict[str, Any]:
    batch = make_batch()
    batch["response_masks"] = [torch.ones_like(r) for r in batch["responses"]]
    batch["response_masks"][1][1] = 0
    return batch


def weighed() -> dict[str, Any]:
    return {**hinted(make_batch()), "weights": [2.0, 1.0, 0.0, 1.0]}


GROUPS = {"advantage": "grpo", "group_size": 2, "kl_in": "loss", "init_kl_coef": 0.1}


@pytest.mark.parametrize(("batch", "settings"), [
    (make_batch, {}),
    (lambda: hinted(make_batch()), {"temperature": 0.7}),
    (masked, {"padding_free": False, "teacher_beta": 0.3}),
    (weighed, {"teacher_beta": 0.0}),
    (grouped, {**GROUPS, "loss_aggregate": "seq-mean-token-mean"}),
    (lambda: hinted(make_batch()), {"mini_batch_size": 2, "gradient_accumulation_steps": 2}),
    (lambda: hinted(make_batch()), {"micro_batch_tokens": 24}),
    (lambda: hinted(make_batch()), {"critic": True, "entropy_coef": 0.1}),
    (make_batch, {"num_shared_layers": 1}),
])  # fmt: skip
def test_a_teacher_in_the_loss_adds_its_term(
    batch: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    """To a step without it, the gradient of coef·Σ v·D / denominator: its own mini-batch's, or of
    sums over samples."""
    teacher, coef, given, moved = another(), 0.25, dict(settings), []
    if given.pop("critic", False):
        given["critic"] = str(tmp_path)
        seq = tiny_models.language_model()
        seq.save_pretrained(tmp_path)
    batch = batch()
    apart = {"teacher_queries": batch.get("teacher_queries")}
    for taught in (False, True):
        beside = {"teacher_kl_coef": coef} if taught else {}
        own = {k: v for k, v in given.items() if taught or not k.startswith("teacher_")}
        trainer = make(teacher if taught else None, **own, **beside)
        start = exact(trainer.model)
        begun = dict(trainer.model.pretrained_model.named_parameters())
        begun = {name: p.detach().clone().double() for name, p in begun.items()}
        known = {k: v for k, v in batch.items() if k != "teacher_queries"}
        stats = trainer.step(**known, **(apart if taught else {}))
        after = dict(trainer.model.pretrained_model.named_parameters())
        moved.append({n: (x - after[n].detach().double()) / RATE for n, x in begun.items()})
    beta, temperature = given.get("teacher_beta", 1.0), given.get("temperature", 1.0)
    values = divergences(start, exact(teacher), batch, beta, temperature)
    weights = batch.get("weights", [1.0] * 4)
    if "loss_aggregate" in given:
        term = sum(x.mean() for x in values) / 4
    elif "gradient_accumulation_steps" in given:  # each mini-batch's own mean, in the drawn order
        order = trainer.update.epochs.shuffle.__class__(0).permutation(4).tolist()
        halves = [torch.cat([values[i] for i in part]).mean() for part in (order[:2], order[2:])]
        term = sum(halves) / 2
    else:
        count = sum(w * len(x) for w, x in zip(weights, values, strict=True))
        term = sum(w * x.sum() for w, x in zip(weights, values, strict=True)) / count
    (coef * term).backward()
    assert term.item() > 1e-2
    for name, weight in start.named_parameters():
        if weight.grad is not None:
            found = moved[1][name] - moved[0][name]
            torch.testing.assert_close(found, weight.grad, rtol=2e-3, atol=5e-6, msg=name)
    assert stats["ppo/loss/teacher"] == pytest.approx(term.item(), rel=1e-4)
    if "gradient_accumulation_steps" not in given:
        of_tokens = torch.cat(values).mean().item()
        assert stats["ppo/policy/divergence"] == pytest.approx(of_tokens, rel=1e-4)


@pytest.mark.parametrize(("batch", "settings"), [
    (make_batch, {}),
    (lambda: hinted(make_batch()), {"temperature": 0.7, "whiten_rewards": True}),
    (masked, {"advantage": "reinforce++", "gamma": 0.9, "padding_free": False}),
    (grouped, {**GROUPS, "kl_in": "reward", "advantage": "dr_grpo"}),
])  # fmt: skip
def test_a_teacher_in_the_reward_is_a_reward_of_tokens(batch: Any, settings: dict) -> None:
    """-coef·(log π - log π_teacher): the same step as with scores to which it was added by hand."""
    teacher, coef, batch = another(), 0.5, batch()
    temperature = settings.get("temperature", 1.0)
    settings = {"mini_batch_size": 2, "ppo_epochs": 2, **settings}
    taught = make(teacher, teacher_kl_coef=coef, teacher_kl_in="reward", **settings)
    policy, scores, sums = exact(taught.model), [], []
    for i, response in enumerate(batch["responses"]):
        behind = batch.get("teacher_queries", batch["queries"])[i]
        with torch.no_grad():
            logp = log_probs(policy, batch["queries"][i], response, temperature)
            logq = log_probs(exact(teacher), behind, response, temperature)
        apart = (logp - logq).gather(1, response[:, None])[:, 0]
        mask = batch["response_masks"][i] if "response_masks" in batch else torch.ones(len(apart))
        of_tokens = (-coef * apart * mask).float()
        of_tokens[int(mask.nonzero()[-1])] += batch["scores"][i]
        scores.append(of_tokens)
        sums.append(float((apart * mask).sum()))
    stats = taught.step(**batch)
    by_hand = make(**settings)
    by_hand.step(**{k: v for k, v in batch.items() if k != "teacher_queries"} | {"scores": scores})
    assert_learned_alike(parameters(taught), parameters(by_hand), 2e-5)
    assert stats["objective/teacher_kl"] == pytest.approx(sum(sums) / 4, rel=1e-4)
    other = make(**settings)
    other.step(**{k: v for k, v in batch.items() if k != "teacher_queries"})
    far = [(x - parameters(other)[name]).abs().max() for name, x in parameters(taught).items()]
    assert max(far) > 1e-3


def test_roundings_of_a_rollout_are_not_learned_as_a_difference_from_a_teacher() -> None:
    settings = {"advantage": "grpo", "group_size": 2, "batch_size": 4, "init_kl_coef": 0.0}
    asked = {"needs_logits": False, "recomputes": False}
    in_reward = PPOConfig(**settings, teacher_kl_coef=0.5, teacher_kl_in="reward")
    assert old_logprobs_of(in_reward, **asked) == "recompute"
    assert old_logprobs_of(PPOConfig(**settings, teacher_kl_coef=0.5), **asked) == "auto"


def test_without_a_teacher_there_is_nothing_of_it() -> None:
    trainer = make()
    stats = trainer.step(**make_batch())
    assert not [name for name in stats if "teacher" in name or "divergence" in name]
    assert not {"teacher", "teachers"} & {*trainer.state_dict(), *trainer.state_dict()["identity"]}
    assert trainer.experience.teacher_tokens is None


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_a_policy_does_not_learn_of_teachers_while_its_critic_warms_up(place: str) -> None:
    settings = {"critic_warmup_steps": 1, "teacher_kl_coef": 0.5, "teacher_kl_in": place}
    trainer = make(another(), **settings)
    before = parameters(trainer)
    stats = trainer.step(**make_batch())
    value_loss = trainer.config.vf_coef * stats["ppo/loss/value"]
    assert stats["ppo/loss/total"] == pytest.approx(value_loss, rel=1e-5)
    moved = {name for name, x in parameters(trainer).items() if not torch.equal(x, before[name])}
    assert moved
    assert all("v_head" in name for name in moved)


def test_several_teachers_by_their_names() -> None:
    batch, coef = hinted(make_batch()), 0.5
    teachers = {"a": another(1), "b": another(2)}
    trainer = make(teachers, teacher_kl_coef=coef, teacher_column="of")
    start = exact(trainer.model)
    names = ["a", "b", "b", "a"]
    stats = trainer.step(**batch, teachers=names)
    of_each = [divergences(start, exact(teachers[x]), batch, 1.0)[i] for i, x in enumerate(names)]
    expected = torch.cat(of_each).mean().item()
    assert stats["ppo/policy/divergence"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", ["base", "live", "ema"])
def test_the_policys_own_weights_as_teacher(kind: str) -> None:
    """Behind a hint; in the second step they have moved, or not."""
    settings = {"teacher_model_kind": kind, "teacher_update_rate": 0.25, "teacher_kl_coef": 0.5}
    trainer, batch = make(**settings), hinted(make_batch())
    begin = exact(trainer.model)
    trainer.step(**batch)
    policy = exact(trainer.model)
    teacher = {"base": begin, "live": policy}.get(kind)
    if teacher is None:
        teacher = copy.deepcopy(begin)
        for mine, theirs in zip(teacher.parameters(), policy.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 0.25)
    expected = torch.cat(divergences(policy, teacher, batch, 1.0)).mean().item()
    found = trainer.step(**batch)["ppo/policy/divergence"]
    assert found == pytest.approx(expected, rel=1e-4)


def adapted(seed: int = 0, scale: float = 0.3) -> Any:
    torch.manual_seed(seed)
    model = get_peft_model(tiny_models.language_model("qwen2"), LORA)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=scale)
    return model


def with_adapter() -> Any:
    torch.manual_seed(0)
    model = tiny_models.language_model("qwen2")
    return AutoModelForCausalLMWithValueHead.from_pretrained(model, peft_config=LORA)


@pytest.mark.parametrize("other", [False, True])
def test_adapters_on_one_base(other: bool, tmp_path: Path) -> None:
    """The base of a new adapter, and another adapter, which is not trained."""
    adapted(7).save_pretrained(tmp_path)
    base = exact(tiny_models.language_model("qwen2"))
    trainer = make(str(tmp_path) if other else None, with_adapter(), teacher_kl_coef=0.5)
    assert trainer.teacher_models == []
    batch = hinted(make_batch())
    teacher = exact(adapted(7)) if other else base
    expected = torch.cat(divergences(base, teacher, batch, 1.0)).mean().item()
    found = trainer.step(**batch)["ppo/policy/divergence"]
    assert found == pytest.approx(expected, rel=1e-4)
    trained = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert not any("fastrl_teacher" in name for name in trained)


# Runs: columns of the data, resumed, replayed, recorded.


def rows(hint: bool = True, **columns: Any) -> Dataset:
    prompts = [f"w{3 + i} w4 w{5 + i}" for i in range(8)]
    if hint:
        columns["privileged_context"] = [f"w{20 + i} w{30 + i}" for i in range(8)]
    return Dataset.from_dict({"query": prompts, **columns})


def small(completion_ids: Any, **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def running(kind: str, folder: Path, **settings: Any) -> tuple[PPOTrainer, Dataset]:
    teacher, data, policy = None, rows(), None
    given: dict[str, Any] = {"teacher_sync_steps": 2, "teacher_kl_coef": 0.5, **settings}
    if kind in ("model", "host", "reward"):
        teacher = another()
        given |= {"teacher_placement": "host"} if kind == "host" else {}
        given |= {"teacher_kl_in": "reward"} if kind == "reward" else {}
    elif kind == "adapter":
        adapted(7).save_pretrained(folder)
        given["teacher_model"], policy = str(folder), with_adapter()
    elif kind == "an adapter's mean":
        given["teacher_model_kind"], policy = "ema", with_adapter()
    elif kind == "several":
        teacher, given["teacher_column"] = {"a": another(1), "b": another(2)}, "of"
        data = rows(of=["a", "b"] * 4)
    else:
        given["teacher_model_kind"] = kind
    sizes = {"batch_size": 4, "mini_batch_size": 2, "learning_rate": 1e-2, "ppo_epochs": 2}
    trainer = PPOTrainer(
        PPOConfig(**sizes, **given), policy or make_policy(), None, tiny.tokenizer(),
        teacher_model=teacher,
    )  # fmt: skip
    return trainer, data


def train(trainer: PPOTrainer, data: Dataset, output: Path | None, **arguments: Any) -> Any:
    given = {"steps": 4, "save_every": 1, "keep_last": 0, "progress": False, **arguments}
    sampling = {"max_new_tokens": 6, "top_k": 0}
    return trainer.train(small, dataset=data, output=output, generation_kwargs=sampling, **given)


RUNS = ("model", "host", "reward", "base", "live", "ema", "adapter", "several")
RUNS += ("an adapter's mean",)


@pytest.mark.parametrize("kind", RUNS)
def test_a_killed_run_goes_on_to_the_bit(kind: str, tmp_path: Path) -> None:
    whole, data = running(kind, tmp_path / "teacher")
    train(whole, data, tmp_path / "whole")
    part, data = running(kind, tmp_path / "teacher")
    torch.manual_seed(9)
    train(part, data, tmp_path / "part", resume=tmp_path / "whole" / "checkpoints" / "checkpoint-3")
    assert differing(bits(whole), bits(part)) == []


@pytest.mark.parametrize("kind", ["reward", "ema", "several", "an adapter's mean"])
@pytest.mark.parametrize("first", [True, False])
def test_samples_of_a_run_are_drawn_again(kind: str, first: bool, tmp_path: Path) -> None:
    """After updates that learn of teachers behind their prompts, by the ledger."""
    trainer, data = running(kind, tmp_path / "teacher")
    train(trainer, data, tmp_path / "run", save_every=0 if first else 2)
    found = replay(running(kind, tmp_path / "teacher")[0], tmp_path / "run", 4)
    assert found.begun_at == (0 if first else 2)
    assert found.strayed is None
    assert found.identical


@pytest.mark.parametrize("place", ["reward", "loss"])
def test_the_ledger_has_what_teachers_read_and_said(place: str, tmp_path: Path) -> None:
    settings = {"teacher_kl_in": place, "old_logprobs": "recompute"}
    trainer, data = running("several", tmp_path, **settings)
    model = exact(trainer.teacher_models[0]), exact(trainer.teacher_models[1])
    train(trainer, data, tmp_path / "run", steps=1)
    (table,) = [read_ledger(tmp_path / "run" / "ledger")]
    hints = dict(zip(data["query"], data["privileged_context"], strict=True))
    names = dict(zip(data["query"], data["of"], strict=True))
    for row in table.to_pylist():
        assert row["teacher"] == names[row["prompt"]]
        read = f"{row['prompt']} {hints[row['prompt']]}"
        assert tiny.tokenizer().decode(row["teacher_prompt_ids"]).split() == read.split()
        response = torch.tensor(row["completion_ids"])
        teacher = model["ab".index(row["teacher"])]
        with torch.no_grad():
            logq = log_probs(teacher, torch.tensor(row["teacher_prompt_ids"]), response, 1.0)
        expected = logq.gather(1, response[:, None])[:, 0].float()
        found = torch.tensor(row["teacher_logprobs"])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    alone = PPOTrainer(PPOConfig(batch_size=4), make_policy(), None, tiny.tokenizer())
    train(alone, rows(hint=False), tmp_path / "alone", steps=1)
    names = read_ledger(tmp_path / "alone" / "ledger").column_names
    assert not [name for name in names if "teacher" in name]


def test_a_run_refuses_another_teacher(tmp_path: Path) -> None:
    trainer, data = running("model", tmp_path)
    train(trainer, data, tmp_path / "run", steps=1)
    other, _ = running("ema", tmp_path)
    with pytest.raises(BadCheckpoint, match="make the trainer with the teachers that the run"):
        train(other, data, tmp_path / "run", resume=True)


def test_frozen_weights_of_the_policy_are_checked_beside_a_teacher_that_moves(
    tmp_path: Path,
) -> None:
    """Its weights have the same names, and are in another model."""
    given = {"batch_size": 4, "mini_batch_size": 2, "teacher_kl_coef": 0.5}
    given |= {"teacher_model_kind": "ema"}
    for moved in (False, True):
        policy = make_policy()
        frozen = policy.pretrained_model.get_input_embeddings().weight.requires_grad_(False)
        frozen.data += 0.01 * moved
        trainer = PPOTrainer(PPOConfig(**given), policy, None, tiny.tokenizer())
        refused = pytest.raises(BadCheckpoint, match="frozen weights differ")
        with refused if moved else contextlib.nullcontext():
            train(trainer, rows(), tmp_path / "run", steps=1 + moved, resume=moved)


@pytest.mark.filterwarnings("ignore:numbers that are not finite in 1 of 4 sample")
@pytest.mark.parametrize("place", ["loss", "reward"])
def test_a_sample_for_which_a_teacher_has_no_number(place: str) -> None:
    """In the reward it is left out, and named; in the loss nothing is learned of the teacher."""
    teacher, batch = another(), make_batch()
    with torch.no_grad():
        teacher.get_input_embeddings().weight[int(batch["queries"][2][0])].fill_(torch.nan)
    assert not any(int(batch["queries"][2][0]) in batch["queries"][i] for i in (0, 1, 3))
    trainer = make(teacher, teacher_kl_coef=0.5, teacher_kl_in=place, padding_free=False)
    what = "hidden states" if place == "loss" else "log-probs"
    what += r" that are not finite in 1 of 4 responses of a pass \(sample 2\)"
    with pytest.warns(UserWarning, match=what) as warned:
        stats = trainer.step(**batch)
    assert all(x.isfinite().all() for x in parameters(trainer).values())
    assert stats["ppo/nonfinite_samples"] == (0 if place == "loss" else 1)
    named = [str(w.message) for w in warned if "(s): 2 (its rewards" in str(w.message)]
    assert bool(named) == (place == "reward")
    settings = {"teacher_kl_in": place, "on_nonfinite": "raise", "padding_free": False}
    strict = make(teacher, teacher_kl_coef=0.5, **settings)
    before = bits(strict)
    with pytest.raises(FloatingPointError, match=what):
        strict.step(**batch)
    assert differing(before, bits(strict)) == []


def test_a_prompt_that_several_responses_share_is_read_once() -> None:
    teacher, seen = another(), list[int]()
    trainer = make(teacher, teacher_kl_coef=0.5, **GROUPS)
    batch = grouped()
    trainer.step(**batch)

    def count(_: Any, args: Any, kwargs: Any) -> None:
        seen.append(kwargs.get("input_ids", args[0] if args else None).numel())

    teacher.model.register_forward_pre_hook(count, with_kwargs=True)
    trainer.step(**batch)
    of_prompts = len(batch["teacher_queries"][0]) + len(batch["teacher_queries"][2])
    assert seen == [of_prompts + sum(map(len, batch["responses"]))]


@pytest.mark.parametrize("settings", [
    {}, {"teacher_kl_in": "reward"}, {"teacher_model_kind": "ema"}, {"teacher_column": "of"},
])  # fmt: skip
def test_a_plan_counts_teachers(settings: dict[str, Any]) -> None:
    teacher: Any = None if "teacher_model_kind" in settings else another(intermediate_size=4096)
    if "teacher_column" in settings:
        teacher = {"a": teacher, "b": another(2)}
    trainer = make(teacher, teacher_kl_coef=0.5, **settings)
    alone = make()
    both = [x.plan(8, 8).phases["update"].by_kind for x in (trainer, alone)]
    of_teachers = [p.nbytes for model in trainer.teacher_models for p in model.parameters()]
    assert both[0]["reference"] - both[1]["reference"] == pytest.approx(sum(of_teachers), rel=0.05)


@pytest.mark.parametrize("rows", [(97, 120), (120, 97)])
def test_a_plan_is_made_of_heads_with_rows_of_padding(rows: tuple[int, int]) -> None:
    policy, teacher = (tiny_models.language_model("qwen2", vocab_size=n) for n in rows)
    no_reference = GROUPS | {"init_kl_coef": 0.0}
    trainer = make(teacher, CausalLMPolicy(policy), teacher_kl_coef=0.5, **no_reference)
    assert trainer.plan(8, 8).peak > 0


# What is refused, before anything changes.


def of_another(_: Path) -> Any:
    return another()


ON = {"teacher_kl_coef": 0.5}


@pytest.mark.parametrize(("teacher", "settings", "said"), [
    (of_another, {}, "teacher_kl_coef is 0, so that nothing is learned of it"),
    (of_another, {**ON, "teacher_model": "x"}, "names another: leave one out"),
    (swapped, ON, "'w5' is token 5 of the policy's, and 'w6' of the teacher"),
    (lambda _: another(vocab_size=90), ON, "a teacher's head has 90 rows, and the"),
    (of_another, {**ON, "teacher_beta": 1.5}, "teacher_beta"),
    (of_another, {**ON, "teacher_beta": -0.1}, "teacher_beta"),
    (of_another, {**ON, "teacher_kl_coef": -1.0}, "teacher_kl_coef"),
    (of_another, {**ON, "teacher_kl_in": "rewards"}, "teacher_kl_in"),
    (of_another, {**ON, "teacher_kl_in": "reward", "teacher_beta": 0.5}, "leave one of the two"),
    (lambda _: {"a": another()}, ON, "and teacher_column, the column, go together"),
    (of_another, {**ON, "teacher_column": "of"}, "and teacher_column, the column, go together"),
    (of_another, {**ON, "teacher_prompt_template": "{prompt}"}, r"has no \{privileged_context\}"),
    (of_another, {**ON, "teacher_model_init_kwargs": {"dtype": "bfloat16"}}, "loaded already"),
    (lambda _: len, ON, "is a function, which PPOTrainer does not ask"),
])  # fmt: skip
def test_what_cannot_be_is_refused(teacher: Any, settings: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        make(teacher(tmp_path), **settings)


def test_the_policy_is_no_teacher_of_itself() -> None:
    policy = make_policy()
    with pytest.raises(ValueError, match="is the model that is trained"):
        make(policy, policy, **ON)
    trainer = make(teacher_model_kind="live", **ON)
    before = bits(trainer)
    with pytest.raises(ValueError, match=r"is the policy itself .*pass teacher_queries"):
        trainer.step(**make_batch())
    with pytest.raises(ValueError, match=r"is the policy itself .*column teacher_prompt or p"):
        train(trainer, rows(hint=False), None)
    assert differing(before, bits(trainer)) == []


@pytest.mark.filterwarnings("ignore:Qwen2ForCausalLM. logits of the response tokens are kept")
def test_a_loss_without_hidden_states_is_refused_at_once() -> None:
    teacher = another()
    teacher.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="need an LM head that is a plain"):
        make(teacher, **ON)
    make(teacher, **ON, teacher_kl_in="reward").step(**make_batch())


def test_a_loss_that_is_scaled_is_refused() -> None:
    given = PPOConfig(**ON), another(), make_policy(), tiny.tokenizer(), "fp16"
    with pytest.raises(ValueError, match="mixed precision fp16 scales the loss before its gradi"):
        checked_teachers(*given)


def test_an_encoder_decoder_has_no_teacher() -> None:
    with pytest.raises(ValueError, match="the policy is an encoder–decoder: leave teacher_kl_coef"):
        PPOTrainer(PPOConfig(**ON), seq2seq_models.policy("bart"), None, tiny.tokenizer())


def test_settings_of_teachers_that_nothing_reads() -> None:
    with pytest.warns(UserWarning, match=r"nothing reads: teacher_beta=0.5 \(teacher_kl_coef is 0"):
        PPOConfig(teacher_beta=0.5)


def long_queries(batch: dict[str, Any]) -> dict[str, Any]:
    queries = list(batch["queries"])
    queries[2] = torch.full((45,), 7)
    return {"teacher_queries": queries}


@pytest.mark.parametrize(("given", "said"), [
    (long_queries, r"teacher_queries\[2\] and responses\[2\] have 45 \+ \d tokens, beyond the tea"),
    (lambda b: {"teacher_queries": b["queries"][:3]}, "has 4 elements, teacher_queries 3"),
    (lambda b: {"teacher_queries": [x + 97 for x in b["queries"]]}, r"teacher_queries\[0\] holds"),
    (lambda _: {"teachers": ["a"] * 4}, "are for a teacher_model that is a dict"),
])  # fmt: skip
def test_arguments_of_a_step_that_are_refused(given: Any, said: str) -> None:
    trainer, batch = make(another(), **ON), make_batch()
    before = bits(trainer)
    with pytest.raises(ValueError, match=said):
        trainer.step(**batch, **given(batch))
    with pytest.raises(ValueError, match="are for teachers, and there are none"):
        make().step(**batch, **given(batch))
    assert differing(before, bits(trainer)) == []


@pytest.mark.parametrize(("data", "said"), [
    (rows(privileged_context=["w3"] * 7 + [" ".join(["w9"] * 60)], hint=False),
     "the teacher's prompt of row 7 of column 'query' has 6. tokens; with 6 of its response .max_"),
    (rows(privileged_context=["w3"] * 7 + [None], hint=False),
     "row 7 of column 'query' has neither teacher_prompt nor privileged_context"),
    (rows(of=["a"] * 7 + ["c"]), "row 7 of column 'query': column 'of' names the teacher 'c'"),
])  # fmt: skip
def test_rows_that_are_refused_before_anything_is_sampled(data: Dataset, said: str) -> None:
    of = "of" in data.column_names
    teacher: Any = {"a": another()} if of else another()
    trainer = make(teacher, **ON, **({"teacher_column": "of"} if of else {}))
    with pytest.raises(ValueError, match=said):
        train(trainer, data, None)
