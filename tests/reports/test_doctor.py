"""The doctor: each illness is found by its figure, and a healthy run has none."""

import math
import random
import re
from pathlib import Path

import pytest

from fastrl.tools.reports.curves import RunCurves
from fastrl.tools.reports.doctor import CHECKS, ILLNESS, NOTE, examine

STEPS = 40


def ppo(step: int, rng: random.Random) -> dict[str, float]:
    """A step of a healthy run of PPO: of STEPS steps from 1, a row of metrics."""
    done = step / STEPS
    return {
        "step": step,
        "objective/kl": 3 * done + rng.gauss(0, 0.1),
        "reward/mean": done + rng.gauss(0, 0.05),
        "reward/std": 0.5,
        "ppo/policy/entropy": 2.5 - done,
        "ppo/policy/clipfrac": 0.1 + rng.uniform(0, 0.05),
        "ppo/policy/approxkl": 0.01,
        "ppo/loss/value": 0.5 - 0.3 * done + rng.uniform(0, 0.05),
        "ppo/val/explained_variance": done - 0.2,
        "ppo/optimizer_steps": 8.0,
        "ppo/skipped_minibatches": 0.0,
        "ppo/nonfinite_minibatches": 0.0,
        "ppo/grad_norm": 1 + rng.random(),
        "tokens/responses_len_mean": 20.0,
        "tokens/cut_share": 0.1,
    }


def fit(step: int, rng: random.Random) -> dict[str, float]:
    """Likewise of preferences on transformers' Trainer."""
    done = step / STEPS
    return {
        "step": step,
        "loss": 0.7 - 0.3 * done + rng.gauss(0, 0.02),
        "grad_norm": 1 + rng.random(),
        "learning_rate": 1e-5,
        "rewards/accuracies": 0.6 + 0.3 * done + rng.gauss(0, 0.05),
    }


def grpo(step: int, rng: random.Random) -> dict[str, float]:
    """Likewise of GRPOTrainer, as its folder is read: its loss says nothing."""
    done = step / STEPS
    return {
        "step": step,
        "loss": 0.1 * done + rng.gauss(0, 0.02),
        "learning_rate": 1e-5,
        "grad_norm": 1 + rng.random(),
        "objective/kl_per_token": 0.2 * done,
        "reward/mean": done + rng.gauss(0, 0.05),
        "reward/std": 0.5,
        "ppo/policy/entropy": 2.5 - done,
        "tokens/responses_len_mean": 20.0,
        "tokens/cut_share": 0.1,
    }


def distill(step: int, rng: random.Random) -> dict[str, float]:
    """Likewise of distillation."""
    done = step / STEPS
    divergence = 0.5 - 0.3 * done + rng.gauss(0, 0.02)
    return {
        "step": step,
        "loss": divergence,
        "divergence": divergence,
        "teacher_nonfinite": 0.0,
        "learning_rate": 1e-5,
        "grad_norm": 1 + rng.random(),
        "ppo/policy/entropy": 2.5 - done,
        "tokens/responses_len_mean": 20.0,
        "tokens/cut_share": 0.1,
    }


def evaluations(key: str, *values: float, **others: float) -> list[dict[str, float]]:
    """Evenly spaced, from step 0 to the last."""
    steps = [round(STEPS * i / (len(values) - 1)) for i in range(len(values))]
    return [{"step": s, key: v, **others} for s, v in zip(steps, values, strict=True)]


def rewards(*values: float) -> list[dict[str, float]]:
    return evaluations("eval/reward_mean", *values, **{"eval/reward_sem": 0.05})


def record(row=ppo, changes=None, held_out=None, stages=None, **settings) -> RunCurves:
    """A run whose metrics are changed, to a number or to a function of the step."""
    rng = random.Random(0)
    rows = [row(step, rng) for step in range(1, STEPS + 1)]
    for each in rows:
        for name, change in (changes or {}).items():
            each[name] = change(each["step"]) if callable(change) else change
    if held_out is None:
        held_out = HELD_OUT[row]
    rows = sorted([*held_out, *rows], key=lambda each: each["step"])
    return RunCurves("run", rows, stages or {}, settings=settings)


