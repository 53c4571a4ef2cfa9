"""Ways to run a model's LM head on the requested rows: fused with the loss, or by itself.

:func:`choose_head` takes the first of :class:`FusedHead`, :class:`RowHead` and :class:`FullHead`
that agrees with the model's own logits.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

import fastrl_kernels
from fastrl.models.asked_once import asked_once
from fastrl.models.products import has_own_forward
from fastrl.models.scoring import (
    ScoringRequest,
    TeacherScores,
    TokenNLL,
    TokenScores,
    score_logits,
)
from fastrl.models.sharding import is_spread, of_fsdp, seen_by_fsdp
from fastrl.models.tied_embedding import sparse_embedding_gradient
from fastrl.models.utils import base_of
from fastrl_kernels.types import LogitTransform

Inputs = dict[str, Any]
_TOLERANCE = 1e-3  # of a head's results, compared with those of FullHead

# From the model's output: scores without values, and the hidden states [N, H] that a value head
# reads.
Results = Callable[[Any], tuple[TokenScores, Tensor]]


class Head(Protocol):
    """One way of scoring the requested rows."""

    options: ClassVar[dict[str, Any]]  # further arguments of the model's forward

    def scoring(self, model: Any, request: ScoringRequest) -> AbstractContextManager[Results]:
        """Context of one call of the model, whose output the yielded function turns into scores."""


class FusedHead:
    """Computes log-probs from the head's input and weight; the model's own head gets no rows.

    It runs inside of the head's call, where a sharded weight is gathered. Requests for logits go to
    :class:`RowHead`.
    """

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, transform: LogitTransform, scale: float = 1.0):
        self.transform, self.scale = transform, scale

    def scoring(self, model: Any, request: ScoringRequest) -> AbstractContextManager[Results]:
        head = RowHead(self.scale).scoring if request.logits else self._scoring
        return head(model, request)

    @contextmanager
    def _scoring(self, model: Any, request: ScoringRequest) -> Iterator[Results]:
        objective, labels = request.objective, request.labels
        options: dict[str, Any] = self.transform._asdict()
        seen: list[tuple[TokenScores, Tensor]] = []

        # With a loss the head's gradient is dense, and that of the embedding may be sparse.
        learns = objective is not None or request.teachers
        lookups = sparse_embedding_gradient(model) if learns else nullcontext()
        with lookups as tied:

            def score(head: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
                assert isinstance(head, nn.Linear)
                options["bias"] = head.bias
                hidden = args[0].flatten(0, -2)[request.rows]
                weight = head.weight if tied is None else tied
                if request.as_teacher or request.only_teachers:
                    scores = TokenScores(hidden[:, 0], None, None, None)
                elif isinstance(objective, TokenNLL):
                    loss, logprobs = fastrl_kernels.linear_nll_loss(
                        hidden, weight, labels, denominator=objective.denominator, **options
                    )
                    scores = TokenScores(logprobs, None, None, None)
                    if request.entropy or request.extras:  # the loss computes neither
                        with torch.no_grad():
                            scores = _token_scores(hidden, weight, request, options)
                    scores = scores._replace(loss=loss)
                elif objective is not None:
                    loss, stats = fastrl_kernels.linear_ppo_loss(
                        hidden,
                        weight,
                        labels,
                        objective.old_logprobs,
                        objective.advantages,
                        torch.ones_like(labels, dtype=torch.bool),
                        temperature=request.temperature,
                        entropy=request.entropy,
                        support=request.support,
                        **objective.linear_options,
                        **options,
                    )
                    scores = TokenScores(stats.logprobs, stats.entropies, None, None, loss, stats)
                else:
                    scores = _token_scores(hidden, weight, request, options)
                if request.as_teacher:
                    kept = weight.detach()
                    if is_spread(model):  # FSDP2 frees what it has gathered
                        kept = kept.clone()
                    teacher = fastrl_kernels.TeacherHead(hidden.detach(), kept, **options)
                    scores = scores._replace(head=teacher)
                if request.teachers or request.only_teachers:
                    scores = _with_teachers(scores, hidden, weight, request, options)
                seen.append((scores, _unscaled(hidden, self.scale)))
                return args[0][:, :0]

            def show(_model: nn.Module, _args: Any, out: Any) -> Any:
                # FSDP2 sees tensors with a gradient in it.
                scores = _only(seen, model)[0]
                out["loss"] = scores.logprobs if scores.loss is None else scores.loss
                if scores.teacher is not None:
                    out["logits"] = scores.teacher.loss
                return out

            hooked = model.get_output_embeddings().register_forward_pre_hook(score)
            with hooked, seen_by_fsdp(model, show):
                yield lambda _out: _only(seen, model)


def _with_teachers(
    scores: TokenScores,
    hidden: Tensor,
    weight: Tensor,
    request: ScoringRequest,
    options: dict[str, Any],
) -> TokenScores:
    """Scores of hidden states [N, D] with the terms of teachers, and with log-probs and entropies
    where these are all."""
    losses, found = [], torch.zeros(3, len(hidden), device=hidden.device)
    for term in request.teachers:
        rows: Any = slice(None) if term.rows is None else term.rows
        loss, of_tokens = fastrl_kernels.linear_kl_loss(
            hidden[rows],
            weight,
            request.labels[rows],
            term.head,
            beta=term.beta,
            vocabulary=term.vocabulary,
            temperature=request.temperature,
            weights=term.weights,
            denominator=term.denominator,
            entropy=request.only_teachers and request.entropy,
            **options,
        )
        losses.append(term.coef * loss)
        for row, values in zip(found, of_tokens, strict=False):
            if values is not None:
                row[rows] = values
    divergences, logprobs, entropies = found
    # Without a token there is no term, and the weights get a gradient of 0.
    total = torch.stack(losses).sum() if losses else hidden[:0].sum()
    scores = scores._replace(teacher=TeacherScores(total, divergences))
    if not request.only_teachers:
        return scores
    entropies = entropies if request.entropy else None
    return scores._replace(logprobs=logprobs, entropies=entropies)


def _token_scores(
    hidden: Tensor, weight: Tensor, request: ScoringRequest, options: dict[str, Any]
) -> TokenScores:
    """Scores without a loss, of hidden states [N, D] and the head's weights [V, D]."""
    scored: Any = fastrl_kernels.linear_logprobs(
        hidden,
        weight,
        request.labels,
        temperature=request.temperature,
        entropy=request.entropy,
        extras=request.extras,
        support=request.support,
        **options,
    )
    logprobs, *others = scored if isinstance(scored, tuple) else (scored,)
    extras = others.pop() if request.extras else None
    entropies = others.pop() if request.entropy else None
    return TokenScores(logprobs, entropies, None, None, extras=extras)


