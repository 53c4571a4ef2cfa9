"""The base of trainers on transformers' Trainer: exact resuming, finite steps, sharding, cards."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from fastrl.models.activation_offloading import activation_offloading
from fastrl.models.optimizers import class_and_keywords, optimizer_name, steps_in_backward
from fastrl.models.products import Products
from fastrl.models.quantised import save_beside_adapter
from fastrl.models.sharding import is_spread, spread
from fastrl.models.utils import keep_savable
from fastrl.overrides import overridden
from fastrl.run.checkpoints import OF_TRANSFORMERS, Checkpoints
from fastrl.run.fingerprint import fingerprint
from fastrl.run.folder import RunFolder
from fastrl.run.gradient_buckets import settle_buckets
from fastrl.run.launcher import check_found, wait_at_most
from fastrl.run.metric_means import MetricMeans
from fastrl.run.model_card import (
    Method,
    card_beside,
    card_of_trainer,
    card_settings,
    on_the_hub,
    warn_of_unread,
)
from fastrl.run.precision import refuse_fp16_twice
from fastrl.run.processes import OneProcess, Processes, processes_of
from fastrl.run.processor_files import write_processor
from fastrl.run.random_state import drawing_from, random_state, restore_random_state, seed_at
from fastrl.run.stopping import Stopped
from fastrl.run.transformers_base import OpenTrainer
from fastrl.run.transformers_callbacks import LossProgress
from fastrl.run.transformers_files import save_process, save_state
from fastrl.run.transformers_settings import (
    check_best_metric,
    settings_of_results,
    settings_of_steps,
)
from fastrl.trainers import rehearse
from fastrl.trainers.driver import Driver, StateLost
from fastrl.trainers.due import BeforeEvaluation, of_evaluation, prevented
from fastrl.trainers.finite_steps import FiniteSteps
from fastrl.trainers.low_memory import (
    BY_DEFAULT,
    drop_masters,
    schedule_by_metric,
    settle_precision,
    with_kept_state,
)
from fastrl.trainers.plan.passes import PassSize
from fastrl.trainers.plan.report import Plan
from fastrl.trainers.resume import Resuming, check_shapes, clear_the_way, find_to_resume
from fastrl.trainers.run_place import FirstToKnow, LastToKnow, RunPlace
from fastrl.trainers.sharded import check_fsdp, plain_model, spread_by_accelerate, weight_shares
from fastrl.user_code import exits_are_errors

KEPT_LOGS = 10_000  # in memory, and in each checkpoint


class BaseTrainer(OpenTrainer):
    """transformers' Trainer whose run goes on from a checkpoint as if it had not been interrupted.

    Without DeepSpeed no NaN or infinite number reaches the weights, see
    :class:`fastrl.trainers.finite_steps.FiniteSteps` (``args.on_nonfinite``). Low-precision weights
    have float32 masters (``args.master_weights``), optimizer state and activations may be in host
    memory (``args.offload_optimizer``, ``args.activation_offloading``). Weights that FSDP2 spreads
    can be evaluated before training, too, and are written as shares, see
    :class:`fastrl.trainers.sharded.Shares`. Model cards are fastrl's.

    A checkpoint has what transformers saves and, in a folder ``process-N`` for each process, what
    later steps and logs depend on too: the loss since the last log, the place in the data, what
    subclasses add in :meth:`own_state`, and what must be the same in the run that resumes. It is
    written under a temporary name, and gets its own after its manifest.

    Checkpoints are written where a resumed run's next step is the same: after an epoch's evaluation
    and where :meth:`at_rest` is true. After an exception (see
    :class:`fastrl.trainers.driver.Driver`) all processes write one if it has reached each of them,
    as one in :meth:`agreed` or in sampling has; else the main process alone saves the state before
    the step, without the other processes' random states.

    A run may go on with another number of processes if a step still has as many samples in all of
    them together; its steps then have the same examples.

    Attributes:
        kept: plain values that every checkpoint keeps, and that are there again in a resumed run.
        saves_when_it_fails: whether exceptions save a checkpoint; by default if training saves any.
        computed_columns: columns that the trainer adds to data sets; fingerprints leave them out.
        method: the training method that the model card names.

    Raises:
        ValueError: fp16 mixed precision of float16 weights; FSDP1; FSDP of four-bit weights; a
            ``metric_for_best_model`` that none of several evaluation sets has.
    """

    args: Any
    method: Method | None = None
    computed_columns: tuple[str, ...] = ()
    rehearsed_as: ClassVar[rehearse.Surface]
    resumes_by = "resume_from_checkpoint=True"
    metric_differences: ClassVar[Mapping[str, tuple[str, str]]] = {}  # see MetricMeans
    # What subclasses read, beside transformers' attributes.
    processes: Processes
    products: Products  # the libraries by which a CPU multiplies matrices
    finite_steps: FiniteSteps
    run_folder: RunFolder | None  # a command's folder, in which a resumed run's metrics go on
    _metrics: dict[str, MetricMeans]  # by mode, "train" and "eval"; the attribute's name is TRL's

    def __init__(self, *, args: Any, model: Any = None, **kwargs: Any):
        self._metrics = {
            "train": MetricMeans(self.metric_differences),
            "eval": MetricMeans(self.metric_differences, pools=True),
        }
        self.kept: dict[str, Any] = {}
        self.run_folder = None
        self._run = RunPlace()
        self._driver = Driver(self)
        self._says_precision = settle_precision(args, model)
        if isinstance(model, nn.Module):
            refuse_fp16_twice(model, str(args.mixed_precision))
            keep_savable(model)
        super().__init__(args=args, model=model, **kwargs)
        check_best_metric(self.args, self.eval_dataset)
        # A user's function may change the working directory.
        self.args.output_dir = os.path.abspath(str(self.args.output_dir))
        wait_at_most(self.args)
        check_found(self.accelerator)
        self.processes = processes_of(self.accelerator)
        self.saves_when_it_fails = self.args.save_strategy != SaveStrategy.NO
        self.callback_handler.callbacks.insert(0, FirstToKnow(self.run_place))
        self.add_callback(LastToKnow(self._training_begins))
        # transformers' filter of NaN losses waits for the device in each pass, and hides what we
        # count.
        self.args.logging_nan_inf_filter = False
        self.finite_steps = FiniteSteps(self.args.on_nonfinite, self.accelerator)
        if self.is_fsdp_enabled:
            check_fsdp(type(self).__name__, self.accelerator, self.model)
        self._offloading = activation_offloading(
            self.args.activation_offloading, self.args.device, self.is_fsdp_enabled
        )
        self.products = Products(self.processes)

    def run_place(self) -> RunPlace:
        """The place of the training that is going on; each :meth:`train` makes a new one."""
        return self._run

    @cached_property
    def overrides(self) -> frozenset[str]:
        """The names that a program's subclass defines."""
        return overridden(type(self))

    def add_first(self, callback: TrainerCallback) -> None:
        """Adds a callback before the user's callbacks: if one of these fails, the state that is
        saved has what this callback does."""
        self.callback_handler.callbacks.insert(1, callback)  # behind FirstToKnow

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of ``output_dir``."""
        return Checkpoints(Path(str(self.args.output_dir)), self.args.save_total_limit or None)

    # What subclasses add.

    def identity(self) -> dict[str, Any]:
        """What must be the same in the run that resumes."""
        optim = str(getattr(self.args.optim, "value", self.args.optim))
        return {
            "trainer": type(self).__name__,
            # The arguments count, too: an optimizer keeps only some of them with its state.
            "optimizer": " ".join(filter(None, (optim, self.args.optim_args))),
            "data": fingerprint(self.train_dataset, self.computed_columns),
        }

    def own_settings(self) -> dict[str, Any]:
        """Settings that are not in ``args``; a run that resumes with other values warns of them."""
        return self.own_code()

    def own_code(self) -> dict[str, Any]:
        """Hashes of users' functions by which the trainer learns, compared as settings are."""
        return {}

    def own_state(self) -> dict[str, Any]:
        """What a checkpoint keeps for this trainer, as a tree of tensors and plain values."""
        metrics = self._metrics["train"].state()
        return {"metrics": metrics, "steps": self.finite_steps.state()}

    def samples_of_all(self) -> tuple[int, str]:
        """The number of samples in a step of all processes, which a run that resumes with another
        number of processes must keep; and the settings whose product it is, as a text."""
        args = self.args
        size = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return (
            size * args.world_size,
            "per_device_train_batch_size × gradient_accumulation_steps × processes",
        )

    def joined_state(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """This process's :meth:`own_state`, made of the states of a run of another number of
        processes."""
        metrics, count = [state.get("metrics", {}) for state in states], self.processes.count
        if all("rows" in x for x in metrics):
            return {**states[0], "metrics": MetricMeans.of_others(metrics, count)}
        tokens = sum(x.get("tokens", 0.0) for x in metrics) / count
        return {**states[0], "metrics": {"tokens": tokens}}

    def begin_training(self, resumed: Mapping[str, Any] | None) -> None:
        """Readies the trainer before transformers' loop; a checkpoint's weights are not loaded yet.

        Args:
            resumed: the checkpoint's "own", its :meth:`own_state`, and "place", the "epoch" and how
                many of its "minibatches" are done. None: the run begins.
        """
        metrics = self._metrics["train"] = MetricMeans(self.metric_differences)
        self.finite_steps.load(None if resumed is None else resumed["own"]["steps"])
        if resumed is None:
            return
        saved = resumed["own"].get("metrics", {})
        if "rows" in saved:
            metrics.load(saved, self.args.device)
            return
        warnings.warn(
            "resume: the checkpoint is of an earlier version: the next log is without the metrics "
            "between the checkpoint's last log and the checkpoint",
            stacklevel=3,
        )
        if "tokens" in saved:
            metrics.count("num_tokens", saved["tokens"])

    @property
    def own_folder(self) -> RunFolder:
        """The folder of ledger and tables: a command's run folder, or ``output_dir``."""
        return self.run_folder or RunFolder(str(self.args.output_dir))

    def own_mark(self) -> dict[str, Any]:
        """The part of :meth:`own_state` that a step changes before it updates the weights."""
        return {"metrics": self._metrics["train"].mark()}

    def own_rewind(self, mark: Mapping[str, Any]) -> None:
        """Sets :meth:`own_state` back to what it was when :meth:`own_mark` returned ``mark``."""
        self._metrics["train"].rewind(mark["metrics"])

    def at_rest(self) -> bool:
        """Whether a run can be resumed from here, between two steps."""
        return True

    # Training from its beginning or a checkpoint, with its logs and passes.

    def train(
        self,
        resume_from_checkpoint: str | Path | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Trains as ``Trainer.train`` of transformers does, and resumes from our checkpoints.

        Args:
            resume_from_checkpoint: True or "latest": the newest good checkpoint of ``output_dir``;
                or a checkpoint's folder. One without a manifest, from transformers, is taken with a
                warning that it was not verified.

        Raises:
            FileNotFoundError: there is no such folder, or no checkpoint in it.
            ValueError: offload_optimizer with FSDP2 or DeepSpeed, or with an optimizer that does
                not step in host memory.
            BadCheckpoint: a ValueError: a checkpoint that is damaged, or that another trainer,
                model or data set made; nothing has changed then.
            FloatingPointError: a loss or gradient that is not finite, see ``args.on_nonfinite``.
            KeyboardInterrupt: Ctrl-C or SIGTERM, with the state saved if checkpoints are written;
                after SIGTERM the same exception is also a SystemExit of status 143. A second Ctrl-C
                saves nothing.
        """
        if self._says_precision and self.is_world_process_zero():
            tqdm.write(BY_DEFAULT)
        self._says_precision = False
        with self.products.on(*self.models_at_work()):
            output = self._train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        return output._replace(training_loss=output.metrics.get("train_loss", output.training_loss))

    def models_at_work(self) -> Sequence[nn.Module | None]:
        """The models whose linear layers :attr:`products` computes during training."""
        return ()

    def _train(self, resume: str | Path | bool | None, trial: Any, *rest: Any) -> Any:
        self._run = run = RunPlace(ignored=rest[0])
        if trial is not None:  # a search of hyperparameters
            return super().train(resume, trial, *rest)  # type: ignore[arg-type]
        run.checkpoint = find_to_resume(
            self.processes.from_main(resume), self.checkpoints, self.processes
        )
        if run.checkpoint or self.saves_when_it_fails or self.processes.count > 1:
            run.identity, run.settings = self.identity(), self._all_settings()
        if self.processes.count > 1:
            self.processes.check_same("train()", self._shared_settings())
        with self.processes.together():
            if run.checkpoint is not None:
                run.resumed = self._resuming().read(run.checkpoint)
        if run.resumed is not None:
            torch.manual_seed(run.resumed["seed"])
        run.seed = torch.initial_seed()
        self.begin_training(run.resumed)
        self.forget_evaluation()
        path = None if run.checkpoint is None else str(run.checkpoint)
        evaluates_first = self.args.eval_on_start
        self.args.eval_on_start = evaluates_first and path is None
        try:
            with self._driver.guarded():
                return super().train(path, trial, *rest)
        finally:
            self.args.eval_on_start = evaluates_first

    def _resuming(self) -> Resuming:
        return Resuming(
            self._run.identity,
            self._run.settings,
            self.processes,
            self.samples_of_all(),
            self.args.per_device_train_batch_size,
            self.joined_state,
            self.check_foreign,
            self.products.adopt,
        )

    def check_foreign(self, checkpoint: Path) -> None:
        """Checks a checkpoint that transformers alone has written.

        Raises:
            BadCheckpoint: a checkpoint of another model, or that this trainer cannot resume from.
        """
        check_shapes(checkpoint, self.model)

    def _shared_settings(self) -> dict[str, Any]:
        """What must be the same in all processes."""
        run = self._run
        held_out = self.eval_dataset
        held_out = held_out if isinstance(held_out, dict) else {"": held_out}
        return {
            **settings_of_steps(self.args),
            **run.settings,
            **{f"{name} of the run": value for name, value in run.identity.items()},
            "seed of torch": torch.initial_seed(),
            "evaluation data": {
                name: fingerprint(rows, self.computed_columns) for name, rows in held_out.items()
            },
            "saves_when_it_fails": self.saves_when_it_fails,
            "output_dir": str(self.args.output_dir) if self.saves_when_it_fails else None,
        }

    def _all_settings(self) -> dict[str, Any]:
        return settings_of_results(self.args, self.own_settings())

    def begin_at(self, epoch: int, minibatches: int, epochs: int) -> tuple[int, int]:
        # LastToKnow is to stand behind callbacks that were added or restored after it, too.
        self.callback_handler.callbacks.sort(key=lambda x: isinstance(x, LastToKnow))
        over = self.state.global_step >= self.state.max_steps
        skips = not self.args.ignore_data_skip
        return self._run.begin_at(epoch, minibatches, skips=skips, last=epochs if over else None)

    def _training_begins(self) -> None:
        """Makes the last preparations when all of a checkpoint is loaded, before the first step."""
        settle_buckets(self.model_wrapped)
        run = self._run
        run.begun, state = time.time(), run.resumed
        if state is not None:
            self.load_losses(**state["losses"])
            self.kept = dict(state["kept"])
            run.begun -= state["seconds"]
        if self.state.global_step >= self.state.max_steps:  # the run had ended
            run.restore_draws()
        if self.args.should_save:
            saves = self.args.save_strategy != SaveStrategy.NO
            arguments = run.checkpoint, run.resumed, self.checkpoints, self.run_folder
            clear_the_way(*arguments, saves=saves)
        norm, rate = (state or {}).get("latest") or (None, None)
        self.go_on_behind(norm, rate, run.ignored)
        if state is not None and state.get("due"):
            self._conclude_due(state)
        if (
            state is not None
            and state.get("epoch_ends")
            and self.state.global_step >= self.state.max_steps
        ):
            self.end_epoch()  # transformers runs no epoch of a run that has all its steps
        self._mark()

    def _conclude_due(self, state: Mapping[str, Any]) -> None:
        """Does the logging and evaluation after a checkpoint's step that an exception prevented,
        with the generators in the states that they had then."""
        run, control, due, args = self._run, self.control, state["due"], self.args
        model: Any = self.model
        restore_random_state(state["random"])
        model.train()  # by which log() knows that these are logs of training
        control.should_log = due["log"] and args.logging_strategy != "no"
        control.should_evaluate = due["evaluate"] and args.eval_strategy != "no"
        self.log_evaluate_and_save()
        run.note_draws()
        run.is_ended = control.should_training_stop
        if self.saves_when_it_fails:  # what has been done is not due any more
            self.save_checkpoint()

    def ends_as_it_begins(self) -> bool:
        return self._run.is_ended

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs losses as means over the steps that updated the weights, and no
        ``model_preparation_time``, which a resumed run does not measure. The runtime is the sum
        over the program's starts since the run began."""
        self.finite_steps.correct(logs, self.state.global_step - self.begun_at_step)
        for name in [name for name in logs if name.endswith("model_preparation_time")]:
            del logs[name]
        if "train_runtime" in logs and self._run.begun:
            seconds = time.time() - self._run.begun
            for name in ("train_samples_per_second", "train_steps_per_second"):
                if name in logs:
                    logs[name] = round(logs[name] * logs["train_runtime"] / seconds, 3)
            logs["train_runtime"] = round(seconds, 4)
        try:
            super().log(logs, start_time)
        finally:
            # Whatever fails now, a step's log is not due any more; an evaluation is, as a whole.
            if self._run.behind_step and not of_evaluation(logs):
                self._mark()
                self._mark_evaluation()
        older = len(self.state.log_history) - KEPT_LOGS
        if older > 0:
            if not self._run.forgets:
                warnings.warn(
                    f"trainer.state.log_history keeps the latest {KEPT_LOGS} logs: raise "
                    "logging_steps, or have report_to or a callback's on_log keep all",
                    stacklevel=2,
                )
            self._run.forgets = True
            del self.state.log_history[:older]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with self.offloading(model), self.own_draws():
            return super().training_step(model, inputs, *args, **kwargs)

    def offloading(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Context of a pass; ``activation_offloading`` keeps its activations in host memory."""
        return self._offloading(self.accelerator.unwrap_model(model))

    def own_draws(self) -> contextlib.AbstractContextManager[None]:
        """Context of a pass: what it draws, such as dropout's masks, depends on seed, step, pass
        and process, whatever rewards and callbacks have done to torch's generators."""
        key = self.state.global_step, self._run.passes, self.processes.index
        self._run.passes += 1
        return drawing_from(seed_at(self.args.seed, "pass", *key), self.args.device)

    def before_update(self, model: nn.Module, norm: Any) -> None:
        loss = self.loss_since_log
        if self.finite_steps.takes(self.state.global_step + 1, loss, norm):
            return
        assert self._run.loss is not None
        loss.copy_(self._run.loss)
        if self.accelerator.scaler is None:  # a scaler needs gradients, and skips the step itself
            for parameter in model.parameters():
                parameter.grad = None  # the optimizer passes over weights without gradients

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.prepare_weights()
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            spread(plain_model(self.accelerator, self.model))

    # The plan of memory, weights and optimizer.

    @property
    def of_a_command(self) -> bool:
        """Whether a command of fastrl's shows the run; then its settings were not made for TRL."""
        return any(isinstance(x, LossProgress) for x in self.callback_handler.callbacks)

    def plan(
        self,
        prompt_tokens: int,
        response_tokens: int,
        passes: PassSize | None = None,
        device: str | None = None,
    ) -> Plan:
        """The memory that training on prompts and responses of these lengths needs, by phase, with
        rollouts, without rewards or an annotator: from a rehearsal, in which nothing of this
        trainer is run or changed.

        Args:
            prompt_tokens, response_tokens: tokens of the longest prompt and response.
            passes: the size of passes in the plan; by default that of the settings.
            device: "cpu" or "cuda", for which the memory is counted; by default the trainer's.

        Returns:
            a :class:`fastrl.trainers.plan.report.Plan`, whose ``peak`` is in bytes.

        Raises:
            ValueError: a length below 2, or lengths that together exceed the model's context.
        """
        return rehearse.plan_of(self, (prompt_tokens, response_tokens), passes, device)

    def tokens_of(self, *lengths: int) -> tuple[int, int]:
        """Tokens of a mini-batch, and of the smallest pass, if each text has ``sum(lengths)``."""
        return rehearse.tokens_of(self, lengths)

    def limit_passes(self, passes: PassSize) -> None:
        """Limits how much is computed at a time, as ``micro_batch_tokens`` and
        ``gradient_checkpointing`` do; to be called before training begins."""
        passes.set_in(self.args)

    def prepare_weights(self) -> None:
        """Spreads the weights over the processes if the run uses FSDP2."""
        if self.is_fsdp_enabled and not is_spread(plain_model(self.accelerator, self.model)):
            self.note_prepared(spread_by_accelerate(self.accelerator, self.model))

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        return class_and_keywords(args, model)

    def create_optimizer(self, model: Any = None) -> Any:
        name = "DeepSpeed" if self.is_deepspeed_enabled else optimizer_name(self.args)
        # DeepSpeed has masters of its own; some optimizers step weights in the backward pass.
        keeps_state = self.is_deepspeed_enabled or steps_in_backward(name)
        if keeps_state and self.args.offload_optimizer:
            raise ValueError(
                f"offload_optimizer is not for {name}, which keeps its state itself: leave it out "
                "(DeepSpeed's own file has an offload_optimizer, too)"
            )
        # accelerate finds an optimizer's weights by their addresses: before weights are spread,
        # those without memory have none.
        self.prepare_weights()
        self.optimizer = super().create_optimizer(model)
        if not keeps_state:
            says = not self.of_a_command and self.is_world_process_zero()
            spread_over = self.is_fsdp_enabled
            self.optimizer = with_kept_state(
                self.optimizer, self.args, spread=spread_over, says=says
            )
        return self.optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        with schedule_by_metric(self.args):
            return super().create_scheduler(*args, **kwargs)

    def write_model(self, folder: Path) -> None:
        shares = weight_shares(self.accelerator, self.model)
        if shares is None:
            super().write_model(folder)
        else:
            shares.save_model(folder, self.processing_class, self.args)
        if self.args.should_save:
            save_beside_adapter(self.accelerator.unwrap_model(self.model), folder)

    def write_learned(self, folder: Path) -> None:
        shares = weight_shares(self.accelerator, self.model)
        if shares is None:
            super().write_learned(folder)
        else:
            shares.write(folder, self.optimizer, self.lr_scheduler, self.processes)

    def load_weights(self, checkpoint: Path) -> None:
        shares = weight_shares(self.accelerator, self.model, checkpoint)
        if shares is None:
            super().load_weights(checkpoint)
        else:
            shares.load_weights(checkpoint)

    def load_best_weights(self, checkpoint: Path) -> None:
        if is_spread(plain_model(self.accelerator, self.model)):
            self.load_weights(checkpoint)
        else:
            super().load_best_weights(checkpoint)

    def load_optimizer(self, checkpoint: Path) -> None:
        shares = weight_shares(self.accelerator, self.model, checkpoint)
        if shares is None:
            super().load_optimizer(checkpoint)
        else:
            shares.load_optimizer(checkpoint, self.optimizer, self.lr_scheduler)
        drop_masters(self.optimizer)

    # Model and card.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves model and tokenizer, and a model card where there is none; if a user calls it and
        ``push_to_hub`` is set, also uploads them."""
        folder = Path(output_dir or self.args.output_dir)
        with contextlib.ExitStack() as stack:
            if self.args.should_save:
                stack.enter_context(card_beside(folder, lambda: self.write_card(str(folder))))
            self.write_model(folder)
        if self.args.should_save:
            write_processor(self.accelerator.unwrap_model(self.model), folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: Any = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: Any = None,
        dataset_tags: Any = None,
        dataset: Any = None,
        dataset_args: Any = None,
        *,
        dataset_name: str | None = None,
    ) -> None:
        """Writes ``README.md`` to the output folder.

        Args:
            language: the texts' language, as the Hub names it.
            license: the license's id; by default the base model's, where it names one.
            tags: a tag or several, beside fastrl's.
            model_name: by default the folder's name; ``hub_model_id`` takes precedence.
            finetuned_from: the base model, if the model does not name one.
            dataset_tags, dataset_name: the data sets, by transformers' name and by TRL's; the card
                names those that are ids of the Hub.
            tasks, dataset, dataset_args: in transformers' cards alone; a warning says so.
        """
        warn_of_unread(tasks=tasks, dataset=dataset, dataset_args=dataset_args)
        if self.accelerator.is_main_process:
            self.write_card(
                str(self.args.output_dir),
                getattr(self, "hub_model_id", None) or model_name,
                base=finetuned_from,
                license=license,
                language=language,
                tags=[tags] if isinstance(tags, str) else tags or (),
                datasets=on_the_hub(dataset_tags) + on_the_hub(dataset_name),
            )

    def card_settings(self) -> dict[str, Any]:
        return card_settings(self.args)

    def write_card(self, folder: str, name: str | None = None, **told: Any) -> None:
        """Writes the model card to a folder.

        Args:
            told: further keyword arguments of :class:`fastrl.run.model_card.Training`.
        """
        model, history = self.accelerator.unwrap_model(self.model), self.state.log_history
        told = {"method": self.method, "settings": self.card_settings(), **told}
        card_of_trainer(folder, name, model, history, told)

    # What processes agree on between two steps, and the count of mini-batches.

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Context of work between two steps that each process does by itself: if it fails in one
        process, it fails in all, and the state before it can be saved.

        Raises:
            PeerFailed: another process raised an exception; the message names it and the process.
        """
        error: Exception | None = None
        try:
            with exits_are_errors():
                yield
        except Exception as caught:
            error = caught
        if self.processes.any(error is not None):  # one number is told sooner than an object
            with self.processes.together():
                if error is not None:
                    raise error

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._run.minibatch += len(batches)
        return batches, items

    # What a run does in and around a step, as OpenTrainer's loop and the driver call it.

    def drive(self, feed: Iterator[Any]) -> None:
        self._driver.drive(feed)

    def begin_step(self) -> None:
        self._run.passes = 0
        self._run.restore_draws()

    def begin_update(self) -> None:
        self._run.between_steps = False

    def end_step(self) -> None:
        self._run.done, self._run.behind_step = self._run.minibatch, True
        self._mark()

    def end_epoch(self) -> None:
        self._run.restore_draws()  # needed where no batch of the epoch was left
        super().end_epoch()
        self._driver.conclude()

    def conclude(self, *, stops: bool) -> bool:
        """Logs, evaluates and saves what is due; returns whether it evaluated or saved."""
        run, control = self._run, self.control
        if not run.behind_step:  # no step has ended, but an epoch
            run.epoch_is_over = run.behind_step = True
            self._mark()
        saves = control.should_save or run.save_is_due or (stops and self.saves_when_it_fails)
        if saves:
            ends = control.should_training_stop or control.should_epoch_stop
            ends = ends or self.state.epoch % 1 == 0
            run.save_is_due = not (run.epoch_is_over or (not ends and self.at_rest()))
            control.should_save = not run.save_is_due
        took_long = control.should_save or control.should_evaluate
        self._mark_evaluation()
        if self.args.logging_strategy == "no":
            self._metrics["train"].drop()
        self.log_evaluate_and_save()
        run.behind_step, run.before_evaluation = False, None
        self._mark()
        return took_long

    def can_rest(self) -> bool:
        """Whether no checkpoint waits for a place from which a run can be resumed."""
        return not self._run.save_is_due

    def save_to_stop(self) -> None:
        """Saves the state of a run that stops, unless it is saved or no checkpoints are written."""
        is_saved = self.processes.from_main(self._is_there(self.state.global_step))
        if self.saves_when_it_fails and not is_saved:
            self.save_checkpoint()

    def stopped(self) -> Stopped:
        """The exception of a run that was asked to stop; its message names the checkpoint."""
        step = self.state.global_step
        if not self._is_there(step):
            return Stopped(f"stopped after step {step}; its state is not saved")
        return Stopped(
            f"stopped after step {step}; saved: {self.checkpoints.path(step)}; --resume "
            f"({self.resumes_by}) continues"
        )

    def save_checkpoint(self) -> None:
        run, state, step = self._run, self.state, self.state.global_step
        if self.run_folder is not None:
            self.run_folder.sync()
        best, run.saving = state.best_global_step, True
        together = OneProcess() if run.alone else self.processes
        nodes = self.args.save_on_each_node
        with self.checkpoints.new(step, best, together, on_each_node=nodes) as part:
            self.write_checkpoint(part)
            save_process(self._state(), part, self.args.process_index)
            if best is not None and (best == step or self._is_there(best)):
                state.best_model_checkpoint = str(self.checkpoints.path(best))
            if self.args.should_save:
                save_state(state, part / OF_TRANSFORMERS.file)
        run.saving = False
        if self.args.push_to_hub:
            self.push_checkpoint(self.checkpoints.path(step))

    def store_flos(self) -> None:
        """Adds the floating-point operations of all processes since the last call to the trainer's
        state. A main process that saves alone counts its own for each process."""
        if self._run.alone:
            self.state.total_flos += self.current_flos * self.processes.count
            self.current_flos = 0
        else:
            super().store_flos()

    def _is_there(self, step: int) -> bool:
        return self.checkpoints.path(step).is_dir()

    def _state(self) -> dict[str, Any]:
        run = self._run
        before = run.before_evaluation if run.due else None
        # A run that has all its steps leaves its last epoch, often before the epoch's end.
        cut = self.control.should_training_stop and self.state.epoch % 1 != 0
        return {
            "identity": run.identity or self.identity(),
            "processes": self.processes.count,
            "samples": self.samples_of_all()[0],
            "random": random_state(),
            "settings": run.settings or self._all_settings(),
            "place": run.in_data(cut=cut),
            "seed": run.seed,
            "random_at_epoch": run.random_at_epoch,
            "losses": self.loss_state(),
            "latest": self.latest_step(),
            "due": run.due,
            "epoch_ends": not run.epoch_is_over and self.state.global_step >= self.state.max_steps,
            "seconds": time.time() - run.begun,
            "rows": before.rows if before else self._rows(),
            "kept": self.kept,
            "own": self.own_state(),
        }

    def _mark(self) -> None:
        """Keeps, for a next step that fails, what it changes until it updates the weights."""
        run = self._run
        run.between_steps, run.loss = True, self.loss_since_log.clone()
        if not self.saves_when_it_fails:
            return
        run.last_step = {
            "random": run.random or random_state(),
            "loss": run.loss,
            "flos": self.current_flos,
            "tokens": self.state.num_input_tokens_seen,
            "at_rest": self.at_rest(),
            "own": self.own_mark(),
        }

    def save_before(self, error: BaseException) -> Path | None:
        """Goes back to the state of the last complete step, where it is still there, and saves it;
        see :class:`fastrl.trainers.driver.Driven`."""
        run, step, mark = self._run, self.state.global_step, self._run.last_step
        if mark is None or run.saving:
            return None  # no step was begun; or saving was what failed, and the error says so
        run.alone = not self.processes.all_know(error)
        if run.alone and not self.args.should_save:
            return None
        newest = next(reversed(self.checkpoints.paths()), None)
        # With FSDP and DeepSpeed transformers asks the other processes for what it saves.
        needs_others = self.is_fsdp_enabled or self.is_deepspeed_enabled
        needs_others = needs_others or run.behind_step  # for the others' losses of that step
        if not (run.between_steps and mark["at_rest"]) or (run.alone and needs_others):
            left = f"the last checkpoint is {newest}" if newest else "there is no checkpoint"
            raise StateLost(left)
        if not step or newest == self.checkpoints.path(step):
            return None
        restore_random_state(mark["random"])
        self.load_losses(mark["loss"])
        self.current_flos = mark["flos"]
        self.state.num_input_tokens_seen = mark["tokens"]
        self.own_rewind(mark["own"])
        if run.behind_step:
            run.due = prevented(self.control, self.state, run.before_evaluation)
        self.save_checkpoint()
        return self.checkpoints.path(step)

    def _rows(self) -> int | None:
        return None if self.run_folder is None else self.run_folder.count_rows()

    def _mark_evaluation(self) -> None:
        """Keeps what an evaluation behind the step changes, where one is due."""
        run = self._run
        if run.before_evaluation is not None or self.control.should_evaluate:
            run.before_evaluation = BeforeEvaluation(self.callback_states(), self._rows())
