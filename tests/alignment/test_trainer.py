"""The trainer of the framework: one loop for all tasks, references, evaluation, checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastrl.alignment import LOSSES, PairwiseLoss, make_loss
from fastrl.data.columns import FEEDBACK, PAIRS, PROMPTS
from fastrl.models import AutoModelForCausalLMWithValueHead, CausalLMPolicy
from tests import tiny_models
from tests.alignment.conftest import (
    GRADIENT_STEP,
    LikesHigh,
    Make,
    examples,
    make_factory,
    model_of,
    trained,
    worth,
)
from tests.trainers.conftest import weights

OFFLINE = [
    (name, task)
    for name in ("dpo", "cdpo", "robust", "hinge", "ipo", "simpo", "orpo", "slic", "kto")
    for task in LOSSES[name].tasks
    if task.startswith("offline")
]
ONLINE = [(name, task) for name in ("dpo", "kto", "ppo") for task in LOSSES[name].tasks[-1:]]
# Passes over 32 pairs, where 10 are too few, and a SLiC that is mostly its margin.
SLOW = {"slic": 20, "orpo": 25, "ipo": 16}
COEFFICIENTS = {"slic": {"beta": 3.0, "lam": 0.01}}


@pytest.mark.parametrize(("name", "task"), OFFLINE)
def test_offline_losses_fit_32_pairs(make_trainer: Make, name: str, task: str) -> None:
    """To a positive margin on each of them; pointwise, on each of 32 responses."""
    rows = examples(FEEDBACK if task == "offline-pointwise" else PAIRS, 32)
    trainer = make_trainer(
        make_loss(name, **COEFFICIENTS.get(name, {})),
        rows=rows,
        task=task,
        batch_size=8,
        epochs=SLOW.get(name, 10),
        shuffle=True,
        eval_factory=make_factory(task, rows, batch_size=32),
        learning_rate=7e-3,
        lr_scheduler_type="constant",
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert before["eval_rewards/accuracies"] < 0.8
    assert after["eval_rewards/accuracies"] == 1.0
    assert after["eval_loss"] < before["eval_loss"]


@pytest.mark.parametrize(("name", "task"), ONLINE)
def test_online_learning_raises_what_the_annotator_says(
    make_trainer: Make, name: str, task: str
) -> None:
    rows = examples(PROMPTS, 24)
    trainer = make_trainer(
        name,
        rows=rows,
        task=task,
        batch_size=24,
        examples=24 * 12,
        eval_factory=make_factory(task, rows, batch_size=24),
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    gain = after["eval_reward"] - before["eval_reward"]
    assert gain > 2 * (after["eval_reward_sem"] ** 2 + before["eval_reward_sem"] ** 2) ** 0.5
    log = next(log for log in trainer.state.log_history if "tokens/responses" in log)
    assert 1 <= log["tokens/responses"] <= 5
    assert log["perf/rollout_tokens_per_second"] > 0


def test_a_second_run_goes_on_through_the_prompts(make_trainer: Make) -> None:
    """Offline, it is the same run again."""
    for task, kind in (("online-pairwise", PROMPTS), ("offline-pairwise", PAIRS)):
        rows = examples(kind, 8)
        trainer = make_trainer("dpo", rows=rows, task=task, shuffle=True, max_steps=1)
        seen: list[list[int]] = []
        take = trainer.factory.take

        def noted(count: int, take: Any = take, seen: Any = seen) -> Any:
            for batch in take(count):
                seen.append(batch.columns["number"])
                yield batch

        trainer.factory.take = noted
        trainer.train()
        trainer.train()
        first, second = seen
        if task == "online-pairwise":
            assert sorted(first + second) == list(range(8))
        else:
            assert first == second


def test_an_evaluation_writes_the_same_while_nothing_is_learned(make_trainer: Make) -> None:
    factory = make_factory("online-pairwise", examples(PROMPTS, 6))
    trainer = make_trainer("dpo", task="online-pairwise", eval_factory=factory)
    first = trainer.evaluate()
    torch.randn(3)
    assert trainer.evaluate() == trainer.evaluate() == first
    assert len(trainer.evaluation.judged) == 2  # the first and the last
    assert trainer.evaluation.judged[0] == trainer.evaluation.judged[1]
    assert len(trainer.evaluation.judged[0].prompts) == 6


def test_processes_write_what_one_would(make_trainer: Make) -> None:
    """In an evaluation, each for its share of the prompts."""
    factory = make_factory("online-pairwise", examples(PROMPTS, 6), batch_size=2)
    trainer = make_trainer("dpo", task="online-pairwise", eval_factory=factory)
    written = []
    for rank, world in ((0, 1), (0, 2), (1, 2)):
        factory.share(rank, world)
        trainer.evaluate()
        judged = trainer.evaluation.judged[-1]
        written.append(dict(zip(judged.prompts, judged.completions, strict=True)))
    assert len(written[1]) == len(written[2]) == 3
    assert written[0] == written[1] | written[2]


class OnlyCompares:
    wants_finished = True

    def compare(
        self, prompts: Any, firsts: Any, seconds: Any, finished: Any, **columns: Any
    ) -> list[float]:
        assert [len(x) for x in finished] == [len(firsts), len(seconds)]
        return [0.5 if a == b else float(a > b) for a, b in zip(firsts, seconds, strict=True)]

    def statistics(self) -> dict[str, float]:
        return {"annotator/calls": 1.0}


def test_without_scores_the_first_responses_are_what_a_policy_has_to_beat(
    make_trainer: Make,
) -> None:
    factory = make_factory(
        "online-pairwise", examples(PROMPTS, 8), annotator=OnlyCompares(), batch_size=8
    )
    trainer = make_trainer(
        "dpo", task="online-pairwise", annotator=OnlyCompares(), eval_factory=factory,
        learning_rate=0.1, optim="sgd", logging_steps=1,
    )  # fmt: skip
    first = trainer.evaluate()
    assert (first["eval_win_rate"], first["eval_win_rate_sem"]) == (0.5, 0.0)
    trainer.train()
    assert trainer.evaluate()["eval_win_rate_sem"] > 0
    # How often the first of two responses wins says nothing beside it.
    assert not any("rewards/mean" in log for log in trainer.state.log_history)
    assert any("annotator/calls" in log for log in trainer.state.log_history)


def test_accumulation_is_one_big_batch(make_trainer: Make) -> None:
    whole, parts = tiny_models.language_model(), tiny_models.language_model()
    make_trainer("simpo", whole, **GRADIENT_STEP).train()
    make_trainer(
        "simpo", parts, batch_size=2, gradient_accumulation_steps=2, **GRADIENT_STEP
    ).train()
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_a_checkpoint_of_another_trainer_is_refused(make_trainer: Make, tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text("{}")
    trainer = make_trainer("dpo")
    before = weights(trainer.model)
    with pytest.raises(ValueError, match=r"resume_from_checkpoint: .* is of another trainer"):
        trainer.train(resume_from_checkpoint=str(tmp_path))
    assert all(torch.equal(before[name], x) for name, x in weights(trainer.model).items())


def test_a_resumed_run_skips_the_prompts_that_were_drawn_before_an_early_stop(
    make_trainer: Make, tmp_path: Path
) -> None:
    """Each batch is left after one step of four, so steps do not count batches: steps are so large
    that their KL from a few samples is positive, whatever was drawn."""

    def drawn(folder: Path, resume: Any = None) -> list[int]:
        loss = make_loss("ppo", early_stopping=True, target_kl=1e-9, kl_coef=0.0, epochs=4)
        trainer = make_trainer(
            loss, tiny_models.policy(), examples(PROMPTS, 16), batch_size=2, learning_rate=0.5,
            optim="sgd", save_strategy="steps", save_steps=4, output_dir=str(folder),
        )  # fmt: skip
        numbers: list[int] = []
        make = trainer.factory.batch

        def noted(rows: Any, ids: Any) -> Any:
            numbers.extend(row.columns["number"] for row in rows)
            return make(rows, ids)

        trainer.factory.batch = noted
        trainer.train(resume_from_checkpoint=resume)
        return numbers

    whole = drawn(tmp_path / "whole")
    assert whole == list(range(16))
    again = drawn(tmp_path / "again", str(tmp_path / "whole" / "checkpoint-4"))
    assert again == whole[-len(again) :]
    assert 0 < len(again) <= 12


def test_what_is_saved_loads_as_a_plain_model_and_holds_no_pickle(
    make_trainer: Make, tmp_path: Path
) -> None:
    _, trainer = trained(make_trainer)
    trainer.save_model(str(tmp_path / "model"))
    names = {file.name for file in (tmp_path / "model").iterdir()}
    assert "model.safetensors" in names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl"))]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, x in trainer.model.pretrained_model.state_dict().items():
        assert torch.equal(x, loaded.state_dict()[name]), name


def test_ppos_value_head_is_saved_with_its_policy(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer("ppo", tiny_models.policy())
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "model")
    assert torch.equal(loaded.v_head.summary.weight, trainer.model.v_head.summary.weight)


def test_the_best_model_is_put_back(make_trainer: Make) -> None:
    """A learning rate that ruins the model: the first evaluation is the best one."""
    trainer = make_trainer(
        "sft", epochs=4, eval_factory=make_factory("sft"), learning_rate=100.0, optim="sgd",
        lr_scheduler_type="constant", eval_strategy="epoch", save_strategy="epoch",
        load_best_model_at_end=True, metric_for_best_model="eval_loss",
    )  # fmt: skip
    trainer.train()
    evaluated = [x["eval_loss"] for x in trainer.state.log_history if "eval_loss" in x]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(evaluated), rel=1e-5)
    assert min(evaluated) < 0.9 * evaluated[-1]


@pytest.mark.parametrize(("name", "annotator"), [("reward", LikesHigh), ("win_rate", OnlyCompares)])
def test_the_best_policy_of_an_online_task_has_the_highest_reward(
    make_trainer: Make, name: str, annotator: Any
) -> None:
    """Unless another metric is named: evaluations of online tasks have no loss."""
    factory = make_factory("online-pairwise", examples(PROMPTS, 4), annotator=annotator())
    trainer = make_trainer(
        "dpo", task="online-pairwise", annotator=annotator(), eval_factory=factory, epochs=2,
        learning_rate=0.1, optim="sgd", eval_strategy="epoch", save_strategy="epoch",
        load_best_model_at_end=True,
    )  # fmt: skip
    settings = trainer.args.metric_for_best_model, trainer.args.greater_is_better
    assert settings == (f"eval_{name}", True)
    trainer.train()
    logged = [row[f"eval_{name}"] for row in trainer.state.log_history if f"eval_{name}" in row]
    assert trainer.state.best_metric == max(logged)


def test_metrics_are_means_over_samples(make_trainer: Make) -> None:
    rows = examples(PAIRS, 5)
    _, trainer = trained(
        make_trainer,
        rows=rows,
        eval_factory=make_factory("offline-pairwise", rows, batch_size=4),
        learning_rate=1e-2,
    )
    parts = trainer.evaluate()
    trainer.evaluation.factory.batch_size = 5
    whole = trainer.evaluate()
    assert parts.keys() == whole.keys() >= {"eval_loss", "eval_rewards/margins"}
    for name, value in whole.items():
        assert parts[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_shares_of_an_evaluation_add_up_to_it(make_trainer: Make) -> None:
    """Also where one of three processes has nothing left to do."""
    rows = examples(PAIRS, 7)
    factory = make_factory("offline-pairwise", rows, batch_size=2)
    trainer = make_trainer("simpo", rows=rows, eval_factory=factory)
    whole = trainer.evaluate()
    sums: dict[str, float] = {}
    for rank in range(3):
        factory.share(rank, 3)
        shares = list(trainer.evaluation.batches())
        assert len(shares) == 2
        count = sum(len(batch.places) for batch in shares)
        assert count == [3, 2, 2][rank]
        for name, value in trainer.evaluate().items():
            sums[name] = sums.get(name, 0.0) + count * value / 7
    assert whole.pop("eval_rewards/accuracies_sem") > 0
    del sums["eval_rewards/accuracies_sem"]  # standard errors do not add up
    assert sums == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("name", ["dpo", "kto", "bradley-terry"])
def test_a_tie_counts_half_and_has_no_spread(make_trainer: Make, name: str) -> None:
    """As all are where the policy is its reference, or the reward model says 0."""
    loss = make_loss(name)
    rows = examples(FEEDBACK if name == "kto" else PAIRS, 6)
    model = model_of(loss)
    if name == "bradley-terry":
        torch.nn.init.zeros_(model.score.weight)
    factory = make_factory(loss.tasks[0], rows)
    found = make_trainer(loss, model, rows, eval_factory=factory).evaluate()
    assert found["eval_rewards/accuracies"] == 0.5
    assert found["eval_rewards/accuracies_sem"] == 0.0


def test_the_scores_of_training_are_in_the_unit_of_the_evaluations(make_trainer: Make) -> None:
    """Of pairs too: the mean score of both responses, and not how often the first one wins."""
    trainer = make_trainer("dpo", task="online-pairwise", logging_steps=1, learning_rate=0.0)
    annotator, seen = trainer.factory.annotator, []
    compare = annotator.compare

    def noted(prompts: Any, firsts: Any, seconds: Any, **columns: Any) -> Any:
        seen.extend([*firsts, *seconds])
        return compare(prompts, firsts, seconds, **columns)

    annotator.compare = noted
    trainer.train()
    (log,) = (log for log in trainer.state.log_history if "rewards/mean" in log)
    assert log["rewards/mean"] == pytest.approx(sum(map(worth, seen)) / len(seen))
    assert log["rewards/mean"] > 1


def test_a_loss_of_ones_own_needs_a_class_and_nothing_else(make_trainer: Make) -> None:
    class Margin(PairwiseLoss):
        """-(log p_w - log p_l)."""

        name = "margin"

        def losses(self, chosen: Any, rejected: Any) -> torch.Tensor:
            return rejected.sums - chosen.sums

        def implicit_reward(self, side: Any) -> torch.Tensor:
            return side.sums

    trainer = make_trainer(
        Margin(), epochs=8, eval_factory=make_factory("offline-pairwise"), learning_rate=1e-2
    )
    before = trainer.evaluate()["eval_rewards/margins"]
    trainer.train()
    assert trainer.evaluate()["eval_rewards/margins"] > before + 1


def test_dropout_is_off_unless_it_is_wanted(make_trainer: Make) -> None:
    def model() -> Any:
        return tiny_models.language_model(resid_pdrop=0.5, attn_pdrop=0.5)

    one, _ = trained(make_trainer, model())
    assert one == pytest.approx(trained(make_trainer, model())[0], rel=1e-5)
    assert one[0] == pytest.approx(0.693147, abs=1e-5)
    with_it, _ = trained(make_trainer, model(), disable_dropout=False)
    assert with_it[0] != pytest.approx(0.693147, abs=1e-3)


@pytest.mark.parametrize("given", ["a model", "a path"])
def test_a_reference_may_be_a_plain_model_or_its_path(
    make_trainer: Make, tmp_path: Path, given: str
) -> None:
    """The same weights as with a reference that is wrapped."""

    def other() -> Any:
        return tiny_models.language_model(perturbation=0.3)

    losses, _ = trained(make_trainer, ref_model=CausalLMPolicy(other()))
    if given == "a path":
        other().save_pretrained(tmp_path / "other")
    plain = other() if given == "a model" else tmp_path / "other"
    found, trainer = trained(make_trainer, ref_model=plain)
    assert trainer.learner.reference.mode == "copy"
    assert found == losses


def test_the_trained_model_itself_is_no_reference(make_trainer: Make) -> None:
    model = tiny_models.language_model()
    with pytest.raises(ValueError, match="ref_model is model itself"):
        make_trainer("dpo", model, ref_model=model)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("loss", ["simpo", "bradley-terry"])
def test_the_last_batch_weighs_as_many_samples_as_it_has(make_trainer: Make, loss: str) -> None:
    found = []
    for size in (5, 2):
        settings = {"batch_size": size, "gradient_accumulation_steps": -(-5 // size)}
        trainer = make_trainer(
            loss, rows=examples(PAIRS, 5), logging_steps=1, **GRADIENT_STEP, **settings
        )
        trainer.train()
        found.append((trainer.state.log_history[0]["loss"], weights(trainer.model)))
    (whole, expected), (loss_of_parts, after) = found
    assert loss_of_parts == pytest.approx(whole, rel=1e-5)
    for name, x in expected.items():
        torch.testing.assert_close(after[name], x, rtol=0, atol=2e-6, msg=name)
