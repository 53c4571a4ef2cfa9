"""SDFTTrainer: a policy learns what it would have said with a hint."""

from __future__ import annotations

from typing import Any, ClassVar

from fastrl.learn.aggregate import Aggregate
from fastrl.learn.objective import TeacherLoss, TokenLoss
from fastrl.run.model_card import Method
from fastrl.samples import Samples
from fastrl.trainers.groups.distillation import DistillationTrainer
from fastrl.trainers.groups.sdft_config import SDFTConfig


class SDFTTrainer(DistillationTrainer):
    """Trains a causal language model on its own responses to have the distributions that it has
    itself, as ``args.teacher_model_kind`` says, behind prompts with a hint (Shenfeld et al.,
    "Self-distillation enables continual learning", 2026), by the names and arguments of TRL 1.16.

    The loss is the mean over responses of the mean over a response's tokens of D_t, see
    :class:`DistillationTrainer`.

    Args:
        model: a causal LM, a PEFT model around one, or its path or Hub id.
        args: a :class:`SDFTConfig`.
        train_dataset, eval_dataset: ``datasets`` with columns ``prompt`` and
            ``privileged_context``, or with ``teacher_prompt``, as for ``DistillationTrainer``.
        processing_class: the tokenizer; by default the one saved with the model.
        callbacks, optimizers: as transformers' Trainer takes them.
        peft_config: adds an adapter.
        rollout_func: answers prompts in place of the student, as for
            :class:`fastrl.trainers.groups.grpo.GRPOTrainer`.

    Raises:
        ValueError, TypeError: a setting or argument that fastrl does not honour; says what to do.
    """

    config: ClassVar[type] = SDFTConfig
    _tag_names: ClassVar[list[str]] = ["trl", "sdft"]
    method = Method("self-distillation", ("sdft",))

    def __init__(
        self,
        model: Any,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        peft_config: Any = None,
        rollout_func: Any = None,
    ):
        data = train_dataset, eval_dataset, processing_class
        options = {"peft_config": peft_config, "rollout_func": rollout_func}
        super().__init__(model, None, args, *data, callbacks, optimizers, **options)

    def _settled(self, args: Any, model: Any, *, adapts: bool) -> Any:
        args = super()._settled(args, model, adapts=adapts)
        args.check_mode()
        return args

    def _make_loss(self) -> TokenLoss:
        aggregate = Aggregate("seq-mean-token-mean", counts_empty=True)
        return TeacherLoss(aggregate, temperature=self.args.loss_temperature, per_step=False)

    def responses_to(self, rows: list[dict[str, Any]], mode: str) -> Samples:
        samples = super().responses_to(rows, mode)
        for mask in samples.learned:
            mask[: self.args.num_loss_tokens_to_skip] = False
        return samples
