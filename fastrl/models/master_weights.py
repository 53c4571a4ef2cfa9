"""Float32 masters of bfloat16 and float16 weights: steps too small for their spacing add up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fastrl.models.host_memory import in_host_memory, to_host
from fastrl.models.sharding import own_share

MASTER = "master_weight"  # the master's name in an optimizer's state, beside the moments
LOW_PRECISION = (torch.bfloat16, torch.float16)
_PART = 1 << 26  # weights whose gradients are float32 at a time: 256 MiB
_OF_INNER = (  # methods of the optimizer that steps the masters
    *("zero_grad", "add_param_group", "register_step_pre_hook", "register_step_post_hook"),
    *("register_state_dict_pre_hook", "register_state_dict_post_hook"),
    *("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"),
)
# Optimizers that treat each weight by itself, so that a step can be taken in parts.
_BY_WEIGHT = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop)


class MasterWeights(torch.optim.Optimizer):
    """Steps float32 copies of low-precision weights, and rounds the weights to nearest from them:

        m ← step of the inner optimizer from m along float32(∇w),  w ← round(m)

    m is float32: steps below half the spacing of w add up until w moves, as when training
    in float32. That takes 4 bytes more for each weight; moments are float32. Weights that are
    float32 are stepped themselves, unless ``on_host``.

    The parameter groups are the inner optimizer's own, with the model's weights: schedules,
    gradient scalers and accelerate see those. Masters are made at the first step, and are saved in
    ``state_dict`` beside a weight's moments, as ``master_weight``. Where weights were written since
    the last step (by the model's ``load_state_dict``, say), their masters follow.

    Args:
        inner: steps the masters; its hooks and ``zero_grad`` are this optimizer's.
        on_host: keep masters of all weights, and with them the moments, in host memory, and step
            there: the device has no optimizer state.
    """

    def __init__(self, inner: torch.optim.Optimizer, on_host: bool = False):
        # torch's own __init__ would make groups and a state of this optimizer's.
        self.inner = inner
        self.on_host = on_host
        for name in _OF_INNER:
            setattr(self, name, getattr(inner, name))
        self._masters: dict[Tensor, Tensor] = {}
        self._stepped = False

    @property
    def masters(self) -> list[Tensor]:
        """The float32 masters that there are so far."""
        return list(self._masters.values())

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """What is kept for each weight, by the weight; ``master_weight`` is its master."""
        states: dict[Tensor, Any] = {}
        for weight in self._weights():
            master = self._masters.get(weight)
            state = self.inner.state.get(weight if master is None else master, {})
            states[weight] = state if master is None else {**state, MASTER: master}
        return states

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._follow()
            for part in self._parts():
                self._step(part)
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's own would wrap the step of all optimizers of this class.
        self.__dict__.update(state)

    def state_dict(self) -> dict[str, Any]:
        with torch.no_grad():
            self._follow()
        with self._lent():
            packed = self.inner.state_dict()
        state = dict(packed["state"])
        for key, weight in zip(_keys(packed), self._weights(), strict=True):
            if weight in self._masters:
                state[key] = {**state.get(key, {}), MASTER: self._masters[weight]}
        return {**packed, "state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the optimizer's state, as in torch. Masters that the state lacks are made of the
        weights, which must be loaded before it."""
        state = {key: dict(entries) for key, entries in state_dict["state"].items()}
        keys, weights = _keys(state_dict), list(self._weights())
        saved = {key: each.pop(MASTER) for key, each in state.items() if MASTER in each}
        self._masters.clear()
        self.inner.state.clear()
        for key, weight in zip(keys, weights, strict=True):
            if key in state and self._needs_master(weight):
                self._masters[weight] = self._new(saved.get(key, weight), weight)
        kept = {key: each for key, each in state.items() if each}
        with self._lent():
            self.inner.load_state_dict({**state_dict, "state": kept})

    def train(self) -> None:
        """Switches to the trained weights, in optimizers that evaluate other weights."""
        self._switch("train")

    def eval(self) -> None:
        """Switches to the weights to evaluate, in optimizers that train other weights."""
        self._switch("eval")

    def _weights(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def _needs_master(self, weight: Tensor) -> bool:
        return self.on_host or weight.dtype in LOW_PRECISION

    def _master(self, weight: Tensor) -> Tensor:
        """The tensor that is stepped in place of a weight, made at its first use."""
        if weight not in self._masters and self._needs_master(weight):
            state = self.inner.state.pop(weight, None)  # left by steps without masters
            self._masters[weight] = self._new(weight, weight)
            if state is not None:
                self.inner.state[self._masters[weight]] = {
                    name: x.float() if isinstance(x, Tensor) and x.dtype in LOW_PRECISION else x
                    for name, x in state.items()
                }
        return self._masters.get(weight, weight)

    def _new(self, source: Tensor, weight: Tensor) -> Tensor:
        if not self.on_host:
            return source.detach().to(weight.device, torch.float32, copy=True)
        with in_host_memory():
            master = source.detach().to("cpu", torch.float32, copy=True)
            return master.pin_memory() if torch.cuda.is_available() else master

    def _follow(self) -> None:
        """Has masters take the values of weights that were written since the last step: those that
        are no longer their masters rounded.

        Values are compared, as writes to ``weight.data`` leave no other trace; no result is read,
        for which the host would wait.
        """
        for weight, master in self._masters.items():
            for values, of_master in _in_parts(own_share(weight.detach()), own_share(master)):
                moved = to_host(values) if self.on_host else values.to(of_master.device)
                same = of_master.to(moved.dtype) == moved
                torch.where(same, of_master, moved, out=of_master)

    def _parts(self) -> Iterator[Sequence[Tensor] | None]:
        """The weights that are stepped together; None: all, whether they have a gradient or not."""
        if type(self.inner) not in _BY_WEIGHT:
            yield None
            return
        part: list[Tensor] = []
        size = 0
        for weight in self._weights():
            if weight.grad is None:
                continue
            count = own_share(weight.detach()).numel()
            if part and size + count > _PART:
                yield part
                part, size = [], 0
            part.append(weight)
            size += count
        yield part  # empty where no weight has a gradient: hooks run all the same

    def _step(self, part: Sequence[Tensor] | None) -> None:
        stepped = list(self._weights()) if part is None else part
        if not self._stepped and hasattr(self.inner, "check_overrides"):
            self.inner.check_overrides()  # bitsandbytes finds settings of weights by their identity
        self._stepped = True
        masters = [(w, self._master(w)) for w in stepped]
        pairs = [(w, m) for w, m in masters if m is not w]
        try:
            with in_host_memory() if self.on_host else nullcontext():
                for weight, master in pairs:
                    if weight.grad is not None:
                        master.grad = self._gradient(weight.grad, master)
                with self._lent(part):
                    self.inner.step()
        finally:
            for _, master in pairs:
                master.grad = None
        self._round(pairs)

    def _gradient(self, grad: Tensor, master: Tensor) -> Tensor:
        if self.on_host:
            return to_host(grad, master.dtype)
        return grad.to(master.device, master.dtype)

    def _round(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for weight, master in pairs:
            weight.copy_(master)

    @contextmanager
    def _lent(self, part: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Context in which groups have masters in place of weights; with ``part`` they have only
        the masters of its weights."""
        lent_weights = [group["params"] for group in self.param_groups]
        chosen = None if part is None else {id(weight) for weight in part}
        try:
            for group, weights in zip(self.param_groups, lent_weights, strict=True):
                group["params"] = [
                    self._masters.get(w, w) for w in weights if chosen is None or id(w) in chosen
                ]
            yield
        finally:
            # load_state_dict makes new groups.
            for group, weights in zip(self.param_groups, lent_weights, strict=True):
                group["params"] = weights

    def _switch(self, mode: str) -> None:
        switch = getattr(self.inner, mode, None)
        if switch is None:
            return
        with torch.no_grad():
            self._follow()
            with self._lent():
                switch()
            self._round(list(self._masters.items()))


def with_master_weights(optimizer: Any, on_host: bool = False) -> Any:
    """The optimizer over float32 masters of its low-precision weights; the optimizer itself where
    it has no such weights, or handles their rounding, unless ``on_host``.

    Args:
        on_host: keep masters of all weights, and the moments, in host memory.
    """
    if isinstance(optimizer, MasterWeights):
        return optimizer
    low = any(w.dtype in LOW_PRECISION for g in optimizer.param_groups for w in g["params"])
    if on_host or (low and not handles_rounding(optimizer)):
        return MasterWeights(optimizer, on_host)
    return optimizer


def handles_rounding(optimizer: Any) -> bool:
    """Whether an optimizer of low-precision weights loses no small steps: torchao's rounds
    stochastically, optimi's keep what rounding takes off (Kahan sums)."""
    kahan = any(group.get("kahan_sum") for group in optimizer.param_groups)
    return bool(kahan or getattr(optimizer, "bf16_stochastic_round", False))


def _keys(packed: dict[str, Any]) -> list[Any]:
    """The names of an optimizer's weights in its state dict, in their order."""
    return [key for group in packed["param_groups"] for key in group["params"]]


def _in_parts(one: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of views of two tensors of a shape: rows of ``_PART`` weights at most, or one row."""
    if one.numel() <= _PART or one.dim() == 0:
        yield one, other
        return
    rows = max(1, _PART // (one.numel() // len(one)))
    yield from zip(one.split(rows), other.split(rows), strict=True)
