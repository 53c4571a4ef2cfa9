"""The base under an adapter: the one that its folder names, and with what is tied apart."""

import copy
import warnings

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from fastrl import cli
from fastrl.models.adapter_base import warn_of_other_base
from fastrl.models.load import load_classifier, load_language_model, with_adapter
from tests import tiny_models
from tests.golden import tiny
from tests.serving.drawn_adapters import TRAINERS, Case, logits, off, trainer_of

pytestmark = pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
IDS = torch.tensor([[3, 4, 5, 6, 7]])


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    tiny_models.language_model("llama", tie_word_embeddings=True).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def lora(*targets, **changes):
    return LoraConfig(r=2, target_modules=[*targets] or ["q_proj"], **changes)


def plain(base, kind=AutoModelForCausalLM, **options):
    return kind.from_pretrained(base, **options)


@pytest.mark.parametrize("kind", TRAINERS)
def test_no_trainer_puts_a_second_adapter_on_a_first(kind, base, tmp_path):
    classifies = "eward" in kind
    auto = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    task = "SEQ_CLS" if classifies else "CAUSAL_LM"
    first = get_peft_model(
        plain(base, auto, **({"num_labels": 1} if classifies else {})), lora(task_type=task)
    )
    before = logits(first)
    case = Case(kind, "llama", True, "attention", (), None)
    with pytest.raises(ValueError, match="has an adapter already"):
        trainer_of(case, first, lora("v_proj"), tmp_path / "run")
    assert off(before, first) == 0
    assert list(first.peft_config) == ["default"]


