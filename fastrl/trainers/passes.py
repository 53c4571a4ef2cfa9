"""Batches that are computed in several passes, none of which has more tokens than are allowed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fastrl.data.grouping import passes_by_size
from fastrl.run.processes import Processes, processes_of

T = TypeVar("T")


def fill(sizes: Sequence[int], most: int, name: str) -> list[list[int]]:
    """Puts examples into passes of at most ``most`` tokens; returns each pass's ascending indices.

    Args:
        sizes: the tokens of each example.
        name: what an example is called, for the error.

    Raises:
        ValueError: an example has more than ``most`` tokens.
    """
    for i, size in enumerate(sizes):
        if size > most:
            raise too_long(most, f"{name} {i} of the batch has", size)
    return passes_by_size(range(len(sizes)), sizes.__getitem__, most)


def too_long(most: int, what: str, tokens: int) -> ValueError:
    """The error that a text has more tokens than a pass may have; ``what`` is, say, "row 3 has"."""
    return ValueError(
        f"micro_batch_tokens={most}, but {what} {tokens} tokens: raise it to that, or lower "
        "max_length"
    )


def check_sizes(sizes: Iterable[int], most: int, name: str, data: str = "training") -> None:
    """Checks that a pass of ``most`` tokens can hold the longest of the data.

    Args:
        sizes: tokens of each datum.
        name: the name of a datum, for the error.
        data: what the data are for.

    Raises:
        ValueError: a pass could not hold the longest.
    """
    size, i = max(((size, -i) for i, size in enumerate(sizes)), default=(0, 0))
    if size > most:
        raise too_long(most, f"{name} {-i} of the {data} data has", size)


def on_all_processes(parts: list[T], processes: Processes) -> list[tuple[T, bool]]:
    """The parts of a batch, each with whether it counts. All processes get the same number, as they
    wait for each other in every part: one with fewer repeats its first; repeats do not count."""
    most = max(processes.objects(len(parts)))
    return [(part, True) for part in parts] + [(parts[0], False)] * (most - len(parts))


def with_synchronised_last(
    passes: int, model: nn.Module, accelerator: Any
) -> Iterator[AbstractContextManager[Any]]:
    """Contexts for each of a batch's passes. In the last pass alone gradients are averaged over
    processes, if this batch averages them at all. Gradients of weights that FSDP spreads are
    averaged in each pass, as each process would need them whole otherwise."""
    waits = accelerator.num_processes > 1 and not getattr(accelerator, "is_fsdp2", False)
    for k in range(passes):
        later = waits and k < passes - 1
        yield accelerator.no_sync(model) if later else contextlib.nullcontext()


class _Deferred(NamedTuple):
    """Scores of a call, and how they are computed again.

    Attributes:
        scores: the scores of all samples, [B, ...], a leaf.
        score: returns the scores of a pass's samples, which it gets by their indices.
        passes: the indices of each pass's samples, and whether the pass counts.
        states: the states of the random generators before each pass.
    """

    scores: Tensor
    score: Callable[[Sequence[int]], Tensor]
    passes: list[tuple[list[int], bool]]
    states: list[Any]


class DeferredGradients:
    """Computes the scores of a batch in passes, for any loss L of all scores (gradient caching,
    arXiv:2101.06983).

    With s_k(θ) the scores of pass k, ∇L = Σ_k ∂s_k/∂θ·∂L/∂s_k: the scores are computed without a
    gradient first, the loss gives ∂L/∂s, and :meth:`backward` runs each pass again, with its
    ∂L/∂s_k. This is exact, and costs another forward; a batch that is a single pass is computed
    once, with its gradient.

    Args:
        model: the model as accelerate has wrapped it.
        bounded: whether a batch may have several passes.
    """

    def __init__(self, model: nn.Module, accelerator: Any, bounded: bool):
        self.model, self.accelerator, self.bounded = model, accelerator, bounded
        self.processes = processes_of(accelerator)
        self._deferred: list[_Deferred] = []

    def __call__(self, score: Callable[[Sequence[int]], Tensor], parts: list[list[int]]) -> Tensor:
        """The scores [B, ...] of all samples, in order. ``parts`` has the indices of the samples of
        each pass, for which ``score`` returns the scores."""
        passes = on_all_processes(parts, self.processes) if self.bounded else [(parts[0], True)]
        if len(passes) == 1:
            return score(parts[0])
        of_passes, states = [], []
        with torch.no_grad():
            for part, _ in passes:
                states.append(_random_state(self.accelerator.device))
                of_passes.append(score(part))
        scores = in_order(of_passes[: len(parts)], parts)
        if torch.is_grad_enabled():
            self._deferred.append(_Deferred(scores.requires_grad_(), score, passes, states))
        return scores

    @property
    def pending(self) -> bool:
        """Whether scores wait for :meth:`backward`."""
        return bool(self._deferred)

    def backward(self, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        """Adds the gradients through all pending scores to the weights' gradients; called after the
        ``backward`` of the loss.

        Args:
            autocast: makes the context in which the scores were computed.
        """
        calls, self._deferred = self._deferred, []
        for scores, score, passes, states in calls:
            if scores.grad is None:  # the loss did not read them
                continue
            contexts = with_synchronised_last(len(passes), self.model, self.accelerator)
            for (part, counts), state, context in zip(passes, states, contexts, strict=True):
                with context:
                    with autocast(), _random_numbers(state, self.accelerator.device):
                        again = score(part)
                    torch.autograd.backward(again, scores.grad[part] * counts)


def in_order(results: Iterable[Tensor], parts: Sequence[Sequence[int]]) -> Tensor:
    """Joins the results of parts in the order of their indices."""
    first, *others = results
    if not others:
        return first
    joined = torch.cat([first, *others])
    order = torch.tensor([i for part in parts for i in part]).argsort()
    return joined[order.to(joined.device)]


def _random_state(device: torch.device) -> tuple[Tensor, Any]:
    """The states of torch's generators, from which dropout draws: the host's and the device's."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_device


@contextlib.contextmanager
def _random_numbers(state: tuple[Tensor, Any], device: torch.device) -> Iterator[None]:
    """Context in which torch's generators go on from ``state``; they are restored after it."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], device)
        yield
