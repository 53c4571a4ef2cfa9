"""Texts as literals of a Lark grammar that llguidance reads."""

from __future__ import annotations

import json
import re
from typing import Any


def lark_literal(text: str, tokenizer: Any) -> str:
    """A text as literals of a grammar. Tokens that were added to a tokenizer's vocabulary, such as
    ``<tool_call>``, are named by their ids: llguidance takes them for tokens without a text, and a
    literal that spells one would have no token to go on with."""
    added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
    if not added:
        return json.dumps(text)
    longest_first = sorted(added, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    return " ".join(f"<[{added[x]}]>" if x in added else json.dumps(x) for x in parts if x)
