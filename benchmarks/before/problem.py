"""One op on one set of inputs: how it is called, what the exact answer is, and how far off it is.

A kernel is judged by PyTorch's own error: against the op's specification
(`fastrl_kernels.reference`) in float64, its error may be at most twice that of the eager formula in
the same dtype (`eager.py`), plus 1e-7 of the exact result's norm.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

FACTOR, FLOOR = 2.0, 1e-7
DRAWS = 4  # of inputs, where one is not enough to judge by
# Memory of the float64 specification: this many bytes of the largest of its tensors at a time.
BLOCK_BYTES = 2**28

Results = dict[str, Tensor]
Implementation = Callable[..., Results]  # named inputs -> named outputs


@dataclasses.dataclass(frozen=True)
class Problem:
    """Inputs, the gradients asked for, and the implementations that need nothing but torch."""

    inputs: Mapping[str, Any]
    ours: Implementation
    eager: Implementation
    exact: Implementation
    wrt: tuple[str, ...] = ()
    # The gradient that comes from above for each output; without one, an output is a statistic.
    upstream: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    # Inputs and outputs with a row for each of the batch's: the exact answer is worked out block by
    # block. Outputs that are not among them are sums over rows.
    by_row: frozenset[str] = frozenset()
    row_bytes: int = 0  # of the largest float64 tensor, per row; 0: no blocks
    # Outputs that the exact answer depends on, such as the tokens that were drawn.
    given: tuple[str, ...] = ()


def forward(
    problem: Problem, call: Implementation
) -> tuple[Results, dict[str, Tensor], dict[str, Tensor]]:
    """A call's outputs, the leaves that gradients are wanted for, and the gradients from above."""
    leaves = {name: problem.inputs[name].detach().requires_grad_() for name in problem.wrt}
    outputs = call(**{**problem.inputs, **leaves})
    return outputs, leaves, {k: g for k, g in problem.upstream.items() if k in outputs}


def backward(state: tuple[Results, dict[str, Tensor], dict[str, Tensor]]) -> Results:
    """The outputs, and the gradients as `d<input>`."""
    outputs, leaves, upstream = state
    found = {name: x.detach() for name, x in outputs.items()}
    if leaves:
        roots = [outputs[name] for name in upstream]
        grads = torch.autograd.grad(roots, list(leaves.values()), list(upstream.values()))
        found |= {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}
    return found


def results(problem: Problem, call: Implementation) -> Results:
    """Outputs and gradients of one call: what is timed."""
    return backward(forward(problem, call))


@dataclasses.dataclass(frozen=True)
class Error:
    """Norms of (found - exact) and of exact; not finite where infinities or NaNs differ."""

    error: float
    norm: float

    @property
    def relative(self) -> float:
        return self.error / self.norm if self.norm else self.error


def errors(problem: Problem, found: Results, block_bytes: int = BLOCK_BYTES) -> dict[str, Error]:
    """How far each of `found` lies from the specification in float64.

    `found` may lack outputs (a peer that computes less); gradients are then judged as those of
    the outputs that are there.
    """
    return errors_of(problem, {"": found}, block_bytes)[""]


def errors_of(
    problem: Problem, found: Mapping[str, Results], block_bytes: int = BLOCK_BYTES
) -> dict[str, dict[str, Error]]:
    """`errors` of several results; the exact answer is worked out once for all that share it."""
    groups: dict[object, dict[str, Results]] = {}
    for name, one in found.items():
        same: object = name if problem.given else frozenset(problem.upstream.keys() & one.keys())
        groups.setdefault(same, {})[name] = one
    judged = {}
    for group in groups.values():
        judged |= _errors_of_group(problem, group, block_bytes)
    return judged


