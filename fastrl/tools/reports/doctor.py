"""The doctor: looks for the usual illnesses of a run in what it has recorded.

A check is a function of a :class:`RunCurves` that returns a :class:`Finding` or None, registered
with the metrics that it reads. Thresholds stand beside it, with their reasons.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fastrl.tools.reports.curves import RunCurves, Series

ILLNESS, NOTE = "illness", "note"


@dataclass(frozen=True)
class Finding:
    """An illness of a run, or something worth a look, that a check reports.

    Args:
        figures: the numbers that show it, with their steps.
        advice: what to change.
        severity: "illness": training does not do what it is for, or its result cannot be used; or
            "note": worth a look.
        name, metrics, page: those of the check, see :class:`Check`; :func:`examine` fills them in.
        stage: the stage of the run that it is about; None: the run itself.
    """

    figures: str
    advice: str
    severity: str = ILLNESS
    name: str = ""
    metrics: tuple[str, ...] = ()
    page: str = ""
    stage: str | None = None


@dataclass(frozen=True)
class Check:
    """A check, and what it needs.

    Args:
        metrics: names of metrics, at least one of which must have been recorded.
        least: how often one of the metrics must have been recorded, for a judgement.
        unless: names of earlier checks; this check is left out where one of them finds an illness,
            which is the cause.
    """

    name: str
    metrics: tuple[str, ...]
    least: int
    unless: tuple[str, ...]
    find: Callable[[RunCurves], Finding | None]

    @property
    def page(self) -> str:
        """The path of the documents' page that says more, at the check's heading of the FAQ."""
        return f"docs/faq.md#{self.name.lower().replace(' ', '-')}"


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
        checks = "check" if len(self.passed) == 1 else "checks"
        return f"{len(self.passed)} {other}{checks} found nothing{few}"


CHECKS: list[Check] = []
_Find = Callable[[RunCurves], "Finding | None"]


def check(
    name: str, *metrics: str, least: int = 4, unless: tuple[str, ...] = ()
) -> Callable[[_Find], _Find]:
    """Decorator: adds a check to :data:`CHECKS`."""

    def add(find: _Find) -> _Find:
        CHECKS.append(Check(name, metrics, least, unless, find))
        return find

    return add


def examine(run: RunCurves) -> Diagnosis:
    """Makes all checks of a run, and of its stages."""
    findings, passed, too_few = [], [], []
    for stage, part in _parts(run):
        where = "" if stage is None else f" ({stage})"
        ill: set[str] = set()
        for check in CHECKS:
            recorded = max(len(part.read([key]).steps) for key in check.metrics)
            if recorded == 0 or ill & {*check.unless}:
                continue
            if recorded < check.least:
                too_few.append(check.name + where)
            elif (sign := check.find(part)) is None:
                passed.append(check.name + where)
            else:
                if sign.severity == ILLNESS:
                    ill.add(check.name)
                findings.append(
                    replace(
                        sign, name=check.name, metrics=check.metrics, page=check.page, stage=stage
                    )
                )
    findings.sort(key=lambda finding: finding.severity != ILLNESS)
    return Diagnosis(tuple(_in_words_of(run, x) for x in findings), tuple(passed), tuple(too_few))


# The names in TRL of settings that the checks' advice names.
_SETTINGS = {
    "init_kl_coef": "beta",
    "max_new_tokens": "max_completion_length",
    "ppo_epochs": "num_iterations",
}


def _in_words_of(run: RunCurves, finding: Finding) -> Finding:
    """The finding, with settings by the names that the run has for them."""

    def own(name: re.Match[str]) -> str:
        trl_name = _SETTINGS[name[0]]
        return trl_name if trl_name in run.settings and name[0] not in run.settings else name[0]

    names = re.compile(rf"\b({'|'.join(_SETTINGS)})\b")
    return replace(
        finding, figures=names.sub(own, finding.figures), advice=names.sub(own, finding.advice)
    )


def _parts(run: RunCurves) -> Iterator[tuple[str | None, RunCurves]]:
    yield None, run
    for stage, rows in run.stages.items():
        yield stage, RunCurves(run.name, rows)


_REWARD = ("reward/mean", "rewards/mean", "ppo/mean_scores")
_HELD_OUT = ("eval/reward_mean", "eval_reward", "eval_win_rate")
_HELD_OUT_SEM = ("eval/reward_sem", "eval_reward_sem", "eval_win_rate_sem")
_DIVERGENCE = ("eval_divergence", "divergence")
_LEARNING_RATE = ("ppo/learning_rate", "learning_rate")


def _steps(curve: Series) -> str:
    first, last = curve.steps[0], curve.steps[-1]
    return f"step {first:g}" if first == last else f"steps {first:g}–{last:g}"


def _change(curve: Series) -> str:
    start, end = curve.start(), curve.end()
    return f"{start.mean:.3g} in {_steps(start)}, {end.mean:.3g} in {_steps(end)}"


@check("negative KL", "objective/kl")
def _negative_kl(run: RunCurves) -> Finding | None:
    # A KL is not negative; its estimate from few samples may be, by chance: hence the mean over the
    # steps, its standard error, and a margin for rounding.
    curve = run.read(["objective/kl"])
    mean, sem = curve.mean, curve.sem
    if mean + 2 * sem >= 0 or mean > -0.05:
        return None
    return Finding(
        f"KL to the reference {mean:.3g} ± {sem:.2g} nats per sequence, mean of {_steps(curve)}",
        "the responses are not samples of the policy as it is scored: generate with top_k=0, "
        "top_p=1, the temperature of the configuration, and nothing else that bends the "
        "distribution (min_length, forbidden tokens)",
    )


_KL_PER_TOKEN = "objective/kl_per_token"
# Nats per token: on average a token is then e times as likely as under the reference. Runs that
# stay readable are far below: 0.1 to 0.4 for short texts, less for long ones.
_HIGH_KL_PER_TOKEN = 1.0
# The adaptive controller is to keep the KL near its target; it reacts slowly, but not that slowly.
_HIGH_KL_OF_TARGET = 4.0


@check("exploding KL", "objective/kl", "eval/kl", _KL_PER_TOKEN, least=1)
def _exploding_kl(run: RunCurves) -> Finding | None:
    curve = run.read(["objective/kl", "eval/kl"])
    if not curve:
        return _exploding_kl_per_token(run.read([_KL_PER_TOKEN]))
    end = curve.end()
    limits = []
    lengths = run.read(["tokens/responses_len_mean", "tokens/responses"])
    if lengths:
        per_token = _HIGH_KL_PER_TOKEN * lengths.end().mean
        limits.append((per_token, f"{_HIGH_KL_PER_TOKEN:g} nat per token"))
    if run.settings.get("adap_kl_ctrl") and run.settings.get("target"):
        target = float(run.settings["target"])
        limits.append((_HIGH_KL_OF_TARGET * target, f"{_HIGH_KL_OF_TARGET:g} times the target"))
    if run.kl_ceiling is not None:
        limits.append((run.kl_ceiling, "the ceiling"))
    limit, meaning = min(limits, default=(math.inf, ""))
    if end.mean <= limit:
        return None
    return Finding(
        f"KL to the reference {end.mean:.3g} nats per sequence in {_steps(end)}, above "
        f"{limit:.3g} ({meaning})",
        "lower learning_rate, raise init_kl_coef (or lower target), take fewer ppo_epochs, or set "
        "max_grad_norm; max_kl ends such a run early",
    )


def _exploding_kl_per_token(curve: Series) -> Finding | None:
    end = curve.end()
    if end.mean <= _HIGH_KL_PER_TOKEN:
        return None
    return Finding(
        f"KL to the reference {end.mean:.3g} nats per token in {_steps(end)}, above "
        f"{_HIGH_KL_PER_TOKEN:g}",
        "lower learning_rate, raise init_kl_coef, take fewer ppo_epochs, or lower max_grad_norm",
    )


_FEW_STEPS = 8  # in fewer steps small updates do not go far, and the reward says little
_NO_KL = 1e-3  # nats per sequence: a run that is worth its time is soon far above


@check("nothing is learned", "eval_loss", "objective/kl", "eval/kl", *_LEARNING_RATE, least=2)
def _nothing_is_learned(run: RunCurves) -> Finding | None:
    losses, kl = run.read(["eval_loss"]), run.read(["objective/kl", "eval/kl"])
    rates = run.read(_LEARNING_RATE)
    if len(rates.steps) > 1 and not any(rates.values):
        figures = f"the learning rate is 0 in {_steps(rates)}"
    elif len({*losses.steps}) > 1 and len({*losses.values}) == 1 and not _samples(run):
        figures = (
            f"held-out loss {losses.values[0]:.4g} in {_steps(losses)}, to the last digit the same"
        )
    elif len(kl.steps) >= _FEW_STEPS and not _has_risen(run):
        end = kl.end()
        if max(map(abs, end.values)) >= _NO_KL:
            return None
        figures = f"KL to the reference below {_NO_KL:g} nats per sequence in {_steps(end)}"
    else:
        return None
    return Finding(
        figures,
        "raise learning_rate (adapters take some ten times as much as whole weights); see that "
        "weights are trained: none frozen, no adapter switched off",
    )


_COLLAPSED_ENTROPY = 0.2  # share of the first steps' entropy: a policy that explores keeps more


@check("entropy collapse", "ppo/policy/entropy")
def _entropy_collapse(run: RunCurves) -> Finding | None:
    curve = run.read(["ppo/policy/entropy"])
    start, end = curve.start(0.1), curve.end(0.1)
    if end.mean >= _COLLAPSED_ENTROPY * start.mean:
        return None
    figures = (
        f"policy entropy {start.mean:.3g} nats per token in {_steps(start)}, {end.mean:.3g} in "
        f"{_steps(end)}"
    )
    if run.read(_DIVERGENCE):
        return Finding(
            figures,
            "where the teacher is that sure, that is success; else the student has left what the "
            "teacher may also say: lower beta towards 0 (KL of the teacher from the student), or "
            "lower learning_rate",
            NOTE,
        )
    remedy = (
        "raise init_kl_coef, lower learning_rate, take fewer ppo_epochs; look at the samples for "
        "what the reward pays for"
    )
    if _has_risen(run):
        return Finding(
            f"{figures}, as the reward has risen",
            f"where tasks have one right answer, that is success; where they are open: {remedy}",
            NOTE,
        )
    return Finding(figures, f"the policy writes nearly the same for every prompt: {remedy}")


_HIGH_CLIP_FRACTION = 0.25  # usual are up to 0.2; above, most of an update's gain is cut off


@check("clip fraction too high", "ppo/policy/clipfrac")
def _high_clip_fraction(run: RunCurves) -> Finding | None:
    end = run.read(["ppo/policy/clipfrac"]).end(0.5)
    if end.mean <= _HIGH_CLIP_FRACTION:
        return None
    return Finding(
        f"{end.mean:.0%} of the tokens are clipped, mean of {_steps(end)}",
        "each update goes too far: lower learning_rate, take fewer ppo_epochs or fewer "
        "mini-batches per step",
    )


# ½·mean (log ratio)²: updates change a token's probability by less than 0.15%.
_LOW_POLICY_KL = 1e-6


@check("clip fraction of zero", "ppo/policy/clipfrac", least=10, unless=("nothing is learned",))
def _policy_stands_still(run: RunCurves) -> Finding | None:
    # With one optimizer step for each batch the ratio is 1 by construction.
    steps = run.read(["ppo/optimizer_steps"])
    curve, moved = run.read(["ppo/policy/clipfrac"]), run.read(["ppo/policy/approxkl"])
    if not (steps and moved) or steps.mean <= 1 or any(curve.values):
        return None
    if moved.end(0.5).mean >= _LOW_POLICY_KL:
        return None
    return Finding(
        f"no token was clipped in {_steps(curve)}, and the updates hardly change the policy "
        f"(approxkl {moved.end(0.5).mean:.2g})",
        "raise learning_rate; see that the rewards differ and that weights are trained",
    )


@check("value loss does not fall", "ppo/val/explained_variance", "ppo/val/var_explained", least=10)
def _useless_values(run: RunCurves) -> Finding | None:
    # In short runs values are still learned: they are ill if they explain nothing and their loss
    # does not fall either.
    explained = run.read(["ppo/val/explained_variance", "ppo/val/var_explained"])
    loss, end = run.read(["ppo/loss/value"]), explained.end(0.5)
    if end.mean > 0 or not loss or loss.end().mean < 0.9 * loss.start().mean:
        return None
    return Finding(
        f"values explain {end.mean:.2g} of the returns' variance in {_steps(end)} (0: no better "
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
        f"{count:g} mini-batches were left out because their ratio exceeded ratio_threshold, in "
        f"{_where(skipped)}, beside {sum(taken.values):g} optimizer steps",
        "lower learning_rate or take fewer ppo_epochs; if it happens in a step's first epoch, the "
        "responses are not samples of the policy as it is scored",
    )


@check("equal scores", "reward/std", "ppo/std_scores", "groups/no_spread", least=2)
def _equal_scores(run: RunCurves) -> Finding | None:
    deviations = run.read(["reward/std", "ppo/std_scores"])
    means = run.read(["reward/mean", "ppo/mean_scores"])
    equal = [
        step
        for step, value in zip(deviations.steps, deviations.values, strict=True)
        if value <= 1e-6 * max(1.0, abs(means.at(step) or 0.0))
    ]
    advice = (
        "nothing can be learned from equal scores: see that the reward function reads the "
        "completion and tells good ones from bad ones; bring easier or harder prompts, or a "
        "reward that also grades partly right answers"
    )
    if len(equal) > 0.5 * len(deviations.steps):
        return Finding(
            f"all scores of a step were equal in {len(equal)} of {len(deviations.steps)} steps "
            f"(the first {equal[0]:g}, the last {equal[-1]:g})",
            advice,
        )
    spread = run.read(["groups/no_spread"]).end(0.5)
    # Right or wrong answers to hard or easy questions leave half of the groups without spread; if
    # more have none, most of the work is wasted.
    if not spread or spread.mean <= 0.6:
        return None
    return Finding(
        f"in {spread.mean:.0%} of the groups all scores are equal, mean of {_steps(spread)}",
        advice,
        ILLNESS if spread.mean > 0.8 else NOTE,
    )


@check("responses cut by length", "tokens/cut_share", "tokens/eos_share", least=1)
def _cut_by_length(run: RunCurves) -> Finding | None:
    cut = run.read(["tokens/cut_share"])
    if not cut:
        ended = run.read(["tokens/eos_share"])
        cut = Series(ended.steps, [1.0 - value for value in ended.values])
    end = cut.end(0.5)
    if end.mean <= 0.5:
        return None
    penalty = "missing_eos_penalty, " if run.read(_REWARD) else ""
    teacher = ", or by a teacher that ends its answers" if run.read(_DIVERGENCE) else ""
    return Finding(
        f"{end.mean:.0%} of the responses were cut by max_new_tokens in {_steps(end)}",
        f"raise max_new_tokens, or teach the policy to end: {penalty}SFT on texts that end with "
        f"EOS{teacher}. Where all responses are to have one length, this is as meant",
    )


# Share of the first steps' divergence. A student that a teacher has nothing to tell has none.
_LEFT_TO_LEARN, _RISEN = 0.9, 1.02


@check("divergence does not fall", *_DIVERGENCE, least=2, unless=("nothing is learned",))
def _flat_divergence(run: RunCurves) -> Finding | None:
    if run.read(_REWARD):  # a term beside rewards may rise, as they do
        return None
    given = run.settings.get("teacher_model_name_or_path")
    moves = not given and run.settings.get("teacher_model_kind") in ("live", "ema")
    held_out, training = run.read(["eval_divergence"]), run.read(["divergence"])
    if len(held_out.steps) > 1:
        if held_out.values[-1] <= _LEFT_TO_LEARN * held_out.values[0]:
            return None
        figures = (
            f"held-out divergence {held_out.values[0]:.3g} at step {held_out.steps[0]:g}, "
            f"{held_out.values[-1]:.3g} at step {held_out.steps[-1]:g} (nats per token)"
        )
        rises = held_out.values[-1] > _RISEN * held_out.values[0]
    elif len(training.steps) < _FEW_STEPS or _rises(-training):
        return None
    else:
        figures = f"divergence {_change(training)} (nats per token)"
        rises = _rises(training)
    return Finding(
        figures,
        "lower learning_rate, or raise num_generations and batches, where it jumps or rises; raise "
        "learning_rate or take more steps where it is flat (adapters take some ten times as much "
        "as whole weights). A teacher that moves with the student (live, ema) may keep away",
        ILLNESS if rises and not moves else NOTE,
    )


@check("reward falls", *_REWARD, *_HELD_OUT, least=2)
def _reward_falls(run: RunCurves) -> Finding | None:
    held_out, sems = run.read(_HELD_OUT), run.read(_HELD_OUT_SEM)
    training = run.read(_REWARD)
    if len(held_out.steps) >= 2 and sems:
        fall = held_out.values[0] - held_out.values[-1]
        if fall <= 3 * math.hypot(sems.values[0], sems.values[-1]):
            return None
        if _rises(training):  # the check "held-out reward falls" reports it
            return None
        figures = (
            f"held-out reward {held_out.values[0]:.3g} at step {held_out.steps[0]:g}, "
            f"{held_out.values[-1]:.3g} at step {held_out.steps[-1]:g}"
        )
    elif len(training.steps) >= 8 and _rises(-training):
        figures = f"reward of the training batches {_change(training)}"
    else:
        return None
    return Finding(
        figures,
        "training makes the policy worse by its own reward: lower learning_rate, take fewer "
        "ppo_epochs, use larger batches; see that higher is better in the reward function",
    )


# In standard deviations of single rewards: after a smaller rise next to nothing was learned.
_NO_RISE = 0.2


@check(
    "reward does not rise",
    *_REWARD,
    least=_FEW_STEPS,
    unless=("nothing is learned", "entropy collapse", "equal scores", "reward falls"),
)
def _reward_does_not_rise(run: RunCurves) -> Finding | None:
    training, deviations = run.read(_REWARD), run.read(["reward/std", "ppo/std_scores"])
    if not deviations or _has_risen(run):
        return None
    start, end, deviation = training.start(), training.end(), deviations.mean
    rise, sem = end.mean - start.mean, math.hypot(start.sem, end.sem)
    return Finding(
        f"reward of the training batches {_change(training)}: a rise of {rise:.2g} ± {sem:.2g} "
        f"(s.e.), where single rewards deviate by {deviation:.2g}",
        "read samples with their rewards: are the rewards right, and some of the responses good? "
        "Take more steps, raise learning_rate if objective/kl stays near 0, or lower an "
        "init_kl_coef that is high; larger batches show what the noise hides",
        ILLNESS if rise + 2 * sem < _NO_RISE * deviation else NOTE,
    )


@check("held-out reward falls", *_HELD_OUT, least=2)
def _overfitting(run: RunCurves) -> Finding | None:
    held_out, sems, training = run.read(_HELD_OUT), run.read(_HELD_OUT_SEM), run.read(_REWARD)
    best = max(range(len(held_out.values)), key=held_out.values.__getitem__)
    fall = held_out.values[best] - held_out.values[-1]
    # The best of several evaluations is high by chance, too: hence 3 standard errors.
    if fall <= 3 * math.hypot(*(sems.at(held_out.steps[i]) or 0.0 for i in (best, -1))):
        return None
    if not sems or not _rises(training.since(held_out.steps[best])):
        return None
    return Finding(
        f"held-out reward {held_out.values[best]:.3g} at step {held_out.steps[best]:g}, "
        f"{held_out.values[-1]:.3g} at step {held_out.steps[-1]:g}, while that of the training "
        f"batches rises: {_change(training.since(held_out.steps[best]))}",
        "the policy learns what holds for the training prompts only, or held-out ones are rewarded "
        f"differently: {_stop_at(held_out.steps[best])}bring more prompts, raise init_kl_coef; see "
        "that both have the same reward and settings",
    )


def _rises(curve: Series) -> bool:
    """Whether the last quarter's mean is above the first's, by more than chance and rounding."""
    if len(curve.steps) < 4:
        return False
    start, end = curve.start(), curve.end()
    # One or two steps say little of their spread: the whole curve's standard error stands in.
    errors = [part.sem if len(part.steps) > 2 else curve.sem for part in (start, end)]
    return end.mean - start.mean > max(2 * math.hypot(*errors), 1e-6 * abs(start.mean))


def _has_risen(run: RunCurves) -> bool:
    """Whether the reward, held out or of training batches, has risen by more than chance."""
    held_out, sems = run.read(_HELD_OUT), run.read(_HELD_OUT_SEM)
    if len(held_out.steps) > 1 and sems:
        rise = held_out.values[-1] - held_out.values[0]
        if rise > 2 * math.hypot(sems.values[0], sems.values[-1]):
            return True
    return _rises(run.read(_REWARD))


def _samples(run: RunCurves) -> bool:
    """Whether the policy's own responses are learned from."""
    return bool(run.read(["tokens/responses", "tokens/responses_len_mean"]))


