"""What must hold of two sides' statistics before any time of theirs counts.

Number by number in fp32, where both take steps of plain gradient descent. With Adam, and in bf16,
rounding grows: there everything must be finite, and in bf16 how far the sides are apart is told.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator

Statistics = list[dict[str, float]]  # of each step

# As the golden tests. By gradient descent, two steps in fp32 are within 1e-5 of float64.
RELATIVE, ABSOLUTE = 1e-3, 1e-5
AT_THE_EDGE = 5e-4  # of all tokens: whose ratio rounding puts on either side of where it is clipped
TOLD = (
    "objective/kl",
    "objective/entropy",
    "ppo/loss/policy",
    "ppo/loss/value",
    "ppo/loss/total",
    "ppo/policy/entropy",
    "ppo/policy/approxkl",
    "ppo/returns/mean",
    "ppo/val/vpred",
)


def disagreements(
    ours: Statistics,
    theirs: Statistics,
    unknown: Collection[str] = (),
    exact: Statistics | None = None,
) -> Iterator[str]:
    """A line for each of the peer's statistics that fastrl lacks or has otherwise; those that are
    unknown to fastrl must be NaN.

    Of two numbers that differ, ``exact``, what float64 gives, decides where it is known: fastrl's
    may stand if it is as near to float64 as rounding leaves it, or nearer than the peer's.
    """
    for step, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        for key, value in expected.items():
            if key not in found:
                yield f"step {step}: {key} is missing"
            elif key in unknown:
                if not math.isnan(found[key]):
                    yield f"step {step}: {key} is {found[key]:.7g}, which cannot be known"
            elif not _close(key, found[key], value):
                line = f"step {step}: {key} is {found[key]:.7g}, the peer has {value:.7g}"
                if exact is None:
                    yield line
                elif not _stands(key, found[key], value, exact[step].get(key, math.nan)):
                    yield f"{line}, float64 {exact[step].get(key, math.nan):.7g}"


def _stands(key: str, mine: float, theirs: float, exact: float) -> bool:
    return _close(key, mine, exact) or abs(mine - exact) < abs(theirs - exact)


def _close(key: str, mine: float, right: float) -> bool:
    return math.isclose(mine, right, rel_tol=0, abs_tol=_allowed(key, right))


def _allowed(key: str, value: float) -> float:
    edge = AT_THE_EDGE if key.endswith("clipfrac") else 0.0
    return ABSOLUTE + RELATIVE * abs(value) + edge


def not_finite(
    ours: Statistics, theirs: Statistics, unknown: Collection[str] = ()
) -> Iterator[str]:
    """A line for each of the peer's statistics that fastrl lacks, or that is no number on a side;
    those that are unknown to fastrl are looked at on the peer's alone."""
    for step, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        for key, value in expected.items():
            if key not in found:
                yield f"step {step}: {key} is missing"
            elif not math.isfinite(found[key]) and key not in unknown:
                yield f"step {step}: {key} is {found[key]}"
            if not math.isfinite(value):
                yield f"step {step}: {key} is {value}, the peer's"


def differences(
    ours: Statistics, theirs: Statistics, unknown: Collection[str] = ()
) -> dict[str, dict[str, float]]:
    """Of the statistics that matter: means over steps of |Δ|, and of the peer's absolute value."""
    found = {}
    for key in TOLD:
        if key in unknown or key not in theirs[0]:
            continue
        pairs = [(mine[key], other[key]) for mine, other in zip(ours, theirs, strict=True)]
        found[key] = {
            "difference": statistics.fmean(abs(a - b) for a, b in pairs),
            "of": statistics.fmean(abs(b) for _, b in pairs),
        }
    return found


def trained_otherwise(ours: dict[str, int], theirs: dict[str, int]) -> Iterator[str]:
    """A line for each parameter that one side trains and the other does not, or not as large."""
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            yield (
                f"{name}: fastrl trains {ours.get(name, 0)} numbers of it, "
                f"the peer {theirs.get(name, 0)}"
            )
