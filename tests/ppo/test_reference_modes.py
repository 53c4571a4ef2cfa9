"""What step() does with each kind of reference, and with checkpointed layers."""

import json
import math

import pytest
import torch

from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model
from fastrl.learn.ref_model import choose_ref_model
from fastrl.models.trunk import TRUNK_NAME, layer_stack
from tests import tiny_models
from tests.golden import tiny
from tests.models.conftest import FAMILIES, counted, deep
from tests.ppo.conftest import assert_learned_alike, make_batch, parameters
from tests.ref_model.conftest import adapted, storage

pytestmark = [
    pytest.mark.filterwarnings(tiny_models.PEFT_WARNING),
    pytest.mark.filterwarnings("ignore:the LM head shares its weight with the embeddings"),
]

SAMPLES = 4


def trainer_of(policy, ref_model=None, num_shared_layers=None, **settings):
    settings = {"batch_size": SAMPLES, "mini_batch_size": 2, "learning_rate": 1e-3} | settings
    return PPOTrainer(
        PPOConfig(**settings),
        policy,
        ref_model,
        tiny.tokenizer(),
        num_shared_layers=num_shared_layers,
    )


def stepped(trainer, steps=2):
    stats = [trainer.step(**make_batch(seed=seed)) for seed in range(steps)]
    return stats, parameters(trainer)


def tokens_of(batch):
    return sum(map(len, batch["queries"] + batch["responses"]))


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_layer_runs_once_per_sample_and_not_in_the_update(family, epochs):
    trainer = trainer_of(deep(family), num_shared_layers=2, ppo_epochs=epochs)
    assert trainer.reference.mode == "trunk"
    ours, theirs = counted(trainer.model), counted(trainer.ref_model)
    in_update, update = {}, trainer.update

    def watched(*args):
        before = dict(ours)
        record = update(*args)
        in_update.update({i: n - before.get(i, 0) for i, n in ours.items()})
        return record

    trainer.update = watched
    batch = make_batch()
    trainer.step(**batch)
    tokens = tokens_of(batch)
    scored = {i: n - in_update.get(i, 0) for i, n in ours.items()}
    assert {i: scored[i] for i in (0, 1)} == {0: tokens, 1: tokens}
    assert {i: scored[i] for i in (2, 3)} == {2: tokens, 3: tokens}
    assert theirs == {2: tokens, 3: tokens}
    assert in_update == {0: 0, 1: 0, 2: epochs * tokens, 3: epochs * tokens}


def test_audited_samples_run_no_shared_layer_again():
    trainer = trainer_of(deep("gpt2"), num_shared_layers=2, ppo_epochs=1)
    queries = tiny_models.prompts(5, 3, 7, 2)
    responses = trainer.generate(
        queries, return_prompt=False, max_new_tokens=6, do_sample=True, top_k=0
    )
    ours = counted(trainer.model)
    stats = trainer.step(queries, responses, [torch.tensor(float(i)) for i in range(SAMPLES)])
    assert stats["rollout/reused"] == 1
    tokens = sum(map(len, queries + responses))
    assert ours == {0: tokens, 1: tokens, 2: 2 * tokens, 3: 2 * tokens}, "audit and update"


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "opt"])
@pytest.mark.parametrize("gib", [(0.0, 0.0), (0.0, 1.0), (1e-6, 0.0)], ids=["none", "host", "some"])
def test_the_update_is_the_same_whatever_is_kept(family, gib):
    """To the last bit where all samples are kept, or none: what is kept was computed by the same
    operations on the same numbers, in storage that torch aligns alike. Where some are computed
    again, products have other numbers of rows, whose bits some libraries do not keep."""
    settings = {"num_shared_layers": 2, "ppo_epochs": 3, "adap_kl_ctrl": False}
    budget = dict(zip(("trunk_cache_gib", "trunk_cache_host_gib"), gib, strict=True))
    kept, again = (trainer_of(deep(family), **settings, **extra) for extra in ({}, budget))
    runs = counted(kept.model), counted(again.model)
    (stats, weights), (stats_again, weights_again) = stepped(kept), stepped(again)
    exact = not gib[0] and not torch.cuda.is_available()  # gradients of embeddings are atomic there
    if exact:
        assert_same(weights, weights_again)
    assert_learned_alike(weights, weights_again)
    for a, b in zip(stats, stats_again, strict=True):
        tolerance = 0 if exact else 1e-5
        for name in ("objective/kl", "ppo/loss/total"):
            assert a[name] == pytest.approx(b[name], rel=tolerance, abs=tolerance)
    tokens = sum(tokens_of(make_batch(seed=seed)) for seed in range(2))
    assert runs[0][0] == tokens
    assert (runs[1][0] > tokens) == (gib[1] == 0)


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_a_trunk_learns_what_a_copy_with_the_same_layers_frozen_learns(padding_side):
    plain, shared = deep("llama"), deep("llama")
    trainer = trainer_of(shared, num_shared_layers=2, ppo_epochs=2)
    for name, p in plain.named_parameters():
        p.requires_grad_(dict(shared.named_parameters())[name].requires_grad)
    reference = trainer_of(plain, ppo_epochs=2, reference="copy")
    trainer.tokenizer.padding_side = reference.tokenizer.padding_side = padding_side
    (stats, weights), (expected_stats, expected) = stepped(trainer), stepped(reference)
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], atol=1e-4, rtol=1e-4)
    for a, b in zip(stats, expected_stats, strict=True):
        assert a["objective/kl"] == pytest.approx(b["objective/kl"], abs=1e-4)
    frozen = {n for n, p in shared.pretrained_model.named_parameters() if not p.requires_grad}
    start = dict(deep("llama").pretrained_model.named_parameters())
    assert frozen
    assert all(torch.equal(weights[name], start[name]) for name in frozen)