def _where(curve: Series) -> str:
    steps = [step for step, value in zip(curve.steps, curve.values, strict=True) if value]
    shown = ", ".join(f"{step:g}" for step in steps[:5])
    rest = f" and {len(steps) - 5} more" if len(steps) > 5 else ""
    return f"step{'s' if len(steps) > 1 else ''} {shown}{rest}"


_OF_TEACHERS = ("teacher_nonfinite", "eval_teacher_nonfinite")


@check("non-finite numbers", "ppo/nonfinite_minibatches", "learning_rate", least=1)
def _nonfinite(run: RunCurves) -> Finding | None:
    names = [key for key in run.metrics() if "nonfinite" in key or "nan_samples" in key]
    counts = {key: run.read([key]) for key in names}
    messages = [
        f"{key} {sum(curve.values):g} ({_where(curve)})"
        for key, curve in counts.items()
        if any(curve.values)
    ]
    # A loss that is NaN is not in the file, only what is logged beside it.
    logged, losses = run.read(["learning_rate"]), run.read(["loss"])
    gaps = Series(logged.steps, [float(losses.at(step) is None) for step in logged.steps])
    if any(gaps.values):
        messages.append(f"no finite loss in {_where(gaps)}")
    if not messages:
        return None
    if all(message.startswith(_OF_TEACHERS) for message in messages):
        return Finding(
            f"share of the responses that a teacher has no numbers for: {'; '.join(messages)}",
            "nothing was learned of these: load the teacher in bfloat16 or float32 rather than "
            "float16 (teacher_model_init_kwargs)",
        )
    return Finding(
        "; ".join(messages),
        "look at the samples of these steps; lower learning_rate or set max_grad_norm, train in "
        "float32 or bfloat16 rather than float16, and see that the reward function returns finite "
        "numbers",
    )


