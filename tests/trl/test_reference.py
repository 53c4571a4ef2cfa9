"""The reference of a trainer by TRL's settings: of new adapters, of trained ones, and those that
follow."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl.learn.ref_model import ReferenceArguments
from fastrl.learn.ref_model.adapter import AdapterOffRefModel, StartAdapterRefModel
from fastrl.learn.ref_model.copy import CopyRefModel
from fastrl.models import CausalLMPolicy
from fastrl.models.load import with_adapter
from fastrl.trainers.reference import reference_of
from tests import tiny_models
from tests.trl import test_dpo, test_kto, test_online


@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
@pytest.mark.parametrize(("begins_at_zero", "fresh", "sync", "kind"), [
    (True, True, False, AdapterOffRefModel),
    (False, True, False, AdapterOffRefModel),
    (True, False, False, AdapterOffRefModel),
    (False, False, False, StartAdapterRefModel),  # it was trained before
    (True, True, True, StartAdapterRefModel),
])  # fmt: skip
def test_references_of_adapters(begins_at_zero: bool, fresh: bool, sync: bool, kind: type) -> None:
    lora = tiny_models.lora(init_lora_weights=begins_at_zero)
    policy = CausalLMPolicy(with_adapter(tiny_models.language_model(), lora))
    assert type(reference_of(ReferenceArguments(sync_ref_model=sync), policy, fresh=fresh)) is kind


@pytest.mark.parametrize("sync", [False, True])
def test_a_whole_model_has_a_copy(sync: bool) -> None:
    policy = CausalLMPolicy(tiny_models.language_model())
    assert type(reference_of(ReferenceArguments(sync_ref_model=sync), policy)) is CopyRefModel


KINDS = ("dpo", "kto", "grpo", "rloo")
LEARNING: dict[str, Any] = {"beta": 0.3, "learning_rate": 0.3, "optim": "sgd", "max_steps": 2}


def made(kind: str, folder: Path, model: Any = None, **settings: Any) -> Any:
    make = {"dpo": test_dpo.trainer, "kto": test_kto.trainer}.get(kind)
    settings = {**LEARNING, **settings}
    model = tiny_models.language_model() if model is None else model
    if make is None:
        return test_online.make(folder, kind, model=model, **settings)
    return make(folder, model, **settings)


def learned(trainer: Any) -> dict[str, Tensor]:
    trainer.train()
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - x).detach().abs().max()) for name, x in other.items())


@pytest.mark.filterwarnings("ignore:the LM head shares its weight with the embeddings")
@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_is_kept_as_asked(kind: str, tmp_path: Path) -> None:
    start = dict(tiny_models.language_model().named_parameters())
    copied = learned(made(kind, tmp_path))
    assert apart(copied, start) > 1e-3
    elsewhere = made(kind, tmp_path, reference="offload")
    assert elsewhere._reference.mode == "offload"
    assert apart(learned(elsewhere), copied) < 1e-6

    shared = made(kind, tmp_path, num_shared_layers=1)
    assert shared._reference.mode == "trunk"
    own, theirs = (dict(m.named_parameters()) for m in (shared.model, shared.ref_model))
    same = {name for name, p in own.items() if theirs[name] is p}
    assert any(".h.0." in name for name in same)
    assert not any(".h.1." in name for name in same)
    frozen = tiny_models.language_model()
    for name, p in frozen.named_parameters():
        p.requires_grad_(name not in same)
    found = learned(shared)
    assert apart(found, learned(made(kind, tmp_path, frozen))) < 1e-6
    assert all(torch.equal(found[name], start[name]) for name in same)
    assert apart(found, start) > 1e-3


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_settings_of_a_reference_that_is_not_there(kind: str, tmp_path: Path) -> None:
    none: dict[str, Any] = {"grpo": {"beta": 0.0}, "dpo": {"precompute_ref_log_probs": True}}[kind]
    with pytest.raises(ValueError, match="num_shared_layers=1 is of a reference model, and with"):
        made(kind, tmp_path, num_shared_layers=1, **none)
    with pytest.raises(ValueError, match="needs a PEFT model: choose 'copy'"):
        made(kind, tmp_path, reference="adapter")
