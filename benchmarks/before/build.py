"""Cases made into problems: random inputs of a case's shape, and how each op is called on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastrl_kernels as ops
from benchmarks.before import eager
from benchmarks.before.attention import ragged_lengths
from benchmarks.before.cases import Case
from benchmarks.before.problem import Problem
from benchmarks.before.timing import DTYPES
from fastrl_kernels import reference, reference_attention

GAMMA, LAM = 1.0, 0.95
KL_COEF = 0.1


def problem(
    case: Case,
    device: torch.device | str,
    *,
    backend: str = "auto",
    pick_rows: bool = True,
    seed: int = 0,
) -> Problem:
    """The case's problem on a device, the same for every call with a seed.

    Ops with a head get only the rows that count, as their callers should have it; all rows and
    the mask where `pick_rows` is False.
    """
    device = torch.device(device)
    with torch.device(device):
        generator = torch.Generator(device).manual_seed(seed)
        if case.op in ("linear_logprobs", "linear_ppo_loss"):
            return _BUILDERS[case.op](case, generator, backend, pick_rows)
        return _BUILDERS[case.op](case, generator, backend)


def _normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=generator, device=generator.device)


def _flags(generator: torch.Generator, *shape: int, share: float) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device) < share


def _logits(case: Case, generator: torch.Generator) -> Tensor:
    """[N, V], filled by slices: in half precision no fp32 tensor of that size is made."""
    logits = torch.empty(case.rows, case.vocabulary, dtype=DTYPES[case.dtype])
    for rows in logits.split(512):
        rows.copy_(_normal(generator, *rows.shape, scale=3.0))
    return logits


def _labels(case: Case, generator: torch.Generator) -> Tensor:
    return torch.randint(case.vocabulary, (case.rows,), generator=generator)


def _upstream(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    """Random gradients per token for the log-probabilities, and for entropies that get one."""
    upstream = {"logprobs": _normal(generator, case.rows)}
    if case.entropy == "gradient":
        upstream["entropies"] = _normal(generator, case.rows, scale=0.01)
    return upstream


def _token_logprobs(case: Case, generator: torch.Generator, backend: str) -> Problem:
    mask = None if case.active == 1 else _flags(generator, case.rows, share=case.active)
    entropy = case.entropy != "off"

    def call(op: Callable[..., Any], **inputs: Tensor) -> dict[str, Tensor]:
        found = op(**inputs, entropy=entropy)
        return dict(zip(("logprobs", "entropies"), found if entropy else (found,), strict=False))

    inputs = {"logits": _logits(case, generator), "labels": _labels(case, generator)}
    if mask is not None:
        inputs["mask"] = mask
    return Problem(
        inputs,
        ours=partial(call, partial(ops.token_logprobs, backend=backend)),
        eager=partial(eager.token_logprobs, entropy=entropy),
        exact=partial(call, reference.token_logprobs),
        wrt=("logits",) if case.backward else (),
        upstream=_upstream(case, generator) if case.backward else {},
        by_row=frozenset({"logits", "labels", "mask", "logprobs", "entropies"}),
        row_bytes=8 * case.vocabulary,
    )


def _head(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    """Hidden states, a head whose logits have a standard deviation of about 3, and labels."""
    dtype = DTYPES[case.dtype]
    hidden = _normal(generator, case.rows, case.hidden).to(dtype)
    weight = torch.empty(case.vocabulary, case.hidden, dtype=dtype)
    for rows in weight.split(8192):
        rows.copy_(_normal(generator, *rows.shape, scale=3.0 / case.hidden**0.5))
    return {"hidden": hidden, "weight": weight, "labels": _labels(case, generator)}


def _leaves(case: Case) -> tuple[str, ...]:
    if not case.backward:
        return ()
    return ("hidden", "weight") if case.head == "trained" else ("hidden",)


def _linear_logprobs(
    case: Case, generator: torch.Generator, backend: str, pick_rows: bool
) -> Problem:
    entropy = case.entropy != "off"
    names = ("logprobs", "entropies") if entropy else ("logprobs",)
    inputs = _head(case, generator)
    rows = None
    if case.active != 1:
        inputs["mask"] = _flags(generator, case.rows, share=case.active)
        if pick_rows:
            rows = inputs["mask"].nonzero().squeeze(-1)  # callers know them on the host

    def ours(
        hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        if rows is not None:
            hidden, labels, mask = hidden[rows], labels[rows], None
        found = ops.linear_logprobs(
            hidden, weight, labels, mask=mask, entropy=entropy, backend=backend
        )
        found = found if entropy else (found,)
        if rows is not None:
            found = [x.new_zeros(case.rows).index_copy(0, rows, x) for x in found]
        return dict(zip(names, found, strict=True))

    def exact(
        hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        found = reference.token_logprobs(hidden @ weight.T, labels, mask=mask, entropy=entropy)
        return dict(zip(names, found if entropy else (found,), strict=True))

    return Problem(
        inputs,
        ours=ours,
        eager=partial(eager.linear_logprobs, entropy=entropy),
        exact=exact,
        wrt=_leaves(case),
        upstream=_upstream(case, generator) if case.backward else {},
        by_row=frozenset({"hidden", "labels", "mask", *names}),
        row_bytes=8 * case.vocabulary,
    )


def _linear_ppo_loss(
    case: Case, generator: torch.Generator, backend: str, pick_rows: bool
) -> Problem:
    entropy = case.entropy != "off"
    head = _head(case, generator)
    mask = _flags(generator, case.rows, share=case.active)
    rows = mask.nonzero().squeeze(-1) if pick_rows and case.active != 1 else None
    with torch.no_grad():
        old = [
            eager.linear_logprobs(hidden, head["weight"], labels)["logprobs"]
            for hidden, labels in zip(
                *(head[name].split(512) for name in ("hidden", "labels")), strict=True
            )
        ]
    old_logprobs = torch.cat(old) + _normal(generator, case.rows, scale=0.2)

    def ours(
        hidden: Tensor, weight: Tensor, labels: Tensor, old_logprobs: Tensor, advantages: Tensor,
        mask: Tensor, denominator: float,
    ) -> dict[str, Tensor]:  # fmt: skip
        if rows is not None:
            hidden, labels, old_logprobs, advantages, mask = (
                x[rows] for x in (hidden, labels, old_logprobs, advantages, mask)
            )
        loss, stats = ops.linear_ppo_loss(
            hidden, weight, labels, old_logprobs, advantages, mask,
            denominator=denominator, entropy=entropy, backend=backend,
        )  # fmt: skip
        return {"loss": loss} | ({"entropy": stats.entropy} if entropy else {})

    def exact(
        hidden: Tensor, weight: Tensor, labels: Tensor, old_logprobs: Tensor, advantages: Tensor,
        mask: Tensor, denominator: float,
    ) -> dict[str, Tensor]:  # fmt: skip
        logits = hidden @ weight.T
        logprobs, entropies = reference.token_logprobs(logits, labels, mask=mask, entropy=True)
        loss, _ = reference.ppo_loss(
            logprobs, old_logprobs, advantages, mask, denominator=denominator
        )
        return {"loss": loss} | ({"entropy": entropies.sum() / denominator} if entropy else {})

    tokens = {
        "old_logprobs": old_logprobs,
        "advantages": _normal(generator, case.rows),
        "mask": mask,
    }
    return Problem(
        head | tokens | {"denominator": float(mask.sum())},
        ours=ours,
        eager=partial(eager.linear_ppo_loss, entropy=entropy),
        exact=exact,
        wrt=_leaves(case),
        upstream={"loss": torch.ones(())},
        by_row=frozenset({"hidden", "labels", *tokens}),
        row_bytes=8 * case.vocabulary,
    )


def _full_kl(case: Case, generator: torch.Generator, backend: str) -> Problem:
    logits = _logits(case, generator)
    ref_logits = torch.empty_like(logits)
    for rows, near in zip(ref_logits.split(512), logits.split(512), strict=True):
        rows.copy_(near + _normal(generator, *near.shape, scale=0.5))
    return Problem(
        {"logits": logits, "ref_logits": ref_logits},
        ours=lambda **x: {"kl": ops.full_kl(**x, backend=backend)},
        eager=eager.full_kl,
        exact=lambda **x: {"kl": reference.full_kl(**x)},
        wrt=("logits",) if case.backward else (),
        upstream={"kl": _normal(generator, case.rows)} if case.backward else {},
        by_row=frozenset({"logits", "ref_logits", "kl"}),
        row_bytes=8 * case.vocabulary,
    )


def _prefix_mask(case: Case, generator: torch.Generator) -> Tensor:
    """Responses that end after between 2·active - 1 and all of the steps, at least one."""
    least = max(2 * case.active - 1, 0.0)
    share = least + (1 - least) * torch.rand(case.rows, 1, generator=generator)
    lengths = (share * case.steps).ceil().clamp(min=1)
    return torch.arange(case.steps) < lengths


def _sequences(case: Case, generator: torch.Generator, *names: str) -> dict[str, Tensor]:
    dtype = DTYPES[case.dtype]
    return {name: _normal(generator, case.rows, case.steps).to(dtype) for name in names}


def _kl_rewards(case: Case, generator: torch.Generator, backend: str) -> Problem:
    names = ("rewards", "kls", "sequence_kl")
    inputs = _sequences(case, generator, "logprobs", "ref_logprobs")
    inputs |= {"scores": _normal(generator, case.rows), "mask": _prefix_mask(case, generator)}

    def call(op: Callable[..., Any], **inputs: Tensor) -> dict[str, Tensor]:
        return dict(zip(names, op(**inputs, coef=KL_COEF), strict=True))

    return Problem(
        inputs,
        ours=partial(call, partial(ops.kl_rewards, backend=backend)),
        eager=partial(eager.kl_rewards, coef=KL_COEF),
        exact=partial(call, reference.kl_rewards),
        by_row=frozenset({*inputs, *names}),
    )


def _gae(case: Case, generator: torch.Generator, backend: str) -> Problem:
    settings: dict[str, Any] = {"gamma": GAMMA, "lam": LAM, "whiten": case.whiten}
    inputs = _sequences(case, generator, "rewards", "values")
    inputs["mask"] = _prefix_mask(case, generator)

    def call(op: Callable[..., Any], **inputs: Tensor) -> dict[str, Tensor]:
        return dict(zip(("advantages", "returns"), op(**inputs, **settings), strict=True))

    return Problem(
        inputs,
        ours=partial(call, partial(ops.gae, backend=backend)),
        eager=partial(eager.gae, **settings),
        exact=partial(call, reference.gae),
        by_row=frozenset({*inputs, "advantages", "returns"}),
    )


def _ppo_loss(case: Case, generator: torch.Generator, backend: str) -> Problem:
    inputs = _sequences(
        case, generator, "logprobs", "old_logprobs", "advantages", "values", "old_values", "returns"
    )
    inputs["logprobs"] = inputs["old_logprobs"] + 0.2 * inputs["logprobs"]
    inputs["mask"] = _prefix_mask(case, generator)

    def call(
        op: Callable[..., Any], values: Tensor, old_values: Tensor, returns: Tensor, **x: Tensor
    ) -> dict[str, Tensor]:
        value = ops.ValueTerm(values, old_values, returns)
        return {"loss": op(**x, value=value)[0]}

    return Problem(
        {**inputs, "denominator": float(inputs["mask"].sum())},
        ours=partial(call, partial(ops.ppo_loss, backend=backend)),
        eager=eager.ppo_loss,
        exact=partial(call, reference.ppo_loss),
        wrt=("logprobs", "values"),
        upstream={"loss": torch.ones(())},
        by_row=frozenset(inputs),
    )


def _whiten(case: Case, generator: torch.Generator, backend: str) -> Problem:
    inputs = _sequences(case, generator, "values")
    inputs["mask"] = _prefix_mask(case, generator)
    return Problem(
        inputs,
        ours=lambda **x: {"whitened": ops.masked_whiten(**x, backend=backend)},
        eager=eager.masked_whiten,
        exact=lambda **x: {"whitened": reference.masked_whiten(**x)},
        by_row=frozenset({*inputs, "whitened"}),
    )


def _sample_tokens(case: Case, generator: torch.Generator, backend: str) -> Problem:
    keys = torch.randint(2**62, (case.rows,), generator=generator)

    def ours(logits: Tensor, keys: Tensor) -> dict[str, Tensor]:
        drawn = ops.sample_tokens(logits, keys, backend=backend)
        return {
            "tokens": drawn.tokens,
            "logprobs": drawn.logprobs_t1,
            "entropies": drawn.entropies,
        }

    def exact(logits: Tensor, keys: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        logprobs, entropies = reference.token_logprobs(logits, tokens, entropy=True)
        return {"logprobs": logprobs, "entropies": entropies}

    return Problem(
        {"logits": _logits(case, generator), "keys": keys},
        ours=ours,
        eager=eager.sample_tokens,
        exact=exact,
        by_row=frozenset({"logits", "keys", "tokens", "logprobs", "entropies"}),
        row_bytes=8 * case.vocabulary,
        given=("tokens",),
    )


def _decode_attention(case: Case, generator: torch.Generator, backend: str) -> Problem:
    layer = case.attention
    assert layer is not None
    dtype, width = DTYPES[case.dtype], layer.width
    keys, values = torch.empty(2, case.rows, case.steps, layer.kv_heads, width, dtype=dtype)
    for slot in (*keys, *values):
        slot.copy_(_normal(generator, *slot.shape))
    lengths = torch.tensor(ragged_lengths(case.rows, case.steps, case.active), dtype=torch.int32)
    position, ends = torch.arange(case.steps), lengths.unsqueeze(1)
    inputs = {
        "query": _normal(generator, case.rows, layer.heads, width).to(dtype),
        "keys": keys,
        "values": values,
        "lengths": lengths,
        "mask": (position < ends) & (position >= ends - (layer.window or case.steps)),
    }

    def call(op: Callable[..., Tensor], mask: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        return {"out": op(**inputs, **layer.options)}  # who knows lengths needs no mask

    return Problem(
        inputs,
        ours=partial(call, partial(ops.decode_attention, backend=backend)),
        eager=partial(eager.decode_attention, **layer.options),
        exact=partial(call, reference_attention.decode_attention),
        by_row=frozenset({*inputs, "out"}),
        row_bytes=8 * case.steps * layer.token_elements,
    )


_BUILDERS: dict[str, Callable[..., Problem]] = {
    "token_logprobs": _token_logprobs,
    "linear_logprobs": _linear_logprobs,
    "linear_ppo_loss": _linear_ppo_loss,
    "full_kl": _full_kl,
    "kl_rewards": _kl_rewards,
    "gae": _gae,
    "ppo_loss": _ppo_loss,
    "whiten": _whiten,
    "sample_tokens": _sample_tokens,
    "decode_attention": _decode_attention,
}
