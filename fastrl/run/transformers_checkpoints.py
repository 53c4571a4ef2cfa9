"""Checkpoints of transformers' Trainer: written as a whole, verified, and resumed bit for bit."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from fastrl.run.checkpoints import (
    MANIFEST,
    OF_TRANSFORMERS,
    BadCheckpoint,
    Checkpoints,
    check_identity,
    check_weights,
    read_manifest,
    step_of,
    warn_of_another_machine,
)
from fastrl.run.fingerprint import fingerprint
from fastrl.run.folder import RunFolder
from fastrl.run.gradient_buckets import settle_buckets
from fastrl.run.launcher import check_found, wait_at_most
from fastrl.run.metric_means import MetricMeans
from fastrl.run.processes import OneProcess, processes_of
from fastrl.run.random_state import (
    drawing_from,
    random_state,
    random_state_kept,
    restore_random_state,
    seed_at,
)
from fastrl.run.state import load_tree, save_tree
from fastrl.run.stopping import Stopped, asked, stop_at_a_steps_end
from fastrl.run.transformers_base import OpenTrainer
from fastrl.run.transformers_files import (
    check_torch_files,
    find_trainer_checkpoint,
    is_foreign,
    save_state,
    shapes_of,
)
from fastrl.run.transformers_settings import (
    SIZES,
    check_best_metric,
    settings_of_results,
    settings_of_steps,
    warn_of_changes,
)
from fastrl.user_code import exits_are_errors

KEPT_LOGS = 10_000  # in memory, and in each checkpoint


@dataclass
class _Run:
    """Where a run is: what transformers' Trainer does not keep, or keeps in local variables."""

    checkpoint: Path | None = None  # resumed from
    resumed: Mapping[str, Any] | None = None  # what this process saved there
    identity: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    begun: float = 0.0  # time.time(), less what earlier processes of the run took
    epoch: int = 0
    minibatch: int = 0  # of the epoch, the next one to be fetched
    done: int = 0  # mini-batches of the epoch that are learned
    passes: int = 0  # of the step that is under way
    epoch_is_over: bool = False
    seed: int = 0  # torch's, from which the order of the data follows
    random: Mapping[str, Any] | None = None  # states of generators to restore for the next batch
    random_at_epoch: Mapping[str, Any] = field(default_factory=dict)  # at its beginning
    save_is_due: bool = False  # but waits for a place from which a run can be resumed
    between_steps: bool = False  # False: weights may be ahead of what is saved with them
    behind_step: bool = False  # a step is being logged, evaluated and saved
    loss: torch.Tensor | None = None  # the sum since the last log, as the next step begins
    last_step: dict[str, Any] | None = None  # what the next step changes before it updates weights
    saving: bool = False  # a checkpoint is being written, or could not be
    alone: bool = False  # the main process saves by itself: the others may have ended
    forgets: bool = False  # old logs are dropped


