"""Teachers: models whose distributions a policy learns over the tokens of its own responses.

    L = coef·Σ_t v_t·D_t / denominator

D_t is the divergence of the policy's distribution from a teacher's, see
:func:`fastrl_kernels.linear_kl`; v and the denominator are those of the loss that the term stands
in. A teacher reads the policy's responses behind its own prompts, or the policy's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.data.token_batch import Padding, TokenBatch
from fastrl.learn.asked_teacher import AskedTeacher
from fastrl.learn.experience import Experience, repeated_at_tokens
from fastrl.learn.ref_model import RefModel
from fastrl.learn.samples import teacher_batch, to_column, token_batch
from fastrl.learn.scorer import ScorePart, in_passes, scores_of, scoring_request, shares_of
from fastrl.models.host_memory import later_on_host
from fastrl.models.scoring import PassLimit, TeacherTerm
from fastrl.models.sharding import is_spread
from fastrl.run.processes import Processes
from fastrl.samples import Samples
from fastrl_kernels import TeacherHead, TeacherTokens, linear_logprobs


class TeacherSettings(NamedTuple):
    """How much a policy learns of its teachers, and by which divergence."""

    coef: float
    beta: float = 1.0
    temperature: float = 1.0
    vocabulary: int | None = None  # the number of tokens, where heads end in rows of padding
    micro_batch_tokens: int | None = None  # the most tokens of a teacher's forward
    raises: bool = False  # whether a teacher without a number for a sample is an error


class Teachers:
    """The teachers of a policy. Models are run for each pass of the policy, just before it.

    Args:
        references: the teachers by name, each as a reference model is kept, or a function.
        padding: for each teacher, returns how its batches are laid out.
        autocast: makes the context in which a model runs.

    Attributes:
        left_out: how many samples had no number of their teacher, so that nothing was learned of
            it, as far as :meth:`tell` told; the trainer that logs them counts from 0 again.
    """

    def __init__(
        self,
        references: Mapping[str, RefModel],
        padding: Sequence[Callable[[], Padding]],
        settings: TeacherSettings,
        autocast: Callable[[], AbstractContextManager],
        processes: Processes,
    ):
        self.names, self.references = list(references), list(references.values())
        self.settings, self.autocast, self.processes = settings, autocast, processes
        self._padding = padding
        self.left_out = 0
        self._untold: list[tuple[Callable[[], Tensor], int, Sequence[int]]] = []

    def terms(
        self, part: Experience, v: Tensor | None, denominator: Tensor | float
    ) -> tuple[TeacherTerm, ...]:
        """The terms of a pass, with the hidden states of its teachers.

        Args:
            v: weights of each sample's tokens, [B]; None: 1.
        """
        self.tell()
        tokens = part.teacher_tokens
        if tokens is None:
            tokens = replace(part.tokens, experts=None, boundaries=None)
        counts = tokens.response_mask.sum(-1)
        device = tokens.input_ids.device
        numbers = tokens.teachers or [0] * len(tokens)
        ends = counts.cumsum(0)
        made = []
        for number, reference in enumerate(self.references):
            samples = [i for i, which in enumerate(numbers) if which == number]
            total = int(counts[samples].sum())
            head: TeacherHead | TeacherTokens | None
            if isinstance(reference, AskedTeacher):
                head = reference.tokens(tokens, samples) if total else None
            else:
                head = self._head(number, tokens, samples)
            if head is None:
                continue
            rows = None
            if len(samples) < len(tokens):
                places = [torch.arange(int(ends[i] - counts[i]), int(ends[i])) for i in samples]
                rows = torch.cat(places).to(device)
            of_samples = counts[samples].to(device)
            weights = None
            if v is not None:
                weights = repeated_at_tokens(v[samples], of_samples, total)
            if isinstance(head, TeacherHead):
                names = [tokens.samples[i] for i in samples]
                head, weights = self._finite(head, weights, number, of_samples, names)
            settings = self.settings
            made.append(
                TeacherTerm(
                    head,
                    settings.coef,
                    settings.beta,
                    weights,
                    denominator,
                    settings.vocabulary,
                    rows,
                )
            )
        return tuple(made)

    def log_probs(
        self,
        samples: Samples,
        pad_token: int,
        device: torch.device,
        limit: PassLimit,
        *,
        shared: bool = False,
        learned: bool = True,
    ) -> list[Tensor]:
        """Log-probs [L] of each response by its teacher, on the host, 0 for tokens that are not
        learned, and where the teacher is a function; NaN or infinite where a teacher has no number.
        All processes call it together.

        Args:
            limit: the most samples and tokens of a forward pass.
            shared: whether all processes have the same samples, and each runs a share of them.
            learned: whether they are learned from: then :attr:`left_out` counts responses without a
                number, which are warned of.
        """
        batch = teacher_batch(samples, pad_token)
        if batch is None:
            batch = token_batch(replace(samples, experts=None), pad_token)
        numbers = batch.teachers or [0] * len(batch)
        found = [torch.zeros(len(mask)) for mask in samples.learned]
        for number, reference in enumerate(self.references):
            if isinstance(reference, AskedTeacher):
                continue
            chosen = [i for i, which in enumerate(numbers) if which == number]
            part = replace(batch.select(chosen or [0]), padding=self._padding[number]())
            score = self._over_vocabulary(reference)
            shares = None
            if shared:
                shares = shares_of(part, part.counting() or range(len(part)), self.processes)
            with self.autocast():
                scored = in_passes(part.to(device), score, limit, self.processes, shares)
            of_tokens = scored["logprobs"].float().cpu()[part.response_mask]
            own = samples.select(chosen or [0])
            for i, each in zip(chosen, to_column(own, of_tokens), strict=False):
                found[i] = each
            broken = [i for i in chosen if not bool(found[i].isfinite().all())]
            if broken and learned:
                self._leave_out(number, "log-probs", broken, len(chosen))
        return found

    def _over_vocabulary(self, reference: RefModel) -> ScorePart:
        """A function that scores tokens by a teacher over the vocabulary, without its padding."""
        options = {"temperature": self.settings.temperature, "values": False}
        size = self.settings.vocabulary
        if size is None:
            return scores_of(reference.score, **options)

        @torch.no_grad()
        def score(part: TokenBatch) -> dict[str, Tensor]:
            model_pass = part.model_pass
            request = scoring_request(part, model_pass, as_teacher=True, **options)
            head = reference.score(dict(model_pass.inputs), request).head
            assert head is not None
            bias = None if head.bias is None else head.bias[:size]
            head = head._replace(weight=head.weight[:size], bias=bias)
            logprobs = linear_logprobs(
                labels=request.labels, temperature=self.settings.temperature, **head._asdict()
            )
            return {"logprobs": logprobs}

        return score

    @torch.no_grad()
    def _head(self, number: int, tokens: TokenBatch, samples: Sequence[int]) -> TeacherHead | None:
        """A teacher's head, with its hidden states of some samples' learned tokens [M, H], sample
        after sample; None where there are none. A teacher that processes share is run as often by
        each of them."""
        reference = self.references[number]
        batch = replace(tokens, padding=self._padding[number]())
        counting = set(batch.counting())
        chosen = [i for i in samples if i in counting]
        limit = PassLimit(len(tokens), self.settings.micro_batch_tokens)
        parts = batch.parts(chosen, limit) if chosen else []
        times = len(parts)
        if is_spread(reference.policy if reference.model is None else reference.model):
            times = max(self.processes.objects(times))
        heads: list[TeacherHead] = []
        for k in range(times):
            of_part = batch.select(parts[k] if k < len(parts) else [0])
            model_pass = of_part.model_pass
            fields = {"temperature": self.settings.temperature, "values": False}
            request = scoring_request(of_part, model_pass, as_teacher=True, **fields)
            with self.autocast():
                head = reference.score(dict(model_pass.inputs), request).head
            assert head is not None
            if k < len(parts):
                heads.append(head)
        if not heads:
            return None
        if len(heads) == 1:
            return heads[0]
        order = [i for part in parts for i in part]
        counts = batch.response_mask.sum(-1)
        states = torch.cat([head.hidden for head in heads]).split(counts[order].tolist())
        by_sample = dict(zip(order, states, strict=True))
        return heads[0]._replace(hidden=torch.cat([by_sample[i] for i in sorted(by_sample)]))

    def _finite(
        self,
        head: TeacherHead,
        weights: Tensor | None,
        number: int,
        counts: Tensor,
        names: Sequence[int],
    ) -> tuple[TeacherHead, Tensor | None]:
        """The head and weights of tokens, without samples whose states are not all finite, of which
        :meth:`tell` tells. The samples' numbers in their batch are ``names``."""
        broken = ~head.hidden.isfinite().all(-1)
        places = torch.arange(len(counts), device=counts.device)
        sample = repeated_at_tokens(places, counts, len(broken))
        of_samples = torch.zeros_like(counts).index_add_(0, sample, broken.long()) > 0
        self._untold.append((later_on_host(torch.stack([of_samples, counts > 0])), number, names))
        if self.settings.raises:
            self.tell()
        out = of_samples[sample]
        weights = torch.ones_like(out, dtype=torch.float32) if weights is None else weights
        head.hidden.masked_fill_(out[:, None], 0.0)
        return head, weights.masked_fill(out, 0.0)

    def tell(self) -> None:
        """Warns of samples of the passes so far that were left out; or raises FloatingPointError.
        The host waits for the teachers of these passes, and not for what runs behind them."""
        untold, self._untold = self._untold, []
        for read, number, names in untold:
            out, counting = read()
            if bool(out.any()):
                which = [name for name, broken in zip(names, out.tolist(), strict=True) if broken]
                self._leave_out(number, "hidden states", which, int(counting.sum()))

    def _leave_out(self, number: int, what: str, which: Sequence[int], of: int) -> None:
        """Counts samples that a teacher has no number for, and warns; or raises
        FloatingPointError."""
        self.left_out += len(which)
        more = f" and {len(which) - 3} more" if len(which) > 3 else ""
        message = (
            f"teacher {self.names[number]!r} has {what} that are not finite in {len(which)} of "
            f"{of} responses of a pass (sample {', '.join(map(str, which[:3]))}{more})"
        )
        remedy = "load it in bfloat16 or float32 if it is in float16"
        if self.settings.raises:
            raise FloatingPointError(f"{message}: {remedy}")
        warnings.warn(f"{message}: nothing is learned of it there; {remedy}", stacklevel=3)
