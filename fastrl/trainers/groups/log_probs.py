"""Log-probs of sampled responses: of the policy, as it was, and of its reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.data.choose_padding import logprobs_of_labels, runs_packed
from fastrl.data.padding_free import PaddingFree
from fastrl.data.token_batch import ModelPass, Padded, Padding, TokenBatch
from fastrl.learn.experience import Minibatch
from fastrl.learn.old_logprobs import LOW_PRECISION, TOLERANCES, audited
from fastrl.learn.ref_model import RefModel
from fastrl.learn.samples import of_learned, to_column, token_batch
from fastrl.learn.scorer import Score, in_passes, scoring_request
from fastrl.models.routing import without_routing
from fastrl.models.scorer import ScoredPass, TokenScorer
from fastrl.models.scoring import PassLimit, ScoringRequest, TokenScores
from fastrl.models.utils import evaluating
from fastrl.run.processes import Processes
from fastrl.samples import Samples


class ResponseScorer:
    """Scores the learned tokens of responses by the policy and its reference.

    Args:
        args: an :class:`fastrl.trainers.groups.online_config.OnlineConfig`.
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
        self, model: nn.Module, inputs: dict[str, Any], request: ScoringRequest, aux: bool = False
    ) -> ScoredPass:
        """What the policy says in a forward.

        Args:
            aux: have it say the load-balancing loss of a mixture of experts, too.
        """
        given = {**inputs, "output_router_logits": True} if aux else inputs
        plain = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        return self._scorer(plain, given, request, model)

    def old(
        self, model: nn.Module, samples: Samples, sampled: list[Tensor] | None, limit: PassLimit
    ) -> list[Tensor]:
        """Log-probs [n] of each response by the policy as it is: the rollout's, where a few that
        are computed again agree with them.

        Args:
            sampled: the rollout's, of all tokens of each response.
            limit: of a forward.
        """
        if sampled is None or self.reuses is False:
            return self._by_policy(model, samples, limit)
        if self.reuses is None:
            chosen = audited(range(len(samples)))
            part = samples.select(chosen)
            found = of_learned(part, self._by_policy(model, part, limit))
            off = (of_learned(part, [sampled[i].float().cpu() for i in chosen]) - found).abs()
            low = self.args.bf16 or self.args.fp16
            dtype = torch.bfloat16 if low else next(model.parameters()).dtype
            kind, tolerance = TOLERANCES.get(dtype, LOW_PRECISION)
            worst = float(off.max() if kind == "max" else off.mean()) if len(off) else 0.0
            self.reuses = not self.processes.any(not worst <= tolerance)
            if not self.reuses:
                return self._by_policy(model, samples, limit)
        return [x.float().cpu() for x in sampled]

    def reference(
        self, model: nn.Module, reference: RefModel, samples: Samples, limit: PassLimit
    ) -> list[Tensor]:
        """Log-probs [n] of each response by the reference of a policy, see :meth:`old`."""

        def score(inputs: dict[str, Any], request: ScoringRequest) -> TokenScores:
            return reference.score(without_routing(inputs), request)

        return self._in_passes(model, score, samples, limit)

    def _by_policy(self, model: nn.Module, samples: Samples, limit: PassLimit) -> list[Tensor]:
        with evaluating(model):
            return self._in_passes(model, lambda *x: self.policy(model, *x).scores, samples, limit)

    @torch.no_grad()
    def _in_passes(
        self, model: nn.Module, score: Score, samples: Samples, limit: PassLimit
    ) -> list[Tensor]:
        """Returns log-probs on the host, which waits once for all; 0 where nothing is learned."""
        batch = token_batch(samples, self.pad_token, self.padding(model)).to(self.args.device)

        def logprobs(part: TokenBatch) -> dict[str, Tensor]:
            model_pass = part.model_pass
            request = scoring_request(
                part, model_pass, temperature=self.args.temperature, values=False
            )
            return {"logprobs": score(dict(model_pass.inputs), request).logprobs.float()}

        with self.autocast():
            found = in_passes(batch, logprobs, limit, self.processes)["logprobs"]
        return to_column(samples, found.cpu())

    def model_pass(self, part: Minibatch) -> ModelPass:
        """The forward over the samples of which a token is learned; with none over one that has
        none, as other processes wait for it."""
        tokens, counting = part.tokens, part.tokens.counting()
        if len(counting) < len(tokens):
            tokens = tokens.select(counting or [0])
        if not counting:
            return Padded().model_pass(tokens)
        return tokens.model_pass

    def padding(self, model: nn.Module) -> Padding:
        """The padding of batches, which the processes choose together, whoever has a token."""
        if self._padding is None:
            lowest = torch.bfloat16 if self.args.bf16 or self.args.fp16 else torch.float32
            with self.autocast():
                packs = runs_packed(
                    [model],
                    self.args.device,
                    lowest,
                    logprobs_of_labels,
                    asked=self.args.padding_free,
                    anywhere=self.processes.any,
                )
            self._padding = PaddingFree() if packs else Padded()
        return self._padding
