"""One pass over a language-model head for losses that are fused with it.

The derivative of such a loss by a token's log-prob does not depend on other tokens: each chunk of
logits gives log-probs and gradients in forward, and backward returns these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._cpu.head_pieces import ChunkInPieces, PieceGradient, suits
from .checks import check_constant, check_device, check_like
from .divergence import AgainstHead, AgainstTokens, Compared, Divergences, against
from .first_order import first_order
from .gemm import library_for
from .lm_head import HeadBackend, HeadInputs, labels_name
from .types import RowGradients, RowStatistics
from .vocab_parallel import Vocabulary
from .workspace import Workspace, result_like


class HeadGradients:
    """Sums of the wanted gradients over chunks of rows, and pieces of the vocabulary.

    Args:
        leaf: the tensor that the weight's gradient is for. Rows that it has beyond the weight's
            have a gradient of 0.
        in_pieces: whether gradients come by :meth:`add_piece`.
        vocabulary: sums the processes' parts of the hidden states' gradient.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: tuple[bool, ...],
        chunks: int,
        leaf: Tensor,
        in_pieces: bool,
        vocabulary: Vocabulary,
    ) -> None:
        self.wanted, self._vocabulary = any(wanted), vocabulary
        self.hidden, self.weight, self.bias, self.dtype = hidden, weight, bias, leaf.dtype
        self._library = library_for(weight)
        self.dhidden = self.dweight = self.dbias = None
        if wanted[0]:
            # Pieces are summed in fp32, and so are processes' parts.
            if in_pieces:
                self.dhidden = torch.zeros_like(hidden, dtype=torch.float32)
            else:
                summed = torch.float32 if vocabulary.shared else hidden.dtype
                self.dhidden = torch.empty_like(hidden, dtype=summed)
        if wanted[1]:
            # One chunk is rounded once as it is; several are summed in fp32.
            self._whole = result_like(leaf, leaf.dtype if chunks == 1 else torch.float32)
            self._whole[len(weight) if chunks else 0 :].zero_()  # what no chunk writes
            self.dweight = self._whole[: len(weight)]
        if bias is not None and wanted[2]:
            self.dbias = torch.zeros_like(bias, dtype=torch.float32)

    def add(self, x: Tensor, rows: slice) -> None:
        """Adds the gradients that follow from x [r, V], the gradients of some rows' products."""
        if self.dhidden is not None:
            out = self.dhidden[rows]
            # Sums over a vocabulary are long: a GPU's library may split them, see `product`.
            fp32 = out.dtype == torch.float32
            total = out if fp32 else torch.empty_like(out, dtype=torch.float32)
            self._library.product(total, x, self.weight)
            if not fp32:
                out.copy_(total)
        if self.dweight is not None and rows.start == 0:
            self._library.product(self.dweight, x.t(), self.hidden[rows])
        elif self.dweight is not None:
            self._library.add_product_(self.dweight, x.t(), self.hidden[rows])
        if self.dbias is not None:
            self.dbias += x.sum(0, dtype=torch.float32)

    def add_piece(self, gradient: PieceGradient, rows: slice, columns: slice) -> None:
        """Adds the gradients that follow from those of products with some rows of the weight."""
        probs, factors, labels, at_labels = gradient
        if self.dhidden is not None:
            weight, dhidden = self.weight[columns], self.dhidden[rows]
            dhidden.addcmul_(self._library.linear(probs, weight.t()), factors[:, None])
            picked = weight[labels.columns].float().mul_(at_labels[:, None])
            dhidden.index_add_(0, labels.rows, picked)
        if self.dweight is not None:
            out, hidden = self.dweight[columns], self.hidden[rows]
            total = out if out.dtype == torch.float32 else out.float()
            add = self._library.product if rows.start == 0 else self._library.add_product_
            add(total, probs.t(), (hidden * factors[:, None]).to(hidden.dtype))
            picked = hidden[labels.rows].float().mul_(at_labels[:, None])
            total.index_add_(0, labels.columns, picked)
            if total is not out:
                out.copy_(total)
        if self.dbias is not None:
            dbias = self.dbias[columns]
            dbias.addmv_(probs.float().t(), factors)
            dbias.index_add_(0, labels.columns, at_labels)

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients by hidden states, weight and bias, in their dtypes."""
        by_hidden = self.dhidden
        if by_hidden is not None:
            by_hidden = self._vocabulary.sum_(by_hidden).to(self.hidden.dtype)
        return (
            by_hidden,
            None if self.dweight is None else self._whole.to(self.dtype),
            None if self.dbias is None or self.bias is None else self.dbias.to(self.bias.dtype),
        )


class _WholeChunk:
    """A chunk of up to ``longest`` rows of all logits, computed by the op's backend."""

    def __init__(
        self,
        inputs: HeadInputs,
        statistics: RowStatistics,
        gradients: HeadGradients,
        longest: int,
        once: bool,
    ) -> None:
        self.inputs, self.statistics, self.gradients = inputs, statistics, gradients
        self._once = once
        dtype = inputs.head.chunk_dtype(inputs.hidden)
        self._workspace = Workspace(inputs.hidden, longest, len(inputs.weight), dtype)
        self.logits: Tensor

    def fill(self, rows: slice) -> None:
        self.logits = self._workspace.chunk(rows.stop - rows.start)
        self.inputs.fill(self.logits, rows)

    def score(self, rows: slice) -> None:
        self.fill(rows)
        self.inputs.statistics(self.logits, rows, self.statistics, once=self._once)

    def backward(self, rows: slice, upstream: RowGradients) -> None:
        self.inputs.gradients_(self.logits, rows, 0, self.statistics, upstream, once=self._once)
        self.gradients.add(self.logits, rows)

    def release(self) -> None:
        self._workspace.release()


