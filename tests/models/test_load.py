"""The way in for models: folders, runs' folders, adapters, and memory of their own."""

import json
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertLMHeadModel,
)

from fastrl import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    CausalLMPolicy,
    PPOConfig,
    PPOTrainer,
)
from fastrl.alignment import ModelJudge
from fastrl.models.load import (
    base_folder,
    load_classifier,
    load_language_model,
    load_reward_model,
    load_saved,
    load_tokenizer,
    load_weights,
    own_storage,
    with_adapter,
)
from fastrl.models.model_files import model_folder
from fastrl.rewards.classifier import ClassifierReward
from fastrl.run.model_card import SFT, Training, write_model_card
from tests import seq2seq_models, tiny_models
from tests.golden import tiny
from tests.weights import aligned

pytestmark = [
    pytest.mark.filterwarnings(tiny_models.PEFT_WARNING),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
]


@pytest.fixture
def base(tmp_path):
    """A language model, whose weights lie off every 16-byte boundary, with its tokenizer."""
    folder = tmp_path / "base"
    tiny_models.language_model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    misalign(folder / "model.safetensors")
    return folder


def misalign(file):
    """A header of another length moves the weights behind it."""
    weights = load_file(file)
    for pad in range(1, 64):
        save_file(weights, file, metadata={"format": "pt", "pad": "x" * pad})
        with open(file, "rb") as f:
            if (8 + int.from_bytes(f.read(8), "little")) % 16:
                return
    raise AssertionError("every length of the header is rounded up")


def adapter(base, folder, task="CAUSAL_LM", loader=AutoModelForCausalLM, lora=None, **kwargs):
    """Saved, with weights that already change the outputs."""
    torch.manual_seed(3)
    model = get_peft_model(loader.from_pretrained(base, **kwargs), lora or tiny_models.lora())
    assert model.peft_config["default"].task_type == task
    model.save_pretrained(folder)
    return folder


def reward_adapter(base, folder, labels=1):
    lora = tiny_models.lora(task_type="SEQ_CLS")
    kind = AutoModelForSequenceClassification
    return adapter(base, folder, "SEQ_CLS", kind, lora, num_labels=labels)


def test_loaded_weights_lie_in_aligned_memory_of_their_own(base):
    plain = AutoModelForCausalLM.from_pretrained(base, use_safetensors=True)
    assert not aligned(plain), "or this would show nothing"
    loaded = load_language_model(base)
    assert aligned(loaded)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    for name, weight in plain.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)


def test_every_door_gives_weights_memory_of_their_own(base, tmp_path):
    saved = reward_adapter(base, tmp_path / "reward")
    policy = adapter(base, tmp_path / "policy")
    for folder in (saved, policy):
        misalign(folder / "adapter_model.safetensors")
        tiny.tokenizer().save_pretrained(folder)
    for model in (
        load_reward_model(base),
        load_reward_model(saved),
        ClassifierReward.from_pretrained(str(saved)).model,
        load_language_model(policy, trainable=True),
        AutoModelForCausalLMWithValueHead.from_pretrained(base),
        AutoModelForCausalLMWithValueHead.from_pretrained(policy),
        ModelJudge.from_pretrained(str(base)).model,
        ModelJudge.from_pretrained(str(policy)).model,
    ):
        assert aligned(model)


