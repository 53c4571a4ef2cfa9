"""Inputs, shapes and compiled calls that several ops have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.ops.record import Sizes
from benchmarks.shapes import DIFFERENTIABLE, Shape
from benchmarks.timing import DTYPES

# (hidden size, vocabulary) of GPT-2, Qwen2.5-0.5B, Gemma-2-2B, Llama-3-8B and Qwen3-8B.
HEADS = ((768, 50257), (896, 151936), (2304, 256000), (4096, 128256), (4096, 151936))
VOCABULARIES = tuple(dict.fromkeys(vocabulary for _, vocabulary in HEADS))
ROWS = (1024, 4096, 8192, 16384, 32768)
ACTIVE = (1.0, 0.5, 0.1)
ON_VOCABULARY = {"vocabulary": VOCABULARIES, "rows": ROWS, "dtype": tuple(DTYPES)}
COMPILED_VOCABULARIES = (50257, 151936)  # an odd one starts every row unaligned

Size = tuple[int, int]


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=generator, device=generator.device)


def flags(generator: torch.Generator, *shape: int, share: float) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device) < share


def labels_of(shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.randint(shape.vocabulary, (shape.rows,), generator=generator)


def upstream(shape: Shape, generator: torch.Generator) -> dict[str, Tensor]:
    """Random gradients per token for the log-probabilities, and for entropies that get one."""
    if not shape.backward:
        return {}
    found = {"logprobs": normal(generator, shape.rows)}
    if shape.entropy == "gradient":
        found["entropies"] = normal(generator, shape.rows, scale=0.01)
    return found


def checked_rows(
    op: str, entropy: str = "off", active: float = 1.0, hidden: bool = False
) -> Callable[[Sizes], Iterator[Shape]]:
    """`Op.checked` of an op on a vocabulary."""

    def shapes(sizes: Sizes) -> Iterator[Shape]:
        odd, even = sizes.vocabulary
        base = Shape(
            op, sizes.rows, hidden=sizes.hidden if hidden else 0, vocabulary=even,
            backward=op in DIFFERENTIABLE,
        )  # fmt: skip
        half = dataclasses.replace(base, dtype="bf16")
        yield half
        yield dataclasses.replace(base, vocabulary=odd)
        if hidden:
            yield dataclasses.replace(half, head="frozen")
        yield dataclasses.replace(base, dtype="fp16", entropy=entropy)
        yield dataclasses.replace(half, vocabulary=odd, entropy=entropy, active=active)

    return shapes


def backward(*outputs: Tensor) -> None:
    """Gradients per token, as a loss gives them, for a compiled call."""
    torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
