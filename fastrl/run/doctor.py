"""The doctor: looks for the usual illnesses of a run in what it has recorded.

A check is a function of a :class:`RunCurves` that returns a :class:`Finding` or None, registered
with the metrics that it reads. Thresholds stand beside it, with their reasons.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fastrl.run.curves import RunCurves, Series

ILLNESS, NOTE = "illness", "note"


@dataclass(frozen=True)
class Finding:
    """What a check has found.

    Args:
        name: of the check.
        severity: "illness": training does not do what it is for, or its result cannot be used; or
            "note": worth a look.
        figures: the numbers that show it, with their steps.
        advice: what to change.
        metrics: that the check reads.
        stage: of the run in which it was found; None: the run itself.
    """

    name: str
    severity: str
    figures: str
    advice: str
    metrics: tuple[str, ...] = ()
    stage: str | None = None


@dataclass(frozen=True)
class Check:
    """A check, and what it needs.

    Args:
        metrics: of which at least one must have been recorded.
        least: how often, for a judgement.
    """

    name: str
    metrics: tuple[str, ...]
    least: int
    find: Callable[[RunCurves], Finding | None]


@dataclass(frozen=True)
class Diagnosis:
    """The result of all checks of a run.

    Args:
        findings: illnesses first.
        passed: the names of checks that found nothing.
        too_few: the names of checks whose metrics were recorded, but too few times to judge.
    """

    findings: tuple[Finding, ...]
    passed: tuple[str, ...]
    too_few: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether no illness was found."""
        return not any(finding.severity == ILLNESS for finding in self.findings)

    @property
    def checks(self) -> str:
        """How many checks found nothing, and which could not judge."""
        few = f"; too few steps to judge: {', '.join(self.too_few)}" if self.too_few else ""
        other = "other " if self.findings else ""
        return f"{len(self.passed)} {other}checks found nothing{few}"


CHECKS: list[Check] = []
_Find = Callable[[RunCurves], "Finding | None"]


def check(name: str, *metrics: str, least: int = 4) -> Callable[[_Find], _Find]:
    """Decorator: adds a check to :data:`CHECKS`."""

    def add(find: _Find) -> _Find:
        CHECKS.append(Check(name, metrics, least, find))
        return find

    return add


def examine(run: RunCurves) -> Diagnosis:
    """Makes all checks of a run, and of its stages."""
    findings, passed, too_few = [], [], []
    for stage, part in _parts(run):
        where = "" if stage is None else f" ({stage})"
        for each in CHECKS:
            recorded = max(len(part.read([key]).steps) for key in each.metrics)
            if recorded == 0:
                continue
            if recorded < each.least:
                too_few.append(each.name + where)
            elif (found := each.find(part)) is None:
                passed.append(each.name + where)
            else:
                findings.append(replace(found, metrics=each.metrics, stage=stage))
    findings.sort(key=lambda finding: finding.severity != ILLNESS)
    return Diagnosis(tuple(findings), tuple(passed), tuple(too_few))


def _parts(run: RunCurves) -> Iterator[tuple[str | None, RunCurves]]:
    yield None, run
    for stage, rows in run.stages.items():
        yield stage, RunCurves(run.name, rows)


# Parts of a curve


def _start(curve: Series, share: float = 0.25) -> Series:
    count = max(1, round(share * len(curve.steps)))
    return Series(curve.steps[:count], curve.values[:count])


def _end(curve: Series, share: float = 0.25) -> Series:
    count = max(1, round(share * len(curve.steps)))
    return Series(curve.steps[-count:], curve.values[-count:])


def _mean(curve: Series) -> float:
    return statistics.fmean(curve.values)


def _sem(curve: Series) -> float:
    """Standard error of the mean over the steps, as if these were independent."""
    if len(curve.values) < 2:
        return 0.0
    return statistics.stdev(curve.values) / math.sqrt(len(curve.values))


