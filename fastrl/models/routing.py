"""Mixtures of experts: the experts that routers choose for a forward's tokens, statistics of these
choices, and routing replay, in which a forward takes the choices of another one.

Every router has a number, in the model's order, and hands its results to the :class:`Routing` of
the forward that is going on. A router is replayed by its own code: its choice (``torch.topk``) is
replaced, so that the router itself gives weights and their gradients at the experts that were
chosen before.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastrl.models.host_memory import to_device
from fastrl.run.contexts import variable_set

UNKNOWN = -1  # in the place of an expert: the router chooses


class Routes(Protocol):
    """The receiver of routers' results in a forward."""

    def route(self, number: int, router: Any, args: tuple, out: tuple) -> tuple | None:
        """Takes what a router returned, logits [T, E], weights [T, k] and experts [T, k]; a result
        that is not None takes its place."""


_active: ContextVar[Routes | None] = ContextVar("fastrl_routing", default=None)


def routed(routes: Routes | None) -> AbstractContextManager[None]:
    """Context in which routers hand their results to ``routes``."""
    return variable_set(_active, routes)


def current_routes() -> Routes | None:
    """The routes of the forward that is going on; None outside of :func:`routed`."""
    return _active.get()


def routers(model: nn.Module) -> list[nn.Module]:
    """The modules that choose experts, in the model's order; none of a dense model."""
    candidates = [m for m in model.modules() if _is_router(m)]
    return [m for m in candidates if not any(_is_router(x) for x in m.modules() if x is not m)]


def _is_router(module: Any) -> bool:
    numbers = (getattr(module, name, None) for name in ("top_k", "num_experts"))
    return all(isinstance(x, int) for x in numbers) and not hasattr(module, "experts")


def refuse_dense(model: nn.Module, router_aux_loss_coef: float) -> None:
    """Raises ValueError where a model has no routers, but their loss has a nonzero coefficient."""
    if router_aux_loss_coef and not routers(model):
        raise ValueError(
            f"router_aux_loss_coef={router_aux_loss_coef:g}, but {type(model).__name__} is no "
            "mixture of experts whose routers are known: leave it out"
        )


def follow_routers(model: nn.Module, router_aux_loss_coef: float = 0.0) -> int:
    """Has a model's routers hand their results to the routing of a forward; returns the number of
    routers, 0 if they cannot be followed.

    Raises:
        ValueError: the coefficient of their loss is not 0, and they cannot be followed.
    """
    routers_of_model, cause = routers(model), why_not_followed(model)
    if cause is not None:
        if router_aux_loss_coef:
            raise ValueError(
                f"router_aux_loss_coef={router_aux_loss_coef:g}, but {cause}: leave it out"
            )
        return 0
    for number, router in enumerate(routers_of_model):
        if "router_number" not in vars(router):
            router.router_number = number  # type: ignore[assignment]
            router.register_forward_hook(_speak)
    return len(routers_of_model)


def computed_aux_loss(output: Any) -> Tensor:
    """The load-balancing loss that a mixture's own forward has computed.

    Raises:
        ValueError: there is none, as in architectures whose routers transformers does not record.
    """
    loss = getattr(output, "aux_loss", None)
    if not isinstance(loss, Tensor):
        raise ValueError(
            "this version of transformers computes no load-balancing loss for the model: set "
            "router_aux_loss_coef=0"
        )
    return loss


def routers_of(model: nn.Module) -> list[Any]:
    """The routers of a mixture, after :func:`follow_routers`; none of a dense model.

    Raises:
        ValueError: they cannot be replayed.
    """
    cause = why_not_followed(model)
    if cause is not None:
        raise ValueError(f"replay_routing: the experts' choices cannot be replayed, as {cause}")
    follow_routers(model)
    return routers(model)