def test_own_storage_keeps_what_is_one_memory_and_what_is_trained():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            room = torch.arange(64, dtype=torch.float32)
            self.a = nn.Parameter(room[1:13].view(3, 4), requires_grad=False)
            self.b = nn.Parameter(room[1:13].view(3, 4))  # the same memory, another object
            self.c = self.a
            self.t = nn.Parameter(room[13:25].view(4, 3).T)
            self.register_buffer("seen", room[25:31])
            self.register_buffer("none", torch.empty(0))
            self.far = nn.Parameter(torch.empty(2, device="meta"))

    model = Tied()
    objects = [model.a, model.b, model.t, model.seen, model.far]
    values = [x.detach().clone() for x in objects[:4]]
    assert own_storage(model) is model
    assert aligned(nn.ParameterList([model.a, model.b, model.t]))
    assert model.seen.data_ptr() % 64 == 0
    after = [model.a, model.b, model.t, model.seen, model.far]
    assert all(x is y for x, y in zip(objects, after, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(values, after, strict=False))
    assert [x.requires_grad for x in after] == [False, True, True, False, True]
    assert model.a.data_ptr() == model.b.data_ptr()
    assert model.t.stride() == (1, 3)
    assert model.far.is_meta


def test_a_runs_folder_stands_for_the_model_in_it(base, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    base.rename(run / "model")
    assert model_folder(run) == model_folder(run / "model") == str(run / "model")
    assert load_tokenizer(run).name_or_path == str(run / "model")
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(run)
    assert loaded.pretrained_model.name_or_path == str(run / "model")


def test_a_checkpoint_that_holds_a_folder_of_that_name_is_itself(base):
    (base / "model").mkdir()
    (base / "model" / "config.json").write_text("{}")
    assert model_folder(base) == str(base)


@pytest.mark.parametrize("load", [load_language_model, load_reward_model, load_classifier])
def test_a_folder_without_a_model_says_what_was_looked_for(load, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no model: .*config\.json.*adapter_con"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*gone"):
        load(tmp_path / "gone")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match="is a file"):
        load(tmp_path / "file")


def test_a_misspelt_folder_is_no_id_of_the_hub(base, tmp_path, monkeypatch):
    """The Hub is not asked where the first part is a folder here, and what is there is named."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base, "runs/first/model")
    for wrong, right in (("runs/frist", "runs/first"), ("./runs/fisrt/model", "runs/first/model")):
        with pytest.raises(FileNotFoundError, match=f"no folder {wrong}.*mean '{right}'"):
            model_folder(wrong)
    with pytest.raises(FileNotFoundError, match="Hub is looked up where no folder is called runs"):
        model_folder("runs/other")
    with pytest.raises(FileNotFoundError, match="no folder my model"):  # with a blank it is no id
        model_folder("my model")
    assert model_folder("owner/name") == "owner/name"
    monkeypatch.setattr("fastrl.models.model_files.try_to_load_from_cache", lambda name, file: file)
    assert model_folder("runs/other") == "runs/other"


@pytest.mark.parametrize("trainable", [True, False])
def test_an_adapter_is_put_on_its_base_and_trained_where_asked(trainable, base, tmp_path):
    folder = adapter(base, tmp_path / "adapter")
    loaded = load_language_model(folder, trainable=trainable, dtype="bfloat16")
    trained = [name for name, p in loaded.named_parameters() if p.requires_grad]
    assert bool(trained) == trainable
    assert all("lora_" in name for name in trained)
    assert loaded.base_model.model.transformer.wte.weight.dtype == torch.bfloat16
    saved = load_file(folder / "adapter_model.safetensors")
    state = {name.replace(".default", ""): x for name, x in loaded.state_dict().items()}
    assert all(torch.equal(state[name], x) for name, x in saved.items())


def test_an_encoder_decoders_adapter_is_trained_on(tmp_path):
    seq2seq_models.language_model().save_pretrained(tmp_path / "t5")
    config = LoraConfig(r=2, task_type="SEQ_2_SEQ_LM", init_lora_weights=False)
    adapter(tmp_path / "t5", tmp_path / "lora", "SEQ_2_SEQ_LM", AutoModelForSeq2SeqLM, config)
    policy = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(
        tmp_path / "lora", is_trainable=True
    )
    trained = [n for n, p in policy.pretrained_model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)


def test_a_relative_base_is_found_from_the_working_directory_or_named(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "sft").mkdir(parents=True)
    base.rename("runs/sft/model")
    folder = adapter("runs/sft/model", "lora")
    for name in ("runs/sft/model", "runs/sft"):  # a run's folder, too
        rebase(folder, name)
        assert load_language_model(folder).peft_config["default"].r == 2
    for gone in ("./gone", "runs/gone"):  # the second may be a Hub id
        rebase(folder, gone)
        with pytest.raises(OSError, match=rf"(?s)trained on {gone}, .*base_model_name_or_path"):
            load_language_model(folder)
    rebase(folder, "lora")
    with pytest.raises(ValueError, match="which is an adapter itself: merge it"):
        load_language_model(folder)


def test_a_base_that_was_a_folder_and_is_gone_is_not_asked_of_the_hub(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = adapter("base", "lora")
    write_model_card(folder, "lora", load_language_model(folder), Training(SFT))
    base.rename("elsewhere")
    monkeypatch.setattr("fastrl.models.load._config_of", lambda *_: pytest.fail("asked the Hub"))
    with pytest.raises(FileNotFoundError, match=r"the folder base, which is not here: write"):
        load_saved(folder)
    rebase(folder, "org/base")  # uploaded
    assert base_folder(folder) == "org/base"
    rebase(folder, "elsewhere")
    assert base_folder(folder) == "elsewhere"


def rebase(folder, name):
    file = Path(folder) / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": name}))


def test_an_adapter_of_another_base_is_refused(base, tmp_path):
    folder = adapter(base, tmp_path / "lora")
    tiny_models.language_model(n_embd=32).save_pretrained(tmp_path / "wide")
    rebase(folder, str(tmp_path / "wide"))
    with pytest.raises(ValueError, match=r"does not fit .*wide, the base that it names"):
        load_language_model(folder)


@pytest.mark.parametrize("change", ["another layer", "another name", "half"])
def test_an_adapter_that_is_not_whole_is_refused(change, base, tmp_path):
    folder = adapter(base, tmp_path / "lora")
    start = load_language_model(folder)
    file = folder / "adapter_model.safetensors"
    saved = load_file(file)
    renamed = {"another layer": (".h.1.", ".h.7."), "another name": ("lora_A", "A"), "half": ()}
    names = {key: key.replace(*renamed[change]) if renamed[change] else key for key in saved}
    kept = [key for key in saved if change != "half" or ".h.0." in key]
    save_file({names[key]: saved[key] for key in kept}, file, {"format": "pt"})
    misfit = pytest.raises(ValueError, match=r"does not fit .*base that it names: .* missing")
    with warnings.catch_warnings(), misfit:
        warnings.simplefilter("default")  # as in a program, where PEFT warns
        load_language_model(folder)
    with pytest.raises(ValueError, match=r"safetensors lacks .*: it is another model's"):
        load_weights(start, folder)


@pytest.mark.parametrize("layers", [1, 3])
def test_an_adapter_of_a_base_with_other_layers_is_refused(layers, base, tmp_path):
    folder = adapter(base, tmp_path / "lora")
    tiny_models.language_model(n_layer=layers).save_pretrained(tmp_path / "other")
    rebase(folder, str(tmp_path / "other"))
    message = r"other, the base that it names: " + ("it holds" if layers == 1 else "Found missing")
    with pytest.raises(ValueError, match=message):
        load_language_model(folder)


def test_an_adapter_without_safetensors_is_refused(base, tmp_path):
    for folder in (adapter(base, tmp_path / "a"), reward_adapter(base, tmp_path / "b")):
        (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"holds no adapter_model\.safetensors"):
        load_language_model(tmp_path / "a")
    with pytest.raises(ValueError, match=r"holds no adapter_model\.safetensors"):
        load_classifier(tmp_path / "b")


def test_an_adapters_tokenizer_is_its_own_or_else_its_bases(base, tmp_path):
    folder = adapter(base, tmp_path / "lora")
    assert load_tokenizer(folder).name_or_path == str(base)
    tiny.tokenizer().save_pretrained(folder)
    assert load_tokenizer(folder).name_or_path == str(folder)


@pytest.mark.parametrize("labels", [1, 3])
def test_a_reward_adapter_scores_as_when_it_was_saved(labels, base, tmp_path):
    """It brings its head along, whatever head the base has: here one of two labels."""
    two = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    two.save_pretrained(tmp_path / "two")
    torch.manual_seed(3)
    start = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "two", num_labels=labels, ignore_mismatched_sizes=True
    )
    model = get_peft_model(start, tiny_models.lora(task_type="SEQ_CLS")).eval()
    model.save_pretrained(tmp_path / "reward")
    loaded = load_classifier(tmp_path / "reward").eval()
    ids = torch.stack(tiny_models.prompts(6, 6))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        # One of them lies where its file is mapped: last bits may differ.
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=0, atol=1e-6)
    assert loaded.config.num_labels == labels
    assert not any(p.requires_grad for p in loaded.parameters())


def test_a_reward_adapter_scores_in_float32_on_a_base_in_bfloat16(base, tmp_path):
    """As `fastrl reward` trains it: most language models are saved in bf16, adapters are not."""
    low = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    low.save_pretrained(tmp_path / "low")
    torch.manual_seed(3)
    lora = tiny_models.lora(task_type="SEQ_CLS")
    model = get_peft_model(load_reward_model(tmp_path / "low"), lora).eval()
    model.save_pretrained(tmp_path / "reward")
    tiny.tokenizer().save_pretrained(tmp_path / "reward")
    texts = ["w3 w4 w5", "w6 w7"]
    expected = ClassifierReward(model, tiny.tokenizer()).score(texts)
    scores = ClassifierReward.from_pretrained(str(tmp_path / "reward")).score(texts)
    assert scores == pytest.approx(expected, rel=0, abs=1e-6)  # bf16's are off by 1e-5 and more
    chosen = load_classifier(tmp_path / "reward", dtype=torch.bfloat16)
    assert chosen.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("load", [load_language_model, load_reward_model, load_classifier])
@pytest.mark.parametrize("whole", [True, False])
def test_a_dtype_is_taken_by_its_old_name_too(whole, load, name, base, tmp_path):
    if load is load_language_model:
        folder = base if whole else adapter(base, tmp_path / "adapter")
    elif whole:
        load_reward_model(base).save_pretrained(tmp_path / "reward")
        folder = tmp_path / "reward"
    else:
        folder = reward_adapter(base, tmp_path / "reward")
    assert load(folder, **{name: torch.bfloat16}).dtype == torch.bfloat16


@pytest.mark.parametrize("load", [load_language_model, load_reward_model])
def test_options_reach_the_model_under_an_adapter_too(load, base, tmp_path):
    make = adapter if load is load_language_model else reward_adapter
    for folder in (base, make(base, tmp_path / "lora")):
        model = load(folder, attn_implementation="eager", output_loading_info=True)
        assert model.config._attn_implementation == "eager"


def test_a_reward_adapter_is_trained_on_with_its_head(base, tmp_path):
    loaded = load_reward_model(reward_adapter(base, tmp_path / "reward"))
    trained = {name for name, p in loaded.named_parameters() if p.requires_grad}
    assert "base_model.model.score.modules_to_save.default.weight" in trained
    assert all("lora_" in name or "modules_to_save" in name for name in trained)


def test_no_random_head_scores(base, tmp_path):
    """Of a language model, of its adapter, and of a reward model's whose head was lost."""
    language = adapter(base, tmp_path / "lora")
    headless = reward_adapter(base, tmp_path / "reward")
    file = headless / "adapter_model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if "score" not in k}, file)
    for folder in (base, language, headless):
        with pytest.raises(ValueError, match="is not a trained sequence classifier"):
            load_classifier(folder)
    with pytest.raises(ValueError, match=r"task_type CAUSAL_LM.*merge it into its base"):
        load_reward_model(language)


def test_a_reward_model_has_one_label(base, tmp_path):
    two = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    two.save_pretrained(tmp_path / "two")
    with pytest.raises(ValueError, match=r"number of labels is not 1: start a reward model from"):
        load_reward_model(tmp_path / "two")
    with pytest.raises(ValueError, match="has 3 labels, a reward model has 1"):
        load_reward_model(reward_adapter(base, tmp_path / "three", 3))
    with pytest.raises(ValueError, match="is a reward model's"):
        load_language_model(tmp_path / "three")


def test_an_encoder_that_reads_both_ways_is_no_language_model(tmp_path):
    """Its "log-prob" of a token has seen that token and those behind it."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = BertConfig(**sizes, num_attention_heads=2)
    BertLMHeadModel(config).save_pretrained(tmp_path / "bert")
    for load in (load_language_model, AutoModelForCausalLMWithValueHead.from_pretrained):
        with pytest.raises(ValueError, match=r"bert.*both ways.*is_decoder=True"):
            load(tmp_path / "bert")
    with pytest.raises(ValueError, match="both ways"):
        AutoModelForCausalLMWithValueHead(BertLMHeadModel(config))
    model = load_language_model(tmp_path / "bert", is_decoder=True)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before = model(ids).logits[:, :2]
        ids[0, 2] = 4
        assert torch.allclose(model(ids).logits[:, :2], before, atol=1e-6)  # a causal mask


def test_half_of_an_encoder_decoder_is_no_language_model(base, tmp_path):
    """transformers would load BART's decoder alone."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 32}
    BartForConditionalGeneration(BartConfig(**sizes)).save_pretrained(tmp_path / "bart")
    for load in (load_language_model, AutoModelForCausalLMWithValueHead.from_pretrained):
        with pytest.raises(ValueError, match=r"encoder–decoder \(bart\).*choose a decoder"):
            load(tmp_path / "bart")
    file = base / "config.json"
    file.write_text(file.read_text().replace('"gpt2"', '"vit"'))
    with pytest.raises(ValueError, match=r"base \(vit\) is not a causal language model"):
        load_language_model(base)


@pytest.mark.parametrize("load", [load_language_model, load_reward_model, load_classifier])
def test_weights_that_are_cut_short_are_named(load, base):
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"/model\.safetensors cannot be read"):
        load(base)


