"""Settings of GKDTrainer."""

from __future__ import annotations

from dataclasses import dataclass

from fastrl.settings import idle, refused, setting, setting_like
from fastrl.trainers.groups.distillation_config import DistillationConfig

_ONE = "the data have one completion to a prompt: use DistillationTrainer for several"
_ROWS = "rows have messages, or prompt and completion; their last max_length tokens are kept"
_UNPACKED = "batches have no padding all the same"


@dataclass
class GKDConfig(DistillationConfig):
    """Settings of :class:`GKDTrainer`; names, meanings and defaults are those of TRL 1.16 where it
    has any. Raises ValueError for a value out of range, or settings that do not go together."""

    learning_rate: float = setting_like(DistillationConfig, "learning_rate", 2e-5)
    lmbda: float = setting(
        "Probability that the policy writes the completions of a batch itself; else they are the "
        "data's, or with seq_kd the teacher's.",
        0.5,
        within="[0, 1]",
    )
    beta: float = setting_like(DistillationConfig, "beta", 0.5)
    temperature: float = setting(
        "T of softmax(logits / T) in sampling. The divergence is that at temperature 1, as in TRL.",
        0.9,
        within="(0, inf)",
    )
    max_new_tokens: int = setting("Longest sampled completion.", 128, within="[1, inf)")
    max_completion_length: int | None = setting(  # type: ignore[assignment]
        "The same as max_new_tokens, by DistillationConfig's name.", None, within="[1, inf)"
    )
    max_length: int | None = setting(
        "Most tokens of a prompt with the data's completion, of which the last are kept; and of a "
        "prompt that is sampled from. None: they are not cut.",
        1024,
        within="[2, inf)",
    )
    seq_kd: bool = setting("Learn completions of the teacher's in place of the data's.", False)
    disable_dropout: bool = setting_like(DistillationConfig, "disable_dropout", True)
    router_aux_loss_coef: float | None = setting_like(
        DistillationConfig, "router_aux_loss_coef", 0.0
    )

    num_generations: int = refused(1, _ONE)
    num_generations_eval: int | None = refused(None, _ONE)
    replay_routing: bool = refused(False, "the data's completions come without a routing")
    packing: bool = refused(False, _UNPACKED)
    assistant_only_loss: bool = refused(False, "the last message of a conversation is learned")
    dataset_num_proc: int | None = idle(None, "rows are encoded as they are used")
    eval_packing: bool | None = idle(None, _UNPACKED)
    packing_strategy: str = idle("bfd", _UNPACKED)
    dataset_text_field: str = idle("text", _ROWS)
    dataset_kwargs: dict | str | None = idle(None, _ROWS)
    truncation_mode: str = idle("keep_start", _ROWS)
    completion_only_loss: bool | None = idle(None, "the completion alone is learned")
    loss_type: str = idle("nll", "beta chooses the divergence")

    def __post_init__(self) -> None:
        if self.max_completion_length is not None:
            self.max_new_tokens = self.max_completion_length
        self.max_completion_length = self.max_new_tokens
        super().__post_init__()

    @property  # type: ignore[misc]
    def max_prompt_length(self) -> int | None:  # type: ignore[override]
        return self.max_length

    @property
    def loss_temperature(self) -> float:
        return 1.0
