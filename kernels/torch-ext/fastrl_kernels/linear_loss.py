"""The PPO loss and the negative log-likelihood from hidden states: the language-model head and the
loss in one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .checks import check_constant, check_device, check_like, counts
from .gemm import add_product_, product
from .lm_head import (
    HEAD_SCHEMA,
    HeadInputs,
    checked_head,
    fake_gradients,
    flat_head,
    row_chunks,
    split_head,
)
from .operators import new, operator, or_empty
from .ppo_loss import (
    apply,
    checked,
    denominator_of,
    inverse_of,
    policy_slopes,
    token_weights_of,
)
from .types import (
    KLTerm,
    LinearLossStats,
    LossStats,
    PPOConstants,
    PPOSettings,
    RowGradients,
    RowStatistics,
)
from .workspace import Workspace

# d loss/d log π [r] of the log-probs [r] of some rows; NaN where the log-prob is.
TokenGradients = Callable[[Tensor, slice], Tensor]


class TokenObjective(Protocol):
    """What the head is fused with: a loss whose gradient by a token's log-prob needs no other's."""

    @property
    def op(self) -> str: ...

    def token_gradients(self) -> TokenGradients: ...

    def loss(self, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and its statistics, from log-probs [..., T]."""


class PPOObjective(NamedTuple):
    """The PPO loss of N tokens as far as it is known before their log-probs are."""

    constants: PPOConstants  # tensors [..., T]
    settings: PPOSettings
    backend: str

    @property
    def op(self) -> str:
        return "linear_ppo_loss"

    def token_gradients(self) -> TokenGradients:
        constants, settings = self.constants, self.settings
        weights = inverse_of(denominator_of(constants, settings))
        by_tokens = token_weights_of(constants, settings)
        weights = weights if by_tokens is None else weights * by_tokens
        weights = weights.expand(constants.mask.shape).reshape(-1)
        flat = [x if x is None or x.dim() == 0 else x.reshape(-1) for x in constants]

        def gradients(logprobs: Tensor, rows: slice) -> Tensor:
            at: Any = (x if x is None or x.dim() == 0 else x[rows] for x in flat)
            slopes = policy_slopes(logprobs, PPOConstants(*at), settings, self.backend)
            return slopes.mul_(weights[rows])

        return gradients

    def loss(self, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        return apply(logprobs, None, *self)


class NLLObjective(NamedTuple):
    """-Σ w·log π / denominator over N tokens."""

    weights: Tensor  # [N] fp32, 0 where a token does not count
    denominator: Tensor  # 0-d fp32

    @property
    def op(self) -> str:
        return "linear_nll_loss"

    def _token_weights(self) -> Tensor:
        return self.weights * inverse_of(self.denominator)

    def token_gradients(self) -> TokenGradients:
        weights = self._token_weights()
        return lambda logprobs, rows: torch.where(logprobs.isnan(), logprobs, -weights[rows])

    def loss(self, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and no statistics."""
        return -(logprobs.reshape(-1) * self._token_weights()).sum(), logprobs.new_empty(0)


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


def _forward(
    inputs: HeadInputs, objective: TokenObjective, entropy: bool, wanted: tuple[bool, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[Tensor | None, ...]]:
    """The loss, its statistics, log-probs and entropies, and the wanted gradients of the loss by
    hidden states, weight and bias."""
    hidden, weight = inputs.hidden, inputs.weight
    n, vocabulary = len(hidden), len(weight)
    statistics = RowStatistics.empty(hidden, n, entropy, ())
    dtype = inputs.head.chunk_dtype(hidden)
    chunks = row_chunks(n, vocabulary, dtype.itemsize, inputs.workspace)
    longest = max((rows.stop - rows.start for rows in chunks), default=0)
    workspace = Workspace(hidden, longest, vocabulary, dtype)
    gradients = _Gradients(hidden, weight, inputs.bias, wanted, len(chunks))
    token_gradients = objective.token_gradients() if gradients.wanted else None
    for rows in chunks:
        x = workspace.chunk(rows.stop - rows.start)
        inputs.fill(x, rows)
        inputs.statistics(x, rows, statistics, once=gradients.wanted)
        if token_gradients is not None:
            upstream = RowGradients(token_gradients(statistics.logprobs[rows], rows), None)
            inputs.gradients_(x, rows, 0, statistics, upstream, once=True)
            gradients.add(x, rows)
    workspace.release()

    def per_token(x: Tensor) -> Tensor:
        return x.masked_fill(~inputs.counted, 0).view(inputs.shape)

    logprobs = per_token(statistics.logprobs)
    entropies = None if statistics.entropies is None else per_token(statistics.entropies)
    loss, numbers = objective.loss(logprobs)
    return loss, numbers, logprobs, entropies, gradients.results()


class _LinearLoss(torch.autograd.Function):
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
        *results, ctx.gradients = _forward(inputs, objective, entropy, ctx.needs_input_grad[:3])
        ctx.head, ctx.op = inputs.head, objective.op
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
                ctx.head.scale_(x, grad)
        return *gradients, None, None, None


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.wanted, ctx.arguments = inputs[-1], len(inputs)
    ctx.save_for_backward(*output[-3:])
    ctx.set_materialize_grads(False)


def _scaled_gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * ctx.arguments
    gradients = zip(ctx.saved_tensors, ctx.wanted, strict=True)
    scaled = ((x * grad).to(x.dtype) if want else None for x, want in gradients)
    return *scaled, *(None,) * (ctx.arguments - 3)


def _wanted(*tensors: Tensor | None) -> list[bool]:
    return [x is not None and x.requires_grad and torch.is_grad_enabled() for x in tensors]


@operator(
    f"({HEAD_SCHEMA}, Tensor old_logprobs, Tensor advantages, Tensor mask, Tensor? weights, "
    "Tensor? ref_logprobs, Tensor? denominator, Tensor? token_weights, float low, float high, "
    "float? dual_clip, str aggregate, float? denominator_number, float kl_coef, str kl_kind, "
    "bool entropy, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def _linear_ppo_loss(*arguments: Any) -> tuple[Tensor, ...]:
    """The results, and the gradients that are wanted of the loss by the first three."""
    inputs, others = split_head(arguments)
    old_logprobs, advantages, mask, weights, *tensors = others[:7]
    low, high, dual_clip, aggregate, number, kl_coef, kl_kind, entropy, wanted = others[7:]
    constants = PPOConstants(old_logprobs, advantages, mask, weights, None, None, *tensors)
    settings = PPOSettings(low, high, dual_clip, aggregate, number, 0.0, 0.0, kl_coef, kl_kind)
    objective = PPOObjective(constants, settings, inputs.backend)
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        *results, entropies, gradients = _forward(
            inputs._replace(shape=mask.shape), objective, entropy, tuple(wanted)
        )
    results.append(or_empty(entropies, results[0]))
    return *results, *(or_empty(x, inputs.hidden) for x in gradients)


@_linear_ppo_loss.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    hidden, mask, (entropy, wanted) = arguments[0], arguments[13], arguments[-2:]
    return (
        new(hidden),
        new(hidden, len(LossStats.NAMES)),
        new(hidden, *mask.shape),
        new(hidden, *mask.shape, wanted=entropy),
        *fake_gradients(arguments[:3], wanted),
    )


_linear_ppo_loss.register_autograd(_scaled_gradients, setup_context=_save_gradients)


def _compiled_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: HeadInputs,
    objective: PPOObjective,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    c = objective.constants
    low, high, dual_clip, aggregate, number, _, _, kl_coef, kl_kind = objective.settings
    loss, numbers, logprobs, entropies, *_ = _linear_ppo_loss(
        *flat_head(inputs), c.old_logprobs, c.advantages, c.mask, c.weights, c.ref_logprobs,
        c.denominator, c.token_weights, low, high, dual_clip, aggregate, number, kl_coef, kl_kind,
        entropy, _wanted(hidden, weight, bias),
    )  # fmt: skip
    return loss, numbers.detach(), logprobs.detach(), entropies.detach() if entropy else None


@operator(
    f"({HEAD_SCHEMA}, Tensor weights, Tensor denominator, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def _linear_nll_loss(*arguments: Any) -> tuple[Tensor, ...]:
    """Loss and log-probs, and the gradients that are wanted of the loss by the first three."""
    inputs, (weights, denominator, wanted) = split_head(arguments)
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        loss, _, logprobs, _, gradients = _forward(
            inputs, NLLObjective(weights, denominator), False, tuple(wanted)
        )
    return loss, logprobs, *(or_empty(x, inputs.hidden) for x in gradients)


@_linear_nll_loss.register_fake
def _(hidden: Tensor, *others: Any) -> tuple[Tensor, ...]:
    gradients = fake_gradients((hidden, *others[:2]), others[-1])
    return new(hidden), new(hidden, hidden.shape[0]), *gradients


_linear_nll_loss.register_autograd(_scaled_gradients, setup_context=_save_gradients)


def _compiled_nll_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: HeadInputs,
    objective: NLLObjective,
    _entropy: bool,
) -> tuple[Tensor, None, Tensor, None]:
    wanted = _wanted(hidden, weight, bias)
    loss, logprobs, *_ = _linear_nll_loss(*flat_head(inputs), *objective, wanted)
    return loss, None, logprobs.detach().view(inputs.shape), None


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
    check_like("old_logprobs", old_logprobs, "labels", labels)
    _, constants, settings = checked(
        old_logprobs, old_logprobs, advantages, counts(labels, mask), cliprange, None, kl,
        dual_clip, weights, token_weights, aggregate, denominator,
    )  # fmt: skip
    for name, tensor in constants._asdict().items():
        if tensor is not None:
            check_device(name, tensor, "hidden", hidden)
    objective = PPOObjective(constants, settings, inputs.backend)
    run: Any = _compiled_ppo_loss if torch.compiler.is_compiling() else _LinearLoss.apply
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        loss, numbers, logprobs, entropies = run(
            inputs.hidden, inputs.weight, inputs.bias, inputs, objective, entropy
        )
    mean = torch.full_like(numbers[:1], math.nan)
    if entropies is not None:
        tokens = numbers[LossStats.NAMES.index("tokens")].clamp(min=1)
        mean = (entropies.sum() / tokens).view(1)
    return loss, LinearLossStats(torch.cat([numbers, mean]), logprobs, entropies)


def linear_nll_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    denominator: float | Tensor | None = None,
    workspace_bytes: int | None = None,
    check_labels: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """-Σ w·``linear_logprobs(hidden, weight, labels)`` / denominator.

    As in ``linear_ppo_loss`` a chunk of logits gives log-probs and gradients while it is there:
    6·N·V·H flops, and no logits are kept for backward, which multiplies gradients with its own,
    once. The same goes for their rounding: under a GradScaler, use ``linear_logprobs``.

    Args:
        hidden, weight, labels, bias, softcap, logit_scale, mask: as for ``linear_logprobs``, and so
            is the rounding. With several chunks of rows the weight's gradient is summed in fp32,
            V·H·4 bytes.
        weights: [...] of the tokens, 1 where None; not differentiable.
        denominator: a number or a 0-d tensor; the number of tokens that count where None. Where it
            is 0, so is the loss.
        workspace_bytes, check_labels, backend: as for ``linear_logprobs``.

    Returns:
        The loss, 0-d fp32, differentiable with respect to ``hidden``, ``weight`` and ``bias``; and
        the log-probs [...] fp32, detached, 0 where masked.

    Raises:
        TypeError, ValueError: as ``linear_logprobs``; weights of another shape or that require a
            gradient.
        RuntimeError: a second backward through the same call, unless it is compiled.
    """
    inputs = checked_head(
        hidden, weight, labels, bias, 1.0, softcap, logit_scale, mask, workspace_bytes,
        check_labels, backend,
    )  # fmt: skip
    token_weights = inputs.counted.float()
    if weights is not None:
        check_like("weights", weights, "labels", labels)
        check_device("weights", weights, "hidden", hidden)
        check_constant("weights", weights)
        token_weights = torch.where(inputs.counted, weights.reshape(-1).float(), 0.0)
    if denominator is None:
        total = inputs.counted.sum().float()
    elif isinstance(denominator, Tensor):
        if denominator.dim() or denominator.requires_grad:
            raise ValueError("denominator must be a number or a 0-d tensor without a gradient")
        total = denominator.to(token_weights)
    else:
        total = torch.full((), float(denominator), device=hidden.device)
    objective = NLLObjective(token_weights, total)
    run: Any = _compiled_nll_loss if torch.compiler.is_compiling() else _LinearLoss.apply
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        loss, _, logprobs, _ = run(
            inputs.hidden, inputs.weight, inputs.bias, inputs, objective, False
        )
    return loss, logprobs