@pytest.mark.parametrize("load", [load_language_model, load_reward_model, load_classifier])
def test_an_adapters_weights_that_are_cut_short_are_named(load, base, tmp_path):
    make = adapter if load is load_language_model else reward_adapter
    file = make(base, tmp_path / "lora") / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors cannot be read"):
        load(file.parent)


def trainer_of(model, **settings):
    config = PPOConfig(batch_size=4, mini_batch_size=2, **settings)
    return PPOTrainer(config, model, tokenizer=tiny.tokenizer())


@pytest.mark.parametrize("advantage", [{}, {"advantage": "grpo", "group_size": 2}])
def test_a_frozen_policy_is_an_error_that_names_the_remedy(advantage, base, tmp_path):
    folder = adapter(base, tmp_path / "lora")
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"nothing .* can be trained.*is_trainable=True"):
        trainer_of(policy, **advantage)
    whole = AutoModelForCausalLMWithValueHead.from_pretrained(base)
    whole.pretrained_model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"nothing .* can be trained.*requires_grad"):
        trainer_of(whole, **advantage)
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(folder, is_trainable=True)
    assert trainer_of(policy, **advantage).optimizer.param_groups[0]["params"]


def test_an_adapters_dropout_does_not_act_in_ppo_which_is_said_once(base, tmp_path):
    lora = tiny_models.lora(lora_dropout=0.25)
    folder = adapter(base, tmp_path / "lora", lora=lora)
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(folder, is_trainable=True)
    with pytest.warns(UserWarning, match=r"lora_dropout=0\.25 has no effect") as warned:
        trainer_of(policy)
    assert len(warned) == 1