LOSSES = evaluations("eval_loss", 0.69, 0.5, 0.45)
HELD_OUT = {
    ppo: rewards(0.1, 0.5, 0.9),
    fit: LOSSES,
    distill: evaluations("eval_divergence", 0.5, 0.3),
    grpo: [*evaluations("eval_loss", 0.0, 0.1), *evaluations("eval_reward", 0.1, 0.9)],
}
AT_CHANCE = evaluations(
    "eval_rewards/accuracies", 0.5, 0.52, **{"eval_rewards/accuracies_sem": 0.03}
)
COLLAPSE = {"ppo/policy/entropy": lambda s: 2.5 * 0.8**s}


def flat(step: int) -> float:
    """A reward that goes up and down."""
    return 0.5 + 0.05 * math.sin(2.5 * step)


SICK: dict[str, list[RunCurves]] = {
    "negative KL": [record(changes={"objective/kl": lambda s: -0.5 + 0.1 * math.sin(s)})],
    "exploding KL": [record(changes={"objective/kl": lambda s: s}),
     record(changes={"objective/kl": lambda s: s / 4}, adap_kl_ctrl=True, target=1.5),
     record(grpo, {"objective/kl_per_token": lambda s: s / 20})],
    "nothing is learned": [
        record(changes={"objective/kl": lambda s: 1e-4 * math.sin(s), "reward/mean": 0.1},
         held_out=rewards(0.1, 0.1)),
        # Also where all ratios are 1, with several steps for each batch.
        record(
            changes={
                "objective/kl": 0.0,
                "reward/mean": 0.1,
                "ppo/policy/clipfrac": 0.0,
                "ppo/policy/approxkl": 1e-14,
            },
            held_out=[],
        ),
        record(grpo, {"learning_rate": 0.0, "reward/mean": 0.1}, held_out=[]),
        record(fit, held_out=evaluations("eval_loss", 0.69, 0.69)),
    ],
    "entropy collapse": [record(changes=COLLAPSE | {"reward/mean": flat}, held_out=[])],
    "reward does not rise": [record(changes={"reward/mean": flat}, held_out=rewards(0.5, 0.52)),
     record(grpo, {"reward/mean": flat}, held_out=[])],
    "clip fraction too high": [record(changes={"ppo/policy/clipfrac": 0.4})],
    "clip fraction of zero": [
        record(changes={"ppo/policy/clipfrac": 0.0, "ppo/policy/approxkl": 1e-9}),
    ],
    "value loss does not fall": [
        record(changes={"ppo/loss/value": 0.5, "ppo/val/explained_variance": -0.1}),
    ],
    "skipped mini-batches": [record(changes={"ppo/skipped_minibatches": lambda s: 2.0 * (s > 20)})],
    "equal scores": [record(changes={"reward/std": lambda s: 0.5 * (s < 10)}),
     record(changes={"groups/no_spread": 0.9})],
    "responses cut by length": [record(changes={"tokens/cut_share": 0.7}),
     record(changes={"tokens/cut_share": None, "tokens/eos_share": 0.2})],
    "reward falls": [record(changes={"reward/mean": lambda s: -s}, held_out=[]),
     record(changes={"reward/mean": 1.0}, held_out=rewards(0.9, 0.5))],
    "held-out reward falls": [record(held_out=rewards(0.5, 0.9, 0.4)),
     record(held_out=rewards(0.5, 0.1))],
    "non-finite numbers": [record(changes={"ppo/nonfinite_minibatches": lambda s: float(s == 7)}),
     record(held_out=[*rewards(0, 1), {"step": 40, "eval/nan_samples": 2}]),
     record(fit, {"loss": lambda s: math.nan if s == 7 else 1 / s}),
     record(fit, {"nonfinite_steps": lambda s: int(s == 7)})],
    "divergence does not fall": [
        record(distill, {"divergence": lambda s: 0.1 + 0.01 * s}, held_out=[]),
        record(distill, held_out=evaluations("eval_divergence", 0.3, 0.5))],
    "exploding gradients": [record(changes={"ppo/grad_norm": lambda s: 1.3**s}),
     record(fit, {"grad_norm": lambda s: 1.3**s})],
    "loss does not fall": [record(fit, {"loss": 0.69}, held_out=[])],
    "held-out loss rises": [record(fit, held_out=evaluations("eval_loss", 0.69, 0.5, 0.6))],
    "accuracy at chance": [record(fit, held_out=[*LOSSES, *AT_CHANCE]),
     record(fit, held_out=[*LOSSES, *evaluations("eval_accuracy", 0.5, 0.55)]),
     record(fit, {"rewards/accuracies": lambda s: 0.4 + 0.2 * (s % 2)})],
}  # fmt: skip


