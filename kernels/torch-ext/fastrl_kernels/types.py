"""Types of the ops' arguments and results, and the constants that several ops share."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .policy_losses import PPO_CLIP, PolicyLoss

IGNORE_LABEL = -100
KL_KINDS = ("kl", "abs", "mse", "k3", "k3+")
AGGREGATES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LOG_RATIO_LIMIT = 20.0
WHITEN_EPS = 1e-8
# Lower sampling temperatures count as 0: their inverses would not be finite in fp32.
COLDEST = 1e-30
# States of a slot: its sample is running; why it ended; no sample.
RUNNING, EOS, LENGTH, STOP, NAN, IDLE = range(6)
# The lowest finite number of fp32: a maximum starts here, so that where all logits are -inf their
# differences from it are -inf, never NaN, and any finite logit counts.
LOWEST = -(2.0 - 2.0**-23) * 2.0**127


class Temperature(NamedTuple):
    """One temperature for all rows, or one per row."""

    number: float
    per_row: Tensor | None  # [N] fp32, in place of the number

    def at(self, rows: slice) -> Temperature:
        return self if self.per_row is None else self._replace(per_row=self.per_row[rows])

    def divide_(self, x: Tensor) -> Tensor:
        """x/T in place, x [r] or [r, C]."""
        if self.per_row is not None:
            return x.div_(self.per_row if x.dim() == 1 else self.per_row[:, None])
        return x if self.number == 1.0 else x.div_(self.number)


class LogitTransform(NamedTuple):
    """Logits from the LM head's output x: c·tanh(s·x/c), or s·x without a soft cap.

    That is outer·u of the unscaled logit u = tanh(inner·x), or u = x without a cap.
    """

    softcap: float | None
    logit_scale: float

    @property
    def inner(self) -> float:
        """s/c."""
        return 1.0 if self.softcap is None else self.logit_scale / self.softcap

    @property
    def outer(self) -> float:
        return self.logit_scale if self.softcap is None else self.softcap


class RowStatistics(NamedTuple):
    """Statistics of each row of logits, [N] each; None where not wanted."""

    unscaled_max: Tensor  # max_v u_v, see LogitTransform
    exp_sum: Tensor  # Σ_v exp(z_v - max z)
    mean: Tensor | None  # E[z] - max z, with entropies
    logprobs: Tensor
    entropies: Tensor | None
    log_sum_sq_probs: Tensor | None  # log Σ_v p_v²
    mean_logit: Tensor | None  # mean_v z_v
    is_top1: Tensor | None  # bool: the label is the first of the largest logits

    @classmethod
    def empty(cls, like: Tensor, n: int, entropy: bool, extras: tuple[str, ...]) -> RowStatistics:
        def new(wanted: bool = True, dtype: torch.dtype = torch.float32) -> Any:
            return torch.empty(n, dtype=dtype, device=like.device) if wanted else None

        return cls(
            new(),
            new(),
            new(entropy),
            new(),
            new(entropy),
            new("log_sum_sq_probs" in extras),
            new("mean_logit" in extras),
            new("is_top1" in extras, torch.bool),
        )

    def at(self, rows: slice) -> RowStatistics:
        return RowStatistics(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


class RowGradients(NamedTuple):
    """Upstream gradients per row, [N] fp32; 0 where a row does not count, NaN where its label is
    out of range."""

    logprobs: Tensor
    entropies: Tensor | None

    def at(self, rows: slice) -> RowGradients:
        entropies = None if self.entropies is None else self.entropies[rows]
        return RowGradients(self.logprobs[rows], entropies)


class Extras(NamedTuple):
    """Further statistics of each token's distribution, [...], without gradients; None if not asked
    for."""

    log_sum_sq_probs: Tensor | None  # log Σ_v p_v², fp32
    mean_logit: Tensor | None  # mean_v z_v, fp32
    is_top1: Tensor | None  # bool: the label is the largest logit, the first of several


class ValueTerm(NamedTuple):
    """coef·½·max((V - R)², (clip(V, V_old ± cliprange) - R)²); only ``values`` gets a gradient."""

    values: Tensor  # [..., T] V of the policy that is being updated
    old_values: Tensor  # [..., T] V at rollout time
    returns: Tensor  # [..., T]
    cliprange: float = 0.2
    coef: float = 0.1


class KLTerm(NamedTuple):
    """coef·KL(π || ref) by an estimator of ``kl_penalty``; no gradient to the reference."""

    ref_logprobs: Tensor  # [..., T]
    coef: float
    kind: str = "k3"


class TeacherHead(NamedTuple):
    """A teacher's hidden states and language-model head, of the student's tokens and vocabulary:
    its logits are c·tanh(s·(W h + b)/c)/T. Width, dtype, cap and scale are its own."""

    hidden: Tensor  # [..., H'], at the positions of the student's results
    weight: Tensor  # [V, H']
    bias: Tensor | None = None  # [V]
    softcap: float | None = None
    logit_scale: float = 1.0


class TeacherTokens(NamedTuple):
    """What a teacher says of K tokens at each position: their log-probs, at the temperature that
    the student has. An entry of -inf leaves its token out, whose id is not read.

    The other tokens are one outcome more, "bucket", with what is left of each distribution (of the
    teacher's at least 2⁻²⁴, which is all that fp32 tells), unless the student allows none of them;
    or both distributions are taken over the K tokens alone, "renormalised".
    """

    ids: Tensor  # [..., K] integer, distinct in each row
    logprobs: Tensor  # [..., K]
    rest: str = "bucket"


class TokenDivergences(NamedTuple):
    """Results of ``linear_kl`` per token [...], fp32, 0 where masked."""

    divergences: Tensor
    logprobs: Tensor  # the student's, of the labels
    entropies: Tensor | None  # the student's, where asked for
    teacher_logprobs: Tensor | None  # of the labels; without a gradient; None for TeacherTokens


class PPOConstants(NamedTuple):
    """The PPO loss's tensors that get no gradient."""

    old_logprobs: Any  # None until log-probs are known, where these are the old ones, too
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None
    old_values: Tensor | None
    returns: Tensor | None
    ref_logprobs: Tensor | None
    denominator: Tensor | None
    token_weights: Tensor | None = None
    lengths: Tensor | None = None  # [S] lengths of sequences, where these are not rows
    # What a pass needs of each token's sequence: the log-ratio, in place of the token's own; for
    # the policy loss "vespo" log φ.
    of_sequences: Tensor | None = None


class PPOSettings(NamedTuple):
    """Settings of the PPO loss that are not tensors."""

    low: float  # the ratio's bounds
    high: float
    dual_clip: float | None
    aggregate: str
    denominator: float | None  # None where it is a tensor, or is counted from the mask
    value_cliprange: float
    value_coef: float
    kl_coef: float
    kl_kind: str
    objective: PolicyLoss = PPO_CLIP


class LossStats:
    """The statistics of one loss in one small fp32 tensor on the device.

    ``stats.clipfrac`` is a 0-d view of it: nothing synchronises before the caller reads a number.
    ``stats.to_dict()`` fetches all of them in one transfer. Means are over counted tokens; the
    losses are weighted as the loss itself, before their coefficients.
    """

    NAMES: ClassVar[tuple[str, ...]] = (
        "loss",
        "policy_loss",
        "value_loss",
        "kl_loss",
        "clipfrac",  # share of tokens whose clipped objective is the one that counts
        "clipfrac_low",
        "clipfrac_high",
        "value_clipfrac",
        "approx_kl",  # ½·mean (log π - log π_old)²
        "policy_kl",  # mean (log π_old - log π)
        "mean_ratio",
        "clamped_ratios",  # number of tokens with |log-ratio| > 20
        "value_mean",
        "value_error",  # mean (V - R)²
        "tokens",
    )
    __slots__ = ("tensor",)

    tensor: Tensor

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> Tensor:
        if name in self.NAMES:
            return self.tensor[self.NAMES.index(name)]
        raise AttributeError(f"LossStats has no field {name!r}: choose one of {self.NAMES}")

    def to_dict(self) -> dict[str, float]:
        """All statistics as floats: one transfer, and the one place that waits for the device."""
        return dict(zip(self.NAMES, self.tensor.tolist(), strict=True))

    def __repr__(self) -> str:
        return f"LossStats({self.tensor!r})"


class LinearLossStats(LossStats):
    """:class:`LossStats` with the mean ``entropy``, NaN where it was not asked for.

    Per token it has ``logprobs`` and ``entropies`` (or None) [..., T]: fp32, detached, 0 where
    masked.
    """

    NAMES: ClassVar[tuple[str, ...]] = (*LossStats.NAMES, "entropy")
    __slots__ = ("entropies", "logprobs")

    def __init__(self, tensor: Tensor, logprobs: Tensor, entropies: Tensor | None) -> None:
        super().__init__(tensor)
        self.logprobs = logprobs
        self.entropies = entropies


class Moments(NamedTuple):
    """Count, mean and Σ(x - mean)² of counted elements: 0-d fp32, or [P] where P are stacked."""

    count: Tensor  # type: ignore[assignment]  # instead of tuple's method
    mean: Tensor
    m2: Tensor


class SplitMoments(NamedTuple):
    """Moments whose mean is ``mean + low``: one fp32 number is too coarse where mean ≫ std."""

    count: Tensor  # type: ignore[assignment]  # instead of tuple's method
    mean: Tensor
    low: Tensor
    m2: Tensor

    def variance(self, unbiased: bool = True) -> Tensor:
        return self.m2 / (self.count - 1 if unbiased else self.count).clamp(min=1)

    def inverse_deviation(self) -> Tensor:
        """rsqrt(variance + 1e-8); 0 with fewer than two elements, which have no deviation."""
        rstd = torch.rsqrt(self.variance() + WHITEN_EPS)
        return torch.where(self.count > 1, rstd, 0.0)

    def centred(self, values: Tensor) -> Tensor:
        return (values - self.mean) - self.low


class SampledTokens(NamedTuple):
    """One draw per row; everything [N], on the logits' device. Log-probs are in nats."""

    tokens: Tensor
    """int64; -1 where the row is no distribution."""
    logprobs: Tensor
    """fp32, under the whole softmax at the sampling temperature (at 1 where that is 0)."""
    logprobs_t1: Tensor
    """fp32, under the whole softmax at temperature 1."""
    truncated_logprobs: Tensor
    """fp32, under the truncated softmax at the sampling temperature, renormalised."""
    cutoffs: Tensor
    """fp32, the lowest logit that was kept, as in ``logits``; -inf where all were."""
    entropies: Tensor
    """fp32, of the whole softmax at the sampling temperature."""


class SamplingParameters(NamedTuple):
    """Checked parameters, each a number or a tensor [N]."""

    temperature: float | Tensor
    top_k: int | Tensor
    top_p: float | Tensor
    min_p: float | Tensor

    def truncates(self, vocabulary: int) -> tuple[bool, bool, bool]:
        """Whether top-k, top-p and min-p may leave out tokens; True where a tensor decides."""
        if not isinstance(self.temperature, Tensor) and self.temperature < COLDEST:
            return False, False, False
        return (
            isinstance(self.top_k, Tensor) or 0 < self.top_k < vocabulary,
            isinstance(self.top_p, Tensor) or self.top_p < 1,
            isinstance(self.min_p, Tensor) or self.min_p > 0,
        )

    def of(self, rows: Tensor) -> SamplingParameters:
        """Parameters of some rows, given by their indices."""

        def part(x: Any) -> Any:
            return x[rows] if isinstance(x, Tensor) else x

        return SamplingParameters(*map(part, self))

    def rows(self, chosen: slice) -> SamplingParameters:
        """Parameters of some rows; tensors become columns [r, 1], of fp32 but for top-k."""

        def column(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            x = x[chosen].unsqueeze(-1)
            return x.float() if x.is_floating_point() else x

        return SamplingParameters(*map(column, self))


class AttentionSettings(NamedTuple):
    """The live tokens of a row, and the transform of their scores."""

    span: int
    window: int  # at most the span, which means no window; nor more than a chunk
    chunk: int  # at most the span, which means no chunks
    scale: float
    softcap: float | None

    @property
    def inner(self) -> float | None:
        """The factor in a capped score c·tanh(inner·q·k); None without a cap, for scale·q·k."""
        return None if self.softcap is None else self.scale / self.softcap

    @property
    def outer(self) -> float:
        return self.scale if self.softcap is None else self.softcap


class SlotBuffers(NamedTuple):
    """What decode steps keep of the samples in the first B of S slots, see ``advance_slots``."""

    token: Tensor  # [B] int64, the last one
    position: Tensor  # [B] int64, of that token
    num_generated: Tensor  # [B] int64
    limit: Tensor  # [B] int64, of tokens to generate
    reason: Tensor  # [B] int64, RUNNING or why a sample ended
    tokens: Tensor  # [S, L] int64, the generated ones
    per_token: Tensor  # [4, S, L] fp32: log-probs, those at temperature 1, entropies, values


class HeadNorms(NamedTuple):
    """RMS normalisation of each head before it is rotated, as in Qwen3: weights [D], and ε."""

    query: Tensor
    key: Tensor
    eps: float


class RotaryInputs(NamedTuple):
    """The arguments of ``rotate_and_store``."""

    query: Tensor
    key: Tensor
    value: Tensor
    cos: Tensor
    sin: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    norms: HeadNorms | None
