"""The demo's criterion of success, and statistics of its texts."""

from __future__ import annotations

from fastrl.run.callbacks import Evaluation
from fastrl.tools.demo.text import polarity
from fastrl.tools.reports.report import Comparison

GAIN_IN_SEMS = 4.0  # gain of the mean reward on held-out prompts, in standard errors
KL_CEILING = 5.0  # to the language model that PPO starts from, in nats per sequence


def failures(comparison: Comparison) -> list[str]:
    """The conditions that were missed, each as a clause; an unknown KL misses its condition."""
    missed = []
    if not comparison.gain_in_sems >= GAIN_IN_SEMS:
        missed.append(
            f"the reward rose by {comparison.gain_in_sems:.1f} standard errors, "
            f"not by {GAIN_IN_SEMS:g}"
        )
    if not comparison.kl <= KL_CEILING:
        missed.append(f"KL is {comparison.kl:.2f}, above its ceiling of {KL_CEILING:g} nats")
    return missed


def success() -> str:
    """What was reached if no condition was missed."""
    return (
        f"the reward rose by at least {GAIN_IN_SEMS:g} standard errors "
        f"with KL below its ceiling of {KL_CEILING:g} nats per sequence"
    )


def text_statistics(before: Evaluation, after: Evaluation) -> dict[str, float]:
    """The texts' polarity by the rule, which is not the reward, and counts of distinct texts."""
    return {
        "rule_polarity_before": _mean_polarity(before),
        "rule_polarity_after": _mean_polarity(after),
        "distinct_before": len(set(before.completions)),
        "distinct_after": len(set(after.completions)),
    }


def _mean_polarity(evaluation: Evaluation) -> float:
    texts = [p + c for p, c in zip(evaluation.prompts, evaluation.completions, strict=True)]
    return sum(map(polarity, texts)) / len(texts)
