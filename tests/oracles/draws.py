"""Settings that are drawn at random for each surface, few of them away from their defaults."""

import random
from typing import Any

Choices = dict[str, tuple[Any, ...]]

_PPO: Choices = {
    "learning_rate": (1e-2, 1e-1),
    "optim": ("adam", "sgd"),
    "ppo_epochs": (1, 2, 3),
    "mini_batch_size": (2, 4, 8),
    "gradient_accumulation_steps": (1, 2),
    "micro_batch_tokens": (None, 24),
    "max_grad_norm": (None, 0.5),
    "padding_free": (True, False),
    "temperature": (1.0, 0.7),
    "old_logprobs": ("auto", "recompute"),
    "cliprange": (0.2, 0.05),
    "cliprange_high": (None, 0.3),
    "policy_loss": ("clip", "cispo", "sapo", "vespo"),
    "ratio_level": ("token", "sequence", "sequence-token"),
    "delta": (None, 1.5),
    "entropy_coef": (0.0, 0.05),
    "top_entropy_quantile": (1.0, 0.4),
    "loss_aggregate": (
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ),
    "loss_denominator": ("auto", "minibatch", "step"),
    "init_kl_coef": (0.2, 0.0, 1.0),
    "adap_kl_ctrl": (True, False),
    "mask_truncated_completions": (False, True),
    "gradient_checkpointing": (False, True),
    "overlong_buffer": (None, 3),
    "early_stopping": (False, True),
    "target_kl": (1.0, 1e-3),
}  # fmt: skip
_VALUES: Choices = {
    "kl_penalty": ("kl", "abs", "mse", "full"),
    "kl_in": ("reward", "loss"),
    "gamma": (1.0, 0.9),
    "lam": (0.95, 1.0),
    "lam_value": (None, 1.0),
    "lam_length_alpha": (None, 0.5),
    "vf_coef": (0.1, 1.0),
    "cliprange_value": (0.2, 0.01),
    "use_score_scaling": (False, True),
    "use_score_norm": (False, True),
    "score_clip": (None, 2.0),
    "whiten_rewards": (False, True),
    "critic_warmup_steps": (0, 1),
    "num_shared_layers": (None, 1),
}
_GROUPS: Choices = {
    "advantage": ("grpo", "dr_grpo", "rloo", "reinforce++"),
    "group_size": (4, 2),
    "kl_in": ("reward", "loss"),
    "dynamic_sampling_rounds": (0, 2),
}
_FITTED: Choices = {
    "learning_rate": (1e-2, 1e-1),
    "optim": ("adamw_torch", "sgd"),
    "gradient_accumulation_steps": (1, 2),
    "max_grad_norm": (1.0, 0.2),
    "padding_free": (True, False),
    "weight_decay": (0.0, 0.1),
    "lr_scheduler_type": ("linear", "cosine"),
    "gradient_checkpointing": (False, True),
    "seed": (42, 7),
}
_ONLINE: Choices = {
    **_FITTED,
    "num_generations": (4, 2),
    "num_iterations": (1, 2),
    "steps_per_generation": (None, 2),
    "temperature": (1.0, 0.7),
    "top_k": (0, 7),
    "beta": (0.0, 0.3),
    "epsilon": (0.2, 0.02),
    "epsilon_high": (None, 0.3),
    "mask_truncated_completions": (False, True),
    "disable_dropout": (False, True),
    "sync_ref_model": (False, True),
    "ref_model_sync_steps": (1,),
    "shuffle_dataset": (True, False),
}
CHOICES: dict[str, Choices] = {
    "PPO": {**_PPO, **_VALUES},
    "PPO with groups": {**_PPO, **_GROUPS},
    "GRPO": {
        **_ONLINE,
        "loss_type": (
            "dapo", "grpo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo",
        ),
        "importance_sampling_level": ("token", "sequence"),
        "scale_rewards": ("group", "batch", "none"),
        "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
        "delta": (None, 1.5),
        "use_bias_correction_kl": (True, False),
        "top_entropy_quantile": (1.0, 0.4),
        "entropy_coef": (0.0, 0.05),
        "off_policy_mask_threshold": (None, 0.01),
    },
    "RLOO": {
        **_ONLINE,
        "normalize_advantages": (False, True),
        "reward_clip_range": (None, [0.0, 2.0]),
    },
    "DPO": {
        **_FITTED,
        "micro_batch_tokens": (None, 40),
        "beta": (0.1, 0.5),
        "loss_type": (
            ["sigmoid"], ["hinge"], ["ipo"], ["exo_pair"], ["nca_pair"], ["robust"], ["bco_pair"],
            ["sppo_hard"], ["aot"], ["aot_unpaired"], ["discopop"], ["apo_zero"], ["apo_down"],
            ["sft"], ["sigmoid", "sft"],
        ),
        "label_smoothing": (0.0, 0.1),
        "f_divergence_type": (
            "reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"
        ),
        "ld_alpha": (None, 0.5),
        "use_weighting": (False, True),
        "precompute_ref_log_probs": (False, True),
        "disable_dropout": (True, False),
        "max_length": (512, 9),
        "truncation_mode": ("keep_start", "keep_end"),
    },
    "KTO": {
        **_FITTED,
        "beta": (0.1, 0.5),
        "loss_type": ("kto", "apo_zero_unpaired"),
        "desirable_weight": (1.0, 0.5),
        "undesirable_weight": (1.0, 1.5),
        "precompute_ref_log_probs": (False, True),
        "disable_dropout": (True, False),
        "max_length": (512, 9),
    },
    "SFT": {
        **_FITTED,
        "micro_batch_tokens": (None, 40),
        "max_length": (512, 6),
        "packing": (False, True),
        "completion_only_loss": (None, True),
        "loss_type": ("nll", "dft"),
        "neftune_noise_alpha": (None, 5.0),
    },
    "reward model": {
        **_FITTED,
        "micro_batch_tokens": (None, 40),
        "max_length": (512, 9),
        "center_rewards_coefficient": (None, 0.1),
    },
    "alignment": {
        **_FITTED,
        "micro_batch_tokens": (None, 40),
        "reference": ("auto", "copy"),
        "disable_dropout": (True, False),
        "loss": (
            "dpo", "cdpo", "robust", "hinge", "ipo", "simpo", "orpo", "slic", "sft", "kto", "ppo",
            "bradley-terry",
        ),
        "online": (False, True),
    },
}  # fmt: skip


def drawn(surface: str, number: int, attempt: int) -> dict[str, Any]:
    """Settings by their surface and number; another attempt has others."""
    rng = random.Random(f"{surface} {number} {attempt}")
    chosen = {}
    for name, values in CHOICES[surface].items():
        often = name in ("learning_rate", "loss_type", "loss", "advantage", "policy_loss")
        if often or rng.random() < 0.3:
            chosen[name] = rng.choice(values)
    return chosen