def test_auto_compares_with_a_trained_adapter_and_with_the_base_of_a_new_one(base, tmp_path):
    folder = adapter(base, tmp_path / "lora")
    ids = {"input_ids": torch.stack(tiny_models.prompts(6, 6))}

    def of(model, **settings):
        trainer = trainer_of(model.eval(), **settings)
        with torch.no_grad(), trainer.reference.as_policy() as reference:
            there = {name: x.to(trainer.current_device) for name, x in ids.items()}
            return trainer.reference.why, reference(**there)[0].cpu()

    def policy():
        return AutoModelForCausalLMWithValueHead.from_pretrained(folder, is_trainable=True).eval()

    with torch.no_grad():
        start, plain = policy()(**ids)[0], tiny_models.language_model()(**ids).logits
    assert (start - plain).abs().max() > 1e-3
    for settings, expected, said in (
        ({"reference_adapter": "auto"}, start, "a copy of it as training begins"),
        ({}, plain, "the base model with it off, from which the policy differs already"),
    ):
        why, logits = of(policy(), **settings)
        assert said in why
        # One forward goes through PEFT's layers, the other does not.
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    new = AutoModelForCausalLMWithValueHead.from_pretrained(
        base, peft_config=tiny_models.lora(init_lora_weights=True)
    )
    why, _ = of(new, reference_adapter="auto")
    assert why.endswith("the base model with it off")
    assert isinstance(new.pretrained_model, PeftModel)
    assert list(new.pretrained_model.peft_config) == ["default"]


