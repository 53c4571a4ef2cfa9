"""Mixtures of experts: choices of rollouts are kept and replayed, and routers are reported on."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fastrl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    PPOConfig,
    PPOTrainer,
    RolloutEngine,
    SamplingParams,
    SFTConfig,
    SFTTrainer,
)
from fastrl.data.padding_free import PaddingFree
from fastrl.data.token_batch import Padded, TokenBatch
from fastrl.learn.samples import token_batch
from fastrl.learn.scorer import scoring_request
from fastrl.models import AutoModelForCausalLMWithValueHead
from fastrl.models.attention import replaced
from fastrl.models.routing import (
    Routing,
    follow_routers,
    replayed,
    routed,
    routers,
    routers_of,
)
from fastrl.models.scorer import ScoredPass
from fastrl.models.scoring import PassLimit
from fastrl.run.state import load_tree, save_tree
from fastrl.samples import Samples
from fastrl.trainers.router_loss import router_loss
from fastrl_kernels import reference
from tests import tiny_models
from tests.golden import tiny
from tests.trainers.conftest import ONE_STEP

_BASE = {
    "vocab_size": tiny.VOCABULARY, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "max_position_embeddings": 48, "bos_token_id": tiny.BOS, "eos_token_id": tiny.EOS,
    "pad_token_id": tiny.PAD, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
}  # fmt: skip
_SHARED = {"shared_expert_intermediate_size": 8}
_HYBRID = {
    "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4, "v_head_dim": 4,
}  # fmt: skip
_GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 1}
_LOCAL = {"num_local_experts": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 4, **_SHARED},
    "qwen3_next": {"num_experts": 4, **_SHARED, **_HYBRID},
    "qwen3_5_moe_text": {"num_experts": 4, **_SHARED, **_HYBRID},
    "gpt_oss": {**_LOCAL, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v3": {**_LOCAL, **_GROUPS, **_LATENT},
    "glm4_moe": {**_LOCAL, **_GROUPS},
    "granitemoehybrid": {
        **_LOCAL, "layer_types": ["attention", "attention"], "mamba_n_heads": 4, "mamba_d_head": 8,
        "shared_intermediate_size": 8,
    },
    "olmoe": {"num_experts": 4},
    "mixtral": _LOCAL,
}  # fmt: skip


def mixture(family: str = "qwen3_moe", **changes: Any) -> Any:
    settings = {**_BASE, **SETTINGS.get(family, {}), **changes}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tiny.rule(name, tuple(parameter.shape)))
    return model.eval()


def policy(family: str = "qwen3_moe") -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLMWithValueHead(mixture(family)).eval()


def chosen(model: Any, ids: Tensor, choices: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Logits of a text [T], and the choices [T, L, k] of its routers."""
    routing = Routing(torch.ones(len(ids)), choices)
    follow_routers(model)
    with routed(routing):
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
    return logits, torch.stack([routing._experts[i] for i in sorted(routing._experts)], 1)


def words(*lengths: int) -> list[Tensor]:
    return tiny_models.prompts(*lengths)


def random_choices(tokens: int, layers: int = 2, experts: int = 4, k: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    order = torch.rand(tokens, layers, experts, generator=generator).argsort(-1)
    return order[..., :k].to(torch.int16)


@pytest.mark.parametrize("family", SETTINGS)
def test_a_router_is_replayed_by_its_own_code(family):
    """Weights at the choices are those that the router gives the same experts where it chooses them
    itself, and the result is that of the model where the choices are its own."""
    model = mixture(family)
    assert len(routers_of(model)) == 2
    (ids,) = words(9)
    logits, own = chosen(model, ids)
    again, same = chosen(model, ids, own.to(torch.int16))
    assert torch.equal(logits, again)
    assert torch.equal(own, same)
    other = random_choices(9)
    moved, used = chosen(model, ids, other)
    assert torch.equal(used, other.long())
    assert (moved - logits).abs().max() > 1e-3
    known = other.clone()
    known[:, 1] = -1  # the second router chooses
    _, used = chosen(model, ids, known)
    assert torch.equal(used[:, 0], other[:, 0].long())


def test_a_router_may_return_the_experts_first(monkeypatch):
    """As those of GraniteMoeHybrid do with older versions of transformers."""
    (ids,), other = words(9), random_choices(9)
    expected = [chosen(mixture(), ids, choices) for choices in (None, other)]
    model = mixture()
    kind = type(routers(model)[0])
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args: forward(self, *args)[::-1])
    assert follow_routers(model) == 2
    for router in routers(model):  # the layer around it reads today's order
        router.register_forward_hook(lambda *given: given[-1][::-1])
    for choices, (logits, used) in zip((None, other), expected, strict=True):
        found = chosen(model, ids, choices)
        assert torch.equal(found[0], logits)
        assert torch.equal(found[1], used)


