"""The demo's models: a tokenizer, a small language model and a reward classifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from fastrl.demo_text import Review

_CONTEXT = 64  # tokens; the longest reviews have about 30
_BATCH_SIZE = 32


def build_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word of ``texts``, and padding, EOS and unknown tokens.

    As in GPT-2's tokenizer a word carries the space before it, so that a prompt and a completion
    decode to texts that can be joined as they are.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.WordLevelTrainer(
        special_tokens=["<pad>", "<eos>", "<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=_CONTEXT,
    )


def train_language_model(
    tokenizer: PreTrainedTokenizerFast, reviews: Sequence[Review], steps: int
) -> GPT2LMHeadModel:
    """A GPT-2-shaped model fitted to the reviews, each ended by EOS."""
    model = GPT2LMHeadModel(_gpt2_config(tokenizer))
    model.loss_type = "ForCausalLM"  # not to be guessed from the class's name, with a warning
    batch = tokenizer(
        [review.text + tokenizer.eos_token for review in reviews],
        padding=True,
        return_tensors="pt",
    )
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return _fit(model, {**batch, "labels": labels}, steps, 4e-3, "language model")


def train_classifier(
    tokenizer: PreTrainedTokenizerFast, reviews: Sequence[Review], steps: int
) -> GPT2ForSequenceClassification:
    """A model fitted to the critic's labels; its one logit is that of a favourable review."""
    config = _gpt2_config(tokenizer, num_labels=1, problem_type="multi_label_classification")
    model = GPT2ForSequenceClassification(config)
    batch = tokenizer([review.text for review in reviews], padding=True, return_tensors="pt")
    labels = torch.tensor([[float(review.label)] for review in reviews])
    return _fit(model, {**batch, "labels": labels}, steps, 1e-3, "reward classifier")


def _gpt2_config(tokenizer: PreTrainedTokenizerFast, **kwargs: Any) -> GPT2Config:
    return GPT2Config(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        n_positions=_CONTEXT,
        n_embd=64,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        activation_function="gelu",  # one fused op; "gelu_new" would cost a third of each step
        **kwargs,
    )


def _fit(
    model: PreTrainedModel, data: dict[str, Tensor], steps: int, learning_rate: float, name: str
) -> Any:
    """Minimise the model's own loss on random batches of ``data``, under a one-cycle schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=learning_rate, total_steps=steps
    )
    rows = len(data["input_ids"])
    model.train()
    with tqdm(range(steps), desc=name, unit="batch") as bar:
        for _ in bar:
            chosen = torch.randint(rows, (_BATCH_SIZE,))
            loss = model(**{key: value[chosen] for key, value in data.items()}).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
    return model.eval()
