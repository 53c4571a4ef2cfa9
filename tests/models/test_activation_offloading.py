"""Activations that wait in host memory give the same gradients, and weights are not copied."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastrl import PPOConfig, PPOTrainer
from fastrl.models import activation_offloading as module
from fastrl.models.activation_checkpointing import all_layers, checkpointed
from fastrl.models.activation_offloading import OffloadedActivations, activation_offloading
from tests import tiny_models
from tests.golden import tiny
from tests.trainers.conftest import Make, make_sft

__all__ = ["make_sft"]  # a fixture

IDS = torch.arange(3, 83).view(4, 20)


def everything(tensor: Tensor) -> bool:
    return True


def gradients(model: nn.Module, *contexts: Any) -> list[Tensor]:
    model.zero_grad()
    for context in contexts:
        context.__enter__()
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    for context in reversed(contexts):
        context.__exit__(None, None, None)
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_gradients_are_the_same_bit_for_bit(family: str, autocast: bool, recomputed: bool) -> None:
    model = tiny_models.language_model(family).eval()

    def contexts(*more: Any) -> list[Any]:
        found = [*more, torch.autocast("cpu", torch.bfloat16, enabled=autocast)]
        return [*found, checkpointed(all_layers(model))] if recomputed else found

    plain = gradients(model, *contexts())
    offloaded = OffloadedActivations(model, everything)
    assert all(map(torch.equal, plain, gradients(model, *contexts(offloaded))))
    assert offloaded.bytes > 4 * IDS.numel() * model.config.hidden_size


def test_weights_are_not_copied_and_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 80))
    monkeypatch.setattr(module, "SMALLEST", 1)
    x = torch.randn(32, 64, requires_grad=True)
    with OffloadedActivations(model, everything) as offloaded:
        hidden = model[0](x)
        # hidden is saved by two layers and a product; weights by the layers' own gradients.
        (model[1](hidden).sum() + model[1](hidden).sum() + (hidden * hidden).sum()).backward()
    assert offloaded.bytes == x.nbytes + hidden.nbytes

    with (
        OffloadedActivations(model, everything) as offloaded,
        torch.autocast("cpu", torch.bfloat16),
    ):
        model(x).sum().backward()
    assert offloaded.bytes == (x.nbytes + hidden.nbytes) // 2  # in bf16, and no weight


def test_what_is_gone_is_not_taken_for_another() -> None:
    """Memory is used again within a forward; a copy is of what lay there when it was saved."""
    model = nn.Linear(4, 4)
    with OffloadedActivations(model, everything) as offloaded:
        total = torch.zeros(())
        leaves = [torch.randn(500, requires_grad=True) for _ in range(20)]
        for leaf in leaves:
            total = total + (leaf * 2).sin().sum()  # saves leaf * 2, which is gone afterwards
    total.backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, (leaf.detach() * 2).cos() * 2)
    assert offloaded.bytes == 20 * 500 * 4


def test_a_tensor_and_its_transpose_are_told_apart() -> None:
    x = torch.randn(30, 30, requires_grad=True)
    with OffloadedActivations(nn.Linear(2, 2), everything):
        y = x * 2
        loss = (y.sin() + y.t().cos()).sum()
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (x.detach() * 2).cos() * 2 - (x.detach() * 2).sin() * 2)


def test_small_and_expanded_tensors_stay() -> None:
    model = nn.Linear(2, 2)
    with OffloadedActivations(model, everything) as offloaded:
        small = torch.randn(9, requires_grad=True)
        wide = torch.randn(1, 300, requires_grad=True).expand(300, 300)
        (small * small).sum().backward()
        (wide * wide).sum().backward()
    assert offloaded.bytes == 0


def test_trainers_offload_their_forwards(monkeypatch: pytest.MonkeyPatch, make_sft: Make) -> None:
    """On a CPU the setting has no effect, as a warning says: here it is as on a device."""
    used: list[OffloadedActivations] = []

    def offloading(wanted: bool, *_: Any) -> Any:
        def of(model: nn.Module) -> OffloadedActivations:
            used.append(OffloadedActivations(model, everything))
            return used[-1]

        return of if wanted else activation_offloading(False, torch.device("cpu"))

    monkeypatch.setattr("fastrl.learn.memory.activation_offloading", offloading)
    monkeypatch.setattr("fastrl.trainers.base.activation_offloading", offloading)
    ended = []
    for wanted in (False, True):
        policy = tiny_models.policy()
        config = PPOConfig(
            batch_size=4,
            ppo_epochs=2,
            activation_offloading=wanted,
            accelerator_kwargs={"cpu": True},  # as the trainer below, whose device is the process's
        )
        trainer = PPOTrainer(config, policy, None, tiny.tokenizer())
        queries, responses = (
            tiny_models.prompts(3, 4, 5, 6),
            tiny_models.prompts(7, 9, 8, 7, seed=1),
        )
        trainer.step(queries, responses, [torch.tensor(float(i)) for i in range(4)])
        sft = make_sft(max_steps=2, activation_offloading=wanted)
        sft.train()
        ended.append([*policy.parameters(), *sft.model.parameters()])
    assert all(map(torch.equal, *ended))
    assert len(used) == 1 + 2
    assert all(each.bytes for each in used)


def test_it_is_told_where_it_does_nothing_or_cannot_be() -> None:
    with pytest.warns(UserWarning, match="activation_offloading has no effect on a CPU"):
        activation_offloading(True, torch.device("cpu"))
    with pytest.raises(ValueError, match="FSDP2 spreads"):
        activation_offloading(True, torch.device("cuda"), spread=True)
