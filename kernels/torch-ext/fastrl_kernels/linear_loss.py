"""The PPO loss from hidden states: the language-model head and the loss in one."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .checks import check_device, check_float, check_same_shape, counts
from .head import (
    Workspace,
    add_product_,
    product,
    row_chunks,
)
from .head_inputs import HeadInputs, checked_head
from .head_rows import RowStatistics, Slopes
from .ppo_loss import (
    Constants,
    KLTerm,
    LossStats,
    Settings,
    apply,
    checked,
    denominator_of,
    policy_slopes,
    token_weights_of,
)


class LinearLossStats(LossStats):
    """:class:`LossStats` with the mean ``entropy``, NaN where it was not asked for.

    Per token it has ``logprobs`` and ``entropies`` (or None) [..., T]: fp32, detached, 0 where
    masked.
    """

    NAMES: ClassVar[tuple[str, ...]] = (*LossStats.NAMES, "entropy")
    __slots__ = ("entropies", "logprobs")

    def __init__(self, tensor: Tensor, logprobs: Tensor, entropies: Tensor | None) -> None:
        super().__init__(tensor)
        self.logprobs = logprobs
        self.entropies = entropies


class Objective(NamedTuple):
    """The loss of N tokens as far as it is known before their log-probs are."""

    constants: Constants  # tensors [..., T]
    settings: Settings
    backend: str

    @property
    def op(self) -> str:
        return "linear_ppo_loss"

    def token_weights(self) -> Tensor:
        """What each token's objective is multiplied with in the loss, [N]."""
        denominator = denominator_of(self.constants, self.settings)
        inverse = torch.where(denominator == 0, 0.0, 1.0 / denominator)
        by_tokens = token_weights_of(self.constants, self.settings)
        weights = inverse if by_tokens is None else inverse * by_tokens
        return weights.expand(self.constants.mask.shape).reshape(-1)

    def flat(self) -> Objective:
        """The same tensors as [N]."""
        tensors = (x if x is None or x.dim() == 0 else x.reshape(-1) for x in self.constants)
        return self._replace(constants=Constants(*tensors))  # type: ignore[arg-type]

    def slopes(self, logprobs: Tensor, rows: slice, weights: Tensor) -> Tensor:
        """d loss/d log π of some tokens; of a flat objective."""
        at = Constants(*(x if x is None or x.dim() == 0 else x[rows] for x in self.constants))  # type: ignore[arg-type]
        return policy_slopes(logprobs, at, self.settings, self.backend).mul_(weights[rows])

    def loss(self, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and LossStats' tensor, from log-probs [..., T]."""
        return apply(logprobs, None, *self)


class TokenObjective(Protocol):
    """What the head is fused with: a loss whose slopes by a token's log-prob need no other's."""

    @property
    def op(self) -> str: ...

    def token_weights(self) -> Tensor: ...

    def flat(self) -> TokenObjective: ...

    def slopes(self, logprobs: Tensor, rows: slice, weights: Tensor) -> Tensor: ...

    def loss(self, logprobs: Tensor) -> tuple[Tensor, Tensor]: ...


def forward(
    inputs: HeadInputs, objective: TokenObjective, entropy: bool, wanted: tuple[bool, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[Tensor | None, ...]]:
    """The loss, its statistics, log-probs and entropies, and the wanted gradients of the loss by
    hidden states, weight and bias."""
    hidden, weight, bias, work = inputs.hidden, inputs.weight, inputs.bias, inputs.rows
    n, vocabulary = len(hidden), len(weight)
    statistics = RowStatistics.empty(hidden, n, entropy, ())
    dtype = work.chunk_dtype(hidden)
    chunks = row_chunks(n, vocabulary, dtype.itemsize, inputs.workspace)
    longest = max((rows.stop - rows.start for rows in chunks), default=0)
    workspace = Workspace(hidden, longest, vocabulary, dtype)
    gradients = _Gradients(hidden, weight, bias, wanted, len(chunks))
    flat, weights = objective.flat(), objective.token_weights()
    for rows in chunks:
        x, labels = workspace.chunk(rows.stop - rows.start), inputs.labels[rows]
        transform, row = inputs.transform.at(rows), statistics.at(rows)
        work.signals(x, hidden[rows], weight, bias, transform)
        work.statistics(x, labels, transform, row, once=gradients.wanted)
        if gradients.wanted:
            # NaN where the log-prob is: where a label is out of range.
            slopes = Slopes(flat.slopes(row.logprobs, rows, weights), None)
            work.gradients_(x, 0, labels, transform, row, slopes, once=True)
            gradients.add(x, rows)
    workspace.release()

    def per_token(x: Tensor) -> Tensor:
        return x.masked_fill(~inputs.counted, 0).view(inputs.shape)

    logprobs = per_token(statistics.logprobs)
    entropies = None if statistics.entropies is None else per_token(statistics.entropies)
    loss, numbers = objective.loss(logprobs)
    return loss, numbers, logprobs, entropies, gradients.results()


class LinearLoss(torch.autograd.Function):
    """Gradients are computed forward, while the logits are there; backward hands them out."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: HeadInputs,
        objective: TokenObjective,
        entropy: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        *results, ctx.gradients = forward(inputs, objective, entropy, ctx.needs_input_grad[:3])
        ctx.rows, ctx.op = inputs.rows, objective.op
        ctx.mark_non_differentiable(*(x for x in results[1:] if x is not None))
        ctx.set_materialize_grads(False)
        return tuple(results)  # type: ignore[return-value]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                f"{ctx.op} hands its gradients out once: call it again, or make the loss of "
                "linear_logprobs where a graph is retained"
            )
        for x in gradients:
            if x is not None:
                ctx.rows.scale_(x, grad)
        return *gradients, None, None, None


class _Gradients:
    """Sums up the gradients that are wanted, chunk of rows by chunk of rows."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: tuple[bool, ...],
        chunks: int,
    ) -> None:
        self.wanted = any(wanted)
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.dhidden = torch.empty_like(hidden) if wanted[0] else None
        self.dweight = self.dbias = None
        if wanted[1]:
            # One chunk is rounded once as it is; several are summed in fp32.
            new = torch.empty_like if chunks else torch.zeros_like  # nobody writes it then
            self.dweight = new(weight, dtype=weight.dtype if chunks == 1 else torch.float32)
        if bias is not None and wanted[2]:
            self.dbias = torch.zeros_like(bias, dtype=torch.float32)

    def add(self, x: Tensor, rows: slice) -> None:
        """x [r, V], gradients of products."""
        if self.dhidden is not None:
            product(self.dhidden[rows], x, self.weight)
        if self.dweight is not None and rows.start == 0:
            product(self.dweight, x.t(), self.hidden[rows])
        elif self.dweight is not None:
            add_product_(self.dweight, x.t(), self.hidden[rows])
        if self.dbias is not None:
            self.dbias += x.sum(0, dtype=torch.float32)

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """By hidden states, weight and bias, in their dtypes."""
        return (
            self.dhidden,
            None if self.dweight is None else self.dweight.to(self.weight.dtype),
            None if self.dbias is None or self.bias is None else self.dbias.to(self.bias.dtype),
        )


def linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cliprange: float | tuple[float, float] = 0.2,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    kl: KLTerm | None = None,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    aggregate: str = "token-mean",
    denominator: float | Tensor | None = None,
    entropy: bool = False,
    workspace_bytes: int | None = None,
    check_labels: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, LinearLossStats]:
    """``ppo_loss(linear_logprobs(hidden, weight, labels), old_logprobs, advantages, mask)``.

    The weight of every token in the loss is known before its log-prob is, so that a chunk of logits
    gives log-probs, loss and gradients while it is there: 6·N·V·H flops, where computing logits
    once more for backward takes 8. Gradients exist as soon as the loss does; backward multiplies
    them with its own, once.

    So gradients are rounded to the tensors' dtype before a factor from upstream, such as a
    GradScaler's scale, reaches them, and in fp16 small ones underflow whatever the scale: train in
    bf16 or fp32, or use ``linear_logprobs`` with ``ppo_loss``, whose gradients are scaled first.

    Args:
        hidden, weight, labels, bias, temperature, softcap, logit_scale: as for ``linear_logprobs``,
            and so is the rounding; labels [..., T]. With several chunks of rows the weight's
            gradient is summed in fp32, V·H·4 bytes.
        old_logprobs, advantages, mask, cliprange, kl, dual_clip, weights, token_weights, aggregate,
            denominator: as for ``ppo_loss``, per token [..., T]. A label of -100 counts as masked.
        entropy: also compute entropies, as a statistic without a gradient.
        workspace_bytes, check_labels, backend: as for ``linear_logprobs``.

    Returns:
        The loss, 0-d fp32, differentiable with respect to ``hidden``, ``weight`` and ``bias``; and
        its :class:`LinearLossStats`, detached. For a value loss or an entropy bonus, add their own.

    Raises:
        TypeError, ValueError: as ``linear_logprobs`` and ``ppo_loss``.
        RuntimeError: a second backward through the same call, unless it is compiled.
    """
    inputs = checked_head(
        hidden, weight, labels, bias, temperature, softcap, logit_scale, mask, workspace_bytes,
        check_labels, backend,
    )  # fmt: skip
    if labels.dim() == 0:
        raise ValueError("labels has no time dimension: pass hidden [..., T, H], labels [..., T]")
    check_float("old_logprobs", old_logprobs)
    check_same_shape("old_logprobs", old_logprobs, "labels", labels)
    _, constants, settings = checked(
        old_logprobs, old_logprobs, advantages, counts(labels, mask), cliprange, None, kl,
        dual_clip, weights, token_weights, aggregate, denominator,
    )  # fmt: skip
    for name, tensor in constants._asdict().items():
        if tensor is not None:
            check_device(name, tensor, "hidden", hidden)
    objective = Objective(constants, settings, inputs.backend)
    run: Any = LinearLoss.apply
    if torch.compiler.is_compiling():
        from .compiled_head import linear_ppo_loss as run
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        loss, numbers, logprobs, entropies = run(
            inputs.hidden, inputs.weight, inputs.bias, inputs, objective, entropy
        )
    mean = torch.full_like(numbers[:1], math.nan)
    if entropies is not None:
        tokens = numbers[LossStats.NAMES.index("tokens")].clamp(min=1)
        mean = (entropies.sum() / tokens).view(1)
    return loss, LinearLossStats(torch.cat([numbers, mean]), logprobs, entropies)
