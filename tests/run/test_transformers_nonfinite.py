"""A loss or gradient that is not finite reaches no weight, and is counted."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from fastrl.trainers.finite_steps import MOST_IN_A_ROW
from tests.alignment.conftest import Make, make_trainer
from tests.resuming import assert_same_run, resumed, straight
from tests.trainers.conftest import make_reward, make_sft, texts, weights

__all__ = ["make_reward", "make_sft", "make_trainer"]
SETTINGS: dict[str, Any] = {"max_steps": 4, "logging_steps": 2, "learning_rate": 1e-2}
LEFT_OUT = "left out, as any later ones will be; nonfinite_steps counts"


class Snapshots(TrainerCallback):
    """The weights after each step, and the moments of the optimizer."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []
        self.steps: list[set[float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.weights.append(weights(given["model"]))
        moments = given["optimizer"].state.values()
        self.steps.append({float(each["step"]) for each in moments})


def spoil_loss(trainer: Any, steps: set[int], number: float = math.nan) -> None:
    """Makes the losses of these steps NaN or infinite, and with NaN the gradients too."""
    compute = trainer.compute_loss

    def spoiled(model: nn.Module, inputs: Any, *rest: Any, **more: Any) -> Any:
        loss = compute(model, inputs, *rest, **more)
        if trainer.state.global_step + 1 in steps and model.training:
            return loss * number if math.isnan(number) else loss + number
        return loss

    trainer.compute_loss = spoiled


def spoil_gradient(trainer: Any, steps: set[int], number: float = math.inf) -> None:
    """Makes one number of the gradients of these steps infinite; the losses are sound."""
    weight = next(trainer.model.parameters())

    def spoiled(gradient: torch.Tensor) -> torch.Tensor:
        if trainer.state.global_step + 1 in steps:
            gradient = gradient.clone()
            gradient.view(-1)[0] = number
        return gradient

    weight.register_hook(spoiled)


def spoil_infinite_loss(trainer: Any, steps: set[int]) -> None:
    spoil_loss(trainer, steps, math.inf)


SPOILERS: list[Callable[..., None]] = [spoil_loss, spoil_gradient, spoil_infinite_loss]


@pytest.fixture(params=["sft", "reward", "dpo"])
def make(request: pytest.FixtureRequest) -> Make:
    kind = {"sft": "make_sft", "reward": "make_reward", "dpo": "make_trainer"}[request.param]
    function = request.getfixturevalue(kind)
    return (lambda **x: function("dpo", **x)) if request.param == "dpo" else function


@pytest.mark.parametrize("spoil", SPOILERS)
def test_such_a_step_changes_neither_weights_nor_optimizer(make: Make, spoil: Any) -> None:
    trainer = make(callbacks=[seen := Snapshots()], **SETTINGS)
    spoil(trainer, {3})
    with pytest.warns(UserWarning, match=rf"step 3: the loss or gradient is not .*{LEFT_OUT}"):
        trainer.train()
    second, third, fourth = seen.weights[1:]
    assert all(torch.equal(third[name], x) for name, x in second.items())
    assert not all(torch.equal(fourth[name], x) for name, x in third.items())
    assert all(torch.isfinite(x).all() for x in fourth.values())
    assert seen.steps == [{1}, {2}, {2}, {3}]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_logs_count_it_and_have_the_mean_loss_of_the_others(
    make_sft: Make, accumulation: int
) -> None:
    settings = {**SETTINGS, "gradient_accumulation_steps": accumulation, "logging_steps": 1}
    sound = make_sft(**settings)
    sound.train()
    trainer = make_sft(**{**settings, "logging_steps": 2})
    spoil_loss(trainer, {2, 3, 4})
    with pytest.warns(UserWarning, match="step 2: .*left out") as caught:
        output = trainer.train()
    assert len(caught) == 1
    rows = [log for log in trainer.state.log_history if "loss" in log]
    first = sound.state.log_history[0]["loss"]
    assert rows[0]["loss"] == pytest.approx(first, rel=1e-6)
    assert rows[0]["nonfinite_steps"] == 1
    assert math.isnan(rows[1]["loss"])
    assert rows[1]["nonfinite_steps"] == 2
    assert output.training_loss == pytest.approx(first, rel=1e-6)
    assert "nonfinite_steps" not in sound.state.log_history[0]


def test_a_run_with_such_steps_goes_on_from_any_checkpoint(make_sft: Make, tmp_path: Path) -> None:
    def make(folder: Path) -> Any:
        settings = {**SETTINGS, "max_steps": 5, "logging_steps": 4, "save_steps": 1}
        trainer = make_sft(data=texts(8), output_dir=str(folder), save_strategy="steps", **settings)
        spoil_loss(trainer, {2, 5})
        return trainer

    with pytest.warns(UserWarning, match=LEFT_OUT):
        whole = straight(make, tmp_path / "whole")
    again = resumed(make, tmp_path / "again", whole.checkpoints.path(3))
    assert_same_run(again, whole)
    assert [r["nonfinite_steps"] for r in again.state.log_history if "loss" in r] == [1]


def test_it_may_be_an_error_with_the_state_before_it_saved(make: Make, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 10}
    trainer = make(on_nonfinite="raise", output_dir=str(tmp_path / "run"), **saving, **SETTINGS)
    spoil_gradient(trainer, {3})
    with (
        pytest.warns(UserWarning, match="after FloatingPointError the state is saved in"),
        pytest.raises(FloatingPointError, match=r"step 3: .*gradient norm inf\): the step was not"),
    ):
        trainer.train()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-2"]


def test_a_model_that_gives_nothing_else_is_an_error(make_sft: Make) -> None:
    trainer = make_sft(**{**SETTINGS, "max_steps": 2 * MOST_IN_A_ROW})
    spoil_loss(trainer, set(range(2, 100)))
    with (
        pytest.warns(UserWarning, match=LEFT_OUT),
        pytest.raises(FloatingPointError, match=f"step {MOST_IN_A_ROW + 1}.*the model is broken"),
    ):
        trainer.train()


def test_an_unknown_way_is_refused(make_sft: Make) -> None:
    with pytest.raises(ValueError, match="unknown on_nonfinite 'ignore': choose one of skip, rai"):
        make_sft(on_nonfinite="ignore")