@check("exploding gradients", "ppo/grad_norm", "grad_norm", least=8)
def _exploding_gradients(run: RunCurves) -> Finding | None:
    curve = run.read(["ppo/grad_norm", "grad_norm"])
    # Gradients of groups with equal scores are 0, and say nothing about the size of others. A head
    # that starts at 0 has small gradients at first: a factor of 10 is no illness.
    start, end, middle = (
        statistics.median([x for x in part.values if x > 0] or [0.0])
        for part in (curve.start(), curve.end(), curve)
    )
    highest = max(range(len(curve.values)), key=curve.values.__getitem__)
    advice = "lower learning_rate, add warm-up steps, or set max_grad_norm"
    if 0 < 100 * start < end:
        return Finding(
            f"gradient norm {start:.3g} in {_steps(curve.start())}, {end:.3g} in "
            f"{_steps(curve.end())} (medians)",
            advice,
        )
    if 0 < 100 * middle < curve.values[highest]:
        return Finding(
            f"gradient norm {curve.values[highest]:.3g} at step {curve.steps[highest]:g}, where "
            f"its median is {middle:.3g}",
            advice,
            NOTE,
        )
    return None


@check("loss does not fall", "loss", least=8, unless=("nothing is learned",))
def _flat_loss(run: RunCurves) -> Finding | None:
    # Online, the loss is of responses that change with the policy, and need not fall.
    if _samples(run):
        return None
    loss, held_out = run.read(["loss"]), run.read(["eval_loss"])
    if len(held_out.steps) > 1 and held_out.values[-1] < held_out.values[0]:
        return None
    if _rises(-loss):
        return None
    return Finding(
        f"loss {_change(loss)}",
        "raise learning_rate if the gradient norm is small and the loss flat, lower it if the loss "
        "jumps or rises; see that weights are trained, and that labels or pairs are not mixed up",
    )


