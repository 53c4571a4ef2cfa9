"""Which models roll out in the engine, and what the others are told."""

import warnings

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fastrl import AutoModelForCausalLMWithValueHead, GenerateEngine, SamplingParams
from fastrl.rollout import RolloutEngine, choose_engine
from fastrl.rollout.attention import DecodeAttention, PrefillAttention
from fastrl.rollout.model_runner import ModelRunner
from fastrl.rollout.self_check import UnsupportedModel
from tests import seq2seq_models, tiny_models
from tests.golden import tiny

pytestmark = pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)


def choose(model, **options):
    return choose_engine(model, tiny.tokenizer(), **options)


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_families_with_the_interface_run_in_the_engine(family, bare):
    model = tiny_models.language_model(family) if bare else tiny_models.policy(family)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = choose(model, max_slots=3, max_length=40)
    assert isinstance(engine, RolloutEngine)
    assert (engine.max_slots, engine.max_length) == (3, 40)


def test_an_adapter_runs_in_the_engine():
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        tiny_models.language_model(), peft_config=tiny_models.lora()
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?!.*is_gradient_checkpointing)")
        assert isinstance(choose(model), RolloutEngine)


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_runs_in_the_engine(autocast):
    model = tiny_models.policy("qwen2")
    if not autocast:
        model.pretrained_model.to(torch.bfloat16)
    context = (lambda: torch.autocast("cpu", torch.bfloat16)) if autocast else None
    assert isinstance(choose(model, **({"autocast": context} if context else {})), RolloutEngine)


@pytest.mark.parametrize("family", tiny_models.WITHOUT_INTERFACE)
def test_models_without_the_interface_fall_back_and_say_so(family):
    model = tiny_models.policy(family)
    name = type(model.pretrained_model).__name__
    with pytest.warns(UserWarning, match=f"{name}: rollouts go through model.generate.*interface"):
        engine = choose(model, max_slots=3)
    assert isinstance(engine, GenerateEngine)
    assert engine.batch_size == 3
    out = engine.generate(tiny_models.prompts(2, 5), SamplingParams(max_new_tokens=3, seed=0))
    assert out.logprobs is not None
    assert out.values is not None
    with pytest.warns(UserWarning, match="rollouts go through model.generate"):
        without = choose_engine(model, None, max_slots=3)  # the model names the tokens that end
    again = without.generate(tiny_models.prompts(2, 5), SamplingParams(max_new_tokens=3, seed=0))
    assert all(map(torch.equal, again.sequences, out.sequences))


