"""Methods of TRL's GRPOTrainer and RLOOTrainer that subclasses override, by TRL 1.16's names,
arguments and shapes.

fastrl's training calls such a method only where a subclass overrides it (``_compute_loss`` also if
log-probs are overridden), with arguments laid out as in TRL, and learns from its result.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fastrl.data.batch import pad
from fastrl.data.prompts import samples_of_rows
from fastrl.learn.samples import to_column
from fastrl.models.scoring import PassLimit, TokenScores
from fastrl.models.utils import evaluating
from fastrl.rewards.weighted import RewardBatch
from fastrl.samples import Samples
from fastrl.trainers.groups.log_probs import ResponseScorer
from fastrl.trainers.groups.online import LOGPROBS, OnlineTrainer

_OF_TOKENS = {  # columns of Samples by TRL's names
    "old_per_token_logps": "old_logprobs",
    "ref_per_token_logps": "ref_logprobs",
    "importance_sampling_ratio": "sampler_weights",
    "sampling_per_token_logps": "sampler_logprobs",
}
_IDS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")
_READ = {*_IDS, *_OF_TOKENS, "advantages", "num_items_in_batch"}


class OverridableTrainer(OnlineTrainer):
    """An :class:`OnlineTrainer` with TRL's methods; it calls those that a subclass overrides."""

    use_vllm: bool = False  # our engine generates

    @property
    def epsilon_low(self) -> float:
        return self.args.epsilon

    @property
    def epsilon_high(self) -> float:
        high = self.args.epsilon_high
        return self.args.epsilon if high is None else high

    @property
    def importance_sampling_level(self) -> str:
        return self.args.importance_sampling_level

    # Where training calls the methods that a subclass overrides.

    def _make_scorer(self, *arguments: Any) -> ResponseScorer:
        if LOGPROBS in self.overrides:
            return OwnLogprobs(self, *arguments)
        return super()._make_scorer(*arguments)

    def responses_to(self, rows: list[dict[str, Any]], mode: str) -> Samples:
        if "_generate_and_score_completions" not in self.overrides:
            return super().responses_to(rows, mode)
        return samples_of(self._generate_and_score_completions(rows))

    def judge(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[list[int]],
        columns: Mapping[str, Sequence[Any]],
        **options: Any,
    ) -> RewardBatch:
        responses = prompts, completions, completion_ids
        if "_calculate_rewards" not in self.overrides:
            return super().judge(*responses, columns, **options)
        self._judging, count = options, len(prompts)
        rows = [{name: x[i] for name, x in columns.items()} for i in range(count)]
        rows = [{**row, "prompt": prompt} for row, prompt in zip(rows, prompts, strict=True)]
        table = self._calculate_rewards(rows, *map(list, responses)).detach().cpu()
        if len(table) == count * self.processes.count:
            table = table[self.processes.index * count :][:count]
        if table.shape != (count, len(self.rewards.names)):
            raise ValueError(
                f"_calculate_rewards returned {tuple(table.shape)}: return the rewards of all "
                f"processes' responses, {(count * self.processes.count, len(self.rewards.names))}"
            )
        return self.rewards.batch_of(table, options["left_out"])

    def _units(self, model: nn.Module, samples: Samples, mode: str) -> list[Any]:
        """Passes, or where a subclass computes the loss the whole batch as TRL has it."""
        return [self.batch_of(samples)] if self.has_own_loss else self._passes(model, samples, mode)

    def batch_of(self, samples: Samples) -> dict[str, Any]:
        """Responses as :func:`as_tensors` lays them out, on the device."""
        return as_tensors(samples, self.pad_token_id, self.args.device)

    # TRL's methods.

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Responses to the prompts of rows, judged, laid out by :func:`as_tensors`."""
        return self.batch_of(self._learnable(inputs, "train" if self.model.training else "eval"))

    def _calculate_rewards(
        self,
        inputs: list[dict[str, Any]],
        prompts: list[Any],
        completions: list[Any],
        completion_ids_list: list[list[int]],
    ) -> Tensor:
        """Rewards of all processes' responses, [B, functions] fp32; NaN where a function does not
        apply. They are summed by ``reward_weights``."""
        columns = samples_of_rows(inputs, prompts).columns
        responses = prompts, completions, completion_ids_list
        rewards = self.rewards(*responses, columns, **self._judging)
        table = torch.stack([*rewards.by_function.values()], 1).float()
        return self.accelerator.gather(table.to(self.accelerator.device))

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **of_images: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probs at the sampling temperature, and entropies, of the last C = ``logits_to_keep``
        tokens, [B, C] fp32 each, 0 where ``attention_mask`` is 0; and the experts' loss, []. The
        last two are None unless they are to be computed.

        Args:
            input_ids, attention_mask: [B, T].
            batch_size: rows of a forward pass; None: all.
        """
        size = batch_size or len(input_ids)
        parts = input_ids.split(size), attention_mask.bool().split(size)
        logps, entropies, losses = [], [], []
        for ids, mask in zip(*parts, strict=True):
            scored = self._scored_rows(
                model, ids, mask, logits_to_keep, compute_entropy, compute_aux_loss
            )
            kept = mask[:, -logits_to_keep:]
            logps.append(_spread(scored.scores.logprobs, kept))
            if compute_entropy:
                entropies.append(_spread(scored.scores.entropies, kept))
            if compute_aux_loss:
                losses.append(scored.aux_loss)
        return (
            torch.cat(logps),
            torch.cat(entropies) if entropies else None,
            torch.stack(losses).mean() if losses else None,
        )

    def _scored_rows(
        self, model: nn.Module, ids: Tensor, mask: Tensor, width: int, entropy: bool, aux: bool
    ) -> Any:
        columns = {"prompt_ids": ids[:, :-width], "prompt_mask": mask[:, :-width]}
        columns |= {"completion_ids": ids[:, -width:], "completion_mask": mask[:, -width:]}
        samples = samples_of({**columns, "advantages": torch.zeros(len(ids))})
        return self._scored(model, samples, aux, entropy)

    def _compute_loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """The loss of a batch that is laid out as by :func:`as_tensors`, in training divided by the
        number of batches of an optimizer step, if the class ``divides_loss``. Logs the metrics.

        Raises:
            ValueError: advantages of tokens, [B, C]; what :meth:`own_logprobs` refuses.
        """
        training, samples = self.model.training, samples_of(inputs)
        if "advantages" in (samples.further or ()):
            raise ValueError(
                "advantages must be one number for each response, [B]: those of tokens need a "
                "_compute_loss that does not call this one"
            )
        mode = "train" if training else "eval"
        (part,) = self._passes(model, samples, mode)
        if LOGPROBS in self.overrides:
            aux = self.aux_loss_enabled
            logps, entropies, aux_loss = self.own_logprobs(model, inputs, True, aux)
            learned = _learned(inputs).to(logps.device)
            part.scores = TokenScores(logps[learned], entropies[learned], None, None)
            loss = self._loss_of_scored(part, aux_loss)
        else:
            loss = self._pass_loss(model, part)
        self._note([part], mode)
        if training and self.divides_loss:
            loss = loss / self.current_gradient_accumulation_steps
        return loss

    def own_logprobs(
        self, model: nn.Module, inputs: Mapping[str, Any], entropy: bool, aux: bool
    ) -> Any:
        """Log-probs and entropies [B, C], and the experts' loss or None, by the subclass's method;
        raises ValueError if ``aux`` is set and the method returns no such loss."""
        ids, mask = (
            torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1)
            for name in ("ids", "mask")
        )
        options = {"compute_entropy": entropy, "compute_aux_loss": aux}
        method: Any = self._get_per_token_logps_and_entropies
        parameters = inspect.signature(method).parameters  # TRL before 1.16 has no experts' loss
        if not any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
            options = {name: x for name, x in options.items() if name in parameters}
        logps, entropies, *aux_loss = method(
            model, ids, mask, inputs["completion_ids"].shape[1], **options
        )
        if aux and (not aux_loss or aux_loss[0] is None):
            raise ValueError(
                f"{LOGPROBS} returned no loss of the experts, which router_aux_loss_coef weighs: "
                "return it as the third result, or set router_aux_loss_coef=0"
            )
        return logps, entropies, aux_loss[0] if aux else None


