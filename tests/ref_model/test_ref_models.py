"""References are frozen, cost what their mode says, and score as the policy did at the start."""

import copy

import pytest
import torch

from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, create_reference_model
from fastrl.learn.ref_model import (
    AdapterOffRefModel,
    CopyRefModel,
    NoRefModel,
    OffloadRefModel,
    StartAdapterRefModel,
    TrunkRefModel,
    choose_ref_model,
)
from fastrl.learn.ref_model.trunk_cache import Budget
from fastrl.models.scoring import ScoringRequest
from tests import seq2seq_models, tiny_models
from tests.models.conftest import FAMILIES, batch_of, counted, deep
from tests.ref_model.conftest import adapted, storage

pytestmark = [
    pytest.mark.filterwarnings(tiny_models.PEFT_WARNING),
    pytest.mark.filterwarnings("ignore:the LM head shares its weight with the embeddings"),
]

ROWS = torch.tensor([2, 3, 8, 9])


@pytest.fixture(scope="module")
def inputs():
    return {"input_ids": torch.stack(tiny_models.prompts(6, 6))}


@pytest.fixture
def policy():
    return tiny_models.policy("gpt2").train()


def request(inputs):
    return ScoringRequest(ROWS, inputs["input_ids"].roll(-1, 1).flatten()[ROWS])


def expected_logprobs(language_model, inputs):
    logits = language_model(**inputs).logits.flatten(0, 1)[ROWS]
    return logits.log_softmax(-1).gather(1, request(inputs).labels[:, None])[:, 0]


def choose(policy, ref_model=None, num_shared_layers=None, **settings):
    return choose_ref_model(PPOConfig(**settings), policy, ref_model, num_shared_layers)


def move(policy):
    """What training would do."""
    torch.manual_seed(2)
    with torch.no_grad():
        for p in policy.parameters():
            if p.requires_grad:
                p.add_(0.5 * torch.randn_like(p))


def test_a_reference_is_a_frozen_copy_in_evaluation_mode(policy):
    reference = create_reference_model(policy)
    assert not any(module.training for module in reference.modules())
    assert not any(p.requires_grad for p in reference.parameters())
    assert policy.training
    assert all(p.requires_grad for p in policy.parameters())
    copies = dict(reference.named_parameters())
    for name, p in policy.named_parameters():
        assert torch.equal(copies[name], p), name
        assert copies[name].data_ptr() != p.data_ptr(), name


def test_tied_embeddings_stay_tied_in_the_copy(policy):
    language_model = create_reference_model(policy).pretrained_model
    assert language_model.lm_head.weight is language_model.transformer.wte.weight


def test_a_copy_scores_without_gradients(policy, inputs):
    reference = CopyRefModel(tiny_models.policy("gpt2", perturbation=0.05))
    scores = reference.score(inputs, request(inputs))
    assert not scores.logprobs.requires_grad
    language_model = reference.model.pretrained_model
    torch.testing.assert_close(
        scores.logprobs, expected_logprobs(language_model, inputs), atol=1e-5, rtol=1e-5
    )
    with reference.as_policy() as model:
        assert model is reference.model
    assert not any(p.requires_grad for p in reference.model.parameters())


