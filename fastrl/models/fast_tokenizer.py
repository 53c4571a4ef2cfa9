"""A tokenizer under the interface of transformers' fast ones."""

from __future__ import annotations

from typing import Any


def as_fast(tokenizer: Any) -> Any:
    """The tokenizer itself; for one of mistral-common, which AutoTokenizer returns where that
    package and a tekken.json are, a wrapper with the interface of transformers' fast tokenizers.

    Raises:
        ValueError: see :class:`fastrl.models.mistral_common.MistralCommonTokenizer`.
    """
    kinds = {kind.__name__ for kind in type(tokenizer).__mro__}
    if "MistralCommonBackend" not in kinds or getattr(tokenizer, "is_fast", False):
        return tokenizer
    from fastrl.models.mistral_common import MistralCommonTokenizer

    return MistralCommonTokenizer(tokenizer)
