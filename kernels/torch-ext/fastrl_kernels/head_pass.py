"""One pass over a language-model head for losses that are fused with it.

The derivative of such a loss by a token's log-prob does not depend on other tokens: each chunk of
logits gives log-probs and gradients in forward, and backward returns these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .gemm import library_for
from .lm_head import HeadBackend, HeadInputs, row_chunks
from .types import RowGradients, RowStatistics
from .workspace import Workspace


class HeadGradients:
    """Sums of the wanted gradients over chunks of rows."""

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
        self._library = library_for(weight)
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
            self._library.product(self.dhidden[rows], x, self.weight)
        if self.dweight is not None and rows.start == 0:
            self._library.product(self.dweight, x.t(), self.hidden[rows])
        elif self.dweight is not None:
            self._library.add_product_(self.dweight, x.t(), self.hidden[rows])
        if self.dbias is not None:
            self.dbias += x.sum(0, dtype=torch.float32)

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """By hidden states, weight and bias, in their dtypes."""
        return (
            self.dhidden,
            None if self.dweight is None else self.dweight.to(self.weight.dtype),
            None if self.dbias is None or self.bias is None else self.dbias.to(self.bias.dtype),
        )


class HeadPass:
    """One pass over N rows, a chunk of logits at a time.

    ``for rows in head_pass`` computes a chunk's logits and statistics; in the loop :meth:`backward`
    takes the loss's derivatives by its log-probs.

    Args:
        entropy: also compute entropies.
        wanted: which gradients, by hidden states, weight and bias.
    """

    def __init__(self, inputs: HeadInputs, entropy: bool, wanted: tuple[bool, ...]) -> None:
        n, vocabulary = len(inputs.hidden), len(inputs.weight)
        self.inputs = inputs
        self.statistics = RowStatistics.empty(inputs.hidden, n, entropy, ())
        self._dtype = inputs.head.chunk_dtype(inputs.hidden)
        self._chunks = row_chunks(n, vocabulary, self._dtype.itemsize, inputs.workspace)
        self._gradients = HeadGradients(
            inputs.hidden, inputs.weight, inputs.bias, wanted, len(self._chunks)
        )
        self._logits: Tensor | None = None

    @property
    def wanted(self) -> bool:
        """Whether any gradient is wanted."""
        return self._gradients.wanted

    def __iter__(self) -> Iterator[slice]:
        inputs = self.inputs
        longest = max((rows.stop - rows.start for rows in self._chunks), default=0)
        workspace = Workspace(inputs.hidden, longest, len(inputs.weight), self._dtype)
        for rows in self._chunks:
            self._logits = workspace.chunk(rows.stop - rows.start)
            inputs.fill(self._logits, rows)
            inputs.statistics(self._logits, rows, self.statistics, once=self.wanted)
            yield rows
        self._logits = None
        workspace.release()

    def backward(self, rows: slice, slopes: Tensor) -> None:
        """Adds the rows' part to the gradients.

        Args:
            slopes: [r] d loss/d log π, NaN where the log-prob is.
        """
        assert self._logits is not None
        upstream = RowGradients(slopes, None)
        self.inputs.gradients_(self._logits, rows, 0, self.statistics, upstream, once=True)
        self._gradients.add(self._logits, rows)

    def per_token(self, x: Tensor) -> Tensor:
        """[N] in the labels' shape, 0 where a token does not count."""
        return x.masked_fill(~self.inputs.counted, 0).view(self.inputs.shape)

    def gradients(self) -> tuple[Tensor | None, ...]:
        return self._gradients.results()


class HandOut(torch.autograd.Function):
    """Gives a loss gradients by hidden states, weight and bias that have been computed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: Tensor,
        gradients: tuple[Tensor | None, ...],
        head: type[HeadBackend],
        op: str,
    ) -> Tensor:
        ctx.gradients, ctx.head, ctx.op = gradients, head, op
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(loss)  # the result is this tensor, neither a copy nor a view
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                f"{ctx.op} hands its gradients out once: call it again, or make the loss of "
                "linear_logprobs where a graph is retained"
            )
        for x in gradients:
            if x is not None:
                ctx.head.scale_(x, grad)
        return *gradients, None, None, None, None


def wanted_gradients(*tensors: Tensor | None) -> tuple[bool, ...]:
    return tuple(x is not None and x.requires_grad and torch.is_grad_enabled() for x in tensors)


# For operators whose last three results are the gradients, and whose last argument is which of them
# are wanted.
def save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.wanted, ctx.arguments = inputs[-1], len(inputs)
    ctx.save_for_backward(*output[-3:])
    ctx.set_materialize_grads(False)


def scaled_gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * ctx.arguments
    gradients = zip(ctx.saved_tensors, ctx.wanted, strict=True)
    scaled = ((x * grad).to(x.dtype) if want else None for x, want in gradients)
    return *scaled, *(None,) * (ctx.arguments - 3)
