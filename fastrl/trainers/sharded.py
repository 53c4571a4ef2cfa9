"""transformers' Trainer on weights that FSDP2 spreads over processes: evaluation, checkpoints and
saved models."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
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
from fastrl.run.state import load_tree, save_tree
from fastrl.run.transformers_base import OpenTrainer

SHARES = "shares"  # folder of a checkpoint
_OF_TORCH = ("pytorch_model_fsdp_0", "optimizer_0")  # folders that torch's own checkpoints have


class ShardedTrainer(OpenTrainer):
    """transformers' Trainer that can evaluate before it trains where weights are spread, and whose
    checkpoints then have a folder ``shares``: each process writes its part of weights and moments,
    as safetensors. Any number of processes resumes from them, also one alone. Models
    that :meth:`save_model` saves are whole.

    transformers itself would write pickles, and no model at all.

    Raises:
        ValueError: FSDP1; FSDP of four-bit weights.
    """

    args: Any
    processes: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.is_fsdp_enabled and not self.accelerator.is_fsdp2:
            raise ValueError(
                f"{type(self).__name__} needs FSDP2, and FSDP1 was asked for: set fsdp_version: 2 "
                "(accelerate launch --fsdp_version 2)"
            )
        if self.is_fsdp_enabled:
            refuse_quantised(self.model, "a model that FSDP spreads", WITHOUT_FSDP)

    def create_optimizer(self, model: Any = None) -> Any:
        # accelerate finds an optimizer's weights by addresses, which weights without memory lack
        # before.
        self._prepare_weights()
        return super().create_optimizer(model)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._prepare_weights()
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self._spread()

    def _prepare_weights(self) -> None:
        """Spreads the weights, which accelerate itself does with an optimizer only."""
        if self.is_fsdp_enabled and not is_spread(self._plain_model):
            from accelerate.utils import fsdp2_prepare_model

            self._plain_model._no_split_modules = layers_to_spread(self._plain_model)
            self.note_prepared(fsdp2_prepare_model(self.accelerator, self.model))

    def write_model(self, folder: Path) -> None:
        model = self._plain_model
        if not is_spread(model):
            super().write_model(folder)
            return
        state = gathered_state_dict(model, keep=self.args.should_save)
        if self.args.should_save:
            model.save_pretrained(folder, state_dict=state)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def write_learned(self, folder: Path) -> None:
        model = self._plain_model
        if not is_spread(model):
            super().write_learned(folder)
            return
        spread(model)
        scheduler: Any = self.lr_scheduler
        tree = {
            "weights": self._weights(),
            "optimizer": optimizer_state(self.optimizer, model),
            "scheduler": scheduler.state_dict(),
        }
        save_tree(tree, folder / SHARES, self.processes)

    def load_weights(self, checkpoint: Path) -> None:
        for name in _OF_TORCH:
            if (checkpoint / name).is_dir():
                raise BadCheckpoint(
                    f"resume: {checkpoint / name} is a checkpoint of torch.distributed, whose "
                    "index is a pickle, which is not read: begin anew, from a model that is saved "
                    "whole"
                )
        if (checkpoint / SHARES).is_dir():
            self._spread()
            copy_weights(self._weights(), load_tree(checkpoint / SHARES)["weights"])
        elif is_spread(self._plain_model):
            self._spread()
            copy_weights(self._weights(), self._whole_weights(checkpoint))
        else:
            super().load_weights(checkpoint)

    def load_best_weights(self, checkpoint: Path) -> None:
        if is_spread(self._plain_model):
            self.load_weights(checkpoint)
        else:
            super().load_best_weights(checkpoint)

    def load_optimizer(self, checkpoint: Path) -> None:
        model, scheduler = self._plain_model, cast(Any, self.lr_scheduler)
        if (checkpoint / SHARES).is_dir():
            self._spread()
            state = load_tree(checkpoint / SHARES)
            load_optimizer_state(self.optimizer, model, state["optimizer"])
            scheduler.load_state_dict(state["scheduler"])
        elif is_spread(model):
            self._spread()
            load_optimizer_state(self.optimizer, model, self._by_names(checkpoint / OPTIMIZER_NAME))
            scheduler.load_state_dict(torch.load(checkpoint / SCHEDULER_NAME, weights_only=True))
        else:
            super().load_optimizer(checkpoint)

    @property
    def _plain_model(self) -> Any:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def _spread(self) -> None:
        spread(self._plain_model)

    def _weights(self) -> dict[str, Tensor]:
        """The weights that a run changes, by name: where there is an adapter, the adapter's."""
        model = self._plain_model
        named = dict(model.named_parameters())
        if hasattr(model, "peft_config"):
            named = {name: p for name, p in named.items() if p.requires_grad}
        stored = model.state_dict()
        buffers = {name: b for name, b in model.named_buffers() if name in stored}
        return {**named, **buffers}

    def _whole_weights(self, checkpoint: Path) -> dict[str, Tensor]:
        """Weights of a checkpoint that spreads none, under the names of :meth:`_weights`.

        Raises:
            BadCheckpoint: a checkpoint of an adapter, whose weights have other names.
        """
        file = checkpoint / "model.safetensors"
        if not file.is_file():
            raise BadCheckpoint(
                f"resume: {checkpoint} has no {file.name}: go on without FSDP, as the run began"
            )
        return load_file(file)

    def _by_names(self, file: Path) -> dict[str, Any]:
        """The state of an optimizer, as torch saves it, by the names of weights."""
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        names = [
            name
            for group in optimizer_groups(self.optimizer, self._plain_model)
            for name in group["params"]
        ]
        groups = [
            {**group, "params": [names[i] for i in group["params"]]}
            for group in state["param_groups"]
        ]
        return {
            "groups": groups,
            "moments": {names[i]: moments for i, moments in state["state"].items()},
        }