def test_a_reference_made_by_hand_is_recognised():
    policy = deep("gpt2")
    trainer = trainer_of(policy, create_reference_model(policy, num_shared_layers=3))
    assert trainer.reference.mode == "trunk"
    counts = counted(trainer.ref_model)
    batch = make_batch()
    trainer.step(**batch)
    assert counts == {3: tokens_of(batch)}


def test_memory_is_that_of_the_mode():
    def share(policy, *args, **settings):
        before = storage(policy)
        trainer = trainer_of(policy, *args, **settings)
        return storage(trainer.model, trainer.ref_model) / before

    assert share(deep("gpt2")) == 2
    assert share(deep("gpt2"), reference="offload") == 2  # of which half lies on the host
    assert share(deep("gpt2"), init_kl_coef=0.0) == 1
    assert share(adapted(r=1)) == 1
    assert share(adapted(r=1), reference_adapter="start") <= 1.02
    policy = deep("gpt2")
    own = storage(policy.pretrained_model.transformer.h[3], policy.v_head)
    own += storage(policy.pretrained_model.transformer.ln_f)
    assert share(policy, num_shared_layers=3) == 1 + own / storage(policy)


def test_changed_layers_are_refused_at_save_before_anything_is_written(tmp_path):
    trainer = trainer_of(deep("gpt2"), num_shared_layers=2)
    with torch.no_grad():
        trainer.model.pretrained_model.transformer.h[0].ln_1.weight += 1e-3
    with pytest.raises(ValueError, match="2 shared layers have changed"):
        trainer.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_checkpoint_says_what_was_frozen_and_loading_looks(tmp_path):
    trainer = trainer_of(deep("gpt2"), num_shared_layers=2)
    trainer.step(**make_batch())
    trainer.save_pretrained(tmp_path)
    record = json.loads((tmp_path / TRUNK_NAME).read_text())
    assert record["num_shared_layers"] == 2
    load = AutoModelForCausalLMWithValueHead.from_pretrained
    loaded = load(tmp_path)
    assert_same(
        {n: p.detach() for n, p in loaded.named_parameters()},
        {n: p.detach().cpu() for n, p in trainer.model.named_parameters()},
    )
    assert all(p.requires_grad for p in loaded.parameters())
    load(tmp_path, dtype="bfloat16")  # nothing to compare with
    (tmp_path / TRUNK_NAME).write_text(json.dumps(record | {"num_shared_layers": 3}))
    with pytest.raises(ValueError, match="3 layers that were shared with a reference have changed"):
        load(tmp_path)


