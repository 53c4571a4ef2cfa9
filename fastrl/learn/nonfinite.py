"""Scores, log-probs, losses and gradients that are not finite, and must not reach a weight."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastrl.data.token_batch import TokenBatch
from fastrl.learn.experience import Experience
from fastrl.run.processes import Processes
from fastrl.samples import Samples

_LONGEST = 80  # characters of a prompt in a message
_HELP = (
    "Look at such prompts and responses; where training broke the model, load a sound checkpoint, "
    "and lower learning_rate or set max_grad_norm"
)
# The parts of an experience in which numbers that are not finite are looked for.
_ORIGINS = {
    "log-probs": "the policy gives a token of the response no probability, or its logits are NaN",
    "values": "the value head, or the critic, returns them",
    "rewards": "the scores are finite, so look at the log-probs of the response by the reference "
    "model, or by a teacher",
}


class NonFiniteExperience(Exception):
    """A batch's experience is not finite: the step is to begin again, without ``samples``, which
    ``PPOTrainer`` notes here. It is not seen outside of ``PPOTrainer.step``."""

    samples: Sequence[int] = ()


class NonFiniteNumbers:
    """Raises or goes on where numbers are not finite; they are not learned from in either case.

    "raise" names the samples in an error. "skip" and "zero-sample" leave out samples whose scores,
    log-probs, values or rewards are not finite; one warning names those of scores, one the others.
    Where a loss or gradient is not finite, "skip" leaves out its mini-batch or optimizer step;
    "zero-sample" only the samples that make it so.

    Args:
        on_nonfinite: the setting of that name of ``PPOConfig``.
        decode: returns the text of a prompt's token ids; None: the samples that make a loss or
            gradient not finite are not looked for.
        counts: whether there are statistics ``ppo/nan_samples`` and ``ppo/nonfinite_samples``.
    """

    def __init__(
        self,
        on_nonfinite: str,
        decode: Callable[[Tensor], str] | None = None,
        *,
        counts: bool = True,
    ) -> None:
        self._kind, self._decode, self._counts = on_nonfinite, decode, counts
        self._warned: set[str] = set()

    def samples(
        self, which: Sequence[int], name: Callable[[int], str], cause: str = "NaN logits"
    ) -> None:
        """Warns of samples, by index, that ended for a ``cause``; ``name`` names a sample's prompt.

        Raises:
            FloatingPointError: with "raise".
        """
        shown = _shown([(i, f"prompt {_short(name(i))}") for i in which[:3]], len(which))
        message = f"{cause} in {len(which)} sample(s) of the rollout: {shown}"
        if self._kind == "raise":
            raise FloatingPointError(f"{message}: nothing has changed")
        self._warn("rollout", message, statistic="ppo/nan_samples")

    def scores(
        self, scores: Tensor, left_out: Sequence[int], name: Callable[[int], str]
    ) -> list[int]:
        """Indices of the scores [B], on the CPU, that are not finite, but for ``left_out``.

        Raises:
            ValueError: with "raise"; or no score is finite.
        """
        finite = scores.isfinite()
        finite[list(left_out)] = True
        which = (~finite).nonzero()[:, 0].tolist()
        if not which:
            return []
        i = which[0]
        first = f"scores[{i}] is {float(scores[i])} (prompt {_short(name(i))})"
        if self._kind == "raise":
            raise ValueError(
                f"{first}: scores must be finite. Mend what computes them, or leave such samples "
                "out with on_nonfinite='skip'"
            )
        if len(which) + len(left_out) == len(scores):
            raise ValueError(f"{first}, and no score is finite: mend what computes them")
        more = f", and {len(which) - 1} more are not finite" if len(which) > 1 else ""
        self._warn("scores", first + more)
        return which

    def scores_are_named(self) -> None:
        """Notes that scores that are not finite were warned of, so that :meth:`scores` is quiet."""
        self._warned.add("scores")

    def experience(self, batch: TokenBatch, scored: Experience, rewards: Tensor) -> list[int]:
        """Where a number is not finite: indices of samples with such log-probs, values or rewards.

        Args:
            rewards: [B, T-1], before they are whitened.

        Raises:
            FloatingPointError: with "raise"; all samples of which a token counts have such numbers;
                or none has, and so advantages or returns are what is not finite.
        """
        numbers = (scored.logprobs, scored.values, rewards)
        sound = torch.stack([x.isfinite().all(-1) for x in numbers], 1).cpu()
        which = (~sound.all(-1)).nonzero()[:, 0].tolist()
        origins = {i: tuple(_ORIGINS)[int(sound[i].int().argmin())] for i in which}
        if not which:
            raise FloatingPointError(
                "advantages or returns are not finite, though log-probs, values and rewards are: "
                "these are too large; scale the scores (use_score_scaling, score_clip)"
            )
        counting = len(batch.counting())
        named = [(i, f"its {origins[i]}, {self._prompt(batch, i)}") for i in which[:3]]
        message = (
            f"numbers that are not finite in {len(which)} of {counting} sample(s): "
            f"{_shown(named, len(which))}; {_ORIGINS[origins[which[0]]]}"
        )
        if len(which) == counting:
            raise FloatingPointError(f"{message}. The model is broken. {_HELP}")
        if self._kind == "raise":
            raise FloatingPointError(f"{message}: nothing has changed")
        self._warn("experience", message)
        return which

    @property
    def searches(self) -> bool:
        """Whether samples that make a loss or gradient not finite are to be looked for: never
        without ``decode``, with "skip" until a warning has named some, else always."""
        once = self._kind == "skip"
        return self._decode is not None and not (once and "causes" in self._warned)

    @property
    def leaves_out_causes(self) -> bool:
        """Whether samples that make a loss or gradient not finite are left out alone, not with
        their whole mini-batch or step."""
        return self._kind == "zero-sample"

    def update(self, what: str, causes: Sequence[Experience] = ()) -> str:
        """Handles an optimizer step with a loss or gradient that is not finite, before it is taken.

        Args:
            what: names what is not finite.
            causes: the samples that make it so, where they are known, each as a mini-batch.

        Returns:
            the samples' names, for a warning that the update is to give; or "".

        Raises:
            FloatingPointError: with "raise".
        """
        named = [(each.tokens.samples[0], self._prompt(each.tokens, 0)) for each in causes[:3]]
        because = f", because of sample(s) {_shown(named, len(causes))}" if causes else ""
        if self._kind == "raise":
            raise FloatingPointError(
                f"{what}{because}: this optimizer step is not taken. {_HELP}; "
                "on_nonfinite='zero-sample' leaves such samples out"
            )
        if causes and self.leaves_out_causes:
            self._warn("causes", what + because, "left out of the rest of the step")
            return ""
        if causes:
            self._warned.add("causes")
            because += "; on_nonfinite='zero-sample' leaves out such samples alone"
        return because

    def _prompt(self, batch: TokenBatch, i: int) -> str:
        assert self._decode is not None
        return f"prompt {_short(repr(self._decode(batch.prompt(i))))}"

    def _warn(
        self,
        kind: str,
        message: str,
        treated: str = "left out of the step (weight 0, in no baseline or mean)",
        statistic: str = "ppo/nonfinite_samples",
    ) -> None:
        """Warns of samples, once for each kind."""
        if kind in self._warned:
            return
        self._warned.add(kind)
        counted = f"; {statistic} counts them" if self._counts else ""
        warnings.warn(f"{message}: {treated}, as any later ones will be{counted}", stacklevel=5)


_NO_FIRST_TOKEN = "no first token that the response format allows"


def is_lost(reason: str, tokens: int) -> bool:
    """Whether nothing can be learned from a response of so many tokens, by why it ended."""
    return reason == "nan" or (reason == "grammar" and not tokens)


def samples_left_out(
    rollout: Samples,
    nonfinite: NonFiniteNumbers,
    name: Callable[[int], str],
    processes: Processes,
) -> list[int]:
    """Indices of samples that ended in NaN logits, whose continuation is not known, or at a
    grammar that allows no first token.

    Raises:
        FloatingPointError: one did, and ``nonfinite`` raises; or all did, and there is one process.
    """
    ended = zip(rollout.finish_reasons, rollout.sequences, strict=True)
    which = [i for i, (reason, tokens) in enumerate(ended) if is_lost(reason, len(tokens))]
    if processes.count == 1:  # other processes may have samples left
        check_a_sample_is_left(len(which), len(rollout.finish_reasons), rollout.finish_reasons)
    if which:
        broken = any(rollout.finish_reasons[i] == "nan" for i in which)
        nonfinite.samples(which, name, "NaN logits" if broken else _NO_FIRST_TOKEN)
    return which


def check_a_sample_is_left(left_out: int, count: int, reasons: Sequence[str] = ()) -> None:
    """Raises FloatingPointError where all ``count`` samples of all processes are lost: ``left_out``
    is the number of those that are, ``reasons`` say why samples ended."""
    if not left_out == count > 0:
        return
    if reasons and "nan" not in reasons:
        raise FloatingPointError(
            f"{_NO_FIRST_TOKEN} in all {count} samples of a rollout: leave out what keeps those "
            "that it allows from being drawn, such as suppress_tokens"
        )
    raise FloatingPointError(
        f"all {count} samples of a rollout ended in NaN logits: the model is broken. Load a "
        "sound checkpoint; where training broke it, lower learning_rate or set max_grad_norm"
    )


def _shown(named: Sequence[tuple[int, str]], count: int) -> str:
    """Lists samples' indices, each with its text, and how many more of ``count`` there are."""
    shown = ", ".join(f"{i} ({what})" for i, what in named)
    return shown + (f" and {count - len(named)} more" if count > len(named) else "")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
