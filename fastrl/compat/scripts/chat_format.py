"""Chat templates for models that have none."""

from __future__ import annotations

from typing import Any

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIMPLE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].capitalize() + ': ' + message['content'] + "
    "'\n\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
SIMPLE_SFT_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ ' ' + message['content'] }}{% endfor %}{{ eos_token }}"
)
_START, _END = "<|im_start|>", "<|im_end|>"


def setup_chat_format(
    model: Any, tokenizer: Any, format: str = "chatml", resize_to_multiple_of: int | None = None
) -> tuple[Any, Any]:
    """Gives a tokenizer ChatML, with ``<|im_start|>`` as BOS and ``<|im_end|>`` as EOS and pad
    token, and the model embeddings for these; returns model and tokenizer.

    Args:
        resize_to_multiple_of: a number that the embedding's rows are to be a multiple of.

    Raises:
        ValueError: another format, or a tokenizer that has a chat template already.
    """
    if format != "chatml":
        raise ValueError(f"unknown format {format!r}: chatml is the one")
    if tokenizer.chat_template is not None:
        raise ValueError(
            "the tokenizer has a chat template: leave setup_chat_format out, or set "
            "tokenizer.chat_template = None before it"
        )
    tokenizer.add_special_tokens(
        {
            "bos_token": _START,
            "eos_token": _END,
            "pad_token": _END,
            "additional_special_tokens": [_START, _END],
        }
    )
    tokenizer.chat_template = CHATML
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=resize_to_multiple_of)
    for config in (model.config, getattr(model, "generation_config", None)):
        if config is not None:
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(config, name, getattr(tokenizer, name))
    return model, tokenizer


def clone_chat_template(
    model: Any, tokenizer: Any, source_tokenizer_path: str, resize_to_multiple_of: int | None = 64
) -> tuple[Any, Any, list[Any]]:
    """Gives a tokenizer the chat template of a source tokenizer, its EOS, and those of its added
    tokens that the tokenizer lacks, and the model embeddings for these.

    Args:
        resize_to_multiple_of: a number that the embedding's rows are to be a multiple of; each row
            that no token has gets a token ``<extra_id_N>``.

    Returns:
        model, tokenizer, and the tokens that were added.

    Raises:
        ValueError: the source tokenizer has no chat template.
    """
    from transformers import AddedToken, AutoTokenizer

    source = AutoTokenizer.from_pretrained(source_tokenizer_path)
    tokenizer.chat_template = source.get_chat_template()
    vocabulary = tokenizer.get_vocab()
    added = [x for x in source.added_tokens_decoder.values() if x.content not in vocabulary]
    tokenizer.add_tokens(added)
    tokenizer.eos_token = source.eos_token
    model.config.eos_token_id = tokenizer.eos_token_id
    if model.can_generate():
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.resize_token_embeddings(
        len(tokenizer.get_vocab()), pad_to_multiple_of=resize_to_multiple_of
    )
    rows, number = model.get_input_embeddings().weight.shape[0], 0
    while len(tokenizer.get_vocab()) < rows:
        token = AddedToken(f"<extra_id_{number}>")
        if tokenizer.add_tokens(token):
            added.append(token)
        number += 1
    return model, tokenizer, added
