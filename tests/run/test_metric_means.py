"""Means of batches over processes and between logs."""

import math
from typing import Any

import pytest
import torch

from fastrl.run.metric_means import MetricMeans, mean_of
from fastrl.run.processes import OneProcess


class Seen(OneProcess):
    """What a process would tell the others."""

    def objects(self, own: Any) -> list[Any]:
        self.own = own
        return [own]


class Several(OneProcess):
    """This process, and others that have what is given."""

    def __init__(self, *others: MetricMeans):
        self.others, self.count = others, 1 + len(others)

    def objects(self, own: Any) -> list[Any]:
        told = [Seen() for _ in self.others]
        for other, each in zip(self.others, told, strict=True):
            other.take(each)
        return [own, *(each.own for each in told)]


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


def of_batch(a: list[float], least: list[float], most: list[float]) -> MetricMeans:
    means = MetricMeans()
    means.add({"a": mean_of(torch.tensor(a))})
    means.add_extreme("least", torch.tensor(least), most=False)
    means.add_extreme("most", torch.tensor(most), most=True)
    means.add_number("n", 7.0)
    return means


def test_processes_are_joined_batch_by_batch() -> None:
    others = of_batch([4.0, 6.0], [-1.0], [5.0]), of_batch([], [], [])
    found = of_batch([1.0, 2.0, 3.0], [3.0], []).take(Several(*others))
    assert found == {"a": 3.2, "least": -1.0, "most": 5.0, "n": 7.0}


def pooled(*batches: list[float], also: tuple[str, ...] = ()) -> MetricMeans:
    means = MetricMeans()
    for batch in batches:
        values = torch.tensor(batch)
        means.pool_values(dict.fromkeys(["x", *also], values))
        means.pool({"sum": mean_of(values)}, of_none=0.0)
        means.pool_extremes("least", "most", values)
        means.count("tokens", torch.tensor(len(batch)))
    return means


def test_of_what_is_pooled_each_number_weighs_the_same() -> None:
    means, other = pooled([1.0, 2.0], [6.0]), pooled([-1.0, 7.0], also=("y",))
    processes = Several(other)
    assert means.totals(OneProcess()) == {"tokens": 3.0}
    found = means.take(processes, sem_of=["x"])
    sem = torch.tensor([1.0, 2.0, 6.0, -1.0, 7.0]).std().item() / 5**0.5
    assert found.pop("x_sem") == pytest.approx(sem, rel=1e-6)
    assert found == {"x": 3.0, "sum": 3.0, "least": -1.0, "most": 7.0, "y": 3.0}
    assert means.take(OneProcess()) == {}
    assert means.totals(OneProcess()) == {"tokens": 3.0}
    assert pooled([]).take(OneProcess()) == {"x": None, "sum": 0.0, "least": None, "most": None}


def test_a_checkpoint_has_what_was_not_logged_yet() -> None:
    means, other = added(), MetricMeans({"gap": ("a", "b")})
    other.load(means.state(), torch.device("cpu"))
    assert other.take(OneProcess())["a"] == pytest.approx(4.0)
    before = means.mark()
    means.add_number("n", 100.0)
    means.pool_values({"x": torch.ones(3)})
    means.count("tokens", 5)
    means.rewind(before)
    assert means.take(OneProcess()) == added().take(OneProcess())
    assert means.totals(OneProcess()) == {}


def test_other_processes_share_what_is_pooled() -> None:
    states = [pooled([1.0, 2.0]).state(), pooled([6.0]).state(), added().state()]
    share = MetricMeans()
    share.load(MetricMeans.of_others(states, 2), torch.device("cpu"))
    assert share.totals(OneProcess()) == {"tokens": 1.5}
    assert share.take(OneProcess()) == {"x": 3.0, "sum": 3.0, "least": 1.0, "most": 6.0}


def test_a_difference_without_its_metrics_is_none() -> None:
    means = MetricMeans({"gap": ("a", "b")})
    means.add_number("a", 1.0)
    assert means.take(OneProcess()) == {"a": 1.0}