_FEW = 30  # held-out examples; the mean loss of fewer may rise by chance


@check("held-out loss rises", "eval_loss", least=2)
def _rising_eval_loss(run: RunCurves) -> Finding | None:
    if (run.settings.get("eval_examples") or _FEW) < _FEW or _samples(run):
        return None
    curve = run.read(["eval_loss"])
    best = min(range(len(curve.values)), key=curve.values.__getitem__)
    rise, gained = curve.values[-1] - curve.values[best], curve.values[0] - curve.values[best]
    # Less than 2% of the loss, or a tenth of what was gained, is not worth to stop for.
    if rise <= 0.02 * abs(curve.values[best]) or rise <= 0.1 * gained:
        return None
    loss = run.read(["loss"])
    if loss and loss.end().mean > curve.values[best]:
        advice = "training diverges: lower learning_rate, add warm-up steps, or set max_grad_norm"
    else:
        advice = (
            f"the model learns the training examples by heart: {_stop_at(curve.steps[best])}take "
            "fewer epochs, lower learning_rate, or bring more data"
        )
    return Finding(
        f"held-out loss {curve.values[best]:.4g} at step {curve.steps[best]:g}, "
        f"{curve.values[-1]:.4g} at step {curve.steps[-1]:g}",
        advice,
    )


