"""DistillationTrainer: a policy learns a teacher's distributions over its own responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastrl.learn.aggregate import Aggregate
from fastrl.learn.objective import Pass, TeacherLoss, TokenLoss
from fastrl.learn.samples import minibatch_of
from fastrl.rewards.weighted import RewardBatch
from fastrl.run.model_card import Method
from fastrl.samples import Samples
from fastrl.trainers.groups.distillation_config import DistillationConfig
from fastrl.trainers.groups.methods import samples_of
from fastrl.trainers.groups.online import OnlineTrainer


class DistillationTrainer(OnlineTrainer):
    """Trains a causal language model, the student, to have a teacher's distributions at the tokens
    of responses that it samples itself (Agarwal et al., "On-policy distillation of language
    models", 2024), by the names, arguments and logs of TRL 1.16.

    The loss is Σ_t D_t / tokens, D_t the divergence that ``args.beta`` names, over the whole
    vocabulary, at every token that the student wrote; tokens are those of all batches that were
    generated together. No logits of either model exist as a whole.

    Args:
        model: a causal LM, a PEFT model around one, or its path or Hub id.
        teacher_model: a causal LM with the same tokenizer, of any width; its path or Hub id; that
            of an adapter on the student's base, which costs no second base; a function, see
            :class:`fastrl.learn.asked_teacher.AskedTeacher`; a dict of these by the names in the
            column ``args.teacher_column``; None: by ``args.teacher_model_kind`` the student's own
            weights, which need other prompts.
        args: a :class:`DistillationConfig`.
        train_dataset, eval_dataset: ``datasets`` with a column ``prompt`` of texts or of chats. A
            column ``teacher_prompt`` has what the teacher reads in its place, such as the prompt
            with a hint; or a column ``privileged_context`` what ``args.teacher_prompt_template``
            puts beside it.
        processing_class: the tokenizer; by default the one saved with the model.
        callbacks, optimizers: as transformers' Trainer takes them.
        quantization_config: for a model that the trainer loads.
        peft_config: adds an adapter.
        tools, rollout_func, environment_factory: as for
            :class:`fastrl.trainers.groups.grpo.GRPOTrainer`; what they write is not learned.

    Raises:
        ValueError, TypeError: a setting or argument that fastrl does not honour; a teacher that has
            another tokenizer, or is the student behind the same prompts; says what to do.
    """

    config: ClassVar[type] = DistillationConfig
    _tag_names: ClassVar[list[str]] = ["trl", "distillation"]
    method = Method("on-policy distillation", ("distillation",))
    needs_old: ClassVar[bool] = False
    needs_rewards: ClassVar[bool] = False
    order: ClassVar[str] = "together"  # with rewards, batches of mixed groups are the method's
    divides_loss: ClassVar[bool] = False

    def __init__(
        self,
        model: Any,
        teacher_model: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ):
        if teacher_model is None and args is not None:
            teacher_model = args.teacher_model_name_or_path
        data = train_dataset, eval_dataset, processing_class, None, callbacks, optimizers
        of_model = quantization_config, peft_config, tools, rollout_func, environment_factory
        super().__init__(model, None, args, *data, *of_model, teacher_model)

    @property
    def teacher_model(self) -> Any:
        """The teacher as a separate model, the first of several; None where it has the student's
        weights, or some of them."""
        return next(iter(self.teacher_models), None)

    def _make_loss(self) -> TokenLoss:
        aggregate = Aggregate("token-mean", self.args.max_completion_length, True)
        return TeacherLoss(aggregate, temperature=self.args.loss_temperature, per_step=True)

    def judge(self, prompts: Sequence[Any], *_: Any, **__: Any) -> RewardBatch:
        count = len(prompts)
        zeros = torch.zeros(count, dtype=torch.float64)
        return RewardBatch(zeros, {}, {}, 0, 0, [None] * count)

    def advantages_of(
        self, judged: Samples, kl: Tensor | None, group: int, mode: str
    ) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros_like(judged.scores)
        return zeros, zeros.bool()

    def compute_loss(  # type: ignore[override]
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """A pass's part of its batch's loss; of a batch that is laid out as in TRL, Σ D over its
        learned tokens divided by their number, or by ``num_items_in_batch``.

        Args:
            inputs: a pass, or ``prompt_ids``, ``prompt_mask``, ``completion_ids``,
                ``completion_mask`` and perhaps ``tool_mask``, [B, T] each.
        """
        if isinstance(inputs, Mapping):
            ids = inputs["completion_ids"]
            samples = samples_of({"advantages": torch.zeros(len(ids)), **inputs})
            settings = self.pad_token_id, self._scorer.padding(model), ids.device
            whole = minibatch_of(samples, *settings, 0.0, self._loss.aggregate)
            denominator = samples.generated if num_items_in_batch is None else num_items_in_batch
            inputs = Pass(whole, whole, max(float(denominator), 1.0))
        return super().compute_loss(model, inputs, return_outputs)

    def _compute_loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        return self.compute_loss(model, inputs)
