"""Several adapters on one PEFT model: which one is active, and one that gives rewards."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fastrl.models.model_files import ADAPTER_WEIGHTS, find_file
from fastrl.models.utils import evaluating, hidden_width

REFERENCE_ADAPTER = "fastrl_reference"  # a frozen copy of the adapter that training began with
REWARD_ADAPTER = "reward_model_adapter"  # TRL's name
TEACHER_ADAPTER = "fastrl_teacher"  # how names of teachers' adapters begin
NOT_TRAINED = (REFERENCE_ADAPTER, REWARD_ADAPTER, TEACHER_ADAPTER)
# Adapters that put trained vectors in front of a model's input.
_IN_FRONT = ("PROMPT_TUNING", "P_TUNING")
_IN_THE_CACHE = "PREFIX_TUNING"


@contextlib.contextmanager
def trainability_kept(model: nn.Module) -> Iterator[None]:
    """Restores every ``requires_grad`` afterwards: PEFT changes them as it switches adapters."""
    trained = [(p, p.requires_grad) for p in model.parameters()]
    try:
        yield
    finally:
        for parameter, was in trained:
            parameter.requires_grad_(was)


@contextlib.contextmanager
def acting(peft_model: Any, adapter: str) -> Iterator[None]:
    """Context in which another adapter than the policy's is active."""
    before = peft_model.active_adapter
    with trainability_kept(peft_model):
        try:
            peft_model.set_adapter(adapter)
            yield
        finally:
            peft_model.set_adapter(before)


def add_adapter(peft_model: Any, name: str, config: Any) -> None:
    """Adds an adapter that is not trained; other weights keep their ``requires_grad``."""
    trained = {name: p.requires_grad for name, p in peft_model.named_parameters()}
    peft_model.add_adapter(name, config)
    for each, parameter in peft_model.named_parameters():
        parameter.requires_grad_(trained.get(each, False))


def acting_adapters(model: nn.Module) -> tuple:
    """The state of a model's adapters: in each module those that are on, those that are merged, and
    scales. Two such values are equal where adapters act alike, apart from their weights."""
    acting_of_modules = []
    for module in model.modules():
        active = getattr(module, "active_adapters", None)
        if isinstance(active, list) and hasattr(module, "disable_adapters"):
            names = () if module.disable_adapters else tuple(active)
            merged = tuple(getattr(module, "merged_adapters", ()))  # type: ignore[arg-type]
            scaling: Any = getattr(module, "scaling", None)
            scaling = scaling if isinstance(scaling, dict) else {}
            acting_of_modules.append((names, merged, tuple(scaling.get(name) for name in names)))
    return tuple(acting_of_modules)


def adapter_dropout(model: Any) -> float:
    """The largest ``lora_dropout`` of the adapters that are active; 0 without one."""
    configs = getattr(model, "peft_config", None)
    if not configs:
        return 0.0
    # active_adapters is a property of PEFT's models, and a method of transformers' models.
    active = model.active_adapters() if callable(model.active_adapters) else model.active_adapters
    return max((getattr(configs[name], "lora_dropout", 0.0) for name in active), default=0.0)


