"""The documentation's tables of policy losses are the code's."""

from pathlib import Path

import pytest

from fastrl_kernels.policy_losses import POLICY_LOSSES, RATIO_LEVELS

PAGE = Path(__file__).parents[2] / "docs" / "losses.md"


@pytest.mark.parametrize("name", [*POLICY_LOSSES, *RATIO_LEVELS])
def test_each_row_is_documented(name):
    row = {**POLICY_LOSSES, **RATIO_LEVELS}[name]
    assert f"| `{name}` | {row.formula} | {row.source} |\n" in PAGE.read_text()
