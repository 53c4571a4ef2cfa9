"""Checks that a model has an embedding for every token of its data, before it is trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fastrl.data.collators import ID_COLUMNS, SIDES
from fastrl.data.examples import Example

_COLUMNS = (
    "input_ids",
    *(f"input_ids_{side}" for side in SIDES),
    *("prompt_ids", *ID_COLUMNS, "completion_ids"),
)


def embedding_rows(model: Any) -> int:
    """How many tokens the model has an embedding for, padding of the table included."""
    table = model.get_input_embeddings()
    rows = getattr(getattr(table, "base_layer", table), "num_embeddings", None)
    return model.config.get_text_config().vocab_size if rows is None else rows


def check_vocabulary(model: Any, tokenizer: Any, ids: Iterable[Sequence[int]]) -> None:
    """Checks that the model has an embedding for each token id.

    Args:
        ids: the token ids of texts.

    Raises:
        ValueError: a token without an embedding.
    """
    rows = embedding_rows(model)
    largest = max((max(each, default=0) for each in ids), default=0)
    if largest < rows:
        return
    fits = largest < len(tokenizer)
    named = f"token {tokenizer.convert_ids_to_tokens(largest)!r} (id {largest})" if fits else ""
    raise ValueError(
        f"the data has {named or f'the token id {largest}'}, and the model embeddings for {rows} "
        f"tokens only; its tokenizer has {len(tokenizer)}: call "
        "model.resize_token_embeddings(len(tokenizer)) and save the model, or use the tokenizer "
        "that it was trained with"
    )


def check_table(model: Any, tokenizer: Any, dataset: Any) -> None:
    """:func:`check_vocabulary` of a data set's token columns; a stream is not checked."""
    import pyarrow.compute as pc

    # A stream may not know its columns, nor can it be read here.
    columns = [name for name in _COLUMNS if name in (getattr(dataset, "column_names", ()) or ())]
    columns = columns if hasattr(dataset, "__len__") else []
    if not columns:
        return
    batches = dataset.select_columns(columns).with_format("arrow").iter(1000)
    most = (pc.max(pc.list_flatten(table[name])).as_py() for table in batches for name in columns)
    check_vocabulary(model, tokenizer, ([largest] for largest in most if largest is not None))


def check_examples(model: Any, tokenizer: Any, examples: Iterable[Example]) -> None:
    """:func:`check_vocabulary` of examples. They are iterated, and so encoded, only where the
    tokenizer has tokens that the model lacks."""
    if max(tokenizer.get_vocab().values(), default=0) < embedding_rows(model):
        return
    ids = (part for x in examples for part in (x.prompt_ids, *(r.ids for r in x.responses)))
    check_vocabulary(model, tokenizer, ids)