def _steps(curve: Series) -> str:
    first, last = curve.steps[0], curve.steps[-1]
    return f"step {first:g}" if first == last else f"steps {first:g}–{last:g}"


def _change(curve: Series, unit: str = "") -> str:
    """The means of a curve's first and last quarter."""
    start, end = _start(curve), _end(curve)
    return (
        f"{_mean(start):.3g} in {_steps(start)}, {_mean(end):.3g}{unit and ' ' + unit} in "
        f"{_steps(end)}"
    )


def _at(curve: Series, step: float) -> float | None:
    return dict(zip(curve.steps, curve.values, strict=True)).get(step)


# Policy gradients


@check("negative KL", "objective/kl")
def _negative_kl(run: RunCurves) -> Finding | None:
    # A KL is not negative; its estimate from few samples may be, by chance: hence the mean over the
    # steps, its standard error, and a margin for rounding.
    curve = run.read(["objective/kl"])
    mean, sem = _mean(curve), _sem(curve)
    if mean + 2 * sem >= 0 or mean > -0.05:
        return None
    return Finding(
        "negative KL",
        ILLNESS,
        f"KL to the reference {mean:.3g} ± {sem:.2g} nats per sequence, mean of {_steps(curve)}",
        "the responses are not samples of the policy as it is scored: generate with top_k=0, "
        "top_p=1, the temperature of the configuration, and nothing else that bends the "
        "distribution (min_length, forbidden tokens)",
    )


# Nats per token: on average a token is then e times as likely as under the reference. Runs that
# stay readable are far below: 0.1 to 0.4 for short texts, less for long ones.
_HIGH_KL_PER_TOKEN = 1.0
# The adaptive controller is to keep the KL near its target; it reacts slowly, but not that slowly.
_HIGH_KL_OF_TARGET = 4.0


@check("exploding KL", "objective/kl", "eval/kl", least=1)
def _exploding_kl(run: RunCurves) -> Finding | None:
    curve = run.read(["objective/kl", "eval/kl"])
    end = _end(curve)
    limits = []
    lengths = run.read(["tokens/responses_len_mean", "tokens/responses"])
    if lengths:
        per_token = _HIGH_KL_PER_TOKEN * _mean(_end(lengths))
        limits.append((per_token, f"{_HIGH_KL_PER_TOKEN:g} nat per token"))
    if run.settings.get("adap_kl_ctrl") and run.settings.get("target"):
        target = float(run.settings["target"])
        limits.append((_HIGH_KL_OF_TARGET * target, f"{_HIGH_KL_OF_TARGET:g} times the target"))
    if run.kl_ceiling is not None:
        limits.append((run.kl_ceiling, "the ceiling"))
    limit, meaning = min(limits, default=(math.inf, ""))
    if _mean(end) <= limit:
        return None
    return Finding(
        "exploding KL",
        ILLNESS,
        f"KL to the reference {_mean(end):.3g} nats per sequence in {_steps(end)}, above "
        f"{limit:.3g} ({meaning})",
        "lower learning_rate, raise init_kl_coef (or lower target), take fewer ppo_epochs, or set "
        "max_grad_norm; max_kl ends such a run early",
    )


_COLLAPSED_ENTROPY = 0.2  # of the first steps': a policy that still explores keeps more


@check("entropy collapse", "ppo/policy/entropy")
def _entropy_collapse(run: RunCurves) -> Finding | None:
    curve = run.read(["ppo/policy/entropy"])
    start, end = _start(curve, 0.1), _end(curve, 0.1)
    if _mean(end) >= _COLLAPSED_ENTROPY * _mean(start):
        return None
    return Finding(
        "entropy collapse",
        ILLNESS,
        f"policy entropy {_mean(start):.3g} nats per token in {_steps(start)}, {_mean(end):.3g} in "
        f"{_steps(end)}",
        "the policy writes nearly the same for every prompt: raise init_kl_coef, lower "
        "learning_rate, take fewer ppo_epochs; look at the samples for what the reward pays for",
    )