class OwnLogprobs(ResponseScorer):
    """A scorer that gets old log-probs, and the reference's, from a trainer's overridden method."""

    def __init__(self, trainer: Any, *arguments: Any):
        super().__init__(*arguments)
        self.trainer = trainer

    def old(
        self, model: nn.Module, samples: Samples, sampled: Any, limit: PassLimit
    ) -> list[Tensor]:
        return self._own(model, samples)

    def reference(
        self, model: nn.Module, reference: Any, samples: Samples, limit: PassLimit
    ) -> list[Tensor]:
        return self._own(self.trainer.ref_model, samples)

    @torch.no_grad()
    def _own(self, model: nn.Module, samples: Samples) -> list[Tensor]:
        batch = self.trainer.batch_of(samples)
        with self.autocast(), evaluating(model):
            logps = self.trainer.own_logprobs(model, batch, False, False)[0]
        return to_column(samples, logps.float().cpu()[_learned(batch).cpu()])


def as_tensors(samples: Samples, pad_token: int, device: Any) -> dict[str, Any]:
    """Responses as TRL lays them out: ``prompt_ids`` and ``prompt_mask`` [B, P], padded on the
    left; ``completion_ids`` and ``completion_mask`` [B, C], padded on the right, the mask 0 for all
    of a response that is left out; ``tool_mask`` [B, C], 0 at tokens that the policy did not write,
    if there are any; ``advantages`` [B] fp32; ``num_items_in_batch`` [], the learned tokens of a
    generation of all processes; of ``old_per_token_logps``, ``ref_per_token_logps``,
    ``importance_sampling_ratio`` and ``sampling_per_token_logps``, [B, C] each, those that are
    known; and columns that a subclass has added."""
    prompts = pad(samples.prompt_ids, pad_token, "left")
    completions = pad(samples.sequences, pad_token, "right")
    learned = pad_sequence(samples.learned, batch_first=True)
    kept = completions["attention_mask"].bool() & learned.any(1, keepdim=True)
    columns: dict[str, Any] = {
        "prompt_ids": prompts["input_ids"],
        "prompt_mask": prompts["attention_mask"],
        "completion_ids": completions["input_ids"],
        "completion_mask": kept.long(),
        "advantages": samples.advantages,
        "num_items_in_batch": torch.tensor(samples.generated),
    }
    if not torch.equal(kept, learned):
        columns["tool_mask"] = learned.long()
    for name, ours in _OF_TOKENS.items():
        column = getattr(samples, ours)
        if column is not None:
            columns[name] = pad_sequence(column, batch_first=True)
    columns |= {**(samples.further or {}), **samples.of_batch}
    return {k: x.to(device) if isinstance(x, Tensor) else x for k, x in columns.items()}