@pytest.mark.parametrize("row", [ppo, fit, grpo, distill])
def test_a_healthy_run_has_no_finding(row):
    diagnosis = examine(record(row))
    assert diagnosis.findings == ()
    assert diagnosis.healthy
    assert len(diagnosis.passed) >= 5


@pytest.mark.parametrize("name", [check.name for check in CHECKS])
def test_every_illness_is_found_and_no_other(name):
    for run in SICK[name]:
        diagnosis = examine(run)
        (finding,) = diagnosis.findings
        assert (finding.name, finding.severity) == (name, ILLNESS)
        assert not diagnosis.healthy
        assert any(character.isdigit() for character in finding.figures)
        assert set(finding.metrics) & set(run.metrics())


@pytest.mark.parametrize(
    "run",
    [
        # The KL of a policy that has hardly moved is 0 but for chance.
        record(changes={"objective/kl": lambda s: 0.2 * math.sin(2.5 * s)}),
        # One update for each batch: no ratio can be clipped.
        record(changes={"ppo/policy/clipfrac": 0.0, "ppo/policy/approxkl": 0.0,
                        "ppo/optimizer_steps": 1.0}),
        # The values are not learned yet, but their loss falls.
        record(changes={"ppo/val/explained_variance": -0.1}),
        # Rewards of 1000 ± 0.01 differ.
        record(changes={"reward/mean": lambda s: 1000 + s / 4000, "reward/std": 0.01}, held_out=[]),
        # The reference follows the policy, which learns.
        record(changes={"objective/kl": 0.0}),
        # Within what chance does to the best of three evaluations.
        record(held_out=rewards(0.5, 0.9, 0.8)),
        # A loss on few examples rises a little at the end.
        record(fit, held_out=evaluations("eval_loss", 0.69, 0.45, 0.46)),
        # Online, the responses are other ones at each step.
        record(fit, {"loss": 0.69, "rewards/accuracies": lambda s: 0.4 + 0.2 * (s % 2),
                     "tokens/responses": 20.0}, held_out=[]),
        # The head of a reward model starts at 0, and its first gradients are small.
        record(fit, {"grad_norm": lambda s: 0.02 + s**2 / 100}),
    ],
)  # fmt: skip
def test_what_healthy_runs_do_is_no_illness(run):
    assert examine(run).findings == ()


def test_a_run_without_rewards_is_advised_by_its_teacher():
    """Not by settings of rewards, which it does not have."""
    sick = record(
        distill,
        {"tokens/cut_share": 0.9, "teacher_nonfinite": lambda s: 0.5 * (s == 7), **COLLAPSE},
    )
    by_name = {finding.name: finding for finding in examine(sick).findings}
    cut, collapsed = by_name["responses cut by length"], by_name["entropy collapse"]
    assert "missing_eos_penalty" not in cut.advice
    assert (collapsed.severity, "init_kl_coef" in collapsed.advice) == (NOTE, False)
    assert "load the teacher in bfloat16" in by_name["non-finite numbers"].advice
    assert "teacher_nonfinite 0.5 (step 7)" in by_name["non-finite numbers"].figures
    assert (
        "missing_eos_penalty"
        in examine(record(changes={"tokens/cut_share": 0.9})).findings[0].advice
    )


def test_a_divergence_that_stays_and_one_from_a_teacher_that_moves_are_notes():
    stays = record(distill, held_out=evaluations("eval_divergence", 0.3, 0.29))
    rising = evaluations("eval_divergence", 0.3, 0.5)
    moves = record(distill, held_out=rising, teacher_model_kind="ema")
    for run in (stays, moves):
        (finding,) = examine(run).findings
        assert (finding.name, finding.severity) == ("divergence does not fall", NOTE)


