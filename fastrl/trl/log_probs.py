"""Log-probs of sampled responses: of the policy, as it was, and of its reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.data.choose_padding import logprobs_of_labels, runs_packed
from fastrl.data.padding_free import PaddingFree
from fastrl.data.token_batch import Padded, Padding
from fastrl.learn.old_logprobs import LOW_PRECISION, TOLERANCES, audited
from fastrl.models.scorer import TokenScorer
from fastrl.models.scoring import PolicyObjective, ScoringRequest, TokenScores
from fastrl.models.utils import evaluating
from fastrl.ref_model import RefModel
from fastrl.run.processes import Processes
from fastrl.trl.sampled import SampledResponses


class ResponseScorer:
    """Scores the learned tokens of responses by the policy and its reference.

    Args:
        args: an :class:`fastrl.trl.online_config.OnlineConfig`.
        pad_token: the id that pads.
        accelerator: which has prepared the policy.
        autocast: makes the context in which a model runs.

    Attributes:
        reuses: whether log-probs of rollouts are taken for the policy's own; None until a few were
            compared.
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
        self._padding: Padding | None = None
        self._scorer = TokenScorer()

    def policy(
        self,
        model: nn.Module,
        part: SampledResponses,
        objective: PolicyObjective | None = None,
        aux: bool = False,
    ) -> tuple[TokenScores, Tensor | None]:
        """Scores of the learned tokens, in the order of the responses, with an objective's loss;
        and the load-balancing loss of a mixture of experts, where it is asked for."""
        given, request = self._request(model, part, objective, aux)
        if aux:
            given["output_router_logits"] = True
        plain = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        found = self._scorer(plain, given, request, model)
        return found.scores, found.output.aux_loss if aux else None

    def old(
        self,
        model: nn.Module,
        responses: SampledResponses,
        sampled: Sequence[Tensor] | None,
        size: int,
    ) -> list[Tensor]:
        """Log-probs [n] of each response by the policy as it is: the rollout's, where a few that
        are computed again agree with them.

        Args:
            sampled: the rollout's, of all tokens of each response.
            size: most responses that a forward runs.
        """
        if sampled is None or self.reuses is False:
            return self._by_policy(model, responses, size)
        if self.reuses is None:
            chosen = audited(range(len(responses)))
            part = responses.select(chosen)
            found = part.learned(self._by_policy(model, part, size))
            off = (part.learned([sampled[i].float().cpu() for i in chosen]) - found).abs()
            low = self.args.bf16 or self.args.fp16
            dtype = torch.bfloat16 if low else next(model.parameters()).dtype
            kind, tolerance = TOLERANCES.get(dtype, LOW_PRECISION)
            worst = float(off.max() if kind == "max" else off.mean()) if len(off) else 0.0
            self.reuses = not self.processes.any(not worst <= tolerance)
            if not self.reuses:
                return self._by_policy(model, responses, size)
        return [x.float().cpu() for x in sampled]

    def reference(
        self, model: nn.Module, reference: RefModel, responses: SampledResponses, size: int
    ) -> list[Tensor]:
        """Log-probs [n] of each response by the reference of a policy, see :meth:`old`."""

        def score(part: SampledResponses) -> Tensor:
            return reference.score(*self._request(model, part)).logprobs

        return self._in_parts(score, responses, size)

    def _by_policy(self, model: nn.Module, responses: SampledResponses, size: int) -> list[Tensor]:
        with evaluating(model):
            return self._in_parts(lambda x: self.policy(model, x)[0].logprobs, responses, size)

    @torch.no_grad()
    def _in_parts(
        self, score: Callable[[SampledResponses], Tensor], responses: SampledResponses, size: int
    ) -> list[Tensor]:
        """On the host, which waits once for all; 0 at tokens that are not learned."""
        starts = range(0, len(responses), size)
        with self.autocast():
            parts = [
                score(responses.select(range(i, min(i + size, len(responses))))).float()
                for i in starts
            ]
        flat = torch.cat(parts).cpu()
        each = zip(responses.masks, flat.split(responses.counts), strict=True)
        return [torch.zeros(len(mask)).masked_scatter(mask, values) for mask, values in each]

    def _request(
        self,
        model: nn.Module,
        part: SampledResponses,
        objective: PolicyObjective | None = None,
        padded: bool = False,
    ) -> tuple[dict[str, Any], ScoringRequest]:
        """Arguments of a model's forward, and what it is to say of the learned tokens."""
        # With no token to learn the model runs all the same, as other processes wait for it.
        counting = [i for i, count in enumerate(part.counts) if count] or [0]
        # Which the processes choose together, whoever has a token.
        padding: Padding = Padded() if padded else self._chosen_padding(model)
        if not any(part.counts):
            padding = Padded()
        batch = part.select(counting).batch(self.pad_token, padding).to(self.args.device)
        model_pass = batch.model_pass
        labels = batch.input_ids.flatten()[batch.rows() + 1]
        request = ScoringRequest(
            model_pass.rows,
            labels,
            self.args.temperature,
            entropy=True,
            values=False,
            objective=objective,
        )
        return dict(model_pass.inputs), request

    def _chosen_padding(self, model: nn.Module) -> Padding:
        if self._padding is None:
            self._padding = Padded()
            if self.args.padding_free:
                lowest = torch.bfloat16 if self.args.bf16 or self.args.fp16 else torch.float32
                with self.autocast():
                    packs = runs_packed(
                        [model],
                        self.args.device,
                        lowest,
                        logprobs_of_labels,
                        anywhere=self.processes.any,
                    )
                if packs:
                    self._padding = PaddingFree()
        return self._padding