def samples_of(batch: Mapping[str, Any]) -> Samples:
    """The responses of a batch in the layout of :func:`as_tensors`. A subclass's columns are kept,
    in ``further`` if they have an element for each response, else in ``of_batch``."""
    prompts, completions = batch["prompt_mask"].bool(), batch["completion_mask"].bool()

    def rows(column: Tensor, mask: Tensor) -> list[Tensor]:
        each = zip(column.detach().cpu(), mask.cpu(), strict=True)
        return [row[kept] for row, kept in each]

    further = {name: x for name, x in batch.items() if name not in _READ}
    advantages = batch["advantages"].detach().cpu().float()
    if advantages.dim() == 2:
        further["advantages"] = batch["advantages"]
        advantages = torch.zeros(len(advantages))
    of_tokens: dict[str, Any] = {
        ours: None if batch.get(name) is None else rows(batch[name], completions)
        for name, ours in _OF_TOKENS.items()
    }
    masks = rows(_learned(batch), completions)
    total = batch.get("num_items_in_batch")
    of_samples = {k: x for k, x in further.items() if _has_one_each(x, len(advantages))}
    return Samples(
        prompt_ids=rows(batch["prompt_ids"], prompts),
        sequences=rows(batch["completion_ids"], completions),
        learned=masks,
        advantages=advantages,
        generated=float(sum(int(x.sum()) for x in masks) if total is None else total),
        further=of_samples,
        of_batch={k: x for k, x in further.items() if k not in of_samples},
        **of_tokens,
    )


def _has_one_each(column: Any, count: int) -> bool:
    """Whether a column is a list or a tensor of ``count`` elements."""
    has_elements = isinstance(column, list) or (isinstance(column, Tensor) and column.dim() > 0)
    return has_elements and len(column) == count


def _learned(batch: Mapping[str, Any]) -> Tensor:
    """Which tokens of the completions are learned, [B, C] bool."""
    mask = batch["completion_mask"].bool()
    return mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask


def _spread(numbers: Tensor, where: Tensor) -> Tensor:
    return torch.zeros(where.shape, device=numbers.device).masked_scatter(where, numbers.float())
