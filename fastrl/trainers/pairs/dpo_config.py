"""Settings of DPOTrainer, by TRL 1.x's names."""

from __future__ import annotations

import warnings
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastrl.learn.preferences import PAIR_LOSSES, PairObjective, try_on_a_pair
from fastrl.settings import setting
from fastrl.trainers.pairs.preference_config import PreferenceConfig
from fastrl_kernels.preference import F_DIVERGENCES

_SHARED = ("beta", "label_smoothing")  # settings that losses of users may have by the same names
TRUNCATIONS = ("keep_start", "keep_end")
# TRL's names of losses that have another name here, or that fix options.
_TRLS: dict[str, tuple[str, dict[str, Any]]] = {
    "sigmoid": ("dpo", {}),
    "ipo": ("ipo", {"length_means": True}),
}


class LossTypes(Mapping[str, tuple[PairObjective, dict[str, Any]]]):
    """Rows of pair losses by DPOTrainer's names, each with the options that the name fixes: losses
    that read a reference, and users' losses that are registered or named "file.py:function"."""

    def __getitem__(self, name: str) -> tuple[PairObjective, dict[str, Any]]:
        row, fixed = _TRLS.get(name, (name, {}))
        return PAIR_LOSSES[row], fixed

    def __iter__(self) -> Iterator[str]:
        rows = (name for name, row in PAIR_LOSSES.items() if row.reads != "p")
        return iter(dict.fromkeys((*_TRLS, *rows)))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        """Whether ``name`` is a loss; raises ValueError for one that reads no reference."""
        if name not in _TRLS and name in PAIR_LOSSES and PAIR_LOSSES[str(name)].reads == "p":
            raise ValueError(
                f"loss_type {name!r} reads no reference, and DPOTrainer compares with one: train "
                f"by it with fastrl align --loss {name}, or with fastrl.alignment.Trainer"
            )
        return name in _TRLS or name in PAIR_LOSSES


# "sft", the negative log-likelihood of the chosen completions, reads tokens and has no row.
DPO_LOSSES: Mapping[str, Any] = ChainMap({"sft": None}, LossTypes())  # type: ignore[arg-type]


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
        f"One or several of {', '.join(DPO_LOSSES)}, or of yours, file.py:function; their weighted "
        "sum is learned.",
        lambda: ["sigmoid"],
        choices=DPO_LOSSES,
    )
    loss_weights: list[float] | None = setting(
        "Weights of losses; None: 1.", None, within="(-inf, inf)"
    )
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
        "Share of pairs taken to be swapped, for losses that read it.", 0.0, within="[0, 1]"
    )
    use_weighting: bool = setting("Weigh pairs by the policy's probability of them (WPO).", False)
    discopop_tau: float = setting("Temperature of discopop's mixture.", 0.05, within="(0, inf)")

    def __post_init__(self) -> None:
        if isinstance(self.loss_type, str):
            self.loss_type = [self.loss_type]
        super().__post_init__()
        if not self.loss_type:
            raise ValueError(f"loss_type is empty: name some of {', '.join(DPO_LOSSES)}")
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            raise ValueError(
                f"loss_weights has {len(self.loss_weights)} weights and loss_type "
                f"{len(self.loss_type)} losses: give one weight for each"
            )
        rows = self.pair_losses
        others = [name for name, (row, _) in rows.items() if row.reads != "h"]
        if self.f_divergence_type != "reverse_kl" and others:
            raise ValueError(
                f"f_divergence_type={self.f_divergence_type!r} is for losses of the difference of "
                f"rewards, and {', '.join(others)} is none: leave it at 'reverse_kl'"
            )
        for name, (row, options) in rows.items():
            try_on_a_pair(name, partial(row, **options))
            self._warn_of_defaults(name, row)
        smoothed = [x for x, (row, _) in LossTypes().items() if "label_smoothing" in row.defaults]
        of_trl = [name for name in self.loss_type if name in _TRLS and name in smoothed]
        if self.label_smoothing and of_trl:
            warnings.warn(
                f"label_smoothing={self.label_smoothing} smooths the labels of {of_trl[0]}, as in "
                "TRL before 1.0; TRL 1.x ignores it: leave it out for the loss without",
                stacklevel=3,
            )
        elif self.label_smoothing and not set(smoothed) & set(self.loss_type):
            warnings.warn(
                f"label_smoothing is ignored by {', '.join(self.loss_type)}: it is read by "
                f"{', '.join(smoothed)}",
                stacklevel=3,
            )
        together = self.read_together
        sorting = [name for name in together if name in rows]
        if self.use_weighting and sorting:
            raise ValueError(
                f"use_weighting weighs pairs, and {', '.join(sorting)} sorts them: leave one of "
                "the two out"
            )
        if self.micro_batch_tokens is not None and together:
            raise ValueError(
                f"micro_batch_tokens splits batches, and {', '.join(together)} reads all of one "
                "together: leave it out, and lower per_device_train_batch_size"
            )

    @property
    def read_together(self) -> list[str]:
        """Losses that read all of a batch."""
        alone = {name for name, (row, _) in self.pair_losses.items() if row.reads != "batch"}
        return [name for name in self.loss_type if name not in alone]

    @property
    def pair_losses(self) -> dict[str, tuple[PairObjective, dict[str, Any]]]:
        """The rows and options of the losses that read log-probs of whole completions."""
        names = (name for name in self.loss_type if DPO_LOSSES[name] is not None)
        return {name: self.objective(name) for name in names}

    def objective(self, loss_type: str) -> tuple[PairObjective, dict[str, Any]]:
        """The row of a loss, and its options from these settings. A user's loss, which has defaults
        itself, gets ``beta`` and ``label_smoothing`` only where they are not at their defaults."""
        row, fixed = DPO_LOSSES[loss_type]
        options: dict[str, Any] = {"beta": self.beta, "label_smoothing": self.label_smoothing}
        if row.is_own:
            options = {name: x for name, x in options.items() if x != _default(name)}
        else:
            options["tau"] = self.discopop_tau
        options |= {"divergence": self.f_divergence_type}
        options |= {"divergence_alpha": self.f_alpha_divergence_coef, **fixed}
        return row, {option: options[option] for option in row.options.keys() & options.keys()}

    def _warn_of_defaults(self, name: str, row: PairObjective) -> None:
        """Warns where a setting at its default gives way to a loss's own default."""
        for option in row.defaults.keys() & _SHARED if row.is_own else ():
            default, value = row.defaults[option], getattr(self, option)
            if value == _default(option) != default:
                warnings.warn(
                    f"the loss {name!r} is computed with its own default, {option}={default}, as "
                    f"DPOConfig's {option} is at its default, {value}: for {value}, make that the "
                    "function's default",
                    stacklevel=4,
                )


def _default(name: str) -> Any:
    return DPOConfig.__dataclass_fields__[name].default
