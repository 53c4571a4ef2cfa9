"""The trainer of the alignment framework, for every task."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from tqdm.auto import tqdm

from fastrl.alignment.arguments import AlignmentConfig
from fastrl.alignment.batch import Batch
from fastrl.alignment.batch_factory import BatchFactory
from fastrl.alignment.evaluation import (
    OfflineEvaluation,
    OnlineEvaluation,
    taken,
    that_count,
)
from fastrl.alignment.learners import make_learner
from fastrl.alignment.logprobs import SharedPolicy, TrainedPolicy
from fastrl.alignment.losses import Loss, make_loss
from fastrl.alignment.losses.base import output_of
from fastrl.alignment.losses.pairwise import RowLoss
from fastrl.alignment.records import deciding, joined_at_main, samples_of, sampling_of
from fastrl.alignment.rehearse import ALIGNMENT
from fastrl.alignment.reweighter import ByFunction
from fastrl.collect.completions_table import CompletionsTable
from fastrl.collect.ledger import GenerationLedger
from fastrl.data.vocabulary import check_examples
from fastrl.learn.ref_model import Follow
from fastrl.models.model_files import is_path
from fastrl.models.utils import evaluating
from fastrl.rewards.identity import identities_of
from fastrl.rollout import RolloutEngine, choose_engine
from fastrl.run.callbacks import ShownSamples
from fastrl.run.checkpoints import BadCheckpoint, step_of
from fastrl.run.launcher import process_count
from fastrl.run.model_card import Method
from fastrl.run.random_state import restore_random_state, seed_at
from fastrl.run.transformers_settings import reads_best_metric
from fastrl.run.value_head_file import HEAD_NAME
from fastrl.samples import joined_statistics
from fastrl.settings import warn_of_idle
from fastrl.trainers.base import BaseTrainer
from fastrl.trainers.low_memory import warn_of_lost_steps
from fastrl.trainers.passes import DeferredGradients, check_sizes
from fastrl.trainers.plan.passes import PassSize
from fastrl.trainers.sharing import weights_of
from fastrl.trainers.supervised import length_limit, settings_of, trained_identity


class Trainer(BaseTrainer):
    """Trains a model by a loss on the batches of a factory.

    Each batch is made by the factory (online, from responses of the current policy), weighted by
    the reweighter, and passed to the loss; transformers' Trainer has optimizer, precision,
    callbacks, trackers and checkpoints. Several processes share each batch, of processes ×
    ``batch_size`` samples, and learn from it what one process would.

    Evaluation: offline, the mean loss and metrics of held-out examples; online, the annotator's
    judgement of responses to held-out prompts, always sampled with the same random numbers.

    Args:
        model: a causal language model; for the loss of reward models a sequence classifier with one
            label; or its path.
        args: an :class:`AlignmentConfig`. Unless ``max_steps`` is set, the factory determines how
            long the run is.
        factory: makes the batches.
        loss: a :class:`Loss`, or its name.
        eval_factory: makes the batches of the evaluation, of the same task.
        reweighter: sets the samples' weights, see :mod:`fastrl.alignment.reweighter`; None leaves
            them at 1.
        ref_model: the reference model, a causal language model of transformers, a wrapped one
            (:class:`fastrl.CausalLMPolicy`), or its path; None: ``args.reference`` says which.
        peft_config: puts an adapter on the model.
        callbacks, optimizers: as in transformers.

    Raises:
        ValueError: a loss that does not fit the task; a reference mode that the model or the task
            cannot have; an eval_factory of another task; a tokenizer without a pad token.
    """

    args: AlignmentConfig
    model: Any
    args_class: ClassVar[type] = AlignmentConfig
    rehearsed_as = ALIGNMENT
    processing_class: Any

    def __init__(
        self,
        model: Any,
        args: AlignmentConfig | None,
        factory: BatchFactory,
        loss: Loss | str,
        *,
        eval_factory: BatchFactory | None = None,
        reweighter: Any = None,
        ref_model: Any = None,
        peft_config: Any = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
    ):
        args = settings_of(args, AlignmentConfig)
        warn_of_idle(args, stacklevel=2)
        self.factory, self.reweighter = factory, reweighter
        self.loss = make_loss(loss) if isinstance(loss, str) else loss
        self.loss.check(factory.task, factory.batch_size * process_count())
        if factory.task.online:
            self.loss.check_sampling(factory.params)
        _check(factory, eval_factory)
        _refuse_sizes(args, factory, eval_factory)
        if not factory.task.online:
            args.refuse_records(f"the task {factory.task.name} takes its responses from the data")
        self._factories = [f for f in (factory, eval_factory) if f is not None]
        self._limit(args, model)
        if args.micro_batch_tokens is not None:
            self._check_passes(args.micro_batch_tokens)
        self.learner = make_learner(args, self.loss, factory.task, factory.tokenizer)
        model_or_path, model = model, self.learner.ready(model, ref_model, peft_config)
        if is_path(model_or_path):
            self._limit(args, model)
        for each in (factory, eval_factory):
            if each is not None:
                check_examples(model, each.tokenizer, each.data)
        args.remove_unused_columns = False
        args.ignore_data_skip = False
        args.per_device_train_batch_size = factory.batch_size
        # torch warns of pinned memory without a GPU.
        args.dataloader_pin_memory = False
        super().__init__(
            model=model,
            args=args,
            train_dataset=factory.data,
            eval_dataset=None if eval_factory is None else eval_factory.data,
            processing_class=factory.tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        if self.is_fsdp_enabled:
            raise ValueError(
                "preference learning spreads no weights by FSDP: start without --use_fsdp; DDP has "
                "whole weights in each process"
            )
        warn_of_lost_steps(self.args, self.model, stacklevel=2)
        self.model_accepts_loss_kwargs = False  # the loss is a mean over the batch
        self.finite_steps.warns = self.loss.backward is None
        self.learner.place(self.model, self.accelerator)
        self._follow = Follow.of(self.learner.reference, self.args)
        self.add_first(self._follow)
        for each in self._factories:
            each.share(self.processes.index, self.processes.count)
        self.evaluation: OfflineEvaluation | OnlineEvaluation | None = None
        if eval_factory is not None:
            self.evaluation = (
                OnlineEvaluation(eval_factory, self.processes)
                if factory.task.online
                else OfflineEvaluation(eval_factory, self.loss, self.processes)
            )
            if isinstance(self.evaluation, OnlineEvaluation):
                self._compare_by(f"eval_{self.evaluation.name}")
        self._place = _Place()
        self._accumulated: list[Batch] = []  # mini-batches of the optimizer step under way
        self._stop_batch = False  # the rest of the current batch's mini-batches is to be skipped
        self._engine: Any = None
        sampled = factory.batch_size * self.processes.count * factory.task.generations
        self._table = CompletionsTable(sampled)
        self._ledger: GenerationLedger | None = None  # in the main process alone
        self._deferred: DeferredGradients

    @cached_property
    def method(self) -> Method:  # type: ignore[override]
        return Method.aligned(self.factory.task.name, self.loss.name)

    def _limit(self, args: AlignmentConfig, model: Any) -> None:
        """Limits examples to ``max_length``, and to what model and tokenizer take."""
        for factory in self._factories:
            limit = length_limit(args, model, factory.tokenizer)
            if limit is not None:
                factory.limit(limit)

    def _compare_by(self, metric: str) -> None:
        """Takes ``metric`` for ``metric_for_best_model`` where that is transformers' default, the
        loss, which online evaluations do not compute."""
        args = self.args
        if reads_best_metric(args) and args.metric_for_best_model in ("loss", "eval_loss"):
            args.metric_for_best_model, args.greater_is_better = metric, True
            if self.is_world_process_zero():
                tqdm.write(f"metric_for_best_model is {metric}, of which higher values are better")

    def _check_passes(self, most: int) -> None:
        """Raises ValueError for an example that no pass can hold, or a loss with a ``backward``."""
        if self.loss.backward is not None:
            raise ValueError(
                f"micro_batch_tokens is not for the loss {self.loss.name}, which computes its "
                "gradient itself: raise mini_batches in loss_args, or train with PPOTrainer "
                "(fastrl ppo --micro-batch-tokens)"
            )
        together = self.loss.learns == "reward model"
        for factory, data in zip(self._factories, ("training", "evaluation"), strict=False):
            check_sizes(factory.sizes(together=together), most, "example", data)

    def batches(self, count: int) -> Iterator[Batch]:
        """Yields the mini-batches of the next ``count`` batches of the factory."""
        policy, reference = self.learner.views(self.model_wrapped)
        self._ensure_sampler()
        for batch in self._made(count):
            if self.loss.reads_all or self.reweighter is not None:
                batch.gather(self.processes)
            if self.reweighter is not None:
                shares = self.processes.count > 1 and isinstance(policy, TrainedPolicy)
                with torch.no_grad(), evaluating(self.model):
                    self.reweighter(batch.whole, SharedPolicy(policy) if shares else policy)
                batch.take_weights()
            self._metrics["train"].pool_values(self._batch_metrics(batch))
            self._stop_batch, self._place.left = False, self.loss.minibatches_per_batch
            for minibatch in self.loss.minibatches(batch, policy, reference):
                self._place.left -= 1
                yield minibatch
                if self._stop_batch:
                    break

    def _made(self, count: int) -> Iterator[Batch]:
        """Yields this process's share of the next ``count`` batches, which all processes make
        together; a RolloutEngine's draws do not depend on the number of processes."""
        batches = self.factory.take(count)
        for _ in range(count):
            self.factory.draws = seed_at(self.args.seed, "responses", self.factory.taken)
            with self.processes.shared_work():
                batch = next(batches, None)
            if batch is None:
                return
            if self.args.ledger or self.args.log_completions:
                self._record(batch)
            yield batch

    def _record(self, batch: Batch) -> None:
        """Enters the responses of all processes into the ledger and the table of completions."""
        samples = samples_of(batch, self.factory.annotator) if batch.places else None
        joined = joined_at_main(samples, self.processes)
        if joined is None:
            return
        if self._ledger is not None:
            self._ledger.add(self.factory.taken, joined, self.state.global_step)
        columns = {name: x.tolist() for name, x in joined.rewards_by_function.items()}
        columns["reward"] = joined.rewards.tolist()
        self._table.add(joined.prompts, joined.completions, columns)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Returns the loss of a mini-batch, and keeps its metrics for the next log."""
        policy, reference = self.learner.views(model)
        loss, metrics = output_of(self.loss, inputs, policy, reference)
        self._deferred = policy.passes
        # Gradients are averaged over the processes, whose shares of a batch may differ in size.
        loss = loss * (self.processes.count * inputs.fraction * inputs.weight_in_step)
        self._metrics["train"].pool_values(that_count(metrics, inputs))
        return (loss, metrics) if return_outputs else loss

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Computes the gradient of a mini-batch, and returns its loss. With a loss that has a
        ``backward``, an optimizer step's last mini-batch gets the gradient of all; the others get
        none, and return 0."""
        if self.loss.backward is None:
            loss = super().training_step(model, inputs, num_items_in_batch)
            if self._deferred.pending:
                with self.offloading(model):
                    self._deferred.backward(self.compute_loss_context_manager)
            return loss
        self._accumulated.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        minibatches, self._accumulated = self._accumulated, []
        model.train()
        with self.offloading(model), self.own_draws():
            (loss, metrics), self._stop_batch = self.loss.backward(
                minibatches, model, self.accelerator, self.optimizer
            )
        self._metrics["train"].pool_values(metrics)
        return loss

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._ledger is not None:
                self._ledger.flush()

    def models_at_work(self) -> Sequence[nn.Module | None]:
        return self.learner.modules()

    def begin_training(self, resumed: Mapping[str, Any] | None) -> None:
        super().begin_training(resumed)
        self._place, self._accumulated = _Place(), []
        if self.args.max_steps <= 0:
            updates = math.ceil(self._epoch_length() / self.args.gradient_accumulation_steps)
            self.args.max_steps = updates * self._epochs
        if resumed is not None:
            self._load_own(resumed["own"])
            place = resumed["place"]
            self._place.behind, self._place.resumed_in = place["minibatches"], place["epoch"]
        elif not self.factory.task.online:  # online, prompts go on from the last train()
            self.factory.skip(0)
        if self.args.ledger and self.processes.is_main:
            self._ledger = GenerationLedger(
                self.own_folder,
                1.0,  # the temperature at which responses are scored
                {
                    **self.args.to_dict(),
                    **deciding(self.factory, self.loss),
                    "processes": self.processes.count,
                },
                sampling_of(self.factory),
                self.own_code(),
            )
            self._ledger.begin(self.factory.taken)
        self._show_batches()

    def limit_passes(self, passes: PassSize) -> None:
        super().limit_passes(passes)
        self.learner.limit_passes(passes.tokens)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Returns the metrics of the evaluation factory's examples, with the prefix in their names.

        Raises:
            ValueError: there is no evaluation factory, or ``eval_dataset`` is not None.
        """
        if self.evaluation is None or eval_dataset is not None:
            raise ValueError(
                "evaluation needs the eval_factory that the trainer is made with, and takes no "
                "other data set"
            )
        self._ensure_sampler()
        with self.products.on(*self.learner.modules()):
            if self.state.global_step == 0 and not self.is_in_train:
                self.learner.before_training(self._held_out(), last=False)
            with evaluating(self.model):
                means = self.evaluation(*self.learner.views(self.model_wrapped))
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in means.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs ``logs`` and the table of completions. Where ``logs`` has a loss, it also gets the
        metrics' means since the last log with a loss."""
        if "loss" in logs:
            logs |= taken(self._metrics["train"], self.processes)
        super().log(logs, start_time)
        if self.args.log_completions and self.processes.is_main and self._table["prompt"]:
            self._table.log(self.args, self.own_folder.path, self.state.global_step)

    def get_train_dataloader(self) -> DataLoader:
        """Returns a loader of the mini-batches of one epoch, each made when it is taken."""
        # A loader without a generator draws from torch's, which would change all later draws.
        return DataLoader(
            _Epoch(self._epoch, self._epoch_length()),
            batch_size=None,
            collate_fn=lambda batch: batch,
            generator=torch.Generator(),
        )

    def _epoch(self) -> Iterator[Batch | None]:
        """Yields the mini-batches of an epoch; in the epoch in which a run is resumed, None for
        each mini-batch that was learned before, which transformers skips."""
        place, run = self._place, self.run_place()
        if run.epoch > place.resumed_in:
            place.behind = 0  # not yet 0 where that epoch had no mini-batch left
        if place.behind:
            yield from itertools.repeat(None, place.behind)
            assert run.resumed is not None
            restore_random_state(run.resumed["random"])
            place.behind = 0
        else:
            place.epoch_began_at = self.factory.taken
        count = self._epoch_length() // self.loss.minibatches_per_batch
        yield from self.batches(count - (self.factory.taken - place.epoch_began_at))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        weights = weights_of([batch.total for batch in batches])
        for batch, weight in zip(batches, weights, strict=False):  # no weights for equal sizes
            batch.weight_in_step = weight
        self.run_place().note_draws()  # else restore_draws() would undo what these batches drew
        return batches, items

    @property
    def _epochs(self) -> int:
        whole_passes = not self.factory.task.online and self.factory.examples is None
        return self.factory.epochs if whole_passes else 1

    def _epoch_length(self) -> int:
        """Returns the length of an epoch in mini-batches."""
        return len(self.factory) // self._epochs * self.loss.minibatches_per_batch

    def at_rest(self) -> bool:
        """Whether the trainer is between two batches: checkpoints do not keep mini-batches."""
        return self._place.left == 0 or self._stop_batch

    def identity(self) -> dict[str, Any]:
        return {
            **super().identity(),
            **trained_identity(self),
            "trainer": f"{self.factory.task.name} by {self.loss.name}",
            "reference": self.learner.reference_identity(),
        }

    def samples_of_all(self) -> tuple[int, str]:
        # KTO, PPO and reweighters look at one batch, also where an optimizer step has several.
        return self.factory.batch_size * self.factory.world, "batch_size × processes"

    def own_settings(self) -> dict[str, Any]:
        factory = self.factory
        return {
            **super().own_settings(),
            "loss": repr(self.loss),
            "reweighter": type(self.reweighter).__name__,
            **{name: getattr(factory, name) for name in ("epochs", "examples", "seed", "shuffle")},
            "params": repr(factory.params) if factory.task.online else None,
            **(identities_of([("the annotator", factory.annotator)]) if factory.annotator else {}),
        }

    def own_code(self) -> dict[str, Any]:
        loss, reweighter = self.loss, self.reweighter
        named: list[tuple[str, Any]] = []
        if isinstance(loss, RowLoss) and loss.row.is_own:
            named.append((f"the loss {loss.name}", loss.row.function))
        elif _is_users(loss):
            named.append((f"the loss {loss.name}", loss))
        if isinstance(reweighter, ByFunction):
            named.append(("the reweighter", reweighter.function))
        elif reweighter is not None and _is_users(reweighter):
            named.append(("the reweighter", reweighter))
        return identities_of(named)

    def own_state(self) -> dict[str, Any]:
        judged = getattr(self.evaluation, "judged", ())
        if self._ledger is not None:  # a resumed run does not sample its rows anew
            self._ledger.flush()
        return {
            **super().own_state(),
            "reference": self._follow.state(),
            "table": self._table.state() if self.args.log_completions else None,
            "room": self._room(),
            "batches": {
                "taken": self.factory.taken,
                "epoch_began_at": self._place.epoch_began_at,
                "within": not self.at_rest(),
            },
            "first_evaluation": dataclasses.asdict(judged[0]) if judged else None,
        }

    def own_mark(self) -> dict[str, Any]:
        return {**super().own_mark(), "taken": self.factory.taken}

    def own_rewind(self, mark: Mapping[str, Any]) -> None:
        super().own_rewind(mark)
        self.factory.skip(mark["taken"])
        self._place.left = 0

    def _load_own(self, state: Mapping[str, Any]) -> None:
        batches, first = state["batches"], state["first_evaluation"]
        self.factory.skip(batches["taken"])
        self._place.epoch_began_at = batches["epoch_began_at"]
        self._follow.load(state.get("reference", {}))
        if state.get("table"):
            self._table.load(state["table"])
        if state.get("room"):
            self._ensure_sampler()
            sampler = self.factory.sampler
            assert sampler is not None
            sampler.engine.reserve(**state["room"])
        if isinstance(self.evaluation, OnlineEvaluation):
            self.evaluation.judged[:] = [] if first is None else [ShownSamples(**first)]
        checkpoint = self.run_place().checkpoint
        assert checkpoint is not None
        if batches["within"] and step_of(checkpoint) < self.args.max_steps:
            warnings.warn(
                "resume: the checkpoint was written within a batch, at the end of its run: what is "
                "left of that batch is not learned",
                stacklevel=4,
            )

    def check_foreign(self, checkpoint: Path) -> None:
        raise BadCheckpoint(
            f"resume_from_checkpoint: {checkpoint} does not say which batches were drawn, so it is "
            "of another trainer: load its weights as the model, and train anew"
        )

    def _show_batches(self) -> None:
        """Shows the learner all batches, before training changes the model."""
        minibatches = self.args.max_steps * self.args.gradient_accumulation_steps
        count = math.ceil(minibatches / self.loss.minibatches_per_batch)
        planned: Iterator[Batch] = itertools.islice(self.factory.preview(), count)
        if self.loss.reads_all:
            planned = map(self._gathered, planned)
        self.learner.before_training(itertools.chain(planned, self._held_out()), last=True)

    def _gathered(self, batch: Batch) -> Batch:
        batch.gather(self.processes)
        return batch

    def _held_out(self) -> Iterator[Batch]:
        if isinstance(self.evaluation, OfflineEvaluation):
            yield from self.evaluation.batches()

    def _ensure_sampler(self) -> None:
        """Gives online factories an engine on the policy, unless they have one."""
        for factory in self._factories:
            if factory.task.online and factory.sampler is None:
                if self._engine is None:
                    self._engine = choose_engine(
                        self.accelerator.unwrap_model(self.model),
                        factory.tokenizer,
                        autocast=self.accelerator.autocast,
                        max_slots=self.args.rollout_slots,
                    )
                factory.sample_with(self._engine)

    def _room(self) -> dict[str, int] | None:
        """The size of the engine's KV cache, which decides the last bits of what it computes."""
        engine = getattr(self.factory.sampler, "engine", None)
        return engine.room()._asdict() if isinstance(engine, RolloutEngine) else None

    def _batch_metrics(self, batch: Batch) -> dict[str, Tensor]:
        """The metrics of a batch that do not depend on the loss."""
        metrics: dict[str, Tensor] = {}
        if self.reweighter is not None:
            metrics = that_count({"weights": batch.weights()}, batch)
        sampler = self.factory.sampler
        if sampler is None:
            return metrics
        lengths = [float(len(response)) for response in batch.all_responses()]
        counts = {**sampler.stats, **self.factory.annotator.statistics()}
        statistics = joined_statistics(self.processes.objects(counts))
        metrics |= {"rewards/mean": batch.given_scores(), "tokens/responses": torch.tensor(lengths)}
        metrics |= {name: torch.tensor(float(value)) for name, value in statistics.items()}
        return {name: x.to(self.accelerator.device) for name, x in metrics.items()}

    def ready_batch(self, batch: Any) -> Any:
        return batch  # batches stay on the host; the loss moves what a model reads

    def write_model(self, folder: Path) -> None:
        # DeepSpeed gathers weights from all processes.
        engine: Any = self.deepspeed
        weights = None if engine is None else self.accelerator.get_state_dict(engine)
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            self.learner.save(self.accelerator.unwrap_model(self.model), str(folder), weights)
            self.processing_class.save_pretrained(str(folder))

    def push_checkpoint(self, folder: Path) -> None:
        head = folder / HEAD_NAME  # not among the files that transformers copies to output_dir
        if head.exists() and self.args.should_save:
            shutil.copy(head, str(self.args.output_dir))
        super().push_checkpoint(folder)

    def load_weights(self, checkpoint: Path) -> None:
        self.learner.load(self.accelerator.unwrap_model(self.model), str(checkpoint))

    def load_best_weights(self, checkpoint: Path) -> None:
        self.load_weights(checkpoint)


