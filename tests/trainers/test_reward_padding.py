"""A text's reward is the one that it has alone, wherever a batch is padded, whatever the model."""

import copy
import warnings
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fastrl.data.batch import pad
from fastrl.data.choose_padding import classifier_side
from fastrl.models.reward_head import padding_of, rewards_of_padded
from fastrl.rewards.classifier import ClassifierReward
from tests import multimodal_models
from tests.golden import tiny
from tests.trainers.conftest import Make

# What configurations call their sizes.
_SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "hidden_dim", "n_inner", "d_inner"), 32),
    **dict.fromkeys(("dff", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "num_experts"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "q_lora_rank", "kv_lora_rank", "v_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
}
_OWN: dict[str, dict[str, Any]] = {
    "falcon": {"head_dim": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "funnel": {"block_sizes": [1, 1], "num_hidden_layers": None},
    "lilt": {"channel_shrink_ratio": 1}, "t5": {"decoder_start_token_id": tiny.PAD},
    "xlnet": {"max_position_embeddings": None}, "xmod": {"default_language": "en_XX"},
}  # fmt: skip
ON_THE_RIGHT = (
    *("albert", "arcee", "bart", "bert", "big_bird", "bigbird_pegasus", "biogpt", "bloom"),
    *("camembert", "ctrl", "data2vec-text", "deberta", "deberta-v2", "diffllama", "distilbert"),
    *("doge", "electra", "ernie", "esm", "esmc", "eurobert", "exaone4", "falcon", "flaubert"),
    *("funnel", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neo"),
    *("gpt_neox", "gptj", "gte", "helium", "hunyuan_v1_dense", "ibert", "jetmoe", "llama"),
    *("longformer", "mbart", "megatron-bert", "minicpm3", "mistral", "modernbert"),
    *("modernbert-decoder", "mpnet", "mpt", "mt5", "mvp", "nemotron", "nomic_bert", "olmo"),
    *("olmo2", "openai-gpt", "opt", "persimmon", "phi", "phi3", "plbart", "qwen2", "qwen3"),
    *("rembert", "roberta", "roberta-prelayernorm", "roformer", "smollm3", "squeezebert"),
    *("stablelm", "starcoder2", "t5", "umt5", "xlm", "xlm-roberta", "xmod"),
)
# In some versions of transformers these mix padding into a text.
SOMETIMES = {"doge", "umt5"}
# XLNet reads the last place. The others mix what is beside a text into it.
OTHERS = {"xlnet": "left", "fnet": None, "convbert": None, "nystromformer": None, "yoso": None}


def classifier(kind: str) -> Any:
    """A tiny one in float64, with weights that let every token and place count."""
    make = CONFIG_MAPPING[kind]
    usual = make()
    sizes = {k: v for k, v in _SIZES.items() if isinstance(getattr(usual, k, ""), int | None)}
    special = {"bos_token_id": tiny.BOS, "eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD}
    given = {
        "vocab_size": tiny.VOCABULARY, "num_labels": 1, **special, **sizes, **_OWN.get(kind, {}),
    }  # fmt: skip
    config = make(**{name: x for name, x in given.items() if x is not None})
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).double().eval()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.normal_(0, 0.4)
    return model


def texts() -> list[torch.Tensor]:
    rows = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15, 16]]
    return [torch.tensor([tiny.BOS, *row, tiny.EOS]) for row in rows]


@torch.no_grad()
@pytest.mark.parametrize("kind", [*ON_THE_RIGHT, *OTHERS])
def test_rewards_of_padded_texts_are_those_of_each_alone(kind: str) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    model, alone = classifier(kind), []
    for row in texts():
        ids = row[None]
        alone.append(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.flatten())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        side = classifier_side(model, torch.device("cpu"), torch.float64)
    assert side == OTHERS.get(kind, "right") or (kind in SOMETIMES and side is None)
    assert any("depends on the padding beside it" in str(w.message) for w in said) == (side is None)
    for given in ("right", "left"):
        # Padding of another id than the model's own.
        batch = pad(texts(), 20, given)
        found = rewards_of_padded(model, batch, side, padding_of(model)).flatten()
        # Some attend in float32 even then (GPT-Neo, GPT-J, MPT): its roundings, of numbers near 1.
        torch.testing.assert_close(found, torch.cat(alone), rtol=2e-6, atol=2e-6)


@pytest.mark.filterwarnings("ignore:.*depends on the padding beside it")
@pytest.mark.parametrize("kind", ["bart", "bert", "gpt2", "openai-gpt", "fnet", "xlnet"])
def test_rewards_do_not_depend_on_the_side_on_which_a_tokenizer_pads(
    make_reward: Make, kind: str
) -> None:
    model, tokenizer = classifier(kind).float(), tiny.tokenizer()  # as the losses want it
    tokenizer.padding_side = "left"
    words = {"chosen": ["w5 w6 w7 w8 w9", "w10"], "rejected": ["w11 w12", "w13 w14 w15"]}
    settings = {"append_eos": True, "padding_free": False}
    trainer = make_reward(model, Dataset.from_dict(words), processing_class=tokenizer, **settings)
    rows = trainer.train_dataset[:]
    with torch.no_grad():
        ids = [
            torch.tensor([row]) for side in ("chosen", "rejected") for row in rows[f"{side}_ids"]
        ]
        alone = torch.cat([model(row).logits.flatten() for row in ids])
        batch = trainer.data_collator(list(trainer.train_dataset))
        _, rewards = trainer.compute_loss(model, batch, return_outputs=True)
    found = torch.cat([*rewards.values()]).flatten()
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
    whole = [text for side in words.values() for text in side]
    scores = ClassifierReward(copy.deepcopy(model), tokenizer)([""] * 4, whole)
    torch.testing.assert_close(torch.tensor(scores), alone, rtol=1e-5, atol=1e-5)


def test_a_classifier_of_several_parts_is_given_its_padding_where_it_reads_it(
    tmp_path: Any,
) -> None:
    config = AutoConfig.from_pretrained(multimodal_models.save(tmp_path, "gemma3"))
    config.num_labels, config.get_text_config().pad_token_id = 1, None
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    reward = ClassifierReward(model, tiny.tokenizer())
    texts = ["w3 w4 w5", "w6"]
    together = reward(["", ""], texts)
    alone = [reward([""], [x])[0] for x in texts]
    assert config.get_text_config().pad_token_id == tiny.PAD
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone))
