"""Settings that DPO and KTO share, by TRL 1.x's names."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from fastrl.learn.ref_model import ReferenceArguments
from fastrl.settings import check_refused, kept_setting, setting
from fastrl.trainers.supervised import SupervisedArguments


@dataclass
class PreferenceConfig(ReferenceArguments, SupervisedArguments):
    """Settings of trainers that learn from preferences, beside those of
    ``transformers.TrainingArguments``; names, meanings and defaults are TRL 1.x's."""

    learning_rate: float = setting("Learning rate at the start.", 1e-6, within="[0, inf)")
    logging_steps: float = setting(
        "Optimizer steps between two logs; below 1: a share of all.", 10, within="(0, inf)"
    )
    gradient_checkpointing: bool | None = setting(  # type: ignore[assignment]
        "Compute layers again in the backward pass, in place of keeping their activations.", True
    )
    disable_dropout: bool = setting("Set all dropout of policy and reference to 0.", True)
    router_aux_loss_coef: float | None = setting(
        "Weight of the load-balancing loss of mixtures of experts; None: the model's own.",
        None,
        within="[0, inf)",
    )
    max_length: int | None = setting(
        "Longest prompt with its completion, in tokens; None: the model's limit.",
        1024,
        within="[1, inf)",
    )
    padding_free: bool = setting(
        "Compute without padding, and only once a prompt that several completions share, where "
        "the model's attention allows it.",
        False,
    )
    precompute_ref_log_probs: bool = setting(
        "Compute the reference's log-probs before training; a policy without an adapter is then "
        "its own reference, and no copy of it is made.",
        False,
    )
    precompute_ref_batch_size: int | None = setting(
        "Batch size of precompute_ref_log_probs; None: that of training or evaluation.",
        None,
        within="[1, inf)",
    )
    beta: float = setting("Strength of the bond to the reference.", 0.1, within="(0, inf)")

    # Settings of TRL until 0.29, which fastrl.eras makes keywords of the constructor.
    max_prompt_length: int | None = kept_setting("Longer prompts keep BOS and their last tokens.")
    max_completion_length: int | None = kept_setting("Longer completions keep their first tokens.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_refused(self)
        if self.precompute_ref_log_probs:
            self.refuse_reference("precompute_ref_log_probs")
        if self.precompute_ref_batch_size is not None and not self.precompute_ref_log_probs:
            warnings.warn(
                "precompute_ref_batch_size is ignored: precompute_ref_log_probs is off",
                stacklevel=3,
            )

    @property
    def cuts(self) -> tuple[int | None, int | None]:
        """The most tokens that prompts and completions keep as they are cut; None: all."""
        return self.max_prompt_length, self.max_completion_length