def replays(model: nn.Module, asked: bool) -> bool:
    """Whether the experts' choices of rollouts are replayed; warns of a model without experts.

    Raises:
        ValueError: see :func:`routers_of`.
    """
    if not asked:
        return False
    routes = bool(routers_of(model))
    if not routes:
        warnings.warn(
            f"replay_routing is ignored: {type(model).__name__} is dense, it has no experts to "
            "choose from",
            stacklevel=4,
        )
    return routes


def refuse_beside(**others: Any) -> None:
    """Raises ValueError where one of ``others`` is set: ``replay_routing`` goes with none."""
    conflicting = [name for name, x in others.items() if x]
    if conflicting:
        raise ValueError(
            "replay_routing keeps the experts' choices of single responses of the engine: leave it "
            f"out beside {', '.join(conflicting)}"
        )


def _speak(router: Any, args: tuple, out: tuple) -> tuple | None:
    routes = _active.get()
    if routes is None:
        return None
    result = routes.route(router.router_number, router, args, _in_order(out))
    return result if result is None or _in_order(out) is out else result[::-1]


def _in_order(out: tuple) -> tuple:
    """What a router returns, as (logits, weights, experts): GraniteMoeHybrid's has them the other
    way round with older versions of transformers."""
    return out[::-1] if out[-1].is_floating_point() else out


@torch.no_grad()
def why_not_followed(model: nn.Module) -> str | None:
    """Why a mixture's routers cannot be replayed: they have another form than (logits, weights,
    experts), or do not choose by ``torch.topk`` of a number for each expert. None if they can, by a
    trial of each kind of router, and for dense models."""
    tried = set()
    for router in routers(model):
        if type(router) in tried:
            continue
        tried.add(type(router))
        followed: Any = router
        weight = next(iter(router.parameters()), None)
        if weight is None or weight.is_meta:
            return f"{type(router).__name__} has no weights"
        hidden = torch.linspace(-1, 1, 3 * weight.shape[-1], device=weight.device)
        hidden = hidden.to(weight.dtype).view(3, weight.shape[-1])
        with routed(None):
            try:
                logits, _, experts = out = _in_order(followed(hidden))
                shapes = [tuple(x.shape) for x in out]
                of_topk = (3, followed.top_k)
                if shapes != [(3, followed.num_experts), of_topk, of_topk]:
                    raise ValueError(f"it returns tensors of the shapes {shapes}")
                again = replayed(followed, (hidden,), experts)
                others = (experts + 1) % followed.num_experts
                moved = replayed(followed, (hidden,), others)
                same = all(map(torch.equal, out, again))
                if not (same and torch.equal(moved[2], others) and torch.equal(moved[0], logits)):
                    raise ValueError("it does not choose by topk of a number for each expert")
            except Exception as error:
                return f"{type(router).__name__} has another form ({error})"
    return None


class _Chosen(TorchFunctionMode):
    """Replaces a router's choice of k experts, among the scores [T, E] of all, by others [T, k]."""

    def __init__(self, experts: Tensor, count: int):
        super().__init__()
        self.experts, self.shape = experts, (len(experts), count)

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.topk, Tensor.topk) and tuple(args[0].shape) == self.shape:
            return torch.return_types.topk((args[0].gather(-1, self.experts), self.experts))
        return func(*args, **(kwargs or {}))


def replayed(router: Any, args: tuple, experts: Tensor) -> tuple:
    """(logits, weights, experts) of a router where it chooses these experts [T, k]."""
    with _Chosen(experts, router.num_experts):
        return _in_order(router.forward(*args))


