"""The count that decides where a head is fused with its draw."""

from pathlib import Path

import pytest
import torch

from benchmarks.ops.draw_counts import GPUS, H100, MODELS, ROWS, WAYS, Head, counted, gain, table
from fastrl_kernels import linear_sample_pays

HEADS = [*MODELS.values(), (576, 49152), (2048, 128256), (1024, 151936), (2048, 256000)]


@pytest.mark.parametrize("hidden_vocabulary", HEADS)
def test_a_head_is_fused_where_that_is_counted_to_save_a_twentieth(hidden_vocabulary):
    """On both GPUs; what is within half a percent of it may be either."""
    for rows in range(1, 129):
        least = min(gain(Head(rows, *hidden_vocabulary), gpu) for gpu in GPUS)
        if abs(least - 0.05) > 0.005:
            pays = linear_sample_pays(rows, *hidden_vocabulary, torch.bfloat16)
            assert pays == (least > 0.05), (rows, least)


def test_neither_multiplying_a_group_again_nor_storing_one_is_faster():
    """A group's columns of the weight are 2·512·H bytes, its row's logits 2·V."""
    for model, head, gpu, seconds in counted():
        assert seconds.keys() == WAYS.keys()
        if head.hidden >= 593 and head.vocabulary == 151936:
            assert seconds["recompute"] > seconds["today"], (model, head, gpu.name)
        assert seconds["race"] <= seconds["store"], (model, head, gpu.name)


def test_the_documents_show_what_is_counted():
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert table() in page, "docs/kernels.md: paste what benchmarks.ops.draw_counts.table() gives"


def test_counts_of_a_known_shape():
    """Qwen2.5-0.5B, 32 rows, H100: 272.3 MB of weights in 90.8 µs, 9.7 MB of logits in 3.2."""
    head = Head(32, 896, 151936)
    assert WAYS["today"](head, H100) == pytest.approx(103.3e-6, rel=2e-3)
    assert WAYS["race"](head, H100) == pytest.approx(95.6e-6, rel=2e-3)
    assert len(list(counted())) == len(MODELS) * len(ROWS) * len(GPUS)
