"""The chat template, EOS and pad token that a trainer's settings name in place of a tokenizer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastrl.data.vocabulary import embedding_rows


def settle_tokenizer(tokenizer: Any, args: Any) -> None:
    """Gives a tokenizer the settings' ``chat_template_path``, ``eos_token`` and ``pad_token``.
    Where the path is another tokenizer's, its new added tokens are taken, and its EOS by default.

    Raises:
        ValueError: a token that the tokenizer does not have, a tokenizer without a template.
        OSError: no tokenizer, and no file that ends in .jinja or .j2, at the path.
    """
    path = args.chat_template_path
    is_file = path is not None and Path(path).suffix in (".jinja", ".j2")
    template: str | None = None
    other = None
    if is_file:
        template = Path(path).read_text(encoding="utf-8")
    elif path is not None:
        from transformers import AutoTokenizer

        try:
            other = AutoTokenizer.from_pretrained(path, trust_remote_code=args.trust_remote_code)
        except (OSError, ValueError) as error:
            raise OSError(
                f"chat_template_path={path!r} is no file that ends in .jinja or .j2, and no "
                f"tokenizer: {error}"
            ) from error
        template = other.chat_template
        if template is None:
            raise ValueError(
                f"chat_template_path: the tokenizer of {path} has no chat template: name another, "
                "or a file that ends in .jinja"
            )
    tokens = {*tokenizer.get_vocab(), *(() if other is None else other.added_tokens_encoder)}
    for name in ("eos_token", "pad_token"):
        token = getattr(args, name)
        if token is not None and token not in tokens:
            raise ValueError(
                f"{name}={token!r} is not in the vocabulary of the tokenizer "
                f"({type(tokenizer).__name__}): name one of its tokens, or add it to tokenizer and "
                "model first"
            )
    if template is not None:
        tokenizer.chat_template = template
    if other is not None:
        vocabulary = tokenizer.get_vocab()
        added = other.added_tokens_decoder.values()
        tokenizer.add_tokens([token for token in added if token.content not in vocabulary])
        if other.eos_token is not None:
            tokenizer.eos_token = other.eos_token
    for name in ("eos_token", "pad_token"):
        if getattr(args, name) is not None:
            setattr(tokenizer, name, getattr(args, name))


def settle_model(model: Any, tokenizer: Any, args: Any, adapts: bool) -> None:
    """Tells a model of the tokens that :func:`settle_tokenizer` set, and gives it embeddings for
    those that are new.

    Args:
        adapts: whether only an adapter is trained.

    Raises:
        ValueError: new tokens beside an adapter, which would not learn them.
    """
    config = model.config.get_text_config()
    other_template = args.chat_template_path is not None
    # Embeddings may be padded, and then have room for new tokens.
    if other_template and len(tokenizer) > embedding_rows(model):
        if adapts:
            raise ValueError(
                f"chat_template_path brings tokens that the model has no embedding for "
                f"({len(tokenizer)} tokens, {embedding_rows(model)} embeddings), and an adapter "
                "does not train them: resize and train the embeddings first, or name a .jinja file "
                "whose tokens the model knows"
            )
        model.resize_token_embeddings(len(tokenizer))
    generation = getattr(model, "generation_config", None)
    if (args.eos_token is not None or other_template) and tokenizer.eos_token_id is not None:
        config.eos_token_id = tokenizer.eos_token_id
        if generation is not None:
            ends = generation.eos_token_id
            ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
            generation.eos_token_id = list(dict.fromkeys([tokenizer.eos_token_id, *ends]))
    if args.pad_token is not None:
        config.pad_token_id = tokenizer.pad_token_id
        if generation is not None:
            generation.pad_token_id = tokenizer.pad_token_id
