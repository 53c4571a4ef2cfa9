"""PART=WORD: the part of `make thorough` that a word draws. Each program draws its own of it, the
same each time, so that over many words all of it comes round."""

import os
import zlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def drawn(choices: Sequence[T], of: str) -> Sequence[T]:
    """One of the choices; all of them where no part is asked for.

    Args:
        of: what is drawn, so that no two draws go together.
    """
    word = os.environ.get("PART")
    if not word:
        return choices
    return [choices[zlib.crc32(f"{of} {word}".encode()) % len(choices)]]
