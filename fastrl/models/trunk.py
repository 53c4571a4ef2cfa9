"""A causal language model's frozen bottom layers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.models.attention import Attention, replaced
from fastrl.models.lm_head import in_front_of_head
from fastrl.models.utils import checksum, evaluating

TRUNK_NAME = "fastrl_trunk.json"  # in the folder of a model whose trunk was frozen

_PROBE = 8  # tokens of the forward pass that finds a trunk's parameters


def layer_stack(model: Any) -> nn.ModuleList:
    """The decoder's layers, in order.

    Raises:
        LookupError: no list of modules, or several, is as long as the model is deep.
    """
    depth = model.config.get_text_config().num_hidden_layers
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    if len(stacks) != 1:
        raise LookupError(
            f"{type(model).__name__} has {len(stacks)} lists of {depth} modules: which are its "
            "layers is not clear"
        )
    return stacks[0]


class Trunk:
    """The bottom layers of a model with everything below them: embeddings, projections.

    The boundary is the output of the last of these layers, [B, T, H].

    Args:
        model: a transformers causal LM.
        layers: the number of these layers, at least 1; at least one layer is left above them.

    Raises:
        ValueError: layers out of range.
        LookupError: a model whose layers cannot be identified.
    """

    def __init__(self, model: Any, layers: int):
        self.model = model
        self.stack = layer_stack(model)
        self.layers = layers
        if not 1 <= layers < len(self.stack):
            raise ValueError(
                f"num_shared_layers must lie between 1 and {len(self.stack) - 1}, got {layers}: "
                f"{type(model).__name__} has {len(self.stack)} layers, and one must be left to "
                "train"
            )
        self._names, self.head_is_tied, self._tuples = _probe(model, self.stack[layers])

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trunk's parameters by their names in the model."""
        return {name: p for name, p in self.model.named_parameters() if name in self._names}

    def freeze(self) -> None:
        """Makes the trunk's parameters untrainable."""
        for parameter in self.parameters.values():
            parameter.requires_grad_(False)

    @torch.no_grad()
    def __call__(
        self, input_ids: Tensor, attention: Attention | None = None, **inputs: Any
    ) -> Tensor:
        """The boundary of sequences [B, T], or of a packed row [1, T].

        Args:
            attention: the attention of a packed row.
            inputs: further arguments of the model's forward.
        """
        outputs: list[Tensor] = []
        inputs.setdefault("attention_mask", torch.ones_like(input_ids))
        last = self.stack[self.layers - 1]
        with (
            self._replaced(dict.fromkeys(range(self.layers, len(self.stack)))),
            last.register_forward_hook(lambda _m, _args, out: outputs.append(_hidden(out))),
            in_front_of_head(self.model, lambda _head, hidden: hidden[:, :0]),
            replaced(self.model, attention),
        ):
            self.model(input_ids=input_ids, use_cache=False, **inputs)
        return outputs[0]

    def skipped(self, boundary: Tensor) -> AbstractContextManager[None]:
        """Context in which the model starts at this boundary: its bottom layers do not run."""
        last = self.layers - 1
        return self._replaced({**dict.fromkeys(range(last)), last: boundary})

    @contextmanager
    def _replaced(self, instead: dict[int, Tensor | None]) -> Iterator[None]:
        """Context in which the layers whose indices are in ``instead`` do not run: each returns the
        tensor there, or its input where that is None."""
        layers = list(self.stack)
        try:
            for i, hidden in instead.items():
                self.stack[i] = _Skipped(layers[i], hidden, self._tuples)
            yield
        finally:
            for i in instead:
                self.stack[i] = layers[i]

    @torch.no_grad()
    def checksum(self) -> str:
        """A checksum of all bits of the frozen weights."""
        return checksum(self.parameters)

    def record(self, weights: Mapping[str, Tensor]) -> str:
        """A checkpoint's record of its trunk, as JSON.

        Args:
            weights: the model's weights that are saved.
        """
        lower = {name: weights[name] for name in self._names}
        dtypes = sorted({str(x.dtype) for x in lower.values()})
        fields = {"num_shared_layers": self.layers, "dtypes": dtypes, "checksum": checksum(lower)}
        return json.dumps(fields, indent=2) + "\n"


def verify_record(model: Any, file: str | None) -> None:
    """Compares a loaded model with its checkpoint's record, where there is one.

    Raises:
        ValueError: the bottom layers are not those that were saved.
    """
    if file is None:
        return
    record = json.loads(Path(file).read_text())
    trunk = Trunk(model, record["num_shared_layers"])
    if sorted({str(p.dtype) for p in trunk.parameters.values()}) != record["dtypes"]:
        return  # loaded in another precision
    if trunk.checksum() != record["checksum"]:
        raise ValueError(
            f"{file} is not of these weights: the {trunk.layers} layers that were shared with a "
            "reference have changed since. Copy the checkpoint again from where it was saved, or "
            f"delete {TRUNK_NAME} if the change is meant"
        )


class _Skipped(nn.Module):
    """Replaces a layer: returns its input, or other hidden states."""

    def __init__(self, layer: nn.Module, instead: Tensor | None, as_tuple: bool):
        super().__init__()
        # The layer is not made a submodule, so that its parameters keep their names.
        self.__dict__["layer"] = layer
        self.instead, self.as_tuple = instead, as_tuple

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        out = hidden_states if self.instead is None else self.instead
        return (out,) if self.as_tuple else out

    def __getattr__(self, name: str) -> Any:
        # Attributes that a model reads from its layers, such as their kind of attention.
        return getattr(self.__dict__["layer"], name)


def _hidden(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


@torch.no_grad()
def _probe(model: Any, layer: nn.Module) -> tuple[frozenset[str], bool, bool]:
    """Runs a few tokens. Returns the names of parameters of modules that are called before the
    layer, whether later modules use one of them too, and whether layers return tuples."""
    before: list[nn.Module] = []
    after: list[nn.Module] = []
    tuples: list[bool] = []

    def see(module: nn.Module, _args: Any) -> None:
        (after if after or module is layer else before).append(module)

    handles = [module.register_forward_pre_hook(see) for module in model.modules()]
    handles.append(
        layer.register_forward_hook(lambda _m, _args, out: tuples.append(isinstance(out, tuple)))
    )
    try:
        ids = torch.arange(_PROBE, device=model.device).unsqueeze(0)
        ids %= model.config.get_text_config().vocab_size
        with evaluating(model):
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    below = {id(p) for module in before for p in module.parameters(recurse=False)}
    above = {id(p) for module in after for p in module.parameters(recurse=False)}
    # named_parameters gives each once, under its first name
    named = frozenset(name for name, p in model.named_parameters() if id(p) in below)
    return named, bool(below & above), tuples[0]