class ResumableTrainer(OpenTrainer):
    """transformers' Trainer whose run goes on from a checkpoint as if it had not been interrupted.

    A checkpoint has what transformers saves and, in a folder ``process-N`` for each process, what
    later steps and logs depend on too: the loss since the last log, the place in the data, what
    subclasses add in :meth:`own_state`, and what must be the same in the run that resumes. It is
    written to another folder, gets a manifest, and then its name.

    It is written where a resumed run begins its next step alike: at an epoch's end behind its
    evaluation, and where :meth:`at_rest` says so. After an exception in a step that has not changed
    the weights, the state before it is saved, and after one in what follows a step, such as its
    evaluation, the state behind it: by all processes where all have left :meth:`agreed` work, else
    that before a step by the main one alone, without the others' random states.

    A run of several processes goes on with another number of them, where all together still have as
    many samples in a step: with the same examples in the same steps.

    Attributes:
        kept: plain values that every checkpoint keeps, and that are there again in a resumed run.
        run_folder: the folder of a command's run, whose metrics continue those of the checkpoint.
        saves_when_it_fails: whether an exception saves a checkpoint; by default if any are saved.
        computed_columns: columns that the trainer adds to data sets, equal up to rounding.
    """

    computed_columns: tuple[str, ...] = ()
    metric_differences: ClassVar[Mapping[str, tuple[str, str]]] = {}  # see MetricMeans

    def __init__(self, *args: Any, **kwargs: Any):
        # The attribute has TRL's name; checkpoints keep the metrics of training.
        self._metrics = {
            "train": MetricMeans(self.metric_differences),
            "eval": MetricMeans(self.metric_differences, pools=True),
        }
        self.kept: dict[str, Any] = {}
        self.run_folder: RunFolder | None = None
        self._run = _Run()
        super().__init__(*args, **kwargs)
        check_best_metric(self.args, self.eval_dataset)
        # A user's function may change the working directory.
        self.args.output_dir = os.path.abspath(str(self.args.output_dir))
        wait_at_most(self.args)
        check_found(self.accelerator)
        self.processes = processes_of(self.accelerator)
        self.saves_when_it_fails = self.args.save_strategy != SaveStrategy.NO
        self.callback_handler.callbacks.insert(0, _First(self))
        self.add_callback(_Last(self))

    def add_first(self, callback: TrainerCallback) -> None:
        """Adds a callback before the user's: what it does belongs to a step whose state is saved
        where one of theirs fails."""
        self.callback_handler.callbacks.insert(1, callback)  # behind _First

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
        """Settings that are not in ``args``; a run that resumes with other ones gets a warning."""
        return self.own_code()

    def own_code(self) -> dict[str, Any]:
        """Hashes of users' functions by which the trainer learns, compared as settings are."""
        return {}

    def own_state(self) -> dict[str, Any]:
        """A tree of tensors and plain values for a checkpoint."""
        return {"metrics": self._metrics["train"].state()}

    def samples_of_all(self) -> tuple[int, str]:
        """The number of samples in a step of all processes, which must stay the same when their
        number changes, and the settings whose product it is."""
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
        """Readies the trainer before transformers' loop; the model still has the weights that it
        was given.

        Args:
            resumed: the checkpoint's "own", its :meth:`own_state`, and "place", how many
                "minibatches" of the "epoch" are behind. None: the run begins.
        """
        metrics = self._metrics["train"] = MetricMeans(self.metric_differences)
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

    def own_mark(self) -> dict[str, Any]:
        """What a step changes of the own state before it updates the weights."""
        return {"metrics": self._metrics["train"].mark()}

    def own_rewind(self, mark: Mapping[str, Any]) -> None:
        """Makes the own state that of a mark."""
        self._metrics["train"].rewind(mark["metrics"])

    def at_rest(self) -> bool:
        """Whether a run can be resumed from here, between two steps."""
        return True

    # Finding, checking and loading.

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
            BadCheckpoint: a ValueError: a checkpoint that is damaged, or that another trainer,
                model or data set made; nothing has changed then.
            KeyboardInterrupt: Ctrl-C or SIGTERM, at the end of a step and with its state saved; the
                second is also a SystemExit, with status 143.
        """
        self._run = run = _Run()
        if trial is not None:  # a search of hyperparameters
            resume: Any = resume_from_checkpoint
            return super().train(resume, trial, ignore_keys_for_eval)
        run.checkpoint = self._find(self.processes.from_main(resume_from_checkpoint))
        if run.checkpoint or self.saves_when_it_fails or self.processes.count > 1:
            run.identity, run.settings = self.identity(), self._all_settings()
        if self.processes.count > 1:
            self.processes.check_same("train()", self._shared_settings())
        with self.processes.together():
            if run.checkpoint is not None:
                run.resumed = self._check(run.checkpoint)
        if run.resumed is not None:
            torch.manual_seed(run.resumed["seed"])
        run.seed = torch.initial_seed()
        self.begin_training(run.resumed)
        self.forget_evaluation()
        path = None if run.checkpoint is None else str(run.checkpoint)
        evaluates_first = self.args.eval_on_start
        self.args.eval_on_start = evaluates_first and path is None
        with stop_at_a_steps_end():
            try:
                with exits_are_errors():
                    return super().train(path, trial, ignore_keys_for_eval)
            except Stopped as stopped:
                if stopped.args:  # the state is saved
                    raise
                self._save_after(stopped)
                raise self._stopped() from None
            except Exception as error:
                self._save_after(error)
                raise
            finally:
                self.args.eval_on_start = evaluates_first

    def _find(self, resume: str | Path | bool | None) -> Path | None:
        if resume is None or resume is False:
            return None
        found = find_trainer_checkpoint(resume, self.checkpoints, self.processes)
        if found is None:
            raise FileNotFoundError(
                f"resume_from_checkpoint: there is no checkpoint in {self.args.output_dir}: name a "
                "checkpoint's folder, or leave it out to begin anew"
            )
        return found

    def _check(self, checkpoint: Path) -> Mapping[str, Any] | None:
        """What this process saved in a checkpoint; None: transformers alone has written it.

        Raises:
            BadCheckpoint: a checkpoint of another run, or that cannot be read.
        """
        check_torch_files(checkpoint)
        state: Mapping[str, Any] | None = None
        if not (checkpoint / _folder_of(0)).is_dir():
            self.check_foreign(checkpoint)
        else:
            there = len(list(checkpoint.glob("process-*")))
            states = [load_tree(checkpoint / _folder_of(i)) for i in range(there)]
            first = states[0]
            own = {k: v for k, v in self._run.identity.items() if k != "weights"}
            check_identity(first["identity"], own)
            check_weights(first["identity"]["weights"], self._run.identity["weights"])
            self._check_processes(first)
            others = _processes_of(first) != self.processes.count
            warn_of_changes(first["settings"], self._run.settings, but=SIZES if others else ())
            same = there == self.processes.count == _processes_of(first)
            state = states[self.processes.index] if same else self._of_others(states)
        if is_foreign(checkpoint):
            warnings.warn(
                f"resume: {checkpoint} has no {MANIFEST}, as those of transformers alone: it is "
                "not verified",
                stacklevel=3,
            )
        else:
            manifest = read_manifest(checkpoint)
            self.adopt(manifest["machine"])
            warn_of_another_machine(manifest)
        return state

    def adopt(self, machine: Mapping[str, Any]) -> None:
        """Takes over from the run that goes on here what can be chosen, see
        :func:`fastrl.run.machine.machine`."""

    def _check_processes(self, state: Mapping[str, Any]) -> None:
        """Raises BadCheckpoint where a run of another number of processes had another number of
        samples in a step."""
        count, own = _processes_of(state), self.processes.count
        there, (here, product) = state.get("samples"), self.samples_of_all()
        if count != own and there != here:
            raise BadCheckpoint(
                f"resume: the checkpoint's run had {count} process(es) and this one has {own}, so "
                f"that {product} must be {there or 'the same'} as in that run, and is {here}: set "
                f"the sizes so, or start {count} process(es)"
            )

    def _of_others(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """This process's state from those of other processes, as far as they are known."""
        first, count, index = states[0], _processes_of(states[0]), self.processes.index
        same = count == self.processes.count
        warnings.warn(
            f"resume: the run had {count} process(es), {len(states)} of which saved the state, and "
            f"has {self.processes.count}: the examples of its steps are the same, what "
            + ("your functions draw need not be" if same else "dropout draws in them is not"),
            stacklevel=4,
        )
        done, size = first["place"], first["settings"]["per_device_train_batch_size"] * count
        now = self.args.per_device_train_batch_size * self.processes.count
        since = torch.stack([state["losses"]["since_the_log"] for state in states]).mean(0)
        return {
            **first,
            "place": {**done, "minibatches": -(-done["minibatches"] * size // now)},
            "losses": {**first["losses"], "since_the_log": since},
            "own": self.joined_state([state["own"] for state in states]),
            "random": states[index]["random"] if index < len(states) else self._new_draws(first),
        }

    def _new_draws(self, first: Mapping[str, Any]) -> dict[str, Any]:
        """Generators of a process that the run did not have."""
        assert self._run.checkpoint is not None
        own = (self.processes.index << 32) + step_of(self._run.checkpoint)
        with random_state_kept():
            torch.manual_seed(first["seed"] + own)
            return random_state()

    def check_foreign(self, checkpoint: Path) -> None:
        """Checks a checkpoint that transformers alone has written.

        Raises:
            BadCheckpoint: a checkpoint of another model, or that this trainer cannot resume from.
        """
        weights = checkpoint / "model.safetensors"
        if weights.is_file():
            model: Any = self.model
            own = {name: list(x.shape) for name, x in model.state_dict().items()}
            for name, shape in shapes_of(weights).items():
                if own.get(name, shape) != shape:
                    raise BadCheckpoint(
                        f"resume: {checkpoint} is of another model, whose {name} is {shape}, here "
                        f"{own[name]}: resume with the model that the run began with"
                    )

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
        run = self._run
        run.random = None
        if run.resumed is not None:
            run.random = run.resumed["random"]
            if not self.args.ignore_data_skip:
                place = run.resumed["place"]
                epoch, minibatches = place["epoch"], place["minibatches"]
        if self.state.global_step >= self.state.max_steps:  # transformers would do one step more
            epoch = epochs
        run.epoch, run.epoch_is_over = epoch, False
        run.minibatch = run.done = minibatches
        return epoch, minibatches

    def _epoch_begins(self, loader: Any) -> None:
        run = self._run
        if run.epoch_is_over:  # else this is the first epoch, or that which the run resumes in
            run.epoch, run.epoch_is_over = run.epoch + 1, False
            run.minibatch = run.done = 0
        if run.random is not None and run.minibatch:
            assert run.resumed is not None
            restore_random_state(run.resumed["random_at_epoch"])  # samplers may draw from it
        else:
            self._restore_draws()
        run.random_at_epoch = random_state()
        _set_epoch(loader, run.epoch)

    def _restore_draws(self) -> None:
        """Restores the generators of the checkpoint, once: at an epoch's beginning before the next
        batch is drawn, and within an epoch after it, as the run had drawn that batch before."""
        if self._run.random is not None:
            restore_random_state(self._run.random)
        self._run.random = None

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
            self._restore_draws()
        self._clear_the_way()
        self._mark()

    def _clear_the_way(self) -> None:
        """Moves records and checkpoints of steps that will be done again, or of another run."""
        run = self._run
        if not self.args.should_save:
            return
        if self.run_folder is not None:
            if run.checkpoint is not None:
                rows = None if run.resumed is None else run.resumed["rows"]
                self.run_folder.resume(run.checkpoint, rows)
        elif self.args.save_strategy != SaveStrategy.NO:
            folder = self.checkpoints.folder.absolute()
            own = run.checkpoint is not None and run.checkpoint.absolute().parent == folder
            step = step_of(run.checkpoint) if own and run.checkpoint is not None else -1
            moved = self.checkpoints.supersede(step)
            if moved is not None:
                what = f"later than {run.checkpoint}" if own else "of an earlier run"
                warnings.warn(
                    f"output_dir {self.args.output_dir} holds checkpoints {what}: they are now in "
                    f"{moved}",
                    stacklevel=2,
                )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs without ``model_preparation_time``, which a resumed run does not measure; the
        runtime is the sum over the program's starts since the run began."""
        for name in [name for name in logs if name.endswith("model_preparation_time")]:
            del logs[name]
        if "train_runtime" in logs and self._run.begun:
            whole = time.time() - self._run.begun
            for name in ("train_samples_per_second", "train_steps_per_second"):
                if name in logs:
                    logs[name] = round(logs[name] * logs["train_runtime"] / whole, 3)
            logs["train_runtime"] = round(whole, 4)
        if self._run.behind_step:
            self._mark()  # what was logged is not logged again, even if a callback fails
        super().log(logs, start_time)
        if self._run.behind_step:
            self._mark()  # nor if what follows fails, such as an evaluation
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
        with self.own_draws():
            return super().training_step(model, inputs, *args, **kwargs)

    def own_draws(self) -> contextlib.AbstractContextManager[None]:
        """Context of a pass: what it draws, such as dropout's masks, depends on seed, step, pass
        and process, whatever rewards and callbacks have done to torch's generators."""
        place = self.state.global_step, self._run.passes, self.processes.index
        self._run.passes += 1
        return drawing_from(seed_at(self.args.seed, "pass", *place), self.args.device)

    # Saving.

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Context of work between two steps that each process does by itself: if it fails in one,
        it fails in all, and the state before it can be saved.

        Raises:
            PeerFailed: another process raised an exception; names both.
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

    @contextlib.contextmanager
    def concluding(self) -> Iterator[None]:
        run, control = self._run, self.control
        if not run.behind_step:  # no step has ended, but an epoch
            run.epoch_is_over = run.behind_step = True
            run.between_steps = False
        stops = self.processes.any(asked())
        saves = control.should_save or run.save_is_due or (stops and self.saves_when_it_fails)
        if saves:
            ends = control.should_training_stop or control.should_epoch_stop
            ends = ends or self.state.epoch % 1 == 0
            run.save_is_due = not (run.epoch_is_over or (not ends and self.at_rest()))
            control.should_save = not run.save_is_due
        stops, saving = stops and (control.should_save or not saves), control.should_save
        if self.args.logging_strategy == "no":
            self._metrics["train"].drop()
        yield
        run.behind_step = False
        self._mark()
        stops = stops or (saving and self.processes.any(asked()))  # a save may take long
        if stops:
            # save_strategy="best" has the last word on its evaluations
            there = self.processes.from_main(self._is_there(self.state.global_step))
            if self.saves_when_it_fails and not there:
                self.save_checkpoint()
            raise self._stopped()

    def _stopped(self) -> Stopped:
        step = self.state.global_step
        if not self._is_there(step):
            return Stopped(f"stopped after step {step}; its state is not saved")
        return Stopped(
            f"stopped after step {step}; saved: {self.checkpoints.path(step)}; --resume "
            "(resume_from_checkpoint=True) continues"
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
            own = part / _folder_of(self.args.process_index)
            own.mkdir(parents=True, exist_ok=True)
            save_tree(self._state(), own)
            if best is not None and (best == step or self._is_there(best)):
                state.best_model_checkpoint = str(self.checkpoints.path(best))
            if self.args.should_save:
                save_state(state, part / OF_TRANSFORMERS.file)
        run.saving = False
        if self.args.push_to_hub:
            self.push_checkpoint(self.checkpoints.path(step))

    def store_flos(self) -> None:
        """Adds what was computed since the last call, by all processes; the main process alone
        counts as much for each."""
        if self._run.alone:
            self.state.total_flos += self.current_flos * self.processes.count
            self.current_flos = 0
        else:
            super().store_flos()

    def _is_there(self, step: int) -> bool:
        return self.checkpoints.path(step).is_dir()

    def _state(self) -> dict[str, Any]:
        run = self._run
        folder = self.run_folder
        return {
            "identity": run.identity or self.identity(),
            "processes": self.processes.count,
            "samples": self.samples_of_all()[0],
            "random": random_state(),
            "settings": run.settings or self._all_settings(),
            "place": self._place_in_data(),
            "seed": run.seed,
            "random_at_epoch": run.random_at_epoch,
            "losses": self.loss_state(),
            "seconds": time.time() - run.begun,
            "rows": None if folder is None else folder.count_rows(),
            "kept": self.kept,
            "own": self.own_state(),
        }

    def _place_in_data(self) -> dict[str, int]:
        """The epoch, and how many of its mini-batches are behind."""
        run = self._run
        # A run that has all its steps also leaves its last epoch, though not at its end.
        cut = self.control.should_training_stop and self.state.epoch % 1 != 0
        if run.epoch_is_over and not cut:
            return {"epoch": run.epoch + 1, "minibatches": 0}
        return {"epoch": run.epoch, "minibatches": run.done}

    # After an exception.

    def _mark(self) -> None:
        """Keeps what the next step changes before it updates the weights."""
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

    def _save_after(self, error: BaseException) -> None:
        """Saves the state of the last complete step, where it is still there."""
        run, step, mark = self._run, self.state.global_step, self._run.last_step
        if mark is None or run.saving:
            return  # no step was begun; or saving was what failed, and the error says what is left
        run.alone = not self.processes.all_know(error)
        if run.alone and not self.args.should_save:
            return
        kind, newest = type(error).__name__, next(reversed(self.checkpoints.paths()), None)
        last = f"the last checkpoint is {newest}" if newest else "there is no checkpoint"
        # With these transformers asks the other processes for what it saves.
        needs_others = self.is_fsdp_enabled or self.is_deepspeed_enabled
        needs_others = needs_others or run.behind_step  # for the others' losses of that step
        if not (run.between_steps and mark["at_rest"]) or (run.alone and needs_others):
            warnings.warn(f"after {kind} the state is not saved: {last}", stacklevel=3)
        elif step and newest != self.checkpoints.path(step):
            restore_random_state(mark["random"])
            self.load_losses(mark["loss"])
            self.current_flos = mark["flos"]
            self.state.num_input_tokens_seen = mark["tokens"]
            self.own_rewind(mark["own"])
            try:
                self.save_checkpoint()
            except Exception as second:
                warnings.warn(f"after {kind} the state could not be saved: {second}", stacklevel=3)
                return
            if not isinstance(error, Stopped):
                warnings.warn(
                    f"after {kind} the state is saved in {self.checkpoints.path(step)}; --resume "
                    "(resume_from_checkpoint=True) continues from there",
                    stacklevel=3,
                )


class _First(TrainerCallback):
    """Tells a trainer what transformers' loop does, before other callbacks, which may draw random
    numbers, and fail."""

    def __init__(self, trainer: ResumableTrainer):
        self.trainer = trainer

    def on_epoch_begin(self, *_: Any, **told: Any) -> None:
        self.trainer._epoch_begins(told["train_dataloader"])

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.trainer._run.passes = 0
        self.trainer._restore_draws()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        run = self.trainer._run
        run.done, run.behind_step = run.minibatch, True
        self.trainer._mark()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.trainer._restore_draws()  # no batch of the epoch was left


class _Last(TrainerCallback):
    """Tells a trainer what transformers' loop does, after other callbacks: if these fail, nothing
    has changed."""

    def __init__(self, trainer: ResumableTrainer):
        self.trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.trainer._training_begins()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.trainer._run.between_steps = False


def _folder_of(process: int) -> str:
    return f"process-{process}"


def _processes_of(state: Mapping[str, Any]) -> int:
    """How many processes the run had that saved a state."""
    return state.get("processes", state["identity"].get("processes"))


def _set_epoch(loader: Any, epoch: int) -> None:
    """Sets the epoch of a loader's sampler, however deep it lies: with several processes accelerate
    does not reach it."""
    while loader is not None:
        if isinstance(loader, Sampler) and hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        batches = getattr(loader, "batch_sampler", None)  # a stream's has no length: not bool()
        loader = getattr(loader, "sampler", None) if batches is None else batches
