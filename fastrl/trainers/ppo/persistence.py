"""What a PPOTrainer writes and reads: checkpoints of its state; its model, model card and Hub
repository."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from fastrl.config import PPOConfig, json_object
from fastrl.models.products import Products
from fastrl.models.sharding import gathered_state_dict
from fastrl.run.checkpoints import (
    Checkpoints,
    find_checkpoint,
    read_manifest,
    warn_of_another_machine,
)
from fastrl.run.model_card import (
    Training,
    card_beside,
    card_settings,
    policy_gradient,
    write_model_card,
)
from fastrl.run.processes import Processes
from fastrl.run.state import load_tree, save_tree
from fastrl.trainers.ppo.state import TrainerState


def save_checkpoint(
    tree: Mapping[str, Any], folder: str | Path, processes: Processes, products: Products
) -> Path:
    """Writes a state to ``folder/checkpoint-N``, N its step; returns that path."""
    checkpoints = Checkpoints(Path(folder))
    new = checkpoints.new(tree["step"], processes=processes)
    with products.on(), new as part:
        save_tree(tree, part, processes)
    return checkpoints.path(tree["step"])


def load_checkpoint(
    load: Callable[[Mapping[str, Any]], None],
    path: str | Path,
    processes: Processes,
    products: Products,
) -> None:
    """Calls ``load`` with the state of a checkpoint, or of the newest good one in a folder, and has
    ``products`` compute matrix products by the libraries that the checkpoint's run used.

    Raises:
        FileNotFoundError: there is no checkpoint.
        BadCheckpoint: the checkpoint, or each in the folder, is damaged or of another trainer.
    """
    checkpoint = find_checkpoint(path, Checkpoints(Path(path)), processes=processes)
    assert checkpoint is not None
    manifest = read_manifest(checkpoint)
    load(load_tree(checkpoint))
    with products.on():
        products.adopt(manifest["machine"])
        warn_of_another_machine(manifest)


class ModelFiles:
    """The files of a PPOTrainer's model; ``model`` is the policy, wrapped for several processes."""

    def __init__(self, state: TrainerState, model: Any, accelerator: Accelerator):
        self.state, self.model, self.accelerator = state, model, accelerator

    def save(self, folder: str | Path, write_card: Callable[[str | Path], None]) -> None:
        """See :meth:`fastrl.PPOTrainer.save_pretrained`; ``write_card`` is called where there is no
        model card."""
        state, accelerator = self.state, self.accelerator
        state.reference.verify()
        is_main = state.processes.is_main
        weights = gathered_state_dict(state.policy, keep=is_main)
        if weights is None:
            weights = accelerator.get_state_dict(self.model)
        critic_weights = None if state.critic is None else state.critic.gathered(keep=is_main)
        if not accelerator.is_main_process:
            return
        with card_beside(folder, lambda: write_card(folder)):
            state.policy.save_pretrained(folder, state_dict=weights)
            if state.critic is not None:
                state.critic.save_pretrained(folder, critic_weights, state.tokenizer)
            state.tokenizer.save_pretrained(folder)

    def write_card(self, folder: str | Path, name: str | None = None) -> None:
        """See :meth:`fastrl.PPOTrainer.create_model_card`."""
        config = self.state.config
        unset = PPOConfig.__dataclass_fields__["model_name"].default
        base = None if config.model_name == unset else config.model_name
        settings = card_settings(config)
        settings.pop("steps", None)  # TRL's number of samples, which no run reads
        training = Training(policy_gradient(config.method), base, settings)
        write_model_card(folder, name or Path(folder).absolute().name, self.state.policy, training)

    def push_if_best(self, scores: Tensor, push: Callable[..., Any]) -> None:
        """Uploads the model where the mean of the scores [B] is above that of each earlier upload,
        in every ``compare_steps``-th step; never without ``push_to_hub_if_best_kwargs``.

        Args:
            push: uploads the model; called with ``push_to_hub_if_best_kwargs``.
        """
        state = self.state
        arguments = json_object(state.config.push_to_hub_if_best_kwargs)
        if not arguments or state.step % state.config.compare_steps:
            return
        mean = float(scores.nanmean())
        if mean > state.best_mean_score:
            push(**arguments)
            state.best_mean_score = mean