@dataclass
class _Place:
    """How far a run has come in its batches."""

    epoch_began_at: int = 0  # batches that the factory had made before the epoch
    left: int = 0  # mini-batches of the current batch that are still to come
    behind: int = 0  # mini-batches that were learned before the run was resumed in their epoch
    resumed_in: int = 0  # the epoch in which the run was resumed


class _Epoch(IterableDataset):
    """A data set of the mini-batches that a function yields, with their number."""

    def __init__(self, make: Callable[[], Iterator[Batch | None]], length: int):
        self._make, self._length = make, length

    def __iter__(self) -> Iterator[Batch | None]:
        return self._make()

    def __len__(self) -> int:
        return self._length


def _is_users(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] != "fastrl"


def _refuse_sizes(
    args: AlignmentConfig, factory: BatchFactory, eval_factory: BatchFactory | None
) -> None:
    """Raises ValueError for a size in ``args`` that is neither its default nor the factories'."""
    held_out = factory if eval_factory is None else eval_factory
    for name, ours, theirs in (
        ("num_train_epochs", factory.epochs, "BatchFactory(epochs=)"),
        ("per_device_train_batch_size", factory.batch_size, "BatchFactory(batch_size=)"),
        ("per_device_eval_batch_size", held_out.batch_size, "the eval_factory's batch_size"),
    ):
        value = getattr(args, name)
        if value not in (ours, AlignmentConfig.__dataclass_fields__[name].default):
            raise ValueError(f"{name}={value} does not act: {theirs} does, and is {ours}")


def _check(factory: BatchFactory, eval_factory: BatchFactory | None) -> None:
    if factory.tokenizer.pad_token_id is None:
        raise ValueError(
            f"{type(factory.tokenizer).__name__} has no pad token: set tokenizer.pad_token = "
            "tokenizer.eos_token, say, before making the loader"
        )
    if eval_factory is not None and eval_factory.task != factory.task:
        raise ValueError(
            f"eval_factory is for {eval_factory.task.name}, factory for {factory.task.name}: make "
            "both for one task"
        )