def test_wasted_groups_and_a_single_peak_are_notes():
    run = record(changes={"groups/no_spread": 0.7, "ppo/grad_norm": lambda s: 900.0 ** (s == 9)})
    diagnosis = examine(run)
    assert [(f.name, f.severity) for f in diagnosis.findings] == [
        ("equal scores", NOTE),
        ("exploding gradients", NOTE),
    ]
    assert diagnosis.healthy


@pytest.mark.parametrize("held_out", [[], rewards(0.1, 0.9)])
def test_entropy_that_falls_as_the_reward_rises_is_a_note(held_out):
    """Sums have one right answer, of which the policy becomes sure."""
    changes = COLLAPSE | ({"reward/mean": flat} if held_out else {})
    (finding,) = examine(record(changes=changes, held_out=held_out)).findings
    assert (finding.name, finding.severity) == ("entropy collapse", NOTE)
    assert "one right answer" in finding.advice


def test_a_reward_of_which_noise_hides_whether_it_rises_is_a_note():
    noise = record(changes={"reward/mean": lambda s: 0.5 + 0.3 * math.sin(2.5 * s)}, held_out=[])
    (finding,) = examine(noise).findings
    assert (finding.name, finding.severity) == ("reward does not rise", NOTE)
    assert "±" in finding.figures


def test_the_documents_list_every_check():
    text = (Path(__file__).parents[2] / "docs" / "runs.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \|", text.partition("## The doctor")[2], re.MULTILINE)
    assert set(rows) - {"finding", "---"} == {check.name for check in CHECKS}


def test_the_page_of_each_finding_is_there():
    root = Path(__file__).parents[2]
    found = examine(record(changes={"reward/std": 0.0})).findings
    assert [x.page for x in found] == ["docs/faq.md#equal-scores"]
    for check in CHECKS:
        page, _, anchor = check.page.partition("#")
        headings = re.findall(r"^#+ (.+)$", (root / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {heading.lower().replace(" ", "-") for heading in headings}


def test_what_was_recorded_too_few_times_is_not_judged():
    rows = [ppo(step, random.Random(0)) for step in (1, 2)]
    for row in rows:
        row["ppo/policy/entropy"] = 1e-9
    diagnosis = examine(RunCurves("run", rows))
    assert diagnosis.findings == ()
    assert "entropy collapse" in diagnosis.too_few
    assert "loss does not fall" not in (*diagnosis.passed, *diagnosis.too_few)


def test_stages_are_examined_too():
    sick = SICK["loss does not fall"][0].rows
    (finding,) = examine(record(stages={"sft": sick})).findings
    assert (finding.name, finding.stage) == ("loss does not fall", "sft")


def test_the_advice_of_a_rising_loss_depends_on_its_cause():
    rising = evaluations("eval_loss", 0.69, 0.5, 0.9)
    by_heart, diverged = (
        examine(record(fit, {"loss": loss}, held_out=rising)).findings[0].advice
        for loss in (lambda s: 0.7 - 0.01 * s, lambda s: 5 - 0.01 * s)
    )
    assert "step 20" in by_heart
    assert "diverges" in diverged


@pytest.mark.parametrize(("examples", "ill"), [(6, False), (200, True)])
def test_few_held_out_examples_are_no_evidence(examples, ill):
    """As after two steps, with six of them: a loss that rises by chance, and half of the pairs."""
    chance = evaluations("eval_rewards/accuracies", 0.5, 0.5, **{"eval_rewards/accuracies_sem": 0})
    rising = evaluations("eval_loss", 0.69, 0.75)
    run = record(fit, held_out=[*rising, *chance], eval_examples=examples)
    found = {finding.name for finding in examine(run).findings}
    assert found == ({"held-out loss rises", "accuracy at chance"} if ill else set())


def test_an_accuracy_far_below_chance_is_found_in_few_pairs():
    wrong = evaluations("eval_rewards/accuracies", 0.5, 0.0, **{"eval_rewards/accuracies_sem": 0})
    run = record(fit, held_out=[*LOSSES, *wrong], eval_examples=8)
    assert [finding.name for finding in examine(run).findings] == ["accuracy at chance"]
