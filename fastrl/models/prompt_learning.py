"""Adapters that put trained vectors in front of a model's input."""

from __future__ import annotations

from typing import Any

_IN_FRONT = ("PROMPT_TUNING", "P_TUNING")
_IN_THE_CACHE = "PREFIX_TUNING"


def virtual_tokens(model: Any) -> int | None:
    """The number of positions by which a model's adapter shifts its output; None without such an
    adapter, and 0 where the vectors are keys and values, and no positions.

    Raises:
        ValueError: another kind, or several adapters.
    """
    configs = getattr(model, "peft_config", {})
    learned = [config for config in configs.values() if config.is_prompt_learning]
    if not learned:
        return None
    kind = str(getattr(learned[0].peft_type, "value", learned[0].peft_type))
    if len(configs) > 1 or kind not in (*_IN_FRONT, _IN_THE_CACHE):
        raise ValueError(
            f"{kind} among {len(configs)} adapters is not supported: use one of "
            f"{', '.join((*_IN_FRONT, _IN_THE_CACHE))} alone, or LoRA"
        )
    return learned[0].num_virtual_tokens if kind in _IN_FRONT else 0
