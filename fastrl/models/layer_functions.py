"""The functions of transformers' modelling files that recurrent layers call, and those that run in
their place while a packed row or a decode step of slots is run."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from torch import nn

from fastrl.models import recurrence
from fastrl.models.packed_parts import PackedParts

# The functions' names in transformers' modelling files.
CONVOLUTION = "causal_conv1d_fn"
_OF_ROWS: dict[str, Callable[..., Any]] = {
    CONVOLUTION: recurrence.convolved,
    "torch_chunk_gated_delta_rule": recurrence.gated_delta_rule,
    "chunk_kimi_delta_attention": recurrence.kimi_delta_rule,
    "mamba2_chunk_scan": recurrence.mamba2_scan,
    "mamba2_split_conv1d_scan_combined": recurrence.nothing,
}
_UPDATE = "mamba2_selective_state_update"
_OF_SLOTS: dict[str, Callable[..., Any]] = {
    _UPDATE: recurrence.limited_update,
    "torch_recurrent_gated_delta_rule": recurrence.delta_step,
}


def replacements(
    model: nn.Module,
    homes: Iterable[str],
    running: Callable[[], bool],
    parts: Callable[[], PackedParts | None],
) -> Iterator[tuple[ModuleType, str, Callable[..., Any]]]:
    """Yields modelling files, names of their functions, and what a model's layers call in the place
    of these functions. Raises NotImplementedError where the layers' limits of time steps differ.

    Args:
        homes: names of the modules that define the model's layers.
        running: returns whether a forward of ours is going on; else the original functions run.
        parts: returns the parts of that forward's packed row; None where it decodes slots.
    """
    homes = [home for home in homes if _replaceable(home)]
    limit = _step_limit(model) if homes else recurrence.NO_LIMIT
    for home in homes:
        module = sys.modules[home]
        for name in _replaceable(home):
            function = getattr(module, name)
            if not hasattr(function, "is_ours"):  # else an outer context has replaced it
                yield module, name, _replacing(name, function, limit, running, parts)


def _replacing(
    name: str,
    original: Any,
    limit: tuple[float, float],
    running: Callable[[], bool],
    parts: Callable[[], PackedParts | None],
) -> Callable[..., Any]:
    of_slots: dict[str, Any] = {
        **_OF_SLOTS,
        _UPDATE: functools.partial(recurrence.limited_update, limit),
    }

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not running():
            return original(*args, **kwargs)
        if name in of_slots:
            return of_slots[name](original, *args, **kwargs)
        packed = parts()
        if packed is None:
            return original(*args, **kwargs)
        return _OF_ROWS[name](packed, original, *args, **kwargs)

    run.is_ours = True  # type: ignore[attr-defined]
    return run


@functools.cache
def _replaceable(home: str) -> tuple[str, ...]:
    """Names of the functions that are replaced in the module of the name ``home``."""
    names = vars(sys.modules[home]) if home in sys.modules else ()
    return tuple(name for name in (*_OF_ROWS, *_OF_SLOTS) if name in names)


def _step_limit(model: nn.Module) -> tuple[float, float]:
    """The limits of the time step dt, the same for all layers; NO_LIMIT where none has any.

    Raises:
        NotImplementedError: the layers' limits differ.
    """
    limits = {tuple(limit) for x in model.modules() if (limit := getattr(x, "time_step_limit", ()))}
    if len(limits) > 1:
        raise NotImplementedError(f"its layers have several limits of the time step ({limits})")
    return limits.pop() if limits else recurrence.NO_LIMIT
