"""The divergence from a teacher, from hidden states: both language-model heads fused in."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .argument_types import explains_types
from .checks import check_count
from .divergence import TEACHER_ARGUMENTS, TEACHER_SCHEMA, Compared, checked_teacher
from .first_order import first_order
from .head_pass import (
    HandOut,
    HeadPass,
    save_gradients,
    scaled_gradients,
    wanted_gradients,
    weights_and_total,
)
from .lm_head import (
    HEAD_ARGUMENTS,
    HEAD_SCHEMA,
    HEAD_TENSORS,
    HeadInputs,
    checked_head,
    fake_gradients,
    flat_head,
    split_head,
)
from .operators import new, operator, or_empty
from .ppo_loss import inverse_of
from .types import TeacherHead, TeacherTokens, TokenDivergences
from .vocab_parallel import VocabParallel


def _score(inputs: HeadInputs, compared: Compared, entropy: bool) -> TokenDivergences:
    """The results of a pass without gradients."""
    head = HeadPass(inputs, entropy, (False,) * 3, compared=compared)
    for _ in head:
        pass
    return _results(head)


def _results(head: HeadPass) -> TokenDivergences:
    assert head.found is not None
    entropies, of_teacher = (
        None if x is None else head.per_token(x)
        for x in (head.statistics.entropies, head.teacher_logprobs)
    )
    values, logprobs = head.found.values, head.statistics.logprobs
    return TokenDivergences(head.per_token(values), head.per_token(logprobs), entropies, of_teacher)


def _gradients(
    grads: tuple[Tensor | None, ...],
    inputs: HeadInputs,
    compared: Compared,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients by hidden states, weight and bias, of one more pass."""
    counted = inputs.counted
    by_divergences, by_logprobs, by_entropies = (
        None if g is None else torch.where(counted, g.reshape(-1).float(), 0.0) for g in grads[:3]
    )
    none = torch.zeros_like(counted, dtype=torch.float32)
    slopes = none if by_divergences is None else by_divergences
    by_logprobs = none if by_logprobs is None else by_logprobs
    by_logprobs = by_logprobs.masked_fill(inputs.outside, math.nan)
    learn = by_entropies is not None
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        head = HeadPass(inputs, learn, wanted, learn, compared)
        for rows in head:
            of_entropies = None if by_entropies is None else by_entropies[rows]
            head.backward(rows, by_logprobs[rows], of_entropies, slopes[rows])
        return head.gradients()


