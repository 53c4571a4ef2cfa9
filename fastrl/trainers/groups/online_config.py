"""Settings that GRPO and RLOO share, by TRL 1.x's names."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

from fastrl.collect.arguments import RecordArguments
from fastrl.config import SAMPLED, PPOConfig, TeacherArguments, parse_json
from fastrl.learn.penalties import Penalties
from fastrl.learn.ref_model import ReferenceArguments
from fastrl.learn.teacher import TeacherSettings
from fastrl.run.transformers_settings import reads_best_metric
from fastrl.settings import (
    check_refused,
    idle,
    kept_setting,
    refusals,
    refused,
    setting,
    setting_like,
    warn_of_unread_settings,
)
from fastrl.trainers.groups.rollout_correction import MODES
from fastrl.trainers.supervised import SupervisedArguments

TOOL_CHOICES = ("auto", "required")
_ENGINE = "fastrl's rollout engine generates in this process"
_BATCHES = "the rollout engine batches so by itself"
_TOKENIZER = "the tokenizer (processing_class)"
_LENGTH = "set max_completion_length, and cut prompts in the data set"


@dataclass
class OnlineConfig(ReferenceArguments, TeacherArguments, RecordArguments, SupervisedArguments):
    """Settings of trainers that learn from responses which they sample themselves, beside those of
    ``transformers.TrainingArguments``, by TRL 1.x's names where it has them."""

    learning_rate: float = setting("Learning rate at the start.", 1e-6, within="[0, inf)")
    logging_steps: float = setting(
        "Optimizer steps between two logs; below 1: a share of all.", 10, within="(0, inf)"
    )
    gradient_checkpointing: bool | None = setting(  # type: ignore[assignment]
        "Compute layers again in the backward pass, in place of keeping their activations.", True
    )
    remove_unused_columns: bool = setting_like(SupervisedArguments, "remove_unused_columns", False)
    disable_dropout: bool = setting("Set all dropout of the model to 0.", False)
    router_aux_loss_coef: float | None = setting(
        "Weight of the load-balancing loss of mixtures of experts; None: the model's own.",
        None,
        within="[0, inf)",
    )
    shuffle_dataset: bool | None = setting("Draw prompts in random order.", True)

    num_generations: int = setting("Responses to each prompt.", 8, within="[1, inf)")
    num_generations_eval: int | None = setting(
        "Responses to each prompt in evaluation; None: num_generations.", None, within="[1, inf)"
    )
    max_completion_length: int = setting("Longest response, in tokens.", 512, within="[1, inf)")
    generation_batch_size: int | None = setting(
        "Responses that are generated at a time, by all processes; None: by steps_per_generation.",
        None,
        within="[1, inf)",
    )
    steps_per_generation: int | None = setting(
        "Batches of per_device_train_batch_size that are generated at a time; None: "
        "gradient_accumulation_steps.",
        None,
        within="[1, inf)",
    )
    num_iterations: int = setting("How often each response is learned from.", 1, within="[1, inf)")
    temperature: float = setting("T of the policy softmax(logits / T).", 1.0, within="(0, inf)")
    top_p: float = setting(
        "Sample from the fewest tokens with this probability together.", 1.0, within="(0, 1]"
    )
    top_k: int = setting("Sample from the likeliest tokens; 0: from all.", 0, within="[0, inf)")
    min_p: float | None = setting(
        "Least probability, as a share of the likeliest token's.", None, within="[0, 1)"
    )
    repetition_penalty: float = setting(
        "Divides past tokens' logits, multiplies negative ones; 1: none.", 1.0, within="(0, inf)"
    )
    generation_kwargs: dict | str | None = setting(
        "Further arguments of model.generate (JSON); they override the settings.", None
    )
    chat_template_kwargs: dict | str | None = setting(
        "Further arguments of the chat template (JSON).", None
    )
    max_tool_calling_iterations: int | None = setting(
        "Most turns of tools in a response; None: any number, 0: runs no tools.",
        None,
        within="[0, inf)",
    )
    rollout_backend: str = setting_like(PPOConfig, "rollout_backend")
    rollout_slots: int = setting_like(PPOConfig, "rollout_slots")
    rollout_kv_cache_gib: float | None = setting_like(PPOConfig, "rollout_kv_cache_gib")
    rollout_sleep: bool = setting_like(PPOConfig, "rollout_sleep")
    replay_routing: bool = setting_like(PPOConfig, "replay_routing")
    policy_support: str = setting_like(PPOConfig, "policy_support")
    reference_support: str = setting_like(PPOConfig, "reference_support")
    response_format: dict | str | None = setting_like(PPOConfig, "response_format")
    tool_choice: str = setting(
        "Whether a response begins with a call of a tool: auto, as the policy likes; required, it "
        "does, with arguments by the tool's schema.",
        "auto",
        choices=TOOL_CHOICES,
    )
    rollout_merge_adapter: bool = idle(False, "adapters run beside the weights")

    beta: float = setting(
        "Coefficient of the KL to the reference model; 0: there is none.", 0.0, within="[0, inf)"
    )
    epsilon: float = setting("Bound of the clipped ratio below 1.", 0.2, within="[0, inf]")
    epsilon_high: float | None = setting(
        "Bound of the clipped ratio above 1; None: as epsilon.", None, within="[0, inf]"
    )
    reward_weights: list[float] | None = setting(
        "Weight of each reward function; None: 1.", None, within="(-inf, inf)"
    )
    mask_truncated_completions: bool = setting("Learn nothing from responses that are cut.", False)
    off_policy_mask_threshold: float | None = setting(
        "Leave out responses of negative advantage whose mean over tokens of log(π_sampler/π) "
        "exceeds this, in nats.",
        None,
        within="[0, inf]",
    )
    vllm_importance_sampling_correction: bool = setting(
        "Weight the policy's loss by π_old/π_sampler where a rollout_func returns the log-probs of "
        "the engine that sampled.",
        False,
    )
    vllm_importance_sampling_mode: str = setting(
        f"Kind of weights π_old/π_sampler: {', '.join(MODES)}.", "sequence_mask", choices=MODES
    )
    vllm_importance_sampling_clip_max: float | None = setting(
        "Upper bound of weights π_old/π_sampler.", 3.0, within="(0, inf]"
    )
    vllm_importance_sampling_clip_min: float | None = setting(
        "Lower bound of weights π_old/π_sampler.", None, within="[0, inf)"
    )
    dynamic_sampling_rounds: int = setting_like(PPOConfig, "dynamic_sampling_rounds")
    missing_eos_penalty: float | None = setting(
        "Taken off rewards of responses that end in neither EOS nor stop.", None, within="[0, inf)"
    )
    overlong_buffer: int | None = setting_like(PPOConfig, "overlong_buffer")
    overlong_penalty: float = setting_like(PPOConfig, "overlong_penalty")
    reward_timeout: float | None = setting(
        "Seconds that a call of a reward may take before it is an error; None: any.",
        None,
        within="(0, 1000000000]",
    )
    reward_retries: int = setting(
        "How often a call of a reward is repeated that raised an exception or took too long.",
        0,
        within="[0, inf)",
    )
    reward_batch_size: int | None = setting(
        "Completions per call of a reward; None: all of a generation.", None, within="[1, inf)"
    )

    # A setting of TRL until 0.25, see fastrl.eras; behind it those that are refused or idle.
    teacher_rest: str = setting(
        "Tokens that a teacher's function does not name: bucket (one outcome more, with what is "
        "left of both distributions) or renormalised (both are taken over the named tokens alone).",
        "bucket",
        choices=("bucket", "renormalised"),
    )
    max_prompt_length: int | None = kept_setting("Prompts keep their last tokens.")
    max_length: int | None = refused(None, _LENGTH)
    chat_template_path: str | None = refused(None, f"set chat_template of {_TOKENIZER}")
    eos_token: str | None = refused(None, f"set eos_token of {_TOKENIZER}")
    pad_token: str | None = refused(None, f"set pad_token of {_TOKENIZER}")
    dataset_num_proc: int | None = refused(None, "prompts are encoded as they are used")
    train_sampling_strategy: str = refused(
        "random", "shuffle_dataset orders the prompts, and False keeps the data's order"
    )
    vllm_structured_outputs_regex: str | None = setting(
        "A regular expression that responses match: a response_format, by TRL's name.", None
    )
    use_vllm: bool = idle(False, _ENGINE)
    vllm_mode: str = idle("colocate", _ENGINE)
    vllm_model_impl: str = idle("vllm", _ENGINE)
    vllm_enable_sleep_mode: bool = idle(False, "rollout_sleep frees the engine's memory")
    vllm_server_base_url: str | None = idle(None, _ENGINE)
    vllm_server_host: str = idle("0.0.0.0", _ENGINE)
    vllm_server_port: int = idle(8000, _ENGINE)
    vllm_server_timeout: float = idle(240.0, _ENGINE)
    vllm_group_port: int = idle(51216, _ENGINE)
    vllm_gpu_memory_utilization: float = idle(
        0.3, "rollout_kv_cache_gib bounds the engine's memory"
    )
    vllm_max_model_length: int | None = idle(
        None, "the model's context bounds prompts with their responses"
    )
    vllm_tensor_parallel_size: int = idle(1, _ENGINE)
    use_transformers_continuous_batching: bool = idle(False, _BATCHES)
    transformers_continuous_batching_config: dict | str | None = idle(
        None, "rollout_slots and rollout_kv_cache_gib bound the engine's batch and memory"
    )
    use_transformers_paged: bool = idle(False, _BATCHES)
    cache_implementation: str | None = idle(None, "the rollout engine has a cache of its own")
    ds3_gather_for_generation: bool = refused(True, "use FSDP2 in place of DeepSpeed")
    log_multimodal: bool = refused(True, "there are no images to log")

    _VALID_DICT_FIELDS = [  # noqa: RUF012 - not a field
        *SupervisedArguments._VALID_DICT_FIELDS,
        "generation_kwargs",
        "chat_template_kwargs",
        "teacher_model_init_kwargs",
    ]

    compares: ClassVar[bool] = True  # whether advantages compare the responses to a prompt

    def __post_init__(self) -> None:
        if self.compares and reads_best_metric(self) and self.metric_for_best_model is None:
            self.metric_for_best_model = "reward"  # transformers' default would be the loss
        super().__post_init__()
        if self.compares and self.metric_for_best_model in ("loss", "eval_loss"):
            warnings.warn(
                f"eval_loss (metric_for_best_model={self.metric_for_best_model!r}) is no measure "
                "of a policy: advantages of a group sum to 0, so that it is little more than "
                "rounding; name 'eval_reward'",
                stacklevel=4,
            )
        check_refused(self)
        if self.response_format is not None and self.vllm_structured_outputs_regex is not None:
            raise ValueError(
                "response_format and vllm_structured_outputs_regex say what responses look like: "
                "set one of the two"
            )
        if "teacher_kl_coef" not in refusals(self):
            unread = self.teachers_unread()
            if self.policy_support != SAMPLED:
                unread.append(("reference_support", "policy_support is not 'sampled'"))
            warn_of_unread_settings(self, unread, stacklevel=4)
        if self.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size would break groups of num_generations responses: leave it "
                "out, and lower per_device_train_batch_size"
            )
        if self.kl_coef == 0:
            self.refuse_reference("beta=0.0")
        if self.compares and self.num_generations < 2:
            raise ValueError(
                "num_generations must be at least 2, as advantages compare the responses to a "
                f"prompt, got {self.num_generations}"
            )
        self._settle_batches()
        per_process = self.per_device_train_batch_size * int(self.steps_per_generation or 1)
        if self.dynamic_sampling_rounds and per_process % self.num_generations:
            raise ValueError(
                "dynamic_sampling_rounds replaces whole groups, and per_device_train_batch_size × "
                f"steps_per_generation ({per_process}) is no multiple of num_generations "
                f"({self.num_generations}): make it one"
            )

    def _settle_batches(self) -> None:
        """Sets ``generation_batch_size`` from ``steps_per_generation``, or the other way round."""
        batch = self.per_device_train_batch_size * self.world_size
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            if self.generation_batch_size != batch * self.steps_per_generation:
                raise ValueError(
                    "generation_batch_size and steps_per_generation can not both be set: leave one "
                    "of them out"
                )
        elif self.generation_batch_size is not None:
            if self.generation_batch_size % batch:
                raise ValueError(
                    f"generation_batch_size ({self.generation_batch_size}) must be divisible by "
                    f"the batch of all processes ({batch})"
                )
            self.steps_per_generation = self.generation_batch_size // batch
        else:
            if self.steps_per_generation is None:
                self.steps_per_generation = self.gradient_accumulation_steps
            self.generation_batch_size = batch * self.steps_per_generation
        if self.generation_batch_size % self.num_generations:
            raise ValueError(
                f"generation_batch_size ({self.generation_batch_size}) must be divisible by "
                f"num_generations ({self.num_generations}), so that it holds whole groups: set "
                "num_generations, per_device_train_batch_size or gradient_accumulation_steps so"
            )
        generations = self.num_generations_eval or self.num_generations
        if self.do_eval and str(getattr(self.eval_strategy, "value", self.eval_strategy)) != "no":
            size = self.per_device_eval_batch_size * self.world_size
            if size % generations:
                raise ValueError(
                    f"per_device_eval_batch_size × processes ({size}) must be divisible by "
                    f"num_generations_eval ({generations}), so that it holds whole groups"
                )

    @property
    def kl_coef(self) -> float:
        """The coefficient of the KL to the reference model; 0: there is none."""
        return self.beta

    @property
    def loss_temperature(self) -> float:
        """T of the distributions that the loss compares."""
        return self.temperature

    @property
    def teacher_settings(self) -> TeacherSettings:
        """How much is learned of teachers, and by which divergence."""
        return TeacherSettings(
            self.teacher_kl_coef,
            self.teacher_beta,
            self.loss_temperature,
            None,
            self.micro_batch_tokens,
            self.on_nonfinite == "raise",
        )

    @property
    def penalties(self) -> Penalties:
        """What is taken off the rewards of responses that do not end."""
        return Penalties.of(
            self.missing_eos_penalty,
            self.overlong_buffer,
            self.overlong_penalty,
            self.max_completion_length,
            "max_completion_length",
        )

    @property
    def generation_arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``model.generate`` by the settings."""
        arguments: dict[str, Any] = {
            "max_new_tokens": self.max_completion_length,
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "repetition_penalty": self.repetition_penalty,
        }
        if self.min_p is not None:
            arguments["min_p"] = self.min_p
        if self.response_format is not None:
            arguments["response_format"] = self.response_format
        if self.vllm_structured_outputs_regex is not None:
            arguments["response_format"] = {"regex": self.vllm_structured_outputs_regex}
        return {**arguments, **parse_json("generation_kwargs", self.generation_kwargs)}
