"""The names of a wrapper's weights in a state dict: the language model's own, as in TRL 0.11.

``state_dict()`` of a wrapper names the language model's weights as that does itself
(``transformer.wte.weight``), beside ``v_head.*`` and ``reward.*``; ``load_state_dict()`` takes
these names and those of the modules (``pretrained_model.transformer.wte.weight``). Where the
wrapper is a part of something else, such as FSDP, DDP or a module of the user's, names are those of
the modules: what gathers sharded weights finds them by their path.
"""

from __future__ import annotations

from typing import Any

from torch import nn

LANGUAGE_MODEL = "pretrained_model."


def name_as_language_model(module: nn.Module) -> None:
    """Registers the hooks on a wrapper."""
    # Functions, not methods: a copy of the module takes them along for itself.
    module.register_state_dict_post_hook(_shorten)
    module.register_load_state_dict_pre_hook(_lengthen)
    module.register_load_state_dict_post_hook(_shorten_missing)


def parts_of(state: dict[str, Any], own: tuple[str, ...]) -> tuple[dict, dict]:
    """The language model's entries by its own names, and those of the wrapper's ``own`` modules;
    from a state dict with either naming."""
    of_wrapper = {name: x for name, x in state.items() if name.startswith(own)}
    of_model = {
        name.removeprefix(LANGUAGE_MODEL): x for name, x in state.items() if name not in of_wrapper
    }
    return of_model, of_wrapper


def _is_sharded(module: nn.Module) -> bool:
    """Whether fully_shard was applied, to the wrapper or to a module in it: that makes a module's
    class one of its own."""
    kinds = {type(part) for part in module.modules()}
    return any(base.__name__ == "FSDPModule" for kind in kinds for base in kind.__mro__)


def _shorten(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    if prefix or _is_sharded(module):
        return
    entries = list(state.items())
    state.clear()  # in place, and in the same order
    state.update((name.removeprefix(LANGUAGE_MODEL), x) for name, x in entries)


def _lengthen(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    own = tuple(f"{prefix}{name}." for name, _child in module.named_children())
    for name in list(state):
        if name.startswith(prefix) and not name.startswith(own):
            state[f"{prefix}{LANGUAGE_MODEL}{name.removeprefix(prefix)}"] = state.pop(name)


def _shorten_missing(module: nn.Module, incompatible: Any) -> None:
    """What is missing or too much is named as in the state dict."""
    if _is_sharded(module):
        return
    for names in incompatible:
        names[:] = [name.removeprefix(LANGUAGE_MODEL) for name in names]