_HIGH_CLIP_FRACTION = 0.25  # usual are up to 0.2; above, most of an update's gain is cut off


@check("clip fraction too high", "ppo/policy/clipfrac")
def _high_clip_fraction(run: RunCurves) -> Finding | None:
    end = _end(run.read(["ppo/policy/clipfrac"]), 0.5)
    if _mean(end) <= _HIGH_CLIP_FRACTION:
        return None
    return Finding(
        "clip fraction too high",
        ILLNESS,
        f"{_mean(end):.0%} of the tokens are clipped, mean of {_steps(end)}",
        "each update goes too far: lower learning_rate, take fewer ppo_epochs or fewer "
        "mini-batches per step",
    )


# ½·mean (log ratio)²: updates change a token's probability by less than 0.15%.
_LOW_POLICY_KL = 1e-6


@check("clip fraction of zero", "ppo/policy/clipfrac", least=10)
def _policy_stands_still(run: RunCurves) -> Finding | None:
    # With one optimizer step for each batch the ratio is 1 by construction.
    steps = run.read(["ppo/optimizer_steps"])
    curve, moved = run.read(["ppo/policy/clipfrac"]), run.read(["ppo/policy/approxkl"])
    if not (steps and moved) or _mean(steps) <= 1 or any(curve.values):
        return None
    if _mean(_end(moved, 0.5)) >= _LOW_POLICY_KL:
        return None
    return Finding(
        "clip fraction of zero",
        ILLNESS,
        f"no token was clipped in {_steps(curve)}, and the updates hardly change the policy "
        f"(approxkl {_mean(_end(moved, 0.5)):.2g})",
        "raise learning_rate; see that the rewards differ and that weights are trained",
    )


@check("value loss does not fall", "ppo/val/explained_variance", "ppo/val/var_explained", least=10)
def _useless_values(run: RunCurves) -> Finding | None:
    # In short runs values are still learned: they are ill if they explain nothing and their loss
    # does not fall either.
    explained = run.read(["ppo/val/explained_variance", "ppo/val/var_explained"])
    loss, end = run.read(["ppo/loss/value"]), _end(explained, 0.5)
    if _mean(end) > 0 or not loss or _mean(_end(loss)) < 0.9 * _mean(_start(loss)):
        return None
    return Finding(
        "value loss does not fall",
        ILLNESS,
        f"values explain {_mean(end):.2g} of the returns' variance in {_steps(end)} (0: no better "
        f"than their mean); value loss {_change(loss)}",
        "raise vf_coef or learning_rate, scale scores (use_score_scaling), or do without values "
        "(fastrl grpo, advantage=rloo)",
    )


_FEW_MINIBATCHES_SKIPPED = 0.1


@check("skipped mini-batches", "ppo/skipped_minibatches", least=1)
def _skipped(run: RunCurves) -> Finding | None:
    skipped, taken = run.read(["ppo/skipped_minibatches"]), run.read(["ppo/optimizer_steps"])
    count = sum(skipped.values)
    if count <= _FEW_MINIBATCHES_SKIPPED * (count + sum(taken.values)):
        return None
    return Finding(
        "skipped mini-batches",
        ILLNESS,
        f"{count:g} mini-batches were left out because their ratio exceeded ratio_threshold, in "
        f"{_where(skipped)}, beside {sum(taken.values):g} optimizer steps",
        "lower learning_rate or take fewer ppo_epochs; in the first epoch: the responses are not "
        "samples of the policy as it is scored",
    )


# Rewards and responses


