"""Settings of DPOTrainer, by TRL 1.x's names."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from fastrl.settings import setting
from fastrl.trl.preference_config import PreferenceConfig
from fastrl_kernels.preference import F_DIVERGENCES, PAIR_KINDS

TRUNCATIONS = ("keep_start", "keep_end")
LOSSES = (*PAIR_KINDS, "sigmoid_norm", "sft")
SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")
# A prompt's share of an f-divergence's reward cancels in differences alone.
OF_DIFFERENCES = (
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft",
)  # fmt: skip
SORTED = ("aot", "aot_unpaired")  # which compare the examples of a batch with each other


@dataclass
class DPOConfig(PreferenceConfig):
    """Settings of :class:`fastrl.DPOTrainer`: names, meanings and defaults of TRL 1.x's DPOConfig.

    Raises:
        ValueError: a value out of range, an unknown loss, losses that do not go together.
    """

    truncation_mode: str = setting(
        "What stays of sequences longer than max_length: keep_start or keep_end.",
        "keep_start",
        choices=TRUNCATIONS,
    )
    loss_type: list[str] = setting(
        f"One or several of {', '.join(LOSSES)}; their weighted sum is learned.",
        lambda: ["sigmoid"],
        choices=LOSSES,
    )
    loss_weights: list[float] | None = setting("Of each loss; None: 1.", None, within="(-inf, inf)")
    ld_alpha: float | None = setting(
        "Weight of the log-probs behind the shorter completion's length (LD-DPO); None: 1.",
        None,
        within="[0, 1]",
    )
    f_divergence_type: str = setting(
        f"Divergence from the reference: {', '.join(F_DIVERGENCES)}.",
        "reverse_kl",
        choices=F_DIVERGENCES,
    )
    f_alpha_divergence_coef: float = setting("α of alpha_divergence.", 0.5, within="(-inf, inf)")
    label_smoothing: float = setting(
        f"Share of swapped labels, for {', '.join(SMOOTHED)}.", 0.0, within="[0, 1]"
    )
    use_weighting: bool = setting("Weigh pairs by the policy's probability of them (WPO).", False)
    discopop_tau: float = setting("Temperature of discopop's mixture.", 0.05, within="(0, inf)")

    def __post_init__(self) -> None:
        if isinstance(self.loss_type, str):
            self.loss_type = [self.loss_type]
        super().__post_init__()
        if not self.loss_type:
            raise ValueError(f"loss_type is empty: name one or several of {', '.join(LOSSES)}")
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            raise ValueError(
                f"loss_weights has {len(self.loss_weights)} weights and loss_type "
                f"{len(self.loss_type)} losses: give one weight for each"
            )
        others = [name for name in self.loss_type if name not in OF_DIFFERENCES]
        if self.f_divergence_type != "reverse_kl" and others:
            raise ValueError(
                f"f_divergence_type={self.f_divergence_type!r} is for losses of the difference of "
                f"rewards, and {', '.join(others)} is none: choose among "
                f"{', '.join(OF_DIFFERENCES)}, or leave it at 'reverse_kl'"
            )
        self._check_smoothing()
        if self.use_weighting and set(self.loss_type) & set(SORTED):
            raise ValueError(
                "use_weighting weighs pairs, and the losses aot and aot_unpaired sort them: leave "
                "one of them out"
            )
        if self.micro_batch_tokens is not None and {*SORTED, "sft"} & set(self.loss_type):
            raise ValueError(
                "micro_batch_tokens splits batches, and aot, aot_unpaired and sft read all of one "
                "together: leave it out, and lower per_device_train_batch_size"
            )

    def _check_smoothing(self) -> None:
        if "exo_pair" in self.loss_type and not 0 < self.label_smoothing < 1:
            raise ValueError(
                f"label_smoothing must be in (0, 1) for exo_pair, got {self.label_smoothing}: 1e-3 "
                "is usual"
            )
        if "robust" in self.loss_type and not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing must be in [0, 0.5) for robust, got {self.label_smoothing}"
            )
        if self.label_smoothing and not set(SMOOTHED) & set(self.loss_type):
            warnings.warn(
                f"label_smoothing is ignored by {', '.join(self.loss_type)}, as in TRL: it is read "
                f"by {', '.join(SMOOTHED)}",
                stacklevel=4,
            )
