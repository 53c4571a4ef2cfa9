"""What the ops with a head ask of a GPU, counted without one: products, bytes, memory."""

import pytest
import torch

from benchmarks.ops.head_counts import GIB, HeadCounts, Product, counted
from benchmarks.ops.record import MIB
from fastrl_kernels.lm_head import tiles

BF16, FP32 = torch.bfloat16, torch.float32
N, H, V = SHAPE = 4096, 4096, 131072  # the goals'
H100 = 3.0e12, 7e14  # bytes and flops per second
LOSSES = pytest.mark.parametrize("op", ["linear_ppo_loss", "linear_nll_loss"])


@pytest.fixture(autouse=True)
def poisoned_empty():
    """Not here, where writing to new memory would count."""


def times(counts: HeadCounts, *product: object) -> int:
    return counts.products.count(Product(*product))


@LOSSES
def test_a_trained_head_has_one_chunk_where_that_takes_less_memory(op):
    """1 GiB of logits in place of 256 MiB, and of the weight's gradient in fp32, 2 GiB."""
    counts = counted(op, *SHAPE)
    assert len(counts.products) == 3
    assert times(counts, N, H, V, BF16, BF16, False) == 1
    assert times(counts, V, N, H, BF16, BF16, False) == 1
    assert times(counts, N, V, H, BF16, FP32, False) == 1  # rounded afterwards
    assert counts.workspace == 1 * GIB
    assert counts.peak <= 1.2 * GIB
    assert counts.beside <= 3.25 * GIB  # 3 GiB of logits, and rows of hidden states


@LOSSES
@pytest.mark.parametrize(
    ("rows", "options"),
    [(4096, {"head": "frozen"}), (16384, {}), (4096, {"dtype": FP32})],
    ids=["frozen", "many rows", "fp32"],
)
def test_otherwise_chunks_of_whole_tiles_fit_the_workspace(op, rows, options):
    counts = counted(op, rows, H, V, **options)
    logits = [x for x in counts.products if (x.k, x.n) == (H, V)]
    assert sum(x.m for x in logits) == rows
    assert len(logits) > 1
    assert all(x.m % 256 == 0 for x in logits)
    assert counts.workspace == 256 * MIB


def test_the_gradient_of_some_rows_of_the_weight_is_one_product():
    """Of 32768 at a time; the last of which need no logits again."""
    counts = counted("linear_logprobs", *SHAPE)
    width = V // 4
    assert times(counts, N, H, width, BF16, BF16, False) == 4 + 3
    assert times(counts, width, N, H, BF16, BF16, False) == 4
    assert times(counts, N, width, H, BF16, FP32, False) == 1
    assert times(counts, N, width, H, BF16, FP32, True) == 3
    assert len(counts.products) == 15
    assert counts.peak <= 600 * MIB
    assert counts.beside <= 3.25 * GIB


@pytest.mark.parametrize(
    ("op", "goal"),
    [("linear_logprobs", 26e-3), ("linear_ppo_loss", 20.5e-3), ("linear_nll_loss", 20.5e-3)],
)
def test_counts_are_within_the_goals_of_an_h100(op, goal):
    assert counted(op, *SHAPE).seconds(*H100) <= goal


@pytest.mark.parametrize("n", [1, 100, 4096, 16384, 23000, 24000, 10**6])
@pytest.mark.parametrize("vocabulary", [1, 50257, 151936])
@pytest.mark.parametrize("budget", [256 * MIB, 16 * MIB, 1000, 1])
def test_tiles_fit_the_budget_with_the_fewest_bytes_of_sums(n, vocabulary, budget):
    rows, columns = tiles(n, vocabulary, 2, budget)
    for chunks, length in ((rows, n), (columns, vocabulary)):
        assert [chunk.start for chunk in chunks[1:]] == [chunk.stop for chunk in chunks[:-1]]
        assert (chunks[0].start, chunks[-1].stop) == (0, length)
    longest, widest = rows[0].stop, columns[0].stop
    assert longest == 1 or longest * widest * 2 <= budget
    if budget < 16 * MIB:
        return
    for chunks in (rows, columns):
        assert len(chunks) == 1 or chunks[0].stop % 256 == 0

    def sums(rows: int, columns: int) -> float:
        """Of fp32 elements per N·H·V, those of a single chunk apart."""
        return (columns < vocabulary) / columns + (rows < n) / rows

    others = [(n, w) for w in range(1, vocabulary, 512) if n * w * 2 <= budget]
    others += [(r, w) for w in range(256, vocabulary, 256) if (r := budget // 2 // w) < n]
    least = min((sums(*other) for other in others), default=sums(longest, widest))
    assert sums(longest, widest) <= 1.3 * least  # lengths are multiples of 256, and alike


@pytest.mark.parametrize("teacher", [H, 2 * H])
def test_a_divergence_takes_each_product_once_where_weights_are_known(teacher):
    """The student's forward and twice backward, and the teacher's; logits of both at a time."""
    counts = counted("linear_kl_loss", *SHAPE, teacher=teacher)
    assert len(counts.products) == 4
    assert times(counts, N, teacher, V, BF16, BF16, False) == (2 if teacher == H else 1)
    assert times(counts, N, H, V, BF16, BF16, False) == (2 if teacher == H else 1)
    assert times(counts, V, N, H, BF16, BF16, False) == 1
    assert times(counts, N, V, H, BF16, FP32, False) == 1
    assert counts.flops == 2.0 * N * V * (3 * H + teacher)
    assert counts.workspace == 1 * GIB
    assert counts.peak <= 2.25 * GIB  # two GiB of logits
    assert counts.beside <= 7.4 * GIB  # seven passes over one, and rows of hidden states


@pytest.mark.parametrize("teacher", [H, 2 * H])
@pytest.mark.parametrize("head", ["trained", "frozen"])
def test_a_divergence_by_tokens_multiplies_both_heads_once_more(teacher, head):
    counts = counted("linear_kl", *SHAPE, teacher=teacher, head=head)
    student = 4 if head == "trained" else 3
    assert counts.flops == 2.0 * N * V * (student * H + 2 * teacher)
    forward = [x for x in counts.products if x.n == V]
    assert sum(x.m for x in forward) == 4 * N
    assert counts.beside <= 11.4 * GIB
    assert head == "trained" or counts.peak <= 400 * MIB


@pytest.mark.parametrize(
    ("op", "rows", "options"),
    [
        ("linear_kl_loss", 4096, {"head": "frozen"}),
        ("linear_kl_loss", 16384, {}),
        ("linear_kl_loss", 4096, {"dtype": FP32}),
        ("linear_kl", 4096, {"head": "frozen"}),
    ],
    ids=["frozen", "many rows", "fp32", "by tokens"],
)
def test_chunks_of_both_logits_fit_the_workspace(op, rows, options):
    counts = counted(op, rows, H, V, teacher=2 * H, **options)
    logits = [x for x in counts.products if (x.k, x.n) == (H, V)]
    assert sum(x.m for x in logits) == rows * (2 if op == "linear_kl" else 1)
    assert all(x.m % 256 == 0 for x in logits)
    assert counts.workspace == 128 * MIB  # of each side


def test_counts_of_a_divergence_are_near_the_least_work_of_an_h100():
    """Four products of one size at 700 TFLOP/s are 25.1 ms."""
    assert counted("linear_kl_loss", *SHAPE, teacher=H).seconds(*H100) <= 28e-3
    assert counted("linear_kl", *SHAPE, teacher=H).seconds(*H100) <= 42e-3