def _softmax_of_all(logits: Tensor, experts: Tensor, router: Any) -> Tensor:
    found = logits.softmax(-1).gather(-1, experts)
    return found / found.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", 1) else found


def _softmax_of_chosen(logits: Tensor, experts: Tensor, _router: Any) -> Tensor:
    return logits.gather(-1, experts).softmax(-1)


def _sigmoid(logits: Tensor, experts: Tensor, router: Any) -> Tensor:
    found = logits.sigmoid().gather(-1, experts)
    return found / (found.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor


@pytest.mark.parametrize(
    ("family", "weights"),
    [("qwen3_moe", _softmax_of_all), ("gpt_oss", _softmax_of_chosen), ("deepseek_v3", _sigmoid)],
)
def test_weights_of_replayed_experts_and_their_gradient(family, weights):
    (router, *_) = routers(mixture(family))
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    experts = random_choices(5, 1)[:, 0].long()
    logits, found, _ = replayed(router, (hidden,), experts)
    expected = weights(logits, experts, router)
    torch.testing.assert_close(found, expected)
    up = torch.arange(10.0).view(5, 2)
    one, other = (
        torch.autograd.grad((x * up).sum(), router.weight, retain_graph=True)[0]
        for x in (found, expected)
    )
    assert one.abs().max() > 1e-2
    torch.testing.assert_close(one, other)


def test_routers_of_another_form_are_refused_by_name():
    model = mixture("llama4_text", num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(ValueError, match="Llama4Router has another form"):
        routers_of(model)


@pytest.mark.parametrize("family", list(SETTINGS))
def test_the_engine_keeps_what_was_chosen(family):
    model = mixture(family)
    engine = RolloutEngine(model, tiny.tokenizer(), max_slots=3, keep_experts=True)
    prompts = words(5, 1, 7, 4)
    output = engine.generate(prompts, SamplingParams(max_new_tokens=6, n=2, seed=1))
    for i, (sequence, kept) in enumerate(zip(output.sequences, output.experts, strict=True)):
        prompt = prompts[i // 2]
        _, own = chosen(model, torch.cat([prompt, sequence]))
        assert kept.shape == own[:-1].shape
        run = torch.ones(kept.shape[:2], dtype=torch.bool)
        run[: len(prompt) - 1, -1] = False  # the last layer does not run for them
        assert (kept[~run] == -1).all()
        assert torch.equal(kept[run].sort(-1)[0].long(), own[:-1][run].sort(-1)[0])


def batch_of(padding: Any, experts: Any = (None, None, None), ids: Any = None) -> TokenBatch:
    """Two responses to one prompt, and one to another."""
    prompts, responses = words(5, 3), ids or tiny_models.prompts(4, 6, 2, seed=1)
    queries = [prompts[0], prompts[0], prompts[1]]
    samples = Samples(
        prompt_ids=queries, sequences=responses, advantages=torch.zeros(3), experts=list(experts),
        learned=[torch.ones(len(x), dtype=torch.bool) for x in responses],
    )  # fmt: skip
    return token_batch(samples, tiny.PAD, padding)


def scored(
    model: Any, batch: TokenBatch, grad: bool = True
) -> tuple[Tensor, Routing, list[Tensor]]:
    """Log-probs, the routing, and gradients of the mean loss with a load-balancing loss."""
    follow_routers(model)
    model_pass = batch.model_pass
    request = scoring_request(batch, model_pass, values=False)
    scores = model(**model_pass.inputs, scoring=request)
    routing = model_pass.inputs["routing"]
    if not grad:
        return scores.logprobs, routing, []
    loss = -scores.logprobs.mean() + 0.1 * routing.aux_loss()
    found = torch.autograd.grad(loss, list(model.pretrained_model.parameters()))
    return scores.logprobs, routing, list(found)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize("replay", [False, True])
def test_packed_rows_padded_batches_and_single_sequences_agree(family, replay):
    """A prompt that is run once has the choices of its group's first sample: all have them."""
    model = policy(family)
    experts: list[Tensor | None] = [None] * 3
    if replay:
        experts = [random_choices(n) for n in (8, 10, 4)]
        experts[1][:5] = experts[0][:5]
    packed, padded = (batch_of(padding, experts) for padding in (PaddingFree(), Padded()))
    one, routing, grads = scored(model, packed)
    other, _, others = scored(model, padded)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    for x, y in zip(grads, others, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-5)
    alone = [scored(model, padded.select([i]), grad=False)[0] for i in range(3)]
    torch.testing.assert_close(one, torch.cat(alone), rtol=0, atol=1e-5)
    if replay:
        plain, *_ = scored(model, batch_of(PaddingFree()), grad=False)
        assert (plain - one).abs().max() > 1e-3
        assert 0 < routing.statistics()["changed_choices"] < 1


def test_nothing_of_a_neighbour_reaches_a_text():
    model = policy().double()
    model.pretrained_model.set_experts_implementation("eager")  # torch's grouped_mm has no float64
    responses = tiny_models.prompts(4, 6, 2, seed=1)
    changed = [*responses[:2], responses[2].flip(0) + 1]
    found = []
    for each in (responses, changed):
        model_pass = batch_of(PaddingFree(), ids=each).model_pass
        inputs = {**model_pass.inputs, "use_cache": False}
        attention, _ = inputs.pop("attention"), inputs.pop("routing")
        with torch.no_grad(), replaced(model.pretrained_model, attention):
            found.append(model.pretrained_model(**inputs).logits[0][model_pass.rows])
    torch.testing.assert_close(found[0][:10], found[1][:10], rtol=0, atol=1e-12)
    assert (found[0][10:] - found[1][10:]).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_load_balancing_loss_is_transformers_also_of_a_prompt_that_is_run_once(family):
    model = policy(family)
    padded = batch_of(Padded())
    inputs = {**padded.padded_inputs, "output_router_logits": True, "use_cache": False}
    expected = model.pretrained_model(**inputs).aux_loss
    for padding in (Padded(), PaddingFree()):
        if isinstance(padding, PaddingFree) and family == "gpt_oss":
            continue  # its attention has sinks
        _, routing, _ = scored(model, batch_of(padding), grad=False)
        torch.testing.assert_close(routing.aux_loss(), expected)


def test_layers_that_run_again_are_replayed():
    model = policy()
    experts = [random_choices(n) for n in (8, 10, 4)]
    plain = scored(model, batch_of(Padded(), experts))
    model.gradient_checkpointing_enable()
    model.train()
    again = scored(model, batch_of(Padded(), experts))
    for x, y in zip(plain[2], again[2], strict=True):
        torch.testing.assert_close(x, y)


def letters(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def ppo(model: Any, **settings: Any) -> PPOTrainer:
    config = PPOConfig(
        batch_size=4, mini_batch_size=2, ppo_epochs=1, learning_rate=1e-3, seed=0, **settings
    )
    return PPOTrainer(config, model, None, tiny.tokenizer())


@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
@pytest.mark.parametrize("adapts", [False, True])
def test_ppo_learns_with_the_experts_of_its_rollouts(adapts):
    model = policy()
    if adapts:  # the reference is the same model
        lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        model = AutoModelForCausalLMWithValueHead.from_pretrained(mixture(), peft_config=lora)
    trainer = ppo(model, replay_routing=True, router_aux_loss_coef=0.1, old_logprobs="recompute")
    prompts = words(5, 3, 4, 6)
    rollout = trainer.rollouts.sample(prompts, {"max_new_tokens": 5, "do_sample": True})
    scores = [torch.tensor(float(i)) for i in range(4)]
    before = copy.deepcopy(trainer.model.pretrained_model)
    rollout.experts = [torch.where(x < 0, x, (x + 1) % 4) for x in rollout.experts]
    stats = trainer.step(prompts, rollout.sequences, scores, rollout=rollout)
    assert stats["ppo/router/changed_choices"] > 0.1
    assert 1 <= stats["ppo/router/load"] <= 4
    ratios = stats["ppo/policy/ratio"]
    first = torch.as_tensor(ratios[: len(ratios) // 4])  # of the first step
    torch.testing.assert_close(first, torch.ones_like(first))
    for i, (prompt, sequence) in enumerate(zip(prompts, rollout.sequences, strict=True)):
        ids = torch.cat([prompt, sequence])
        experts = torch.cat([rollout.experts[i], torch.full((1, 2, 2), -1, dtype=torch.int16)])
        logits, _ = chosen(before, ids, experts)
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, sequence[:, None])[:, 0]
        row = torch.as_tensor(stats["objective/logprobs"][i])
        found = row[len(prompt) - 1 : len(prompt) - 1 + len(sequence)]
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-5)
        logits, _ = chosen(before, ids)  # the reference chooses for itself
        own = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, sequence[:, None])[:, 0]
        row = torch.as_tensor(stats["objective/ref_logprobs"][i])
        found = row[len(prompt) - 1 : len(prompt) - 1 + len(sequence)]
        torch.testing.assert_close(found, own.detach(), rtol=0, atol=1e-5)


def test_ppo_knows_the_choices_of_what_it_generated_and_asks_for_others():
    trainer = ppo(policy(), replay_routing=True)
    prompts = words(5, 3, 4, 6)
    responses = trainer.generate(prompts, max_new_tokens=4, return_prompt=False)
    scores = [torch.tensor(float(i)) for i in range(4)]
    stats = trainer.step(prompts, responses, scores)
    assert stats["ppo/router/changed_choices"] < 0.2  # of the steps behind the first
    with pytest.raises(ValueError, match="choices of these responses are not known"):
        trainer.step(prompts, responses, scores)


def test_the_coefficient_of_the_load_balancing_loss_acts():
    found = []
    for coef in (0.0, 1.0):
        trainer = ppo(policy(), router_aux_loss_coef=coef)
        prompts = words(5, 3, 4, 6)
        scores = [torch.tensor(0.0)] * 4
        stats = trainer.step(prompts, words(3, 4, 5, 2), scores)
        found.append((stats["ppo/loss/total"], stats["ppo/router/aux_loss"]))
    assert abs(found[1][0] - found[0][0]) > 0.5
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=1, but .* is no mixture"):
        ppo(tiny_models.policy(), router_aux_loss_coef=1.0)


def test_a_dense_model_of_a_family_with_mixtures_has_no_load_balancing_loss():
    config = AutoConfig.for_model("doge", num_hidden_layers=1, hidden_size=16, vocab_size=32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert router_loss(model, None) == (False, 0.0)
    with pytest.raises(ValueError, match="no mixture"):
        router_loss(model, 0.1)


def grpo(folder: Path, model: Any = None, **settings: Any) -> GRPOTrainer:
    own = {"rollout_func": settings.pop("rollout_func", None)}
    options = {"num_generations": 4, "max_completion_length": 5, "logging_steps": 1, "max_steps": 2}
    args = GRPOConfig(output_dir=str(folder), **{**ONE_STEP, **options, **settings})
    data = Dataset.from_dict({"prompt": [f"w{3 + i} w4 w{5 + i}" for i in range(8)]})
    return GRPOTrainer(
        mixture() if model is None else model, letters, args, data,
        processing_class=tiny.tokenizer(), **own,
    )  # fmt: skip


@pytest.mark.parametrize("replay", [False, True])
def test_grpo_packs_mixtures_and_reports_on_their_routers(replay, tmp_path):
    trainer = grpo(
        tmp_path, replay_routing=replay, steps_per_generation=1, num_iterations=2,
        router_aux_loss_coef=0.01, beta=0.1,
    )  # fmt: skip
    trainer.train()
    assert isinstance(trainer._scorer.padding(trainer.model), PaddingFree)
    log = next(x for x in trainer.state.log_history if "router/load" in x)
    assert 1 <= log["router/load"] <= 4
    assert log["aux_loss"] > 1
    assert ("router/changed_choices" in log) == replay
    if replay:
        assert log["router/changed_choices"] == 0
        state = trainer._generations.buffer[0].state()
        save_tree(state, tmp_path / "state", trainer.processes)
        again = Samples.of_state(load_tree(tmp_path / "state"))
        for x, y in zip(again.experts, trainer._generations.buffer[0].experts, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("kind", ["dense", "mixture", "base", "live"])
@pytest.mark.parametrize("place", ["loss", "reward"])
def test_a_student_has_the_experts_of_its_rollouts_and_a_teacher_its_own(kind, place, tmp_path):
    """Behind a hint where the teacher has the student's weights, else behind the same prompts."""
    teachers = {"dense": tiny_models.language_model, "mixture": lambda: mixture("olmoe")}
    teacher = teachers[kind]() if kind in teachers else None
    if kind == "mixture":
        follow_routers(teacher)  # as if it had been trained before
    rows = {"prompt": [f"w{3 + i} w4 w{5 + i}" for i in range(8)]}
    if teacher is None:
        rows["privileged_context"] = [f"w{20 + i} w{30 + i}" for i in range(8)]
    settings = {"max_completion_length": 5, "replay_routing": True, "max_steps": 1}
    settings |= {"teacher_model_kind": kind} if teacher is None else {}
    made, config, given = DistillationTrainer, DistillationConfig, ()
    if place == "reward":
        made, config, given = GRPOTrainer, GRPOConfig, (letters,)
        settings |= {"teacher_kl_coef": 1.0, "teacher_kl_in": place, "num_generations": 4}
    trainer = made(
        mixture(), *given, args=config(output_dir=str(tmp_path), **{**ONE_STEP, **settings}),
        train_dataset=Dataset.from_dict(rows), processing_class=tiny.tokenizer(),
        teacher_model=teacher,
    )  # fmt: skip
    begun = copy.deepcopy(trainer.model)
    trainer.train()
    samples = trainer._generations.buffer[0]
    samples.experts = [torch.where(x < 0, x, (x + 1) % 4) for x in samples.experts]
    student = copy.deepcopy(trainer.model).eval()
    teacher = {"live": student, "base": begun}.get(kind, teacher)
    behind = samples.teacher_prompt_ids or samples.prompt_ids
    with torch.no_grad():
        of_student, of_teacher = [], []
        for i, sequence in enumerate(samples.sequences):
            ids = torch.cat([samples.prompt_ids[i], sequence])
            experts = torch.cat([samples.experts[i], torch.full((1, 2, 2), -1, dtype=torch.int16)])
            logits = chosen(student, ids, experts)[0][-len(sequence) - 1 : -1]
            of_student.append(logits.log_softmax(-1))
            ids = torch.cat([behind[i], sequence])
            logits = teacher(ids[None], use_cache=False).logits[0, -len(sequence) - 1 : -1]
            of_teacher.append(logits.log_softmax(-1))
        if place == "loss":
            (each,) = trainer._passes(trainer.model, samples, "train")
            trainer.compute_loss(trainer.model, each)
            expected = reference.divergence(torch.cat(of_student), torch.cat(of_teacher), 1.0)
            torch.testing.assert_close(each.divergences, expected, rtol=1e-4, atol=1e-5)
            assert each.routing.statistics()["changed_choices"] > 0.1
        else:
            limit = PassLimit(len(samples))
            found = trainer.teaching.teachers.log_probs(
                samples, tiny.PAD, torch.device("cpu"), limit
            )
            for x, y, sequence in zip(found, of_teacher, samples.sequences, strict=True):
                torch.testing.assert_close(x, y.gather(1, sequence[:, None])[:, 0])


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_preferences_pack_mixtures_with_the_loss_that_transformers_computes(
    kind, tmp_path, monkeypatch
):
    """Also of a prompt that stands once for both sides."""
    prompts = {"prompt": ["w5 w6 w7", "w4", "w8 w9", "w3 w3"]}
    if kind == "dpo":
        config, trainer, sides = DPOConfig, DPOTrainer, {"chosen": [" w5 w6 w9"] * 4}
        sides |= {"rejected": [" w9", " w4 w4", " w5", " w6 w7"]}
    else:
        config, trainer = KTOConfig, KTOTrainer
        sides = {"completion": [" w5 w6 w9", " w4", " w8", " w7 w7"], "label": [True, False] * 2}

    def first_step(followed, **settings):
        with monkeypatch.context() as patch:
            if not followed:
                patch.setattr("fastrl.trainers.pairs.preference.follow_routers", lambda model: 0)
            options = {"logging_steps": 1, "max_steps": 1, "router_aux_loss_coef": 0.5}
            args = config(output_dir=str(tmp_path), **{**ONE_STEP, **options, **settings})
            data = Dataset.from_dict({**prompts, **sides})
            made = trainer(
                mixture(), args=args, train_dataset=data, processing_class=tiny.tokenizer()
            )
            made.train()
            return made

    expected = first_step(followed=False)
    for made in (first_step(True), first_step(True, padding_free=True)):
        for name in ("loss", "aux_loss"):
            assert made.state.log_history[0][name] == pytest.approx(
                expected.state.log_history[0][name], abs=1e-5
            )
        for x, right in zip(made.model.parameters(), expected.model.parameters(), strict=True):
            assert (x - right).abs().max() <= 1e-5
    assert made.packing(made.model_wrapped)


def test_what_cannot_be_replayed_is_refused_or_ignored_with_a_warning(tmp_path):
    with pytest.raises(ValueError, match="rollout_backend='engine'"):
        grpo(tmp_path, replay_routing=True, rollout_backend="generate")
    with pytest.raises(ValueError, match="beside rollout_func"):
        grpo(tmp_path, replay_routing=True, rollout_func=letters)
    with pytest.warns(UserWarning, match="replay_routing is ignored: .* is dense"):
        ppo(tiny_models.policy(), replay_routing=True)
    with pytest.raises(ValueError, match="Llama4Router has another form"):
        grpo(tmp_path, mixture("llama4_text", num_local_experts=2, num_experts_per_tok=1),
             replay_routing=True)  # fmt: skip


def test_a_loss_of_routers_that_the_model_does_not_compute_is_refused(tmp_path):
    """As those of architectures whose routers transformers does not record."""
    model = mixture()
    model.register_forward_hook(lambda *seen: setattr(seen[-1], "aux_loss", 0))
    rows = Dataset.from_dict({"input_ids": [[3, 4, 5], [6, 7]], "labels": [[3, 4, 5], [6, 7]]})
    config = SFTConfig(str(tmp_path), router_aux_loss_coef=0.1, **ONE_STEP)
    trainer = SFTTrainer(model, config, train_dataset=rows, processing_class=tiny.tokenizer())
    with pytest.raises(ValueError, match=r"no load-balancing loss.*router_aux_loss_coef=0"):
        trainer.train()
    output = model(torch.tensor([[3, 4]]), output_router_logits=True)
    with pytest.raises(ValueError, match="no load-balancing loss"):
        ScoredPass(None, None, output).aux_loss  # noqa: B018
