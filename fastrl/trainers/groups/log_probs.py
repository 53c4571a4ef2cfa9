"""Log-probs of sampled responses: by the policy, the old ones, and by the reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.config import FULL
from fastrl.data.choose_padding import Packing, logprobs_of_labels
from fastrl.data.token_batch import Padded, TokenBatch
from fastrl.learn.old_logprobs import agrees, audited
from fastrl.learn.ref_model import RefModel
from fastrl.learn.samples import of_learned, to_column, token_batch
from fastrl.learn.scorer import ScorePart, in_passes, scores_of, scoring_request
from fastrl.models.scorer import ScoredPass, TokenScorer
from fastrl.models.scoring import PassLimit
from fastrl.models.utils import evaluating
from fastrl.run.processes import Processes
from fastrl.samples import Samples


class ResponseScorer:
    """Scores the learned tokens of responses by the policy and its reference.

    Args:
        args: an :class:`fastrl.trainers.groups.online_config.OnlineConfig`.
        pad_token: the id that pads.
        accelerator: the Accelerator that has prepared the policy.
        autocast: makes the context in which a model runs.

    Attributes:
        reuses: whether the rollouts' log-probs serve as old log-probs; None until a few were
            compared with the policy's.
        lowest: the lowest precision that a forward computes in.
    """

    def __init__(
        self,
        args: Any,
        pad_token: int,
        accelerator: Any,
        autocast: Callable[[], AbstractContextManager],
        processes: Processes,
    ):
        self.args, self.pad_token, self.accelerator = args, pad_token, accelerator
        self.autocast, self.processes = autocast, processes
        self.reuses: bool | None = None
        self.lowest = torch.bfloat16 if args.bf16 or args.fp16 else torch.float32
        settings = args.device, self.lowest, autocast, processes.any
        self.padding = Packing(*settings, lambda: args.padding_free, logprobs_of_labels).padding
        self._scorer = TokenScorer()

    def policy(
        self, model: nn.Module, tokens: TokenBatch, aux: bool = False, **options: Any
    ) -> ScoredPass:
        """Scores tokens in one forward pass over the samples that have learned tokens. If none has
        any, the pass is over the first sample, because other processes wait for a pass.

        Args:
            aux: whether a mixture of experts computes its load-balancing loss, too.
            options: fields of the :class:`ScoringRequest`.
        """
        counting = tokens.counting()
        read = tokens if len(counting) == len(tokens) else tokens.select(counting or [0])
        model_pass = read.model_pass if counting else Padded().model_pass(read)
        inputs = {**model_pass.inputs, "output_router_logits": True} if aux else model_pass.inputs
        fields = {"temperature": self.args.loss_temperature, "values": False, **options}
        plain = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        return self._scorer(plain, inputs, scoring_request(tokens, model_pass, **fields), model)

    def old(
        self, model: nn.Module, samples: Samples, sampled: list[Tensor] | None, limit: PassLimit
    ) -> list[Tensor]:
        """Old log-probs [n] of each response of n tokens: the rollout's log-probs where a few of
        them agree with the policy's, else the policy's.

        Args:
            sampled: the rollout's log-probs [n] of each response; None if it returned none.
            limit: the most samples and tokens of a forward pass.
        """
        if sampled is None or self.reuses is False:
            return self._by_policy(model, samples, limit)
        if self.reuses is None:
            chosen = audited(range(len(samples)))
            part = samples.select(chosen)
            logprobs = of_learned(part, self._by_policy(model, part, limit))
            gaps = (of_learned(part, [sampled[i].float().cpu() for i in chosen]) - logprobs).abs()
            worst, mean = (float(gaps.max()), float(gaps.mean())) if len(gaps) else (0.0, 0.0)
            is_mixed = self.args.bf16 or self.args.fp16
            dtype = self.lowest if is_mixed else next(model.parameters()).dtype
            self.reuses = not self.processes.any(not agrees(worst, mean, dtype))
            if not self.reuses:
                return self._by_policy(model, samples, limit)
        return [x.float().cpu() for x in sampled]

    def reference(
        self, model: nn.Module, reference: RefModel, samples: Samples, limit: PassLimit
    ) -> list[Tensor]:
        """Log-probs [n] of each response by the reference of the policy ``model``."""
        fields: dict[str, Any] = {"temperature": self.args.loss_temperature, "values": False}
        if self.args.reference_support == FULL:
            fields["support"] = None
        of_part = scores_of(reference.score, **fields)
        return self._in_passes(model, of_part, samples, limit)

    def _by_policy(self, model: nn.Module, samples: Samples, limit: PassLimit) -> list[Tensor]:
        def score(part: TokenBatch) -> dict[str, Tensor]:
            return {"logprobs": self.policy(model, part).logprobs}

        with evaluating(model):
            return self._in_passes(model, score, samples, limit)

    def _in_passes(
        self, model: nn.Module, score: ScorePart, samples: Samples, limit: PassLimit
    ) -> list[Tensor]:
        """Returns log-probs [n] of each response on the host, 0 for tokens that are not learned."""
        batch = token_batch(samples, self.pad_token, self.padding(model)).to(self.args.device)
        with self.autocast():
            logprobs = in_passes(batch, score, limit, self.processes)["logprobs"]
        # The host waits for the device once, here.
        return to_column(samples, logprobs.float().cpu()[batch.response_mask])
