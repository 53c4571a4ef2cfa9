"""Rewards from sequence classifiers."""

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from fastrl.rewards.classifier import ClassifierReward
from fastrl.rewards.functions import load_reward
from fastrl.tools.demo.models import build_tokenizer

WORDS = ["the film is good", "the film is bad", "this very long story never ends ."]


def classifier(labels: int, **kwargs) -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16, num_labels=labels, **kwargs,
    )  # fmt: skip
    torch.manual_seed(0)
    return BertForSequenceClassification(config)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(WORDS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("classifier")
    names = {0: "negative", 1: "neutral", 2: "positive"}
    model = classifier(3, id2label=names, label2id={name: i for i, name in names.items()})
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def test_classifier_scores_prompt_and_completion(tokenizer):
    model = classifier(1)
    reward = ClassifierReward(model, tokenizer, batch_size=2)
    prompts, completions = ["the film", "the film", "this very"], [" is good", " is", " long story"]
    rewards = reward(prompts, completions, [[1]] * 3, label=[0, 1, 0])
    for prompt, completion, got in zip(prompts, completions, rewards, strict=True):
        ids = tokenizer(prompt + completion, return_tensors="pt")
        assert got == pytest.approx(model(**ids).logits.item(), abs=1e-5)
    assert reward([], [], []) == []
    assert not any(p.requires_grad for p in model.parameters())


def test_label_is_the_last_unless_named(saved, tokenizer):
    text = ["the film is good"]
    logits = load_reward(saved).model(**tokenizer(text, return_tensors="pt")).logits[0]
    for label, index in ((None, 2), ("neutral", 1), ("0", 0), (1, 1)):
        assert load_reward(saved, label=label).score(text) == pytest.approx([logits[index].item()])
    for label in ("happy", "3", -1):
        with pytest.raises(ValueError, match=r"no label .*: choose one of negative, neutral"):
            load_reward(saved, label=label)


def test_long_texts_are_cut_to_what_the_model_takes(tokenizer):
    reward = ClassifierReward(classifier(1), tokenizer)
    assert reward.max_length == 16
    assert len(reward(["the film"], [" is good" * 40], [[]])) == 1


def test_language_model_is_no_classifier(tmp_path, tokenizer):
    GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=1)).save_pretrained(
        tmp_path
    )
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"not a trained sequence classifier.*score\.weight"):
        load_reward(str(tmp_path))


def test_a_classifier_without_a_tokenizer_is_refused(tmp_path):
    classifier(1).save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="has no tokenizer: save one there"):
        load_reward(str(tmp_path))
