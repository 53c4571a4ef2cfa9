"""The reference of a trainer by TRL's settings: of new adapters, of trained ones, and those that
follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fastrl.models import CausalLMPolicy
from fastrl.models.load import with_adapter
from fastrl.ref_model.adapter import AdapterOffRefModel, StartAdapterRefModel
from fastrl.ref_model.copy import CopyRefModel
from fastrl.trl.reference import reference_of
from tests import tiny_models


def settings(sync: bool = False) -> Any:
    return SimpleNamespace(sync_ref_model=sync, ref_model_sync_steps=2, ref_model_mixup_alpha=0.5)


@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
@pytest.mark.parametrize(
    ("begins_at_zero", "fresh", "sync", "kind"),
    [
        (True, True, False, AdapterOffRefModel),
        (False, True, False, AdapterOffRefModel),
        (True, False, False, AdapterOffRefModel),
        (False, False, False, StartAdapterRefModel),  # it was trained before
        (True, True, True, StartAdapterRefModel),
    ],
)
def test_references_of_adapters(begins_at_zero: bool, fresh: bool, sync: bool, kind: type) -> None:
    lora = tiny_models.lora(init_lora_weights=begins_at_zero)
    policy = CausalLMPolicy(with_adapter(tiny_models.language_model(), lora))
    assert type(reference_of(settings(sync), policy, fresh=fresh)) is kind


@pytest.mark.parametrize("sync", [False, True])
def test_a_whole_model_has_a_copy(sync: bool) -> None:
    policy = CausalLMPolicy(tiny_models.language_model())
    assert type(reference_of(settings(sync), policy)) is CopyRefModel
