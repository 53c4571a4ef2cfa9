"""What a PPOTrainer writes and reads: checkpoints of its state; its model, model card and Hub
repository."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from fastrl.config import PPOConfig, json_object
from fastrl.models.products import Products
from fastrl.models.sharding import gathered_state_dict
from fastrl.ppo.state import TrainerState
from fastrl.run import hub
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
from fastrl.run.state import load_tree, save_tree


class Persistence(TrainerState):
    """The methods of a ``PPOTrainer`` that write and read files; the trainer makes what they
    read."""

    accelerator: Accelerator
    products: Products
    model: Any

    def save_checkpoint(self, folder: str | Path) -> Path:
        """Writes the state to ``folder/checkpoint-N``, N the number of steps; for a loop of your
        own, whose position in its data is not part of it. :meth:`train` saves by itself.

        Returns:
            the checkpoint's path; it is there as a whole, or not at all.
        """
        checkpoints = Checkpoints(Path(folder))
        state, new = self.state_dict(), checkpoints.new(self.current_step, processes=self.processes)
        with self.products.on(), new as part:
            save_tree(state, part, self.processes)
        return checkpoints.path(self.current_step)

    def load_checkpoint(self, path: str | Path) -> None:
        """Goes on from a checkpoint, or from the newest good one in a folder of them.

        Raises:
            BadCheckpoint: a ValueError: a damaged checkpoint, whose file is named; or as
                :meth:`load_state_dict`. Nothing has changed then.
            FileNotFoundError: there is none.
        """
        found = find_checkpoint(path, Checkpoints(Path(path)), processes=self.processes)
        assert found is not None
        manifest = read_manifest(found)
        self.load_state_dict(load_tree(found))
        with self.products.on():
            self.products.adopt(manifest["machine"])
            warn_of_another_machine(manifest)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Saves model with value head, tokenizer, and a model card where there is none; a critic of
        its own in ``critic/``.

        Raises:
            ValueError: layers that are shared with the reference have changed.
        """
        self.reference.verify()
        state_dict = gathered_state_dict(self._unwrapped, keep=self.processes.is_main)
        if state_dict is None:
            state_dict = self.accelerator.get_state_dict(self.model)
        of_critic = None
        if self.critic is not None:
            of_critic = self.critic.gathered(keep=self.processes.is_main)
        if not self.accelerator.is_main_process:
            return
        with card_beside(save_directory, lambda: self.create_model_card(save_directory)):
            self._unwrapped.save_pretrained(save_directory, state_dict=state_dict)
            if self.critic is not None:
                self.critic.save_pretrained(save_directory, of_critic, self.tokenizer)
            self.tokenizer.save_pretrained(save_directory)

    def create_model_card(self, path: str | Path, model_name: str | None = None) -> None:
        """Writes ``README.md``: the model's kind, how it was trained, and how to load it.

        The base model is the one that the model itself names, else ``PPOConfig.model_name`` where
        that was set.
        """
        name = model_name or Path(path).absolute().name
        unset = PPOConfig.__dataclass_fields__["model_name"].default
        given = None if self.config.model_name == unset else self.config.model_name
        settings = card_settings(self.config)
        settings.pop("steps", None)  # a plan of samples, which no run goes by
        training = Training(policy_gradient(self.config.method), given, settings)
        write_model_card(path, name, self._unwrapped, training)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Uploads model, tokenizer and model card, in one commit.

        Args:
            kwargs: see :func:`fastrl.run.hub.upload`, such as ``private``, ``token`` and
                ``commit_message``.
        """
        hub.check_options(kwargs)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            if self.accelerator.is_main_process:
                self.create_model_card(folder, repo_id)
                return hub.upload(folder, repo_id, **kwargs)
        return None

    def _push_if_best(self, scores: Tensor) -> None:
        where = json_object(self.config.push_to_hub_if_best_kwargs)
        if not where or self.current_step % self.config.compare_steps:
            return
        mean = float(scores.nanmean())
        if mean > self._best_mean_score:
            self.push_to_hub(**where)
            self._best_mean_score = mean