@pytest.mark.parametrize("mode", ["copy", "trunk", "offload", "adapter"])
def test_a_reference_stays_when_the_policy_moves(mode, inputs):
    policy = adapted() if mode == "adapter" else deep("gpt2")
    settings = {"num_shared_layers": 2} if mode == "trunk" else {}
    starts = {"reference_adapter": "start"} if mode == "adapter" else {}
    expected = policy(**inputs, scoring=request(inputs)).logprobs
    reference = choose(policy, reference=mode, **settings, **starts)
    move(policy)
    found = reference.score(inputs, request(inputs)).logprobs
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert (policy(**inputs, scoring=request(inputs)).logprobs - expected).abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trunk_runs_once_for_both_and_scores_as_a_copy_does(family):
    """No family falls back."""
    policy = deep(family)
    plain = copy.deepcopy(policy)
    reference = choose(policy, num_shared_layers=2)
    assert type(reference) is TrunkRefModel
    sequences = tiny_models.prompts(9, 9)
    ids = torch.stack(sequences)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    asked = ScoringRequest(torch.arange(3, 15), ids.flatten()[4:16])
    move(policy)
    expected = [m(**batch, scoring=asked).logprobs for m in (plain, policy)]
    reference.score(batch, asked)  # the head is chosen
    ours, theirs = counted(policy), counted(reference.model)
    reference._autocast = torch.no_grad
    cache = reference.trunk_cache(batch_of(sequences))
    shared = {**batch, "boundary": cache.padded([0, 1], False)}
    found = reference.score(shared, asked).logprobs, policy(**shared, scoring=asked).logprobs
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-5)
    assert (ours, theirs) == ({i: 18 for i in range(4)}, {2: 18, 3: 18})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trunk_is_stored_once(family):
    policy = deep(family)
    before = storage(policy)
    reference = choose(policy, num_shared_layers=3)
    top = list(policy.trunk.stack[3].parameters()) + list(policy.v_head.parameters())
    top += [p for p in policy.parameters() if p.requires_grad]
    own = sum({id(p): p.nbytes for p in top}.values())
    assert storage(policy) == before
    assert storage(policy, reference.model) == before + own
    assert own < before / 2
    assert not any(p.requires_grad for p in reference.model.parameters())


def test_a_tied_head_is_frozen_with_the_embeddings_and_that_is_said():
    policy = deep("gpt2")
    with pytest.warns(UserWarning, match=r"LM head shares.*frozen with them.*tie_word_embeddings"):
        reference = choose(policy, num_shared_layers=1)
    head = policy.get_output_embeddings().weight
    assert not head.requires_grad
    assert reference.model.get_output_embeddings().weight is head
    untied = deep("llama")
    choose(untied, num_shared_layers=1)
    assert untied.get_output_embeddings().weight.requires_grad


def test_a_model_that_runs_otherwise_in_parts_is_copied_whole_and_that_is_said(monkeypatch):
    policy = deep("gpt2")
    transformer = type(policy.pretrained_model.transformer)
    forward = transformer.forward

    def looks_at_its_first_layer(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        out.last_hidden_state = out.last_hidden_state * (1 + len(list(self.h[0].children())))
        return out

    monkeypatch.setattr(transformer, "forward", looks_at_its_first_layer)
    with pytest.warns(UserWarning, match=r"GPT2LMHeadModel is copied whole.*is off by"):
        reference = choose(policy, num_shared_layers=2)
    assert type(reference) is CopyRefModel
    assert policy.trunk is None
    assert all(p.requires_grad for p in policy.parameters())
    assert reference.trunk_cache(batch_of(tiny_models.prompts(3))) is None


def test_a_frozen_part_that_changed_is_noticed():
    policy = deep("gpt2")
    reference = choose(policy, num_shared_layers=2)
    reference.verify()
    move(policy)
    reference.verify()
    with torch.no_grad():
        policy.pretrained_model.transformer.h[1].mlp.c_fc.bias[0] += 1e-6
    with pytest.raises(ValueError, match="2 shared layers have changed since training began"):
        reference.verify()


def test_an_adapter_reference_scores_as_the_base_and_restores_the_adapter(inputs):
    model = adapted()
    reference = AdapterOffRefModel(model)
    before = model(**inputs)[0]
    base = tiny_models.language_model()
    torch.testing.assert_close(
        reference.score(inputs, request(inputs)).logprobs,
        expected_logprobs(base, inputs),
        atol=1e-5,
        rtol=1e-5,
    )
    torch.testing.assert_close(model(**inputs)[0], before)
    with reference.as_policy() as as_reference:
        torch.testing.assert_close(as_reference(**inputs)[0], base(**inputs).logits)
    torch.testing.assert_close(model(**inputs)[0], before)


@pytest.mark.parametrize("adapter", ["off", "start"])
def test_the_adapter_comes_back_after_an_error(adapter, inputs):
    model = adapted()
    before = model(**inputs)[0]
    next(p for name, p in model.named_parameters() if "lora_A" in name).requires_grad_(False)
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    wrong = request(inputs)._replace(rows=torch.tensor([999]))
    reference = choose(model, reference_adapter=adapter)
    reference.score(inputs, request(inputs))  # the head is chosen
    with pytest.raises(IndexError):
        reference.score(inputs, wrong)
    torch.testing.assert_close(model(**inputs)[0], before)
    after = {name: p.requires_grad for name, p in model.named_parameters()}
    assert {name: after[name] for name in trained} == trained
    assert not any(after[name] for name in after.keys() - trained.keys())


def test_the_starting_adapter_is_kept_beside_the_trained_one(inputs, tmp_path):
    model = adapted()
    start = model(**inputs)[0]
    before = storage(model)
    reference = choose(model, reference_adapter="start")
    assert type(reference) is StartAdapterRefModel
    own = [p for p in model.pretrained_model.parameters() if p.requires_grad]
    assert storage(model) - before == sum(p.nbytes for p in own)
    move(model)
    with reference.as_policy() as as_reference:
        torch.testing.assert_close(as_reference(**inputs)[0], start)
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.rglob("*fastrl_reference*")), "it is not the model's"
    loaded = AutoModelForCausalLMWithValueHead(tiny_models.language_model())
    from peft import PeftModel

    again = PeftModel.from_pretrained(loaded.pretrained_model, tmp_path)
    torch.testing.assert_close(again(**inputs).logits, model(**inputs)[0])