@check("equal scores", "reward/std", "ppo/std_scores", "groups/no_spread", least=2)
def _equal_scores(run: RunCurves) -> Finding | None:
    deviations = run.read(["reward/std", "ppo/std_scores"])
    means = run.read(["reward/mean", "ppo/mean_scores"])
    equal = [
        step
        for step, value in zip(deviations.steps, deviations.values, strict=True)
        if value <= 1e-6 * max(1.0, abs(_at(means, step) or 0.0))
    ]
    advice = (
        "nothing can be learned from equal scores: see that the reward function reads the "
        "completion and tells good ones from bad ones; bring easier or harder prompts, or a "
        "reward with more steps between none and all"
    )
    if len(equal) > 0.5 * len(deviations.steps):
        return Finding(
            "equal scores",
            ILLNESS,
            f"all scores of a step were equal in {len(equal)} of {len(deviations.steps)} steps "
            f"(the first {equal[0]:g}, the last {equal[-1]:g})",
            advice,
        )
    spread = _end(run.read(["groups/no_spread"]), 0.5)
    # Right or wrong answers to hard or easy questions leave half of the groups without spread; of
    # more, most of the work is wasted.
    if not spread or _mean(spread) <= 0.6:
        return None
    return Finding(
        "equal scores",
        ILLNESS if _mean(spread) > 0.8 else NOTE,
        f"in {_mean(spread):.0%} of the groups all scores are equal, mean of {_steps(spread)}",
        advice,
    )


@check("responses cut by length", "tokens/cut_share", "tokens/eos_share", least=1)
def _cut_by_length(run: RunCurves) -> Finding | None:
    cut = run.read(["tokens/cut_share"])
    if not cut:
        ended = run.read(["tokens/eos_share"])
        cut = Series(ended.steps, [1.0 - value for value in ended.values])
    end = _end(cut, 0.5)
    if _mean(end) <= 0.5:
        return None
    return Finding(
        "responses cut by length",
        ILLNESS,
        f"{_mean(end):.0%} of the responses were cut by max_new_tokens in {_steps(end)}",
        "raise max_new_tokens, or teach the policy to end: missing_eos_penalty, SFT on texts that "
        "end with EOS. Where all responses are to have one length, this is as meant",
    )


_REWARD = ("reward/mean", "rewards/mean", "ppo/mean_scores")
_HELD_OUT = ("eval/reward_mean", "eval_reward", "eval_win_rate")
_HELD_OUT_SEM = ("eval/reward_sem", "eval_reward_sem", "eval_win_rate_sem")


@check("reward falls", *_REWARD, *_HELD_OUT, least=2)
def _reward_falls(run: RunCurves) -> Finding | None:
    held_out, sems = run.read(_HELD_OUT), run.read(_HELD_OUT_SEM)
    training = run.read(_REWARD)
    if len(held_out.steps) >= 2 and sems:
        fall = held_out.values[0] - held_out.values[-1]
        if fall <= 3 * math.hypot(sems.values[0], sems.values[-1]):
            return None
        if _rises(training):  # another illness
            return None
        figures = (
            f"held-out reward {held_out.values[0]:.3g} at step {held_out.steps[0]:g}, "
            f"{held_out.values[-1]:.3g} at step {held_out.steps[-1]:g}"
        )
    elif len(training.steps) >= 8 and _rises(Series(training.steps, [-x for x in training.values])):
        figures = f"reward of the training batches {_change(training)}"
    else:
        return None
    return Finding(
        "reward falls",
        ILLNESS,
        figures,
        "training makes the policy worse by its own reward: lower learning_rate, take fewer "
        "ppo_epochs, use larger batches; see that higher is better in the reward function",
    )