class Routing:
    """The routing of one forward.

    Args:
        weights: [T] fp32, how many sequences have each of the forward's tokens; 0 for padding.
        choices: [T, L, k], the experts that L routers chose in another forward, ``UNKNOWN`` where
            the router chooses; None: it chooses all.
    """

    def __init__(self, weights: Tensor, choices: Tensor | None = None):
        self.weights, self.choices = weights, choices
        self._logits: dict[int, Tensor] = {}  # by the router's number
        self._experts: dict[int, Tensor] = {}
        self._changed: list[Tensor] = []  # [2] each: numbers of changed and of known choices

    @classmethod
    def of(
        cls,
        places: Tensor,
        lengths: Sequence[int],
        experts: Sequence[Tensor | None],
        input_ids: Tensor,
    ) -> Routing:
        """The routing of a forward that runs some sequences.

        Args:
            places: the places of the sequences' tokens among the forward's tokens, [Σ n]; a token
                may belong to several sequences.
            lengths: the number of tokens n of each sequence.
            experts: the choices [≤ n, L, k] of each sequence's first tokens; None: not known.
            input_ids: the forward's token ids.
        """
        weights = torch.from_numpy(np.bincount(places.numpy(), minlength=input_ids.numel())).float()
        first = next((x for x in experts if x is not None), None)
        choices = None
        if first is not None:
            rows = np.full((input_ids.numel(), *first.shape[1:]), UNKNOWN, np.int16)
            for at, n, chosen in zip(places.split(list(lengths)), lengths, experts, strict=True):
                if chosen is not None:
                    rows[at[: len(chosen)].numpy()] = chosen[:n].numpy()
            choices = to_device(torch.from_numpy(rows), input_ids.device)
        return cls(to_device(weights, input_ids.device), choices)

    def route(self, number: int, router: Any, args: tuple, out: tuple) -> tuple | None:
        """Notes a router's results, and replays its ``choices`` where they are known, see
        :class:`Routes`. A layer that runs again in the backward pass is replayed, too."""
        logits, _, experts = out
        result, first = None, number not in self._logits
        if self.choices is not None:
            kept = self.choices[:, number].long()
            is_known = kept != UNKNOWN
            if first:
                changed = (kept.unsqueeze(2) != experts.unsqueeze(1)).all(2) & is_known
                self._changed.append(torch.stack([changed.sum(), is_known.sum()]))
            experts = torch.where(is_known, kept, experts)
            result = replayed(router, args, experts)
            logits = result[0]
        if first:
            self._logits[number], self._experts[number] = logits, experts
        return result

    def load(self) -> Tensor:
        """The share of the choices that each expert gets, [L, E] fp32."""
        return torch.stack([self._shares(number) for number in self._logits])

    def _shares(self, number: int) -> Tensor:
        experts, logits = self._experts[number], self._logits[number]
        weights = self.weights.unsqueeze(1).expand_as(experts).flatten()
        counts = torch.zeros(logits.shape[-1], device=logits.device)
        return counts.index_add(0, experts.flatten(), weights) / weights.sum().clamp(min=1)

    def aux_loss(self) -> Tensor:
        """E·k·Σ_e f_e·P_e, [] with a gradient: f_e the share of the choices that expert e gets, and
        P_e its mean probability softmax(logits)_e, both over the tokens of all layers together (the
        load-balancing loss of Switch Transformers, arXiv 2101.03961, as transformers has it)."""
        total = self.weights.sum().clamp(min=1)
        probs = [
            (x.float().softmax(-1) * self.weights.unsqueeze(1)).sum(0) / total
            for x in self._logits.values()
        ]
        k = next(iter(self._experts.values())).shape[1]
        mean = torch.stack(probs).mean(0)
        return (self.load().mean(0) * mean).sum() * (len(mean) * k)

    def statistics(self) -> dict[str, Tensor]:
        """``load``: E times the share of a layer's busiest expert, as a mean over layers (1 where
        all experts get equally many tokens); ``aux_loss``; with ``choices`` also
        ``changed_choices``, the share of the known choices that the router would not have made, NaN
        where none is known. [] each."""
        load = self.load()
        numbers = {
            "load": (load.amax(-1) * load.shape[-1]).mean(),
            "aux_loss": self.aux_loss().detach(),
        }
        if self.choices is not None:
            changed, total = torch.stack(self._changed).sum(0)
            numbers["changed_choices"] = changed / total
        return numbers


def without_routing(inputs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a policy's forward for another model, whose routers choose for themselves."""
    return {name: x for name, x in inputs.items() if name != "routing"}