class RowHead:
    """Runs the model's own LM head on the requested rows only, for logits.

    What the model does to its logits afterwards acts on those rows as on all.
    """

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, scale: float = 1.0):
        self.scale = scale

    @contextmanager
    def scoring(self, model: Any, request: ScoringRequest) -> Iterator[Results]:
        """Context of one call of the model, see :class:`Head`."""
        seen: list[Tensor] = []

        def pick(_head: nn.Module, hidden: Tensor) -> Tensor:
            seen.append(hidden.flatten(0, -2)[request.rows].unsqueeze(0))
            return seen[-1]

        def results(out: Any) -> tuple[TokenScores, Tensor]:
            # squeeze is a view both ways; indexing would copy the logits' gradient
            hidden = _unscaled(_only(seen, model).squeeze(0), self.scale)
            return score_logits(out.logits.squeeze(0), request), hidden

        with in_front_of_head(model, pick):
            yield results


class FullHead:
    """Computes all logits and picks the rows: for models that the other heads cannot run."""

    options: ClassVar[dict[str, Any]] = {"output_hidden_states": True}

    @contextmanager
    def scoring(self, model: Any, request: ScoringRequest) -> Iterator[Results]:
        """Context of one call of the model, see :class:`Head`."""
        inputs: list[Tensor] = []

        def see(_head: nn.Module, hidden: Tensor) -> Tensor:
            inputs.append(hidden)
            return hidden

        def results(out: Any) -> tuple[TokenScores, Tensor]:
            hidden, logits = last_hidden(out), out.logits
            # Gemma 3n has four streams of hidden states, [4, B, T, H], and joins them for its head.
            if hidden.shape[:-1] != logits.shape[:-1] and inputs:
                hidden = inputs[0]
            scores = score_logits(logits.flatten(0, 1)[request.rows], request)
            return scores, hidden.flatten(0, 1)[request.rows]

        with in_front_of_head(model, see):
            yield results


