"""Settings of the alignment framework's trainer."""

from __future__ import annotations

from dataclasses import dataclass

from fastrl.collect.arguments import RecordArguments
from fastrl.config import PPOConfig
from fastrl.learn.ref_model import ReferenceArguments
from fastrl.settings import check_refused, idle, refused, setting, setting_like
from fastrl.trainers.supervised import SupervisedArguments

REFERENCES = ("auto", "cached", "copy", "adapter", "trunk", "offload")


_TOKENIZER = "the loader's tokenizer"
_ORDER = "BatchFactory(seed=, shuffle=) orders the examples"
_LOADER = "a BatchFactory makes the batches in this process"
_EVALUATION = "evaluations keep sums of metrics alone"


@dataclass
class AlignmentConfig(ReferenceArguments, RecordArguments, SupervisedArguments):
    """Settings of :class:`fastrl.alignment.Trainer`, beside those of
    ``transformers.TrainingArguments``. The :class:`BatchFactory` has the batch size and the number
    of samples.

    Raises:
        ValueError: an unknown ``reference``; a setting of transformers that is not supported, with
            what to use in its place.
    """

    max_length: int | None = setting(
        "Longest prompt with its response, in tokens. None: the model's limit.",
        1024,
        within="[1, inf)",
    )
    reference: str = setting(
        "Reference model of the losses: cached (its log-probs are computed once, before training; "
        "offline), copy (a frozen copy), adapter (a PEFT model's base), trunk (a copy that shares "
        "the bottom layers), offload (a copy in host memory), auto (adapter for PEFT models, trunk "
        "with num_shared_layers, copy for online tasks or sync_ref_model, else cached).",
        "auto",
        choices=REFERENCES,
    )
    reference_adapter: str = setting_like(PPOConfig, "reference_adapter")
    disable_dropout: bool = setting("Train without dropout.", True)
    rollout_slots: int = setting_like(PPOConfig, "rollout_slots")

    trust_remote_code: bool = refused(False, "load the model with it, and hand that over")
    chat_template_path: str | None = refused(None, f"set chat_template of {_TOKENIZER}")
    eos_token: str | None = refused(None, f"set eos_token of {_TOKENIZER}")
    pad_token: str | None = refused(None, f"set pad_token of {_TOKENIZER}")
    pad_to_multiple_of: int | str | None = refused(None, "batches are as wide as they need be")
    label_smoothing_factor: float = refused(0.0, "losses with labels have a label_smoothing")
    dataloader_drop_last: bool = refused(False, "BatchFactory(examples=) bounds the examples")
    train_sampling_strategy: str = refused("random", _ORDER)
    data_seed: int | None = refused(None, _ORDER)
    dataset_num_proc: int | None = refused(None, "examples are encoded as they are read")
    auto_find_batch_size: bool = refused(False, "lower BatchFactory(batch_size=)")
    dataloader_num_workers: int = idle(0, _LOADER)
    dataloader_prefetch_factor: int | None = idle(None, _LOADER)
    dataloader_persistent_workers: bool = idle(False, _LOADER)
    dataloader_multiprocessing_context: str | None = idle(None, _LOADER)
    dataloader_in_order: bool = idle(True, _LOADER)
    eval_accumulation_steps: int | None = idle(None, _EVALUATION)
    eval_do_concat_batches: bool = idle(True, _EVALUATION)
    prediction_loss_only: bool = idle(False, _EVALUATION)
    ignore_data_skip: bool = idle(False, "resumed runs begin where the batches ended")
    length_column_name: str = idle("length", _ORDER)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_refused(self)
