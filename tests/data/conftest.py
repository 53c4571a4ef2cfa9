"""Tokenizers of every kind, chat templates, and the trainers' fixtures."""

import functools
import json
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tests.golden import tiny
from tests.trainers.conftest import make_reward, make_sft

__all__ = ["make_reward", "make_sft"]

TEMPLATE = (
    "{% for m in messages %}"
    "{{ 'w10 ' if m.role == 'user' else 'w11 ' }}{{ m.content }} "
    "{% endfor %}"
    "{% if add_generation_prompt %}w11 {% endif %}"
)
CORPUS = [
    "The film was wonderful and moving, a joy to watch from start to end.",
    "A dull, derivative mess; nobody should have to sit through it twice.",
    "Human: what is it? Assistant: it is a test of tokens and borders.",
    "user assistant system [INST] [/INST] <|turn> 0 1 2 3 4 5 6 7 8 9",
] * 4
# How turns begin and end: with EOS, with blanks behind it, with a word, or with nothing.
TEMPLATES = {
    "chatml": "{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}EOS\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>assistant\n{% endif %}",
    "llama": "BOS{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }}EOS"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
    "words": "{% for m in messages %}{{ m.role }}: {{ m.content }} end\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "open": "{% for m in messages %}{{ m.role }}\n\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n\n{% endif %}",
}
KINDS = ("bpe", "bpe with BOS", "wordpiece", "unigram", "llama")


def chat_tokenizer() -> Any:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@functools.cache
def trained(kind: str) -> Any:
    """A tokenizer of a kind, trained on a few lines; without a chat template."""
    special = ["<unk>", "<s>", "</s>", "<pad>", "<|turn>"]
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    if kind.startswith("bpe"):
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=alphabet
        )
        if kind == "bpe":
            del names["bos_token"]
    elif kind == "wordpiece":
        special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
        names = {
            "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]",
        }  # fmt: skip
        backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special)
    elif kind == "unigram":
        backend = Tokenizer(models.Unigram())
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>")
    else:  # BPE over bytes where a letter is unknown, a space in front of every text
        backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special)
    backend.train_from_iterator(CORPUS, trainer)
    if kind == "llama":
        state = json.loads(backend.to_str())
        vocabulary = state["model"]["vocab"]
        for byte in range(256):
            vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
        backend = Tokenizer.from_str(json.dumps(state))
    ends = {"bpe": (None, None), "wordpiece": ("[CLS]", "[SEP]")}.get(kind, ("<s>", None))
    if ends[0]:
        single = " ".join(x for x in (ends[0], "$A", ends[1]) if x)
        ids = [(x, backend.token_to_id(x)) for x in ends if x]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def with_template(kind: str, template: str) -> Any:
    """A tokenizer of a kind with one of the templates."""
    tokenizer = trained(kind)
    text = TEMPLATES[template].replace("EOS", tokenizer.eos_token or "[SEP]")
    tokenizer.chat_template = text.replace("BOS", tokenizer.bos_token or "")
    return tokenizer
