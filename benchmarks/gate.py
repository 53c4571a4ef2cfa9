"""The gate of ops: an op's error against its specification in float64 may be at most twice the
error of the eager formula in the same dtype, plus 1e-7 of the exact result's norm."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.cases import EAGER, OURS

FACTOR, FLOOR = 2.0, 1e-7
DRAWS = 4  # of inputs, where one is not enough to judge by
# The exact answer is computed in blocks: this many bytes of its largest tensor at a time.
BLOCK_BYTES = 2**28

Results = dict[str, Tensor]
Implementation = Callable[..., Results]  # named inputs -> named outputs
State = tuple[Results, Results, Results]


@dataclasses.dataclass(frozen=True)
class Problem:
    """An op on one set of inputs, the gradients asked for, and the implementations.

    Args:
        ours, eager, exact: fastrl's op, the formula in eager PyTorch, the specification.
        wrt: inputs that gradients are wanted for.
        upstream: the gradient of each output; an output without one is a statistic.
        by_row: inputs and outputs with one row per row of the batch: their exact values are
            computed block by block. Other outputs are sums over rows.
        row_bytes: of the largest float64 tensor, per row; 0: one block.
        given: outputs that the exact answer depends on, such as the tokens that were drawn.
    """

    inputs: Mapping[str, Any]
    ours: Implementation
    eager: Implementation
    exact: Implementation
    wrt: tuple[str, ...] = ()
    upstream: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    by_row: frozenset[str] = frozenset()
    row_bytes: int = 0
    given: tuple[str, ...] = ()

    def forward(self, call: Implementation) -> State:
        """The outputs of a call, the inputs with gradients, and the gradients of the outputs."""
        leaves = {name: self.inputs[name].detach().requires_grad_() for name in self.wrt}
        outputs = call(**{**self.inputs, **leaves})
        return outputs, leaves, {k: g for k, g in self.upstream.items() if k in outputs}

    def results(self, call: Implementation) -> Results:
        """Outputs and gradients of one call: what is timed."""
        return backward(self.forward(call))


def backward(state: State) -> Results:
    """The outputs of `Problem.forward`, and the gradients as `d<input>`."""
    outputs, leaves, upstream = state
    found = {name: x.detach() for name, x in outputs.items()}
    if leaves:
        roots = [outputs[name] for name in upstream]
        grads = torch.autograd.grad(roots, list(leaves.values()), list(upstream.values()))
        found |= {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}
    return found


class Error(NamedTuple):
    """Norms of (found - exact) and of exact; not finite where infinities or NaNs differ."""

    error: float
    norm: float


Errors = dict[str, Error]  # by output


def errors(
    problem: Problem, found: Mapping[str, Results], block_bytes: int = BLOCK_BYTES
) -> dict[str, Errors]:
    """The errors of several results against the specification in float64.

    A result may lack outputs (a peer that computes less); its gradients are then judged as those of
    the outputs it has.
    """
    groups: dict[object, dict[str, Results]] = {}
    for name, one in found.items():
        same: object = name if problem.given else frozenset(problem.upstream.keys() & one.keys())
        groups.setdefault(same, {})[name] = one
    judged: dict[str, Errors] = {}
    for group in groups.values():
        judged |= _errors_of_group(problem, group, block_bytes)
    return judged


def _errors_of_group(
    problem: Problem, found: dict[str, Results], block_bytes: int
) -> dict[str, Errors]:
    squares: dict[tuple[str, str], list[Tensor]] = {}
    sums: Results = {}
    for rows, exact in _exact_blocks(problem, next(iter(found.values())), block_bytes):
        for name, value in exact.items():
            whole = name if name in problem.by_row else name.removeprefix("d")
            if whole not in problem.by_row:
                sums[name] = sums[name] + value if name in sums else value
                continue
            for who, one in found.items():
                if name in one:
                    squares.setdefault((who, name), []).append(_squares(one[name][rows], value))
    for who, one in found.items():
        for name in sums.keys() & one.keys():
            squares[who, name] = [_squares(one[name], sums[name])]
    judged: dict[str, Errors] = {who: {} for who in found}
    for (who, name), parts in squares.items():
        error, norm = torch.stack(parts).sum(0).tolist()
        judged[who][name] = Error(math.sqrt(error), math.sqrt(norm))
    return judged


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
        part = dataclasses.replace(problem, inputs=inputs | block, upstream=gradients)
        yield here, part.results(problem.exact)


def _double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _squares(found: Tensor, exact: Tensor) -> Tensor:
    """[Σ (found - exact)², Σ exact²]; NaN where infinities differ."""
    found = found.double()
    difference = torch.where(found == exact, 0.0, found - exact)  # infinities too
    finite = torch.where(exact.isinf(), 0.0, exact)
    return torch.stack([difference.square().sum(), finite.square().sum()])


def error_ratio(ours: Mapping[str, Error], torchs: Mapping[str, Error]) -> float:
    """The worst of our errors over PyTorch's, to whose side the floor is added; the gate passes up
    to FACTOR, and never with NaN."""
    worst = 0.0
    for name, mine in ours.items():
        allowed = FACTOR * torchs[name].error + FLOOR * mine.norm
        here = FACTOR * mine.error / allowed if allowed else (0.0 if mine.error == 0 else math.inf)
        worst = math.nan if math.isnan(here) or math.isnan(worst) else max(worst, here)
    return worst


def worst_relative(mine: Mapping[str, Error]) -> float:
    """The largest of the relative errors; NaN where one is."""
    values = [one.error / one.norm if one.norm else one.error for one in mine.values()]
    return math.nan if any(map(math.isnan, values)) else max(values)


def wrong_numbers(problem: Problem, others: Iterable[Problem] = ()) -> str | None:
    """Why the gate fails, None where it passes."""
    judged = _both(problem)
    return too_far(judged[OURS], judged[EAGER], others)


def too_far(ours: Errors, torchs: Errors, others: Iterable[Problem] = ()) -> str | None:
    """Why these errors fail the gate, None where they pass.

    Where one draw of inputs fails, `others` are drawn one by one, until the errors of all together
    pass: an error of a single number, such as a loss, says little, for PyTorch's may be 0 by luck.
    """
    mine, eagers = [ours], [torchs]
    error = error_ratio(ours, torchs)
    for problem in others if not error <= FACTOR else ():
        judged = _both(problem)
        mine.append(judged[OURS])
        eagers.append(judged[EAGER])
        error = error_ratio(_pooled(mine), _pooled(eagers))
        if error <= FACTOR:
            break
    if error <= FACTOR:  # NaN is not
        return None
    return f"error is {error:.3g} times eager PyTorch's, {FACTOR:g} are allowed"


def _both(problem: Problem) -> dict[str, Errors]:
    calls = {OURS: problem.ours, EAGER: problem.eager}
    return errors(problem, {name: problem.results(call) for name, call in calls.items()})


def _pooled(draws: Sequence[Errors]) -> Errors:
    """Errors of several draws as if all were one."""
    return {name: Error(*map(math.hypot, *(draw[name] for draw in draws))) for name in draws[0]}
