"""Base models in four bits under LoRA adapters: every trainer learns on them and keeps them."""

import json
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from fastrl import (
    AutoModelForCausalLMWithValueHead,
    PPOConfig,
    PPOTrainer,
    cli,
    create_reference_model,
)
from fastrl.models import CausalLMPolicy
from fastrl.models.load import load_language_model, load_reward_model, with_adapter
from fastrl.models.quantised import BASE_FILE, four_bit_config, scales, settle
from fastrl.models.utils import check_trainable, evaluating, model_identity
from fastrl.rollout import GenerateEngine, RolloutEngine, SamplingParams
from fastrl.rollout.self_check import _is_exact
from fastrl.run.model_card import model_card
from fastrl.trainers.ppo.setup import precision_of, prepared
from tests import tiny_models
from tests.alignment import conftest as alignment
from tests.golden import tiny
from tests.trainers import conftest as trainers

bnb = pytest.importorskip("bitsandbytes")

pytestmark = [
    pytest.mark.filterwarnings(tiny_models.PEFT_WARNING),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
]
make_sft, make_reward = trainers.make_sft, trainers.make_reward
make_trainer = alignment.make_trainer

# 64 wide, so that bitsandbytes can rearrange weights for inference on CPUs that have AVX512-BF16.
WIDE = {
    "llama": {"hidden_size": 64, "intermediate_size": 128},
    "gpt2": {"n_embd": 64},  # with biases, and weights that are transposed
}
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}
FAMILIES = tuple(WIDE)


