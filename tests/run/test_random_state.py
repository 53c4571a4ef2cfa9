"""Seeds of draws, and the generators' states around them."""

import pytest
import torch

from fastrl.run.random_state import drawing_from


def test_draws_from_a_seed_leave_every_generator_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host with GPUs, too: torch.manual_seed seeds all of them."""
    seeded = list[int]()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    torch.manual_seed(3)
    seeded.clear()
    before = torch.get_rng_state()
    with drawing_from(7, torch.device("cpu")):
        drawn = torch.rand(4)
    assert seeded == []
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(7)))