@check("held-out reward falls", *_HELD_OUT, least=2)
def _overfitting(run: RunCurves) -> Finding | None:
    held_out, sems, training = run.read(_HELD_OUT), run.read(_HELD_OUT_SEM), run.read(_REWARD)
    best = max(range(len(held_out.values)), key=held_out.values.__getitem__)
    fall = held_out.values[best] - held_out.values[-1]
    # The best of several evaluations is high by chance, too: hence 3 standard errors.
    if fall <= 3 * math.hypot(*(_at(sems, held_out.steps[i]) or 0.0 for i in (best, -1))):
        return None
    if not sems or not _rises(_from(training, held_out.steps[best])):
        return None
    return Finding(
        "held-out reward falls",
        ILLNESS,
        f"held-out reward {held_out.values[best]:.3g} at step {held_out.steps[best]:g}, "
        f"{held_out.values[-1]:.3g} at step {held_out.steps[-1]:g}, while that of the training "
        f"batches rises: {_change(_from(training, held_out.steps[best]))}",
        "the policy learns what holds for the training prompts only, or the two are rewarded "
        f"differently: {_stop_at(held_out.steps[best])}bring more prompts, raise init_kl_coef; see "
        "that both have the same reward and settings",
    )


def _from(curve: Series, step: float) -> Series:
    kept = [(s, v) for s, v in zip(curve.steps, curve.values, strict=True) if s >= step]
    return Series([s for s, _ in kept], [v for _, v in kept])


def _rises(curve: Series) -> bool:
    """Whether the last quarter's mean is above the first's, by more than chance."""
    if len(curve.steps) < 4:
        return False
    start, end = _start(curve), _end(curve)
    # A quarter of one step has no spread of its own: that of the whole curve bounds it.
    errors = [_sem(part) if len(part.steps) > 2 else _sem(curve) for part in (start, end)]
    return _mean(end) - _mean(start) > 2 * math.hypot(*errors)


# Numbers


def _where(curve: Series) -> str:
    """The steps at which a count is not 0."""
    steps = [step for step, value in zip(curve.steps, curve.values, strict=True) if value]
    shown = ", ".join(f"{step:g}" for step in steps[:5])
    more = f" and {len(steps) - 5} more" if len(steps) > 5 else ""
    return f"step{'s' if len(steps) > 1 else ''} {shown}{more}"


def _counts_nonfinite(key: str) -> bool:
    return "nonfinite" in key or "nan_samples" in key


@check("non-finite numbers", "ppo/nonfinite_minibatches", "grad_norm", least=1)
def _nonfinite(run: RunCurves) -> Finding | None:
    counts = {key: run.read([key]) for key in run.metrics() if _counts_nonfinite(key)}
    told = [
        f"{key} {sum(curve.values):g} ({_where(curve)})"
        for key, curve in counts.items()
        if any(curve.values)
    ]
    # transformers writes no NaN, and an average in place of a loss that is one: the gap is left.
    gaps = [
        row["step"]
        for row in run.rows
        if "learning_rate" in row and not {"grad_norm", "loss"} <= _finite(row)
    ]
    if gaps and run.read(["grad_norm"]):
        told.append(f"no finite loss or gradient norm in {_where(Series(gaps, [1.0] * len(gaps)))}")
    if not told:
        return None
    return Finding(
        "non-finite numbers",
        ILLNESS,
        "; ".join(told),
        "look at the samples of these steps; lower learning_rate or set max_grad_norm, train in "
        "float32 or bfloat16 rather than float16, and see that the reward function returns finite "
        "numbers",
    )


def _finite(row: Any) -> set[str]:
    return {k for k, v in row.items() if isinstance(v, (int, float)) and math.isfinite(v)}


@check("exploding gradients", "ppo/grad_norm", "grad_norm", least=8)
def _exploding_gradients(run: RunCurves) -> Finding | None:
    curve = run.read(["ppo/grad_norm", "grad_norm"])
    # In groups of equal scores gradients are 0, which say nothing about the size of the others. A
    # head that starts at 0 has small ones at first: a factor of 10 is no illness.
    start, end, middle = (
        statistics.median([x for x in part.values if x > 0] or [0.0])
        for part in (_start(curve), _end(curve), curve)
    )
    highest = max(range(len(curve.values)), key=curve.values.__getitem__)
    advice = "lower learning_rate, add warm-up steps, or set max_grad_norm"
    if 0 < 100 * start < end:
        return Finding(
            "exploding gradients",
            ILLNESS,
            f"gradient norm {start:.3g} in {_steps(_start(curve))}, {end:.3g} in "
            f"{_steps(_end(curve))} (medians)",
            advice,
        )
    if 0 < 100 * middle < curve.values[highest]:
        return Finding(
            "exploding gradients",
            NOTE,
            f"gradient norm {curve.values[highest]:.3g} at step {curve.steps[highest]:g}, where "
            f"its median is {middle:.3g}",
            advice,
        )
    return None


