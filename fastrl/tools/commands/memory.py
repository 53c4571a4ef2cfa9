"""The memory of a run: passes that fit, a plan as the run begins, and what was measured."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from fastrl.run.launcher import is_main_process, process_count
from fastrl.trainers.plan.passes import fit_passes
from fastrl.trainers.plan.report import GIB, Plan, gib


def longest_text(rows: Any, *columns: str) -> int:
    """Tokens of the longest text in columns of token ids, at least 2, for a plan."""
    lengths = (len(row[column]) for row in rows for column in columns)
    return max(2, max(lengths, default=2))


def most_in_a_pass(tokens: int, micro_batch_tokens: int | None, texts: int) -> int:
    """Tokens of each text of an example with ``texts`` texts, for a plan: ``tokens``, but no more
    than fit a pass of ``micro_batch_tokens``, as the trainer has refused longer examples."""
    return tokens if micro_batch_tokens is None else min(tokens, micro_batch_tokens // texts)


class RunMemory:
    """Fits a run's passes to its GPU, and prints the plan of its memory and what was measured.

    Args:
        asked: whether to print the plan; None: on a GPU. Several processes print none.
        device: the run's device.
        trainer: the trainer to plan; if its plan fails, the error is printed and the run goes on.
        lengths: returns the lengths that the trainer's ``plan`` takes.
        is_open: whether passes may be fitted: no setting says how large they are.
    """

    def __init__(
        self,
        asked: bool | None,
        device: Any,
        trainer: Any,
        lengths: Callable[[], tuple[int, ...]],
        is_open: bool,
    ):
        self.device = torch.device(device)
        on_gpu, alone = self.device.type == "cuda", process_count() == 1
        is_open = is_open and on_gpu
        if asked and not alone:
            _say(
                "no plan of memory: a run of several processes has none; fastrl plan is for one "
                "process"
            )
        wanted = (on_gpu if asked is None else asked) and alone
        self.plan: Plan | None = None
        if not is_open and not wanted:
            return
        try:
            if is_open:
                passes, plan = fit_passes(trainer, *lengths())
                if any(passes):
                    _say(f"{passes}: set --micro-batch-tokens to choose otherwise")
            else:
                plan = trainer.plan(*lengths())
        except Exception as error:  # the run itself may be sound
            line = " ".join(str(error).split())
            # A ValueError says what is wrong with settings; other errors are named by type.
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            _say(f"no plan of memory: {kind}{line}")
            return
        self.plan = plan if wanted else None
        if self.plan is None:
            return
        line_of_plan = self.plan.line()
        if on_gpu:
            gpu_gib = torch.cuda.get_device_properties(self.device).total_memory / GIB
            line_of_plan += f" of {gpu_gib:.0f} GiB"
            if not self.plan.fits(gpu_gib):
                line_of_plan += ", which may not fit: fastrl plan names what to change"
            torch.cuda.reset_peak_memory_stats(self.device)
        for line in (line_of_plan, *(f"a guess: {guess}" for guess in self.plan.guesses)):
            _say(line)

    def end(self) -> None:
        """Prints what was measured beside the plan."""
        if self.plan is None:
            return
        if self.device.type != "cuda":
            text = "memory was not measured: torch keeps no count of a CPU's"
        else:
            measured = torch.cuda.max_memory_allocated(self.device)
            off = self.plan.peak / measured - 1
            text = f"measured memory: {gib(measured)}; planned {gib(self.plan.peak)} ({off:+.1%})"
        _say(text)


def _say(line: str) -> None:
    if is_main_process():
        print(line, file=sys.stderr)