@pytest.mark.parametrize("mode", ["offload", "trunk"])
def test_scores_are_those_of_a_copy(mode):
    settings = {"num_shared_layers": 2} if mode == "trunk" else {"reference": mode}
    expected = trainer_of(deep("gpt2")).step(**make_batch())
    found = trainer_of(deep("gpt2"), **settings).step(**make_batch())
    for name in ("objective/logprobs", "objective/ref_logprobs"):
        torch.testing.assert_close(
            torch.from_numpy(found[name]), torch.from_numpy(expected[name]), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("kl_penalty", ["kl", "full"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("mode", ["copy", "offload"])
def test_a_reference_in_bf16_costs_half_and_scores_nearly_the_same(mode, family, kl_penalty):
    settings = {"reference": mode, "kl_penalty": kl_penalty}
    exact = trainer_of(deep(family), **settings)
    coarse = trainer_of(deep(family), reference_dtype="bfloat16", **settings)
    assert storage(coarse.ref_model) == storage(exact.ref_model) / 2
    assert {p.dtype for p in coarse.model.parameters()} == {torch.float32}
    # The frequencies of rotary embeddings: rounded, they would be other positions.
    assert {b.dtype for b in coarse.ref_model.buffers() if b.is_floating_point()} <= {torch.float32}
    found, expected = coarse.step(**make_batch()), exact.step(**make_batch())
    assert (found["objective/logprobs"] == expected["objective/logprobs"]).all()
    difference = found["objective/ref_logprobs"] - expected["objective/ref_logprobs"]
    assert 0 < abs(difference).max() < 0.05
    queries = tiny_models.prompts(3, 5)
    with coarse.reference.as_policy():
        coarse.generate(queries, generate_ref_response=True, max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("mode", ["copy", "offload"])
def test_a_reference_that_is_given_stays_in_its_dtype(mode):
    given = deep("gpt2")
    config = PPOConfig(reference=mode, reference_dtype="bfloat16")
    reference = choose_ref_model(config, deep("gpt2"), given)
    assert {p.dtype for p in given.parameters()} == {torch.float32}
    assert {p.dtype for p in reference.model.parameters()} == {torch.bfloat16}
    language_model = reference.model.pretrained_model  # tied
    assert language_model.lm_head.weight is language_model.get_input_embeddings().weight


def test_a_reference_in_bf16_follows_in_whole_steps():
    trainer = trainer_of(deep("gpt2"), reference_dtype="bfloat16", sync_ref_every=1)
    trainer.step(**make_batch())
    for name, weight in trainer.reference.own_weights().items():
        policy = dict(trainer._unwrapped.named_parameters())[name]
        assert torch.equal(weight, policy.bfloat16()), name


@pytest.mark.parametrize(("settings", "said"), [
    ({"num_shared_layers": 2}, "reference='trunk' the bottom layers are the policy's own"),
    ({"init_kl_coef": 0.0}, "reference='none' has no weights of its own"),
    ({"sync_ref_every": 1, "ref_ema": 0.1}, "below half the spacing of bfloat16 would be lost"),
])  # fmt: skip
def test_a_reference_that_cannot_be_in_bf16_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        trainer_of(deep("gpt2"), reference_dtype="bfloat16", **settings)
    with pytest.raises(ValueError, match="reference='adapter' has no weights of its own"):
        trainer_of(adapted(), reference_dtype="bfloat16")
    with pytest.raises(ValueError, match="unknown reference_dtype 'int8': choose one of auto"):
        PPOConfig(reference_dtype="int8")


@pytest.mark.parametrize("mode", ["copy", "offload", "trunk"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_reference_of_a_low_precision_policy_moves_in_whole_steps_or_is_float32(mode, dtype):
    """By default it has the policy's dtype."""
    settings = {"reference": mode, "sync_ref_every": 1}
    settings |= {"num_shared_layers": 1} if mode == "trunk" else {}

    def make(**more):
        policy = tiny_models.policy("gpt2").to(getattr(torch, dtype))
        return choose_ref_model(PPOConfig(**settings, **more), policy)

    said = rf"ref_ema=0.1 with a reference in {dtype}.*reference_dtype='float32'"
    with pytest.raises(ValueError, match=said):
        make(ref_ema=0.1)
    make()
    if mode != "trunk":
        kept = make(ref_ema=0.1, reference_dtype="float32").own_weights()
        assert {x.dtype for x in kept.values()} == {torch.float32}


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("kl_penalty", ["kl", "full"])
def test_without_a_reference_the_score_is_the_reward(adaptive, kl_penalty):
    settings = {"init_kl_coef": 0.0, "adap_kl_ctrl": adaptive, "kl_penalty": kl_penalty}
    none = trainer_of(deep("gpt2"), **settings)
    copy = trainer_of(deep("gpt2"), reference="copy", **settings)
    assert none.reference.mode == "none"
    (stats, weights), (expected_stats, expected) = stepped(none), stepped(copy)
    assert_learned_alike(weights, expected)
    for a, b in zip(stats, expected_stats, strict=True):
        assert math.isnan(a["objective/kl"])
        assert not math.isnan(b["objective/kl"])
        assert a["ppo/mean_non_score_reward"] == b["ppo/mean_non_score_reward"] == 0
        assert a["objective/kl_coef"] == 0
        unknown = {k for k, v in a.items() if isinstance(v, float) and math.isnan(v)}
        assert unknown == {"objective/kl"}
    assert math.isnan(none.sequence_kl(*list(make_batch().values())[:2]))


def test_a_run_without_a_reference_says_so_and_leaves_the_kl_out(tmp_path, capsys):
    from fastrl import JsonlCallback
    from fastrl.tools.reports.report import Comparison

    trainer = trainer_of(deep("gpt2"), init_kl_coef=0.0)
    prompts = tiny_models.prompts(3, 4, 5, 2)
    result = trainer.train(
        lambda prompts, completions, completion_ids: [float(len(c)) for c in completion_ids],
        steps=1, prompts=prompts, eval_prompts=prompts,
        callbacks=[JsonlCallback(tmp_path / "metrics.jsonl")],
    )  # fmt: skip
    rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert not any("kl" in name.split("/") for row in rows for name in row)
    comparison = Comparison.of(*result.evaluations)
    assert "kl_after" not in comparison.to_dict()
    said = capsys.readouterr()
    assert "PPO reference: none, the KL coefficient is 0" in said.out + said.err
    assert "nan" not in said.out + said.err
    assert "KL" not in str(comparison)


def test_the_starting_adapter_answers_for_the_reference():
    policy = adapted()
    query = torch.tensor([5, 6, 7])
    start = trainer_of(policy, reference_adapter="start")
    before = start.generate(query, max_new_tokens=8)
    for _ in range(3):
        start.step(**make_batch())
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "lora_B.default" in name:
                p.mul_(-20)
    response, ref_response = start.generate(query, generate_ref_response=True, max_new_tokens=8)
    assert torch.equal(ref_response, before)
    assert not torch.equal(response, before)
    stats = start.step(**make_batch())
    assert abs(stats["objective/kl"]) > 1e-3


@pytest.mark.parametrize("mode", ["copy", "trunk"])
def test_the_reference_follows_every_few_steps(mode):
    settings = {"num_shared_layers": 2} if mode == "trunk" else {}
    trainer = trainer_of(deep("gpt2"), sync_ref_every=2, reference=mode, **settings)
    batch = make_batch()
    trainer.step(**batch)
    assert abs(trainer.sequence_kl(batch["queries"], batch["responses"])) > 1e-3
    trainer.step(**batch)
    assert trainer.sequence_kl(batch["queries"], batch["responses"]) == pytest.approx(0, abs=1e-5)
    trainer.step(**batch)
    assert abs(trainer.sequence_kl(batch["queries"], batch["responses"])) > 1e-3


MODES = {
    "copy": {"reference": "copy"}, "trunk": {"num_shared_layers": 2},
    "offload": {"reference": "offload"}, "none": {"init_kl_coef": 0.0}, "adapter": {},
}  # fmt: skip


def policy_of(mode):
    return adapted() if mode == "adapter" else deep("gpt2", resid_pdrop=0.3, attn_pdrop=0.3)


@pytest.mark.parametrize("mode", MODES)
def test_checkpointed_layers_learn_the_same_without_dropout(mode):
    settings = MODES[mode] | {"ppo_epochs": 2}
    plain = trainer_of(policy_of(mode), **settings)
    saving = trainer_of(policy_of(mode), gradient_checkpointing=True, **settings)
    counts = counted(plain.model, inside="mlp"), counted(saving.model, inside="mlp")
    (_, weights), (_, weights_saving) = stepped(plain), stepped(saving)
    assert_learned_alike(weights_saving, weights)
    last = max(counts[0])
    trained = 2 * sum(tokens_of(make_batch(seed=seed)) for seed in range(2))  # epochs, steps
    assert counts[1][last] - counts[0][last] == trained, "once more, in the backward pass"
    shared = mode == "trunk"
    assert counts[1][0] - counts[0][0] == (0 if shared else trained)
    assert not any("forward" in vars(layer) for layer in layer_stack(saving.model.pretrained_model))


@pytest.mark.parametrize("mode", MODES)
def test_checkpointed_layers_keep_less(mode):
    kept = []
    for on in (False, True):
        trainer = trainer_of(
            policy_of(mode), gradient_checkpointing=on, ppo_epochs=1, **MODES[mode]
        )
        saved = {}

        def keep(x, saved=saved):
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        weights = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            trainer.step(**make_batch())
        kept.append(sum(n for place, n in saved.items() if place not in weights))
    assert kept[1] < 0.75 * kept[0]


def test_a_reference_that_is_made_of_an_adapter_is_how_that_began():
    found = []
    for made in (False, True):
        torch.manual_seed(0)  # of the value head
        model = AutoModelForCausalLMWithValueHead.from_pretrained(
            tiny_models.language_model(), peft_config=tiny_models.lora()
        )
        settings = {} if made else {"reference_adapter": "start"}
        reference = create_reference_model(model) if made else None
        trainer = trainer_of(model, reference, learning_rate=1e-2, **settings)
        stats, weights = stepped(trainer, 3)
        found.append(([x["objective/kl"] for x in stats], weights))
    assert abs(found[0][0][-1]) > 1e-3
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-5)
    for name, weight in found[0][1].items():
        if name in found[1][1]:
            torch.testing.assert_close(weight, found[1][1][name], rtol=0, atol=1e-5)
