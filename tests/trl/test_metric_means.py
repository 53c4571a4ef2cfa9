"""Means of batches over processes and between logs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fastrl.run.processes import OneProcess
from fastrl.trl.metric_means import MetricMeans, mean_of


class Several(OneProcess):
    """This process, and others that add what is given."""

    def __init__(self, *others: torch.Tensor):
        self.others, self.count = others, 1 + len(others)

    def joined(self, own: Any, lengths: Any) -> Any:
        return torch.cat([own, *(x[None].to(own) for x in self.others)])


def added() -> MetricMeans:
    """Two batches."""
    means = MetricMeans({"gap": ("a", "b")})
    means.add({"a": mean_of(torch.tensor([1.0, 2.0, 3.0])), "b": mean_of(torch.tensor([4.0]))})
    means.add_number("n", 7.0)
    means.add_extreme("least", torch.tensor([3.0, math.nan, 2.0]), most=False)
    means.add_extreme("most", torch.tensor([math.nan]), most=True)
    means.add({"a": mean_of(torch.tensor([6.0])), "b": mean_of(torch.tensor([]))})
    means.add_number("n", math.nan)
    means.add_number("never", math.nan)
    return means


def test_each_batch_weighs_the_same_and_what_is_absent_nothing() -> None:
    means = added()
    assert means.take(OneProcess()) == {
        **{"a": 4.0, "b": 4.0, "gap": -2.0, "n": 7.0, "least": 2.0},
        **{"most": None, "never": None},
    }
    assert means.take(OneProcess()) == {}


def test_processes_are_joined_batch_by_batch() -> None:
    means = MetricMeans()
    means.add({"a": mean_of(torch.tensor([1.0, 2.0, 3.0]))})
    means.add_extreme("least", torch.tensor([3.0]), most=False)
    means.add_extreme("most", torch.tensor([]), most=True)
    means.add_number("n", 7.0)
    other = torch.tensor([[10.0, 1.0], [-1.0, 1.0], [5.0, 1.0], [7.0, 1.0]])
    none = torch.tensor([[0.0, 0.0], [math.inf, 0.0], [-math.inf, 0.0], [7.0, 1.0]])
    found = means.take(Several(other, none))
    assert found == {"a": 4.0, "least": -1.0, "most": 5.0, "n": 7.0}


def test_a_checkpoint_has_what_was_not_logged_yet() -> None:
    means, other = added(), MetricMeans({"gap": ("a", "b")})
    other.load(means.state(), torch.device("cpu"))
    assert len(other) == len(means)
    means.shorten(1)
    assert means.take(OneProcess()) == {"a": 2.0, "b": 4.0, "gap": -2.0}
    assert other.take(OneProcess())["a"] == pytest.approx(4.0)