def _errors_of_group(
    problem: Problem, found: dict[str, Results], block_bytes: int
) -> dict[str, dict[str, Error]]:
    squares: dict[tuple[str, str], list[Tensor]] = {}
    sums: Results = {}
    for rows, exact in _exact_blocks(problem, next(iter(found.values())), block_bytes):
        for name, value in exact.items():
            whole = name if name in problem.by_row else name.removeprefix("d")
            if whole in problem.by_row:
                for who, one in found.items():
                    if name in one:
                        squares.setdefault((who, name), []).append(_squares(one[name][rows], value))
            else:
                sums[name] = sums[name] + value if name in sums else value
    for who, one in found.items():
        for name in sums.keys() & one.keys():
            squares[who, name] = [_squares(one[name], sums[name])]
    judged: dict[str, dict[str, Error]] = {who: {} for who in found}
    for (who, name), parts in squares.items():
        error, norm = torch.stack(parts).sum(0).tolist()
        judged[who][name] = Error(math.sqrt(error), math.sqrt(norm))
    return judged


def ratio(ours: Mapping[str, Error], torchs: Mapping[str, Error]) -> float:
    """The worst of our errors over PyTorch's own; green up to FACTOR.

    The floor of 1e-7 of the exact result's norm is on PyTorch's side.
    """
    worst = 0.0
    for name, mine in ours.items():
        allowed = FACTOR * torchs[name].error + FLOOR * mine.norm
        here = FACTOR * mine.error / allowed if allowed else (0.0 if mine.error == 0 else math.inf)
        worst = math.nan if math.isnan(here) or math.isnan(worst) else max(worst, here)
    return worst


def settled(
    ours: Mapping[str, Error], torchs: Mapping[str, Error], others: Iterable[Problem]
) -> float:
    """The `ratio` of one draw of inputs; beyond FACTOR, of this draw and others together.

    What is a single number, a loss, PyTorch may hit by luck: its error over one draw says little.
    `others` are asked for one by one, and no further than it takes.
    """
    mine, eagers = [ours], [torchs]
    error = ratio(ours, torchs)
    if error <= FACTOR:
        return error
    for problem in others:
        found = {"ours": results(problem, problem.ours), "eager": results(problem, problem.eager)}
        judged = errors_of(problem, found)
        mine.append(judged["ours"])
        eagers.append(judged["eager"])
        error = ratio(pooled(mine), pooled(eagers))
        if error <= FACTOR:
            break
    return error


def pooled(draws: Sequence[Mapping[str, Error]]) -> dict[str, Error]:
    """Errors of several draws as if all were one."""
    return {
        name: Error(
            math.hypot(*(draw[name].error for draw in draws)),
            math.hypot(*(draw[name].norm for draw in draws)),
        )
        for name in draws[0]
    }


def worst_relative(mine: Mapping[str, Error]) -> float:
    """The largest of the relative errors; NaN where one is."""
    values = [error.relative for error in mine.values()]
    return math.nan if any(map(math.isnan, values)) else max(values)


def _exact_blocks(
    problem: Problem, found: Results, block_bytes: int
) -> Iterator[tuple[slice, Results]]:
    """(which rows, outputs and gradients in float64), a block of rows at a time."""
    inputs = {k: _double(x) for k, x in problem.inputs.items() if k not in problem.by_row}
    rows = next((len(x) for k, x in problem.inputs.items() if k in problem.by_row), 1)
    step = max(1, block_bytes // problem.row_bytes) if problem.row_bytes else rows
    upstream = {name: g for name, g in problem.upstream.items() if name in found}
    for start in range(0, rows, step):
        here = slice(start, start + step)
        block = {k: _double(x[here]) for k, x in problem.inputs.items() if k in problem.by_row}
        block |= {name: found[name][here] for name in problem.given}
        gradients = {k: _double(g[here] if k in problem.by_row else g) for k, g in upstream.items()}
        call = problem.exact
        part = dataclasses.replace(problem, inputs=inputs | block, upstream=gradients)
        yield here, results(part, call)


def _double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _squares(found: Tensor, exact: Tensor) -> Tensor:
    """[Σ (found - exact)², Σ exact²]; NaN where infinities differ."""
    found = found.double()
    same = found == exact  # infinities too
    difference = torch.where(same, 0.0, found - exact)
    finite = torch.where(exact.isinf(), 0.0, exact)
    return torch.stack([difference.square().sum(), finite.square().sum()])
