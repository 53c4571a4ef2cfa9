"""Columns of JSON: unlike columns of typed fields, they add no missing keys to mappings."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from datasets import Features, IterableDataset, Json, LargeList, List

from fastrl.data.chat import as_written, is_chat


class WrittenJson(Json):
    """JSON whose mappings are read as :class:`fastrl.data.chat.Written`; files have plain JSON."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Json) and other.decode  # so tables of either kind can be joined

    __hash__ = None  # type: ignore[assignment]

    def decode_example(self, example_data: Any, token_per_repo_id: Any = None) -> Any:
        return None if example_data is None else as_written(json.loads(example_data))


def with_written(dataset: Any) -> Any:
    """The data set, whose columns of JSON then give mappings as :class:`fastrl.data.chat.Written`.

    Args:
        dataset: a ``Dataset``, an ``IterableDataset``, whose columns without a known type do not
            change, or a dict of such; anything else is returned as it is.
    """
    if isinstance(dataset, dict):
        return type(dataset)({name: with_written(part) for name, part in dataset.items()})
    features = getattr(dataset, "features", None)
    if "Json(" not in str(features):
        return dataset
    features = Features(_marked(features))
    if isinstance(dataset, IterableDataset):
        return dataset.cast(features)
    dataset = copy.deepcopy(dataset)  # the copy shares the table
    dataset.info.features = features
    return dataset


def _marked(feature: Any) -> Any:
    """A type of ``datasets``, in which each JSON becomes :class:`WrittenJson`."""
    if isinstance(feature, dict):
        return {name: _marked(x) for name, x in feature.items()}
    if isinstance(feature, List | LargeList):
        return dataclasses.replace(feature, feature=_marked(feature.feature))
    return WrittenJson() if isinstance(feature, Json) and feature.decode else feature


def column_of(values: list[Any]) -> Any:
    """Values as a column of a table. Mappings and chats, whose keys JSON keeps, and values of
    several types become JSON, unless it would change them."""
    if not any(isinstance(value, Mapping) or is_chat(value) for value in values):
        with contextlib.suppress(pa.ArrowException):  # no type of a table holds all of them
            pa.array(values)
            return values
    try:
        # ``datasets`` would round numbers to ten digits, and read texts as JSON.
        texts = [None if value is None else json.dumps(value) for value in values]
        same = [text and json.loads(text) for text in texts] == values
    except (TypeError, ValueError):
        same = False
    return pa.array(texts, pa.json_()) if same else values
