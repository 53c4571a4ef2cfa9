"""The one path from hidden states to log-probs, entropies and values.

Old policy, new policy and reference all come through here: two paths would round differently, and
the probability ratio would not be 1 where nothing changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fastrl_kernels


class ScoringRequest(NamedTuple):
    """Which tokens to score, and what to return for them.

    A model scores N positions of a batch [B, T]: position i is ``rows[i] = b·T + t``, and its
    hidden state predicts ``labels[i]``. The LM head runs on these rows alone.
    """

    rows: Tensor  # [N] int64
    labels: Tensor  # [N] int64
    temperature: float = 1.0
    entropy: bool = False
    values: bool = True
    logits: bool = False


class TokenScores(NamedTuple):
    """What a model says of the requested tokens, fp32 but for the logits; None where not asked."""

    logprobs: Tensor  # [N]
    entropies: Tensor | None  # [N]
    values: Tensor | None  # [N]
    logits: Tensor | None  # [N, V], before the temperature


def score_rows(
    logits: Tensor, hidden: Tensor, v_head: nn.Module, request: ScoringRequest
) -> TokenScores:
    """Scores from a model's logits [N, V] and last hidden states [N, H] of the requested rows."""
    scored: Any = fastrl_kernels.token_logprobs(
        logits, request.labels, temperature=request.temperature, entropy=request.entropy
    )
    logprobs, entropies = scored if request.entropy else (scored, None)
    return TokenScores(
        logprobs=logprobs,
        entropies=entropies,
        values=v_head(hidden).squeeze(-1) if request.values else None,
        logits=logits if request.logits else None,
    )


class RowHead:
    """Runs the model's own LM head on the requested rows only.

    A hook in front of the head hands it [1, N, H] in place of [B, T, H]; whatever the model does to
    its logits afterwards (soft caps, scales) then acts on those rows as it would on all.
    """

    def __call__(self, model: Any, rows: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        with _rows_before(model.get_output_embeddings(), rows) as seen:
            logits = model(**inputs).logits
        if not seen:
            raise RuntimeError(f"{_name(model)} does not call its output embeddings as a module")
        # squeeze is a view both ways; indexing would copy the logits' gradient
        return logits.squeeze(0), seen[0].squeeze(0)


class FullHead:
    """For heads that :class:`RowHead` cannot serve: all logits first, then the rows."""

    def __call__(self, model: Any, rows: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        out = model(**inputs, output_hidden_states=True)
        logits = out.logits.flatten(0, 1)[rows]
        return logits, out.hidden_states[-1].flatten(0, 1)[rows]


Head = RowHead | FullHead


@torch.no_grad()
def choose_head(model: nn.Module, inputs: dict[str, Any], tolerance: float = 1e-3) -> Head:
    """:class:`RowHead` where it reproduces the model's own logits and hidden states, else FullHead.

    ``inputs`` is a small batch for the comparison. Falling back is said in a warning.
    """
    length = inputs["input_ids"].numel()
    rows = torch.arange(length, device=inputs["input_ids"].device)[length // 2 :]
    expected = FullHead()(model, rows, inputs)
    try:
        got = RowHead()(model, rows, inputs)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        cause = str(error)
    else:
        if all(
            a.shape == b.shape and torch.allclose(a.float(), b.float(), tolerance, tolerance)
            for a, b in zip(got, expected, strict=True)
        ):
            return RowHead()
        cause = "its logits differ when the head sees single rows"
    warnings.warn(
        f"{_name(model)}: the LM head runs on whole sequences, prompts included, because {cause}",
        stacklevel=2,
    )
    return FullHead()


@contextmanager
def _rows_before(head: nn.Module, rows: Tensor) -> Iterator[list[Tensor]]:
    """While open, ``head`` sees its input's ``rows`` as [1, N, H]; they are put in the list."""
    seen: list[Tensor] = []

    def pick(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        picked = args[0].flatten(0, -2)[rows].unsqueeze(0)
        seen.append(picked)
        return (picked, *args[1:])

    handle = head.register_forward_pre_hook(pick)
    try:
        yield seen
    finally:
        handle.remove()


def _name(model: Any) -> str:
    return type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__