def virtual_tokens(model: Any) -> int | None:
    """The number of positions by which a model's prompt learning shifts its output; 0 where the
    learned vectors are a cache's keys and values, which add none; None without prompt learning.

    Raises:
        ValueError: another kind of prompt learning, or an adapter beside it.
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


class RewardAdapter(nn.Module):
    """A sequence-classification adapter beside the policy's, on the same base, with its score head.

    Args:
        peft_model: the policy's PEFT model.
        path: a directory or Hub id of the adapter, with the head among its weights.
        hub: token and cache_dir for the Hub.

    Raises:
        ValueError: a model without an adapter, an encoder–decoder, prompt learning, an adapter
            without weights as safetensors, without a score head, or for another model.
    """

    def __init__(self, peft_model: Any, path: str, hub: dict[str, Any] | None = None):
        super().__init__()
        if not hasattr(peft_model, "peft_config"):
            raise ValueError(
                "reward_adapter needs a policy that is a PEFT model: pass peft_config too, or the "
                "path of an adapter in the model's place"
            )
        if getattr(peft_model.config, "is_encoder_decoder", False):
            raise ValueError(
                "reward_adapter is for causal models: for an encoder–decoder's responses, take the "
                "rewards of a separate reward model"
            )
        config, weights = _read(f"reward_adapter {path}", path, hub or {})
        head = {k.rpartition(".")[2]: v for k, v in weights.items() if _of_head(k)}
        if "weight" not in head:
            raise ValueError(
                f"reward_adapter {path} has no score head: train it with task_type='SEQ_CLS', or "
                "with modules_to_save=['score']"
            )
        labels, width = head["weight"].shape
        if width != hidden_width(peft_model.config):
            raise ValueError(
                f"reward_adapter {path} has a score head of width {width}, the model has "
                f"{hidden_width(peft_model.config)}: it was trained on another base"
            )
        config.modules_to_save = None  # the head, which is loaded apart
        weights = {k: v for k, v in weights.items() if not _of_head(k)}
        _load(peft_model, config, weights, REWARD_ADAPTER, f"reward_adapter {path}")
        self.score = nn.Linear(width, labels, bias="bias" in head)
        self.score.load_state_dict(head)
        self.score.to(peft_model.device, peft_model.dtype).requires_grad_(False)

    @torch.no_grad()
    def forward(self, peft_model: Any, inputs: dict[str, Any]) -> Tensor:
        """Scores [B, T, labels] of a batch; the LM head does not run."""
        with evaluating(peft_model), acting(peft_model, REWARD_ADAPTER):
            body = peft_model.get_base_model().base_model  # adapters included
            hidden = body(**inputs, use_cache=False).last_hidden_state
            return self.score(hidden.to(self.score.weight.dtype))


def _of_head(key: str) -> bool:
    return key.rpartition(".")[0].rpartition(".")[2] == "score"


def load_adapter(peft_model: Any, path: str, name: str, hub: dict[str, Any]) -> None:
    """Loads an adapter that is not trained beside a PEFT model's own.

    Args:
        name: the name that PEFT is to know it by.
        hub: token and cache_dir for the Hub.

    Raises:
        ValueError: prompt learning; trained weights beside the adapter's, such as a head; an
            adapter without weights as safetensors, or for another model.
    """
    config, weights = _read(f"adapter {path}", path, hub)
    if config.modules_to_save or getattr(config, "bias", "none") != "none":
        raise ValueError(
            f"adapter {path} holds trained weights of the base model beside its own "
            "(modules_to_save, bias): load it as a model of its own, with its base"
        )
    trained_on = config.base_model_name_or_path or ""
    base = getattr(peft_model.get_base_model().config, "name_or_path", "") or ""
    if trained_on and base and os.path.realpath(trained_on) != os.path.realpath(base):
        warnings.warn(
            f"adapter {path} was trained on {trained_on}, and is put on {base} here: where these "
            "are not the same weights, it is another model than the one that was trained",
            stacklevel=4,
        )
    _load(peft_model, config, weights, name, f"adapter {path}")


def _read(named: str, path: str, hub: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """An adapter's configuration and weights."""
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(path, **hub)
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(
            f"{named} is prompt learning ({config.peft_type}): use LoRA or another adapter on the "
            "weights"
        )
    file = find_file(path, ADAPTER_WEIGHTS, hub)
    if file is None:
        raise ValueError(
            f"{named} holds no {ADAPTER_WEIGHTS}: save it with safetensors, no other format is read"
        )
    return config, load_file(file)


def _load(peft_model: Any, config: Any, weights: dict[str, Tensor], name: str, named: str) -> None:
    from peft import set_peft_model_state_dict

    add_adapter(peft_model, name, config)
    result: Any = set_peft_model_state_dict(peft_model, weights, name)
    missing = [k for k in result.missing_keys if f".{name}." in k]
    for what, keys in (("lacks", missing), ("holds", result.unexpected_keys)):
        if keys:
            peft_model.delete_adapter(name)
            raise ValueError(f"{named} {what} {keys[0]}: it was trained on another base")
