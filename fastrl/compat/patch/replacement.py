"""A replacement of a function, method or class of TRL, and the check that it does the same."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The check's inputs have exact products even in TF32, so that results agree to fp32's rounding. The
# products behind gradients are not exact: TF32, where a user has switched it on, keeps 11 bits.
RESULT_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 5e-3


@dataclass
class Calls:
    """How often a replacement ran."""

    ours: int = 0  # on an op of fastrl_kernels
    delegated: int = 0  # calls of TRL's own, for arguments that the op does not cover


Build = Callable[[Any, Calls], Any]  # (TRL's own, counter) -> ours


@dataclass(frozen=True)
class Replacement:
    """One function, method or autograd function of TRL, and what runs in its place."""

    module: str  # the module that defines it
    name: str  # the name in that module; "Class.method" for a method
    op: str  # the op of fastrl_kernels
    build: Build
    cases: Callable[[torch.device], Sequence[tuple[Any, ...]]]  # small arguments to compare on

    def owner(self) -> tuple[Any, str]:
        """The module or class that defines TRL's object, and the object's name there.

        Raises:
            RuntimeError: TRL has no such object.
        """
        owner: Any = importlib.import_module(self.module)
        *parents, attribute = self.name.split(".")
        try:
            for parent in parents:
                owner = vars(owner)[parent]
            vars(owner)[attribute]
        except KeyError as missing:
            raise self.error(f"it is not there ({missing} is missing)") from None
        return owner, attribute

    def original(self) -> Any:
        owner, attribute = self.owner()
        return vars(owner)[attribute]

    def error(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{self.module}.{self.name} of the installed TRL cannot be replaced: {what}. "
            "Nothing was changed."
        )

    def check(self, original: Any, device: torch.device) -> None:
        """Compares ours with TRL's: signatures, and results and gradients on small inputs.

        Raises:
            RuntimeError: ours differs, or does not run its op once per input; the message says how.
        """
        calls = Calls()
        ours = self.build(original, calls)
        expected, actual = _parameters(ours), _parameters(original)
        if expected != actual:
            raise self.error(f"its parameters are {_listed(actual)}, not {_listed(expected)}")
        with torch.autocast(device.type, enabled=False):
            cases = self.cases(device)
            for number, arguments in enumerate(cases):
                theirs = _run(_entry(original), arguments)
                for what, difference in _differences(_run(_entry(ours), arguments), theirs):
                    raise self.error(f"{what} of check {number} differ: {difference}")
        if calls != Calls(ours=len(cases)):
            raise self.error(f"the check ran it {calls}, not {len(cases)} times")


def delegating(covers: Callable[..., bool]) -> Callable[[Callable[..., Any]], Build]:
    """Decorates a replacement of TRL's function: where ``covers`` is False, TRL's own is called."""

    def decorate(ours: Callable[..., Any]) -> Build:
        def build(original: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
            @functools.wraps(ours)
            def run(*args: Any, **kwargs: Any) -> Any:
                if not covers(*args, **kwargs):
                    calls.delegated += 1
                    return original(*args, **kwargs)
                calls.ours += 1
                return ours(*args, **kwargs)

            return run

        return build

    return decorate


def small(*shape: int, device: torch.device, step: int = 7, requires_grad: bool = False) -> Tensor:
    """Multiples of 1/8 in [-0.75, 0.75] in an irregular order; no random generator is used."""
    count = torch.Size(shape).numel()
    x = ((torch.arange(count, device=device) * step) % 13 - 6) / 8
    return x.reshape(shape).requires_grad_(requires_grad)


def _entry(x: Any) -> Callable[..., Any]:
    """What is called: ``apply`` of an autograd function, or the function itself."""
    return getattr(x, "apply", x)


def _parameters(x: Any) -> list[tuple[str, Any, Any]]:
    """Name, kind and default of each parameter, as callers see them."""
    is_autograd = inspect.isclass(x) and issubclass(x, torch.autograd.Function)
    declared = x.forward if is_autograd else _entry(x)
    parameters = list(inspect.signature(declared).parameters.values())
    return [(p.name, p.kind, p.default) for p in parameters[is_autograd:]]  # not ctx


def _listed(parameters: list[tuple[str, Any, Any]]) -> str:
    return ", ".join(
        name if default is inspect.Parameter.empty else f"{name}={default!r}"
        for name, _, default in parameters
    )


def _run(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Results, and gradients by the arguments that require one."""
    leaves = [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for x in arguments
    ]
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    with torch.set_grad_enabled(bool(wanted)):
        results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    roots = [x for x in results if x is not None and x.requires_grad]
    upstream = [small(*x.shape, device=x.device, step=5).to(x.dtype) for x in roots]
    if not roots:
        return results, ()
    return results, torch.autograd.grad(roots, wanted, upstream, allow_unused=True)


def _differences(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> list[tuple[str, str]]:
    """Names and descriptions of the differences; empty where there are none."""
    differences = []
    names = (("results", RESULT_TOLERANCE), ("gradients", GRADIENT_TOLERANCE))
    for (what, tolerance), our, their in zip(names, ours, theirs, strict=True):
        try:
            torch.testing.assert_close(our, their, rtol=tolerance, atol=tolerance)
        except (AssertionError, TypeError) as error:
            differences.append((what, " ".join(str(error).split())))
    return differences
