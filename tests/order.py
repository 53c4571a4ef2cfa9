"""``--order SEED`` runs modules in a random order, and the tests of each; ``--order random`` draws
the seed, which the run prints. ``--order reversed`` begins with the last."""

import random
from itertools import groupby
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order", metavar="SEED", help="a number, random, or reversed")


def pytest_configure(config: pytest.Config) -> None:
    option, of_the_run = config.option, getattr(config, "workerinput", {})
    option.order = of_the_run.get("order", option.order)
    if option.order == "random":
        option.order = str(random.SystemRandom().randrange(10**6))


@pytest.hookimpl(optionalhook=True)  # xdist's
def pytest_configure_node(node: Any) -> None:
    """All workers have the order that the run has drawn."""
    node.workerinput["order"] = node.config.option.order


def pytest_report_header(config: pytest.Config) -> str | None:
    return config.option.order and f"order: --order {config.option.order}"


@pytest.hookimpl(tryfirst=True)  # pytest then brings those together that share what is costly
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = config.option.order
    if order == "reversed":
        items.reverse()
    elif order:
        draws = random.Random(int(order))
        modules = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
        for tests in draws.sample(modules, len(modules)):
            items[: len(tests)] = []
            items += draws.sample(tests, len(tests))