def test_the_model_under_an_adapter_is_the_one_that_is_named():
    lora = tiny_models.lora(target_modules=["query_key_value"], fan_in_fan_out=False)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        tiny_models.language_model("bloom"), peft_config=lora
    ).eval()
    with pytest.warns(UserWarning, match="^BloomForCausalLM: rollouts go through model.generate"):
        engine = choose(model)
    (prompt,) = tiny_models.prompts(4)
    out = engine.generate([prompt], SamplingParams(max_new_tokens=5, temperature=0))
    ids = torch.cat([prompt, out.sequences[0]])[None]
    logits, _, values = model(ids)
    expected = logits[0, 3:-1].log_softmax(-1).gather(1, ids[0, 4:, None])[:, 0]
    torch.testing.assert_close(out.logprobs[0], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(out.values[0], values[0, 3:-1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_dynamic_rope_falls_back(kind):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}
        rope |= {"original_max_position_embeddings": 24}
    model = tiny_models.policy("llama", rope_parameters=rope)
    with pytest.warns(UserWarning, match=rf"LlamaForCausalLM.*because its RoPE \({kind}\)"):
        assert isinstance(choose(model), GenerateEngine)


def test_dynamic_rope_of_one_kind_of_layer_falls_back():
    model = tiny_models.policy("gemma3")
    rope = model.config.rope_parameters
    rope["full_attention"] = {**rope["full_attention"], "rope_type": "dynamic"}
    with pytest.warns(UserWarning, match=r"because its RoPE \(dynamic\)"):
        assert isinstance(choose(model), GenerateEngine)


@pytest.mark.parametrize("family", seq2seq_models.FAMILIES)
def test_an_encoder_decoder_falls_back_without_a_warning(family):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(choose(seq2seq_models.policy(family)), GenerateEngine)
    with pytest.raises(ValueError, match=r"replay_routing .* an encoder–decoder's experts"):
        choose(seq2seq_models.policy(family), keep_experts=True)


@pytest.fixture
def untouched(monkeypatch):
    """No engine looks at the weights."""

    def refuse(*args, **kwargs):
        raise AssertionError("an engine looked at sharded weights")

    monkeypatch.setattr(ModelRunner, "__init__", refuse)


def sharded(model, mesh, layers=True):
    language_model = getattr(model, "pretrained_model", model)
    base = language_model.base_model
    for layer in (base.h if hasattr(base, "h") else base.layers) if layers else ():
        fully_shard(layer, mesh=mesh)
    fully_shard(language_model, mesh=mesh)
    return model


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_weights_that_fsdp_shards_fall_back_and_generate(family, bare, mesh, untouched):
    """The same responses and figures as of the whole weights."""
    make = tiny_models.language_model if bare else tiny_models.policy
    prompts, params = tiny_models.prompts(2, 5), SamplingParams(max_new_tokens=4, temperature=0)
    whole = GenerateEngine(make(family), tiny.tokenizer(), scores=True)
    expected = whole.generate(prompts, params)
    model = sharded(make(family), mesh)
    with pytest.warns(UserWarning, match=r"because its weights are sharded \(.* is a DTensor\)"):
        engine = choose(model, max_slots=3)
    assert isinstance(engine, GenerateEngine)
    assert engine.batch_size == 3
    for _ in range(2):
        out = engine.generate(prompts, params)
        assert [s.tolist() for s in out.sequences] == [s.tolist() for s in expected.sequences]
        for name in ("logprobs", "entropies", *([] if bare else ["values"])):
            for a, b in zip(getattr(out, name), getattr(expected, name), strict=True):
                torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_weights_that_fsdp_has_not_put_away_again_fall_back(mesh, untouched):
    model = sharded(tiny_models.policy("llama"), mesh, layers=False)
    model.generate(torch.tensor([[5, 6]]), max_new_tokens=1, do_sample=False)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    expected = r"because its weights are sharded \(by FSDP: FSDPLlamaForCausalLM\)"
    with pytest.warns(UserWarning, match=expected):
        assert isinstance(choose(model), GenerateEngine)


@pytest.mark.filterwarnings("ignore:.*NO_SHARD")
def test_weights_of_the_first_fsdp_fall_back(mesh, untouched):
    model = tiny_models.language_model("llama")
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.warns(UserWarning, match=r"weights are sharded \(by FSDP: FullyShardedDataPar"):
        assert isinstance(choose(model), GenerateEngine)


@pytest.mark.parametrize("where", ["pretrained_model.lm_head.weight", "v_head.summary.weight"])
def test_one_sharded_weight_is_enough(where, mesh, untouched):
    model = tiny_models.policy("llama")
    module = model.get_submodule(where.removesuffix(".weight"))
    module.weight = torch.nn.Parameter(distribute_tensor(module.weight.data, mesh, [Shard(0)]))
    expected = f"LlamaForCausalLM.*because its weights are sharded \\({where} is a DTensor\\)"
    with pytest.warns(UserWarning, match=expected):
        assert isinstance(choose(model), GenerateEngine)


@pytest.mark.parametrize("attribute", ["ds_id", "ds_status"])
def test_weights_that_deepspeed_shards_fall_back(attribute, untouched):
    """As ZeRO-3 leaves them: without elements, and marked."""
    model = tiny_models.policy("llama")
    for i, parameter in enumerate(model.parameters()):
        parameter.data = torch.empty(0)
        setattr(parameter, attribute, i)
    with pytest.warns(
        UserWarning, match=r"because its weights are sharded \(.*DeepSpeed's ZeRO-3\)"
    ):
        assert isinstance(choose(model), GenerateEngine)


@pytest.mark.parametrize("where", [PrefillAttention, DecodeAttention])
def test_wrong_numbers_fall_back(where, monkeypatch):
    attend = where.attend
    monkeypatch.setattr(where, "attend", lambda *args: attend(*args) * 1.01)
    with pytest.warns(UserWarning, match=r"GPT2LMHeadModel.*off by .* from a plain forward"):
        assert isinstance(choose(tiny_models.policy()), GenerateEngine)


def test_numbers_may_be_a_little_off_in_bf16(monkeypatch):
    attend = DecodeAttention.attend
    monkeypatch.setattr(DecodeAttention, "attend", lambda *args: attend(*args) * 1.01)
    model = tiny_models.policy()
    model.pretrained_model.to(torch.bfloat16)
    assert isinstance(choose(model), RolloutEngine)
    monkeypatch.setattr(DecodeAttention, "attend", lambda *args: -attend(*args))
    with pytest.warns(UserWarning, match=r"off by .*more than 5e-02"):
        assert isinstance(choose(model), GenerateEngine)


def test_an_attention_that_the_engine_does_not_know_falls_back():
    model = tiny_models.policy("llama")
    model.pretrained_model.model.layers[1].self_attn.is_causal = False
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM.*LlamaAttention is not causal"):
        assert isinstance(choose(model), GenerateEngine)


@pytest.mark.parametrize("fails", [False, True])
def test_the_check_leaves_nothing_behind(fails, monkeypatch):
    model = tiny_models.policy("llama", attention_dropout=0.5).train()
    model.pretrained_model.config._attn_implementation = "eager"
    if fails:
        monkeypatch.setattr(DecodeAttention, "attend", None)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    weights = {name: p.clone() for name, p in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = choose(model)
    assert isinstance(engine, GenerateEngine) == fails
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert model.pretrained_model.config._attn_implementation == "eager"
    assert not model.pretrained_model.lm_head._forward_pre_hooks
    assert all(torch.equal(p, weights[name]) for name, p in model.state_dict().items())
    assert not any(p.grad is not None for p in model.parameters())


def test_what_the_engine_refuses_is_an_error():
    with pytest.raises(ValueError, match="max_slots must be at least 1"):
        choose(tiny_models.policy(), max_slots=0)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        GenerateEngine(tiny_models.policy(), tiny.tokenizer(), 0)


@pytest.mark.parametrize("family", tiny_models.WITHOUT_INTERFACE)
def test_the_engine_itself_refuses_what_it_cannot_run(family):
    with pytest.raises(UnsupportedModel, match=r"because it does not support.*use GenerateEngine"):
        RolloutEngine(tiny_models.policy(family), tiny.tokenizer())


def test_the_engine_itself_refuses_wrong_numbers(monkeypatch):
    attend = DecodeAttention.attend
    monkeypatch.setattr(DecodeAttention, "attend", lambda *args: attend(*args) * 1.01)
    with pytest.raises(UnsupportedModel, match=r"off by .* from a plain forward.*GenerateEngine"):
        RolloutEngine(tiny_models.policy(), tiny.tokenizer())


def test_broken_weights_are_no_fault_of_the_engine():
    model = tiny_models.language_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    made = RolloutEngine(model, tiny.tokenizer())
    assert made.generate(tiny_models.prompts(3)).finish_reasons == ["nan"]


def test_an_encoder_decoder_is_refused():
    with pytest.raises(UnsupportedModel, match=r"encoder–decoder.*GenerateEngine"):
        RolloutEngine(seq2seq_models.policy(seq2seq_models.FAMILIES[0]), tiny.tokenizer())
