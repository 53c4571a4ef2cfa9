"""All private parts of transformers' Trainer and of accelerate that fastrl's trainers need.

A private method is overridden where transformers' loop does something that no public method and no
callback reaches. It hands on to a method with a name of our own, which the trainers override.
``tests/test_private_parts.py`` counts these methods and attributes, and says what has changed of
them in another version of transformers.
"""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import skip_first_batches
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.optimization import GreedyLR
from transformers.trainer import SCALER_NAME
from transformers.trainer_callback import ExportableState, TrainerState


@dataclass
class StepsOfEpoch:
    """An epoch of a run, and what its latest step leaves for the logs."""

    model: nn.Module  # as it is prepared for several processes
    number: int
    batches: int  # mini-batches
    # What logs and evaluations are told: a search's trial, keys to leave out, when the run began.
    ends: tuple[Any, Any, float]
    batch: int  # the latest mini-batch, counted from 0
    norm: Any = None  # of the gradient, before clipping
    rate: float | None = None  # learning rate


class OpenTrainer(transformers.Trainer):
    """transformers' Trainer, with public names for its private parts.

    :meth:`begin_at`, :meth:`drive`, :meth:`ready_batch`, :meth:`train_sampler`,
    :meth:`save_checkpoint`, :meth:`write_model`, :meth:`write_learned`, :meth:`load_weights`,
    :meth:`load_best_weights` and :meth:`load_optimizer` are for subclasses to override, as are the
    methods that do nothing.

    transformers prepares a run and ends it; its loop over the steps of an epoch is ours.
    """

    _at: StepsOfEpoch

    # What transformers' loop does without calling a callback.

    def _init_training_state(
        self, max_steps: Any, num_update_steps_per_epoch: Any, num_train_epochs: Any, *rest: Any
    ) -> tuple[int, int]:
        # transformers computes the place at which a run resumes, a local variable, from the number
        # of steps: wrongly where a stream has ended, or another number of processes saved the run.
        lengths = max_steps, num_update_steps_per_epoch, num_train_epochs
        return self.begin_at(*super()._init_training_state(*lengths, *rest), num_train_epochs)

    def begin_at(self, epoch: int, minibatches: int, epochs: int) -> tuple[int, int]:
        """The epoch in which a run begins, and how many of its mini-batches are done.

        Args:
            epoch, minibatches: as transformers has computed them.
            epochs: the run's number of epochs; if it is returned as the epoch, no step is taken.
        """
        return epoch, minibatches

    def _prepare_inputs(self, inputs: Any) -> Any:
        # A batch may be a mapping of other things than tensors, which super() would take apart.
        return self.ready_batch(inputs)

    def ready_batch(self, batch: Any) -> Any:
        """A loader's batch as a forward pass gets it: its tensors, on the device."""
        return super()._prepare_inputs(batch)

    def loader(self, data: Any, size: int, sampler: Any, *, training: bool = False) -> DataLoader:
        """A loader of data, for training or else for evaluation, with the settings' workers.

        Args:
            size: rows per batch.
            sampler: a function that makes a sampler of the data's rows; not called for streams.
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
        """The order of rows in training: ours, or a program's own ``_get_train_sampler``."""
        return self._get_train_sampler(dataset)

    def _run_epoch(
        self,
        model: nn.Module,
        epoch: int,
        train_dataloader: Any,
        steps_in_epoch: int,
        num_update_steps_per_epoch: int,
        trial: Any,
        ignore_keys_for_eval: Any,
        start_time: float,
        resume_from_checkpoint: str | None,
        epochs_trained: int,
        steps_trained_in_current_epoch: int,
    ) -> None:
        # transformers' loop over steps tells callbacks of them before it has logged, evaluated and
        # saved, and keeps the gradient's norm and the place in the data to itself.
        resumes = resume_from_checkpoint is not None and epoch == epochs_trained
        behind = steps_trained_in_current_epoch if resumes else 0
        ends = trial, ignore_keys_for_eval, start_time
        latest = self.latest_step() if resumes else (None, None)
        self._at = StepsOfEpoch(model, epoch, steps_in_epoch, ends, behind - 1, *latest)
        feed = self._updates(train_dataloader, num_update_steps_per_epoch, behind)
        if resumes and self.ends_as_it_begins():
            if behind:
                self.end_epoch()
            return
        if resumes and not behind:
            self._load_rng_state(resume_from_checkpoint)
        elif behind:
            feed = self._restoring(feed, resume_from_checkpoint)
        self.drive(feed)
        if self._at.batch < 0:
            warnings.warn(
                "the data have no sample for an epoch: training stops at step "
                f"{self.state.global_step}; a stream may be shorter than max_steps says",
                stacklevel=2,
            )
            self.control.should_training_stop = True
        self.end_epoch()

    def _updates(self, loader: Any, updates: int, behind: int) -> Iterator[tuple[list, Any]]:
        """Yields the mini-batches of each optimizer step of the epoch, and the number of items that
        they have together, where the loss is divided by it.

        Args:
            behind: mini-batches that a run which is resumed here has learned.
        """
        each = self.args.gradient_accumulation_steps
        last = self._at.batches % each or each
        if behind:
            loader = skip_first_batches(loader, behind)
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self._at.number)
        batches = iter(loader)
        for update in range(behind // each, updates):
            count = each if update < updates - 1 else last
            yield self.get_batch_samples(batches, count, self.args.device)

    def _restoring(self, feed: Iterator[Any], checkpoint: str | None) -> Iterator[Any]:
        """Yields a feed's items; restores random generators once the data's order is drawn."""
        for i, item in enumerate(feed):
            if i == 0:
                self._load_rng_state(checkpoint)
            yield item

    def drive(self, feed: Iterator[tuple[list, Any]]) -> None:
        """Runs the steps of an epoch: each is :meth:`learn` of an item of the feed."""
        raise NotImplementedError

    def learn(self, batch: tuple[list, Any]) -> bool:
        """Adds up the gradients of mini-batches and takes the optimizer's step; returns whether it
        was taken: a stream may end before."""
        minibatches, items = batch
        at, args, gradients = self._at, self.args, self.accelerator.gradient_state
        ends_step = False
        self.current_gradient_accumulation_steps = len(minibatches)
        for i, minibatch in enumerate(minibatches):
            at.batch += 1
            number = at.batch + 1
            ends_step = number % args.gradient_accumulation_steps == 0 or number == at.batches
            gradients._set_sync_gradients(ends_step)
            if at.batch % args.gradient_accumulation_steps == 0:
                self.begin_step()
                self._call("on_step_begin")
            with self._synchronised(at.model, last=i == len(minibatches) - 1):
                loss = self.training_step(at.model, minibatch, items)
            self._tr_loss += loss
            self.current_flos: Any = self.current_flos + float(self.floating_point_ops(minibatch))
            self.count_input_tokens(minibatch)
            if ends_step:
                self._update(at)
            else:
                self._call("on_substep_end")
            if self.is_over():
                break
        return ends_step

    def _synchronised(
        self, model: nn.Module, *, last: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Context of a mini-batch: by default processes add gradients up in the ``last`` one."""
        accelerator = self.accelerator
        each = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        if last or each or deepspeed:
            return contextlib.nullcontext()
        # A model that transformers has loaded in shards is not wrapped by accelerate.
        loaded_in_shares = getattr(self, "is_distributed_loading_by_transformers", False)
        deferred = getattr(self, "_defer_fsdp_gradient_reduction", None)  # older ones have none
        if deferred and loaded_in_shares and hasattr(self.model, "set_requires_gradient_sync"):
            return deferred()
        return accelerator.no_sync(model=model)

    def _update(self, at: StepsOfEpoch) -> None:
        """Takes the optimizer's step along the gradient, and the schedule's step."""
        norm = self._clip_grad_norm(at.model) if self.args.max_grad_norm > 0 else None
        at.norm = self._get_grad_norm(at.model, grad_norm=norm)
        self.before_update(at.model, at.norm)
        self._call("on_pre_optimizer_step")
        self.begin_update()
        assert self.optimizer is not None
        self.optimizer.step()
        self._call("on_optimizer_step")
        at.rate = self._get_learning_rate()
        if not self.accelerator.optimizer_step_was_skipped and not isinstance(
            self.lr_scheduler, (torch.optim.lr_scheduler.ReduceLROnPlateau, GreedyLR)
        ):
            assert self.lr_scheduler is not None
            self.lr_scheduler.step()
        at.model.zero_grad()
        self.state.global_step += 1
        self.state.epoch = at.number + (at.batch + 1) / at.batches
        self.end_step()
        self._call("on_step_end")

    def count_input_tokens(self, minibatch: Any) -> None:
        """Adds a mini-batch's tokens to those of the run, where the settings ask for it."""
        self._track_num_input_tokens(minibatch)

    def begin_step(self) -> None:
        """Does nothing; subclasses act here before callbacks are told that a step begins."""

    def before_update(self, model: nn.Module, norm: Any) -> None:
        """Does nothing; subclasses act here before an optimizer step. ``norm`` is that of the
        gradient before clipping."""

    def begin_update(self) -> None:
        """Does nothing; subclasses act here right before the optimizer changes the weights."""

    def end_step(self) -> None:
        """Does nothing; subclasses act here before callbacks are told that a step has ended."""

    def end_epoch(self) -> None:
        """Tells callbacks that an epoch has ended."""
        self._call("on_epoch_end")

    def is_over(self) -> bool:
        """Whether no further batch of this epoch is learned."""
        return self.control.should_epoch_stop or self.control.should_training_stop

    def ends_as_it_begins(self) -> bool:
        """Whether the logging or evaluation that a checkpoint lacked has ended the resumed run."""
        return False

    def callback_states(self) -> list[tuple[Any, dict[str, Any]]]:
        """The callbacks whose states checkpoints hold, each with its attributes' values."""
        callbacks: Any = self.callback_handler.callbacks
        stateful = (x for x in callbacks if isinstance(x, ExportableState))
        return [(x, copy.deepcopy(x.state()["attributes"])) for x in stateful]

    def latest_step(self) -> tuple[float | None, float | None]:
        """The gradient's norm and the learning rate of the latest step, or None, None."""
        at = getattr(self, "_at", None)
        if at is None or at.norm is None:
            return None, None
        return float(at.norm.full_tensor() if hasattr(at.norm, "full_tensor") else at.norm), at.rate

    def go_on_behind(self, norm: float | None, rate: float | None, ignored: Any) -> None:
        """Sets what logs and evaluations tell of the step behind which training begins.

        Args:
            norm, rate: the step's gradient norm and learning rate, see :meth:`latest_step`.
            ignored: keys of the model's outputs that evaluations leave out.
        """
        ends = None, ignored, time.time()
        epoch = int(self.state.epoch or 0)
        self._at = StepsOfEpoch(self.model_wrapped, epoch, 1, ends, -1, norm, rate)

    def log_evaluate_and_save(self) -> None:
        """Logs, evaluates and saves, as far as ``control`` says that it is due."""
        at = self._at
        trial, ignored, began = at.ends
        self._maybe_log_save_evaluate(
            self._tr_loss, at.norm, at.model, trial, at.number, ignored, began, at.rate
        )

    def _call(self, event: str) -> None:
        """Tells callbacks, which may change ``control``."""
        handler = self.callback_handler
        self.control = getattr(handler, event)(self.args, self.state, self.control)

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
        """Writes what :meth:`save_model` does, but for the model card; uploads nothing."""
        super().save_model(str(folder), _internal_call=True)

    def write_learned(self, folder: Path) -> None:
        """Writes weights and, without ``save_only_model``, state of optimizer and schedule."""
        self.save_model(str(folder), _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(str(folder))

    def push_checkpoint(self, folder: Path) -> None:
        """Sends a checkpoint to the Hub, as ``hub_strategy`` says, without waiting for it."""
        self._push_from_checkpoint(str(folder))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # transformers loads no weights that were saved as a file per process, and no value heads.
        self.load_weights(Path(resume_from_checkpoint))

    def load_weights(self, checkpoint: Path) -> None:
        """Loads the weights of a checkpoint into the model."""
        with _tied_weights_are_not_missed(self.model):
            super()._load_from_checkpoint(str(checkpoint))

    def _load_best_model(self) -> None:
        # transformers' own does not call _load_from_checkpoint, and runs before on_train_end.
        self.load_best_weights(Path(str(self.state.best_model_checkpoint)))

    def load_best_weights(self, checkpoint: Path) -> None:
        """Loads the weights of the best checkpoint when training ends."""
        with _tied_weights_are_not_missed(self.model):
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # transformers loads no moments that were saved as a file per process, or by another kind
        # of optimizer.
        if checkpoint is not None:
            self.load_optimizer(Path(checkpoint))

    def load_optimizer(self, checkpoint: Path) -> None:
        """Loads the state of optimizer and schedule."""
        super()._load_optimizer_and_scheduler(str(checkpoint))

    # What reads and sets private attributes of transformers' Trainer and of accelerate.

    @property
    def loss_since_log(self) -> Tensor:
        """The sum of the steps' losses since the last log, [] on the device."""
        return self._tr_loss

    @property
    def begun_at_step(self) -> int:
        """The step at which training began or was resumed; 0 where transformers keeps none."""
        return getattr(self, "_initial_global_step", 0)

    def loss_state(self) -> dict[str, Any]:
        """The sums of losses that later logs need, with their steps: a tree for a checkpoint."""
        return {
            "since_the_log": self._tr_loss,
            "before": self._total_loss_scalar,
            "logged_at": self._globalstep_last_logged,
            "begun_at": self.begun_at_step,
        }

    def load_losses(self, since_the_log: Tensor, **rest: Any) -> None:
        """Restores a :meth:`loss_state`, or its sum since the last log alone."""
        self._tr_loss = since_the_log.clone().to(self.args.device)
        if rest:
            self._total_loss_scalar = rest["before"]
            self._globalstep_last_logged = rest["logged_at"]
            self._initial_global_step = rest["begun_at"]

    def count_learned_tokens(self) -> None:
        """Makes the loop pass the number of learned tokens to each step, texts' first tokens not
        counted: transformers knows by the name of a model's class alone whether it shifts labels.
        """
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
