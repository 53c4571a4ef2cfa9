"""A rehearsal of a run: the run's code, on tensors without memory. A rehearsal leaves nothing
behind in this process."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastrl.data import tables
from fastrl.models import load
from fastrl.models.asked_once import answers_kept
from fastrl.models.host_memory import counted_by
from fastrl.models.master_weights import MasterWeights
from fastrl.run.random_state import random_state_kept
from fastrl.timing import heard_by
from fastrl.trainers.plan.memory import (
    CASTS,
    GRADIENTS,
    HEAD,
    KV_CACHE,
    OPTIMIZER,
    PARAMETERS,
    REFERENCE,
    MemoryLog,
)
from fastrl.trainers.plan.phantoms import Phantoms
from fastrl_kernels import workspace
from fastrl_kernels.dispatch import standing_for

LOADING, ROLLOUT, SCORING, UPDATE, STEP = "loading", "rollout", "scoring", "update", "optimizer"
OTHER = "other"  # between the phases
PHASES = (LOADING, ROLLOUT, SCORING, UPDATE, STEP, OTHER)
OPTIMIZER_STEPS = 2  # of a rehearsal but PPO's: the optimizer's state is there from the second on
# A note of plans with replay_routing.
CHOICES_LEFT_OUT = "the experts' choices of rollouts, left out: 2 bytes for each one"
# A note of plans with policy_support="sampled": bytes per token, and slots of a ring of 8 steps.
SUPPORTS_LEFT_OUT = (
    "the sets that tokens are drawn from, left out: at most {} bytes of host memory for each token "
    "of a generation, mostly 4 for each token in a set, and {} on the device"
)
# The phases here, by the names under which trainers time them.
_TIMED = {"prefill": ROLLOUT, "decode": ROLLOUT, "forward_pass": SCORING, "optimize_step": UPDATE}


class Rehearsal:
    """What is known of a rehearsal's memory.

    Attributes:
        device: "cpu" or "cuda", for which the memory is counted.
        log: the log of its memory.
        phantoms: the mode that makes tensors without memory.
        notes: in words, what is guessed or left out.
        folder: a folder to write to, which is removed afterwards.
        visiting: the most bytes of a reference in host memory that are on the device as it runs.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self.device = device
        self.visiting = 0
        self.log = MemoryLog()
        self.phantoms = Phantoms(self.log)
        self.notes: list[str] = []
        self.folder = folder

    def timed(self, name: str) -> AbstractContextManager[None]:
        """The context of a phase that a trainer times."""
        return self.log.phase(_TIMED[name]) if name in _TIMED else nullcontext()

    def follow(self, model: nn.Module, optimizer: Any) -> None:
        """Has the log count parameters, gradients and the optimizer's state by their kinds."""
        self.phantoms.is_kind([*model.parameters(), *model.buffers()], PARAMETERS)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda p: self.phantoms.is_kind([p.grad], GRADIENTS)
                )
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's is around torch's
        entered: list[ExitStack] = []

        def begin(*_: Any) -> None:
            stack = ExitStack()
            stack.enter_context(self.log.phase(STEP))
            stack.enter_context(self.log.kind(OPTIMIZER))
            entered.append(stack)

        def end(*_: Any) -> None:
            entered.pop().close()
            if isinstance(optimizer, MasterWeights):  # a step makes masters before it calls begin
                self.phantoms.is_kind(optimizer.masters, OPTIMIZER, since=STEP)

        optimizer.register_step_pre_hook(begin)
        optimizer.register_step_post_hook(end)

    def give_state(self, optimizer: Any) -> None:
        """Has a followed optimizer make its state, by a step with gradients of zero: all steps of a
        run but the first begin with that state."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def loaded(self, policy: nn.Module, *references: Any) -> None:
        """Ends the phase of loading.

        Args:
            references: the reference policy and teachers, each a
                :class:`fastrl.learn.ref_model.RefModel`; or None.
        """
        shared = {id(p) for p in policy.parameters()}
        for reference in references:
            model = getattr(reference, "model", None)
            if model is not None:
                unshared = [p for p in model.parameters() if id(p) not in shared]
                self.phantoms.is_kind([*unshared, *model.buffers()], REFERENCE)
            units = getattr(reference, "units", None)
            if units and self.device != "cpu":  # a copy in host memory, which runs alone
                rest, *layers = [sum(x.nbytes for x in unit.weights) for unit in units]
                self.phantoms.elsewhere(x for unit in units for x in unit.weights)
                self.visiting = max(self.visiting, rest + max(layers))
        self.log.peaks.clear()
        self.log.note(LOADING)
        self.log.enter(OTHER)

    def keeps(self, kv_cache: Iterable[Any], weights: Iterable[Any]) -> None:
        """Records the kinds of the tensors that the rollout engine keeps between two calls."""
        self.phantoms.is_kind(kv_cache, KV_CACHE, since=ROLLOUT)
        self.phantoms.is_kind(weights, CASTS, since=ROLLOUT)


@contextmanager
def rehearsal(device: str = "cpu") -> Iterator[Rehearsal]:
    """Context in which large tensors have no memory, and trainers are for one process on a CPU.

    Afterwards random numbers, accelerate's state and kept workspaces are as before.

    Args:
        device: "cpu" or "cuda", for which the memory is counted.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        rehearsed = Rehearsal(Path(folder), device)
        stack.enter_context(random_state_kept())
        stack.enter_context(_own_accelerate())
        # Warnings and progress bars are left to the run itself.
        for quiet in (load.quiet(), tables.quiet(), warnings.catch_warnings()):
            stack.enter_context(quiet)
        warnings.simplefilter("ignore")
        stack.enter_context(answers_kept())
        if device != "cpu":
            stack.enter_context(standing_for(device))
            stack.enter_context(counted_by(rehearsed.log.outside))
        stack.enter_context(workspace.torchs_own(partial(rehearsed.log.kind, HEAD)))
        stack.enter_context(heard_by(rehearsed.timed))
        stack.enter_context(rehearsed.log.phase(LOADING))
        stack.enter_context(rehearsed.phantoms)
        yield rehearsed
        guessed = ", ".join(sorted(rehearsed.phantoms.run_for_real))
        if guessed:
            rehearsed.notes.append(f"shapes of {guessed}, which were run on zeros")


@contextmanager
def _own_accelerate() -> Iterator[None]:
    """Context in which accelerate knows of no accelerator that was made before."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    kinds = (AcceleratorState, GradientState, PartialState)
    states = [dict(kind._shared_state) for kind in kinds]
    variables = {k: v for k, v in os.environ.items() if k.startswith("ACCELERATE_")}
    for kind in kinds:
        kind._shared_state.clear()
    try:
        yield
    finally:
        for kind, state in zip(kinds, states, strict=True):
            kind._shared_state.clear()
            kind._shared_state.update(state)
        for name in [k for k in os.environ if k.startswith("ACCELERATE_")]:
            del os.environ[name]
        os.environ.update(variables)