class _LinearKL(torch.autograd.Function):
    """Logits of both heads are computed once more for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: HeadInputs,
        compared: Compared,
        entropy: bool,
    ) -> tuple[Tensor | None, ...]:
        if any(ctx.needs_input_grad):
            tensors = [x for x in compared if isinstance(x, Tensor)]
            ctx.save_for_backward(hidden, inputs.weight, bias, *inputs.tensors()[3:], *tensors)
            ctx.inputs = inputs.with_tensors(*(None,) * HEAD_TENSORS)
            ctx.compared = [... if isinstance(x, Tensor) else x for x in compared]
            ctx.set_materialize_grads(False)
        *results, of_teacher = _score(inputs, compared, entropy)
        if of_teacher is not None:
            ctx.mark_non_differentiable(of_teacher)
        return *results, of_teacher

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        inputs = ctx.inputs.with_tensors(*(next(saved) for _ in range(HEAD_TENSORS)))
        compared = Compared(*(next(saved) if x is ... else x for x in ctx.compared))
        return *_gradients(grads, inputs, compared, ctx.needs_input_grad[:3]), None, None, None


@operator(f"({HEAD_SCHEMA}, {TEACHER_SCHEMA}, bool entropy) -> (Tensor, Tensor, Tensor, Tensor)")
def _linear_kl(*arguments: Any) -> tuple[Tensor, ...]:
    """The fields of ``TokenDivergences``, [N] each."""
    inputs, (*teacher, entropy) = split_head(arguments)
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        results = _score(inputs, Compared(*teacher), entropy)
    return tuple(or_empty(x, results[0]) for x in results)


@_linear_kl.register_fake
def _(hidden: Tensor, *others: Any) -> tuple[Tensor, ...]:
    of_head = others[HEAD_ARGUMENTS] is not None
    asked = (True, True, others[-1], of_head)
    return tuple(new(hidden, hidden.shape[0], wanted=want) for want in asked)


@operator(
    f"({HEAD_SCHEMA}, {TEACHER_SCHEMA}, Tensor? grad_divergences, Tensor? grad_logprobs, "
    "Tensor? grad_entropies, bool[] wanted) -> (Tensor, Tensor, Tensor)"
)
def _linear_kl_backward(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, others = split_head(arguments)
    teacher, (*grads, wanted) = others[:TEACHER_ARGUMENTS], others[TEACHER_ARGUMENTS:]
    gradients = _gradients(tuple(grads), inputs, Compared(*teacher), tuple(wanted))
    return tuple(or_empty(x, inputs.hidden) for x in gradients)


@_linear_kl_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return fake_gradients(arguments[:3], arguments[-1])


def _save_for_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *arguments, ctx.entropy = inputs
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in arguments]
    ctx.places = [i for i, x in enumerate(arguments) if isinstance(x, Tensor)]
    ctx.save_for_backward(*(x for x in arguments if isinstance(x, Tensor)))
    ctx.set_materialize_grads(False)


@first_order
def _operator_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    arguments = list(ctx.numbers)
    for i, x in zip(ctx.places, ctx.saved_tensors, strict=True):
        arguments[i] = x
    by_entropies = grads[2] if ctx.entropy else None
    wanted = list(ctx.needs_input_grad[:3])
    gradients = _linear_kl_backward(*arguments, *grads[:2], by_entropies, wanted)
    kept = (x if want else None for x, want in zip(gradients, wanted, strict=True))
    return *kept, *(None,) * (len(arguments) + 1 - 3)


_linear_kl.register_autograd(_operator_gradients, setup_context=_save_for_gradients)


@torch.no_grad()
def _loss(
    inputs: HeadInputs,
    compared: Compared,
    weights: Tensor,
    denominator: Tensor,
    entropy: bool,
    wanted: tuple[bool, ...],
) -> tuple[Tensor, TokenDivergences, tuple[Tensor | None, ...]]:
    """The loss, per-token results, and the wanted gradients by hidden states, weight and bias."""
    weights = weights * inverse_of(denominator)
    head = HeadPass(inputs, entropy, wanted, compared=compared)
    for rows in head:
        if head.wanted:
            # A label out of range has a log-prob of NaN, and so it gets a gradient of NaN.
            logprobs = head.statistics.logprobs[rows]
            slopes = torch.where(logprobs.isnan(), logprobs, 0.0)
            head.backward(rows, slopes, None, weights[rows])
    results = _results(head)
    loss = (results.divergences.reshape(-1) * weights).sum()
    return loss, results, head.gradients()


@operator(
    f"({HEAD_SCHEMA}, {TEACHER_SCHEMA}, Tensor weights, Tensor denominator, bool entropy, "
    "bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def _linear_kl_loss(*arguments: Any) -> tuple[Tensor, ...]:
    """Loss and per-token results, and the wanted gradients by the first three arguments."""
    inputs, others = split_head(arguments)
    *teacher, weights, denominator, entropy, wanted = others
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        loss, results, gradients = _loss(
            inputs, Compared(*teacher), weights, denominator, entropy, tuple(wanted)
        )
    found = (or_empty(x, loss) for x in results)
    return loss, *found, *(or_empty(x, inputs.hidden) for x in gradients)


@_linear_kl_loss.register_fake
def _(hidden: Tensor, *others: Any) -> tuple[Tensor, ...]:
    asked = (True, True, others[-2], others[HEAD_ARGUMENTS] is not None)
    results = (new(hidden, hidden.shape[0], wanted=want) for want in asked)
    return new(hidden), *results, *fake_gradients((hidden, *others[:2]), others[-1])


_linear_kl_loss.register_autograd(scaled_gradients, setup_context=save_gradients)


def _checked(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: TeacherHead | TeacherTokens,
    beta: float,
    vocabulary: int | None,
    bias: Tensor | None,
    *others: Any,
) -> tuple[HeadInputs, Compared]:
    """Checks the arguments that ``linear_kl`` and ``linear_kl_loss`` share."""
    whole, (vocab_parallel, _, check, _) = weight, others[-4:]
    if vocabulary is not None:
        check_count("vocabulary", vocabulary, least=1)
        if vocab_parallel is not None:
            raise ValueError(
                "vocabulary does not go with vocab_parallel, whose ranges say what is real: give "
                "the process that has the rows of padding weight and bias without them"
            )
        for name, x in (("weight", weight), ("teacher.weight", getattr(teacher, "weight", None))):
            if x is not None and x.dim() == 2 and x.shape[0] < vocabulary:
                raise ValueError(
                    f"{name} has {x.shape[0]} rows, less than vocabulary={vocabulary}: it must "
                    "have one for each token"
                )
        weight, bias = weight[:vocabulary], None if bias is None else bias[:vocabulary]
    inputs = checked_head(hidden, weight, labels, bias, *others)
    if vocabulary is not None and not torch.compiler.is_compiling() and inputs.leaf is not whole:
        # The gradient is made with its rows of padding, where they would be added in a copy.
        leaf = whole if torch.is_grad_enabled() else None
        inputs = inputs._replace(weight=inputs.weight.detach(), leaf=leaf)
    return inputs, checked_teacher(teacher, beta, inputs, vocabulary, check)


@explains_types
def linear_kl(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: TeacherHead | TeacherTokens,
    *,
    beta: float = 1.0,
    vocabulary: int | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: Tensor | None = None,
    entropy: bool = False,
    shift: bool | int = False,
    vocab_parallel: VocabParallel | None = None,
    workspace_bytes: int | None = None,
    check_labels: bool = False,
    backend: str = "auto",
) -> TokenDivergences:
    """The divergence of the student's distribution p from the teacher's q, per token, over the
    vocabulary:

        KL(q || p) = Σ_v q_v (log q_v - log p_v) at β = 0,    KL(p || q) at β = 1,
        β·KL(q || m) + (1 - β)·KL(p || m) between, with m = (1 - β)·p + β·q.

    The ends are other functions than the limits, which are 0: at β = 1e-3 the divergence is some
    thousandth of that at 0. Both softmaxes have the temperature T; there is no factor of T².

    Neither side's logits [N, V] ever exist. Forward computes them in chunks of rows, and backward
    once more: 2·N·V·H flops for the student forward and 6 backward, 2·N·V·H' for the teacher each
    time. Where weights of the tokens are known, ``linear_kl_loss`` computes each once. Products
    are rounded to their head's dtype, as a model rounds its own logits; everything after is fp32.

    Args:
        hidden, weight, labels, bias, temperature, softcap, logit_scale, mask, shift: the student's,
            as for ``linear_logprobs``. Labels are for log-probs alone, and -100 masks.
        teacher: a :class:`TeacherHead`, which gets no gradient, or :class:`TeacherTokens`. With a
            shift, the teacher's tensors are at the positions of the results, [..., T - n, ·].
        beta: β in [0, 1], as in TRL.
        vocabulary: the number of tokens, where either head ends in rows of padding: these have no
            part in either distribution, and a gradient of 0.
        entropy: also return the student's entropies, with their gradient.
        vocab_parallel: as for ``linear_logprobs``; the teacher's weight and bias are the rows of
            the same range. Each chunk of rows is three exchanges.
        workspace_bytes: of logits of both sides that exist at a time, by default as for
            ``linear_logprobs``.
        check_labels: as for ``linear_logprobs``, and the same of :class:`TeacherTokens`.
        backend: as for ``linear_logprobs``.

    Returns:
        :class:`TokenDivergences`: divergences in nats, log-probs of the labels and entropies, all
        differentiable, and the teacher's log-probs of the labels. Where one of the two allows a
        token that the other does not, KL may be infinite, and has no gradient then; between the
        ends it is finite. A NaN of the teacher gives NaN in its rows.

    Raises:
        TypeError, ValueError: as ``linear_logprobs``; β outside of [0, 1]; a teacher's tensors of
            other shapes or devices, or that require a gradient; heads of different numbers of rows
            without ``vocabulary``, or fewer than that; on CPUs, ``TeacherTokens`` that are no
            distribution (elsewhere their results are NaN).

    Source: Agarwal et al., 2024, "On-Policy Distillation of Language Models" (arXiv:2306.13649);
    β as in TRL 1.16's DistillationTrainer.
    """
    inputs, compared = _checked(
        hidden, weight, labels, teacher, beta, vocabulary, bias, temperature, softcap, logit_scale,
        mask, shift, vocab_parallel, workspace_bytes, check_labels, backend,
    )  # fmt: skip
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        if not torch.compiler.is_compiling():
            return TokenDivergences(
                *_LinearKL.apply(
                    inputs.hidden, inputs.weight_leaf, inputs.bias, inputs, compared, entropy
                )
            )
        results = _linear_kl(*flat_head(inputs), *compared, entropy)
        return _per_token(results, inputs, compared, entropy, detached=False)


@explains_types
def linear_kl_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: TeacherHead | TeacherTokens,
    *,
    beta: float = 1.0,
    vocabulary: int | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    denominator: float | Tensor | None = None,
    entropy: bool = False,
    shift: bool | int = False,
    vocab_parallel: VocabParallel | None = None,
    workspace_bytes: int | None = None,
    check_labels: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, TokenDivergences]:
    """Σ w·``linear_kl(hidden, weight, labels, teacher)`` / denominator.

    As in ``linear_ppo_loss`` a chunk of logits gives divergences and gradients while it is there:
    6·N·V·H + 2·N·V·H' flops, the least that there is, and backward multiplies gradients with its
    own, once. The same goes for their rounding: under a GradScaler, use ``linear_kl``.

    Args:
        hidden, weight, labels, teacher, beta, vocabulary, bias, temperature, softcap, logit_scale,
            mask, shift, vocab_parallel, workspace_bytes, check_labels, backend: as for
            ``linear_kl``. With several chunks of rows the weight's gradient is summed in fp32,
            V·H·4 bytes.
        weights: [...] of the tokens, 1 where None; not differentiable. An infinite divergence makes
            the loss no number with any weight, and one of 0, too: mask its token.
        denominator: a number or a 0-d tensor; the number of tokens that count where None. Where it
            is 0, so is the loss.
        entropy: also return the student's entropies.

    Returns:
        The loss, 0-d fp32, differentiable with respect to ``hidden``, ``weight`` and ``bias``; and
        :class:`TokenDivergences`, detached.

    Raises:
        TypeError, ValueError: as ``linear_kl``; weights of another shape or that require a
            gradient.
        RuntimeError: a second backward through the same call, unless it is compiled.
    """
    inputs, compared = _checked(
        hidden, weight, labels, teacher, beta, vocabulary, bias, temperature, softcap, logit_scale,
        mask, shift, vocab_parallel, workspace_bytes, check_labels, backend,
    )  # fmt: skip
    token_weights, total = weights_and_total(inputs, weights, denominator, shift)
    wanted = wanted_gradients(inputs.hidden, inputs.weight_leaf, inputs.bias)
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        if torch.compiler.is_compiling():
            loss, *results = _linear_kl_loss(
                *flat_head(inputs), *compared, token_weights, total, entropy, wanted
            )
            return loss, _per_token(results[:4], inputs, compared, entropy, detached=True)
        loss, results, gradients = _loss(inputs, compared, token_weights, total, entropy, wanted)
        loss = HandOut.apply(
            inputs.hidden, inputs.weight_leaf, inputs.bias, loss, gradients, inputs.head,
            "linear_kl_loss",
        )  # fmt: skip
    return loss, results


def _per_token(
    results: Any, inputs: HeadInputs, compared: Compared, entropy: bool, detached: bool
) -> TokenDivergences:
    """An operator's results [N] in the labels' shape, None where not asked for."""
    asked = (True, True, entropy, compared.hidden is not None)
    found = [x.view(inputs.shape) if want else None for x, want in zip(results, asked, strict=True)]
    first = 0 if detached else 3  # the teacher's log-probs never have a gradient
    found[first:] = [None if x is None else x.detach() for x in found[first:]]
    return TokenDivergences(*found)  # type: ignore[arg-type]