@pytest.mark.parametrize("trained", ["all", "lora_only", "norms"])
@pytest.mark.parametrize("adapter", ["off", "start"])
def test_an_adapter_reference_keeps_base_weights_that_are_trained(adapter, trained, inputs):
    model = adapted(**({} if trained == "norms" else {"bias": trained}))
    if trained == "norms":
        for name, p in model.pretrained_model.named_parameters():
            p.requires_grad_(p.requires_grad or "ln_1" in name)
    start = model if adapter == "start" else tiny_models.language_model()
    logits = start(**inputs)[0].detach().flatten(0, 1)[ROWS]
    expected = logits.log_softmax(-1).gather(1, request(inputs).labels[:, None])[:, 0]
    reference = choose(model, reference_adapter=adapter)
    move(model)
    moved = model(**inputs)[0]
    score = reference.score(inputs, request(inputs)).logprobs  # without PEFT's warning
    torch.testing.assert_close(score, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(model(**inputs)[0], moved)
    if adapter == "start":  # and follows the policy with them
        reference.follow(1.0)
        with reference.as_policy() as as_reference:
            torch.testing.assert_close(as_reference(**inputs)[0], moved)


def test_an_adapter_reference_has_no_dropout_while_the_policy_learns_with_it(inputs):
    torch.manual_seed(1)
    base = tiny_models.language_model(resid_pdrop=0.5)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(base, peft_config=tiny_models.lora())
    reference = choose(model.train())
    first = reference.score(inputs, request(inputs)).logprobs
    assert model.training
    again = reference.score(inputs, request(inputs)).logprobs
    assert torch.equal(first, again)
    expected = expected_logprobs(tiny_models.language_model(), inputs)
    torch.testing.assert_close(first, expected, atol=1e-5, rtol=1e-5)  # fp32, by another kernel


def test_adapters_cost_next_to_nothing():
    """As the share of an adapter in a model of ordinary width."""
    policy = adapted(r=1)
    before = storage(policy)
    assert storage(policy, choose(policy).model) == before
    choose(policy, reference_adapter="start")
    assert storage(policy) <= 1.02 * before


def test_an_offloaded_copy_visits_layer_by_layer(inputs):
    policy = deep("gpt2")
    reference = choose(policy, reference="offload")
    assert type(reference) is OffloadRefModel
    expected = policy(**inputs, scoring=request(inputs)).logprobs
    here, most = set(), [0]
    for unit in reference.units:
        load, unload = unit.load, unit.unload

        def loaded(device, unit=unit, load=load):
            here.add(id(unit))
            most[0] = max(most[0], len(here))
            load(device)

        def unloaded(unit=unit, unload=unload):
            here.discard(id(unit))
            unload()

        unit.load, unit.unload = loaded, unloaded
    found = reference.score(inputs, request(inputs)).logprobs
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert most[0] == 2, "one layer, beside embeddings and head"
    assert not here
    wrong = request(inputs)._replace(rows=torch.tensor([999]))
    with pytest.raises(IndexError):
        reference.score(inputs, wrong)
    assert not here
    with reference.as_policy() as model:
        assert len(here) == len(reference.units)
        model(**inputs)
        assert len(here) == len(reference.units)
    assert not here


@pytest.mark.skipif(not torch.cuda.is_available(), reason="what lies where needs two places")
@pytest.mark.gpu
def test_an_offloaded_copy_leaves_the_device_as_it_was(inputs):
    from accelerate import Accelerator

    policy = deep("gpt2").cuda()
    reference = choose(policy, reference="offload")
    reference.place(policy, Accelerator())
    on_device = {k: v.cuda() for k, v in inputs.items()}
    asked = ScoringRequest(*(x.cuda() for x in request(inputs)[:2]))
    expected = policy(**on_device, scoring=asked).logprobs
    found = reference.score(on_device, asked).logprobs
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert all(p.device.type == "cpu" for p in reference.model.parameters())


def test_without_a_reference_nothing_is_known(inputs):
    reference = choose(tiny_models.policy("gpt2"), init_kl_coef=0.0)
    assert type(reference) is NoRefModel
    assert reference.score(inputs, request(inputs)).logprobs.isnan().all()
    assert reference.model is None
    with pytest.raises(ValueError, match="no reference to generate with"):
        reference.as_policy()


@pytest.mark.parametrize("weight", [1.0, 0.25])
@pytest.mark.parametrize("mode", ["copy", "trunk", "offload", "adapter"])
def test_a_reference_moves_towards_the_policy(mode, weight):
    policy = adapted() if mode == "adapter" else deep("gpt2")
    extra = {"trunk": {"num_shared_layers": 2}, "adapter": {"reference_adapter": "start"}}
    reference = choose(policy, reference=mode, **extra.get(mode, {}))
    trained = {name: p.clone() for name, p in policy.named_parameters() if p.requires_grad}
    move(policy)
    reference.follow(weight)
    moved = dict(policy.named_parameters())
    theirs = dict((reference.model or policy).named_parameters())
    compared = 0
    for name, before in trained.items():
        if mode == "adapter":
            if ".default." not in name:
                continue
            name, own = name, name.replace(".default.", ".fastrl_reference.")
        else:
            own = name
        expected = weight * moved[name].double() + (1 - weight) * before.double()
        torch.testing.assert_close(theirs[own].double(), expected, atol=1e-6, rtol=1e-6)
        compared += 1
    assert compared > 0
    reference.verify()


def test_auto_takes_what_costs_least_and_says_why():
    def chosen(policy, *args, **settings):
        reference = choose(policy, *args, **settings)
        assert reference.why
        return reference.mode

    assert chosen(deep("gpt2")) == "copy"
    assert chosen(deep("gpt2"), None, 2) == "trunk"
    assert chosen(deep("gpt2"), num_shared_layers=2) == "trunk"
    assert chosen(adapted()) == "adapter"
    assert chosen(deep("gpt2"), init_kl_coef=0.0) == "none"
    assert chosen(deep("gpt2"), deep("gpt2"), init_kl_coef=0.0) == "copy"
    policy = deep("gpt2")
    assert chosen(policy, create_reference_model(policy, num_shared_layers=1)) == "trunk"


@pytest.mark.parametrize(("kind", "arguments", "settings", "message"), [
    ("plain", {}, {"reference": "adapter"}, "needs a PEFT model"),
    ("adapted", {}, {"reference": "copy"}, "is not for a PEFT model: choose 'adapter'"),
    ("adapted", {}, {"num_shared_layers": 1}, "is for models without an adapter"),
    ("plain", {}, {"reference": "none"}, "init_kl_coef is 0.2: set it to 0"),
    ("plain", {}, {"reference": "trunk"}, "needs num_shared_layers"),
    ("plain", {}, {"reference": "copy", "num_shared_layers": 1}, "num_shared_layers=1:"),
    ("plain", {"num_shared_layers": -1}, {}, "num_shared_layers must lie between 1 and 1"),
    ("plain", {"num_shared_layers": 2}, {}, "num_shared_layers must lie between 1 and 1"),
    ("given", {}, {"reference": "trunk"}, "ref_model shares no layers with model"),
    ("given", {}, {"reference": "none", "init_kl_coef": 0.0}, "but ref_model was given"),
    ("adapted", {}, {"sync_ref_every": 4}, "reference='adapter' has no weights of its own"),
    ("plain", {}, {"sync_ref_every": 4, "init_kl_coef": 0.0}, "reference='none' has no"),
    ("vocabulary", {}, {}, "ref_model has vocab_size=50, model"),
    ("eos", {}, {}, "ref_model has eos_token_id=7, model"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_changes(kind, arguments, settings, message):
    policy = adapted() if kind == "adapted" else tiny_models.policy("llama")
    others = {"given": {}, "vocabulary": {"vocab_size": 50}, "eos": {"eos_token_id": 7}}
    if kind in others:
        arguments = {**arguments, "ref_model": tiny_models.policy("llama", **others[kind])}
    names = [name for name, p in policy.named_parameters() if p.requires_grad]
    with pytest.raises(ValueError, match=message):
        choose(policy, **arguments, **settings)
    assert [name for name, p in policy.named_parameters() if p.requires_grad] == names
    assert policy.trunk is None


def test_the_reference_of_an_adapter_has_its_base():
    policy = adapted()
    reference = create_reference_model(policy)
    theirs = dict(reference.named_parameters())
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    for name, p in policy.named_parameters():
        assert (theirs[name] is p) == (name not in trained)
        assert torch.equal(theirs[name], p)
        assert not theirs[name].requires_grad
    assert {name for name, p in policy.named_parameters() if p.requires_grad} == trained


def test_budgets_come_from_the_configuration():
    policy = deep("gpt2")
    reference = choose(policy, num_shared_layers=2, trunk_cache_gib=0.5, trunk_cache_host_gib=1.5)
    assert reference._budget == Budget(2**29, 3 * 2**29)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_plain_model_is_copied_and_frozen(family):
    model = tiny_models.language_model(family).train()
    reference = create_reference_model(model)
    assert type(reference) is type(model)
    assert not any(m.training for m in reference.modules())
    copies = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        assert torch.equal(copies[name], p), name
        assert copies[name].data_ptr() != p.data_ptr(), name
        assert p.requires_grad
        assert not copies[name].requires_grad


def test_a_plain_model_shares_its_bottom_layers_with_its_copy():
    model = tiny_models.language_model("llama", num_hidden_layers=3)
    reference = create_reference_model(model, num_shared_layers=2)
    theirs = dict(reference.named_parameters())
    shared = {name for name, p in model.named_parameters() if theirs[name] is p}
    assert shared == {name for name, p in model.named_parameters() if not p.requires_grad}
    bottom = ("model.embed_tokens.", "model.layers.0.", "model.layers.1.")
    assert shared == {name for name in theirs if name.startswith(bottom)}
    with pytest.raises(ValueError, match="num_shared_layers must lie between 1 and 2, got 3"):
        create_reference_model(
            tiny_models.language_model("llama", num_hidden_layers=3), num_shared_layers=3
        )


def test_a_plain_encoder_decoder_is_copied_whole():
    model = seq2seq_models.language_model("t5")
    assert not any(p.requires_grad for p in create_reference_model(model).parameters())
    with pytest.raises(ValueError, match="num_shared_layers=1: an encoder–decoder shares no"):
        create_reference_model(model, num_shared_layers=1)


def test_what_is_no_language_model_has_no_reference():
    with pytest.raises(TypeError, match="a policy or a transformers model, got Linear"):
        create_reference_model(torch.nn.Linear(2, 2))
