"""Methods of TRL's trainers that programs override in subclasses: which of them training calls, and
what does the work of the others.

A method that is not named here is called where transformers calls it, or is the program's own.
"""

from __future__ import annotations

_OURS = ("fastrl", "transformers", "abc", "builtins", "typing")
_ANSWERS = "pass a rollout_func, which answers prompts in the place of sampling"
_TOOLS = "pass tools= or environment_factory=, or a rollout_func that converses"
_POLICY_LOSS = "register the loss by fastrl.register_policy_loss, or override _compute_loss"
_PAIR_LOSS = "register the loss by fastrl.learn.preferences.loss_of_pairs, or override dpo_loss"
_KTO_LOSS = "choose loss_type, or override compute_loss"
_DATA = "override _prepare_dataset, or prepare the rows by dataset.map before"
_REFERENCE = "pass another ref_model"

_ONLINE = {
    "_generate": _ANSWERS,
    "_generate_single_turn": _ANSWERS,
    "_tokenize_prompts": _ANSWERS,
    "_move_model_to_vllm": _ANSWERS,
    "_tool_call_loop": _TOOLS,
    "_get_tool_suffix_ids": _TOOLS,
    "_prepare_inputs": "override _generate_and_score_completions or _compute_loss",
    "_get_per_token_logps": "override _get_per_token_logps_and_entropies",
    "_get_last_hidden_state": "override _get_per_token_logps_and_entropies",
    "compute_liger_loss": _POLICY_LOSS,
    "get_off_policy_mask": _POLICY_LOSS,
    "get_gamma_weights": _POLICY_LOSS,
    "_get_eval_sampler": "give eval_dataset in the order that is meant",
    "_log_completion_extra": "call log_extra in a reward function",
    "_log_metric": "call log_metric in a reward function",
}
_PREFERENCE = {
    "tokenize_row": _DATA,
    "process_row": _DATA,
    "build_tokenized_answer": _DATA,
    "_precompute_ref_logps": _REFERENCE,
    "compute_ref_log_probs": _REFERENCE,
    "compute_reference_log_probs": _REFERENCE,
    "null_ref_context": _REFERENCE,
    "concatenated_inputs": "pass a data_collator",
}
# Methods of TRL's that training calls where a subclass has them, by the trainer's class.
CALLED: dict[str, tuple[str, ...]] = {
    "OnlineTrainer": (
        *("_generate_and_score_completions", "_calculate_rewards", "_compute_loss"),
        *("_get_per_token_logps_and_entropies", "_get_train_sampler", "compute_loss"),
    ),
    "GRPOTrainer": ("get_high_entropy_mask",),
    "DPOTrainer": ("_prepare_dataset", "dpo_loss", "compute_loss"),
    "KTOTrainer": ("_prepare_dataset", "compute_loss"),
    "SFTTrainer": ("_prepare_dataset", "compute_loss"),
    "RewardTrainer": ("_prepare_dataset", "compute_loss"),
    "PPOTrainer": ("compute_rewards", "compute_advantages"),
}
# Methods that training does not call, and what to use, by the trainer's class.
NOT_CALLED: dict[str, dict[str, str]] = {
    "OnlineTrainer": _ONLINE,
    "GKDTrainer": {
        "generalized_jsd_loss": "choose beta",
        "generate_on_policy_outputs": _ANSWERS,
    },
    "SDFTTrainer": {
        "sample_rollouts": _ANSWERS,
        "_get_teacher_context_for_self_distillation": "choose teacher_model_kind",
        **dict.fromkeys(
            ("_compute_self_distillation_loss", "_compute_teacher_student_logits"),
            "choose distillation_alpha",
        ),
    },
    "DPOTrainer": {
        **_PREFERENCE,
        **dict.fromkeys(
            (
                *("_compute_loss", "concatenated_forward", "get_batch_loss_metrics"),
                *("get_batch_logps", "_compute_loss_liger"),
            ),
            _PAIR_LOSS,
        ),
    },
    "KTOTrainer": {
        **_PREFERENCE,
        **dict.fromkeys(
            (
                *("_compute_loss", "_compute_kl_logps", "forward", "kto_loss"),
                *("get_batch_loss_metrics", "get_batch_logps", "_compute_loss_liger"),
            ),
            _KTO_LOSS,
        ),
    },
    "SFTTrainer": {
        "_prepare_non_packed_dataloader": _DATA,
        "_prepare_packed_dataloader": _DATA,
        "_compute_loss": "override compute_loss",
    },
    "RewardTrainer": {"_compute_loss": "override compute_loss"},
    "PPOTrainer": {
        "loss": "register it by fastrl.register_policy_loss and name it as PPOConfig.policy_loss",
        "train_minibatch": "pass an optimizer, or set max_grad_norm and its like in PPOConfig",
        "batched_forward_pass": "wrap the model, whose forward every pass goes through",
        "prepare_model_inputs": "pass training_data_collator, which pads the model's inputs",
        "_kl_penalty": "override compute_rewards",
        "_step_safety_checker": "check before step() is called",
        "_early_stop": "set target_kl",
    },
}


def overridden(trainer: type) -> frozenset[str]:
    """The names of a trainer class's attributes that come from a class outside of fastrl and
    transformers."""
    definer: dict[str, type] = {}
    for each in reversed(trainer.__mro__):
        definer |= dict.fromkeys(vars(each), each)
    return frozenset(name for name, each in definer.items() if _is_users(each))


def check_overrides(trainer: type) -> None:
    """Raises TypeError where a program's class has a method of TRL's that training does not call;
    says what to use in its place."""
    methods = overridden(trainer)
    for name, instead in not_called(trainer).items():
        if name in methods:
            raise TypeError(
                f"{trainer.__name__} overrides {name}, which fastrl's trainer does not call: "
                f"{instead}"
            )


def not_called(trainer: type) -> dict[str, str]:
    """The methods of TRL's that training by a class of trainers does not call, and what to use."""
    bases = (NOT_CALLED.get(each.__name__, {}) for each in trainer.__mro__ if not _is_users(each))
    return {name: instead for base in bases for name, instead in base.items()}


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in _OURS
