"""Log-probs of sampled responses: of the policy, as it was, and of its reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

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
        self._lowest = torch.bfloat16 if args.bf16 or args.fp16 else torch.float32
        given = args.device, self._lowest, autocast, processes.any
        self.padding = Packing(*given, lambda: args.padding_free, logprobs_of_labels).padding
        self._scorer = TokenScorer()

    def policy(
        self, model: nn.Module, tokens: TokenBatch, aux: bool = False, **options: Any
    ) -> ScoredPass:
        """What the policy says of tokens in a forward, over the samples of which a token is
        learned; with none over one that has none, as other processes wait for it.

        Args:
            aux: have it say the load-balancing loss of a mixture of experts, too.
            options: of the :class:`ScoringRequest`.
        """
        counting = tokens.counting()
        read = tokens if len(counting) == len(tokens) else tokens.select(counting or [0])
        model_pass = read.model_pass if counting else Padded().model_pass(read)
        inputs = {**model_pass.inputs, "output_router_logits": True} if aux else model_pass.inputs
        given = {"temperature": self.args.temperature, "values": False, **options}
        plain = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        return self._scorer(plain, inputs, scoring_request(tokens, model_pass, **given), model)

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
            worst, mean = (float(off.max()), float(off.mean())) if len(off) else (0.0, 0.0)
            low = self.args.bf16 or self.args.fp16
            dtype = self._lowest if low else next(model.parameters()).dtype
            self.reuses = not self.processes.any(not agrees(worst, mean, dtype))
            if not self.reuses:
                return self._by_policy(model, samples, limit)
        return [x.float().cpu() for x in sampled]

    def reference(
        self, model: nn.Module, reference: RefModel, samples: Samples, limit: PassLimit
    ) -> list[Tensor]:
        """Log-probs [n] of each response by the reference of a policy, see :meth:`old`."""
        of_part = scores_of(reference.score, temperature=self.args.temperature, values=False)
        return self._in_passes(model, of_part, samples, limit)

    def _by_policy(self, model: nn.Module, samples: Samples, limit: PassLimit) -> list[Tensor]:
        def score(part: TokenBatch) -> dict[str, Tensor]:
            return {"logprobs": self.policy(model, part).logprobs}

        with evaluating(model):
            return self._in_passes(model, score, samples, limit)

    def _in_passes(
        self, model: nn.Module, score: ScorePart, samples: Samples, limit: PassLimit
    ) -> list[Tensor]:
        """Returns log-probs on the host, which waits once for all; 0 where nothing is learned."""
        batch = token_batch(samples, self.pad_token, self.padding(model)).to(self.args.device)
        with self.autocast():
            found = in_passes(batch, score, limit, self.processes)["logprobs"]
        return to_column(samples, found.float().cpu()[batch.response_mask])