class HeadPass:
    """One pass over N rows, a chunk of logits at a time.

    ``for rows in head_pass`` computes a chunk's logits and statistics; in the loop :meth:`backward`
    takes the loss's derivatives by its log-probs.

    Args:
        entropy: also compute entropies.
        wanted: which gradients, by hidden states, weight and bias.
        entropies_learn: the loss has a derivative by entropies, too.
        compared: a teacher, whose logits are computed beside the student's; ``found`` gets the
            divergences from it.
    """

    def __init__(
        self,
        inputs: HeadInputs,
        entropy: bool,
        wanted: tuple[bool, ...],
        entropies_learn: bool = False,
        compared: Compared | None = None,
    ) -> None:
        self.inputs, self._compared = inputs, compared
        n = len(inputs.hidden)
        self.statistics = RowStatistics.empty(inputs.hidden, n, entropy, ())
        self.found = None if compared is None else Divergences.empty(inputs.hidden, n)
        self._in_pieces = suits(inputs) and not entropies_learn and compared is None
        dtype = inputs.weight.dtype if self._in_pieces else inputs.head.chunk_dtype(inputs.hidden)
        itemsize = dtype.itemsize
        if compared is not None:
            itemsize += compared.itemsize(inputs)
        self._chunks = inputs.row_chunks(itemsize, _bytes_of_sum(inputs, wanted))
        self._gradients = HeadGradients(
            inputs.hidden,
            inputs.weight,
            inputs.bias,
            wanted,
            len(self._chunks),
            inputs.weight_leaf,
            self._in_pieces,
            inputs.vocabulary,
        )
        self._once = any(wanted) and not entropies_learn
        self._chunk: Any = None
        self._against: AgainstHead | AgainstTokens | None = None

    @property
    def wanted(self) -> bool:
        """Whether any gradient is wanted."""
        return self._gradients.wanted

    @property
    def chunks(self) -> int:
        """The number of chunks of rows."""
        return len(self._chunks)

    def __iter__(self) -> Iterator[slice]:
        longest = max((rows.stop - rows.start for rows in self._chunks), default=0)
        of_chunk = self.inputs, self.statistics, self._gradients, longest
        if self._in_pieces:
            self._chunk = ChunkInPieces(*of_chunk)
        else:
            self._chunk = _WholeChunk(*of_chunk, self._once)
        if self._compared is not None:
            assert self.found is not None
            self._against = against(self.inputs, self._compared, self.found, longest)
        for rows in self._chunks:
            if self._against is None:
                self._chunk.score(rows)
                self.inputs.join_(rows, self.statistics)
            else:
                self._chunk.fill(rows)
                self._against.score(self._chunk.logits, rows, self.statistics)
            yield rows
        self._chunk.release()
        if self._against is not None:
            self._against.release()
        self._chunk = None

    @property
    def teacher_logprobs(self) -> Tensor | None:
        """The labels' log-probs by the teacher's head, [N]."""
        return None if self._against is None else self._against.teacher_logprobs

    def backward(
        self,
        rows: slice,
        slopes: Tensor,
        of_entropies: Tensor | None = None,
        of_divergences: Tensor | None = None,
    ) -> None:
        """Adds the rows' part to the gradients.

        Args:
            slopes: [r] d loss/d log π, NaN where the log-prob is.
            of_entropies: [r] d loss/d H, with ``entropies_learn``.
            of_divergences: [r] d loss/d D, with a teacher.
        """
        upstream = RowGradients(slopes, of_entropies)
        if self._against is None:
            self._chunk.backward(rows, upstream)
            return
        assert of_divergences is not None
        logits = self._chunk.logits
        self._against.gradients_(logits, rows, self.statistics, upstream, of_divergences)
        self._gradients.add(logits, rows)

    def per_token(self, x: Tensor) -> Tensor:
        """x [N] in the labels' shape, with 0 where a token does not count."""
        return x.masked_fill(~self.inputs.counted, 0).view(self.inputs.shape)

    def gradients(self) -> tuple[Tensor | None, ...]:
        return self._gradients.results()