@torch.no_grad()
@pytest.mark.parametrize("change", ["merged", "trained", "nothing", "bfloat16", "half", "pissa"])
def test_a_base_that_is_not_in_its_files_is_told_of(change, base):
    model = plain(base, dtype={"half": torch.float16}.get(change, torch.float32))
    if change == "merged":
        first = get_peft_model(model, lora("v_proj", init_lora_weights=False))
        model = first.merge_and_unload()
    elif change == "trained":
        model.model.layers[1].mlp.up_proj.weight += 1e-3
    elif change == "bfloat16":
        model = model.bfloat16().float()
    elif change == "pissa":  # what is left in the base is part of the adapter
        model = get_peft_model(model, lora(init_lora_weights="pissa"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with_adapter(model, None if change == "pissa" else lora())
    said = [str(w.message) for w in told if "are not those in" in str(w.message)]
    assert bool(said) is (change in ("merged", "trained"))
    if said:
        named = "v_proj" if change == "merged" else "layers.1.mlp.up_proj.weight"
        assert named in said[0]
        assert str(base) in said[0]


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_a_loaded_model_is_that_of_its_files(family, tmp_path):
    tiny_models.language_model(family).save_pretrained(tmp_path)
    warn_of_other_base(plain(tmp_path))  # warnings are errors


@torch.no_grad()
@pytest.mark.parametrize("targets", [("lm_head",), ("embed_tokens",), ("embed_tokens", "lm_head")])
@pytest.mark.parametrize("given", ["new", "there already"])
def test_tied_matrices_are_apart_under_an_adapter_on_one(targets, given, base, tmp_path):
    config = lora("q_proj", *targets, init_lora_weights=False, task_type="CAUSAL_LM")
    model = plain(base)
    if given == "there already":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's, which names no remedy
            model, config = get_peft_model(model, config), None
        before = logits(model)
    with pytest.warns(UserWarning, match="they are apart from here on"):
        adapted = with_adapter(model, config)
    said = logits(adapted)
    if given == "there already":
        torch.testing.assert_close(said, before, rtol=0, atol=0)
    merged = adapted.merge_and_unload()
    assert off(said, merged) < 1e-5
    merged.save_pretrained(tmp_path / "merged")
    again = plain(tmp_path / "merged")
    assert not again.config.tie_word_embeddings
    assert off(said, again) < 1e-5


_RESIZED = {
    "attention": {},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "both": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "whole": {"modules_to_save": ["embed_tokens"]},
    "both whole": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "tokens": {"trainable_token_indices": {"embed_tokens": [tiny.VOCABULARY, 5]}},
}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:the adapter changes the LM head", "ignore:Setting `save_embed")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", _RESIZED)
def test_resized_embeddings_are_loaded_with_the_adapter(shape, tied, tmp_path):
    ids = torch.tensor([[3, tiny.VOCABULARY, 5, tiny.VOCABULARY + 2]])
    tiny_models.language_model("llama", tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    model = plain(tmp_path / "base")
    model.resize_token_embeddings(tiny.VOCABULARY + 3)
    for weight in {model.model.embed_tokens.weight, model.lm_head.weight}:
        weight[tiny.VOCABULARY :] = torch.randn(3, 16, generator=torch.manual_seed(0))
    config = LoraConfig(
        r=2, init_lora_weights=False, **{"target_modules": ["q_proj"], **_RESIZED[shape]}
    )
    if shape == "embedding" and not tied:  # PEFT would not save the head's new rows
        with pytest.raises(ValueError, match="the embeddings were resized, and the adapter is on"):
            with_adapter(model, config)
        return
    adapted = with_adapter(model, config).eval()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter += 0.1
    said = adapted(ids).logits
    adapted.save_pretrained(tmp_path / "saved")
    loaded = load_language_model(tmp_path / "saved").eval()
    torch.testing.assert_close(loaded(ids).logits, said, rtol=0, atol=1e-5)
    torch.testing.assert_close(loaded.merge_and_unload()(ids).logits, said, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tokens", [{"lm_head": [5]}, {"wte": [5], "lm_head": [5]}])
def test_trained_tokens_of_a_head_with_a_bias_are_refused(tokens, tmp_path):
    model = tiny_models.language_model("gptj")
    model.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="PEFT leaves out the bias of lm_head"):
        with_adapter(plain(tmp_path / "base"), lora(trainable_token_indices=tokens))
    trained = get_peft_model(
        plain(tmp_path / "base"), lora(trainable_token_indices=tokens, task_type="CAUSAL_LM")
    )
    trained.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="PEFT leaves out the bias of lm_head"):
        load_language_model(tmp_path / "adapter")
    embedding = with_adapter(model, lora(trainable_token_indices={"wte": [5]}))
    assert off(logits(embedding), plain(tmp_path / "base")) < 1e-5


def test_an_adapter_with_half_of_the_resized_rows_is_refused(tmp_path):
    tiny_models.language_model("llama").save_pretrained(tmp_path / "base")
    model = plain(tmp_path / "base")
    model.resize_token_embeddings(tiny.VOCABULARY + 3)
    with pytest.warns(UserWarning, match="save_embedding_layers"):
        get_peft_model(model, lora("embed_tokens")).save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="has the new rows of only one of"):
        load_language_model(tmp_path / "saved")


def test_a_lora_that_is_to_stay_tied_is_refused(base):
    config = lora("embed_tokens", "lm_head", ensure_weight_tying=True)
    with pytest.raises(ValueError, match="ensure_weight_tying beside embedding or head"):
        with_adapter(plain(base), config)


@pytest.mark.parametrize(
    ("settings", "found"),
    [({"modules_to_save": ["score"]}, "right"), ({}, "neither trains nor saves it")],
)
def test_a_classifiers_adapter_without_a_task_type(settings, found, base, tmp_path):
    model = plain(base, AutoModelForSequenceClassification, num_labels=1)
    adapted = get_peft_model(model, lora(**settings, init_lora_weights=False))
    if found != "right":
        with pytest.raises(ValueError, match=found):
            with_adapter(adapted, None)
        return
    adapted.save_pretrained(tmp_path / "as PEFT saves it")  # without a task type
    assert off(logits(adapted), load_classifier(tmp_path / "as PEFT saves it")) == 0
    with_adapter(adapted, None).save_pretrained(tmp_path / "saved")
    loaded = peft.AutoPeftModelForSequenceClassification.from_pretrained(
        tmp_path / "saved", num_labels=1
    )
    assert off(logits(adapted), loaded) == 0


_OTHER_KINDS = {  # by what `fastrl merge` says of them
    "is no change of weights": peft.PromptTuningConfig(num_virtual_tokens=3),
    "PEFT leaves score apart": peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "share their weights": lora(layer_replication=[[0, 2], [1, 2]]),
    "saved": peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Unsupported layer type")
@pytest.mark.parametrize("said", _OTHER_KINDS)
def test_reward_adapters_of_other_kinds_load_and_are_merged_or_refused(
    said, base, tmp_path, capsys
):
    model = plain(base, AutoModelForSequenceClassification, num_labels=1)
    adapted = with_adapter(model, copy.copy(_OTHER_KINDS[said]))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter += 0.1
    adapted.save_pretrained(tmp_path / "saved")
    assert off(logits(adapted), load_classifier(tmp_path / "saved")) == 0
    status = cli.main(["merge", str(tmp_path / "saved"), str(tmp_path / "out")])
    assert status == (0 if said == "saved" else 2)
    assert said in "".join(capsys.readouterr())
    assert (tmp_path / "out").exists() is (said == "saved")


@torch.no_grad()
def test_an_adapter_of_tokens_alone_is_loaded(base, tmp_path):
    config = peft.TrainableTokensConfig(token_indices=[3, 5], target_modules=["embed_tokens"])
    adapted = with_adapter(plain(base), config)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter += 0.1
    adapted.save_pretrained(tmp_path / "saved")
    assert off(logits(adapted), load_language_model(tmp_path / "saved")) == 0
