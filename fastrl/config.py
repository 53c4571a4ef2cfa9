"""PPOConfig: every setting of the classic PPO trainer, checked once, at construction."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import warnings
from collections import ChainMap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fastrl.registry import (
    GROUP_ADVANTAGES,
    POLICY_LOSS_NAMES,
    learns_as_clip,
    policy_loss,
    policy_losses_with,
)
from fastrl.settings import check_ranges, check_types, setting, warn_of_unread_settings

REFERENCES = ("auto", "copy", "adapter", "trunk", "offload", "none")
REFERENCE_ADAPTERS = ("off", "start", "auto")
KL_PENALTIES = ("kl", "abs", "mse", "full")
ROLLOUT_BACKENDS = ("engine", "generate")
OLD_LOGPROBS = ("auto", "rollout", "recompute")
FULL, SAMPLED = SUPPORTS = "full", "sampled"
SAMPLER_CORRECTIONS = (
    *("off", "token-truncate", "token-mask"),
    *("sequence-truncate", "sequence-mask"),
)
METHODS = {
    "gae": "PPO",
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "rloo": "RLOO",
    "reinforce++": "REINFORCE++",
}
ADVANTAGES = ChainMap({"reinforce++": None}, GROUP_ADVANTAGES, {"gae": None})  # type: ignore[arg-type]
KL_PLACES = ("reward", "loss")
LOSS_DENOMINATORS = ("auto", "minibatch", "step")
ON_NONFINITE = ("skip", "raise", "zero-sample")
# transformers' names, and adam; optimizers that step within the backward pass, or train other
# weights than those that are evaluated, are left out.
OPTIMIZERS = (
    *("adam", "adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor"),
    *("adamw_torch_8bit", "adamw_torch_4bit", "adamw_bnb_8bit", "adamw_8bit"),
    *("paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit", "lion_32bit", "paged_lion_8bit"),
    *("paged_lion_32bit", "ademamix_8bit", "ademamix", "paged_ademamix_8bit"),
    *("paged_ademamix_32bit", "stable_adamw", "grokadamw"),
)
REFERENCE_DTYPES = ("auto", "float32", "bfloat16")
# Settings that only those policy losses read whose row lists the argument that is the key here.
_SETTINGS_OF_LOSSES = {
    "sapo_temperatures": ("sapo_temperature_pos", "sapo_temperature_neg"),
    "vespo_powers": ("vespo_k_pos", "vespo_k_neg"),
    "vespo_decays": ("vespo_lambda_pos", "vespo_lambda_neg"),
    "cliprange": ("cliprange_high",),
}
# Settings that are read only with some values of another setting; its name, and these values.
_READ_WITH = (
    (("reference_support",), "policy_support", ("sampled",)),
    (("lam", "vf_coef", "cliprange_value"), "advantage", ("gae",)),
    (
        ("sampler_correction_min", "sampler_correction_max"),
        "sampler_correction",
        SAMPLER_CORRECTIONS[1:],
    ),
)
_JSON_FIELDS = (
    "tracker_kwargs",
    "accelerator_kwargs",
    "project_kwargs",
    "push_to_hub_if_best_kwargs",
)


# Choices of the kernels, which are imported only when a value is checked: --help needs no torch.
def _ratio_levels() -> Iterable[str]:
    from fastrl_kernels.policy_losses import RATIO_LEVELS

    return RATIO_LEVELS


def _aggregates() -> Iterable[str]:
    from fastrl_kernels.types import AGGREGATES

    return AGGREGATES


@dataclass(kw_only=True)
class TeacherArguments:
    """How much is learned of teachers, which there are, where they are kept, what they read."""

    teacher_kl_coef: float = setting(
        "Weight of the divergence from a teacher in the loss; 0: there is no teacher.",
        0.0,
        within="[0, inf)",
    )
    teacher_beta: float = setting(
        "Which divergence from a teacher's q: 1 is KL(p||q), 0 is KL(q||p), between them "
        "β·KL(q||m) + (1-β)·KL(p||m), m = (1-β)p + βq.",
        1.0,
        within="[0, 1]",
    )
    teacher_kl_in: str = setting(
        "Where teacher_kl_coef acts: loss (the divergence over the whole vocabulary), or reward "
        "(of each token, -coef·(log π - log π_teacher) at the token that was sampled).",
        "loss",
        choices=("loss", "reward"),
    )
    teacher_model_kind: str = setting(
        "Teacher where no teacher_model is given: base (the policy as training begins; of an "
        "adapter that begins with it, the model without), live (the policy as it is), ema (an "
        "average of its weights).",
        "base",
        choices=("base", "live", "ema"),
    )
    teacher_update_rate: float = setting(
        "Weight of the policy in an update of teacher_model_kind='ema'; 1 copies it.",
        0.05,
        within="(0, 1]",
    )
    teacher_sync_steps: int = setting(
        "Optimizer steps, of PPOTrainer calls of step(), between two updates of "
        "teacher_model_kind='ema'.",
        1,
        within="[1, inf)",
    )
    teacher_placement: str = setting(
        "Where a teacher_model is kept: device, or host (in host memory; its layers are loaded one "
        "by one as it runs).",
        "device",
        choices=("device", "host"),
    )
    teacher_model_init_kwargs: dict | str | None = setting(
        "Arguments to load a teacher_model with (JSON).", None
    )
    teacher_prompt_template: str = setting(
        "What a teacher reads in place of the prompt (of a chat: of its last message) where the "
        "data have a column privileged_context.",
        "{prompt}\n\n{privileged_context}",
    )
    teacher_column: str | None = setting(
        "The column that names each prompt's teacher, where teacher_model is a dict.", None
    )

    @property
    def longest_teacher_prompt(self) -> int | None:
        """The tokens that teachers' prompts are cut to; None: they are not."""
        return None

    def teachers_unread(self) -> list[tuple[str, str]]:
        """The settings of teachers, where there are none, and why nothing reads them."""
        if self.teacher_kl_coef:
            return []
        return [(f.name, "teacher_kl_coef is 0") for f in dataclasses.fields(TeacherArguments)]

    def check_teacher(self) -> None:
        """Raises ValueError for a template without one of its two fields, and for a divergence that
        is not computed."""
        for name in ("prompt", "privileged_context"):
            if f"{{{name}}}" not in self.teacher_prompt_template:
                raise ValueError(
                    f"teacher_prompt_template has no {{{name}}}: it must hold {{prompt}} and "
                    "{privileged_context}"
                )
        if self.teacher_kl_in == "reward" and self.teacher_beta != 1:
            raise ValueError(
                f"teacher_beta={self.teacher_beta:g} chooses a divergence over the vocabulary, and "
                "teacher_kl_in='reward' reads the log-prob of the sampled token alone: leave one "
                "of the two out"
            )