# SFT, reward models, preferences


@check("loss does not fall", "loss", least=8)
def _flat_loss(run: RunCurves) -> Finding | None:
    # Online, the loss is of responses that change with the policy, and need not fall.
    if run.read(["tokens/responses"]):
        return None
    loss, held_out = run.read(["loss"]), run.read(["eval_loss"])
    if len(held_out.steps) > 1 and held_out.values[-1] < held_out.values[0]:
        return None
    if _rises(Series(loss.steps, [-value for value in loss.values])):
        return None
    return Finding(
        "loss does not fall",
        ILLNESS,
        f"loss {_change(loss)}",
        "raise learning_rate if the gradient norm is small and the loss flat, lower it if the loss "
        "jumps or rises; see that weights are trained, and that labels or pairs are not mixed up",
    )


@check("held-out loss rises", "eval_loss", least=2)
def _rising_eval_loss(run: RunCurves) -> Finding | None:
    curve = run.read(["eval_loss"])
    best = min(range(len(curve.values)), key=curve.values.__getitem__)
    rise, gained = curve.values[-1] - curve.values[best], curve.values[0] - curve.values[best]
    # Less than 2% of the loss, or a tenth of what was gained, is not worth to stop for.
    if rise <= 0.02 * abs(curve.values[best]) or rise <= 0.1 * gained:
        return None
    loss = run.read(["loss"])
    if loss and _mean(_end(loss)) > curve.values[best]:
        advice = "training diverges: lower learning_rate, add warm-up steps, or set max_grad_norm"
    else:
        advice = (
            f"the model learns the training examples by heart: {_stop_at(curve.steps[best])}make "
            "fewer passes, lower learning_rate, or bring more data"
        )
    return Finding(
        "held-out loss rises",
        ILLNESS,
        f"held-out loss {curve.values[best]:.4g} at step {curve.steps[best]:g}, "
        f"{curve.values[-1]:.4g} at step {curve.steps[-1]:g}",
        advice,
    )


def _stop_at(step: float) -> str:
    return f"end at step {step:g}, " if step > 0 else ""


_HELD_OUT_ACCURACY = ("eval_accuracy", "eval_rewards/accuracies")


@check("accuracy at chance", *_HELD_OUT_ACCURACY, "rewards/accuracies", least=1)
def _accuracy_at_chance(run: RunCurves) -> Finding | None:
    curve = run.read(_HELD_OUT_ACCURACY)
    if curve and curve.steps[-1] > 0:  # at step 0 nothing is learned yet
        curve = _end(curve, 0.0)
        sems = run.read(["eval_rewards/accuracies_sem"])
        sem = _at(sems, curve.steps[0])
        if sem is None:
            sem = 0.5 / math.sqrt(run.settings.get("eval_examples") or 100)
    else:
        curve = _end(run.read(["rewards/accuracies"]))
        if len(curve.steps) < 4:
            return None
        sem = _sem(curve)
    accuracy = _mean(curve)
    if accuracy > 0.5 + 2 * sem:
        return None
    return Finding(
        "accuracy at chance",
        ILLNESS,
        f"accuracy {accuracy:.3f} ± {sem:.2g} (s.e.) in {_steps(curve)}; guessing has 0.5",
        "train longer or raise learning_rate; see that chosen and rejected are not mixed up, and "
        "that the texts differ where they are cut",
    )
