"""Every kind of alignment ends, bit for bit, as if it had not been interrupted."""

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from fastrl.alignment import AlignmentConfig, Trainer, make_loss
from fastrl.alignment.tasks import find_task
from fastrl.data.columns import PAIRS, PROMPTS
from tests import tiny_models
from tests.alignment.conftest import SETTINGS, LikesHigh, examples, make_factory, model_of
from tests.resuming import assert_resumes, assert_same_run, resumed, straight, with_dropout

pytestmark = [
    pytest.mark.filterwarnings(tiny_models.PEFT_WARNING),
    pytest.mark.filterwarnings("ignore:.*code or weights of the annotator"),  # that fails once
]
ROWS = 10
FOLLOWS: dict[str, Any] = {
    "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5,
}  # fmt: skip
# By case: task, loss with its coefficients, settings, and the numbers of checkpoints, from 0. An
# epoch of ten examples has five batches of two.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "dpo": ("offline-pairwise", "dpo", {}, {}, (4, 6)),
    "accumulation": ("offline-pairwise", "dpo", {}, {"gradient_accumulation_steps": 2}, (0, 2)),
    "an adapter": ("offline-pairwise", "dpo", {}, {"peft_config": tiny_models.lora()}, (2,)),
    "dropout": ("offline-pairwise", "dpo", {}, {"reference": "copy", "disable_dropout": False},
     (2,)),
    "a reference that follows": ("offline-pairwise", "dpo", {}, FOLLOWS, (2, 4)),
    "a reference adapter that follows": ("online-pairwise", "dpo", {},
     {**FOLLOWS, "reference_adapter": "start", "peft_config": tiny_models.lora(), "max_steps": 6},
     (2,)),
    "kto": ("offline-pointwise", "kto", {}, {}, (2,)),
    "a reward model": ("reward-modelling", "bradley-terry", {}, {}, (2,)),
    "online pairs": ("online-pairwise", "dpo", {}, {"max_steps": 7}, (0, 4)),
    "ppo": ("reinforcement-learning", "ppo", {"epochs": 2, "mini_batches": 2},
     {"max_steps": 9, "gradient_accumulation_steps": 2}, (0, 1)),
    "an early stop": (
        "reinforcement-learning",
        "ppo",
        {"epochs": 4, "early_stopping": True, "target_kl": 1e-9, "kl_coef": 0.0},
        {"max_steps": 20, "rows": 4},  # its second epoch begins long before the sixteenth step
        (1, -2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_alignment_goes_on_from_any_checkpoint(name: str, tmp_path: Path) -> None:
    task, loss_name, coefficients, settings, steps = CASES[name]
    settings = {"eval_strategy": "epoch", **settings}
    peft_config = settings.pop("peft_config", None)
    rows = examples(find_task(task).data, settings.pop("rows", ROWS))
    held_out = examples(find_task(task).data, 4, seed=1)

    def make(folder: Path) -> Trainer:
        loss = make_loss(loss_name, **coefficients)
        values = loss.learns == "policy with values"
        args = {
            **SETTINGS, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 1,
            "logging_steps": 2, **settings,
        }  # fmt: skip
        size = coefficients.get("mini_batches", 1) * 2
        given = {"batch_size": size, "shuffle": True, "epochs": 2}
        return Trainer(
            tiny_models.policy() if values else with_dropout(model_of(loss)),
            AlignmentConfig(output_dir=str(folder), **args),
            make_factory(task, rows, **given),
            loss,
            eval_factory=make_factory(task, held_out, batch_size=2),
            peft_config=peft_config,
        )

    assert_resumes(make, tmp_path, steps)


class TiresOnce(LikesHigh):
    """Fails at one of its calls."""

    def __init__(self, call: int):
        super().__init__()
        self.left = call

    def score(self, prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("no more")
        return super().score(prompts, responses, **columns)


@pytest.mark.parametrize("call", [4, 6])
def test_a_step_that_fails_leaves_the_state_before_it(call: int, tmp_path: Path) -> None:
    """One of whose two batches is drawn; five batches are an epoch."""

    def make(folder: Path, annotator: Any = None) -> Trainer:
        rows = examples(PROMPTS, ROWS)
        factory = make_factory(
            "online-pointwise", rows, batch_size=2, annotator=annotator or LikesHigh()
        )
        settings = {"gradient_accumulation_steps": 2, "max_steps": 5, "logging_steps": 4}
        return Trainer(
            with_dropout(tiny_models.language_model()),
            AlignmentConfig(
                output_dir=str(folder),
                **{**SETTINGS, "save_strategy": "steps", "save_steps": 10, **settings},
            ),
            factory,
            make_loss("kto"),
        )

    trainer = make(tmp_path / "run", TiresOnce(call))
    with (
        pytest.warns(UserWarning, match="after RuntimeError the state is saved in"),
        pytest.raises(RuntimeError, match="no more"),
    ):
        trainer.train()
    assert_same_run(resumed(make, tmp_path / "run", True), straight(make, tmp_path / "straight"))


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end"])
def test_what_fails_behind_an_epochs_last_step_leaves_the_next_epoch(
    event: str, tmp_path: Path
) -> None:
    """Also in a callback, which transformers calls before it takes the epoch for done; a reference
    that follows has moved then."""

    def make(folder: Path, **given: Any) -> Trainer:
        rows, loss = examples(PAIRS, 4), make_loss("dpo")
        settings = {**SETTINGS, **FOLLOWS, "save_strategy": "steps"}
        args = AlignmentConfig(str(folder), logging_steps=4, **settings)
        factory = make_factory("offline-pairwise", rows, batch_size=2, epochs=2, shuffle=True)
        return Trainer(with_dropout(tiny_models.language_model()), args, factory, loss, **given)

    def fail(_: Any, args: Any, state: Any, *others: Any, **more: Any) -> None:
        if state.global_step == 2:
            raise RuntimeError("no more")

    failing = type("Failing", (TrainerCallback,), {event: fail})()
    with (
        pytest.warns(UserWarning, match="after RuntimeError the state is saved in"),
        pytest.raises(RuntimeError, match="no more"),
    ):
        make(tmp_path / "run", callbacks=[failing]).train()
    assert_same_run(resumed(make, tmp_path / "run", True), straight(make, tmp_path / "straight"))