@dataclass
class PPOConfig(TeacherArguments):
    """Settings of :class:`fastrl.PPOTrainer`: TRL 0.11's, with their defaults but for names that
    only trackers show, and fastrl's own.

    Sizes count samples per process. ``mini_batch_size`` unset is min(128, batch_size);
    ``mini_batch_size × gradient_accumulation_steps`` must divide ``batch_size``.

    Raises:
        ValueError: a wrong value, sizes that do not divide, settings that exclude each other.
        TypeError: a value of another type, such as a JSON field that does not hold an object.
    """

    # Tracking
    exp_name: str = setting(
        "Name of the experiment, for trackers.",
        lambda: os.path.basename(sys.argv[0]).removesuffix(".py") or "fastrl",
    )
    seed: int = setting(
        "Seed of Python, NumPy, torch and of the shuffle of the PPO epochs.",
        0,
        within="[0, 4294967295]",
    )
    log_with: str | None = setting(
        "Tracker: any that accelerate knows, such as wandb or tensorboard.", None
    )
    task_name: str | None = setting("Name of the task, for trackers only.", None)
    model_name: str = setting("Name or path of the model, for trackers and model cards.", "gpt2")
    query_dataset: str = setting("Name of the prompts' data set, for trackers only.", "imdb")
    reward_model: str = setting(
        "Name of the reward model, for trackers only.", "sentiment-analysis:lvwerra/distilbert-imdb"
    )
    tracker_kwargs: dict | str | None = setting("Keyword arguments of the tracker (JSON).", dict)
    accelerator_kwargs: dict | str | None = setting(
        "Keyword arguments of accelerate's Accelerator (JSON), such as mixed_precision.", dict
    )
    project_kwargs: dict | str | None = setting(
        "Keyword arguments of accelerate's ProjectConfiguration (JSON).", dict
    )
    ddp_timeout: float = setting(
        "Of several processes: seconds that each waits for the others before it fails; to be set "
        "longer than the rollouts and rewards of a step may take.",
        1800.0,
        within="(0, 1000000000]",
    )
    tracker_project_name: str = setting("Project name that the tracker shows.", "fastrl")
    push_to_hub_if_best_kwargs: dict | str | None = setting(
        "Arguments of push_to_hub (JSON, with repo_id): push whenever the mean score is a record.",
        dict,
    )
    compare_steps: int = setting(
        "With push_to_hub_if_best_kwargs: steps between checks of scores.", 1, within="(0, inf)"
    )

    # Data
    remove_unused_columns: bool = setting(
        "Drop columns that neither the model nor the loop uses (label, query, response stay).", True
    )
    dataset_num_proc: int | None = setting(
        "Changes nothing: prompts are encoded in this process.", None, within="[1, inf)"
    )

    # Optimisation
    steps: int = setting(
        "Number of samples to train on, for planning only.", 20_000, within="(0, inf)"
    )
    learning_rate: float = setting("The optimizer's learning rate.", 1.41e-5, within="[0, inf)")
    optim: str = setting(
        "Optimizer: adam (Adam, fused where torch can), or one of transformers' names, such as "
        "adamw_torch, sgd, adafactor, adamw_torch_8bit (needs torchao), adamw_bnb_8bit and "
        "paged_adamw_8bit (need bitsandbytes). Weights do not decay unless optim_args says so.",
        "adam",
        choices=OPTIMIZERS,
    )
    optim_args: str | None = setting(
        'Arguments of the optimizer, such as "beta2=0.95,weight_decay=0.01".', None
    )
    master_weights: bool = setting(
        "Where trainable weights are bfloat16 or float16: step float32 copies of them, and round "
        "the weights from these, so that no small step is lost; with Adam, whose moments are then "
        "float32, 12 bytes for each weight in place of 4.",
        True,
    )
    offload_optimizer: bool = setting(
        "Keep the optimizer's state, and a float32 copy of the trainable weights, in host memory, "
        "and step there: less device memory, slower.",
        False,
    )
    batch_size: int = setting("Samples per step(), per process.", 128, within="(0, inf)")
    mini_batch_size: int = setting(
        "Samples that give one gradient; by default min(128, batch_size).",
        None,
        within="(0, inf)",
    )
    micro_batch_tokens: int | None = setting(
        "Tokens of a forward and backward pass, at most: mini-batches that have more are computed "
        "in parts, to the same result. None: a mini-batch at a time; the commands choose what a "
        "GPU holds.",
        None,
        within="(0, inf)",
    )
    forward_batch_size: int | None = setting("Deprecated: use mini_batch_size.", None)
    gradient_accumulation_steps: int = setting(
        "Mini-batches per optimizer step.", 1, within="(0, inf)"
    )
    ppo_epochs: int = setting("Passes over the batch per step().", 4, within="(0, inf)")
    max_grad_norm: float | None = setting(
        "Gradients are clipped to this norm at every optimizer step.", None, within="(0, inf]"
    )
    gradient_checkpointing: bool = setting("Recompute activations in the backward pass.", False)
    padding_free: bool = setting(
        "Score and update without padding, and run a prompt once for all its responses, where the "
        "model's attention allows it.",
        True,
    )
    activation_offloading: bool = setting(
        "Keep what the backward pass needs of the forward in host memory: less device memory, "
        "slower.",
        False,
    )
    optimize_cuda_cache: bool | None = setting("Deprecated: use optimize_device_cache.", None)
    optimize_device_cache: bool = setting(
        "Give cached device memory back after every step: less memory, slower.", False
    )

    # Rollouts
    temperature: float = setting(
        "Temperature T of the policy softmax(logits / T): of rollouts, and of the log-probs of "
        "policy and reference.",
        1.0,
        within="(0, inf)",
    )
    rollout_backend: str = setting(
        "Generate in the engine, or by the model's own generate: engine, generate.",
        "engine",
        choices=ROLLOUT_BACKENDS,
    )
    replay_routing: bool = setting(
        "Of a mixture of experts: keep which experts a rollout chose, and score and learn with "
        "these, so that log-probs before and after an update are of the same experts.",
        False,
    )
    policy_support: str = setting(
        "What log-probs, ratios, entropies and the KL are over where top_p, top_k, min_p or banned "
        "tokens leave out some of the vocabulary: full, all of it; sampled, what each token was "
        "drawn from.",
        "full",
        choices=SUPPORTS,
    )
    reference_support: str = setting(
        "What the reference's log-probs are over with policy_support='sampled': sampled, the "
        "policy's sets; full, all of the vocabulary.",
        "sampled",
        choices=SUPPORTS,
    )
    response_format: dict | str | None = setting(
        "The form of responses (JSON): an object with one of json_schema, regex, choices and lark. "
        "A token is drawn of what the form allows next, and EOS where the text is complete.",
        None,
    )
    router_aux_loss_coef: float = setting(
        "Weight of the load-balancing loss of a mixture's routers; 0: it is only logged.",
        0.0,
        within="[0, inf)",
    )
    old_logprobs: str = setting(
        "Source of the log-probs and values before the update: rollout (computed while "
        "generating), recompute (another forward), auto (the rollout, if a few samples that are "
        "scored again agree with it; another forward for kl_in='reward' without values, as the "
        "rollout's rounding would count as KL, and groups of equal rewards would learn it alone).",
        "auto",
        choices=OLD_LOGPROBS,
    )
    sampler_correction: str = setting(
        "Where another engine samples the responses: importance weights π/π_sampler of the "
        "policy's loss, from log-probs before the update, which are computed anew. Of tokens or of "
        "whole responses, held within bounds or set to 0 beyond them: token-truncate, token-mask, "
        "sequence-truncate, sequence-mask; off: none.",
        "off",
        choices=SAMPLER_CORRECTIONS,
    )
    sampler_correction_max: float | None = setting(
        "Upper bound of sampler_correction's weights.", 3.0, within="(0, inf)"
    )
    sampler_correction_min: float | None = setting(
        "Lower bound of sampler_correction's weights.", None, within="(0, inf)"
    )
    rollout_slots: int = setting(
        "Samples that the engine generates at a time, at most.", 64, within="[1, inf)"
    )
    rollout_kv_cache_gib: float | None = setting(
        "Memory for the engine's keys and values; fewer samples at a time if they do not fit.",
        None,
        within="(0, inf)",
    )
    rollout_sleep: bool = setting(
        "Free the engine's memory before every update: less memory, slower.", False
    )
    rollout_merge_adapter: bool = setting(
        "Deprecated: changes nothing, adapters run beside the weights.", False
    )

    # The reference
    reference: str = setting(
        "Reference model of the KL: copy (a frozen copy), adapter (a PEFT model's base), "
        "trunk (a copy that shares the bottom layers), offload (a copy in host memory), none (with "
        "init_kl_coef 0), auto (adapter for PEFT models, trunk with num_shared_layers, none "
        "without a KL coefficient, else copy).",
        "auto",
        choices=REFERENCES,
    )
    num_shared_layers: int | None = setting(
        "With trunk: the bottom layers, and the embeddings below them, are frozen, and policy and "
        "reference share them.",
        None,
        within="[1, inf)",
    )
    reference_dtype: str = setting(
        "With copy and offload: type of the reference's weights: bfloat16 (half the memory of "
        "float32 ones; its log-probs are less exact), float32, or auto (the policy's).",
        "auto",
        choices=REFERENCE_DTYPES,
    )
    reference_adapter: str = setting(
        "With adapter: off (the base model), start (a frozen copy of the adapter as training "
        "begins) or auto (start for an adapter that was trained before, or where the reference is "
        "updated from the policy; else off).",
        "off",
        choices=REFERENCE_ADAPTERS,
    )
    trunk_cache_gib: float = setting(
        "With trunk: device memory for the shared layers' activations of a batch, kept across PPO "
        "epochs.",
        2.0,
        within="[0, inf)",
    )
    trunk_cache_host_gib: float = setting(
        "With trunk: host memory for activations that do not fit in trunk_cache_gib.",
        8.0,
        within="[0, inf)",
    )
    sync_ref_every: int = setting(
        "Steps between two updates of the reference from the policy; 0: never.",
        0,
        within="[0, inf)",
    )
    ref_ema: float = setting(
        "Weight of the policy in an update of the reference; 1 copies it.", 1.0, within="(0, 1]"
    )

    # KL to the reference
    kl_in: str = setting(
        "Where the KL penalty is added: reward (to each token's reward), loss (the k3 estimate; "
        "kl_penalty is then a statistic).",
        "reward",
        choices=KL_PLACES,
    )
    adap_kl_ctrl: bool = setting("Adapt the KL coefficient to reach `target`.", True)
    init_kl_coef: float = setting(
        "Initial coefficient β of the KL penalty.", 0.2, within="[0, inf)"
    )
    kl_penalty: str = setting(
        "Per-token penalty: kl (log π - log ref), abs, mse (half its square), full (over the "
        "vocabulary).",
        "kl",
        choices=KL_PENALTIES,
    )
    target: float = setting("KL per sequence that the adaptive controller aims at, in nats.", 6.0)
    horizon: float = setting(
        "Samples over which the adaptive controller reacts.", 10_000.0, within="(0, inf]"
    )
    early_stopping: bool = setting(
        "Stop a step's epochs once the KL to the old policy exceeds 1.5 times target_kl.", False
    )
    target_kl: float = setting(
        "With early_stopping: KL to the old policy, in nats per token.", 1.0, within="(0, inf]"
    )
    max_kl: float | None = setting(
        "End training, with an error, after a step whose KL to the reference (objective/kl, nats "
        "per sequence) exceeds this.",
        None,
        within="(0, inf]",
    )

    # Advantages
    advantage: str = setting(
        "How advantages are estimated: gae (by a value function), or from the other responses to "
        "the same prompt: grpo ((R - mean) / deviation), dr_grpo (R - mean), rloo (R - the others' "
        "mean), or from all of the batch: reinforce++ (the rewards to come, whitened); or one of "
        "your own, file.py:function.",
        "gae",
        choices=ADVANTAGES,
    )
    group_size: int = setting(
        "Responses to each prompt: 1 with gae, any with reinforce++, else 2 or more; divides "
        "batch_size.",
        1,
        within="(0, inf)",
    )
    dynamic_sampling_rounds: int = setting(
        "In train(): how often at most groups whose scores are all equal are replaced by groups of "
        "new prompts, in a step (DAPO); 0: never.",
        0,
        within="[0, inf)",
    )
    overlong_buffer: int | None = setting(
        "In train(): how many of the last tokens that a response may have make overlong_penalty "
        "grow (DAPO's soft punishment).",
        None,
        within="(0, inf]",
    )
    overlong_penalty: float = setting(
        "With overlong_buffer: what is taken off the score of a response as long as one may be.",
        1.0,
        within="[0, inf)",
    )
    off_policy_mask_threshold: float | None = setting(
        "With a group's baseline: leave out of an optimizer step responses of negative advantage "
        "whose mean over tokens of log(π_sampler/π) exceeds this, in nats; it costs another "
        "forward.",
        None,
        within="(0, inf]",
    )
    mask_truncated_completions: bool = setting(
        "Learn nothing from responses that a length limit cut; their scores still count in their "
        "groups.",
        False,
    )

    # PPO
    gamma: float = setting("Discount γ.", 1.0, within="[0, 1]")
    lam: float = setting("λ of generalised advantage estimation.", 0.95, within="[0, 1]")
    lam_value: float | None = setting(
        "λ of the returns that the value function learns, where it differs from that of the "
        "advantages; 1 (no bias) is usual for long responses whose reward comes at the end (VAPO).",
        None,
        within="[0, 1]",
    )
    lam_length_alpha: float | None = setting(
        "α of a λ for each response of l tokens, 1 - 1/(α·l) and at least 0, in place of lam for "
        "the advantages (VAPO; 0.05 is its value).",
        None,
        within="(0, inf)",
    )
    critic_warmup_steps: int = setting(
        "First steps in which the value function alone learns; the policy stays as it is.",
        0,
        within="[0, inf)",
    )
    critic: str | None = setting(
        "A model of its own that learns the values, in place of a value head on the policy: path "
        "or Hub id of a reward model, or of a language model, which gets a new head.",
        None,
    )
    critic_learning_rate: float | None = setting(
        "With a critic of its own: its learning rate, if it differs from learning_rate.",
        None,
        within="(0, inf)",
    )
    teacher_model: str | None = setting(
        "A teacher, whose distributions the policy learns beside its rewards: path or Hub id of a "
        "model with the same tokenizer, or of an adapter on the policy's base. By default the "
        "policy's own weights, see teacher_model_kind.",
        None,
    )
    cliprange: float = setting("Clip range of the probability ratio.", 0.2, within="[0, inf)")
    cliprange_high: float | None = setting(
        "Clip range of the ratio above 1, if it differs.", None, within="[0, inf)"
    )
    policy_loss: str = setting(
        "The policy's objective: clip (PPO's), cispo (the ratio, at most 1 + cliprange_high, as a "
        "constant weight of log π; no lower bound), sapo (a sigmoid of the ratio in place of the "
        "clip), vespo (a smooth weight of log π by the whole response's ratio); or one of your "
        "own, file.py:function.",
        "clip",
        choices=POLICY_LOSS_NAMES,
    )
    ratio_level: str = setting(
        "Whose probability ratio the objective reads: token, sequence (GSPO: the geometric mean "
        "over a response), sequence-token (GSPO-token: its value, with the token's gradient), "
        "product (RLOO: of the whole response's probability).",
        "token",
        choices=_ratio_levels,
    )
    delta: float | None = setting(
        "With policy_loss clip: the most that a ratio counts outside of the clip, such as 4, so "
        "that with a negative advantage the loss is bounded, too.",
        None,
    )
    sapo_temperature_pos: float = setting(
        "With policy_loss sapo: temperature where the advantage is positive.",
        1.0,
        within="(0, inf)",
    )
    sapo_temperature_neg: float = setting(
        "With policy_loss sapo: temperature where the advantage is ≤ 0.", 1.05, within="(0, inf)"
    )
    vespo_k_pos: float = setting(
        "With policy_loss vespo: power k of the ratio where the advantage is 0 or more.",
        2.0,
        within="[0, inf)",
    )
    vespo_lambda_pos: float = setting(
        "With policy_loss vespo: decay λ where the advantage is 0 or more.", 3.0, within="(0, inf)"
    )
    vespo_k_neg: float = setting(
        "With policy_loss vespo: power k where the advantage is negative.", 3.0, within="[0, inf)"
    )
    vespo_lambda_neg: float = setting(
        "With policy_loss vespo: decay λ where the advantage is negative.", 2.0, within="(0, inf)"
    )
    entropy_coef: float = setting(
        "Coefficient of an entropy bonus: this times the entropy is taken off each token's loss.",
        0.0,
        within="(-inf, inf)",
    )
    top_entropy_quantile: float = setting(
        "Share of a mini-batch's tokens, those of the highest entropies, that get a policy "
        "gradient; 1: all.",
        1.0,
        within="(0, 1]",
    )
    loss_aggregate: str = setting(
        "How the loss sums over tokens: token-mean, seq-mean-token-mean (a mean of samples' means; "
        "GRPO's own), seq-mean-token-sum, seq-mean-token-sum-norm (over samples times a fixed "
        "length; Dr. GRPO's).",
        "token-mean",
        choices=_aggregates,
    )
    loss_norm_length: int | None = setting(
        "The fixed length of seq-mean-token-sum-norm, such as max_new_tokens; by default the "
        "longest response of a step.",
        None,
        within="(0, inf]",
    )
    loss_denominator: str = setting(
        "Which tokens (or samples) the loss is divided by when gradients are accumulated: "
        "minibatch (each mini-batch's own, and a mean over mini-batches, as in TRL), step (those "
        "of the whole optimizer step), auto (minibatch with gae, else step).",
        "auto",
        choices=LOSS_DENOMINATORS,
    )
    on_nonfinite: str = setting(
        "How to treat scores, log-probs, losses and gradients that are NaN or infinite: skip "
        "(leave out the sample, mini-batch or optimizer step; count them, and name them in a "
        "warning), zero-sample (the same, but find the samples that make a loss or gradient so, "
        "and leave out these alone), raise (an error that names the samples).",
        "skip",
        choices=ON_NONFINITE,
    )
    cliprange_value: float = setting(
        "Clip range of the value function's change.", 0.2, within="[0, inf)"
    )
    vf_coef: float = setting("Coefficient of the value loss.", 0.1, within="[0, inf)")
    ratio_threshold: float = setting(
        "Mini-batches whose mean ratio exceeds this are skipped.", 10.0, within="(0, inf]"
    )
    max_ratio: float | None = setting(
        "End training, with an error, after a step in which a mini-batch's mean ratio exceeds "
        "this.",
        None,
        within="(0, inf]",
    )
    use_score_scaling: bool = setting("Divide scores by their running standard deviation.", False)
    use_score_norm: bool = setting("With score scaling: subtract the running mean first.", False)
    score_clip: float | None = setting("Clip scores to ± this value.", None, within="(0, inf]")
    whiten_rewards: bool = setting("Whiten the rewards before computing advantages.", False)

    # Filled in at construction, or by the trainer
    world_size: int | None = field(default=None, init=False)
    is_encoder_decoder: bool | None = field(default=None, init=False)
    is_peft_model: bool | None = field(default=None, init=False)
    backward_batch_size: int = field(default=0, init=False)
    global_backward_batch_size: int | None = field(default=None, init=False)
    global_batch_size: int | None = field(default=None, init=False)
    total_ppo_epochs: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        for name in _JSON_FIELDS:
            setattr(self, name, parse_json(name, getattr(self, name)))
        self._apply_deprecated_names()
        unset = self.mini_batch_size is None
        if unset:
            self.mini_batch_size = 1
        check_types(self, PPOConfig, but=("log_with",))  # log_with may be a tracker object
        check_ranges(self, PPOConfig)
        if unset:
            self.mini_batch_size = min(128, self.batch_size)
        self._check_values()
        self.backward_batch_size = self.mini_batch_size * self.gradient_accumulation_steps
        if self.batch_size % self.backward_batch_size:
            raise ValueError(
                f"batch_size ({self.batch_size}) must be a multiple of mini_batch_size "
                f"({self.mini_batch_size}) × gradient_accumulation_steps "
                f"({self.gradient_accumulation_steps}): change one of the three"
            )
        self.total_ppo_epochs = math.ceil(self.steps / self.batch_size)
        self._warn_of_unread()
        self._warn_of_no_difference()

    @property
    def needs_values(self) -> bool:
        """Whether a value function is trained."""
        return self.advantage == "gae"

    @property
    def compares_groups(self) -> bool:
        """Whether responses are compared with the other responses to their prompt."""
        return self.advantage in GROUP_ADVANTAGES

    @property
    def method(self) -> str:
        """The algorithm's name."""
        return METHODS.get(self.advantage, self.advantage)

    @property
    def title(self) -> str:
        """The algorithm's name, and the policy loss where it is not PPO's clip."""
        name, default = self.policy_loss, PPOConfig.policy_loss
        loss = "" if name == default else f" with {name.rpartition(':')[2]}"
        return f"{self.method.rpartition(':')[2]}{loss}"

    @property
    def prompts_per_step(self) -> int:
        """Prompts per step() and process."""
        return self.batch_size // self.group_size

    def to_dict(self) -> dict[str, Any]:
        """All settings as one flat dict; nested keys are joined by "/"."""
        from fastrl.core import flatten_dict

        return flatten_dict({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    def _apply_deprecated_names(self) -> None:
        if self.forward_batch_size is not None:
            warnings.warn(
                "forward_batch_size is deprecated and replaces mini_batch_size: set that instead",
                FutureWarning,
                stacklevel=4,
            )
            self.mini_batch_size = self.forward_batch_size
        if self.optimize_cuda_cache is not None:
            warnings.warn(
                "optimize_cuda_cache is deprecated: use optimize_device_cache",
                FutureWarning,
                stacklevel=4,
            )
            self.optimize_device_cache = self.optimize_cuda_cache

    def _check_values(self) -> None:
        if self.adap_kl_ctrl and not self.target > 0:
            raise ValueError(f"target must be positive with adap_kl_ctrl, got {self.target}")
        if self.push_to_hub_if_best_kwargs and "repo_id" not in self.push_to_hub_if_best_kwargs:
            raise ValueError("push_to_hub_if_best_kwargs needs a repo_id")
        self._check_policy_loss()
        self._check_sampler_correction()
        if self.kl_in == "loss" and self.kl_penalty == "full":
            raise ValueError(
                "kl_penalty='full' with kl_in='loss', whose term is estimated from the sampled "
                "tokens: choose another kl_penalty, or kl_in='reward'"
            )
        self._check_groups()

    def _warn_of_unread(self) -> None:
        """Warns of settings that were set and that nothing reads."""
        unread = []
        readers = [
            (names, "policy_loss", policy_losses_with(argument))
            for argument, names in _SETTINGS_OF_LOSSES.items()
        ]
        for names, by, values in (*readers, *_READ_WITH):
            value = getattr(self, by)
            if value not in values:
                unread += [(name, f"{by}={value!r}, not {' or '.join(values)}") for name in names]
        if self.overlong_buffer is None:
            unread.append(("overlong_penalty", "overlong_buffer is None"))
        unread += self.teachers_unread()
        unread.append(("dataset_num_proc", "prompts are encoded in this process"))
        unread.append(("rollout_merge_adapter", "adapters run beside the weights"))
        warn_of_unread_settings(self, unread, stacklevel=4)

    def _warn_of_no_difference(self) -> None:
        """Warns of a policy loss that learns as the default does, as all ratios are 1."""
        one_step = self.ppo_epochs == 1 and self.backward_batch_size == self.batch_size
        high = self.cliprange if self.cliprange_high is None else self.cliprange_high
        if one_step and self.policy_loss != PPOConfig.policy_loss:
            if policy_loss(self.policy_loss).of_response and self.sampler_correction != "off":
                return  # the ratio is to the sampler
            if learns_as_clip(self.policy_loss, (self.cliprange, high)):
                warnings.warn(
                    f"policy_loss={self.policy_loss!r} makes no difference here: with ppo_epochs=1 "
                    "and one optimizer step for each batch all ratios are 1, where it has the "
                    "gradient of 'clip': raise ppo_epochs (4, say) or lower mini_batch_size",
                    stacklevel=4,
                )

    def _check_policy_loss(self) -> None:
        if self.delta is not None:
            if "delta" not in policy_loss(self.policy_loss).arguments:
                raise ValueError(
                    f"delta is for policy_loss='clip', not {self.policy_loss!r}: leave it out"
                )
            high = self.cliprange if self.cliprange_high is None else self.cliprange_high
            if not self.delta > 1 + high:
                raise ValueError(
                    f"delta must be above 1 + cliprange_high = {1 + high}, got {self.delta}: the "
                    "usual value is 4"
                )
        if self.ratio_level != "token" and policy_loss(self.policy_loss).of_response:
            raise ValueError(
                f"ratio_level={self.ratio_level!r}, but policy_loss={self.policy_loss!r} has a "
                "ratio of whole responses of its own: leave ratio_level at 'token'"
            )

    def _check_sampler_correction(self) -> None:
        kind = self.sampler_correction
        if kind == "off":
            return
        shown = f"sampler_correction={kind!r}"
        least, most = self.sampler_correction_min, self.sampler_correction_max
        if least is not None and most is not None and not least < most:
            raise ValueError(
                f"sampler_correction_min ({least}) must be below sampler_correction_max ({most})"
            )
        if least is None and most is None and kind.endswith("truncate"):
            raise ValueError(f"{shown} without a bound: set sampler_correction_max (3 is usual)")
        if self.old_logprobs == "rollout":
            raise ValueError(
                f"{shown} with old_logprobs='rollout', which takes the sampler's log-probs for the "
                "policy's own: set old_logprobs to 'auto' or 'recompute'"
            )
        if kind.startswith("sequence") and policy_loss(self.policy_loss).of_response:
            raise ValueError(
                f"{shown} with policy_loss={self.policy_loss!r}, whose ratio of whole responses "
                "takes the weights of its tokens: choose token-truncate or token-mask"
            )

    def _check_groups(self) -> None:
        size, shown = self.group_size, f"advantage={self.advantage!r}"
        if self.dynamic_sampling_rounds and not self.compares_groups:
            raise ValueError(
                f"dynamic_sampling_rounds replaces groups without spread, but {shown} has no "
                "groups: choose another advantage (grpo, dr_grpo, rloo), or set it to 0"
            )
        if self.off_policy_mask_threshold is not None and not self.compares_groups:
            raise ValueError(
                f"off_policy_mask_threshold leaves out whole responses, whose tokens {shown} gives "
                "advantages of their own: choose another advantage (grpo, dr_grpo, rloo), or leave "
                "it out"
            )
        if self.needs_values:
            if size != 1:
                raise ValueError(
                    f"group_size={size}, but {shown} compares no responses: set it to 1, or choose "
                    f"another advantage ({', '.join(name for name in ADVANTAGES if name != 'gae')})"
                )
            return
        for name in ("lam_value", "lam_length_alpha", "critic_warmup_steps", "critic"):
            if getattr(self, name) != PPOConfig.__dataclass_fields__[name].default:
                raise ValueError(
                    f"{name} is of a value function, and {shown} learns none: leave it out, or "
                    "choose advantage='gae'"
                )
        if size < 2 and self.compares_groups:
            raise ValueError(
                f"{shown} with group_size={size}: a group of one has nothing to be compared with; "
                "set group_size to 2 or more (8 is usual)"
            )
        if self.batch_size % size:
            raise ValueError(
                f"batch_size ({self.batch_size}) must be a multiple of group_size ({size}): change "
                "one of the two"
            )
        if self.gamma != 1 and self.compares_groups:
            raise ValueError(f"gamma={self.gamma}, but {shown} takes plain sums of rewards: set 1")
        if self.whiten_rewards:
            raise ValueError(f"whiten_rewards is for advantage='gae', not {shown}: turn it off")


def json_object(value: dict | str | None) -> dict[str, Any]:
    """A JSON field of a constructed PPOConfig, as a dict; for type checkers."""
    assert isinstance(value, dict)
    return value


def parse_json(name: str, value: dict | str | None) -> dict[str, Any]:
    """Returns the setting ``name``, a dict or JSON text, as a dict; {} for None.

    Raises:
        ValueError: text that is not JSON.
        TypeError: not a JSON object.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name} is not valid JSON: {error}") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TypeError(f"{name} must be a dict or a JSON object, got {value!r}")
    return value
