"""GKDTrainer: a policy learns a teacher's distributions over data, and over its own responses."""

from __future__ import annotations

from typing import Any, ClassVar

from fastrl.collect.completions import (
    COMPLETION,
    MESSAGES,
    FromData,
    Mixed,
    split_messages,
)
from fastrl.collect.respond import Respond
from fastrl.data.tables import is_stream, list_as_dataset, stream_columns
from fastrl.models.sharding import is_spread
from fastrl.run.model_card import Method
from fastrl.samples import Samples
from fastrl.trainers.groups.distillation import DistillationTrainer
from fastrl.trainers.groups.gkd_config import GKDConfig
from fastrl.trainers.prompt_room import data_by_name, rows_of
from fastrl.trainers.teachers import TEACHER_COLUMNS

_REFUSED = {
    "data_collator": "rows are encoded as they are used; give them messages, or prompt and "
    "completion",
    "compute_metrics": "an evaluation has no logits; read its loss and entropy",
    "preprocess_logits_for_metrics": "an evaluation has no logits",
    "formatting_func": "give the data messages, or prompt and completion, by dataset.map before",
}


class GKDTrainer(DistillationTrainer):
    """Trains a causal language model, the student, to have a teacher's distributions at the tokens
    of completions: of each batch with probability ``args.lmbda`` the student's own, else the data's
    or, with ``args.seq_kd``, the teacher's (Agarwal et al., "On-policy distillation of language
    models", 2024), by the names and arguments of TRL 1.16.

    The loss is Σ_t D_t / tokens, see :class:`DistillationTrainer`, at temperature 1; tokens are
    those that were generated together, by default those of the optimizer step. An evaluation is on
    the data's completions.

    Args:
        model, teacher_model: as for :class:`DistillationTrainer`.
        args: a :class:`GKDConfig`.
        train_dataset, eval_dataset: ``datasets`` with a column ``messages``, conversations whose
            last message is the completion; or with ``prompt`` and ``completion``, texts or chats.
            Rows that are only sampled from need no completion.
        processing_class: the tokenizer; by default the one saved with the model.
        callbacks, optimizers: as transformers' Trainer takes them.
        peft_config: adds an adapter.
        rollout_func: answers prompts in place of the student, as for
            :class:`fastrl.trainers.groups.grpo.GRPOTrainer`.
        quantization_config: for a model that the trainer loads.

    Raises:
        ValueError, TypeError: a setting or argument that fastrl does not honour; says what to do.
    """

    config: ClassVar[type] = GKDConfig
    _tag_names: ClassVar[list[str]] = ["trl", "gkd"]
    order: ClassVar[str] = "as sampled"  # a draw says who writes a whole batch
    method = Method("generalised knowledge distillation", ("gkd",))

    def __init__(
        self,
        model: Any = None,
        teacher_model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        preprocess_logits_for_metrics: Any = None,
        peft_config: Any = None,
        formatting_func: Any = None,
        rollout_func: Any = None,
        quantization_config: Any = None,
    ):
        given = data_collator, compute_metrics, preprocess_logits_for_metrics, formatting_func
        for (name, instead), value in zip(_REFUSED.items(), given, strict=True):
            if value is not None:
                raise TypeError(f"{type(self).__name__} does not take {name}: {instead}")
        if isinstance(eval_dataset, dict):
            eval_dataset = {name: _answered(x) for name, x in eval_dataset.items()}
        else:
            eval_dataset = _answered(eval_dataset)
        data = _answered(train_dataset), eval_dataset, processing_class, callbacks
        of_model = quantization_config, peft_config, None, rollout_func
        super().__init__(model, teacher_model, args, *data, optimizers, *of_model)

    def _take_settings(self, args: Any, rewards: Any) -> None:
        super()._take_settings(args, rewards)
        self.lmbda, self.seq_kd = args.lmbda, args.seq_kd

    def _make_parts(self) -> None:
        samples_of_teacher = self.seq_kd and self.lmbda < 1
        one = len(self.teacher_models) == 1 and self.args.teacher_column is None
        if samples_of_teacher and not (one and self.args.teacher_placement == "device"):
            raise ValueError(
                "seq_kd=True samples from the teacher, which must be one model of its own on the "
                "device: pass it as teacher_model, without teacher_placement, or leave seq_kd out"
            )
        super()._make_parts()
        self._check_completions(of_training=self.lmbda < 1 and not self.seq_kd)
        if samples_of_teacher and is_spread(self.teacher_model):
            raise ValueError(
                "seq_kd=True samples from the teacher, whose weights are spread over processes "
                "here: sample its completions before, and give them as data"
            )

    def _check_completions(self, of_training: bool) -> None:
        """Raises ValueError for a data set without the completions that are learned, or by which
        an evaluation judges, or with one that does not continue its prompt, or is too long."""
        from_data = self._from_data()
        for name, data in data_by_name(self.train_dataset, self.eval_dataset).items():
            trains, columns = name == "train_dataset", getattr(data, "column_names", None)
            if columns is None or (trains and not of_training):
                continue
            if COMPLETION not in columns:
                remedy = ", or set lmbda=1" if trains else ""
                raise ValueError(
                    f"{name} has no completions, its columns are {', '.join(columns)}: give it "
                    f"messages, or prompt and completion{remedy}"
                )
            for i, row in rows_of(data, COMPLETION):
                from_data.check(row, i, f"the completion of row {i} of {name}")

    def _from_data(self) -> FromData:
        """What answers by the data's completions, which teachers read as the student does where
        there are no other prompts for them."""
        columns = getattr(self.train_dataset, "column_names", None) or TEACHER_COLUMNS
        taught, others = self._taught, {*columns} & {*TEACHER_COLUMNS}
        teachers = () if taught is None or others else taught.models.read_by()
        return self._rollouts.from_data(self.args.max_length, teachers)

    def _respond_by(self) -> Respond:
        args, data = self.args, self._from_data()
        by_teacher = self.seq_kd and self.lmbda < 1
        return Mixed(
            super()._respond_by(),
            self._rollouts.by_policy(lambda: self.teacher_model) if by_teacher else data,
            data,
            self.lmbda,
            args.per_device_train_batch_size,
            lambda: self.model.training,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        if not isinstance(eval_dataset, str | None):
            eval_dataset = _answered(eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def _collected(self, rows: list[dict[str, Any]], group: int) -> Samples:
        collected = super()._collected(rows, group)
        if "on_policy" in collected.stats:
            self._metrics["train"].add_number("on_policy", collected.stats["on_policy"])
        return collected


def _answered(data: Any) -> Any:
    """A data set with ``prompt`` and ``completion`` in place of ``messages``."""
    data = list_as_dataset(data)
    if getattr(data, "map", None) is None:
        return data  # what is no data set is refused by its name
    columns = stream_columns(data) if is_stream(data) else data.column_names
    if MESSAGES not in columns:
        return data
    if "prompt" in columns:
        raise ValueError(
            f"the data set has both {MESSAGES} and prompt, and the prompt is all messages but the "
            "last: leave one of the columns out"
        )
    return data.map(split_messages, with_indices=True, remove_columns=[MESSAGES])