@pytest.fixture(autouse=True)
def as_with_avx512_bf16(monkeypatch):
    """On such a CPU one evaluation of a layer that is not settled rearranges its weight for good,
    in plain torch; only the product with it needs the instructions."""
    monkeypatch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Whole models with their tokenizer, by family."""
    found = {}
    for family, changes in WIDE.items():
        found[family] = tmp_path_factory.mktemp(family)
        tiny_models.language_model(family, **changes).save_pretrained(found[family])
        tiny.tokenizer().save_pretrained(found[family])
    return found


def lora(family="llama", **changes):
    settings = {"target_modules": TARGETS[family], "fan_in_fan_out": False, **changes}
    return tiny_models.lora(**settings)


@pytest.fixture
def load(folders):
    """A quantised language model, with an adapter unless told otherwise."""

    def of(family="llama", dtype=torch.float32, adapter=True, nested=False, **changes):
        torch.manual_seed(3)
        config = four_bit_config(dtype, nested=nested)
        model = load_language_model(folders[family], dtype=dtype, quantization_config=config)
        return with_adapter(model, lora(family, **changes)) if adapter else model

    return of


@pytest.fixture
def policy(load):
    def of(kind=AutoModelForCausalLMWithValueHead, **given):
        return kind.from_pretrained(load(**given))

    return of


def frozen(model):
    """Copies of all that is not trained, scales of four-bit weights included."""
    weights = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    return {name: x.detach().clone() for name, x in {**weights, **scales(model)}.items()}


def trained(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_same(before, after):
    assert before.keys() == after.keys()
    for name, x in before.items():
        assert x.dtype == after[name].dtype, name
        assert torch.equal(x, after[name]), name


def assert_only_the_adapter_moved(model, base, adapter):
    assert any("lora_A" in name for name in adapter)
    assert_same(base, frozen(model))
    assert all(not torch.equal(x, adapter[name]) for name, x in trained(model).items())


def four_bit_layers(model):
    return [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]


def ppo(model, **settings):
    settings = {"batch_size": 4, "mini_batch_size": 2, "learning_rate": 1e-3, **settings}
    return PPOTrainer(PPOConfig(**settings), model, tokenizer=tiny.tokenizer())


def longest_word(prompts, completions, completion_ids, **columns):
    return [float(max(ids, default=0)) / 97 for ids in completion_ids]


PROMPTS = ["w5 w6", "w7 w8 w9 w10", "w11", "w12 w13 w14"]
SETTINGS = {
    "ppo": {},
    "grpo": {"advantage": "grpo", "group_size": 2, "kl_in": "loss", "adap_kl_ctrl": False},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", SETTINGS)
def test_ppo_and_grpo_train_and_reuse_the_rollouts_log_probs(method, family, policy):
    kind = AutoModelForCausalLMWithValueHead if method == "ppo" else CausalLMPolicy
    model = policy(kind, family=family)
    trainer = ppo(model, **SETTINGS[method])
    base, adapter = frozen(model), trained(model)
    result = trainer.train(
        longest_word, steps=2, prompts=PROMPTS, generation_kwargs={"max_new_tokens": 6},
        eval_prompts=PROMPTS[:2], progress=False,
    )  # fmt: skip
    for stats in result.history:
        assert stats["rollout/reused"] == 1
        # Of log-probs and values in fp32: what the audit allows.
        assert stats["rollout/audit_max"] < 1e-4
    assert_only_the_adapter_moved(model, base, adapter)
    assert trainer.reference.mode == "adapter"


def test_the_audit_of_layers_that_compute_in_bf16_is_that_of_bf16(policy):
    trainer = ppo(policy(dtype=torch.bfloat16))
    assert trainer.scorer.precision == torch.bfloat16
    base = frozen(trainer._unwrapped)
    result = trainer.train(
        longest_word,
        steps=1,
        prompts=PROMPTS,
        generation_kwargs={"max_new_tokens": 6},
        progress=False,
    )
    assert result.history[0]["rollout/audit_mean"] < 5e-3
    assert_same(base, frozen(trainer._unwrapped))


@pytest.mark.parametrize("kind", ["sft", "reward", "dpo", "online"])
def test_other_trainers_train_on_a_four_bit_base(
    kind, make_sft, make_reward, make_trainer, load, folders
):
    if kind == "reward":
        config = four_bit_config()
        model = load_reward_model(folders["llama"], quantization_config=config)
        trainer = make_reward(model, peft_config=lora(task_type="SEQ_CLS"), max_steps=3)
    elif kind == "sft":
        trainer = make_sft(load(adapter=False), peft_config=lora(), max_steps=3)
    else:
        task = {} if kind == "dpo" else {"task": "online-pairwise"}
        trainer = make_trainer("dpo", load(), epochs=3, **task)
    model = trainer.model
    base, adapter = frozen(model), trained(model)
    assert four_bit_layers(model)
    if kind in ("sft", "reward"):
        trainer.evaluate(trainers.texts(4) if kind == "sft" else trainers.pairs(4))
    trainer.train()
    assert_only_the_adapter_moved(model, base, adapter)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("nested", [False, True])
def test_gradients_are_those_of_the_dequantised_weights(family, nested, load):
    """Also in evaluation mode, after forwards without gradients, and with recomputed layers."""
    model = load(family, nested=nested)
    plain = load(family, nested=nested)
    for module in list(plain.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, bnb.nn.Linear4bit):
                weight = bnb.functional.dequantize_4bit(child.weight.data, child.weight.quant_state)
                linear = nn.Linear(*reversed(weight.shape), bias=child.bias is not None)
                linear.weight.data = weight
                if child.bias is not None:
                    linear.bias.data = child.bias.data
                setattr(module, name, linear.requires_grad_(False))
    ids = torch.arange(3, 23).view(2, 10)

    def gradients(of):
        of.zero_grad()
        of(input_ids=ids, labels=ids).loss.backward()
        return {n: p.grad.clone() for n, p in of.named_parameters() if p.requires_grad}

    expected = gradients(plain.eval())

    def check():
        for name, x in gradients(model).items():
            # Products are those of the same fp32 numbers: sums in another order.
            torch.testing.assert_close(x, expected[name], rtol=1e-4, atol=1e-6, msg=name)

    check()
    with torch.no_grad(), evaluating(model):
        model(input_ids=ids)
    check()
    model.eval()
    check()
    base = model.get_base_model()
    # Its name since transformers 5.23; the older one is deprecated there.
    getattr(base, "activation_checkpointing_enable", base.gradient_checkpointing_enable)()
    model.enable_input_require_grads()
    model.train()
    check()


def test_recomputed_activations_give_the_same_update(policy):
    batch = {
        "queries": [torch.tensor([5, 6, 7]), torch.tensor([8, 9])] * 2,
        "responses": [torch.tensor([10, 11, 12]), torch.tensor([13, 14, 15, 16])] * 2,
        "scores": [torch.tensor(x) for x in (0.5, -1.0, 2.0, 0.0)],
    }
    found = []
    for checkpointing in (False, True):
        trainer = ppo(policy(), gradient_checkpointing=checkpointing)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the KL of responses that the policy did not sample
            trainer.step(**batch)
        found.append(trained(trainer._unwrapped))
    assert_same(*found)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_trainers_that_recompute_activations_take_the_same_steps(
    kind, make_sft, make_trainer, load
):
    found = []
    for checkpointing in (False, True):
        settings = {"gradient_checkpointing": checkpointing, "max_steps": 2}
        torch.manual_seed(3)  # of the adapter
        if kind == "sft":
            trainer = make_sft(load(adapter=False), peft_config=lora(), **settings)
        else:
            trainer = make_trainer("dpo", load(adapter=False), peft_config=lora(), **settings)
        trainer.train()
        found.append(trained(trainer.model))
    assert_same(*found)


def test_the_path_of_a_model_may_be_given_with_its_quantisation(make_sft, folders):
    settings = {"model_init_kwargs": {"quantization_config": four_bit_config()}}
    trainer = make_sft(str(folders["llama"]), peft_config=lora(), **settings)
    base, adapter = frozen(trainer.model), trained(trainer.model)
    trainer.train()
    assert_only_the_adapter_moved(trainer.model, base, adapter)


def test_a_model_that_ran_before_is_refused_where_its_weights_are_rearranged(folders):
    config = four_bit_config()
    model = AutoModelForCausalLM.from_pretrained(folders["llama"], quantization_config=config)
    with torch.no_grad():
        model(input_ids=torch.arange(3, 9).view(1, 6))
    with pytest.raises(ValueError, match=r"q_proj is in bitsandbytes' layout for inference.*again"):
        CausalLMPolicy.from_pretrained(model, peft_config=lora())


def test_a_bias_is_cast_before_the_first_forward(load):
    """bitsandbytes would cast it as the layer runs, after checksums are taken."""
    model = load("gpt2", torch.bfloat16)
    biases = [layer.bias for layer in four_bit_layers(model)]
    assert {bias.dtype for bias in biases} == {torch.bfloat16}
    before = frozen(model)
    model(input_ids=torch.arange(3, 9).view(1, 6))
    assert_same(before, frozen(model))


def test_what_is_not_quantised_is_in_fp32_and_the_value_head_is(policy):
    model = policy(dtype=torch.bfloat16)
    plain = [p for p in model.parameters() if p.is_floating_point()]
    assert {p.dtype for p in plain} == {torch.float32}
    assert {p.dtype for p in model.v_head.parameters()} == {torch.float32}


def test_the_engine_generates_what_generate_does(load):
    model = load()
    prompts = tiny_models.prompts(3, 7, 2)
    params = SamplingParams(max_new_tokens=6, temperature=0)
    engines = (RolloutEngine(model, tiny.tokenizer()), GenerateEngine(model, tiny.tokenizer()))
    one, other = (engine.generate(prompts, params) for engine in engines)
    for a, b in zip(one.sequences, other.sequences, strict=True):
        assert a.tolist() == b.tolist()


def test_the_engines_self_check_is_as_strict_as_the_layers_compute(load):
    for dtype in (torch.float32, torch.bfloat16):
        engine = RolloutEngine(load(dtype=dtype), tiny.tokenizer())
        assert _is_exact(engine) is (dtype == torch.float32)


def test_identity_tells_weights_with_other_scales(load):
    model, other = load(), load()
    assert model_identity(model, None) == model_identity(other, None)
    four_bit_layers(other)[0].weight.quant_state.absmax.mul_(2)
    assert model_identity(model, None) != model_identity(other, None)


@pytest.mark.parametrize("kind", ["ppo", "sft", "dpo"])
def test_a_saved_adapter_loads_on_the_same_four_bit_base(
    kind, policy, load, make_sft, make_trainer, tmp_path
):
    """Bit by bit, also where the type of weights is another by default; and is trained on."""
    folder = tmp_path / "model"
    if kind == "ppo":
        trainer = ppo(policy(dtype=torch.bfloat16, nested=True))
        trainer.step(*(list(x) for x in (_IDS, _IDS, torch.arange(4.0))))
        trainer.save_pretrained(folder)
        model = trainer._unwrapped.pretrained_model
    else:
        base = load(dtype=torch.bfloat16, nested=True)
        trainer = make_sft(base) if kind == "sft" else make_trainer("dpo", base)
        trainer.train()
        trainer.save_model(str(folder))
        model = getattr(trainer.model, "pretrained_model", trainer.model)
    assert {p.name for p in folder.iterdir() if p.suffix == ".safetensors"} <= {
        "adapter_model.safetensors",
        "value_head.safetensors",
    }
    loaded = load_language_model(folder, trainable=True)
    assert_same(frozen(model), frozen(loaded))
    assert_same(trained(model), trained(loaded))
    ids = torch.arange(3, 13).view(1, 10)
    with torch.no_grad(), evaluating(model), evaluating(loaded):
        assert torch.equal(model(input_ids=ids).logits, loaded(input_ids=ids).logits)
    before = trained(loaded)
    again = make_sft(loaded)
    again.train()
    assert_only_the_adapter_moved(again.model, frozen(model), before)
    whole = load_language_model(folder, quantization_config=None)
    assert not four_bit_layers(whole)


_IDS = tuple(torch.tensor(x) for x in ([5, 6], [7, 8, 9], [10, 11], [12, 13, 14]))


def test_a_run_resumes_on_its_base_and_on_no_other(policy, tmp_path):
    def run(steps, resume=False, **given):
        trainer = ppo(policy(**given))
        trainer.train(
            longest_word, steps=steps, prompts=PROMPTS, generation_kwargs={"max_new_tokens": 6},
            output=tmp_path / "run", save_every=1, resume=resume, progress=False,
        )  # fmt: skip
        return trained(trainer._unwrapped)

    run(1)
    resumed = run(2, resume=True)
    with pytest.raises(ValueError, match="whose frozen weights differ:"):
        run(3, resume=True, nested=True)
    trainer = ppo(policy())
    trainer.train(
        longest_word,
        steps=2,
        prompts=PROMPTS,
        generation_kwargs={"max_new_tokens": 6},
        progress=False,
    )
    assert_same(trained(trainer._unwrapped), resumed)


def test_a_reference_of_four_bits_beside_a_whole_policy(policy, folders):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folders["llama"])
    reference = AutoModelForCausalLMWithValueHead(policy(adapter=False).pretrained_model)
    settings = {"batch_size": 4, "mini_batch_size": 4, "learning_rate": 1e-4}
    made = {"ref_model": reference, "tokenizer": tiny.tokenizer()}
    for mode in ("offload", "trunk"):
        with pytest.raises(ValueError, match=rf"reference='{mode}'.*cannot have four-bit weights"):
            PPOTrainer(PPOConfig(reference=mode, **settings), model, **made)
    with pytest.raises(ValueError, match="follows the policy cannot have four-bit weights"):
        PPOTrainer(PPOConfig(sync_ref_every=1, **settings), model, **made)
    trainer = PPOTrainer(PPOConfig(**settings), model, **made)
    before = frozen(reference)
    stats = trainer.step(*(list(x) for x in (_IDS, _IDS, torch.arange(4.0))))
    assert stats["objective/kl"] != 0  # the policy's weights are not rounded
    assert_same(before, frozen(reference))


@pytest.mark.parametrize("mode", ["copy", "offload"])
def test_a_whole_reference_beside_a_policy_on_four_bits(mode, policy, folders):
    reference = AutoModelForCausalLMWithValueHead.from_pretrained(folders["llama"])
    config = PPOConfig(batch_size=4, mini_batch_size=4, learning_rate=1e-4, reference=mode)
    trainer = PPOTrainer(config, policy(), reference, tiny.tokenizer())
    stats = trainer.step(*(list(x) for x in (_IDS, _IDS, torch.arange(4.0))))
    assert stats["objective/kl"] != 0  # the reference's weights are not rounded


@pytest.mark.parametrize("mode", ["copy", "trunk", "offload"])
def test_references_with_weights_of_their_own_are_refused(mode, policy):
    layers = {"num_shared_layers": 1} if mode == "trunk" else {}
    with pytest.raises(ValueError, match=rf"reference='{mode}'.*'adapter'"):
        ppo(policy(), reference=mode, **layers)


def test_without_an_adapter_training_is_refused_with_the_remedy(
    load, policy, make_sft, make_trainer
):
    message = r"four-bit weights cannot be trained: train an adapter .*--lora-r"
    model = load(adapter=False)
    with pytest.raises(ValueError, match=message):
        check_trainable(model)
    with pytest.raises(ValueError, match=message):
        make_sft(model)
    with pytest.raises(ValueError, match=message):
        make_trainer("dpo", model)
    with pytest.raises(ValueError, match=message):
        ppo(policy(adapter=False))
    with pytest.raises(ValueError, match="num_shared_layers=1: layers cannot have four-bit"):
        create_reference_model(model, num_shared_layers=1)


def test_shares_of_fsdp_are_refused(policy):
    accelerator = SimpleNamespace(is_fsdp2=True)
    with pytest.raises(ValueError, match="FSDP spreads cannot have four-bit weights"):
        prepared(accelerator, policy(), None)


def test_a_base_whose_own_files_have_four_bits(load, tmp_path):
    load(adapter=False, nested=True).save_pretrained(tmp_path / "base")
    model = load_language_model(tmp_path / "base")
    assert_same(frozen(load(nested=True)), frozen(with_adapter(model, lora())))
    with pytest.raises(ValueError, match="four-bit weights cannot be trained"):
        check_trainable(load_language_model(tmp_path / "base"))
    model = with_adapter(load_language_model(tmp_path / "base"), lora())
    assert "BitsAndBytesConfig" not in str(model_card("x", model))
    CausalLMPolicy(model).save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / BASE_FILE).exists()
    loaded = load_language_model(tmp_path / "adapter")
    assert_same(scales(model), scales(loaded))


def test_an_adapters_folder_says_how_its_base_was_quantised(policy, load, tmp_path):
    policy(dtype=torch.bfloat16, nested=True).save_pretrained(tmp_path)
    said = json.loads((tmp_path / BASE_FILE).read_text())
    assert said["dtype"] == "bfloat16"
    assert said["quantization_config"]["bnb_4bit_use_double_quant"] is True
    for wrong in ({"dtype": "bfloat16"}, {**said, "dtype": "load"}, {**said, "dtype": 3}, []):
        (tmp_path / BASE_FILE).write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=rf"{BASE_FILE} cannot be read.*quantization_config"):
            load_language_model(tmp_path)


def test_merging_into_four_bits_is_refused(policy, tmp_path, capsys):
    policy(dtype=torch.bfloat16).save_pretrained(tmp_path / "tuned")
    assert cli.main(["merge", str(tmp_path / "tuned"), str(tmp_path / "out")]) == 2
    assert "cannot have four-bit weights: serve the adapter" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_a_whole_base_leaves_no_word_of_an_earlier_one(policy, tmp_path):
    policy().save_pretrained(tmp_path)
    model = load_language_model(tmp_path, quantization_config=None)
    AutoModelForCausalLMWithValueHead.from_pretrained(model).save_pretrained(tmp_path)
    assert not (tmp_path / BASE_FILE).exists()


def test_without_bitsandbytes_the_package_is_named(policy, folders, tmp_path, monkeypatch):
    policy().save_pretrained(tmp_path)
    config = four_bit_config()
    monkeypatch.setattr("fastrl.models.quantised.is_installed", lambda: False)
    with pytest.raises(ImportError, match=r"load_in_4bit needs .*pip install 'bitsandbytes>="):
        four_bit_config()
    with pytest.raises(ImportError, match=r"quantization_config needs bitsandbytes"):
        load_language_model(folders["llama"], quantization_config=config)
    with pytest.raises(ImportError, match=r"trained on a four-bit base.*load-in-4bit false"):
        load_language_model(tmp_path)


def test_the_model_card_says_how_the_base_is_loaded(load, folders):
    card = str(model_card("my-adapter", load(dtype=torch.bfloat16)))
    assert "on a base in four bits (nf4)" in card
    code = card.split("```python\n")[1].split("```")[0]
    found = {}
    exec(code.split("model = ")[0].replace("my-adapter", "."), found)
    assert {layer.compute_dtype for layer in four_bit_layers(found["base"])} == {torch.bfloat16}
    assert {layer.weight.quant_state.dtype for layer in four_bit_layers(found["base"])} == {
        torch.bfloat16
    }


@pytest.mark.parametrize("kind", ["config", "dict"])
def test_a_reward_models_head_is_whole_whatever_else_is(kind, folders):
    config = four_bit_config()
    config.llm_int8_skip_modules = ["q_proj"]
    config = config.to_dict() if kind == "dict" else config
    model = load_reward_model(folders["llama"], quantization_config=config)
    assert type(model.score) is nn.Linear
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    assert four_bit_layers(model)


def test_settling_twice_changes_nothing(load):
    model = load("gpt2", torch.bfloat16)
    before = frozen(model)
    settle(model)
    assert_same(before, frozen(model))
    assert precision_of(model, SimpleNamespace(mixed_precision="no")) == torch.bfloat16


def test_an_adapter_of_the_users_own_is_settled_before_it_is_trained(load):
    """On CPUs with AVX512-BF16 an evaluation would take the gradient of its layers' inputs."""
    model = load()
    for layer in four_bit_layers(model):
        layer.support_avx512bf16_for_cpu = True
    check_trainable(model)
    assert not any(layer.support_avx512bf16_for_cpu for layer in four_bit_layers(model))
    layer = four_bit_layers(model)[0]
    layer.weight.quant_state.packing_format_for_cpu = True  # as one evaluation leaves it
    with pytest.raises(ValueError, match="layout for inference on a CPU, which has no gradient"):
        check_trainable(model)
