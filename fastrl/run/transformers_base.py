"""All private parts of transformers' Trainer and of accelerate that fastrl's trainers need.

A private method is overridden where transformers' loop does something that no public method and no
callback reaches. It hands on to a method with a name of our own, which the trainers override.
``tests/test_private_parts.py`` counts these methods and attributes, and says what has changed of
them in another version of transformers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer import SCALER_NAME
from transformers.trainer_callback import ExportableState, TrainerState


class OpenTrainer(transformers.Trainer):
    """transformers' Trainer, with public names for its private parts.

    :meth:`begin_at`, :meth:`ready_batch`, :meth:`train_sampler`, :meth:`before_update`,
    :meth:`concluding`, :meth:`save_checkpoint`, :meth:`write_model`, :meth:`write_learned`,
    :meth:`load_weights`, :meth:`load_best_weights` and :meth:`load_optimizer` are for subclasses to
    override.
    """

    # The loop's steps that no callback is called for.

    def _init_training_state(
        self, max_steps: Any, num_update_steps_per_epoch: Any, num_train_epochs: Any, *rest: Any
    ) -> tuple[int, int]:
        # transformers computes the place at which a run resumes, a local variable, from the number
        # of steps: wrongly where a stream has ended, or another number of processes saved it.
        lengths = max_steps, num_update_steps_per_epoch, num_train_epochs
        return self.begin_at(*super()._init_training_state(*lengths, *rest), num_train_epochs)

    def begin_at(self, epoch: int, minibatches: int, epochs: int) -> tuple[int, int]:
        """The epoch in which a run begins, and how many of its mini-batches are done.

        Args:
            epoch, minibatches: as transformers has computed them.
            epochs: the run's number of epochs; returned as the epoch, no further step is taken.
        """
        return epoch, minibatches

    def _prepare_inputs(self, inputs: Any) -> Any:
        # A batch may be a mapping of other things than tensors, which super() would take apart.
        return self.ready_batch(inputs)

    def ready_batch(self, batch: Any) -> Any:
        """A loader's batch as a forward pass gets it: its tensors, on the device."""
        return super()._prepare_inputs(batch)

    def loader(self, data: Any, size: int, sampler: Any, *, training: bool = False) -> DataLoader:
        """A loader of data by the settings, with a batch size and an order of its own.

        Args:
            sampler: makes the order of the data; not for streams.
        """
        what = "Training" if training else "Evaluation"
        return self._get_dataloader(data, what, size, sampler_fn=sampler, is_training=training)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        # Programs override it, and call it on super().
        return self.train_sampler(train_dataset)

    def train_sampler(self, dataset: Any = None) -> Any:
        """The order of a data set's rows in training."""
        return super()._get_train_sampler(dataset)

    def asked_sampler(self, dataset: Any = None) -> Any:
        """The order of a data set's rows in training: ours, or that of a program that overrides
        ``_get_train_sampler``."""
        return self._get_train_sampler(dataset)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        # In the loop the norm is a local variable; where it is infinite, clipping leaves zeros.
        norm = super()._get_grad_norm(model, grad_norm)
        self.before_update(model, norm)
        return norm

    def before_update(self, model: nn.Module, norm: Any) -> None:
        """Does nothing, for subclasses: the loop calls it before each optimizer step, with the
        gradient's norm before clipping."""

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # Callbacks are called before all of it, and after each part, but not after all of it.
        with self.concluding():
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def concluding(self) -> contextlib.AbstractContextManager[None]:
        """Context in which what is due at the end of a step or of an epoch is logged, evaluated and
        saved."""
        return contextlib.nullcontext()

    # Checkpoints.

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # transformers writes into the folder itself: others see it half written, and after a kill
        # it stays so.
        if trial is None:
            self.save_checkpoint()
        else:  # a search of hyperparameters
            super()._save_checkpoint(model, trial)

    def save_checkpoint(self) -> None:
        """Saves the state of the run, by :meth:`write_checkpoint`."""
        raise NotImplementedError

    def write_checkpoint(self, folder: Path) -> None:
        """Writes transformers' files of a checkpoint, but for ``trainer_state.json``; brings
        ``self.state``, which that file will hold, up to date."""
        self.store_flos()
        self.write_learned(folder)
        scaler = self.accelerator.scaler
        if not self.args.save_only_model:
            if scaler is not None and self.args.should_save:
                torch.save(scaler.state_dict(), folder / SCALER_NAME)
            self._save_rng_state(str(folder))
        having_state = (*self.callback_handler.callbacks, self.control)
        exported: Any = [x for x in having_state if isinstance(x, ExportableState)]
        states: Any = self.state.stateful_callbacks
        states |= TrainerState(stateful_callbacks=exported).stateful_callbacks

    def write_model(self, folder: Path) -> None:
        """Writes what :meth:`save_model` does, but for the card; uploads nothing."""
        super().save_model(str(folder), _internal_call=True)

    def write_learned(self, folder: Path) -> None:
        """Writes weights, and the state of optimizer and schedule."""
        self.save_model(str(folder), _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(str(folder))

    def push_checkpoint(self, folder: Path) -> None:
        """Sends a checkpoint to the Hub, as ``hub_strategy`` says, without waiting for it."""
        self._push_from_checkpoint(str(folder))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # transformers loads no shares of weights, and no value heads.
        self.load_weights(Path(resume_from_checkpoint))

    def load_weights(self, checkpoint: Path) -> None:
        """Loads the weights of a checkpoint into the model."""
        with _tied_weights_are_not_missed(self.model):
            super()._load_from_checkpoint(str(checkpoint))

    def _load_best_model(self) -> None:
        # It takes another path than _load_from_checkpoint, and runs before on_train_end.
        self.load_best_weights(Path(str(self.state.best_model_checkpoint)))

    def load_best_weights(self, checkpoint: Path) -> None:
        """Loads the weights of the best checkpoint when training ends."""
        with _tied_weights_are_not_missed(self.model):
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # transformers loads no shares of moments, and no moments of another kind of optimizer.
        if checkpoint is not None:
            self.load_optimizer(Path(checkpoint))

    def load_optimizer(self, checkpoint: Path) -> None:
        """Loads the state of optimizer and schedule."""
        super()._load_optimizer_and_scheduler(str(checkpoint))

    # Attributes.

    @property
    def loss_since_log(self) -> Tensor:
        """The sum of the steps' losses since the last log, [] on the device."""
        return self._tr_loss

    @property
    def begun_at_step(self) -> int:
        """The step at which training began or was resumed; 0 in versions of transformers that do
        not keep it."""
        return getattr(self, "_initial_global_step", 0)

    def loss_state(self) -> dict[str, Any]:
        """The losses so far as later logs need them: a tree for a checkpoint."""
        return {
            "since_the_log": self._tr_loss,
            "before": self._total_loss_scalar,
            "logged_at": self._globalstep_last_logged,
            "begun_at": self.begun_at_step,
        }

    def load_losses(self, since_the_log: Tensor, **rest: Any) -> None:
        """Restores a :meth:`loss_state`, or the sum alone."""
        self._tr_loss = since_the_log.clone().to(self.args.device)
        if rest:
            self._total_loss_scalar = rest["before"]
            self._globalstep_last_logged = rest["logged_at"]
            self._initial_global_step = rest["begun_at"]

    def count_learned_tokens(self) -> None:
        """Makes the loop pass the number of learned tokens to each step, texts' first ones not
        counted: it knows only by the name of a model's class whether labels are shifted."""
        self.model_accepts_loss_kwargs = self._loss_shifts_labels = True

    def note_prepared(self, model: Any) -> None:
        """Tells accelerate of a model that is prepared: it prepares no model without an optimizer
        by FSDP2, and an evaluation before training has none."""
        self.accelerator._models.append(model)

    def forget_evaluation(self) -> None:
        """Makes training prepare the model again after an evaluation, which leaves accelerate's
        mark on it: with the mark it would not be wrapped for several processes, and each of them
        would train its own."""
        if self.model_wrapped is self.model:
            vars(self.model).pop("_is_accelerate_prepared", None)


@contextlib.contextmanager
def _tied_weights_are_not_missed(model: Any) -> Iterator[None]:
    """Context in which a weight counts as loaded if it is tied to a loaded one: files hold tied
    weights once."""

    def after_loading(_: nn.Module, keys: Any) -> None:
        if not keys.missing_keys:
            return
        weights, missing = model.state_dict(), set(keys.missing_keys)
        loaded = {x.data_ptr() for name, x in weights.items() if name not in missing} - {0}
        keys.missing_keys[:] = [
            x for x in keys.missing_keys if x not in weights or weights[x].data_ptr() not in loaded
        ]

    with model.register_load_state_dict_post_hook(after_loading):
        yield
