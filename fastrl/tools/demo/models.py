"""The demo's models: a tokenizer, a small language model and a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from fastrl.run.folder import RunFolder
from fastrl.run.transformers_callbacks import recording
from fastrl.tools.demo.text import Review
from fastrl.trainers.reward import RewardConfig, RewardTrainer
from fastrl.trainers.sft import SFTConfig, SFTTrainer

_CONTEXT = 64  # tokens; the longest reviews have about 30
_BATCH_SIZE = 32


def build_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word of ``texts``, and padding, EOS and unknown tokens.

    As in GPT-2's tokenizer a token includes the space before the word, so that a prompt and a
    completion decode to texts that can be joined.
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
    tokenizer: PreTrainedTokenizerFast, reviews: Sequence[Review], steps: int, folder: RunFolder
) -> GPT2LMHeadModel:
    """Trains a small GPT-2 model on the reviews, each followed by EOS; returns it in eval mode."""
    model = GPT2LMHeadModel(_gpt2_config(tokenizer))
    held_out = len(reviews) // 16
    texts = Dataset.from_dict({"text": [review.text for review in reviews]})
    trainer = SFTTrainer(
        model,
        SFTConfig(**_arguments(steps, 4e-3, folder)),
        train_dataset=texts.select(range(held_out, len(texts))),
        eval_dataset=texts.select(range(held_out)),
        processing_class=tokenizer,
    )
    folder.begin()
    with recording(trainer, folder, "SFT"):
        trainer.train()
    _save(trainer, folder)
    return model.eval()


def train_reward_model(
    tokenizer: PreTrainedTokenizerFast,
    pairs: Sequence[tuple[str, str]],
    held_out: Sequence[tuple[str, str]],
    steps: int,
    folder: RunFolder,
) -> tuple[GPT2ForSequenceClassification, float]:
    """Trains a reward model on (better, worse) pairs; returns it and its held-out accuracy."""
    model = GPT2ForSequenceClassification(_gpt2_config(tokenizer, num_labels=1))
    trainer = RewardTrainer(
        model,
        RewardConfig(**_arguments(steps, 1e-3, folder), center_rewards_coefficient=0.01),
        train_dataset=_pairs(pairs),
        eval_dataset=_pairs(held_out),
        processing_class=tokenizer,
    )
    folder.begin()
    with recording(trainer, folder, "reward model"):
        trainer.train()
        accuracy = trainer.evaluate(num_print_samples=0)["eval_accuracy"]
    _save(trainer, folder)
    return model.eval(), accuracy


def _save(trainer: Any, folder: RunFolder) -> None:
    def save(model: Path) -> None:
        trainer.model.save_pretrained(model)
        trainer.processing_class.save_pretrained(model)
        trainer.write_card(str(model))

    folder.write_model(save)


def _pairs(pairs: Sequence[tuple[str, str]]) -> Dataset:
    chosen, rejected = zip(*pairs, strict=True)
    return Dataset.from_dict({"chosen": list(chosen), "rejected": list(rejected)})


def _arguments(steps: int, learning_rate: float, folder: RunFolder) -> dict[str, Any]:
    """Training arguments with a one-cycle schedule and without checkpoints."""
    return {
        "output_dir": str(folder.path),
        "max_steps": steps,
        "per_device_train_batch_size": _BATCH_SIZE,
        "per_device_eval_batch_size": 256,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": steps // 4,
        "weight_decay": 0.01,
        "max_length": _CONTEXT,
        "logging_steps": max(1, steps // 40),
        "eval_strategy": "steps",
        "eval_steps": max(1, steps // 4),
        "save_strategy": "no",
        "dataloader_pin_memory": False,
    }


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