def _bytes_of_sum(inputs: HeadInputs, wanted: tuple[bool, ...]) -> int:
    """The bytes of the fp32 sum that several chunks need for the weight's gradient, beside a
    gradient in another dtype."""
    beside = wanted[1] and inputs.weight_leaf.dtype != torch.float32
    elements = inputs.vocabulary.widest * inputs.weight.shape[1]
    return elements * torch.float32.itemsize if beside else 0


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
    @first_order
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                f"{ctx.op} hands its gradients out once: call it again, or make the loss of "
                "linear_logprobs or linear_kl where a graph is retained"
            )
        for x in gradients:
            if x is not None:
                ctx.head.scale_(x, grad)
        return *gradients, None, None, None, None


def weights_and_total(
    inputs: HeadInputs, weights: Tensor | None, denominator: float | Tensor | None, shift: int
) -> tuple[Tensor, Tensor]:
    """The tokens' weights [N], 0 where one does not count, and the denominator of a loss, 0-d.

    Raises:
        TypeError, ValueError: as the public ops do.
    """
    token_weights = inputs.counted.float()
    if weights is not None:
        check_like("weights", weights, labels_name(shift), inputs.scored)
        check_device("weights", weights, "hidden", inputs.hidden)
        check_constant("weights", weights)
        token_weights = torch.where(inputs.counted, weights.reshape(-1).float(), 0.0)
    if denominator is None:
        total = inputs.counted.sum().float()
    elif isinstance(denominator, Tensor):
        if denominator.dim() or denominator.requires_grad:
            raise ValueError("denominator must be a number or a 0-d tensor without a gradient")
        total = denominator.to(token_weights)
    else:
        if not 0 <= denominator < math.inf:
            raise ValueError(f"denominator must be at least 0 and finite, got {denominator}")
        total = torch.full((), float(denominator), device=inputs.hidden.device)
    return token_weights, total


def wanted_gradients(*tensors: Tensor | None) -> tuple[bool, ...]:
    return tuple(x is not None and x.requires_grad and torch.is_grad_enabled() for x in tensors)


# For operators whose last three results are the gradients, and whose last argument is which of them
# are wanted.
def save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.wanted, ctx.arguments = inputs[-1], len(inputs)
    ctx.save_for_backward(*output[-3:])
    ctx.set_materialize_grads(False)


@first_order
def scaled_gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * ctx.arguments
    gradients = zip(ctx.saved_tensors, ctx.wanted, strict=True)
    scaled = ((x * grad).to(x.dtype) if want else None for x, want in gradients)
    return *scaled, *(None,) * (ctx.arguments - 3)
