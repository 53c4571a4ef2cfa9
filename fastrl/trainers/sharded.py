"""Weights of transformers' Trainer that FSDP2 spreads over processes: evaluation, checkpoints and
saved models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME

from fastrl.models.optimizer_state import (
    copy_weights,
    load_optimizer_state,
    optimizer_groups,
    optimizer_state,
)
from fastrl.models.quantised import WITHOUT_FSDP, refuse_quantised
from fastrl.models.sharding import gathered_state_dict, is_spread, layers_to_spread, spread
from fastrl.run.checkpoints import BadCheckpoint
from fastrl.run.processes import Processes
from fastrl.run.state import load_tree, save_tree

SHARES = "shares"  # a folder in a checkpoint
_OF_TORCH = ("pytorch_model_fsdp_0", "optimizer_0")  # folders that torch's own checkpoints have


def check_fsdp(trainer: str, accelerator: Accelerator, model: Any) -> None:
    """Raises ValueError for FSDP1, and for FSDP of four-bit weights; ``trainer`` is the name of its
    class, for the message."""
    if not accelerator.is_fsdp2:
        raise ValueError(
            f"{trainer} needs FSDP2, and FSDP1 was asked for: set fsdp_version: 2 "
            "(accelerate launch --fsdp_version 2)"
        )
    refuse_quantised(model, "a model that FSDP spreads", WITHOUT_FSDP)


def spread_by_accelerate(accelerator: Accelerator, model: Any) -> Any:
    """Spreads a model's weights without an optimizer, which accelerate itself does not."""
    from accelerate.utils import fsdp2_prepare_model

    plain = plain_model(accelerator, model)
    plain._no_split_modules = layers_to_spread(plain)
    return fsdp2_prepare_model(accelerator, model)


def plain_model(accelerator: Accelerator, model: Any) -> Any:
    """The model without what accelerate and torch.compile have put around it."""
    return accelerator.unwrap_model(model, keep_torch_compile=False)


class Shares:
    """A checkpoint's folder ``shares`` of a model whose weights are spread: each process writes its
    part of weights and moments, as safetensors. Any number of processes resumes from them, also one
    alone.

    transformers itself would write pickles, and no model at all.

    Args:
        model: without wrappers; its weights are spread, or the checkpoint's are.
    """

    def __init__(self, model: Any):
        spread(model)
        self.model = model

    def write(self, folder: Path, optimizer: Any, scheduler: Any, processes: Processes) -> None:
        """Writes weights, and the state of optimizer and schedule, into a checkpoint."""
        tree = {
            "weights": self._weights(),
            "optimizer": optimizer_state(optimizer, self.model),
            "scheduler": scheduler.state_dict(),
        }
        save_tree(tree, folder / SHARES, processes)

    def save_model(self, folder: Path, tokenizer: Any, args: Any) -> None:
        """Writes the whole model, as ``Trainer.save_model`` does; called by all processes."""
        state = gathered_state_dict(self.model, keep=args.should_save)
        if args.should_save:
            self.model.save_pretrained(folder, state_dict=state)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(args, folder / TRAINING_ARGS_NAME)

    def load_weights(self, checkpoint: Path) -> None:
        """Loads the weights of a checkpoint, whether they are spread there or whole.

        Raises:
            BadCheckpoint: weights in neither form, as of an adapter that was saved without FSDP.
        """
        if (checkpoint / SHARES).is_dir():
            copy_weights(self._weights(), load_tree(checkpoint / SHARES)["weights"])
            return
        file = checkpoint / "model.safetensors"
        if not file.is_file():
            raise BadCheckpoint(
                f"resume: {checkpoint} has no {file.name}: go on without FSDP, as the run began"
            )
        copy_weights(self._weights(), load_file(file))

    def load_optimizer(self, checkpoint: Path, optimizer: Any, scheduler: Any) -> None:
        """Loads the state of optimizer and schedule, whether it is spread there or whole."""
        if (checkpoint / SHARES).is_dir():
            state = load_tree(checkpoint / SHARES)
            load_optimizer_state(optimizer, self.model, state["optimizer"])
            scheduler.load_state_dict(state["scheduler"])
            return
        state = self._by_names(checkpoint / OPTIMIZER_NAME, optimizer)
        load_optimizer_state(optimizer, self.model, state)
        scheduler.load_state_dict(torch.load(checkpoint / SCHEDULER_NAME, weights_only=True))

    def _weights(self) -> dict[str, Tensor]:
        """Saved buffers, and parameters: with an adapter those trained, else all; by name."""
        named = dict(self.model.named_parameters())
        if hasattr(self.model, "peft_config"):
            named = {name: p for name, p in named.items() if p.requires_grad}
        stored = self.model.state_dict()
        buffers = {name: b for name, b in self.model.named_buffers() if name in stored}
        return {**named, **buffers}

    def _by_names(self, file: Path, optimizer: Any) -> dict[str, Any]:
        """Reads an optimizer's state that torch saved by numbers; returns it by weights' names."""
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        names = [
            name for group in optimizer_groups(optimizer, self.model) for name in group["params"]
        ]
        groups = [
            {**group, "params": [names[i] for i in group["params"]]}
            for group in state["param_groups"]
        ]
        return {
            "groups": groups,
            "moments": {names[i]: moments for i, moments in state["state"].items()},
        }


def weight_shares(
    accelerator: Accelerator, model: Any, checkpoint: Path | None = None
) -> Shares | None:
    """The shares of a model's weights; None where they are spread neither here nor in the
    checkpoint.

    Raises:
        BadCheckpoint: a checkpoint of torch.distributed.
    """
    if checkpoint is not None:
        for name in _OF_TORCH:
            if (checkpoint / name).is_dir():
                raise BadCheckpoint(
                    f"resume: {checkpoint / name} is a checkpoint of torch.distributed, whose "
                    "index is a pickle, which is not read: begin anew, from a model that is saved "
                    "whole"
                )
    plain = plain_model(accelerator, model)
    has_shares = checkpoint is not None and (checkpoint / SHARES).is_dir()
    return Shares(plain) if has_shares or is_spread(plain) else None