@pytest.mark.parametrize("kind", [AutoModelForCausalLMWithValueHead, CausalLMPolicy])
def test_no_random_head_writes(kind, tmp_path):
    """A classifier's checkpoint has no head for words, and transformers would draw one."""
    config = tiny_models.config("llama", num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"not a trained language model.* lm_head.weight"):
        kind.from_pretrained(tmp_path)


def test_no_random_head_writes_under_an_adapter(tmp_path):
    """Unless the adapter brings the head that its base lacks."""
    config = tiny_models.config("llama", num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "base")
    for name, whole in (("lora", None), ("head", ["lm_head"])):
        lora = LoraConfig(r=2, task_type="CAUSAL_LM", modules_to_save=whole)
        adapter(tmp_path / "base", tmp_path / name, lora=lora)
    with pytest.raises(ValueError, match=r"not a trained language model.* lm_head.weight"):
        load_language_model(tmp_path / "lora")
    brought = load_file(tmp_path / "head" / "adapter_model.safetensors")
    loaded = load_language_model(tmp_path / "head").get_output_embeddings()
    expected = brought["base_model.model.lm_head.weight"]
    assert torch.equal(loaded.modules_to_save["default"].weight, expected)


@pytest.mark.parametrize(("needs", "says"), [
    (lambda base, saved: load_language_model(saved), "the adapter in .*saved needs peft"),
    (lambda base, saved: load_tokenizer(saved), "the adapter in .*saved needs peft"),
    (lambda base, saved: with_adapter(base, LoraConfig()), "peft_config needs peft"),
])  # fmt: skip
def test_a_missing_peft_is_named_with_what_installs_it(needs, says, base, tmp_path, monkeypatch):
    adapter(base, tmp_path / "saved")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=says + r": pip install 'peft>="):
        needs(AutoModelForCausalLM.from_pretrained(base), tmp_path / "saved")


def test_an_adapter_is_added_and_loaded_without_peft_warning_of_its_own_calls(base, tmp_path):
    adapter(base, tmp_path / "saved")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        load_language_model(tmp_path / "saved")
        with_adapter(load_language_model(base), LoraConfig(fan_in_fan_out=True))