def _scored(
    head: Head, model: Any, request: ScoringRequest, inputs: Inputs
) -> tuple[TokenScores, Tensor]:
    with head.scoring(model, request) as results:
        return results(model(**inputs, **head.options))


@asked_once
@torch.no_grad()
def choose_head(model: Any, inputs: Inputs) -> Head:
    """The first head that reproduces the model's own log-probs, entropies and hidden states.

    ``inputs`` is a small batch for the comparison. A warning says why the head before the chosen
    one does not.

    On fewer rows than all, the head's product may be summed in another order, and be rounded to the
    next number of its dtype: log-probs and entropies may be off by the largest logit's rounding,
    where that is more than the tolerance.
    """
    ids = inputs["decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"]
    rows = torch.arange(ids.numel(), device=ids.device)[ids.numel() // 2 :]
    request = ScoringRequest(rows, ids.flatten()[rows], entropy=True)
    steps: list[float] = []

    def see(_head: nn.Module, _args: Any, out: Tensor) -> None:
        steps.append(float(out.abs().max()) * torch.finfo(out.dtype).eps)

    with model.get_output_embeddings().register_forward_hook(see):
        expected = _scored(FullHead(), model, request, inputs)
    rounding = max([_TOLERANCE, *filter(math.isfinite, steps)])

    def differs(head: Head) -> str | None:
        try:
            got = _scored(head, model, request, inputs)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            return str(error)
        pairs = zip((*got[0][:2], got[1]), (*expected[0][:2], expected[1]), strict=True)
        if all(
            a.shape == b.shape and torch.allclose(a.float(), b.float(), _TOLERANCE, off, True)
            for (a, b), off in zip(pairs, (rounding, rounding, _TOLERANCE), strict=True)
            if a is not None and b is not None
        ):
            return None
        return "its logits differ when the head sees single rows"

    transform, scale = _transform_of(model), _scale_of(model, inputs)
    not_fused = _why_not_linear(model) or _why_other_transform(model, transform, inputs)
    fused = FusedHead(transform, scale)
    not_fused = not_fused or differs(fused)
    if not_fused is None:
        return fused
    by_rows = RowHead(scale)
    not_by_rows = differs(by_rows)
    if not_by_rows is None:
        _warn(model, f"logits of the response tokens are kept in memory, because {not_fused}")
        return by_rows
    _warn(model, f"the LM head runs on whole sequences, prompts included, because {not_by_rows}")
    return FullHead()


def corner_of(inputs: Mapping[str, Any]) -> Inputs:
    """A few tokens of a batch, for :func:`choose_head`."""
    names = ("input_ids", "position_ids", "decoder_input_ids")
    corner = {name: inputs[name][:1, :8] for name in names if inputs.get(name) is not None}
    if "input_ids" in corner:  # without a mask transformers warns of padding tokens
        corner["attention_mask"] = torch.ones_like(corner["input_ids"])
    return corner


def last_hidden(out: Any) -> Tensor:
    """The last hidden state [B, T, H], of an encoder–decoder its decoder's."""
    hidden = getattr(out, "decoder_hidden_states", None)
    return (out.hidden_states if hidden is None else hidden)[-1]


def _scale_of(model: Any, inputs: Inputs) -> float:
    """The factor s in x = s·h, with x the head's input and h the last hidden state, as T5 has one.

    Where x is no multiple of h, s means nothing, and the comparison of heads finds a difference.
    """
    head_inputs: list[Tensor] = []

    def see(_head: nn.Module, hidden: Tensor) -> Tensor:
        head_inputs.append(hidden)
        return hidden

    with in_front_of_head(model, see):
        hidden = last_hidden(model(**inputs, output_hidden_states=True)).double()
    if not head_inputs or head_inputs[0].shape != hidden.shape:
        return 1.0
    scale = float((head_inputs[0].double() * hidden).sum() / hidden.square().sum())
    # A factor this close to 1 is rounding.
    return scale if abs(scale - 1) > 1e-3 and 0 < scale < torch.inf else 1.0


def _unscaled(hidden: Tensor, scale: float) -> Tensor:
    return hidden if scale == 1 else hidden / scale


def _transform_of(model: Any) -> LogitTransform:
    """The head's transform by the configuration: Gemma's cap, Cohere's and Granite's scales."""
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    return LogitTransform(getattr(config, "final_logit_softcapping", None), scale / divisor)


def _why_not_linear(model: Any) -> str | None:
    """Why a head is not a product with its weight: adapters, quantisation, hooks; None if it is."""
    head = model.get_output_embeddings()
    plain = (
        isinstance(head, nn.Linear)
        and type(head).forward is nn.Linear.forward
        and not has_own_forward(head)
        and not nn.utils.parametrize.is_parametrized(head)
        and all(map(of_fsdp, head._forward_hooks.values()))
    )
    if plain:
        return None
    kind = type(head)
    is_own = f"{kind.__module__.partition('.')[0]}'s {kind.__name__}"
    what = "one with hooks or a forward of its own" if kind is nn.Linear else is_own
    return f"its head is not a plain nn.Linear, but {what}"


def _why_other_transform(model: Any, transform: LogitTransform, inputs: Inputs) -> str | None:
    """Why a model's logits are not ``transform`` of the head's output; None if they are. A ramp in
    place of the head's output shows it."""
    ramps: list[Tensor] = []

    def replace(_head: nn.Module, _args: Any, out: Tensor) -> Tensor:
        ramp = torch.linspace(-100, 100, out.shape[-1], device=out.device).to(out.dtype)
        ramps.append(ramp)
        return ramp.expand_as(out)

    with model.get_output_embeddings().register_forward_hook(replace):
        logits = model(**inputs).logits
    if not ramps:
        return _not_called(model)
    x = ramps[0].float() * transform.logit_scale
    cap = transform.softcap
    expected = (x if cap is None else cap * torch.tanh(x / cap)).expand_as(logits)
    # A model computes in its own dtype; another transform differs by more than rounding.
    tolerance = 1e-4 if ramps[0].dtype == torch.float32 else 2e-2
    if torch.allclose(logits.float(), expected, tolerance, tolerance):
        return None
    return f"it changes its logits otherwise than {transform}"


def in_front_of_head(
    model: Any, change: Callable[[nn.Module, Tensor], Tensor]
) -> AbstractContextManager[Any]:
    """Context in which the LM head's input [B, T, H] is replaced by ``change(head, input)``."""
    return model.get_output_embeddings().register_forward_pre_hook(
        lambda head, args: (change(head, args[0]), *args[1:])
    )


def _only(seen: list[Any], model: Any) -> Any:
    if not seen:
        raise RuntimeError(_not_called(model))
    return seen[0]


def _not_called(model: Any) -> str:
    return f"{type(base_of(model)).__name__} does not call its output embeddings as a module"


def _warn(model: Any, what: str) -> None:
    warnings.warn(f"{type(base_of(model)).__name__}: {what}", stacklevel=3)
