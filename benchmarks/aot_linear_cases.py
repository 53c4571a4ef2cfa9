"""The ahead-of-time gate's calls of the ops on hidden states: a language-model head, fused.

Their kernels work on a chunk of logits, whose rows begin at 16-byte boundaries and are padded to
whole vectors: unlike the logits that users hand over, of whatever vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

import fastrl_kernels as ops
from benchmarks.aot_judge import Case, Expect

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
VOCABULARIES = (50257, 151936)
ROWS, WIDTH = 32, 8

HEAD = Expect(
    load_bytes=16,
    store_bytes=16,
    exempt=frozenset({"_load_tail", "_store_tail", "_earlier_maximum"}),
    why="the last window of a row is masked per vector; a label that is the largest logit is rare, "
    "and so is the look at what stands before it",
)
# Per-token tensors of a handful of rows, by the kernels of ppo_loss, which has cases of its own:
# where a specialisation is shared with those, theirs are the demands, and theirs the exemptions.
POLICY = Expect(load_bytes=0, any_tile=True, exempt=frozenset({"partials_ptr"}))

_VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "entropy": {"entropy": True},
    "softcap": {"softcap": 30.0},
    "temperatures": {"temperature": torch.ones(ROWS)},
    "extras": {"extras": ops.Extras._fields},
    "all": {
        "entropy": True,
        "softcap": 30.0,
        "temperature": torch.ones(ROWS),
        "extras": ops.Extras._fields,
    },
}
_FEW = ("", "all")


def linear_cases() -> Iterator[Case]:
    yield from _linear_logprobs_cases()
    yield from _linear_ppo_loss_cases()
    yield from _linear_nll_loss_cases()


def _head(dtype: torch.dtype, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden": torch.zeros(ROWS, WIDTH, dtype=dtype, requires_grad=True),
        "weight": torch.zeros(vocabulary, WIDTH, dtype=dtype, requires_grad=True),
        "labels": torch.zeros(ROWS, dtype=torch.int64),
        "backend": "triton",
    }


def _linear_logprobs_cases() -> Iterator[Case]:
    def call(dtype: torch.dtype, vocabulary: int, options: dict[str, Any]) -> None:
        # Half of the rows at a time, so that backward computes chunks of columns as well.
        half = ROWS // 2 * vocabulary * dtype.itemsize
        found = ops.linear_logprobs(**_head(dtype, vocabulary), workspace_bytes=half, **options)
        outputs = [found] if isinstance(found, torch.Tensor) else list(found)
        outputs = [x for x in outputs if isinstance(x, torch.Tensor)]
        torch.autograd.backward(outputs, [torch.zeros_like(x) for x in outputs])

    calls = [
        (name, vocabulary, variant)
        for name, vocabulary in product(DTYPES, VOCABULARIES)
        for variant in (_VARIANTS if name == "bf16" else _FEW)
    ]
    calls += [("bf16", 503, variant) for variant in _FEW]  # fits in one window
    for name, vocabulary, variant in calls:
        yield Case(
            "linear_logprobs",
            f"{name} V={vocabulary} {variant}".strip(),
            partial(call, DTYPES[name], vocabulary, _VARIANTS[variant]),
            HEAD,
        )


def _linear_ppo_loss_cases() -> Iterator[Case]:
    def call(dtype: torch.dtype, vocabulary: int, options: dict[str, Any]) -> None:
        tokens = torch.zeros(ROWS)
        loss, _ = ops.linear_ppo_loss(
            **_head(dtype, vocabulary),
            old_logprobs=tokens,
            advantages=tokens,
            mask=tokens == 0,
            kl=ops.KLTerm(tokens, 0.05),
            **options,
        )
        loss.backward()

    everything = {k: v for k, v in _VARIANTS["all"].items() if k != "extras"}
    for (name, dtype), vocabulary in product(DTYPES.items(), VOCABULARIES):
        for label, options in (("", {}), ("all", everything)):
            yield Case(
                "linear_ppo_loss",
                f"{name} V={vocabulary} {label}".strip(),
                partial(call, dtype, vocabulary, options),
                HEAD,
                {"_ppo_loss_*": POLICY},
            )
    yield Case("linear_ppo_loss", "a gradient >2GiB", _scale_a_large_gradient, HEAD)


def _linear_nll_loss_cases() -> Iterator[Case]:
    def call(dtype: torch.dtype, vocabulary: int, options: dict[str, Any]) -> None:
        loss, _ = ops.linear_nll_loss(**_head(dtype, vocabulary), **options)
        loss.backward()

    for (name, dtype), vocabulary in product(DTYPES.items(), VOCABULARIES):
        for label, options in (("", {}), ("softcap", {"softcap": 30.0})):
            yield Case(
                "linear_nll_loss",
                f"{name} V={vocabulary} {label}".strip(),
                partial(call, dtype, vocabulary, options),
                HEAD,
            )


def _scale_a_large_gradient() -> None:
    """Past 2 GiB, AMD addresses by pointer in place of buffer. The pages are never touched."""
    from fastrl_kernels._triton.lm_head import TritonHead

    TritonHead.scale_(torch.empty(2**30 + 2**20, dtype=torch.bfloat16), torch.ones(()))
