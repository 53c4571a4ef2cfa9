"""What trainers that learn from groups of responses learn of teachers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.collect.ledger import teacher_columns
from fastrl.data.tables import is_stream
from fastrl.learn.samples import of_learned
from fastrl.models import PreTrainedModelWrapper
from fastrl.models.scoring import PassLimit
from fastrl.rewards.identity import identities_of
from fastrl.run.metric_means import MetricMeans, mean_of
from fastrl.samples import Samples
from fastrl.trainers.groups.log_probs import ResponseScorer
from fastrl.trainers.prompt_room import rows_of
from fastrl.trainers.teachers import (
    CONTEXT,
    PROMPT,
    SCALED,
    TEACHER_COLUMNS,
    TeacherPrompts,
    Teaching,
    teachers_of,
)


def taught_by(
    given: Any,
    args: Any,
    policy: PreTrainedModelWrapper,
    tokenizer: Any,
    data: Mapping[str, Any],
    *,
    fresh: bool,
    rewarded: bool,
    as_given: bool,
    refused: Mapping[str, bool],
) -> TeacherPrompts | None:
    """The teachers that a trainer is given, with what they read in the data; None without teachers.

    Args:
        data: the data sets by the names of their arguments.
        fresh: whether the policy's adapter, if any, is new.
        rewarded: whether the policy learns of rewards, too.
        as_given: see :meth:`TeacherPrompts.check`.
        refused: see :func:`fastrl.trainers.teachers.teachers_of`.

    Raises:
        ValueError: what teachers refuse; settings that do not go with one.
    """
    refused = {**refused, f"fp16=True {SCALED}: use bf16=True": args.fp16}
    coef = args.teacher_settings.coef
    models = teachers_of(given, args, policy, tokenizer, coef=coef, fresh=fresh, refused=refused)
    if models is None:
        return None
    if _reads_the_same(data["train_dataset"]):
        models.refuse_itself(live_alone=rewarded)
    template = dict(args.chat_template_kwargs or {})
    prompts = TeacherPrompts(models, template, args.generation_arguments.get("max_new_tokens"))
    for name, each in data.items():
        prompts.check(each, name, as_given)
    return prompts


def _reads_the_same(data: Any) -> bool:
    """Whether a teacher reads the policy's own prompts, by the columns of a data set."""
    named = getattr(data, "column_names", None)
    if named is None or not {*named} & {*TEACHER_COLUMNS}:
        return named is not None
    if CONTEXT in named:
        return False
    return all(row["prompt"] == row[PROMPT] for _, row in rows_of(data, PROMPT)) and not (
        is_stream(data) or data.format["type"] == "custom"
    )


class GroupTeaching(Teaching):
    """Gives a generation's responses what their teachers have to say.

    Args:
        prompts: what the teachers read.
        scorer: scores the responses by the policy ``model``, which may have been wrapped.
        rewarded: whether the policy learns of rewards, too.
    """

    def __init__(
        self,
        prompts: TeacherPrompts,
        policy: PreTrainedModelWrapper,
        scorer: ResponseScorer,
        model: Callable[[], nn.Module],
        rewarded: bool,
    ):
        teachers = prompts.models.placed(
            policy,
            scorer.accelerator,
            scorer.args.teacher_settings,
            scorer.lowest,
            lambda: scorer.padding(model()),
            scorer.processes,
        )
        super().__init__(prompts.models, teachers, scorer.pad_token, scorer.args.device)
        self.prompts, self._rewarded, self._warned = prompts, rewarded, False

    def asked(self, samples: Samples, collected: Samples, mode: str) -> Samples:
        """The samples with what their teachers read, and what those that are functions say.

        Args:
            collected: the same samples, with the data's other columns.

        Raises:
            ValueError: a sample that its teacher cannot read; a teacher that is the policy itself.
        """
        samples = replace(samples, **self.prompts.of(collected))
        read = samples.teacher_prompt_ids
        if read is None and mode == "train":  # a stream may not have named its columns before
            self.models.refuse_itself(live_alone=self._rewarded)
        elif read is None and self.models.is_live and not self._warned:
            self._warned = True
            warnings.warn(
                "the evaluation data have no column teacher_prompt or privileged_context: a "
                "teacher that is the policy as it is says what the policy says, a divergence of 0",
                stacklevel=2,
            )
        name = "what the teacher reads in place of prompt {0} and response {0}".format
        if read is None:
            name = "prompt {0} and response {0}".format
        prompts = samples.prompt_ids if read is None else read
        self.models.check_readable(prompts, samples.sequences, samples.teachers, name)
        return self.models.asked(samples, collected.columns or {})

    def priced(
        self,
        samples: Samples,
        limit: PassLimit,
        metrics: MetricMeans,
        by_response: bool,
        kl: Tensor | None,
    ) -> Tensor | None:
        """Takes -r_t = coef·(log π_old - log π_teacher) off what tokens are learned by. Returns
        what is taken off each response's reward, [B]: ``kl``, and ``by_response`` Σ_t -r_t; else
        the samples have r_t in their advantages. They keep the teachers' log-probs. No token is
        learned of a response for which a teacher has no numbers; it has NaN in the sum.

        Args:
            kl: what is taken off already; None: nothing.
        """
        found = samples.teacher_logprobs = self.log_probs(samples, limit, shared=False)
        old = samples.old_logprobs
        assert old is not None
        masks, apart = samples.learned, []
        for i, (x, y) in enumerate(zip(old, found, strict=True)):
            if y.isfinite().all():
                apart.append(torch.where(masks[i], x - y, 0.0))
            else:
                masks[i] = torch.zeros_like(masks[i])
                apart.append(torch.full_like(x, torch.nan))
        metrics.add({"teacher_kl": mean_of(of_learned(samples, apart))})
        self.note_left_out(len(apart), metrics)
        rewards = [self.reward_of(x) for x in apart]
        if by_response:
            price = -torch.stack([x.sum() for x in rewards])
            return price if kl is None else kl + price
        samples.token_advantages = [x.nan_to_num(nan=0.0) for x in rewards]
        return kl

    def note_left_out(self, count: int, metrics: MetricMeans) -> None:
        """Logs the share of ``count`` responses for which a teacher has no numbers."""
        self.teachers.tell()
        share = torch.tensor(float(self.teachers.left_out)), torch.tensor(float(count))
        metrics.pool({"teacher_nonfinite": share})
        self.teachers.left_out = 0

    def noted(self, samples: Samples) -> Samples:
        """The samples with their teachers' log-probs, for a ledger."""
        if self.in_reward:
            return samples
        args = self.models.args
        limit = PassLimit(args.per_device_train_batch_size, args.micro_batch_tokens)
        return replace(samples, teacher_logprobs=self.log_probs(samples, limit, shared=False))

    def columns(self, samples: Samples) -> dict[str, Any]:
        """The ledger's columns of the :meth:`noted` samples of all processes."""
        names, numbers = list(self.models.references), samples.teachers
        logprobs, asked = samples.teacher_logprobs, self.models.functions
        assert logprobs is not None
        known = [
            None if names[number] in asked else x[mask].numpy()
            for number, x, mask in zip(
                numbers or [0] * len(samples), logprobs, samples.learned, strict=True
            )
        ]
        return teacher_columns(names, numbers, samples.teacher_prompt_ids, known)

    def code(self) -> dict[str, Any]:
        """Hashes of the teachers that are functions."""
        functions = self.models.functions.items()
        return identities_of((f"teacher {name}", x.function) for name, x in functions)