def _stop_at(step: float) -> str:
    return f"end at step {step:g}, " if step > 0 else ""


_SURE = 0.075  # at a larger standard error (below 45 pairs) only less than chance is reported
_HELD_OUT_ACCURACY = ("eval_accuracy", "eval_rewards/accuracies")


@check("accuracy at chance", *_HELD_OUT_ACCURACY, "rewards/accuracies", least=1)
def _accuracy_at_chance(run: RunCurves) -> Finding | None:
    curve = run.read(_HELD_OUT_ACCURACY)
    if curve and curve.steps[-1] > 0:  # at step 0 nothing is learned yet
        curve = curve.end(0.0)
        examples = run.settings.get("eval_examples")
        sem = run.read(["eval_rewards/accuracies_sem"]).at(curve.steps[0])
        if examples or sem is None:  # pairs that are all right, or all wrong, have a sem of 0
            sem = max(sem or 0.0, 0.5 / math.sqrt(examples or 100))
    else:
        curve = run.read(["rewards/accuracies"]).end()
        # Online, the pairs are the policy's own, and need not become easier to tell apart.
        if len(curve.steps) < 4 or _samples(run):
            return None
        sem = curve.sem
    accuracy = curve.mean
    # With few pairs a model that has learned cannot be told from one that has not.
    if accuracy > 0.5 + 2 * sem or (sem > _SURE and accuracy > 0.5 - 2 * sem):
        return None
    return Finding(
        f"accuracy {accuracy:.3f} ± {sem:.2g} (s.e.) in {_steps(curve)}; guessing has 0.5",
        "train longer or raise learning_rate; see that chosen and rejected are not mixed up, and "
        "that texts which are cut to max_length still differ",
    )
